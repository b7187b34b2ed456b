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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from clusterctl import __version__
from clusterctl.cli.output import Screen
from clusterctl.errors import ClusterctlError, MachineError, printable
from clusterctl.state.workspace import clusters_up, state_home, write_atomic
from clusterctl.util.disk import REFUSALS, disk_error, read_rows

if TYPE_CHECKING:
    from clusterctl.state.chosen import ChosenCluster

# What TAB offers is words from the workspace and the current folder, never from the network. It is quick:
# files are read plainly, without the models that check them. What a shell could take for more than a word
# is not offered: zsh evaluates even what is said of one.
_NAME = re.compile(r"^name:\s*['\"]?([a-z][a-z0-9-]*)", re.MULTILINE)
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
    """Runs that were collected into ./runs."""
    return _offered(sorted(path.parent.name for path in Path("runs").glob("*/run.json")), incomplete)


def hosts(ctx: typer.Context, incomplete: str) -> list[str]:
    return _offered((host["name"] for host in _hosts(ctx)), incomplete)


def partitions(ctx: typer.Context, incomplete: str) -> list[str]:
    names = dict.fromkeys(host["partition"] for host in _hosts(ctx) if host.get("partition"))
    return _offered(names, incomplete)


def clusters(incomplete: str) -> list[str]:
    """Clusters that were raised from here."""
    try:
        return _offered(clusters_up(), incomplete)
    except MachineError:
        return []


def launchers(incomplete: str) -> list[str]:
    return _offered(("srun", "mpirun", "torchrun"), incomplete)


def _offered(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete) and _PLAIN.fullmatch(word)]


def _workspace(ctx: typer.Context) -> Path:
    """The folder of the cluster that the words typed so far mean."""
    given = {**(ctx.parent.params if ctx.parent else {}), **{k: v for k, v in ctx.params.items() if v}}
    return _state_home() / (given.get("cluster") or _name_in(Path(given.get("file") or "cluster.yaml")))


def _name_in(spec: Path) -> str:
    try:
        match = _NAME.search(spec.read_text(errors="replace"))
    except OSError:
        up = clusters("")
        return up[0] if len(up) == 1 and str(spec) == "cluster.yaml" else "local"  # the built-in one
    return match[1] if match else ""


def _hosts(ctx: typer.Context) -> list[dict[str, Any]]:
    try:
        return list(json.loads((_workspace(ctx) / "hosts.json").read_bytes())["hosts"])
    except (OSError, ValueError, KeyError):
        return []  # not up: nothing to offer


def _state_home() -> Path:
    try:
        return state_home()
    except MachineError:
        return Path(os.devnull)


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


def folder_path(text: str) -> Path:
    """A folder that is named at all: the empty text would be the current one."""
    if not text:
        raise typer.BadParameter("it names no folder")
    return Path(text)


File = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Cluster spec. Default: ./cluster.yaml, else a local cluster."),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Name of a cluster: uses its applied spec, not a spec file.",
        autocompletion=clusters,
    ),
]
LongFile = Annotated[Path | None, typer.Option("--file", help="Cluster spec. Default: ./cluster.yaml.")]
Format = Annotated[Output | None, typer.Option("--output", "-o", help="Show results as text or as JSON.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="More detail; tracebacks of unexpected errors.")
]
OutFolder = Annotated[
    Path | None,
    typer.Option(parser=folder_path, metavar="PATH", help="Folder for collected runs. Default: ./runs."),
]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colors; the same as the variable NO_COLOR.")]

COMMON: Final = {"file": File, "cluster": Cluster, "output": Format, "verbose": Verbose, "no_color": NoColor}


@dataclass(frozen=True, slots=True)
class Options:
    """The common options, from wherever they stood."""

    file: Path | None = None
    cluster: str | None = None
    json: bool = False
    markdown: bool = False
    verbose: bool = False
    no_color: bool = False

    def chosen(self, screen: Screen) -> ChosenCluster:
        """Return the cluster that is meant. Its notes go to the screen."""
        # Neither the help nor TAB needs it.
        from clusterctl.state.chosen import ChosenCluster

        return ChosenCluster(self.file, self.cluster, screen.note)


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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the verb."""
    ctx.obj = Options(file, cluster, output is Output.JSON, verbose=verbose, no_color=no_color)


Verb = Callable[..., int | None]


def takes(
    flags: Mapping[str, Any], synonyms: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[Verb], Verb]:
    """Give a verb more options than its signature spells out. Those that are given arrive as ``**given``.

    flags: name -> annotation.
    synonyms: the same, of further options that set what the option of the same name does.
    """

    def decorate(function: Verb) -> Verb:
        @functools.wraps(function)
        def take(*args: Any, **given: Any) -> int | None:
            for name in synonyms:
                if (value := given.pop(f"{name}_synonym", None)) is not None:
                    given[name] = value
            unset = {name for name in flags if given.get(name) in (None, [])}
            return function(*args, **{name: value for name, value in given.items() if name not in unset})

        own = inspect.signature(function, eval_str=True).parameters.values()
        named = [one for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD]
        more = {**flags, **{f"{name}_synonym": kind for name, kind in synonyms.items()}}
        take.__signature__ = inspect.Signature([*named, *_parameters(more)])  # type: ignore[attr-defined]
        return take

    return decorate


def _parameters(annotations: Mapping[str, Any]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]


def verb(function: Verb, long_file: bool = False) -> Callable[..., None]:
    """Turn ``function(screen, options, ...)`` into a Typer command that also takes the common options.

    An option of its own takes the place of a common one of that name.
    What the function returns is the exit code. Expected errors are shown in one shape; an unexpected one
    leaves its traceback in the state folder and one line here.

    long_file: whether -f has another meaning, so that the spec file is named by --file alone.
    """
    own = list(inspect.signature(function, eval_str=True).parameters.values())[2:]
    common = {**COMMON, "file": LongFile} if long_file else COMMON
    common = {name: kind for name, kind in common.items() if name not in {one.name for one in own}}

    @functools.wraps(function)
    def command(ctx: typer.Context, **given: Any) -> None:
        options = _merged(ctx.obj, given)
        screen = Screen(json=options.json, color=not (options.no_color or os.environ.get("NO_COLOR")))
        raise typer.Exit(_guarded(lambda: function(screen, options, **given), screen, options))

    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    parameters += _parameters(common)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _merged(before: Options, given: dict[str, Any]) -> Options:
    output = given.pop("output")
    return replace(
        before,
        file=given.pop("file") or before.file,
        cluster=given.pop("cluster") or before.cluster,
        json=before.json if output is None else output == Output.JSON,
        markdown=output == "md",  # of a verb that has it
        verbose=bool(given.pop("verbose")) or before.verbose,
        no_color=bool(given.pop("no_color")) or before.no_color,
    )


def _guarded(call: Callable[[], int | None], screen: Screen, options: Options) -> int:
    try:
        return call() or 0
    except ClusterctlError as exc:
        screen.error(exc)
        if options.verbose:
            screen.note(*traceback.format_exc().splitlines())
        return exc.exit_code
    except KeyboardInterrupt:
        screen.note("interrupted")
        return INTERRUPTED
    except Exception as exc:  # the last resort: no traceback ever reaches a user unasked
        if isinstance(exc, OSError) and exc.errno in REFUSALS:
            screen.error(disk_error(exc))
        else:
            screen.error(_unexpected(options))
        return 1


def _unexpected(options: Options) -> ClusterctlError:
    text = traceback.format_exc()
    last = text.strip().splitlines()[-1]
    if options.verbose:
        return ClusterctlError("unexpected error, this is a bug", code="bug", why=text)
    try:
        folder = state_home() / ".errors"  # a cluster may be called "errors"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
        write_atomic(path, "\n".join(map(printable, [str(sys.argv), *text.splitlines(), ""])))
    except (OSError, ClusterctlError):
        return ClusterctlError(
            "unexpected error, this is a bug", code="bug", why=last, fix="run it again with -v"
        )
    return ClusterctlError(
        "unexpected error, this is a bug", code="bug", why=last, fix=f"report it with the traceback in {path}"
    )
