"""Settings of a command: fields of a frozen dataclass, set by flags, a config file and defaults.

The settings of a training are grouped in sections, which are also dataclasses: the field
``micro_batch_size`` of section ``batch`` is the flag ``--micro-batch-size``, and in a config file

    [batch]
    micro-batch-size = 8

Field names are unique in a command. Standard library only, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from payload.cli.values import ValueType, yes_or_no
from payload.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandConfig:
    """The settings of a command. ``given`` tells which of them the user set; the rest are
    defaults.
    """

    # The kind of input that a model must take for this command. Empty: any kind.
    takes: ClassVar[str] = ""
    given: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """By field, the source of its value: "" for a flag, "FILE: " for a non-default value in a
    config file.
    """


T = TypeVar("T", bound=CommandConfig)


def setting(default: Any, kind: ValueType, about: str, metavar: str = "") -> Any:
    """Declare a dataclass field that the user can set.

    Args:
        default: MISSING if the user must set the field.
        about: help text of the flag.
        metavar: placeholder for the value in the help. Default: the placeholder of ``kind``.
    """
    return field(
        default=default, metadata={"kind": kind, "about": about, "metavar": metavar or kind.metavar}
    )


def switch(default: bool, about: str) -> Any:
    """Declare a boolean field, set by ``--flag`` and ``--no-flag``. about: help text."""
    return setting(default, yes_or_no, about)


def sections_of(command: type[Any]) -> dict[str, Any]:
    """Return the sections of a command's dataclass: the dataclass of each section, by the section's
    name.
    """
    return {f.name: f.default_factory for f in fields(command) if is_dataclass(f.default_factory)}


def settings_of(command: type[Any]) -> dict[str, tuple[str, Field[Any]]]:
    """Return {setting's name: (section's name, field)} of a command. Section "": outside all
    sections.
    """
    settings = {f.name: ("", f) for f in fields(command) if f.metadata}
    for name, section in sections_of(command).items():
        settings |= {f.name: (name, f) for f in fields(section)}
    return settings


def make(
    command: type[T],
    flags: Mapping[str, Any],
    file: Path | None = None,
    *,
    named_by: str = "--config",
) -> T:
    """Create a command's settings. Raises UsageError if ``file`` is unreadable or has a wrong
    value.

    Args:
        flags: values from the command line, by field name.
        file: a config file with values of settings that are not in ``flags``.
        named_by: the flag that names the file, for messages.
    """
    settings = settings_of(command)
    file_values = _read_file(settings, file, named_by) if file else {}
    changed = [name for name, value in file_values.items() if value != settings[name][1].default]
    given = dict.fromkeys(changed, f"{named_by}: {file}: ") | dict.fromkeys(flags, "")
    values: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in sections_of(command)}}
    for name, value in {**file_values, **flags}.items():
        values[settings[name][0]][name] = value
    sections = {name: section(**values[name]) for name, section in sections_of(command).items()}
    return command(**values[""], **sections, given=given)


def refuse_without_effect(
    config: CommandConfig, names: str, condition: str, *, in_files: bool = True
) -> None:
    """Raise UsageError if the user set a field in ``names`` to a value that does not turn the
    setting off.

    Args:
        names: field names, separated by spaces.
        condition: when the settings have an effect, for the message: "with --optimizer sgd".
        in_files: False: accept the settings in a config file, because other runs may use the same
            file.
    """
    record = to_record(config)
    settings = settings_of(type(config))
    for name in names.split():
        source = config.given.get(name)
        value = record[name]
        section, declared = settings[name]
        # These values have no effect, so they are accepted.
        harmless = (
            [declared.default]
            if isinstance(value, bool)
            else [None, 0, (), "none", "never", "constant"]
        )
        if source is None or (source and not in_files) or value in harmless:
            continue
        flag = f"--no-{_key(name)}" if value is False else f"--{_key(name)}"
        raise UsageError(
            f"{source}{_path(section, name) if source else flag} has an effect only {condition}; "
            "remove it",
            code="setting-without-effect",
        )


def _key(name: str) -> str:
    return name.replace("_", "-")


def _path(section: str, name: str) -> str:
    return f"[{section}] {_key(name)}"


def _read_file(
    settings: Mapping[str, tuple[str, Field[Any]]], file: Path, named_by: str
) -> dict[str, Any]:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(
            f"{named_by}: {file} cannot be read: {exc.strerror}", code="file-unreadable"
        ) from exc
    # Raised for invalid TOML and invalid UTF-8.
    except ValueError as exc:
        raise UsageError(f"{named_by}: {file} is not TOML: {exc}", code="not-toml") from exc
    names = {_path(section, name): name for name, (section, _) in settings.items()}
    file_values = {name: value for name, value in tables.items() if not isinstance(value, dict)}
    for section, table in tables.items():
        if isinstance(table, dict):
            file_values |= {f"[{section}] {key}": value for key, value in table.items()}
    values = {}
    for path, value in file_values.items():
        if path not in names:
            hint = did_you_mean(path, names)
            raise UsageError(
                f"{named_by}: {file} has the unknown setting {path}{hint}", code="unknown-key"
            )
        try:
            values[names[path]] = _read(settings[names[path]][1], value)
        except argparse.ArgumentTypeError as exc:
            raise UsageError(f"{named_by}: {file}: {path}: {exc}", code="bad-value") from exc
    return values


def _read(setting: Field[Any], value: Any) -> Any:
    """Convert a value from TOML or JSON like the same value on the command line."""
    return setting.metadata["kind"].read(text_of(value))


def did_you_mean(word: str, names: Collection[str]) -> str:
    """Return a hint such as "; did you mean --lr?" if ``names`` has a name similar to ``word``,
    else "".
    """
    same_key = [name for name in names if name.rpartition(" ")[2] == word.rpartition(" ")[2]]
    similar = same_key or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def to_record(config: Any) -> dict[str, Any]:
    """Return all settings of a command as a dictionary {field name: value} without sections, for
    JSON.
    """
    record = {}
    for name, (section, _) in settings_of(type(config)).items():
        value = getattr(getattr(config, section) if section else config, name)
        record[name] = str(value) if isinstance(value, Path) else value
    return record


def from_record(command: type[T], record: Mapping[str, Any], flags: Mapping[str, Any]) -> T:
    """Restore settings from ``record``, a result of ``to_record``. Values in ``flags`` have
    priority.
    """
    declared = {name: f for name, (_, f) in settings_of(command).items()}
    values = {
        name: _read(declared[name], record[name])
        for name in declared
        if record.get(name) not in (None, [])
    }
    return make(command, {**values, **flags})


def to_toml(config: Any) -> str:
    """Return all settings of a command as the text of a config file that restores them."""
    record = to_record(config)
    tables = []
    for section, kind in sections_of(type(config)).items():
        # TOML cannot represent None.
        values = {f.name: record[f.name] for f in fields(kind) if record[f.name] not in (None, ())}
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
    """Return a value as text for the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(text_of, value)) if isinstance(value, list | tuple) else str(value)
