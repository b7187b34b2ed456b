"""What is not as configuring left it, and in which words that is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from clusterctl.hosts.probe import Checksums

_MISSING = "missing"
_OUTDATED = "outdated"
_UNKNOWN = "no answer"  # what it was asked of was away
_FINE = {"unit": "running", "home": "fit", "key": "there", "path": "there"}  # whatever was recorded before


@dataclass(frozen=True, slots=True)
class Repair:
    """Something of a host that was not as it should be: ``what`` it was, and the ``action`` taken."""

    host: str
    what: str
    action: str

    def __str__(self) -> str:
        return f"{self.host}: {self.what}: {self.action}"


def drifted(recorded: Checksums, now: Checksums) -> tuple[str, ...]:
    """The keys of marks that are not as they were recorded, or bad in themselves."""
    return tuple(
        key for key, mark in now.items() if not _is_fine(key, mark) or recorded.get(key, mark) != mark
    )


def repairs_of(host: str, recorded: Checksums, before: Checksums, after: Checksums) -> tuple[Repair, ...]:
    """What was not right ``before`` and has changed since. What is new to us cannot have drifted."""
    changed = [key for key in _known(recorded, before) if after.get(key) != before[key]]
    return tuple(Repair(host, *_words(key, before[key])) for key in _named(changed, before))


def drift_found(recorded: Checksums, now: Checksums) -> tuple[str, ...]:
    """What is not right on a host, in words. What is new to us can't have drifted."""
    return tuple(_words(key, now[key])[0] for key in _named(_known(recorded, now), now))


def _known(recorded: Checksums, now: Checksums) -> list[str]:
    return [key for key in drifted(recorded, now) if key in recorded and now[key] != _UNKNOWN]


def _named(keys: Sequence[str], marks: Checksums) -> list[str]:
    """Those of the keys that are worth a word beside the others."""
    return [key for key in keys if not _follows(key, marks, keys)]


def _follows(key: str, before: Checksums, changed: Iterable[str]) -> bool:
    """Whether a mark is only a consequence of another one, and not worth a word beside it."""
    kind, _, name = key.partition(" ")
    if kind == "home":
        return before.get(f"user {name}") == _MISSING
    return before[key].endswith(_OUTDATED) and any(other != key for other in changed)


def hosts_with_drift(recorded: Mapping[str, Checksums], now: Mapping[str, Checksums]) -> tuple[str, ...]:
    """The hosts on which something is not as it was recorded."""
    return tuple(
        host for host, marks in now.items() if host not in recorded or drifted(recorded[host], marks)
    )


def touches_slurm(keys: Iterable[str]) -> bool:
    """Whether nodes may have fetched what is not Slurm's configuration any more."""
    return any(key.startswith("file /etc/slurm/") for key in keys)


def _is_fine(key: str, mark: str) -> bool:
    return mark == _FINE.get(key.partition(" ")[0], mark) and mark != _MISSING


def _words(key: str, mark: str) -> tuple[str, str]:
    """What is told of a mark that is not right, and what configuring did about it."""
    kind, _, name = key.partition(" ")
    if kind == "unit":
        return _unit_words(name, mark)
    how = "was missing" if mark == _MISSING else "was changed"
    match kind:
        case "user":
            return f"the account {name} {how}", "put back"
        case "key":
            return f"the cluster's key of user {name} was missing", "put back"
        case "home":
            return f"the home of user {name} " + (
                how if mark == _MISSING else "was not theirs alone"
            ), "put right"
        case "accounting":
            return "accounts or users in the accounting were changed", "put back"
        case _:
            return f"{name} {how}", "put back"


def _unit_words(name: str, mark: str) -> tuple[str, str]:
    state, *more = mark.split()
    if state == "masked":
        return f"{name} was masked", "unmasked and started"
    if state in ("stopped", "failed"):
        was = "was stopped" if state == "stopped" else "had failed"
        return (
            (f"{name} {was} and disabled", "enabled and started")
            if "disabled" in more
            else (
                f"{name} {was}",
                "started",
            )
        )
    if _OUTDATED in more:
        return f"{name} had not read its configuration", "restarted"
    return f"{name} was disabled", "enabled"
