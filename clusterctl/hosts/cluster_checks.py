"""What a spec expects of its hosts, wherever they come from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from ipaddress import IPv4Network
from typing import Final, Protocol

from clusterctl.errors import ProvisionError, UsageError
from clusterctl.hosts.checks import FABRIC_MANAGER, Expected
from clusterctl.hosts.report import HostFactsRequest, ProbeRequest
from clusterctl.hosts.roles import role_files, role_packages, role_ports, role_units
from clusterctl.spec.distributions import distribution_of, releases
from clusterctl.spec.models import ClusterSpec

# MiB: Slurm, MariaDB, Open MPI and the Python of jobs, with what unpacks them; and once they are there.
_BEFORE: Final = {"/": 512, "/usr": 3072, "/var": 2048, "/opt": 1024, "/tmp": 256}  # noqa: S108
_AFTER: Final = {"/": 128, "/var": 256, "/tmp": 64}  # noqa: S108
_CUPY: Final = {"/opt": 7168}  # with CUDA's libraries, and their wheels until they are unpacked


class Member(Protocol):
    """A host, as an inventory or a spec has it."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def roles(self) -> tuple[str, ...]: ...


def host_facts_request(spec: ClusterSpec, members: Sequence[Member]) -> ProbeRequest:
    """What to ask of every host before it is part of the cluster, and for `doctor`."""
    roles = sorted({one.roles for one in members})
    ports = {port for group in roles for port in role_ports(spec, group)}
    packages = {name for one in releases() for group in roles for name in role_packages(spec, group, one)}
    request = HostFactsRequest(
        names=tuple(member.name for member in members),
        ports=tuple(sorted(ports)),
        paths=tuple(_BEFORE),
        units=tuple(sorted({FABRIC_MANAGER}.union(*(role_units(spec, group) for group in roles)))),
        accounts=tuple(user.name for user in spec.users),
        uids=tuple(user.uid for user in spec.users),
        files=tuple(sorted({file for group in roles for file in role_files(spec, group)})),
        packages=tuple(sorted(packages)),
    )
    return ProbeRequest(host=request, node=False)


def expected(
    spec: ClusterSpec, members: Sequence[Member], *, installed: Collection[str]
) -> Mapping[str, Expected]:
    """Host -> what the spec needs of it; where all is ``installed`` already that takes less room."""
    room = {True: dict.fromkeys(_BEFORE, 0) | _AFTER, False: dict(_BEFORE)}
    gpus = {
        host: partition.gpus.count
        for partition in spec.partitions
        if partition.gpus
        for host in spec.node_names(partition)
    }
    cupy = set(gpus) - set(installed) if spec.software.cupy else ()
    here = [name for name, machine in spec.provider.machines.items() if machine.is_here]
    return {
        member.name: Expected(
            address=member.address,
            ports=role_ports(spec, member.roles),
            accounts={user.name: user.uid for user in spec.users},
            free_mib=room[member.name in installed] | (_CUPY if member.name in cupy else {}),
            gpus=gpus.get(member.name),
            refusal=_refusal,
            brings=frozenset() if member.name in installed else role_units(spec, member.roles),
            driver=spec.software.nvidia.has_driver,
            here=member.name in here,
            others=_others(spec, member, members),
        )
        for member in members
    }


def _others(spec: ClusterSpec, member: Member, members: Sequence[Member]) -> tuple[IPv4Network, ...]:
    """Where the traffic of the other hosts comes from."""
    network = spec.provider.known_network
    sources = (_source(one.address, network) for one in members if one.name != member.name)
    return tuple(dict.fromkeys(source for source in sources if source is not None))


def _source(address: str, network: IPv4Network | None) -> IPv4Network | None:
    """A host's address, or the cluster's network where the host is reached under another; None: not known."""
    try:
        source = IPv4Network(address)
    except ValueError:  # a name that only a jump host knows
        return network
    return source if network is None or source.subnet_of(network) else network


def reject_unknown_hosts(asked_for: Collection[str], members: Sequence[Member]) -> None:
    """That every host that is asked for is one of the cluster's.

    Raises:
        UsageError: one is not.
    """
    known = [member.name for member in members]
    if strangers := [host for host in asked_for if host not in known]:
        raise UsageError(
            f"the cluster has no host {', '.join(strangers)}",
            why=f"its hosts are {', '.join(known)}",
            fix="name some of these, or none for all",
        )


def _refusal(distribution: str, version: str) -> str:
    """Why that distribution can't be configured; "" if it can."""
    try:
        distribution_of(f"{distribution}-{version}")
    except ProvisionError as exc:
        return exc.why
    return ""
