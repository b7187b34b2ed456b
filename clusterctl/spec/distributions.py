"""Distributions of hosts, by `data/distributions.toml`, and the releases of Slurm that they can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from clusterctl.errors import Failure, ProvisionError
from clusterctl.spec.names import DATA
from clusterctl.util.assets import table

DEFAULT: Final = "debian-13"  # of local nodes that are made now
BEFORE: Final = "debian-12"  # of hosts recorded by a clusterctl that did not say it
_OS_RELEASE: Final = Path("/etc/os-release")
UNSEEN: Final = ""  # of a host that nobody has looked at yet

Family = Literal["Debian", "RedHat"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """One release of a distribution.

    ``python`` is what the job environment is made from; ``mpi_module`` the environment module of Open MPI
    where there is one, and ``mpi_bin`` where its programs lie. ``glibc_minor``: it has glibc 2.x. ``slurm``:
    the release of its packages, where that is known; ``newer_slurm``: others that an image of it can have ->
    their suite; ``slurm_without_pmix``: those of them whose packages have no plugin for PMIx.
    """

    release: str
    title: str
    family: Family
    python: str
    glibc_minor: int
    openmpi_conf: str
    mpi_bin: str
    mariadb_conf: str
    mariadb_socket: str
    mpi_module: str | None = None
    cgroup_v2: bool = True  # whether its Slurm knows them
    slurm: str | None = None
    newer_slurm: Mapping[str, str] = field(default_factory=dict)
    slurm_without_pmix: Sequence[str] = ()

    @property
    def python_version(self) -> str:
        """Of the job environment: ``3.11``."""
        return self.python.removeprefix("/usr/bin/python")


def distribution_of(name: str) -> Distribution:
    """The distribution called so: ID and VERSION_ID of os-release, such as ``rocky-9.6``.

    Raises:
        ProvisionError: clusterctl can't configure it.
    """
    rows, known = _known()
    for short in (name, name.partition(".")[0]):
        if why := rows["refused"].get(short):
            raise _unknown(name, why)
        release = rows["same"].get(short, short)
        if release in known:
            return known[release]
    raise _unknown(name, "the names of its packages are not known here")


def common(hosts: Mapping[str, str]) -> Distribution:
    """The one release that all hosts have: Slurm, Open MPI and Python must be the same on all of them.

    ``hosts``: host name -> the name of its distribution, the controller first.

    Raises:
        ProvisionError: some host has another, or one that can't be configured; one failure a host.
    """
    failures: list[Failure] = []
    found: dict[str, Distribution] = {}
    for host, name in hosts.items():
        try:
            found[host] = distribution_of(name)
        except ProvisionError as exc:
            failures.append(Failure(exc.code, exc.cause, host, fix=exc.fix))
    if not failures:
        failures = differing(found)
    if failures:
        raise ProvisionError.of_hosts(
            "{hosts} can't be part of this cluster", failures, code="distribution-unfit"
        )
    return next(iter(found.values()))


def differing(hosts: Mapping[str, Distribution]) -> list[Failure]:
    """Return a failure for each host whose distribution is not that of the first one."""
    (leader, first), *others = hosts.items()
    differs = f"and {leader} has {first.title}: their Slurm and Open MPI differ"
    fix = "take hosts of one distribution and release, or make two clusters of them"
    return [
        Failure("distributions-differ", f"it has {has.title}, {differs}", host, fix=fix)
        for host, has in others
        if has != first
    ]


def redhat_release(os_release: Path = _OS_RELEASE) -> str | None:
    """The release of this machine, as ``rocky-9``, if it is one of Red Hat's family; None elsewhere."""
    said = _read(os_release)
    name = f"{said.get('ID', '')}-{said.get('VERSION_ID', '').partition('.')[0]}"
    try:
        family = distribution_of(name).family
    except ProvisionError:
        return None
    return name if family == "RedHat" else None


def of_local_nodes() -> str:
    """What local nodes have: on Red Hat's family the release of this machine, else Debian."""
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
    rows = table(DATA / "distributions.toml", dict[str, Any])
    return rows, {
        release: Distribution(release, **{**rows["families"][values["family"]], **values})
        for release, values in rows["releases"].items()
    }


def _unknown(name: str, why: str) -> ProvisionError:
    return ProvisionError(
        f"clusterctl can't configure {name}",
        code="distribution-unknown",
        why=why,
        fix=f"install one of these on the host: {', '.join(supported())}",
    )


# Release of a distribution's `newer_slurm` -> the keys of slurm.conf, in lower case, with which its daemons
# do not start. Source: its RELEASE_NOTES and CHANGELOG.
_REMOVED_KEYS: Final = {
    "26.05": (
        *("controlmachine", "backupcontroller", "controladdr", "backupaddr", "frontendname"),
        *("frontendaddr", "accountingstorageuser", "getenvtimeout", "jobcontainertype"),
    )
}


class SlurmRefusal(NamedTuple):
    """Why a cluster can't have a release of Slurm."""

    what: str
    why: str
    fix: str


def is_removed(key: str, release: str) -> bool:
    """Return whether a release no longer knows a key of slurm.conf."""
    return key.lower() in _REMOVED_KEYS.get(release, ())


def refuse_slurm(wanted: str, distribution: Distribution | None, *, makes_image: bool) -> SlurmRefusal | None:
    """Return why hosts can't have this release of Slurm; None if they can, or may be able to.

    ``distribution``: that of the hosts. None: it is not known yet. ``makes_image``: whether hosts start from
    an image into which clusterctl can install another release than the distribution's own.
    """
    known = releases() if distribution is None else (distribution,)
    if wanted in {one.slurm for one in known}:
        return None
    fix = "remove slurm.version"
    if not makes_image:
        fix += "; on machines of your own Slurm is upgraded by hand: docs/howto/slurm-admin.md"
    if distribution is None or wanted in distribution.newer_slurm:
        if makes_image:
            return None
        return SlurmRefusal(
            f"Slurm {wanted} is for local nodes only",
            "its packages are Debian testing's, which clusterctl installs on no other machines",
            fix,
        )
    return SlurmRefusal(
        f"{distribution.title} can't have Slurm {wanted}",
        f"its packages are of {distribution.slurm or 'another release'}",
        fix,
    )
