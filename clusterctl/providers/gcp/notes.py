"""What is to be said of instances before they are made, and what jobs on them are told."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from clusterctl.hosts.checks import Finding, no_cgroups
from clusterctl.spec import gcp
from clusterctl.spec.base import Model
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.gcp_nodes import Machine
from clusterctl.spec.models import ClusterSpec
from clusterctl.util.assets import table

_NAME_PARTS: Final = 2  # of a machine type, that name its family: a3-highgpu


class _JobsData(Model):
    gpu: Mapping[str, str]
    gvnic: Mapping[str, str]
    notes: Mapping[str, str]


def notes(spec: ClusterSpec) -> tuple[str, ...]:
    """What `plan` and `up` say of a cluster."""
    partitions = (gcp.machine_of(spec, partition) for partition in spec.partitions)
    found = [*map(network_note, (gcp.controller_machine(spec), *partitions))]
    if gcp.settings_of(spec).shared_disk and not gcp.shared_disk(spec):
        found.append("provider.shared_disk is not used: it is for storage.keep, without filestore")
    if gcp.settings_of(spec).bucket and spec.provider.expected_release(spec) == "rocky-10":
        found.append(
            "/bucket may fail on Rocky Linux 10, which refuses the key that gcsfuse was signed with in 2025 "
            "(github.com/GoogleCloudPlatform/gcsfuse/issues/3874): take images of Rocky Linux 9 if it does"
        )
    return tuple(dict.fromkeys(filter(None, found)))


def ahead(spec: ClusterSpec, made: Collection[str]) -> Iterator[str]:
    """What `plan` says of the hosts that are to be made, and `up` once it has looked at them."""
    release = spec.provider.expected_release(spec)
    if made and spec.scheduler == "slurm" and release and not distribution_of(release).cgroup_v2:
        yield str(no_cgroups("the nodes"))
    for partition in spec.partitions:
        if not set(spec.node_names(partition)).isdisjoint(made):
            machine = gcp.machine_of(spec, partition)
            yield from map(str, unlinked(spec, f"partition {partition.name}", machine))


def unlinked(spec: ClusterSpec, who: str, machine: Machine) -> Iterator[Finding]:
    """GPUs that may need a fabric manager, which then is left to their image."""
    if machine.has_nvswitches and not spec.software.nvidia.has_driver:
        why = (
            f"NVSwitches link those of {machine.name}. Where instances see these, programs end with CUDA "
            "error 802, unless the image has a fabric manager of its driver's version"
        )
        fix = "write software: {nvidia: {driver: open}}, which adds one where it is needed; or try one node"
        yield Finding(who, "warning", "fabric-manager", "GPUs may need a fabric manager", why, fix)


def job_environment(machine: Machine, *, gvnic: bool) -> dict[str, str]:
    """The variables of all jobs on such a machine; none where there is no GPU."""
    if machine.gpu is None:
        return {}
    return {**_jobs_data().gpu, **(_jobs_data().gvnic if gvnic else {})}


def network_note(machine: Machine) -> str | None:
    """What its network could do beyond plain sockets, and what that takes."""
    family = "-".join(machine.name.split("-")[:_NAME_PARTS])
    said = _jobs_data().notes.get(family)
    return f"{family}: jobs talk over gVNIC's sockets; {said} (docs/gcp.md)" if said else None


def _jobs_data() -> _JobsData:
    return table(Path(__file__).with_name("data") / "jobs.yaml", _JobsData)
