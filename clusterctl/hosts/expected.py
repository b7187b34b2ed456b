"""What a spec needs of each host: ports, accounts, room, GPUs, and what to ask of a host to know of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from clusterctl.hosts.probe import ProbeRequest
from clusterctl.hosts.roles import role_files, role_packages, role_ports, role_units, wanted_accounts
from clusterctl.spec.distributions import releases
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import ADMIN_USER
from clusterctl.state.inventory import Host

CLAIM: Final = "/etc/clusterctl/cluster.json"  # the cluster that the host belongs to; JSON
FABRIC_MANAGER: Final = "nvidia-fabricmanager"


@dataclass(frozen=True, slots=True)
class Expected:
    """What the cluster needs of a host.

    ``ports`` -> the daemon of ours that will listen there. ``accounts``: name -> number. ``gpus``: how many,
    None where whatever is there is taken. ``address``: where the other hosts reach it. ``free_mib``: path ->
    room that is needed there. ``brings``: the units that the roles will start on a host that is not the
    cluster's yet; what somebody already runs of these would be taken over. ``driver``: the kind that `up`
    installs, of this ``branch``; "" where it installs none. ``here``:
    it is the machine that one is on. ``cgroups``: Slurm is to keep jobs in control groups there.
    """

    address: str
    ports: Mapping[int, str]
    accounts: Mapping[str, int]
    free_mib: Mapping[str, int]
    gpus: int | None = None
    brings: frozenset[str] = frozenset()
    driver: str = ""
    branch: str | None = None
    here: bool = False
    cgroups: bool = False


# MiB: Slurm, MariaDB, Open MPI and the Python of jobs, with what unpacks them; and once they are there.
_BEFORE: Final = {"/": 512, "/usr": 3072, "/var": 2048, "/opt": 1024, "/tmp": 256}  # noqa: S108
_AFTER: Final = {"/": 128, "/var": 256, "/tmp": 64}  # noqa: S108
_CUPY: Final = {"/opt": 7168}  # with CUDA's libraries, and their wheels until they are unpacked


def host_facts_request(spec: ClusterSpec, members: Sequence[Host]) -> ProbeRequest:
    """What to ask of every host before it is part of the cluster, and for `doctor`."""
    roles = sorted({one.roles for one in members})
    ports = {port for group in roles for port in role_ports(spec, group)}
    packages = {name for one in releases() for group in roles for name in role_packages(spec, group, one)}
    request: dict[str, Sequence[str | int]] = {
        "names": [member.name for member in members],  # to resolve
        "ports": sorted(ports),
        "paths": [*_BEFORE],  # whose room counts
        "units": sorted({FABRIC_MANAGER}.union(*(role_units(spec, group) for group in roles))),
        "accounts": [
            *wanted_accounts(spec),
            *([ADMIN_USER] if spec.scheduler == "slurm" else ()),
        ],
        "uids": [*wanted_accounts(spec).values()],
        "files": sorted({file for group in roles for file in role_files(spec, group)}),  # are they there
        "texts": [CLAIM],  # whose first bytes are read
        "packages": sorted(packages),
    }
    return ProbeRequest(host=request, node=False)


def expected(
    spec: ClusterSpec, members: Sequence[Host], *, installed: Collection[str]
) -> Mapping[str, Expected]:
    """Host -> what the spec needs of it; where all is ``installed`` already that takes less room."""
    room = {True: dict.fromkeys(_BEFORE, 0) | _AFTER, False: dict(_BEFORE)}
    gpus = {
        host: partition.gpus.count
        for partition in spec.partitions
        if partition.gpus
        for host in spec.node_names(partition)
    }
    cupy, nvidia = set(gpus) - set(installed) if spec.software.cupy else (), spec.software.nvidia
    cgroups = spec.scheduler == "slurm" and not spec.provider.shares_kernel
    here = [name for name, machine in spec.provider.machines.items() if machine.is_here]
    return {
        member.name: Expected(
            address=member.address,
            ports=role_ports(spec, member.roles),
            accounts=wanted_accounts(spec),
            free_mib=room[member.name in installed] | (_CUPY if member.name in cupy else {}),
            gpus=gpus.get(member.name),
            brings=frozenset() if member.name in installed else role_units(spec, member.roles),
            driver=nvidia.driver if nvidia.has_driver else "",
            branch=nvidia.of_branch,
            here=member.name in here,
            cgroups=cgroups and member.is_compute,
        )
        for member in members
    }
