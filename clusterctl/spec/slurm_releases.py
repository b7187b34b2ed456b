"""Slurm's releases: which of them one takes over from, and which a distribution can have.

Two tables: `data/slurm_releases.toml`, and what `data/distributions.toml` says of each distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from clusterctl.spec.distributions import Distribution, releases
from clusterctl.spec.names import DATA
from clusterctl.util.assets import table

_TABLE: Final = DATA / "slurm_releases.toml"


class Refusal(NamedTuple):
    """Why a cluster can't have a release of Slurm."""

    what: str
    why: str
    fix: str


def _known() -> Mapping[str, Mapping[str, Any]]:
    return table(_TABLE, dict[str, dict[str, Any]])


def known_releases() -> tuple[str, ...]:
    """All of them, the oldest first."""
    return tuple(_known())


def taken_over(release: str) -> tuple[str, ...]:
    """The releases that one takes over jobs and accounting from, the oldest first."""
    all_of_them = known_releases()
    at = all_of_them.index(release)
    return all_of_them[max(0, at - _known()[release]["takes_over"]) : at]


def removed_keys(keys: Iterable[str], release: str) -> tuple[str, ...]:
    """Those of these keys of slurm.conf that a release does not know any more."""
    gone = _known()[release].get("gone", ())
    return tuple(sorted({key for key in keys if key.lower() in gone}))


def refusal(wanted: str, distribution: Distribution | None, *, upgrades: bool) -> Refusal | None:
    """Why hosts can't have this release of Slurm; None: they can, or that depends on what they are.

    ``distribution`` None: not known yet. ``upgrades``: packages of another release than the distribution's
    own can be installed on them.
    """
    known = releases() if distribution is None else (distribution,)
    if wanted in {one.slurm for one in known}:
        return None
    if distribution is None or wanted in distribution.newer_slurm:
        if upgrades:
            return None
        why = "on other machines nobody has tried it yet"
        return Refusal("Slurm is upgraded in place on local nodes alone", why, "remove slurm.version")
    own = distribution.slurm
    why = f"its packages are of {own or 'another release'}"
    if own is not None and own not in taken_over(wanted):
        why += f"; {wanted} takes over jobs and accounting of {', '.join(taken_over(wanted))} alone"
    return Refusal(
        f"{distribution.title} can't have Slurm {wanted}",
        why,
        "remove slurm.version; or raise a cluster of its own with it, such as of `distribution: debian-13`: "
        "what `collect` brought home stays, accounts come from the spec, waiting jobs are submitted again, "
        "and the accounting's history stays behind",
    )
