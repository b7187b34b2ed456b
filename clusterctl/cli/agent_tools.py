"""The commands that agents may use, and their arguments: the only list of both.

Names, help and types come from the commands' own declarations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from clusterctl.cli.main import LazyVerb
from clusterctl.cli.options import given_flags
from clusterctl.cli.verbs import VERBS
from clusterctl.spec.agent import AgentLimits, read_limits
from clusterctl.spec.names import Local, reject_unknown
from clusterctl.state.ledger import RUNS
from clusterctl.state.workspace import config_file


@dataclass(frozen=True, slots=True)
class Tool:
    """A command that agents may use.

    takes: the names of its arguments, as the command line has them, without dashes.
    fixed: words that each call has. given: arguments of a call that does not give them itself.
    of_file: whether the call may name a spec file.
    of_cluster: whether it is about a cluster.
    destroys: whether it can remove or replace what exists. repeatable: whether a second call with
    the same arguments changes nothing more. of_jobs: whether its answers have texts from jobs.
    """

    takes: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    of_file: bool = False
    of_cluster: bool = True
    destroys: bool = False
    repeatable: bool = True
    of_jobs: bool = False


_SUBMIT: Final = tuple(
    "target args m variant run weights name nodes tasks_per_node cpus gpus mem time partition "
    "account qos constraint array sweep pack scaling after from_run requeue launcher "
    "include exclude folder env secret requirements env_path module "
    "container mount tag note".split()
)
_WHERE: Final = tuple(
    "target variant nodes tasks_per_node cpus gpus mem time partition account qos".split()
)
_REPLAY: Final = tuple("run set failed code mem time partition account qos tag note".split())
# Otherwise runs of jobs that were submitted in other folders are written there.
_OUT: Final = MappingProxyType({"out": str(RUNS)})

TOOLS: Final[Mapping[str, Tool]] = MappingProxyType(
    {
        "list": Tool(of_cluster=False),
        "status": Tool(),
        "validate": Tool(of_file=True, of_cluster=False),
        "plan": Tool(of_file=True),
        "doctor": Tool(("hosts",)),
        "where": Tool(_WHERE),
        "jobs": Tool(("ids", "all"), of_jobs=True),
        "logs": Tool(("job_id", "rank", "stacks"), of_jobs=True),
        "top": Tool(("ids",), fixed=("--once",), of_jobs=True),
        "wait": Tool(("ids", "timeout"), of_jobs=True),
        "usage": Tool(("by", "since", "runs")),
        "runs list": Tool(
            ("where", "columns", "sort", "reverse", "since", "tag", "sweep", "goal", "tasks", "limit"),
            of_jobs=True,
        ),
        "runs show": Tool(("run",), of_jobs=True),
        "runs diff": Tool(("first", "second"), of_jobs=True),
        "report": Tool(("run",), of_jobs=True),
        "init": Tool(("provider", "name"), of_cluster=False),
        "collect": Tool(
            ("ids", "out", "checkpoints", "all"),
            given=_OUT,
        ),
        "get": Tool(
            ("paths",),
            fixed=("--no-settings",),
            destroys=True,
        ),
        "put": Tool(("paths",), destroys=True),
        "submit": Tool(_SUBMIT, repeatable=False),
        "replay": Tool(_REPLAY, repeatable=False),
        "up": Tool(of_file=True, fixed=("--yes",), destroys=True),
        "cancel": Tool(("ids",), destroys=True),
        "down": Tool(
            ("discard", "out"),
            fixed=("--yes",),
            given=_OUT,
            of_file=True,
            destroys=True,
        ),
        "node remove": Tool(("names",), fixed=("--yes",), destroys=True),
    }
)  # fmt: skip
# Arguments that more than one tool has, in the fewest words: they are in every client's context.
_HELP: Final = MappingProxyType(
    {
        "cluster": "Name; default: cluster.yaml's.",
        "file": "Spec file.",
        # See ``MOST_WAIT_S``.
        "timeout": "At most 30m. Default: 10m.",
    }
)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a tool. option: its flag; "": it has none. off: the flag for false, or "".

    kind: bool, int, float or str. choices: its only values. local: see ``JobOption``.
    """

    name: str
    kind: type
    help: str
    option: str = ""
    off: str = ""
    is_list: bool = False
    required: bool = False
    choices: tuple[str, ...] = ()
    local: Local | None = None

    def schema(self) -> dict[str, Any]:
        names = {bool: "boolean", int: "integer", float: "number", str: "string"}
        one: dict[str, Any] = {"type": names[self.kind]}
        if self.choices:
            one["enum"] = [*self.choices]
        whole = {"type": "array", "items": one} if self.is_list else one
        return {**whole, "description": self.help} if self.help else whole


@cache
def locals_of(verb: str) -> Mapping[str, Local]:
    """Return what the arguments of a command have of the user's machine, if anything, by name."""
    return {each.name: each.local for each in _declared(verb) if each.local is not None}


def limits_of_user() -> AgentLimits:
    """Return the user's limits. A command that they misspell would stay on."""
    limits = read_limits(config_file())
    names = "`agent.verbs_off`: agents have no command"
    reject_unknown(limits.verbs_off, TOOLS, names, where=str(config_file()))
    return limits


@cache
def command_of(verb: str) -> Any:
    """Return the command that the command line runs for a verb."""
    return LazyVerb(verb).load()


def read_words(verb: str, words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Read the words after the name of a command as the command itself does.

    Return (its parameters, of its flags those that are set). None: the command refuses the words.
    """
    function = VERBS[verb].load()
    try:
        with command_of(verb).make_context(verb, [*words]) as context:
            params = dict(context.params)
    except click.UsageError:
        return None
    return params, given_flags(getattr(function, "flags", ()), params)


@cache
def arguments_of(verb: str) -> Mapping[str, Argument]:
    """Return the arguments of a tool by name, in the order of the table."""
    tool = TOOLS[verb]
    common = (*(("cluster",) if tool.of_cluster else ()), *(("file",) if tool.of_file else ()))
    found = {argument.name: argument for argument in _declared(verb)}
    return {name: found[name] for name in (*tool.takes, *common)}


def _declared(verb: str) -> Iterator[Argument]:
    for param in command_of(verb).params:
        words = [word for word in param.opts if word.startswith("-")]
        # The longest name: --nodes, not -N.
        option = max(words, key=len, default="")
        name = option.strip("-").replace("-", "_") or param.name
        kind, choices = _type_of(param.type)
        yield Argument(
            name=name,
            kind=kind,
            help=_HELP.get(name, " ".join((param.help or "").replace(" Repeatable.", "").split())),
            option=option,
            off=max(param.secondary_opts, key=len, default=""),
            is_list=param.multiple or param.nargs == -1,
            required=param.required,
            choices=choices,
            local=getattr(param, "local", None),
        )


def _type_of(kind: click.ParamType[Any]) -> tuple[type, tuple[str, ...]]:
    """Return (type of a value, the only values)."""
    if isinstance(kind, click.Choice):
        return str, tuple(kind.choices)
    kinds = {"boolean": bool, "integer": int, "integer range": int, "float range": float}
    return kinds.get(kind.name, str), ()


def schema_of(verb: str) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments."""
    arguments = arguments_of(verb)
    properties = {name: argument.schema() for name, argument in arguments.items()}
    if VERBS[verb].effect.needs_plan:
        properties["token"] = {"type": "string", "description": "That of the dry run."}
    required = [name for name, argument in arguments.items() if argument.required]
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def help_of(verb: str) -> str:
    """Return the description of a tool: the first sentence of the command's help."""
    summary = VERBS[verb].summary
    if VERBS[verb].effect.needs_plan:
        return f"{summary} Without `token`: a dry run, which returns one."
    return summary


def page_of(verb: str) -> str:
    """Return the whole help of a command, as text."""
    command = command_of(verb)
    with click.Context(command, info_name=f"clusterctl {verb}") as context:
        return str(command.get_help(context))


def manual_pages() -> Mapping[str, Path]:
    """Return the pages of the manual by name, such as `jobs` or `howto/sweep`."""
    from clusterctl.util.assets import data_folder

    folder = data_folder("docs")
    return {
        str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.md"))
    }
