"""What the roles bring to a host, and which of its own files they may change: `down` puts those back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

from ruamel.yaml import YAML

from clusterctl.packages.os_packages import packages_of
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import COMPUTE, CONTROLLER, LOGIN
from clusterctl.util.assets import asset

_ANYWHERE: Final = ("common", "openmpi", "repositories", "time", "tuning")
_WITH_SLURM: Final = {
    CONTROLLER: ("munge", "mariadb", "slurmdbd", "slurmctld"),
    COMPUTE: ("munge", "login"),  # both give way to the controller's slurm.conf
    LOGIN: ("munge", "login"),
}

_BROUGHT_ANYWHERE: Final = ("common", "openmpi", "job_env")
_BROUGHT_WITH_SLURM: Final = {
    CONTROLLER: ("munge", "mariadb", "slurmdbd", "slurmctld"),
    COMPUTE: ("munge", "slurmd"),
    LOGIN: ("munge", "login"),
}


def role_packages(spec: ClusterSpec, roles: Sequence[str], distribution: Distribution) -> tuple[str, ...]:
    """Those that every host of these roles gets.

    More may come for what the host is or has: EPEL, a clock that nobody keeps, SELinux, cards, an NFS folder.
    """
    ansible = [*_BROUGHT_ANYWHERE]
    for role in roles:
        ansible += _BROUGHT_WITH_SLURM[role] if spec.has_slurm else ("mpi_ssh",)
    found = packages_of(ansible, distribution, openhpc=spec.software.slurm == "openhpc")
    return (*found, "apptainer") if spec.software.apptainer else found


def role_files(spec: ClusterSpec, roles: Sequence[str]) -> frozenset[str]:
    """Patterns of the files that may be changed on a host of these roles, as the roles declare them."""
    ansible = [*_ANYWHERE]
    for role in roles if spec.has_slurm else ():
        ansible += _WITH_SLURM[role]
    return frozenset(pattern for name in ansible for pattern in _declared(name))


@cache
def _declared(role: str) -> tuple[str, ...]:
    """The ``files`` of a role's meta/touches.yml, but for those that have its or our name."""
    path = asset("ansible") / "roles" / role / "meta" / "touches.yml"
    touches = YAML(typ="safe").load(path)[f"{role}_touches"]
    return tuple(_plain(touches.get("files", ())))


def _plain(files: Sequence[str]) -> Iterator[str]:
    for path in files:
        if path.startswith("/etc/") and "clusterctl" not in path and "{{" not in path:
            yield path
