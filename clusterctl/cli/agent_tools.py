"""The tools of agents: commands of the command line, and those of their arguments that agents may use.

Names, help, types and effects come from the commands' own declarations. A call's arguments are checked
against these, and become words of the command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final

import click

from clusterctl.cli.main import LazyVerb
from clusterctl.cli.verbs import VERBS
from clusterctl.errors import UsageError
from clusterctl.spec.agent import AgentLimits, read_limits
from clusterctl.spec.names import LocalValue, did_you_mean, reject_unknown
from clusterctl.spec.units import shown
from clusterctl.state.ledger import RUNS
from clusterctl.state.workspace import config_file

_OF_PLACE: Final = "nodes tasks_per_node cpus gpus mem time partition account qos"
# Command -> its arguments for agents. Those about a cluster also have `cluster`.
TOOLS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        verb: tuple(names.split())
        for verb, names in {
            "list": "",
            "status": "",
            "validate": "file",
            "plan": "file",
            "doctor": "hosts",
            "where": f"target variant {_OF_PLACE}",
            "jobs": "ids all",
            "logs": "job_id rank stacks",
            "top": "ids",
            "wait": "ids timeout",
            "usage": "by since",
            "runs list": "where columns over sort reverse since tag sweep goal tasks limit cluster",
            "runs show": "run cluster",
            "runs diff": "first second cluster",
            "report": "run cluster",
            "init": "provider name",
            "collect": "ids out checkpoints all",
            "get": "paths",
            "put": "paths",
            "submit": f"target args m variant run weights name {_OF_PLACE} constraint array sweep pack "
            "scaling after from_run requeue launcher include exclude folder env secret requirements "
            "env_path module container mount tag note dry_run",
            "replay": "run set failed code mem time partition account qos tag note dry_run",
            "up": "file dry_run",
            "cancel": "ids dry_run",
            "down": "out file dry_run",
            "node remove": "names dry_run",
            "manual": "page",
        }.items()
    }
)
# Tools are in every client's context, so that the server's instructions tell of these arguments once.
_TOLD: Final = frozenset({"cluster", "file", "dry_run"})
# The tool whose descriptions hold for arguments of the same name and help.
_FIRST: Final = "submit"
# See ``MOST_WAIT_S``.
_HELP: Final = MappingProxyType({"timeout": "At most 30m. Default: 10m."})
# Words of a command that would ask.
_YES: Final = "--yes"
# The most that all arguments of a call take, as JSON.
MOST: Final = 64 << 10  # bytes
_TYPES: Final = MappingProxyType(
    {
        bool: ("boolean", "true or false"),
        int: ("integer", "a whole number"),
        float: ("number", "a number"),
        str: ("string", "text"),
    }
)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a tool. option: its flag; "": it has none. off: the flag for false, or "".

    kind: bool, int, float or str. choices: its only values. default: of a call without it.
    """

    name: str
    kind: type
    help: str
    option: str = ""
    off: str = ""
    is_list: bool = False
    required: bool = False
    choices: tuple[str, ...] = ()
    default: str | None = None

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of a value, without a description."""
        one: dict[str, Any] = {"type": _TYPES[self.kind][0]}
        if self.choices:
            one["enum"] = [*self.choices]
        return {"type": "array", "items": one} if self.is_list else one

    def fault(self, value: Any) -> str:
        """Return what is wrong with a value, or with one of a list. "": nothing."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        kinds = (int, float) if self.kind is float else (self.kind,)
        if type(value) not in kinds and not (self.kind is str and is_number):
            return f"it must be {_TYPES[self.kind][1]}, not {shown(value)}"
        if self.choices and value not in self.choices:
            return f"it must be one of {', '.join(self.choices)}"
        if isinstance(value, str):
            try:
                is_text = "\0" not in value and bool(value.encode())
            except UnicodeEncodeError:
                is_text = False
            if not is_text:
                return "it has a null byte, or is not UTF-8" if value else "it is empty"
        return ""

    def words(self, value: Any) -> list[str]:
        """Return a value as words of the command line, none of which can become another option."""
        if self.kind is bool:
            return [self.option] if value else [self.off] if self.off else []
        # A single letter has its value in the next word, or joined to it.
        joint = f"{self.option}=" if self.option.startswith("--") else self.option
        return [f"{joint}{each}" for each in (value if self.is_list else [value])]


@cache
def command_of(verb: str) -> Any:
    """Return the command that the command line runs for a verb."""
    return LazyVerb(verb).load()


@cache
def arguments_of(verb: str) -> Mapping[str, Argument]:
    """Return the arguments of a tool by name, in the order of the table."""
    found = {argument.name: argument for argument in _declared(verb)}
    names = (*TOOLS[verb], *(["cluster"] if VERBS[verb].names_cluster else ()))
    return {name: found[name] for name in names}


def _declared(verb: str) -> Iterator[Argument]:
    for param in command_of(verb).params:
        words = [word for word in param.opts if word.startswith("-")]
        # The longest name: --nodes, not -N.
        option = max(words, key=len, default="")
        name = option.strip("-").replace("-", "_") or param.name
        is_choice = isinstance(param.type, click.Choice)
        yield Argument(
            name=name,
            kind=str if is_choice else _KINDS.get(param.type.name, str),
            help=_HELP.get(name, " ".join((param.help or "").replace(" Repeatable.", "").split())),
            option=option,
            off=max(param.secondary_opts, key=len, default=""),
            is_list=param.multiple or param.nargs == -1,
            required=param.required,
            choices=tuple(param.type.choices) if is_choice else (),
            # Otherwise runs of jobs that were submitted in other folders are written there.
            default=str(RUNS) if getattr(param, "local", None) is LocalValue.WRITTEN else None,
        )


_KINDS: Final = MappingProxyType(
    {"boolean": bool, "integer": int, "integer range": int, "float range": float}
)


def checked(verb: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, with the defaults for agents. Numbers in place of text become
    text.

    Raises UsageError: an argument is unknown, missing, too long, or of another type.
    """
    try:
        size = len(json.dumps(dict(given)))
    except (TypeError, ValueError, RecursionError) as exc:
        raise _wrong(verb, "the arguments", str(exc)) from exc
    if size > MOST:
        raise _wrong(verb, "the arguments", f"they take {size:,} bytes, and at most {MOST:,}")
    known = arguments_of(verb)
    for name in given:
        if name not in known:
            names = ", ".join(known) or "none"
            raise UsageError(
                f"`{verb}` has no argument {shown(name)} for agents",
                about="argument",
                fix=did_you_mean(name, known) or f"its arguments: {names}",
            )
    values: dict[str, Any] = {}
    for name, argument in known.items():
        value = argument.default if given.get(name) is None else given[name]
        if argument.required and value in (None, "", []):
            raise _wrong(verb, name, "it is missing")
        if value is None:
            continue
        if argument.is_list and not isinstance(value, list):
            raise _wrong(verb, name, f"it must be a list, not {shown(value)}")
        each = value if argument.is_list else [value]
        if fault := next(filter(None, map(argument.fault, each)), ""):
            raise _wrong(verb, name, fault)
        each = [str(one) if argument.kind is str else one for one in each]
        values[name] = each if argument.is_list else each[0]
    return values


def _wrong(verb: str, name: str, why: str) -> UsageError:
    return UsageError(
        f"`{verb}`: {name} can't be used",
        about="argument",
        why=why,
        fix="correct the argument; the tool's schema describes it",
    )


def words_of(verb: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return the words of the command line for checked arguments."""
    known = {name: each for name, each in arguments_of(verb).items() if name in arguments}
    options = [
        word
        for name, each in known.items()
        for word in (each.words(arguments[name]) if each.option else ())
    ]
    places = [
        word
        for name, each in known.items()
        for word in (() if each.option else each.words(arguments[name]))
    ]
    asks = any(_YES in param.opts for param in command_of(verb).params)
    # `submit JOB -- ARGUMENTS`: only the program's arguments may follow the dashes.
    if verb == "submit" and "target" in arguments:
        job, *places = places
        if job.startswith("-"):
            raise _wrong(verb, "target", f"{shown(job)} is an option")
        options.append(job)
    return [
        *verb.split(),
        *([_YES] if asks else []),
        *options,
        *(["--", *places] if places else []),
    ]


def limits_of_user() -> AgentLimits:
    """Return the user's limits. A command that they misspell would stay on."""
    limits = read_limits(config_file())
    names = "`agent.verbs_off`: agents have no command"
    reject_unknown(limits.verbs_off, TOOLS, names, where=str(config_file()))
    return limits


def schema_of(verb: str) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments."""
    arguments = arguments_of(verb)
    told = {} if verb == _FIRST else arguments_of(_FIRST)
    properties = {}
    for name, argument in arguments.items():
        is_told = name in _TOLD or (name in told and told[name].help == argument.help)
        text = "" if is_told else _named(verb, argument.help)
        properties[name] = argument.schema() | ({"description": text} if text else {})
    required = [name for name, argument in arguments.items() if argument.required]
    # ``checked`` refuses other arguments, with a code.
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
    }


_COMMAND: Final = re.compile(r"`clusterctl ([^`]+)`")
_FLAG: Final = re.compile(r"(?<![\w-])(?:--([a-z][a-z-]*)|-f\b)(=?)")


def in_words_of_tools(verb: str, text: str) -> str:
    """Return a text about a command with the names of tools and their arguments in place of commands
    and their flags: `` `clusterctl logs 2` `` becomes `` `logs 2` ``, and ``--time`` becomes ``time``.
    Those that agents do not have stay.
    """

    def of_command(match: re.Match[str]) -> str:
        words = match[1]
        found = [name for name in TOOLS if f"{words} ".startswith(f"{name} ")]
        if not found:
            return match[0]
        name = max(found, key=len)
        rest = _named(name, words.removeprefix(name).replace(" -- ", " "))
        return f"`{name.replace(' ', '_')}{rest}`"

    parts = _COMMAND.split(text)
    between = [_named(verb, part) for part in parts[::2]]
    commands = [of_command(match) for match in _COMMAND.finditer(text)]
    return "".join(part for pair in zip_longest(between, commands, fillvalue="") for part in pair)


def _named(verb: str, text: str) -> str:
    """Return a text with the names of a tool's arguments in place of flags."""
    known = arguments_of(verb)

    def of_flag(match: re.Match[str]) -> str:
        name = (match[1] or "file").replace("-", "_")
        return f"{name}{match[2]}" if name in known else match[0]

    return _FLAG.sub(of_flag, text)
