"""What drifted on a host: the marks of a probe against those that configuring left, told in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from clusterctl.cluster.phases import Drift
from clusterctl.hosts.probe import Checksums

MISSING = "missing"
_OUTDATED = "outdated"
_PACKAGE, _NOT_INSTALLED = "package ", "not installed"
UNKNOWN = "no answer"  # what it was asked of was away
_FINE = {  # whatever was recorded before
    "unit": "running",
    "home": "fit",
    **dict.fromkeys(("key", "path"), "there"),
    "absent": "absent",
    **dict.fromkeys(("alone", "rivals"), "none"),
}


def drifted(recorded: Checksums, now: Checksums) -> tuple[str, ...]:
    """The keys of marks that are not as they were recorded, or bad in themselves."""
    return tuple(
        key for key, mark in now.items() if not _is_fine(key, mark) or recorded.get(key, mark) != mark
    )


def shows(expected: Checksums, now: Checksums) -> bool:
    """Return whether a host shows all that is expected, and nothing that is bad in itself.

    The accounting is not compared: it can't be known before.
    """
    known = {key: mark for key, mark in expected.items() if not key.startswith("accounting ")}
    is_sound = not {UNKNOWN, _NOT_INSTALLED}.intersection(now.values())
    return is_sound and known.keys() <= now.keys() and not drifted(known, now)


def drift_of_host(host: str, recorded: Checksums, now: Checksums) -> Iterator[Drift]:
    for key in _without_consequences(_known(recorded, now), now):
        yield Drift(host, _words(key, now[key])[0])


def repairs_of(host: str, recorded: Checksums, before: Checksums, after: Checksums) -> list[Drift]:
    """What was not right ``before`` and has changed since."""
    changed = [key for key in _known(recorded, before) if after.get(key) != before[key]]
    return [Drift(host, *_words(key, before[key])) for key in _without_consequences(changed, before)]


def _known(recorded: Checksums, now: Checksums) -> list[str]:
    """The marks that drifted. What is new to us cannot have."""
    return [key for key in drifted(recorded, now) if key in recorded and now[key] != UNKNOWN]


def lost_packages(recorded: Checksums, now: Checksums) -> str:
    """Those that were recorded and are not installed any more, in words."""
    lost = (key for key in _known(recorded, now) if now[key] == _NOT_INSTALLED)
    return ", ".join(key.removeprefix(_PACKAGE) for key in lost)


def _without_consequences(keys: Sequence[str], marks: Checksums) -> Iterator[str]:
    """Those that are not only the consequence of another one."""
    for key in keys:
        kind, _, name = key.partition(" ")
        if kind == "home":
            follows = marks.get(f"user {name}") == MISSING
        else:
            follows = marks[key].endswith(_OUTDATED) and len(keys) > 1
        if not follows:
            yield key


def hosts_with_drift(recorded: Mapping[str, Checksums], now: Mapping[str, Checksums]) -> tuple[str, ...]:
    return tuple(
        host for host, marks in now.items() if host not in recorded or drifted(recorded[host], marks)
    )


def touches_slurm(keys: Iterable[str]) -> bool:
    """Whether nodes may have fetched what is not Slurm's configuration any more."""
    return any(key.startswith("file /etc/slurm/") for key in keys)


def _is_fine(key: str, mark: str) -> bool:
    return mark == _FINE.get(key.partition(" ")[0], mark) and mark != MISSING


_NAMES = {
    "package": "the package {}",
    "user": "the account {}",
    "key": "the cluster's key of user {}",
    "home": "the home of user {}",
    "accounting": "the accounting",
}


def _words(key: str, mark: str) -> tuple[str, str]:
    """What was not right, and what configuring does about it."""
    kind, _, name = key.partition(" ")
    if kind in ("alone", "rivals"):
        return f"{mark} contradicted {name}", "put aside"
    if kind == "absent":
        return f"{name} was there, which takes precedence", "removed"
    name = _NAMES.get(kind, "{}").format(name)
    if kind == "unit":
        states = [state for state in mark.split() if state != "running"]
        return f"{name} was {' and '.join(states)}", "put right" if "running" in mark else "started"
    return f"{name} was {'missing' if mark in (MISSING, _NOT_INSTALLED) else 'changed'}", "put back"
