"""The settings of a command are the fields of a frozen dataclass, from flags, a config file and defaults.

Those of a training are in sections, which are dataclasses too: the field ``micro_batch_size`` of section
``batch`` is the flag ``--micro-batch-size``, and in a file

    [batch]
    micro-batch-size = 8

Names of fields are unique in a command. Standard library only, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from payload.cli.values import Kind, yes_or_no
from payload.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The settings of a command, and which of them were given."""

    given: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """By field: "" for a flag, and "FILE: " for a value of a config file that is not the default."""


T = TypeVar("T", bound=Command)


def setting(default: Any, kind: Kind, about: str, metavar: str = "") -> Any:
    """Declare a field that the user can set.

    Args:
        default: MISSING if the user must set it.
        metavar: what stands for a value in the help. Default: that of the kind.
    """
    return field(default=default, metadata={"kind": kind, "about": about, "metavar": metavar or kind.metavar})


def switch(default: bool, about: str) -> Any:
    """Declare a field that ``--flag`` and ``--no-flag`` set."""
    return setting(default, yes_or_no, about)


def sections_of(command: type[Any]) -> dict[str, Any]:
    """Return the dataclasses of a command's sections, by name."""
    return {one.name: one.default_factory for one in fields(command) if is_dataclass(one.default_factory)}


def settings_of(command: type[Any]) -> dict[str, tuple[str, Field[Any]]]:
    """Return all settings of a command, by name: the section, "" if it has none, and the field."""
    own = {each.name: ("", each) for each in fields(command) if each.metadata}
    for name, section in sections_of(command).items():
        own |= {each.name: (name, each) for each in fields(section)}
    return own


def make(
    command: type[T], flags: Mapping[str, Any], file: Path | None = None, *, named_by: str = "--config"
) -> T:
    """Make the settings of a command.

    Args:
        flags: values by field.
        file: a config file, for settings without a flag.
        named_by: the flag that led to the file, for messages.

    Raises:
        UsageError: the file cannot be read, or has an unknown key or a wrong value.
    """
    settings = settings_of(command)
    read = _read_file(settings, file, named_by) if file else {}
    changed = [name for name, value in read.items() if value != settings[name][1].default]
    given = dict.fromkeys(changed, f"{named_by}: {file}: ") | dict.fromkeys(flags, "")
    values: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in sections_of(command)}}
    for name, value in {**read, **flags}.items():
        values[settings[name][0]][name] = value
    sections = {name: section(**values[name]) for name, section in sections_of(command).items()}
    return command(**values[""], **sections, given=given)


def refuse_idle(config: Command, names: str, wanted: str, *, in_files: bool = True) -> None:
    """Refuse settings that were given although they have an effect only ``wanted``.

    Args:
        names: of their fields, separated by spaces.
        wanted: the condition, such as "with --optimizer sgd".
        in_files: refuse them in a config file as well. If not, a file may hold them for another launch.

    Raises:
        UsageError: one of them was given, and asks for something.
    """
    record, settings = to_record(config), settings_of(type(config))
    for name in names.split():
        place, value, (section, known) = config.given.get(name), record[name], settings[name]
        # No other value than these has an effect anyway.
        harmless = [known.default] if isinstance(value, bool) else [None, 0, (), "none", "never", "constant"]
        if place is None or (place and not in_files) or value in harmless:
            continue
        flag = f"--no-{_key(name)}" if value is False else f"--{_key(name)}"
        raise UsageError(
            f"{place}{_path(section, name) if place else flag}: it has an effect only {wanted}: leave it out",
            code="setting-without-effect",
        )


def _key(name: str) -> str:
    return name.replace("_", "-")


def _path(section: str, name: str) -> str:
    """Return where a file has a setting."""
    return f"[{section}] {_key(name)}"


def _read_file(settings: Mapping[str, tuple[str, Field[Any]]], file: Path, named_by: str) -> dict[str, Any]:
    """Return the values in a config file, by field."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(
            f"{named_by}: {file} cannot be read: {exc.strerror}", code="file-unreadable"
        ) from exc
    except ValueError as exc:  # what TOML or UTF-8 forbid
        raise UsageError(f"{named_by}: {file} is not TOML: {exc}", code="not-toml") from exc
    known = {_path(section, name): name for name, (section, _) in settings.items()}
    found = {name: value for name, value in tables.items() if not isinstance(value, dict)}
    for section, table in tables.items():
        if isinstance(table, dict):
            found |= {f"[{section}] {key}": value for key, value in table.items()}
    values = {}
    for path, value in found.items():
        if path not in known:
            hint = did_you_mean(path, known)
            raise UsageError(f"{named_by}: {file}: there is no {path}{hint}", code="unknown-key")
        try:
            values[known[path]] = _read(settings[known[path]][1], value)
        except argparse.ArgumentTypeError as exc:
            raise UsageError(f"{named_by}: {file}: {path}: {exc}", code="bad-value") from exc
    return values


def _read(setting: Field[Any], value: Any) -> Any:
    """Read a value of TOML or JSON like one on the command line."""
    return setting.metadata["kind"].read(text_of(value))


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return a hint at the same key in another section, or else at a similar word."""
    same_key = [other for other in known if other.rpartition(" ")[2] == word.rpartition(" ")[2]]
    near = same_key or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def to_record(config: Any) -> dict[str, Any]:
    """Return all settings of a command by the names of their fields, without sections, for JSON."""
    record = {}
    for name, (section, _) in settings_of(type(config)).items():
        value = getattr(getattr(config, section) if section else config, name)
        record[name] = str(value) if isinstance(value, Path) else value
    return record


def from_record(command: type[T], record: Mapping[str, Any], flags: Mapping[str, Any]) -> T:
    """Return the settings of which ``to_record`` made a record, changed by ``flags``."""
    known = {name: each for name, (_, each) in settings_of(command).items()}
    values = {name: _read(known[name], record[name]) for name in known if record.get(name) not in (None, [])}
    return make(command, {**values, **flags})


def to_toml(config: Any) -> str:
    """Return all settings of a command as a config file that gives the same again."""
    record, tables = to_record(config), []
    for section, kind in sections_of(type(config)).items():
        # TOML has no text for None.
        values = {
            each.name: record[each.name] for each in fields(kind) if record[each.name] not in (None, ())
        }
        lines = [f"{_key(name)} = {_toml(value)}" for name, value in values.items()]
        tables.append("\n".join([f"[{section}]", *lines, ""]))
    return "\n".join(tables)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, int | float):
        return text_of(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def text_of(value: Any) -> str:
    """Return a value as a user would write it on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(text_of, value)) if isinstance(value, list | tuple) else str(value)
