"""Options that every verb knows, before and after the verb, and how a verb ends."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from clusterctl.cli.completion import clusters
from clusterctl.cli.output import Screen
from clusterctl.errors import ClusterctlError, printable
from clusterctl.util.disk import REFUSALS, disk_error

INTERRUPTED = 130


class Output(StrEnum):
    """How results are shown on stdout."""

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
        help="A cluster by its name, as it was raised; instead of a spec file.",
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
NoColor = Annotated[bool, typer.Option("--no-color", help="Plain text; so does the variable NO_COLOR.")]

COMMON = ("file", "cluster", "output", "verbose", "no_color")


@dataclass(frozen=True, slots=True)
class Options:
    """The common options, from wherever they stood."""

    file: Path | None = None
    cluster: str | None = None
    json: bool = False
    verbose: bool = False
    no_color: bool = False


def _version(value: bool) -> None:
    if value:
        from clusterctl import __version__

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
    ctx.obj = Options(file, cluster, output is Output.JSON, verbose, no_color)


def verb(
    function: Callable[..., int | None],
    *,
    long_file: bool = False,
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., None]:
    """Turn ``function(screen, options, ...)`` into a Typer command that also takes the common options.

    ``flags`` are more of its options, name -> annotation, None by default; it gets them as ``**flags``.
    What the function returns is the exit code. Expected errors are shown in one shape; an unexpected one
    leaves its traceback in the state folder and one line here.
    """
    own = list(inspect.signature(function, eval_str=True).parameters.values())[2:]
    own = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
    common = dict(
        zip(COMMON, (LongFile if long_file else File, Cluster, Format, Verbose, NoColor), strict=True)
    )

    @functools.wraps(function)
    def command(ctx: typer.Context, **given: Any) -> None:
        options = _merged(ctx.obj, given)
        screen = Screen(json=options.json, color=not (options.no_color or os.environ.get("NO_COLOR")))
        raise typer.Exit(_guarded(lambda: function(screen, options, **given), screen, options))

    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    for name, annotation in {**flags, **common}.items():
        default = False if name in {"verbose", "no_color"} else None
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _merged(before: Options, given: dict[str, Any]) -> Options:
    output = given.pop("output")
    return replace(
        before,
        file=given.pop("file") or before.file,
        cluster=given.pop("cluster") or before.cluster,
        json=before.json if output is None else output is Output.JSON,
        verbose=given.pop("verbose") or before.verbose,
        no_color=given.pop("no_color") or before.no_color,
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
    from clusterctl.state.workspace import state_home, write_atomic

    text = traceback.format_exc()
    last = text.strip().splitlines()[-1]
    if options.verbose:
        return ClusterctlError("unexpected error, this is a bug", why=text)
    try:
        folder = state_home() / ".errors"  # a cluster may be called "errors"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
        write_atomic(path, "\n".join(map(printable, [str(sys.argv), *text.splitlines(), ""])))
    except (OSError, ClusterctlError):
        return ClusterctlError("unexpected error, this is a bug", why=last, fix="run it again with -v")
    return ClusterctlError(
        "unexpected error, this is a bug", why=last, fix=f"report it with the traceback in {path}"
    )
