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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer

from clusterctl import __version__
from clusterctl.cli.output import ENDINGS, Screen, Terminated
from clusterctl.errors import (
    ClusterctlError,
    Failure,
    MachineError,
    foreign_package_error,
    printable,
)
from clusterctl.state.workspace import clusters_up, state_home, write_atomic
from clusterctl.util.disk import REFUSALS, disk_error, permission_error, read_rows

if TYPE_CHECKING:
    from clusterctl.spec.job_options import JobOption

# Completions come from the workspace and the current folder, never from the network. They have no
# special characters, because zsh evaluates even the descriptions of completions.
_PLAIN = re.compile(r"[\w.+][\w.+-]*")
_NOT_PLAIN = re.compile(r"[^\w.+-]")

INTERRUPTED = 130


def job_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
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


def run_names(incomplete: str) -> list[str]:
    return offered(sorted(path.parent.name for path in Path("runs").glob("*/run.json")), incomplete)


def hosts(ctx: typer.Context, incomplete: str) -> list[str]:
    return offered((host["name"] for host in _hosts(ctx)), incomplete)


def partitions(ctx: typer.Context, incomplete: str) -> list[str]:
    names = dict.fromkeys(host["partition"] for host in _hosts(ctx) if host.get("partition"))
    return offered(names, incomplete)


def clusters(incomplete: str) -> list[str]:
    try:
        return offered(clusters_up(), incomplete)
    except MachineError:
        return []


def offered(words: Iterable[str], incomplete: str) -> list[str]:
    """Return the completions of an incomplete word."""
    return [word for word in words if word.startswith(incomplete) and _PLAIN.fullmatch(word)]


def _workspace(ctx: typer.Context) -> Path:
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


def _hosts(ctx: typer.Context) -> list[dict[str, Any]]:
    try:
        return list(json.loads((_workspace(ctx) / "hosts.json").read_bytes())["hosts"])
    except (OSError, ValueError, KeyError):
        return []


Words = list[str] | None
# A function that returns completions.
Tab = Callable[..., Sequence[object]]
# A word in ``JobOption.tab`` -> its completions.
_TABS: Final[Mapping[str, Tab]] = {"partitions": partitions, "runs": run_names}
# The end of the keyword argument of a flag that sets another flag's keyword argument.
_SYNONYM: Final = "_synonym"


def option(text: str, *names: str, tab: Tab | None = None, **settings: Any) -> Any:
    """Return a Typer option with this help text.

    names: the option's flags. Empty: derived from the name of the parameter.
    tab: a function that returns completions when the user presses TAB.
    """
    return typer.Option(*names, help=text, autocompletion=tab, **settings)


def argument(text: str, *, tab: Tab | None = None, **settings: Any) -> Any:
    return typer.Argument(help=text, autocompletion=tab, **settings)


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
        tab = _TABS[own.tab] if isinstance(own.tab, str) else _words(own.tab)
        flags[own.name] = flag(own.kind, text, *names, metavar=own.metavar, tab=tab)
        if own.sbatch and own.sbatch != own.flag and not own.has_own_values:
            slurms = flag(own.kind, f"{own.flag}.", own.sbatch, *letters, hidden=True)
            flags[f"{own.name}{_SYNONYM}"] = slurms
    return flags


def _words(words: Sequence[str]) -> Tab | None:
    return (lambda: list(words)) if words else None


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


def folder_path(text: str) -> Path:
    """Parse the path of a folder. Reject an empty text, which would mean the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty; write . for the current folder")
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
Format = Annotated[Output | None, option("Show results as text or as JSON.", "--output", "-o")]
Verbose = Annotated[
    bool, option("Show more detail, and tracebacks of unexpected errors.", "--verbose", "-v")
]
OutFolder = Annotated[
    Path | None,
    option("Folder for collected runs. Default: ./runs.", parser=folder_path, metavar="PATH"),
]
JobIds = Annotated[
    list[str],
    argument(
        "Job IDs, such as 12, 12_3 (a task) or demo/12, or runs' names.",
        metavar="ID...",
        tab=job_ids,
    ),
]
IfDigest = Annotated[
    str | None,
    option(
        "Do it only if --dry-run would show this digest now. Otherwise exit with code 2.",
        metavar="DIGEST",
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


def _version(value: bool) -> None:
    if value:
        typer.echo(f"clusterctl {__version__}")
        raise typer.Exit


def root(
    ctx: typer.Context,
    file: File = None,
    cluster: Cluster = None,
    output: Format = None,
    verbose: Verbose = False,
    no_color: NoColor = False,
    version: Annotated[
        bool, option("Show the version.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    ctx.obj = dict(zip(COMMON, (file, cluster, output, verbose, no_color), strict=True))


Verb = Callable[..., int | None]
_BY_NAME: Final = inspect.Parameter.KEYWORD_ONLY
# The help of --goal.
GOAL: Final = (
    "whether the metric's lowest (min) or highest (max) value is best. Default: by the metric's "
    "name."
)


def takes(flags: Mapping[str, Any]) -> Callable[[Verb], Verb]:
    """Return a decorator that adds options to a command, which gets those that the user sets.

    flags: name of the keyword argument -> annotation of its option for Typer.
    """

    def decorate(function: Verb) -> Verb:
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


def verb(function: Verb) -> Callable[..., None]:
    """Turn ``function(screen, ...)`` into a Typer command that also has the options in ``COMMON``.

    The function returns the exit code; ``None`` is 0. An option of the function replaces the option
    with the same name in ``COMMON``. The traceback of an unexpected error is written to the state
    folder.
    """
    flags = getattr(function, "flags", {})
    declared = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    rest = inspect.Parameter.VAR_KEYWORD
    by_name = {
        parameter.name: parameter
        for parameter in declared
        if parameter.kind is not rest and parameter.name not in flags
    }
    more = {**flags, **{name: kind for name, kind in COMMON.items() if name not in by_name}}
    by_name |= {
        name: inspect.Parameter(name, _BY_NAME, default=None, annotation=more[name])
        for name in more
    }

    @functools.wraps(function)
    def command(ctx: typer.Context, **arguments: Any) -> None:
        common = {name: arguments.pop(name, None) for name in COMMON}
        # An empty name is not the same as none: a variable of a script may be empty.
        common = {n: ctx.obj[n] if v in (None, False) else v for n, v in common.items()}
        output = common.pop("output")
        no_color = common.pop("no_color") or os.environ.get("NO_COLOR")
        screen = Screen(
            json=output == "json", markdown=output == "md", color=not no_color, **common
        )
        given = given_flags(flags, arguments)
        arguments = {name: arguments[name] for name in arguments if name not in flags} | given
        try:
            code = function(screen, **arguments) or 0
        except (Exception, *ENDINGS) as exc:
            code = end_of(exc, screen)
        raise typer.Exit(code)

    parameters = [inspect.Parameter("ctx", _BY_NAME, annotation=typer.Context)]
    parameters += [parameter.replace(kind=_BY_NAME) for parameter in by_name.values()]
    for parameter in parameters:
        kind, info = (*get_args(parameter.annotation), None, None)[:2]
        # Without the flag's name, Typer would also add ``--no-NAME``. Typer stores the first of the
        # given flags as the ``default``.
        if kind is bool and info.default is ... and not info.param_decls:
            info.param_decls = (f"--{parameter.name.replace('_', '-')}",)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


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
            screen.ended(Failure("terminated", f"the command was ended by {name}"))
            return exc.exit_code
        case OSError() if exc.errno in REFUSALS:
            screen.error(disk_error(exc))
        case PermissionError(filename=str() | bytes()):
            screen.error(permission_error(exc))
        case _:
            error = foreign_package_error(exc) or _unexpected(screen)
            screen.error(error)
            return error.exit_code
    return 1


def _redactor_of(words: Sequence[str]) -> Callable[[str], str]:
    """Return a function that hides the values of --notify on a command line, which may have tokens,
    and what looks like a secret.
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
    return ClusterctlError("unexpected error, this is a bug", code="bug", why=cause, fix=fix)
