"""What a spec expects of its hosts, wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from clusterctl.distributions import distribution_of
from clusterctl.doctor.facts import Asked
from clusterctl.doctor.judge import Expected
from clusterctl.errors import ProvisionError
from clusterctl.inventory import CONTROLLER, PORTS
from clusterctl.spec import ClusterSpec

# MiB: Slurm, MariaDB, Open MPI and the Python of jobs, with what unpacks them; and once they are there.
_BEFORE: Final = {"/": 512, "/usr": 3072, "/var": 2048, "/opt": 1024, "/tmp": 256}  # noqa: S108
_AFTER: Final = {"/": 128, "/var": 256, "/tmp": 64}  # noqa: S108
_SLURM: Final = ("slurmctld", "slurmd", "slurmdbd", "munge", "mariadb")
_UNITS: Final = ("firewalld", "ufw", "nftables", "chronyd", "chrony", *_SLURM)


class Member(Protocol):
    """A host, as an inventory or a spec has it."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def roles(self) -> tuple[str, ...]: ...


def asked(spec: ClusterSpec, members: Sequence[Member]) -> Asked:
    """What to look at on every host."""
    return Asked(
        names=tuple(member.name for member in members),
        ports=tuple(sorted({port for ports in PORTS.values() for port in ports})),
        paths=tuple(_BEFORE),
        units=_UNITS,
        accounts=tuple(user.name for user in spec.users),
        uids=tuple(user.uid for user in spec.users),
    )


def expected(spec: ClusterSpec, members: Sequence[Member], *, installed: bool) -> Mapping[str, Expected]:
    """Host -> what the spec needs of it; where all is ``installed`` that takes less room."""
    free_mib = dict.fromkeys(_BEFORE, 0) | (_AFTER if installed else _BEFORE)
    gpus = {
        host: partition.gpus.count
        for partition in spec.partitions
        if partition.gpus
        for host in spec.node_names(partition)
    }
    return {
        member.name: Expected(
            address=member.address,
            ports={port: daemon for role in member.roles for port, daemon in PORTS.get(role, {}).items()},
            accounts={user.name: user.uid for user in spec.users},
            free_mib=free_mib,
            gpus=gpus.get(member.name),
            refusal=_refusal,
            brings=frozenset() if installed else _brought(spec, member),
        )
        for member in members
    }


def _brought(spec: ClusterSpec, member: Member) -> frozenset[str]:
    """The daemons that the roles bring to such a host; without a scheduler none of these."""
    if not spec.has_slurm:
        return frozenset()
    leads = CONTROLLER in member.roles
    return frozenset(_SLURM) if leads else frozenset({"slurmd", "munge"})


def _refusal(distribution: str, version: str) -> str:
    """Why that distribution can't be configured; "" if it can."""
    try:
        distribution_of(f"{distribution}-{version}")
    except ProvisionError as exc:
        return exc.why
    return ""
