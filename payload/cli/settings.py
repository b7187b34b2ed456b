"""From one declaration of a setting: its flag, its help, and its key in the config files read and written.

A command's settings are fields of a frozen dataclass, or of sections, which are such dataclasses themselves.
A field ``micro_batch_size`` of section ``batch`` is the flag ``--micro-batch-size``, and in a file

    [batch]
    micro-batch-size = 8

Flags win over the file, which wins over defaults. Names of fields are unique in a command. Each setting has a
function of ``values`` that reads it. Standard library only, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from payload.cli.values import Read, one_of, yes_or_no
from payload.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The settings of a command, and which of them were given."""

    given: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """By field, the place: "" for a flag, and "FILE: " for a file's value that is not the default."""


S = TypeVar("S")
T = TypeVar("T", bound=Command)


def setting(
    default: Any, read: Read, metavar: str, about: str, *, flag: str = "", words: bool = False
) -> Any:
    """A field that the user can set.

    Args:
        default: MISSING if the user must set it.
        flag: its name on the command line. Default: the field's name with dashes.
        words: it takes the words without a flag, at least one.
    """
    metadata = {"read": read, "metavar": metavar, "about": about, "flag": flag, "words": words}
    return field(default=default, metadata=metadata)


def choice(default: str, words: tuple[str, ...], about: str) -> Any:
    """A field that is one of a few words."""
    return setting(default, one_of(*words), "|".join(words), about)


def switch(default: bool, about: str) -> Any:
    """A field that ``--flag`` and ``--no-flag`` set."""
    return setting(default, yes_or_no, "", about)


def section(kind: type[S]) -> S:
    """A field that holds the settings of ``kind``, whose docstring is their title in the help."""
    made: S = field(default_factory=kind)
    return made


@dataclass(frozen=True, slots=True)
class _Setting:
    """One field, and where it is."""

    section: str  # "" for a field of the command itself
    kind: type[Any]  # the dataclass that has it
    field: Field[Any]

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def key(self) -> str:
        """What it is called in a file; with two dashes before it, its flag."""
        return self.field.metadata["flag"] or self.name.replace("_", "-")

    @property
    def path(self) -> str:
        return f"[{self.section}] {self.key}" if self.section else self.key

    def of(self, config: Any) -> Any:
        """Its value in a command's settings."""
        return getattr(getattr(config, self.section) if self.section else config, self.name)

    def asks(self, value: Any) -> bool:
        """Return whether the value asks for something. If not, it is harmless where it has no effect."""
        if isinstance(value, bool):
            return bool(value != self.field.default)
        return value not in (None, 0, (), "none", "never", "constant")

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Add its flag. The namespace has it only if it is given."""
        metadata, default = self.field.metadata, self.field.default
        about = str(metadata["about"])
        if default not in (None, (), MISSING):
            about += f" (default {_text(default).replace('%', '%%')})"
        reading = {"type": metadata["read"], "metavar": metadata["metavar"]}
        flag: dict[str, Any] = {"dest": self.name, "default": argparse.SUPPRESS}
        if metadata["words"]:
            group.add_argument(self.name, nargs="+", help=about, **reading)
        elif metadata["read"] is yes_or_no:
            group.add_argument(f"--{self.key}", action=argparse.BooleanOptionalAction, help=about, **flag)
        else:
            required = default is MISSING
            group.add_argument(f"--{self.key}", required=required, help=about, **flag, **reading)


def settings_of(command: type[Any]) -> Iterator[_Setting]:
    """All settings of a command, those of its sections too."""
    for each in fields(command):
        kind: Any = each.default_factory
        if is_dataclass(kind):
            yield from (_Setting(each.name, kind, inner) for inner in fields(kind))  # type: ignore[arg-type]
        elif each.metadata:
            yield _Setting("", command, each)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print a usage text from every rank and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see `{self.prog} --help`", code="bad-flag")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse here what is unknown: the parser of a command knows what is near."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


def parser_of(commands: Mapping[str, type[Command]], with_file: type[Command]) -> argparse.ArgumentParser:
    """The command line of these commands, of which one takes a config file, too."""
    parser = _Parser(prog="python -m payload", description="Train, probe and watch on a cluster's nodes.")
    chosen = parser.add_subparsers(
        required=True, dest="command", metavar=f"{{{','.join(commands)}}}", parser_class=_Parser
    )
    for name, command in commands.items():
        sub = chosen.add_parser(name, help=command.__doc__, description=command.__doc__, allow_abbrev=False)
        groups: dict[type[Any], argparse._ActionsContainer] = {command: sub}
        for one in settings_of(command):
            if one.kind not in groups:
                groups[one.kind] = sub.add_argument_group((one.kind.__doc__ or "").rstrip("."))
            one.add_to(groups[one.kind])
        if command is with_file:
            about = "TOML with any of these settings; flags win over it"
            sub.add_argument("--config", type=Path, metavar="FILE", help=about)
    return parser


def make(
    command: type[T], flags: Mapping[str, Any], file: Path | None = None, *, named_by: str = "--config"
) -> T:
    """The settings of a command.

    Args:
        flags: values by field; of them, what belongs to no setting is left alone.
        file: a config file, for what the flags leave open.
        named_by: the flag that led to the file, for messages.

    Raises:
        UsageError: the file cannot be read, or says what is not known or not possible.
    """
    read = _read_file(command, file, named_by) if file else {}
    default = {one.name: one.field.default for one in settings_of(command)}
    given = {name: f"{named_by}: {file}: " for name, value in read.items() if value != default[name]}
    values = {**read, **flags}

    def filled(kind: type[Any], **more: Any) -> Any:
        own = {one.name: values[one.name] for one in fields(kind) if one.metadata and one.name in values}
        return kind(**own, **more)

    kinds = {one.section: one.kind for one in settings_of(command) if one.section}
    sections = {name: filled(kind) for name, kind in kinds.items()}
    made: T = filled(command, given=given | dict.fromkeys(flags, ""), **sections)
    return made


def refuse_idle(config: Command, names: str, wanted: str, *, in_files: bool = True) -> None:
    """Refuse settings that were given although they have an effect only ``wanted``.

    Args:
        names: of their fields, by spaces.
        wanted: the condition, such as "with --optimizer sgd".
        in_files: refuse them in a config file as well. If not, a file may hold them for another launch.

    Raises:
        UsageError: one of them was given, and asks for something.
    """
    known = {one.name: one for one in settings_of(type(config))}
    for one in (known[name] for name in names.split()):
        place, value = config.given.get(one.name), one.of(config)
        if place is None or (place and not in_files) or not one.asks(value):
            continue
        name = one.path if place else f"--no-{one.key}" if value is False else f"--{one.key}"
        raise UsageError(
            f"{place}{name}: it has an effect only {wanted}: leave it out", code="setting-without-effect"
        )


def _read_file(command: type[Any], file: Path, named_by: str) -> dict[str, Any]:
    """The values in a config file, by field."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(
            f"{named_by}: {file} cannot be read: {exc.strerror}", code="file-unreadable"
        ) from exc
    except ValueError as exc:  # what TOML or UTF-8 forbid
        raise UsageError(f"{named_by}: {file} is not TOML: {exc}", code="not-toml") from exc
    known = {one.path: one for one in settings_of(command)}
    values: dict[str, Any] = {}
    for path, value in _flat(tables):
        if path not in known:
            raise UsageError(
                f"{named_by}: {file}: there is no {path}{_hint(path, list(known))}", code="unknown-key"
            )
        try:
            values[known[path].name] = known[path].field.metadata["read"](_text(value))
        except argparse.ArgumentTypeError as exc:
            raise UsageError(f"{named_by}: {file}: {path}: {exc}", code="bad-value") from exc
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
    for one in settings_of(type(config)):
        if one.section != section:
            section = one.section
            lines += ["", f"[{section}]"]
        if (value := one.of(config)) not in (None, ()):  # which no text says
            lines.append(f"{one.key} = {_toml(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def to_record(config: Any) -> dict[str, Any]:
    """All settings of a command by the names of their fields, without sections, for JSON."""
    values = ((one.name, one.of(config)) for one in settings_of(type(config)))
    return {name: str(value) if isinstance(value, Path) else value for name, value in values}


def from_record(command: type[T], record: Mapping[str, Any], flags: Mapping[str, Any]) -> T:
    """What ``to_record`` made a record of, but for the ``flags``."""
    values = {
        one.name: one.field.metadata["read"](_text(record[one.name]))
        for one in settings_of(command)
        if record.get(one.name) not in (None, [])
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
