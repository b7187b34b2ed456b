"""Read values of dataclasses from JSON, with a check of their types.

pydantic does the same and more, but most verbs read only an inventory, and building pydantic's
validators for it takes longer than the rest of these verbs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def from_json(kind: type[_T], value: object) -> _T:
    """Return a value of ``json.loads`` as an instance of the dataclass ``kind``.

    Its fields may have plain types, other dataclasses, ``tuple[X, ...]``, ``Mapping[str, X]``,
    ``Literal`` and ``X | None``. Unknown keys are ignored: another version may have written them.

    Raises ValueError: a key without a default is missing, or a value has another type.
    """
    result: _T = _as(kind, value, kind.__name__)
    return result


@cache
def _kinds(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _as(kind: Any, value: Any, key: str) -> Any:
    origin = get_origin(kind)
    if origin is UnionType:
        if value is None and NoneType in get_args(kind):
            return None
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
        return _as(kind, value, key)
    if is_dataclass(kind) and isinstance(value, dict):
        kinds = _kinds(kind)  # type: ignore[arg-type]
        known = {
            field.name: _as(kinds[field.name], value[field.name], f"{key}.{field.name}")
            for field in fields(kind)
            if field.name in value
        }
        for field in fields(kind):
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            if field.name not in known and not has_default:
                raise ValueError(f"{key}.{field.name} is missing")
        return kind(**known)  # type: ignore[operator]
    if origin is tuple and isinstance(value, list):
        return tuple(_as(get_args(kind)[0], item, key) for item in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: _as(get_args(kind)[1], item, f"{key}.{name}") for name, item in value.items()}
    if origin is Literal and value in get_args(kind):
        return value
    if kind is float and type(value) is int:
        return float(value)
    # A bool is an int for isinstance.
    if type(value) is kind:
        return value
    raise ValueError(f"{key} has the invalid value {value!r}")
