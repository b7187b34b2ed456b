"""Drift: differences between a host now and what `up` wants there.

A probe returns a mark for each item: the checksum of a file, or the state of a package, unit or
account. ``Checksums`` maps the key of an item, such as "file /etc/hosts" or "unit slurmd", to the
mark. The wanted marks of files are recorded on the host, from what was to be written there; those of
other items follow from the spec. Nothing that was found counts as wanted, but the content of Slurm's
accounting, to which people may add.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from clusterctl.cluster.phases import Drift
from clusterctl.hosts.probe import Checksums
from clusterctl.hosts.roles import key_marks, required_accounts
from clusterctl.spec.models import ClusterSpec

MISSING = "missing"
_OUTDATED = "outdated"
_PACKAGE = "package "
ACCOUNTING = "accounting all"
_NOT_INSTALLED = "not installed"
# The state of an item if the service that knows the state did not answer the probe.
UNKNOWN = "no answer"
# Kind of item -> its wanted state.
_GOOD_STATES = {
    "package": "installed",
    "unit": "running",
    "home": "fit",
    **dict.fromkeys(("key", "path", "readable"), "there"),
    "absent": "absent",
    **dict.fromkeys(("alone", "rivals"), "none"),
}


def people_marks(spec: ClusterSpec) -> dict[str, str]:
    """Return the wanted marks of accounts and of their lists of keys, which a spec alone decides."""
    uids = {f"user {name}": str(uid) for name, uid in required_accounts(spec).items()}
    return uids | key_marks(spec)


def wanted_marks(written: Checksums, people: Checksums, now: Checksums) -> Checksums:
    """Return the wanted marks of a host: those of the files that were written there, those of people,
    and the state of each other item in ``now``.

    people: from ``people_marks``, of the spec of the last `up`.
    """
    states = {
        key: _GOOD_STATES[kind] for key in now if (kind := key.partition(" ")[0]) in _GOOD_STATES
    }
    listed = {key: mark for key, mark in people.items() if key in now}
    return {**written, **states, **listed}


def drifted(wanted: Checksums, now: Checksums) -> tuple[str, ...]:
    """Return the keys of items that are not as wanted, or are missing."""
    return tuple(
        key for key, mark in now.items() if not _is_fine(key, mark) or wanted.get(key, mark) != mark
    )


def matches(expected: Checksums, now: Checksums) -> bool:
    """Return whether a host has all expected checksums and states, and no item is in a bad state.

    Items of Slurm's accounting are not compared, because their states can't be known in advance.
    """
    comparable = {key: mark for key, mark in expected.items() if not key.startswith("accounting ")}
    is_sound = not {UNKNOWN, _NOT_INSTALLED}.intersection(now.values())
    return is_sound and comparable.keys() <= now.keys() and not drifted(comparable, now)


def drift_of_host(host: str, recorded: Checksums, now: Checksums) -> Iterator[Drift]:
    """Yield how a host differs from the record, without consequences (a missing account has no
    home).
    """
    for key in _without_consequences(_recorded_drift(recorded, now), now):
        yield Drift(host, _describe(key, now[key])[0])


def repairs_of(host: str, recorded: Checksums, before: Checksums, after: Checksums) -> list[Drift]:
    """Return the differences that `up` repaired. ``before``, ``after``: checksums before and after
    `up`.
    """
    changed = [key for key in _recorded_drift(recorded, before) if after.get(key) != before[key]]
    return [
        Drift(host, *_describe(key, before[key])) for key in _without_consequences(changed, before)
    ]


def _recorded_drift(recorded: Checksums, now: Checksums) -> list[str]:
    return [key for key in drifted(recorded, now) if key in recorded and now[key] != UNKNOWN]


def lost_packages(recorded: Checksums, now: Checksums) -> str:
    """Return the recorded packages that are no longer installed, as a comma-separated list."""
    lost = (key for key in _recorded_drift(recorded, now) if now[key] == _NOT_INSTALLED)
    return ", ".join(key.removeprefix(_PACKAGE) for key in lost)


def _without_consequences(keys: Sequence[str], marks: Checksums) -> Iterator[str]:
    """Yield ``keys`` without consequences of other keys, such as the home of a missing account."""
    for key in keys:
        kind, _, name = key.partition(" ")
        if kind in _NEEDS:
            follows = any(marks.get(f"{needed} {name}") == MISSING for needed in _NEEDS[kind])
        else:
            follows = marks[key].endswith(_OUTDATED) and len(keys) > 1
        if not follows:
            yield key


def hosts_with_drift(
    recorded: Mapping[str, Checksums], now: Mapping[str, Checksums]
) -> tuple[str, ...]:
    """Return the hosts that differ from their record or have no record."""
    return tuple(
        host
        for host, marks in now.items()
        if host not in recorded or drifted(recorded[host], marks)
    )


def touches_slurm(keys: Iterable[str]) -> bool:
    """Return whether a file in /etc/slurm is among these items that differ from the record."""
    # In that case, nodes may have fetched a wrong configuration.
    return any(key.startswith("file /etc/slurm/") for key in keys)


def _is_fine(key: str, mark: str) -> bool:
    return mark == _GOOD_STATES.get(key.partition(" ")[0], mark) and mark != MISSING


# Kind of item -> the kinds without which it is missing, too.
_NEEDS = {"home": ("user",), "key": ("user", "home"), "keys": ("user", "home")}

_NAMES = {
    "package": "the package {}",
    "user": "the account {}",
    "key": "the cluster's key of user {}",
    "keys": "the list of the spec's keys of user {}",
    "home": "the home of user {}",
    "accounting": "the accounting",
    "block": "clusterctl's part of {}",
}


def _describe(key: str, mark: str) -> tuple[str, str]:
    kind, _, name = key.partition(" ")
    if kind in ("alone", "rivals"):
        return f"{mark} contradicted {name}", "moved away"
    if kind == "absent":
        return f"{name} existed and took precedence", "removed"
    name = _NAMES.get(kind, "{}").format(name)
    if kind == "readable" and mark != MISSING:
        return f"users could not read {name}", "restored"
    if kind == "unit":
        states = [state for state in mark.split() if state != "running"]
        return f"{name} was {' and '.join(states)}", "repaired" if "running" in mark else "started"
    return f"{name} was {'missing' if mark in (MISSING, _NOT_INSTALLED) else 'changed'}", "restored"
