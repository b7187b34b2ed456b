"""From one declaration of a setting: its flag, its help, and its key in the config files read and written.

A command's settings are fields of a frozen dataclass, or of sections, which are such dataclasses themselves.
A field ``micro_batch_size`` of section ``batch`` is the flag ``--micro-batch-size``, and in a file

    [batch]
    micro-batch-size = 8

Flags win over the file, which wins over defaults. Each setting has a parser, which makes its value of a text
or raises ``argparse.ArgumentTypeError``. Standard library only, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from payload.errors import UsageError

Read = Callable[[str], Any]


def whole(least: int, most: int | None = None) -> Read:
    """A whole number of ``least`` or more."""
    wanted = f"of {least} or more" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        return value

    return read


count = whole(1)


def number(text: str) -> float:
    """Any finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _number_that(fits: Callable[[float], bool], complaint: str) -> Read:
    def read(text: str) -> float:
        value = number(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is {complaint}")
        return value

    return read


positive = _number_that(lambda value: value > 0, "not a number above 0")
share = _number_that(lambda value: 0 < value <= 1, "not above 0 and at most 1")
non_negative = _number_that(lambda value: value >= 0, "below 0")
fraction = _number_that(lambda value: 0 <= value < 1, "not in [0, 1)")


def memory(text: str) -> int:
    """Bytes, such as 4096, 4KiB or 256MiB."""
    digits = text.rstrip("KMGiB")
    units = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    unit = text[len(digits) :]
    if not digits.isdecimal() or unit not in units or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4096, 4KiB or 256MiB")
    return int(digits) * units[unit]


def widths(text: str) -> tuple[int, ...]:
    """Whole numbers of 1 or more, by commas."""
    return tuple(count(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Names by commas, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def some_of(*words: str) -> Read:
    """Some of a few words, by commas."""

    def read(text: str) -> tuple[str, ...]:
        return tuple(one_of(*words)(name) for name in names(text))

    return read


def data_name(text: str) -> str:
    """A data set by its kind and, for some, where it is."""
    kind, _, where = text.partition(":")
    if kind not in ("digits", "idx", "text", "synthetic") or (kind in ("idx", "text")) != bool(where):
        raise argparse.ArgumentTypeError(f"{text!r} is none of digits, idx:DIR, text:FILE, synthetic")
    return f"{kind}:{path(where)}" if where else text


def path(text: str) -> Path:
    """A file or folder; ``~/`` is the home of the user that runs this."""
    return Path(os.path.expanduser(text))  # noqa: PTH111  # it never raises


def word_or_path(text: str) -> str:
    """A word such as ``auto``, or what ``path`` reads."""
    return os.path.expanduser(text)  # noqa: PTH111  # it never raises


def tokenizer_name(text: str) -> str:
    """``bytes``, ``bpe:N`` with more tokens than there are bytes, or ``gpt2:DIR``."""
    kind, _, where = text.partition(":")
    enough = kind == "bpe" and where.isdecimal() and int(where) > 256  # noqa: PLR2004
    if text != "bytes" and not enough and not (kind == "gpt2" and where):
        raise argparse.ArgumentTypeError(f"{text!r} is none of bytes, bpe:N with N above 256, gpt2:DIR")
    return f"{kind}:{path(where)}" if kind == "gpt2" else text


def yes_or_no(text: str) -> bool:
    """As TOML writes it."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def one_of(*words: str) -> Read:
    """One of a few words."""

    def read(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}")
        return text

    return read


DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class GemmSize:
    """Of each rank's product: (m, k) times (k, n)."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


def sizes(text: str) -> tuple[GemmSize, ...]:
    """Shapes of products, by commas."""
    found = [[count(number) for number in part.split("x")] for part in text.split(",")]
    if any(len(numbers) not in (1, 3) for numbers in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form N or MxKxN")
    return tuple(GemmSize(*(numbers * 3)[:3]) for numbers in found)


def dtypes(text: str) -> tuple[str, ...]:
    """Formats of numbers, by commas."""
    return tuple(one_of(*DTYPES)(name) for name in text.split(","))


S = TypeVar("S")


_NOTHING = (None, 0, (), "none", "never", "constant")
"""Values that ask for nothing: where a setting has no effect, they have the one that was wanted."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Where a setting has an effect: where a fact is one of some values.

    Facts are the other settings, by the names of their fields, and what ``refuse_idle`` is told.
    """

    fact: str
    values: tuple[Any, ...]  # (): any that asks for something
    wanted: str  # the same for people
    files: bool = True  # or else a config file may have the setting anywhere

    def met(self, value: Any) -> bool:
        if not self.values:
            return value not in _NOTHING
        return any(one in self.values for one in (value if isinstance(value, tuple) else (value,)))


@dataclass(frozen=True, slots=True)
class Fact:
    """What a setting may need."""

    value: Any
    words: str  # for people: with, on or in what a setting has no effect


def needs(field_name: str, *values: Any, wanted: str = "") -> Needs:
    """That another setting is one of these, or else that it is set."""
    flag = f"--{field_name.replace('_', '-')}"
    return Needs(field_name, values, wanted or f"with {flag} {' or '.join(map(str, values))}".rstrip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The settings of a command, and which of them were given."""

    given: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """By path, where: flags in "", and what in a file is not as it would be without it in "FILE: "."""


T = TypeVar("T", bound=Command)


def setting(default: Any, read: Read, metavar: str, about: str, *only: Needs, flag: str = "") -> Any:
    """A field that the user can set.

    Args:
        only: where it has an effect; see ``refuse_idle``.
        flag: needed where it is not the field's name with dashes.
    """
    metadata = {"read": read, "metavar": metavar, "about": about, "only": only, "flag": flag}
    return field(default=default, metadata=metadata)


def required(read: Read, metavar: str, about: str) -> Any:
    """A field that the user must set."""
    return setting(MISSING, read, metavar, about)


def words(read: Read, metavar: str, about: str) -> Any:
    """A field that takes the words without a flag, at least one."""
    metadata = {"read": read, "metavar": metavar, "about": about, "only": (), "flag": "", "words": True}
    return field(default=MISSING, metadata=metadata)


def choice(default: str, words: tuple[str, ...], about: str, *only: Needs) -> Any:
    """A field that is one of a few words."""
    return setting(default, one_of(*words), "|".join(words), about, *only)


def switch(default: bool, about: str, *only: Needs) -> Any:
    """A field that ``--flag`` and ``--no-flag`` set."""
    return setting(default, yes_or_no, "", about, *only)


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
    def key(self) -> str:
        """What it is called in a file; with two dashes before it, its flag."""
        return self.field.metadata["flag"] or self.field.name.replace("_", "-")

    @property
    def path(self) -> str:
        return f"[{self.section}] {self.key}" if self.section else self.key

    def of(self, config: Any) -> Any:
        """Its value in a command's settings."""
        return getattr(getattr(config, self.section) if self.section else config, self.field.name)

    def told(self, value: Any) -> str:
        """Of this value, with what something else has no effect."""
        if value is None or value is False:
            return "without"
        return f"with --{self.key}" if value is True else f"with --{self.key} {_text(value)}"

    def asks(self, value: Any) -> bool:
        """Whether such a value asks for something."""
        return bool(value != self.field.default) if isinstance(value, bool) else value not in _NOTHING

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Its flag. It leaves nothing in the namespace unless it is given."""
        about = str(self.field.metadata["about"])
        if self.field.default not in (None, (), MISSING):
            about += f" (default {_text(self.field.default).replace('%', '%%')})"
        if "words" in self.field.metadata:
            read, metavar = self.field.metadata["read"], self.field.metadata["metavar"]
            group.add_argument(self.path, nargs="+", type=read, metavar=metavar, help=about)
            return
        given: dict[str, Any] = {"dest": self.path, "default": argparse.SUPPRESS, "help": about}
        if self.field.metadata["read"] is yes_or_no:
            given["action"] = argparse.BooleanOptionalAction
        else:
            given |= {"type": self.field.metadata["read"], "metavar": self.field.metadata["metavar"]}
            given["required"] = self.field.default is MISSING
        group.add_argument(f"--{self.key}", **given)


def settings_of(command: type[Any]) -> Iterator[_Setting]:
    """All settings of a command, those of its sections too."""
    for each in dataclasses.fields(command):
        kind: Any = each.default_factory
        if dataclasses.is_dataclass(kind):
            yield from (_Setting(each.name, kind, inner) for inner in dataclasses.fields(kind))  # type: ignore[arg-type]
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
        _add_flags(sub, command)
        if command is with_file:
            sub.add_argument(
                "--config",
                type=Path,
                metavar="FILE",
                help="TOML with any of these settings; flags win over it",
            )
    return parser


def _add_flags(parser: argparse.ArgumentParser, command: type[Any]) -> None:
    """A flag for every setting of a command, under its section's title."""
    groups: dict[type[Any], argparse._ActionsContainer] = {command: parser}
    for one in settings_of(command):
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
    read = _read_file(command, file, named_by) if file else {}
    values = {**read, **flags}
    default = {one.path: one.field.default for one in settings_of(command)}
    given = {path: f"{named_by}: {file}: " for path, value in read.items() if value != default[path]}
    sections: dict[str, tuple[type[Any], dict[str, Any]]] = {"": (command, {})}
    for one in settings_of(command):
        _, fields = sections.setdefault(one.section, (one.kind, {}))
        if one.path in values:
            fields[one.field.name] = values[one.path]
    _, own = sections.pop("")
    parts = {name: kind(**fields) for name, (kind, fields) in sections.items()}
    return command(given=given | dict.fromkeys(flags, ""), **own, **parts)


def refuse_idle(config: Command, facts: Mapping[str, Fact]) -> None:
    """
    Args:
        facts: of the run, as far as they are known yet.

    Raises:
        UsageError: what was given would have no effect.
    """
    every = list(settings_of(type(config)))
    own = {one.field.name: Fact(one.of(config), one.told(one.of(config))) for one in every}
    known = {**own, **facts}
    for one in every:
        where, value = config.given.get(one.path), one.of(config)
        for need in one.field.metadata["only"] if where is not None and one.asks(value) else ():
            fact = known.get(need.fact)
            if fact and not need.met(fact.value) and (need.files or not where):
                name = one.path if where else f"--no-{one.key}" if value is False else f"--{one.key}"
                raise UsageError(
                    f"{where}{name}: it has an effect only {need.wanted}, none {fact.words}: leave it out",
                    code="setting-without-effect",
                )


def _read_file(command: type[Any], file: Path, named_by: str) -> dict[str, Any]:
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
            values[path] = known[path].field.metadata["read"](_text(value))
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
    values = ((one.field.name, one.of(config)) for one in settings_of(type(config)))
    return {name: str(value) if isinstance(value, Path) else value for name, value in values}


def from_record(command: type[T], record: Mapping[str, Any], flags: Mapping[str, Any]) -> T:
    """What ``to_record`` made a record of, but for the ``flags``."""
    values = {
        one.path: one.field.metadata["read"](_text(record[one.field.name]))
        for one in settings_of(command)
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
