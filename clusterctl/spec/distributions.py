"""The distributions that clusterctl configures, from data/distributions.toml, and their Slurm
releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from clusterctl.errors import Failure, ProvisionError
from clusterctl.spec.names import DATA
from clusterctl.util.assets import read_table

# The distribution of new local nodes.
DEFAULT: Final = "debian-13"
# The distribution of hosts recorded by an older clusterctl, which did not store the distribution.
BEFORE: Final = "debian-12"
_OS_RELEASE: Final = Path("/etc/os-release")
# The distribution of a host that has not been probed yet.
UNSEEN: Final = ""

Family = Literal["Debian", "RedHat"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """A release of a Linux distribution, such as Debian 13.

    python: path of the interpreter that creates the job environment.
    openmpi_conf: Open MPI's parameters. mpi_module: environment module of Open MPI; None: it needs
        no module. Both are of the distribution's package: a host may have NVIDIA's, with another
        prefix and no module.
    glibc_minor: the x of glibc 2.x.
    slurm: the release of Slurm in the distribution's packages. None: it changes with updates.
    oldest_cuda: the oldest release of CUDA in NVIDIA's repository. 0: all that a spec can name.
    slurm_flaws: the known vulnerabilities of the distribution's Slurm, in words. Empty: nothing is
        known.
    """

    release: str
    title: str
    family: Family
    python: str
    glibc_minor: int
    openmpi_conf: str
    mariadb_conf: str
    mariadb_socket: str
    mpi_module: str | None = None
    slurm: str | None = None
    oldest_cuda: int = 0
    slurm_flaws: str = ""

    @property
    def python_version(self) -> str:
        """The Python version of the job environment: ``3.11``."""
        return self.python.removeprefix("/usr/bin/python")


def distribution_of(name: str) -> Distribution:
    """Return a distribution. ``name``: the ID and VERSION_ID in os-release, such as ``rocky-9.6``.

    Raises:
        ProvisionError: clusterctl can't configure the distribution.
    """
    rows, by_release = _known()
    for short in (name, name.partition(".")[0]):
        if reason := rows["refused"].get(short):
            raise _unknown(name, reason)
        release = rows["same"].get(short, short)
        if release in by_release:
            return by_release[release]
    raise _unknown(name, "clusterctl does not know the names of its packages")


def common_distribution(hosts: Mapping[str, str]) -> Distribution:
    """Return the distribution that all hosts share, because Slurm, Open MPI and Python must be the
    same.

    hosts: host name -> ID and VERSION_ID such as ``rocky-9.6``, the controller first.

    Raises:
        ProvisionError: hosts have different or unsupported releases; ``failures`` has an entry for
            each host.
    """
    failures: list[Failure] = []
    by_host: dict[str, Distribution] = {}
    for host, name in hosts.items():
        try:
            by_host[host] = distribution_of(name)
        except ProvisionError as exc:
            failures.append(Failure(exc.code, exc.cause, host, fix=exc.fix, about=exc.about))
    if not failures:
        failures = differing(by_host)
    if failures:
        raise ProvisionError.of_hosts(
            "{hosts} can't be in this cluster", failures, code="host-unfit", about="distribution"
        )
    return next(iter(by_host.values()))


def differing(hosts: Mapping[str, Distribution]) -> list[Failure]:
    """Return a failure for each host with another distribution than the controller, the first
    host.
    """
    leader, first = next(iter(hosts.items()))
    differs = f"but {leader} has {first.title} with another Slurm and Open MPI"
    fix = "use hosts with the same distribution and release, or create two clusters"
    return [
        Failure(
            "host-unfit",
            f"the host has {distribution.title}, {differs}",
            host,
            fix=fix,
            about="distributions-differ",
        )
        for host, distribution in hosts.items()
        if distribution != first
    ]


def redhat_release(os_release: Path = _OS_RELEASE) -> str | None:
    """Return this machine's distribution, such as ``rocky-9``, if it belongs to the Red Hat
    family.
    """
    values = _read(os_release)
    name = f"{values.get('ID', '')}-{values.get('VERSION_ID', '').partition('.')[0]}"
    try:
        family = distribution_of(name).family
    except ProvisionError:
        return None
    return name if family == "RedHat" else None


def of_local_nodes() -> str:
    """Return the distribution for local nodes: this machine's, if of the Red Hat family, otherwise
    Debian.
    """
    return redhat_release() or DEFAULT


def _read(os_release: Path) -> Mapping[str, str]:
    try:
        lines = os_release.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {key: value.strip("\"' ") for key, _, value in (line.partition("=") for line in lines)}


def releases() -> tuple[Distribution, ...]:
    return tuple(_known()[1].values())


def supported() -> tuple[str, ...]:
    return tuple(distribution.title for distribution in releases())


@cache
def _known() -> tuple[Mapping[str, Any], Mapping[str, Distribution]]:
    rows = read_table(DATA / "distributions.toml", dict[str, Any])
    return rows, {
        release: Distribution(release, **{**rows["families"][values["family"]], **values})
        for release, values in rows["releases"].items()
    }


def _unknown(name: str, reason: str) -> ProvisionError:
    return ProvisionError(
        f"clusterctl can't configure {name}",
        code="host-unfit",
        about="distribution-unknown",
        why=reason,
        fix=f"install one of these on the host: {', '.join(supported())}",
    )


class SoftwareRefusal(NamedTuple):
    """Why a cluster can't have software that its spec names: code, error message, cause and fix."""

    code: str
    what: str
    why: str
    fix: str


def refuse_slurm_source(origin: str, distribution: Distribution) -> SoftwareRefusal | None:
    """Return the reason why hosts can't have Slurm from `software.slurm.from`. None: they can."""
    if origin == "distribution" or distribution.family == "RedHat":
        return None
    return SoftwareRefusal(
        "slurm-source",
        f"{distribution.title} can't have Slurm from {origin}",
        "only Rocky Linux and RHEL can have Slurm from elsewhere than the distribution",
        "remove software.slurm",
    )


def refuse_toolkit(toolkit: str | None, distribution: Distribution) -> SoftwareRefusal | None:
    """Return the reason why hosts can't have this version of the CUDA toolkit. None: they may have
    it.
    """
    oldest = distribution.oldest_cuda
    if not toolkit or int(toolkit.partition(".")[0]) >= oldest:
        return None
    return SoftwareRefusal(
        "cuda-toolkit",
        f"{distribution.title} can't have CUDA {toolkit}",
        f"NVIDIA's repository for {distribution.title} has CUDA {oldest} and later",
        f'write toolkit: "{oldest}.0" or later, or remove toolkit',
    )
