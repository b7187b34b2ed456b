"""The options of all commands, completions for TAB, and the handling of errors in commands."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args, get_origin

import click

from clusterctl.cli.help import Completer, HelpArgument, HelpCommand, HelpOption, with_whole_help
from clusterctl.cli.output import ENDINGS, Screen, Terminated
from clusterctl.cli.verbs import VerbFunction
from clusterctl.errors import (
    ClusterctlError,
    Failure,
    MachineError,
    UsageError,
    foreign_package_error,
    printable,
)
from clusterctl.spec.names import LocalValue
from clusterctl.state.workspace import clusters_up, state_home, write_atomic
from clusterctl.transport.sudo import PASSWORDS
from clusterctl.util.confine import reject_written
from clusterctl.util.disk import file_error, read_rows

if TYPE_CHECKING:
    from clusterctl.spec.job_options import JobOption

# Completions come from the workspace and the current folder, never from the network. They have no
# special characters, because zsh evaluates even the descriptions of completions.
_PLAIN = re.compile(r"[\w.+][\w.+-]*")
_NOT_PLAIN = re.compile(r"[^\w.+-]")

INTERRUPTED = 130


def job_ids(ctx: click.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete IDs of jobs submitted from this machine, newest first. Return (ID, job's name)."""
    entries: dict[str, dict[str, Any]] = {}
    with suppress(OSError, UnicodeDecodeError):
        for row in read_rows(_workspace(ctx) / "jobs.jsonl"):
            entries.setdefault(str(row.get("token")), {}).update(row)
    names = {str(row.get("job_id", "")): str(row.get("name") or "") for row in entries.values()}
    return [
        (job_id, _NOT_PLAIN.sub("_", names[job_id]))
        for job_id in offered(reversed(names), incomplete)
    ]


def run_names(_: object, incomplete: str) -> list[str]:
    return offered(sorted(path.parent.name for path in Path("runs").glob("*/run.json")), incomplete)


def hosts(ctx: click.Context, incomplete: str) -> list[str]:
    return offered((host["name"] for host in _hosts(ctx)), incomplete)


def partitions(ctx: click.Context, incomplete: str) -> list[str]:
    names = dict.fromkeys(host["partition"] for host in _hosts(ctx) if host.get("partition"))
    return offered(names, incomplete)


def clusters(_: object, incomplete: str) -> list[str]:
    try:
        return offered(clusters_up(), incomplete)
    except MachineError:
        return []


def offered(words: Iterable[str], incomplete: str) -> list[str]:
    """Return the completions of an incomplete word."""
    return [word for word in words if word.startswith(incomplete) and _PLAIN.fullmatch(word)]


def _workspace(ctx: click.Context) -> Path:
    """Return the workspace folder of the cluster that the options typed so far select."""
    typed = {
        **(ctx.parent.params if ctx.parent else {}),
        **{k: v for k, v in ctx.params.items() if v},
    }
    file = typed.get("file")
    name = typed.get("cluster")
    screen = Screen(json=False, color=False, file=Path(file) if file else None, cluster=name)
    with suppress(ClusterctlError):
        return replace(screen.chosen(), note=lambda _: None).workspace().root
    return Path(os.devnull)


def _hosts(ctx: click.Context) -> list[dict[str, Any]]:
    try:
        return list(json.loads((_workspace(ctx) / "hosts.json").read_bytes())["hosts"])
    except (OSError, ValueError, KeyError):
        return []


Words = list[str] | None
# A function that returns completions of a word, each with a text about it or without.
Tab = Callable[[click.Context, str], Sequence[str] | Sequence[tuple[str, str]]]
# A word in ``JobOption.tab`` -> its completions.
_TABS: Final[Mapping[str, Tab]] = {"partitions": partitions, "runs": run_names}
# The end of the keyword argument of a flag that sets another flag's keyword argument.
_SYNONYM: Final = "_synonym"


@dataclass(frozen=True, slots=True)
class ParameterDeclaration:
    """The declaration of a command's parameter; its name, type and default are the function's.

    help: one or more sentences. names: the flags of an option. Empty: derived from its name.
    metavar: the placeholder for its value. Default: the type.
    values: those of an enumeration that the option takes. Empty: all.
    tab: returns completions when the user presses TAB, or has them.
    parser: converts the value. It raises ValueError with the reason if the value is wrong.
    least, most: the limits of a number. hidden: whether the help leaves it out.
    local: the part of a value that is on the user's machine. A shell completes paths.
    topic: its heading in the help of a command with many options. is_usual: whether the short help
        has it.
    """

    help: str
    names: tuple[str, ...] = ()
    _: KW_ONLY
    is_argument: bool = False
    metavar: str | None = None
    values: tuple[str, ...] = ()
    tab: Tab | tuple[str, ...] = ()
    parser: Callable[[str], Any] | None = None
    least: float | None = None
    most: float | None = None
    hidden: bool = False
    local: LocalValue | None = None
    topic: str = ""
    is_usual: bool = False


def option(text: str, *names: str, **more: Any) -> ParameterDeclaration:
    """Return the declaration of an option. more: fields of ``ParameterDeclaration``."""
    return ParameterDeclaration(text, names, **more)


def argument(text: str, **more: Any) -> ParameterDeclaration:
    """Return the declaration of an argument. more: fields of ``ParameterDeclaration``."""
    return ParameterDeclaration(text, is_argument=True, **more)


def flag(kind: Any, text: str, *names: str, **settings: Any) -> Any:
    return Annotated[kind | None, option(text, *names, **settings)]


def job_flags(options: Iterable[JobOption]) -> dict[str, Any]:
    """Return the flags of options of a job, and hidden flags with Slurm's names for them.

    The keys are names of keyword arguments, as for ``takes``.
    """
    flags: dict[str, Any] = {}
    for own in options:
        letters = [f"-{own.letter}"] if own.letter else []
        if own.is_argument:
            continue
        if own.kind is bool:
            names = [f"{own.flag}/{own.flag.replace('--', '--no-', 1)}"]
        else:
            names = [own.flag, *(letters if own.sbatch == own.flag else [])]
        text = f"{own.help} Repeatable." if own.is_list else own.help
        tab = _TABS[own.tab] if isinstance(own.tab, str) else own.tab
        flags[own.name] = flag(
            own.kind,
            text,
            *names,
            metavar=own.metavar,
            tab=tab,
            local=own.local,
            topic=own.topic,
            is_usual=own.is_usual,
        )
        if own.sbatch and own.sbatch != own.flag and not own.has_own_values:
            slurms = flag(own.kind, f"{own.flag}.", own.sbatch, *letters, hidden=True)
            flags[f"{own.name}{_SYNONYM}"] = slurms
    return flags


class OutputFormat(StrEnum):
    """The form of a command's results. Few commands have all of them."""

    TEXT = "text"
    JSON = "json"
    MD = "md"
    CSV = "csv"
    LATEX = "latex"


def folder_path(text: str) -> Path:
    """Parse the path of a folder to write. Reject an empty text, which would mean the current folder.

    Raises LimitError: an agent's command may not write there.
    """
    if not text:
        raise ValueError("the path is empty; write . for the current folder")
    reject_written(text)
    return Path(text)


File = Annotated[
    Path | None,
    option("Cluster spec. Default: ./cluster.yaml, or a local cluster.", "--file", "-f"),
]
Cluster = Annotated[
    str | None,
    option(
        "Use this cluster and its applied spec, instead of a spec file.", "--cluster", tab=clusters
    ),
]
Format = Annotated[
    OutputFormat | None,
    option("Show results as text or as JSON.", "--output", "-o", values=("text", "json")),
]
Verbose = Annotated[
    bool, option("Show more detail, and tracebacks of unexpected errors.", "--verbose", "-v")
]
OutFolder = Annotated[
    Path | None,
    option(
        "Folder for collected runs. Default: ./runs.",
        parser=folder_path,
        metavar="PATH",
        local=LocalValue.WRITTEN,
    ),
]
JobId = Annotated[
    str,
    argument("Job ID, such as 12, 12_3 (a task) or demo/12, or a run.", metavar="ID", tab=job_ids),
]
JobIds = Annotated[
    list[str],
    argument(
        "Job IDs, such as 12, 12_3 (a task) or demo/12, or runs.",
        metavar="ID...",
        tab=job_ids,
    ),
]
NoColor = Annotated[bool, option("Disable colors, as the variable NO_COLOR does.", "--no-color")]

COMMON: Final = {
    "file": File,
    "cluster": Cluster,
    "output": Format,
    "verbose": Verbose,
    "no_color": NoColor,
}


def takes(flags: Mapping[str, Any]) -> Callable[[VerbFunction], VerbFunction]:
    """Return a decorator that adds options to a command, which gets those that the user sets.

    flags: name of the keyword argument -> type of its option, with its declaration.
    """

    def decorate(function: VerbFunction) -> VerbFunction:
        function.flags = flags  # type: ignore[attr-defined]
        return function

    return decorate


def given_flags(flags: Iterable[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the flags that the user has set: keyword argument -> value."""
    return {
        name.removesuffix(_SYNONYM): arguments[name]
        for name in flags
        if arguments[name] not in (None, [], ())
    }


def command(name: str, function: VerbFunction, without: Collection[str] = ()) -> HelpCommand:
    """Turn ``function(screen, ...)`` into a command that also has the options in ``COMMON``.

    The function returns the exit code; ``None`` is 0. An option of the function replaces the option
    with the same name in ``COMMON``. without: the names of those in ``COMMON`` that it can't use.
    The traceback of an unexpected error is written to the state
    folder.
    """
    flags = getattr(function, "flags", {})
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    declared = {
        parameter.name: (parameter.annotation, parameter.default)
        for parameter in own
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name not in flags
    }
    common = {
        name: kind for name, kind in COMMON.items() if name not in declared and name not in without
    }
    declared |= {name: (kind, None) for name, kind in {**flags, **common}.items()}
    params = [parameter_of(name, *each) for name, each in declared.items()]
    return HelpCommand(
        name,
        params=with_whole_help(params),
        callback=click.pass_context(functools.partial(_call, function, flags, without)),
        help=inspect.getdoc(function),
        rich_markup_mode=None,
    )


def _call(
    function: VerbFunction,
    flags: Mapping[str, Any],
    without: Collection[str],
    ctx: click.Context,
    /,
    **arguments: Any,
) -> int:
    """Call a command's function, show how it ends, and return the exit code."""
    common = {name: arguments.pop(name, None) for name in COMMON}
    # An empty name differs from a missing name, because a variable of a script may be empty.
    common = {n: ctx.obj[n] if v in (None, False) else v for n, v in common.items()}
    output = common.pop("output")
    no_color = common.pop("no_color") or os.environ.get("NO_COLOR")
    screen = Screen(json=output == "json", form=output or "", color=not no_color, **common)
    PASSWORDS.ask = screen.sudo_password
    given = given_flags(flags, arguments)
    arguments = {name: arguments[name] for name in arguments if name not in flags} | given
    try:
        _reject_unused(without, ctx)
        return function(screen, **arguments) or 0
    except (Exception, *ENDINGS) as exc:
        return end_of(exc, screen)


def _reject_unused(without: Iterable[str], ctx: click.Context) -> None:
    """Raise UsageError for an option before the command that the command can't use."""
    for name in (name for name in without if ctx.obj[name] is not None):
        *_, flag_name = get_args(COMMON[name])[1].names
        raise UsageError(
            f"`{ctx.command_path}` can't use {flag_name}",
            about="option-unused",
            why="it is about no single cluster",
            fix=f"leave out {flag_name}",
        )


def parameter_of(name: str, annotation: Any, default: Any) -> click.Parameter:
    """Return the parameter for a declared type, ``Annotated[TYPE, ParameterDeclaration]``."""
    kind, declared = get_args(annotation)
    (kind,) = {*(get_args(kind) if NoneType in get_args(kind) else (kind,))} - {NoneType}
    is_list = get_origin(kind) is list
    if is_list:
        (kind,) = get_args(kind)
    required = default is inspect.Parameter.empty
    if isinstance(default, StrEnum):
        default = default.value
    settings: dict[str, Any] = {
        "metavar": declared.metavar,
        "required": required,
    }
    if not required:
        # None would count as the value of a parameter that is missing.
        settings["default"] = default
    if declared.is_argument:
        count = -1 if is_list else 1
        kind = _type_of(kind, declared)
        positional = HelpArgument(
            param_decls=[name], type=kind, nargs=count, help=declared.help, **settings
        )
        positional.local, positional.completer = declared.local, _completer(declared)
        return positional
    names = declared.names or (f"--{name.replace('_', '-')}",)
    if kind is bool:
        del settings["metavar"]
        settings["is_flag"] = True
    else:
        settings["type"] = _type_of(kind, declared)
        settings["show_default"] = default not in (None, "", required)
    one = HelpOption(
        param_decls=[*names, name],
        help=declared.help,
        hidden=declared.hidden,
        multiple=is_list,
        **settings,
    )
    one.topic, one.is_usual, one.local = declared.topic, declared.is_usual, declared.local
    one.completer = _completer(declared)
    return one


def _completer(declared: ParameterDeclaration) -> Completer | None:
    tab = declared.tab
    is_path = declared.local is not None and declared.local.is_path
    if not tab and not is_path:
        return None

    def complete(ctx: click.Context, incomplete: str) -> list[Any]:
        # Only completion needs it.
        from click.shell_completion import CompletionItem

        if not tab:
            return [CompletionItem(incomplete, type="file")]
        found = tab(ctx, incomplete) if callable(tab) else offered(tab, incomplete)
        pairs = ((each, None) if isinstance(each, str) else each for each in found)
        return [CompletionItem(value, help=text) for value, text in pairs]

    return complete


class _Choice(click.Choice[str]):
    """One of the values of an enumeration of texts."""

    def __init__(self, kind: type[StrEnum], values: Sequence[str]) -> None:
        super().__init__(values or [each.value for each in kind])
        self.kind = kind

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return self.kind(super().convert(str(value), param, ctx))


def _type_of(kind: Any, declared: ParameterDeclaration) -> click.ParamType[Any]:
    limits: dict[str, Any] = {"min": declared.least, "max": declared.most}
    if declared.parser is not None:
        return _Parsed(declared.parser)
    if kind is int:
        return click.INT if {*limits.values()} == {None} else click.IntRange(**limits)
    if kind is float:
        return click.FloatRange(**limits)
    if kind is Path:
        return click.Path(path_type=Path)
    return click.STRING if kind is str else _Choice(kind, declared.values)


class _Parsed(click.ParamType[Any]):
    name = "text"

    def __init__(self, parser: Callable[[str], Any]) -> None:
        self._parser = parser

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self._parser(value) if isinstance(value, str) else value
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


def end_of(exc: BaseException, screen: Screen) -> int:
    """Show how an error, Ctrl-C or a signal has ended a command. Return the exit code."""
    match exc:
        case ClusterctlError():
            screen.error(exc)
            if screen.verbose:
                screen.note(*traceback.format_exc().splitlines())
            return exc.exit_code
        case KeyboardInterrupt():
            screen.ended(Failure("interrupted", "the command was interrupted by Ctrl-C"))
            screen.note("interrupted")
            return INTERRUPTED
        case Terminated():
            name = signal.Signals(exc.number).name
            screen.ended(
                Failure("interrupted", f"the command was ended by {name}", about="terminated")
            )
            return exc.exit_code
        case _:
            error = file_error(exc) or foreign_package_error(exc) or _unexpected(screen)
            screen.error(error)
            return error.exit_code
    return 1


def _redactor_of(words: Sequence[str]) -> Callable[[str], str]:
    """Return a function that hides the values of --notify on a command line, which may have tokens,
    and possible secrets.
    """
    # Only unexpected errors need them.
    from clusterctl.util.receivers import secret_parts
    from clusterctl.util.redact import redactor

    flag_name = "--notify"
    values = [after for before, after in pairwise(words) if before == flag_name]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{flag_name}=")]
    return redactor(part for value in values for part in secret_parts(value))


def _unexpected(screen: Screen) -> ClusterctlError:
    """Return the error for a bug. Without ``-v``, write the traceback to the state folder."""
    without_secrets = _redactor_of(sys.argv)
    text = without_secrets(traceback.format_exc())
    cause = text.strip().splitlines()[-1]
    fix = "run the command again with -v"
    if screen.verbose:
        cause = text
        fix = ""
    else:
        with suppress(OSError, ClusterctlError):
            # The dot avoids a conflict with a cluster named "errors".
            folder = state_home() / ".errors"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
            lines = [without_secrets(str(sys.argv)), *text.splitlines(), ""]
            write_atomic(path, "\n".join(map(printable, lines)))
            fix = f"report it with the traceback in {path}"
    return ClusterctlError("unexpected error, this is a bug", why=cause, fix=fix)
