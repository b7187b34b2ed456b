"""Reading plain values, as a file gives them, for the checks: what is malformed counts as not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from clusterctl.spec.units import parse_duration_s, parse_size_mib

Raw = Mapping[str, object]


def mapping(values: Raw, *path: str) -> Raw:
    """The mapping at a path, else an empty one."""
    value: object = values
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def entries(values: Raw, *path: str) -> Iterator[Raw]:
    """The mappings of the list at a path; an empty one in place of what is malformed keeps the count."""
    *above, last = path
    value = mapping(values, *above).get(last)
    for entry in value if isinstance(value, list | tuple) else ():
        yield entry if isinstance(entry, Mapping) else {}


def text(values: Raw, key: str) -> str | None:
    """The text under a key."""
    value = values.get(key)
    return value if isinstance(value, str) else None


def whole(values: Raw, key: str) -> int | None:
    """The whole number under a key."""
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def is_on(values: Raw, key: str, *, default: bool = False) -> bool:
    """Whether a switch is on."""
    value = values.get(key)
    return value if isinstance(value, bool) else default


def size_mib(values: Raw, key: str) -> int | None:
    """The size under a key."""
    return _parsed(parse_size_mib, values.get(key))


def duration_s(values: Raw, key: str) -> int | None:
    """The duration under a key."""
    return _parsed(parse_duration_s, values.get(key))


def _parsed(parse: Callable[[object], int], value: object) -> int | None:
    try:
        return parse(value)
    except ValueError:
        return None
