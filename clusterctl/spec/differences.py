"""What is said of two specs of one cluster: which settings the later one changes, in words.

What becomes of the hosts themselves (how many, how large, from which provider) is the provider's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from clusterctl.spec.messages import shown
from clusterctl.spec.models import ClusterSpec

_OF_THE_HOSTS: Final = frozenset({"version", "name", "provider"})
_FIRST_COUNTS: Final = frozenset({"users", "accounts"})  # whom jobs run as, and what they are charged to
_OF_A_NODE: Final = frozenset({"nodes", "cpus", "memory", "disk", "gpus"})


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting, by its dotted key, and what becomes of it."""

    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


def differences(before: ClusterSpec, after: ClusterSpec) -> tuple[Difference, ...]:
    """The settings that are not the same, in the order of the spec."""
    return tuple(_compare("", _settings(before), _settings(after)))


def _settings(spec: ClusterSpec) -> dict[str, Any]:
    """The spec but for what the hosts are."""
    whole = spec.model_dump(mode="json", exclude_none=True)
    kept = {key: value for key, value in whole.items() if key not in _OF_THE_HOSTS}
    kept["partitions"] = [
        {key: value for key, value in partition.items() if key not in _OF_A_NODE}
        for partition in whole["partitions"]
    ]
    return kept


def _compare(key: str, before: Any, after: Any) -> Iterator[Difference]:
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in (*before, *(name for name in after if name not in before)):
            path = f"{key}.{name}" if key else name
            yield from _compare(path, before.get(name), after.get(name))
    elif isinstance(before, list) and isinstance(after, list):
        yield from _compare_lists(key, before, after)
    elif before is None:
        yield Difference(key, f"{_words(after)}, where nothing was said")
    elif after is None:
        yield Difference(key, f"nothing is said any more, it was {_words(before)}")
    else:
        yield Difference(key, f"{_words(after)}, it was {_words(before)}")


def _compare_lists(key: str, before: list[Any], after: list[Any]) -> Iterator[Difference]:
    was, will = _by_name(before), _by_name(after)
    for name, value in was.items():
        if name not in will:
            yield Difference(key, f"{_entry(name, value)} is removed")
        elif isinstance(value, Mapping):
            yield from _compare(f"{key}.{name}", value, will[name])
    for name, value in will.items():
        if name not in was:
            yield Difference(key, f"{_entry(name, value)} is added")
    if key.rpartition(".")[2] in _FIRST_COUNTS and [*was][:1] != [*will][:1]:
        yield Difference(key, f"the first is {next(iter(will))}")


def _by_name(entries: list[Any]) -> dict[str, Any]:
    return {str(one.get("name")) if isinstance(one, Mapping) else str(one): one for one in entries}


def _entry(name: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return shown(value)
    more = ", ".join(f"{key} {_words(part)}" for key, part in value.items() if key != "name")
    return f"{name} ({more})" if more else name


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "empty"
    return str(value).lower() if isinstance(value, bool) else str(value)
