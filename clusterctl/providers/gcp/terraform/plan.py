"""A plan as a value: what would be done to which resource, and why; without sensitive values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Action = Literal["create", "update", "replace", "delete", "no-op"]

SENSITIVE: Final = "(sensitive)"
UNKNOWN: Final = "(known after apply)"
_SHORTEST_SECRET: Final = 4  # what is shorter stands everywhere by chance
_ACTIONS: Final[Mapping[tuple[str, ...], Action]] = {
    ("create",): "create",
    ("update",): "update",
    ("delete",): "delete",
    ("delete", "create"): "replace",
    ("create", "delete"): "replace",
}
_REASONS: Final = {
    "replace_because_tainted": "it was not made to the end",
    "replace_by_request": "it was asked for",
    "replace_by_triggers": "what it depends on changes",
    "delete_because_no_resource_config": "it is no longer asked for",
    "delete_because_each_key": "it is no longer asked for",
    "delete_because_no_module": "it is no longer asked for",
    "delete_because_count_index": "it is no longer asked for",
    "delete_because_wrong_repetition": "it is no longer asked for",
}
# What may come instead of what was shown, when part of it was done: Terraform makes anew what is half made.
_INSTEAD: Final[Mapping[str, frozenset[str]]] = {
    "create": frozenset({"create", "replace", "update", "no-op"}),
    "replace": frozenset({"replace", "create", "no-op"}),
    "update": frozenset({"update", "no-op"}),
    "delete": frozenset({"delete", "no-op"}),
}


@dataclass(frozen=True, slots=True)
class ResourceChange:
    """What happens to one resource.

    ``before`` and ``after`` are its attributes, None where it is not there. ``why_replaced`` names the
    attributes that can't be changed in place, as paths such as ``boot_disk.0.initialize_params``, or says why
    in words.
    """

    address: str
    type: str
    name: str
    key: str | int | None
    action: Action
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    why_replaced: tuple[str, ...] = ()
    adopts: str = ""  # the id of what is there already, and is taken into the state


@dataclass(frozen=True, slots=True)
class Plan:
    """A saved plan: ``path`` is the file that ``apply`` takes, ``digest`` its SHA-256.

    ``changes`` has what Terraform would leave as it is, too; ``destroys``: it was made to remove all.
    """

    path: Path
    digest: str
    changes: tuple[ResourceChange, ...]
    destroys: bool = False
    outputs_change: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it would do nothing at all."""
        return not self.real_changes and not self.outputs_change

    @property
    def real_changes(self) -> tuple[ResourceChange, ...]:
        """Those that are more than `no-op`."""
        return tuple(change for change in self.changes if change.action != "no-op" or change.adopts)

    def beyond(self, other: Plan) -> tuple[ResourceChange, ...]:
        """What the other would do that this one does not show; nothing if it is only what is left of it."""
        shown = {change.address: change for change in self.real_changes}
        return tuple(
            change
            for change in other.real_changes
            if change.address not in shown or not _is_left_of(shown[change.address], change)
        )


def read_changes(shown: Mapping[str, Any]) -> tuple[ResourceChange, ...]:
    """The changes in `terraform show -json PLAN`. What a data source reads is none."""
    raws: Iterable[Mapping[str, Any]] = shown.get("resource_changes") or ()
    managed = [raw for raw in raws if raw.get("mode") != "data"]
    secrets: set[str] = set()
    for change in (raw["change"] for raw in managed):
        secrets.update(_secrets(change["before"], change.get("before_sensitive")))
        secrets.update(_secrets(change["after"], change.get("after_sensitive")))
    return tuple(_change(raw, frozenset(secrets)) for raw in managed)


def outputs_change(shown: Mapping[str, Any]) -> bool:
    """Whether an output would get another value."""
    changes: Mapping[str, Mapping[str, Any]] = shown.get("output_changes") or {}
    return any(change["actions"] != ["no-op"] for change in changes.values())


def _change(raw: Mapping[str, Any], secrets: frozenset[str]) -> ResourceChange:
    change = raw["change"]
    action = _ACTIONS.get(tuple(change["actions"]), "no-op")
    before = _masked(change["before"], change.get("before_sensitive"), secrets)
    after = _masked(change["after"], change.get("after_sensitive"), secrets)
    after = _unknown(after, change.get("after_unknown"))
    deposed = f" (deposed {raw['deposed']})" if raw.get("deposed") else ""
    return ResourceChange(
        address=raw["address"] + deposed,
        type=raw["type"],
        name=raw["name"],
        key=raw.get("index"),
        action=action,
        before=before,
        after=after if isinstance(after, Mapping) else None,
        why_replaced=_why(raw, change) if action in ("replace", "delete") else (),
        adopts=(change.get("importing") or {}).get("id") or "",
    )


def _why(raw: Mapping[str, Any], change: Mapping[str, Any]) -> tuple[str, ...]:
    paths: Sequence[Sequence[str | int]] = change.get("replace_paths") or ()
    reason = _REASONS.get(raw.get("action_reason", ""))
    return tuple(".".join(map(str, path)) for path in paths) or ((reason,) if reason else ())


def _secrets(value: Any, sensitive: Any) -> Iterator[str]:
    """The texts that ``sensitive`` marks: the shape of the value, with true where it is."""
    if sensitive is True:
        yield from _texts(value)
    for inner, mark in _pairs(value, sensitive):
        yield from _secrets(inner, mark)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and len(value) >= _SHORTEST_SECRET:
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def _pairs(value: Any, marks: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict) and isinstance(marks, dict):
        yield from ((value[key], mark) for key, mark in marks.items() if key in value)
    elif isinstance(value, list) and isinstance(marks, list):
        yield from zip(value, marks, strict=False)


def _masked(value: Any, sensitive: Any, secrets: frozenset[str]) -> Any:
    """The value without what is sensitive, also where a provider copied it to and Terraform lost its mark."""
    if sensitive is True:
        return SENSITIVE if value is not None else None
    if isinstance(value, str):
        return SENSITIVE if any(secret in value for secret in secrets) else value
    if isinstance(value, dict):
        marked = sensitive if isinstance(sensitive, dict) else {}
        return {key: _masked(inner, marked.get(key), secrets) for key, inner in value.items()}
    if isinstance(value, list):
        marks = [*(sensitive if isinstance(sensitive, list) else ()), *[None] * len(value)]
        return [_masked(inner, mark, secrets) for inner, mark in zip(value, marks, strict=False)]
    return value


def _unknown(value: Any, unknown: Any) -> Any:
    """The value, with a word for each part that only applying will tell."""
    if unknown is True:
        return UNKNOWN
    if isinstance(unknown, dict) and isinstance(value, dict | None):
        known = value or {}
        inner = {key: _unknown(known.get(key), mark) for key, mark in unknown.items() if mark}
        return {**known, **inner} if value is not None or inner else value
    if isinstance(unknown, list) and isinstance(value, list):
        marks = [*unknown, *[False] * (len(value) - len(unknown))]
        return [_unknown(inner, mark) for inner, mark in zip(value, marks, strict=False)]
    return value


def _is_left_of(shown: ResourceChange, other: ResourceChange) -> bool:
    if other.action not in _INSTEAD[shown.action]:
        return False
    if shown.after is None or other.after is None:
        return shown.after is other.after or other.action == "delete"
    return all(_agrees(value, other.after.get(name)) for name, value in shown.after.items())


def _agrees(shown: Any, other: Any) -> bool:
    """The same value, as far as it was known when it was shown."""
    if UNKNOWN in (shown, other) or shown is None:
        return True
    if isinstance(shown, dict) and isinstance(other, dict):
        return all(_agrees(value, other.get(name)) for name, value in shown.items())
    if isinstance(shown, list) and isinstance(other, list):
        return len(shown) == len(other) and all(map(_agrees, shown, other))
    return bool(shown == other)
