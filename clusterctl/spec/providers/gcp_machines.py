"""Machine types of Google Cloud: processors, memory, GPUs, disks, and allowed combinations.

data/google.toml has their properties as of its date. A spec may describe other machine types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from clusterctl.errors import BadValueError
from clusterctl.spec.base import Loc, SizeMib, SpecFault, SpecModel, either
from clusterctl.spec.common import Gpus
from clusterctl.spec.names import DATA, did_you_mean
from clusterctl.spec.units import GIB_MIB, shown
from clusterctl.util.assets import read_table

DiskType = Literal["pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced"]


class MachineFacts(SpecModel):
    """A machine type that clusterctl does not know, or knows otherwise than Google."""

    vcpus: Annotated[int, Field(ge=1, strict=True)] = Field(
        description="its processors, as Google counts them"
    )
    memory: SizeMib = Field(description="its memory")
    gpus: Gpus | None = Field(None, description="the GPUs that it includes")
    disk_types: tuple[DiskType, ...] = Field(
        (), description="types of its disks, the default first; by default those of its family"
    )
    bundled_ssds: Annotated[int, Field(ge=0, strict=True)] | None = Field(
        None, description="number of local disks that it includes"
    )


# The default machine type of nodes without GPUs.
PLAIN: Final = "e2-standard-4"
# Processors per GPU of the N1 machine type that is chosen for attached GPUs.
_VCPUS_BESIDE_A_GPU: Final = 4


@dataclass(frozen=True, slots=True)
class GcpMachineType:
    """A machine type.

    gpu: type and number of the machine's GPUs. The type is clusterctl's short name.
    accelerator: Google's name of the GPU type.
    guest_accelerator: whether the GPUs are added to the machine type, instead of included in the
        type.
    bundled_ssds: the number of local disks that the machine type includes.
    only: names of the settings, such as ``spot``, without which Google does not offer this type.
        Empty: also on demand.
    reservation_bound: whether instances from a reservation need the provisioning model
        RESERVATION_BOUND.
    arm: whether its processors are Arm's.
    """

    name: str
    family: str
    vcpus: int
    memory_mib: int
    gpu: Gpus | None = None
    accelerator: str | None = None
    guest_accelerator: bool = False
    bundled_ssds: int = 0
    disk_types: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    reservation_bound: bool = False
    arm: bool = False

    @property
    def is_limited_by_gpu(self) -> bool:
        """Whether Google limits this type by quotas of GPUs alone. "To create A4X Max, A4X, A4, A3,
        G4, and G2 VMs, you only need to have the required [...] GPU quotas for the VM type. You
        don't need to request CPU quotas." The same is said of A2 (cloud.google.com/compute/
        resource-usage, 2026-09).
        """
        return self.gpu is not None and not self.guest_accelerator


@cache
def data() -> Mapping[str, Any]:
    return read_table(DATA / "google.toml", dict[str, Any])


@cache
def machines() -> Mapping[str, GcpMachineType]:
    """Return name -> machine type, without attached GPUs. In a family, smaller types come first."""
    return {name: _machine(name, row) for name, row in _rows().items()}


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    rows: dict[str, Mapping[str, Any]] = {}
    for series, facts in data()["series"].items():
        for vcpus in facts["vcpus"]:
            gib = facts["gib"] * vcpus
            row = {"vcpus": vcpus, "gib": int(gib) if facts.get("whole_gib") else gib}
            rows[f"{series}-{vcpus}"] = row
            if ssds := facts.get("lssd", {}).get(str(vcpus)):
                rows[f"{series}-{vcpus}-lssd"] = {**row, "bundled_ssds": ssds}
    return {**rows, **data()["special"], **data()["with_gpus"]}


def with_stated(stated: Mapping[str, MachineFacts]) -> Mapping[str, GcpMachineType]:
    """Return name -> machine type, also of those that a spec describes."""
    return {**machines(), **{name: _stated_machine(name, facts) for name, facts in stated.items()}}


def _stated_machine(name: str, facts: MachineFacts) -> GcpMachineType:
    known_row = _rows().get(name, {})
    row: dict[str, Any] = {
        **known_row,
        "vcpus": facts.vcpus or 0,
        "gib": (facts.memory or 0) / GIB_MIB,
    }
    if facts.bundled_ssds is not None:
        row["bundled_ssds"] = facts.bundled_ssds
    if facts.gpus and facts.gpus.count and (gpu := gpu_type(facts.gpus.type)):
        row |= {"gpu": gpu, "count": facts.gpus.count}
    if facts.disk_types:
        row["disk_types"] = facts.disk_types
    return _machine(name, row)


def _machine(name: str, row: Mapping[str, Any]) -> GcpMachineType:
    family = name.partition("-")[0]
    families = data()["families"]
    facts = {**families.get(family, families["unknown"]), **row}
    return GcpMachineType(
        name,
        family,
        facts["vcpus"],
        int(facts["gib"] * GIB_MIB),
        gpu=Gpus(type=row["gpu"], count=row["count"]) if "gpu" in row else None,
        accelerator=_google(row["gpu"]) if "gpu" in row else None,
        bundled_ssds=facts.get("bundled_ssds", 0),
        disk_types=tuple(facts["disk_types"]),
        only=tuple(facts.get("only", ())),
        reservation_bound=facts.get("reservation_bound", False),
        arm=facts.get("arm", False),
    )


def gpu_type(name: str) -> str | None:
    """Return clusterctl's short name of a GPU model, if the name is known.

    name: clusterctl's or Google's name of the model.
    """
    by_google = {facts["google"]: short for short, facts in data()["gpus"].items()}
    return name if name in data()["gpus"] else by_google.get(name)


def counts(gpu: str) -> tuple[int, ...]:
    """Return the allowed numbers of GPUs per node, such as 1, 2, 4. ``gpu``: clusterctl's model
    name.
    """
    attached = {int(count) for count in data()["attached"].get(gpu, {})}
    with_gpus = (machine.gpu for machine in machines().values() if machine.gpu)
    bundled = {gpus.count for gpus in with_gpus if gpus.type == gpu}
    return tuple(sorted(attached | bundled))


def most_vcpus(gpus: Gpus) -> int | None:
    """Return the maximum of vCPUs of an N1 machine with these GPUs. None: N1 can't have these
    GPUs.
    """
    limit: int | None = data()["attached"].get(gpus.type, {}).get(str(gpus.count))
    return limit


def default_machine(gpus: Gpus | None) -> GcpMachineType:
    """Return the smallest machine type with these GPUs, or a small machine type if ``gpus`` is
    None.

    Raises:
        ValueError: no machine type has these GPUs. The checks of a spec reject such GPUs earlier.
    """
    if gpus is None:
        return machines()[PLAIN]
    if most_vcpus(gpus) is not None:
        return with_added(machines()[f"n1-standard-{_VCPUS_BESIDE_A_GPU * gpus.count}"], gpus)
    for machine in machines().values():
        if machine.gpu == gpus:
            return machine
    raise BadValueError("gpu-count", f"no machine type has {gpus}")


def with_added(machine: GcpMachineType, gpus: Gpus) -> GcpMachineType:
    """Return ``machine``, which must be an N1 machine type, with these GPUs attached."""
    return replace(machine, gpu=gpus, accelerator=_google(gpus.type), guest_accelerator=True)


def unknown_machine(name: str, at: Loc, machine_types: Mapping[str, GcpMachineType]) -> SpecFault:
    """Return a fault about a machine type that neither clusterctl nor the spec knows. Google may
    offer it.
    """
    describe = (
        f"provider.machine_types: {{{name}: {{vcpus: N, memory: NGiB}}}}, "
        f"as `gcloud compute machine-types describe {name} --zone ZONE` shows"
    )
    guess = did_you_mean(name, machine_types)
    hint = f"{guess} If Google offers it: {describe}" if guess else describe
    message = f"clusterctl does not know the machine type {shown(name)}"
    return SpecFault("unknown-machine-type", at, message, hint)


def unknown_gpu(name: str, at: Loc) -> SpecFault:
    """Return a fault about a GPU model that clusterctl does not know. Google may offer it."""
    names = tuple(data()["gpus"])
    hint = did_you_mean(name, names) or f"use {either(names)}"
    message = f"clusterctl does not know the GPU {shown(name)} on Google Cloud"
    return SpecFault("unknown-gpu", at, message, hint)


def _google(gpu: str) -> str:
    return str(data()["gpus"][gpu]["google"])
