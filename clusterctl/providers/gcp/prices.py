"""What things at Google cost, in USD an hour, by a dated table. Not known is None, never a guess."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from ruamel.yaml import YAML

from clusterctl.spec import gcp_machines
from clusterctl.spec.units import GIB_MIB

HOURS_A_MONTH: Final = 730.0  # as Google counts
LOCAL_SSD_GIB: Final = 375

Usd = Annotated[float, Field(ge=0)]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Shares(_Row):
    vcpu: Usd
    gib: Usd


class _Family(_Shares):
    spot: _Shares | None = None


class _Gpu(_Row):
    each: Usd
    spot: Usd | None = None


class _Nat(_Row):
    machine: Usd
    gcp_machines: int


class Table(_Row):
    """The table of one region on one day."""

    date: str
    region: str
    families: Mapping[str, _Family]
    gpus: Mapping[str, _Gpu]
    gcp_machines: Mapping[str, Usd]
    disks: Mapping[str, Usd]
    local_ssd: Usd
    filestore: Mapping[str, Usd]
    nat: _Nat
    address: Usd


@cache
def table() -> Table:
    """The built-in table."""
    text = (files("clusterctl.providers.gcp") / "data" / "prices.yaml").read_text()
    document: dict[str, Any] = YAML(typ="safe", pure=True).load(text)
    return Table.model_validate({**document, "date": str(document["date"])})


def priced_on() -> str:
    """The date of the table."""
    return table().date


def caveat(region: str) -> str:
    """What must be known of its prices in this region; "" if nothing."""
    known = table().region
    return "" if region == known else f"prices are Google's list prices of {known}; those of {region} differ"


def of_disk(kind: str, gib: float) -> float | None:
    """One persistent disk."""
    rate = table().disks.get(kind)
    return None if rate is None else of_gib(rate, gib)


def of_filestore(tier: str, gib: float) -> float | None:
    """A Filestore instance."""
    rate = table().filestore.get(tier)
    return None if rate is None else of_gib(rate, gib)


def of_nat(hosts: int) -> float:
    """Cloud NAT for this many hosts, with the one address that it takes."""
    known = table()
    return min(hosts, known.nat.gcp_machines) * known.nat.machine + known.address


def of_gib(usd_a_month: float, gib: float) -> float:
    """An hour of what is charged by GiB and month."""
    return usd_a_month * gib / HOURS_A_MONTH


def total(parts: Iterable[float | None]) -> float | None:
    """The sum; not known as soon as one part is not."""
    known = 0.0
    for part in parts:
        if part is None:
            return None
        known += part
    return known


def of_machine(name: str, gpus: Mapping[str, int], *, spot: bool, own: Mapping[str, float]) -> float | None:
    """A machine without its disks. ``gpus``: those that are added to it, by Google's name; ``own`` prices of
    machine types, which have their GPUs in them, come before the table's.
    """
    known, machine = table(), gcp_machines.machine(name)
    if name in own:
        return own[name]
    if not spot and name in known.gcp_machines:
        return known.gcp_machines[name]
    family = known.families.get(machine.family) if machine else None
    shares = family.spot if family and spot else family
    if machine is None or shares is None:
        return None
    bundled = {machine.accelerator: machine.gpu.count} if machine.gpu and machine.accelerator else {}
    parts = [machine.vcpus * shares.vcpu, machine.memory_mib / GIB_MIB * shares.gib]
    return total([*parts, *(_of_gpus(kind, n, spot=spot) for kind, n in {**bundled, **gpus}.items())])


def of_local_ssds(count: int, *, spot: bool) -> float | None:
    """Local disks that are added to a machine; what they cost with a spot machine is in no table."""
    if count == 0:
        return 0.0
    return None if spot else of_gib(table().local_ssd, count * LOCAL_SSD_GIB)


def _of_gpus(kind: str, count: int, *, spot: bool) -> float | None:
    gpu = table().gpus.get(kind)
    each = (gpu.spot if spot else gpu.each) if gpu else None
    return None if each is None else count * each
