"""Slurm's releases: which of them a distribution can have, and what one of them no longer knows."""

from __future__ import annotations

from typing import Final, NamedTuple

from clusterctl.spec.distributions import Distribution, releases

# Release of a distribution's `newer_slurm` -> the keys of slurm.conf, in lower case, with which its daemons
# do not start. Source: its RELEASE_NOTES and CHANGELOG.
_REMOVED_KEYS: Final = {
    "26.05": (
        *("controlmachine", "backupcontroller", "controladdr", "backupaddr", "frontendname"),
        *("frontendaddr", "accountingstorageuser", "getenvtimeout", "jobcontainertype"),
    )
}


class Refusal(NamedTuple):
    """Why a cluster can't have a release of Slurm."""

    what: str
    why: str
    fix: str


def is_removed(key: str, release: str) -> bool:
    """Return whether a release no longer knows a key of slurm.conf."""
    return key.lower() in _REMOVED_KEYS.get(release, ())


def refusal(wanted: str, distribution: Distribution | None, *, makes_image: bool) -> Refusal | None:
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
        return Refusal(
            f"Slurm {wanted} is for local nodes only",
            "its packages are Debian testing's, which clusterctl installs on no other machines",
            fix,
        )
    return Refusal(
        f"{distribution.title} can't have Slurm {wanted}",
        f"its packages are of {distribution.slurm or 'another release'}",
        fix,
    )
