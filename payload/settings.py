"""From one declaration of a setting: its flag, its help, and its key in the config files read and written.

A command's settings are fields of a frozen dataclass, or of sections, which are such dataclasses themselves.
A field ``micro_batch_size`` of section ``batch`` is the flag ``--micro-batch-size``, and in a file

    [batch]
    micro-batch-size = 8

Flags win over the file, which wins over defaults. Standard library only, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from payload.errors import UsageError
from payload.values import Read, one_of, yes_or_no

T = TypeVar("T")


def setting(default: Any, read: Read, metavar: str, about: str, *, flag: str = "") -> Any:
    """A field that the user can set. ``flag`` is needed where it is not the field's name with dashes."""
    metadata = {"read": read, "metavar": metavar, "about": about, "flag": flag}
    return field(default=default, metadata=metadata)


def required(read: Read, metavar: str, about: str) -> Any:
    """A field that the user must set."""
    return setting(MISSING, read, metavar, about)


def choice(default: str, words: tuple[str, ...], about: str) -> Any:
    """A field that is one of a few words."""
    return setting(default, one_of(*words), "|".join(words), about)


def switch(default: bool, about: str) -> Any:
    """A field that ``--flag`` and ``--no-flag`` set."""
    return setting(default, yes_or_no, "", about)


def section(kind: type[T]) -> T:
    """A field that holds the settings of ``kind``, whose docstring is their title in the help."""
    made: T = field(default_factory=kind)
    return made


@dataclass(frozen=True, slots=True)
class _Setting:
    """One field, and where it is."""

    section: str  # "" for a field of the command itself
    kind: type[Any]  # the dataclass that has it
    field: Field[Any]

    @property
    def key(self) -> str:
        """What it is called in a file; with two dashes before it, its flag."""
        return self.field.metadata["flag"] or self.field.name.replace("_", "-")

    @property
    def path(self) -> str:
        return f"[{self.section}] {self.key}" if self.section else self.key

    def of(self, config: Any) -> Any:
        """Its value in a command's settings."""
        return getattr(getattr(config, self.section) if self.section else config, self.field.name)

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Its flag. It leaves nothing in the namespace unless it is given."""
        about = str(self.field.metadata["about"])
        if self.field.default not in (None, (), MISSING):
            about += f" (default {_text(self.field.default).replace('%', '%%')})"
        given: dict[str, Any] = {"dest": self.path, "default": argparse.SUPPRESS, "help": about}
        if self.field.metadata["read"] is yes_or_no:
            given["action"] = argparse.BooleanOptionalAction
        else:
            given |= {"type": self.field.metadata["read"], "metavar": self.field.metadata["metavar"]}
            given["required"] = self.field.default is MISSING
        group.add_argument(f"--{self.key}", **given)


def _settings(command: type[Any]) -> Iterator[_Setting]:
    for each in dataclasses.fields(command):
        kind: Any = each.default_factory
        if dataclasses.is_dataclass(kind):
            yield from (_Setting(each.name, kind, inner) for inner in dataclasses.fields(kind))  # type: ignore[arg-type]
        else:
            yield _Setting("", command, each)


def add_flags(parser: argparse.ArgumentParser, command: type[Any]) -> None:
    """A flag for every setting of a command, under its section's title."""
    groups: dict[type[Any], argparse._ActionsContainer] = {command: parser}
    for one in _settings(command):
        if one.kind not in groups:
            groups[one.kind] = parser.add_argument_group((one.kind.__doc__ or "").rstrip("."))
        one.add_to(groups[one.kind])


def make(
    command: type[T], flags: Mapping[str, Any], file: Path | None = None, *, named_by: str = "--config"
) -> T:
    """The settings of a command.

    Args:
        flags: what the parser found; of it, what belongs to no setting is left alone.
        file: a config file, for what the flags leave open.
        named_by: the flag that led to the file, for messages.

    Raises:
        UsageError: the file cannot be read, or says what is not known or not possible.
    """
    values = {**(_read_file(command, file, named_by) if file else {}), **flags}
    sections: dict[str, tuple[type[Any], dict[str, Any]]] = {"": (command, {})}
    for one in _settings(command):
        _, given = sections.setdefault(one.section, (one.kind, {}))
        if one.path in values:
            given[one.field.name] = values[one.path]
    _, own = sections.pop("")
    made: T = command(**own, **{name: kind(**given) for name, (kind, given) in sections.items()})
    return made


def _read_file(command: type[Any], file: Path, named_by: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(f"{named_by}: {file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:  # what TOML or UTF-8 forbid
        raise UsageError(f"{named_by}: {file} is not TOML: {exc}") from exc
    known = {one.path: one for one in _settings(command)}
    values = {}
    for path, value in _flat(tables):
        if path not in known:
            raise UsageError(f"{named_by}: {file}: there is no {path}{_hint(path, list(known))}")
        try:
            values[path] = known[path].field.metadata["read"](_text(value))
        except argparse.ArgumentTypeError as exc:
            raise UsageError(f"{named_by}: {file}: {path}: {exc}") from exc
    return values


def _flat(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from ((f"[{name}] {key}", inner) for key, inner in value.items())
        else:
            yield name, value


def _hint(path: str, known: list[str]) -> str:
    """The same key elsewhere, or else the one that looks most alike."""
    key = path.rpartition(" ")[2]
    near = [other for other in known if other.rpartition(" ")[2] == key]
    near = near or difflib.get_close_matches(path, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def to_toml(config: Any) -> str:
    """All settings of a command as a config file that gives the same again."""
    lines: list[str] = []
    section = ""
    for one in _settings(type(config)):
        if one.section != section:
            section = one.section
            lines += ["", f"[{section}]"]
        if (value := one.of(config)) not in (None, ()):  # which no text says
            lines.append(f"{one.key} = {_toml(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def to_record(config: Any) -> dict[str, Any]:
    """All settings of a command by the names of their fields, without sections, for JSON."""
    values = ((one.field.name, one.of(config)) for one in _settings(type(config)))
    return {name: str(value) if isinstance(value, Path) else value for name, value in values}


def from_record(command: type[T], record: Mapping[str, Any], flags: Mapping[str, Any]) -> T:
    """What ``to_record`` made a record of, but for the ``flags``."""
    values = {
        one.path: one.field.metadata["read"](_text(record[one.field.name]))
        for one in _settings(command)
        if record.get(one.field.name) not in (None, [])
    }
    return make(command, {**values, **flags})


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, int | float):
        return _text(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(value: Any) -> str:
    """As a user would write it on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)
