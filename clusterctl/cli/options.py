"""The options common to all verbs, what TAB offers, and how a verb ends."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer

from clusterctl import __version__
from clusterctl.cli.output import Screen
from clusterctl.errors import ClusterctlError, MachineError, printable
from clusterctl.state.workspace import clusters_up, state_home, write_atomic
from clusterctl.util.disk import REFUSALS, disk_error, read_rows

# What TAB offers is words from the workspace and the current folder, never from the network. What a shell
# could take for more than a word is not offered: zsh evaluates even what is said of one.
_PROGRAMS = (".py", ".sh", ".bash", ".yaml", ".yml")
_PLAIN = re.compile(r"[\w.+][\w.+-]*")  # a shell takes it as it is
_NOT_PLAIN = re.compile(r"[^\w.+-]")

INTERRUPTED = 130


def jobs_to_submit(incomplete: str) -> list[str]:
    """Bundled jobs, and the scripts and job files of this folder; other paths the shell completes itself."""
    from clusterctl.spec.job import BUNDLED_JOBS

    try:
        names = [path.name for path in Path().iterdir()]
    except OSError:  # a folder that can't be listed
        names = []
    here = sorted(name for name in names if name.endswith(_PROGRAMS))
    return _offered((*BUNDLED_JOBS, *here), incomplete)


def job_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Jobs submitted from here, the newest first, with their names."""
    found: dict[str, dict[str, Any]] = {}
    with suppress(OSError, UnicodeDecodeError):
        for row in read_rows(_workspace(ctx) / "jobs.jsonl"):
            found.setdefault(row.get("token", ""), {}).update(row)
    names = {str(row.get("job_id", "")): str(row.get("name") or "") for row in found.values()}
    return [(job_id, _NOT_PLAIN.sub("_", names[job_id])) for job_id in _offered(reversed(names), incomplete)]


def run_names(incomplete: str) -> list[str]:
    return _offered(sorted(path.parent.name for path in Path("runs").glob("*/run.json")), incomplete)


def hosts(ctx: typer.Context, incomplete: str) -> list[str]:
    return _offered((host["name"] for host in _hosts(ctx)), incomplete)


def partitions(ctx: typer.Context, incomplete: str) -> list[str]:
    names = dict.fromkeys(host["partition"] for host in _hosts(ctx) if host.get("partition"))
    return _offered(names, incomplete)


def clusters(incomplete: str) -> list[str]:
    try:
        return _offered(clusters_up(), incomplete)
    except MachineError:
        return []


def _offered(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete) and _PLAIN.fullmatch(word)]


def _workspace(ctx: typer.Context) -> Path:
    """The folder of the cluster that the words typed so far mean."""
    given = {**(ctx.parent.params if ctx.parent else {}), **{k: v for k, v in ctx.params.items() if v}}
    file, name = given.get("file"), given.get("cluster")
    screen = Screen(json=False, color=False, file=Path(file) if file else None, cluster=name)
    with suppress(ClusterctlError):
        return replace(screen.chosen(), note=lambda _: None).workspace().root
    return Path(os.devnull)


def _hosts(ctx: typer.Context) -> list[dict[str, Any]]:
    try:
        return list(json.loads((_workspace(ctx) / "hosts.json").read_bytes())["hosts"])
    except (OSError, ValueError, KeyError):
        return []  # not up: nothing to offer


Words = list[str] | None
Tab = Callable[..., Sequence[object]]  # says what TAB offers


def option(text: str, *names: str, tab: Tab | None = None, **settings: Any) -> Any:
    """Return an option with this help. Without ``names`` it has that of its parameter."""
    return typer.Option(*names, help=text, autocompletion=tab, **settings)


def argument(text: str, *, tab: Tab | None = None, **settings: Any) -> Any:
    return typer.Argument(help=text, autocompletion=tab, **settings)


def flag(kind: Any, text: str, *names: str, **settings: Any) -> Any:
    return Annotated[kind | None, option(text, *names, **settings)]


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


def folder_path(text: str) -> Path:
    """A folder that is named at all: the empty text would be the current one."""
    if not text:
        raise typer.BadParameter("it names no folder")
    return Path(text)


File = Annotated[
    Path | None, option("Cluster spec. Default: ./cluster.yaml, else a local cluster.", "--file", "-f")
]
Cluster = Annotated[
    str | None,
    option("Name of a cluster: uses its applied spec, not a spec file.", "--cluster", tab=clusters),
]
Format = Annotated[Output | None, option("Show results as text or as JSON.", "--output", "-o")]
Verbose = Annotated[bool, option("More detail; tracebacks of unexpected errors.", "--verbose", "-v")]
OutFolder = Annotated[
    Path | None, option("Folder for collected runs. Default: ./runs.", parser=folder_path, metavar="PATH")
]
NoColor = Annotated[bool, option("No colors; the same as the variable NO_COLOR.", "--no-color")]

COMMON: Final = {"file": File, "cluster": Cluster, "output": Format, "verbose": Verbose, "no_color": NoColor}


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
_SYNONYM: Final = "_synonym"


def takes(flags: Mapping[str, Any], **synonyms: Any) -> Callable[[Verb], Verb]:
    """Give a verb more options than its signature spells out. Those that are given arrive as ``**given``.

    flags: name -> annotation.
    synonyms: the same, of further options that set what the option of the same name does.
    """

    def decorate(function: Verb) -> Verb:
        more = {f"{name}{_SYNONYM}": kind for name, kind in synonyms.items()}
        function.flags = {**flags, **more}  # type: ignore[attr-defined]
        return function

    return decorate


def verb(function: Verb) -> Callable[..., None]:
    """Turn ``function(screen, ...)`` into a Typer command that also takes the common options.

    An option of its own takes the place of a common one of that name, and fills the same place of the screen.
    What the function returns is the exit code. Expected errors are shown in one shape; an unexpected one
    leaves its traceback in the state folder and one line here.
    """
    flags = getattr(function, "flags", {})
    named = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    rest = inspect.Parameter.VAR_KEYWORD
    own = {one.name: one for one in named if one.kind is not rest and one.name not in flags}
    more = {**flags, **{name: kind for name, kind in COMMON.items() if name not in own}}
    own |= {name: inspect.Parameter(name, _BY_NAME, default=None, annotation=more[name]) for name in more}

    @functools.wraps(function)
    def command(ctx: typer.Context, **given: Any) -> None:
        common = {name: given.pop(name, None) or ctx.obj[name] for name in COMMON}
        output, no_color = common.pop("output"), common.pop("no_color") or os.environ.get("NO_COLOR")
        screen = Screen(json=output == "json", markdown=output == "md", color=not no_color, **common)
        for name in flags:
            if (value := given.pop(name)) not in (None, [], ()):
                given[name.removesuffix(_SYNONYM)] = value
        try:
            code = function(screen, **given) or 0
        except (Exception, KeyboardInterrupt) as exc:  # no traceback ever reaches a user unasked
            code = _ended(exc, screen)
        raise typer.Exit(code)

    parameters = [inspect.Parameter("ctx", _BY_NAME, annotation=typer.Context)]
    parameters += [one.replace(kind=_BY_NAME) for one in own.values()]
    for one in parameters:
        kind, info = (*get_args(one.annotation), None, None)[:2]
        # Else Typer would add ``--no-NAME``. The first of the names that were given is its ``default``.
        if kind is bool and info.default is ... and not info.param_decls:
            info.param_decls = (f"--{one.name.replace('_', '-')}",)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _ended(exc: BaseException, screen: Screen) -> int:
    """Show what a verb ended by, and return its exit code."""
    match exc:
        case ClusterctlError():
            screen.error(exc)
            if screen.verbose:
                screen.note(*traceback.format_exc().splitlines())
            return exc.exit_code
        case KeyboardInterrupt():
            screen.note("interrupted")
            return INTERRUPTED
        case OSError() if exc.errno in REFUSALS:
            screen.error(disk_error(exc))
        case _:
            screen.error(_unexpected(screen))
    return 1


def _unexpected(screen: Screen) -> ClusterctlError:
    """Return the error about a bug, whose traceback goes into the state folder unless ``-v`` shows it."""
    text = traceback.format_exc()
    why, fix = text.strip().splitlines()[-1], "run it again with -v"
    if screen.verbose:
        why, fix = text, ""
    else:
        with suppress(OSError, ClusterctlError):
            folder = state_home() / ".errors"  # a cluster may be called "errors"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
            write_atomic(path, "\n".join(map(printable, [str(sys.argv), *text.splitlines(), ""])))
            fix = f"report it with the traceback in {path}"
    return ClusterctlError("unexpected error, this is a bug", code="bug", why=why, fix=fix)
