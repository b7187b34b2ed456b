"""Data files beside the code that reads them, and tables of what a program's words mean."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter

from clusterctl.errors import Failure

T = TypeVar("T")
R = TypeVar("R", bound="Rule")


def table(path: Path, kind: type[T]) -> T:
    """What a TOML or YAML file holds, as that type; it is read once."""
    found: T = _read(path, cast(Hashable, kind))
    return found


@cache
def _read(path: Path, kind: Any) -> Any:
    if path.suffix == ".toml":
        return TypeAdapter(kind).validate_python(tomllib.loads(path.read_text()))
    from ruamel.yaml import YAML  # noqa: PLC0415 - slow, and root's helper has no use for it

    return TypeAdapter(kind).validate_python(YAML(typ="safe").load(path))


class Rule(BaseModel):
    """What a text means in which one of the patterns of ``match`` is found.

    Groups of these patterns can stand in ``cause`` and ``fix``: `{name}`, `{name:what to say without it}`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    match: tuple[str, ...]
    cause: str
    fix: str
    retryable: bool = False

    def failure(self, words: Mapping[str, str], *, host: str | None, phase: str) -> Failure:
        """The failure that it stands for; ``words`` are the values of its texts."""
        known = _Words({name: _Word(value) for name, value in words.items()})
        cause, fix = self.cause.format_map(known), self.fix.format_map(known)
        return Failure(self.code, cause, host, phase, fix, self.retryable)


def first_rule(rules: Iterable[R], text: str) -> tuple[R, dict[str, str]] | None:
    """The first rule that knows the text, and what its patterns' groups name, the first pattern's first."""
    for rule in rules:
        if found := [match for pattern in rule.match if (match := re.search(pattern, text))]:
            named = (group for match in reversed(found) for group in match.groupdict().items())
            return rule, {name: value for name, value in named if value}
    return None


class _Words(dict[str, "_Word"]):
    def __missing__(self, name: str) -> _Word:
        return _Word("")


class _Word(str):
    def __format__(self, otherwise: str) -> str:
        return str(self) or otherwise
