"""What a ledger must look like, checked before anything is done by it; older ones are made to look so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ANY = "*"  # every key of a mapping
_ACCOUNTS = {"before": [str], "ours": [str]}
_STATES: dict[str, dict[str, Any]] = {
    "absent": {},
    "file": {"uid": int, "gid": int, "mode": int, "content": str},
    "folder": {"uid": int, "gid": int, "mode": int},
    "link": {"uid": int, "gid": int, "target": str},
    "other": {},
}
_SHAPE: dict[str, Any] = {
    "cluster": str,
    "sealed": bool,
    "paths": {_ANY: {"role": str, "before": dict, "after": (dict, type(None)), "when_ns": (int, type(None))}},
    "patterns": [str],
    "etc": {"before": str, "ours": [str]},
    "trees": {_ANY: bool},
    "mounts": {_ANY: bool},
    "units": {_ANY: {"role": str, "load": str, "file": str, "active": str}},
    "reloads": [str],
    "users": _ACCOUNTS,
    "groups": _ACCOUNTS,
    "packages": {
        "before": {_ANY: str},
        "ours": [str],
        "automatic": [str],
        "marked": [str],
        "settings": [str],
    },
    "versions": {_ANY: [dict]},
    "changed": [str],
}


def as_now(ledger: dict[str, Any]) -> dict[str, Any]:
    """The same, with what the first releases did not note, and by today's names.

    Raises:
        ValueError: no release has written this; the text says where.
    """
    if isinstance(ledger["packages"], dict):
        ledger["packages"].setdefault("settings", [])
    for entry in ledger["paths"].values() if isinstance(ledger["paths"], dict) else ():
        if isinstance(entry, dict):
            entry.setdefault("when_ns", None)
    _check(ledger, _SHAPE, "")
    for where, state in _states(ledger):
        context = state.pop("context", None)  # SELinux's, as text
        if isinstance(context, str):
            state.setdefault("attributes", {"security.selinux": context.encode().hex()})
        if state.get("kind") not in _STATES:
            raise ValueError(f"{where}.kind is {state.get('kind')!r}")
        _check(state, _STATES[state["kind"]], where)
        _check(state.get("attributes", {}), {_ANY: str}, f"{where}.attributes")
        for value in state.get("attributes", {}).values():
            bytes.fromhex(value)
    return ledger


def _states(ledger: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, entry in ledger["paths"].items():
        for when in ("before", "after"):
            if entry[when] is not None:
                yield f"paths.{path}.{when}", entry[when]
    for path, states in ledger["versions"].items():
        yield from ((f"versions.{path}", state) for state in states)


def _check(found: Any, shape: Any, where: str) -> None:
    """Raises ValueError where ``found`` lacks what the shape has; more than that is no fault."""
    if not isinstance(shape, (dict, list)):
        if not isinstance(found, shape):
            raise ValueError(f"{where} is {found!r:.40}")
        return
    if not isinstance(found, type(shape)):
        raise ValueError(f"{where} is {found!r:.40}")
    if isinstance(shape, list):
        for one in found:
            _check(one, shape[0], where)
        return
    for name, inner in shape.items():
        if name != _ANY and name not in found:
            raise ValueError(f"{where}.{name} is missing".lstrip("."))
        for key in found if name == _ANY else [name]:
            _check(found[key], inner, f"{where}.{key}".lstrip("."))
