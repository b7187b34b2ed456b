"""The options common to all verbs, what TAB offers, the cluster that they select, and how a verb ends."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from clusterctl import __version__
from clusterctl.cli.output import Screen
from clusterctl.errors import (
    ClusterctlError,
    LockedError,
    MachineError,
    Notice,
    NotUpError,
    SchedulerError,
    SpecError,
    TransportError,
    UsageError,
    excluded,
    printable,
)
from clusterctl.util.disk import read_rows

if TYPE_CHECKING:
    from clusterctl.scheduler.session import Session
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.state.workspace import Workspace

# What TAB offers is words from the workspace and the current folder, never from the network. It is quick:
# files are read plainly, without the models that check them. What a shell could take for more than a word
# is not offered: zsh evaluates even what is said of one.
_NAME = re.compile(r"^name:\s*['\"]?([a-z][a-z0-9-]*)", re.MULTILINE)
_PROGRAMS = (".py", ".sh", ".bash", ".yaml", ".yml")
_NOTED = 8  # spec files of one cluster that were read
_PLAIN = re.compile(r"[\w.+][\w.+-]*")  # a shell takes it as it is
_NOT_PLAIN = re.compile(r"[^\w.+-]")

INTERRUPTED = 130
_BUILT_IN = Notice(
    "built-in-spec", "no cluster.yaml here: using the built-in local cluster (`clusterctl init` writes one)"
)
SOON_S = 10.0  # for a scheduler, which may be starting: a user who asks for its state wants to know soon


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
    names = (path.parent.name for path in _state_home().glob("*/hosts.json"))
    return _offered(sorted(names), incomplete)


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
    from clusterctl.state.workspace import state_home

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


def verb(
    function: Callable[..., int | None],
    long_file: bool = False,
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., None]:
    """Turn ``function(screen, options, ...)`` into a Typer command that also takes the common options.

    ``flags`` are more of its options, name -> annotation, None by default; it gets them as ``**flags``. One
    of a common option's name takes its place.
    What the function returns is the exit code. Expected errors are shown in one shape; an unexpected one
    leaves its traceback in the state folder and one line here.
    """
    own = list(inspect.signature(function, eval_str=True).parameters.values())[2:]
    own = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
    common = {**COMMON, "file": LongFile} if long_file else COMMON

    @functools.wraps(function)
    def command(ctx: typer.Context, **given: Any) -> None:
        options = _merged(ctx.obj, given)
        screen = Screen(json=options.json, color=not (options.no_color or os.environ.get("NO_COLOR")))
        raise typer.Exit(_guarded(lambda: function(screen, options, **given), screen, options))

    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    for name, annotation in {**common, **flags}.items():
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
        json=before.json if output is None else output == Output.JSON,
        markdown=output == "md",  # of a verb that has it
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
        from clusterctl.util.disk import REFUSALS, disk_error

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


def spec_of(screen: Screen, options: Options) -> ClusterSpec:
    """The spec that ``-f`` names, or ./cluster.yaml, or the built-in default, which is said.

    With ``--cluster`` it is that cluster's spec as it was raised, by the rules of its day: what is up can
    be repaired. What a newer rule would refuse is noted.
    """
    from clusterctl.spec.load import load_spec
    from clusterctl.spec.models import faults
    from clusterctl.state.inventory import applied_if_known, applied_spec
    from clusterctl.state.workspace import Workspace

    if options.cluster is not None:
        workspace = _named(options)
        if not workspace.spec.exists():
            raise _unknown(options.cluster)
        spec = applied_spec(workspace)
        for fault in faults(spec):
            screen.note(f"note: {fault.key}: {fault.message} (a rule newer than the cluster)")
        return spec
    path = spec_file(options)
    if path is None:
        screen.note(_BUILT_IN)
    return load_spec(path, raised=lambda name: applied_if_known(Workspace.of(name)))


def spec_of_existing(screen: Screen, options: Options) -> ClusterSpec:
    """The same; but without a spec file that of the cluster that is up, if exactly one is."""
    return spec_of(screen, replace(options, cluster=_only_cluster(screen, options) or options.cluster))


def workspace_of(screen: Screen, options: Options, *, named: bool = False) -> Workspace:
    """The workspace of the cluster that is meant: only its name is needed, so a spec file may be wrong.

    Without a spec file it is the only cluster that is up, unless it must be ``named``.

    Raises:
        UsageError: the file can't be read, or not even its name can; or several clusters are up.
        NotUpError: the file is wrong, and there is no such cluster.
    """
    from clusterctl.spec.names import DEFAULT_CLUSTER
    from clusterctl.state.workspace import Workspace

    if options.cluster is not None:
        return _named(options)
    path = spec_file(options)
    if path is None:
        if only := _only_cluster(screen, options, named=named):
            return Workspace.of(only)
        screen.note(_BUILT_IN)
        return Workspace.of(DEFAULT_CLUSTER)
    if known := _known_workspace(path):
        return known
    from clusterctl.spec.load import read_name

    try:
        name, wrong = read_name(path)
    except UsageError as exc:
        why = str(exc.problems[0]) if isinstance(exc, SpecError) else exc.why or exc.what
        raise UsageError(
            "the spec file does not say which cluster is meant",
            code="spec-without-name",
            where=str(path),
            why=why,
            fix="correct it, or name the cluster: --cluster NAME (`clusterctl list` shows them)",
        ) from exc
    workspace = Workspace.of(name)
    if wrong is None:
        _note_right(path, workspace)
        return workspace
    if not workspace.root.is_dir():
        raise NotUpError(
            f"cluster {name!r} is not up, and its spec file is wrong",
            code="not-up",
            where=str(path),
            why="\n".join(map(str, wrong.problems)),
            fix="correct it, then `clusterctl up`; or name the cluster, for which no spec is read: --cluster "
            f"NAME ({name}, if `down` is to remove what an earlier one left; `clusterctl list` shows others)",
        )
    screen.note(f"note: {wrong.what} (see `clusterctl validate`); cluster {name!r} is taken as it was raised")
    return workspace


def _known_workspace(path: Path) -> Workspace | None:
    """The workspace of a spec file that this version has read before, and found right; else None."""
    from clusterctl.state.workspace import Workspace

    with suppress(OSError, UnicodeDecodeError):
        if match := _NAME.search(path.read_text()):
            workspace = Workspace.of(match[1])
            return workspace if _digest(path) in workspace.read_specs.read_text().split() else None
    return None


def _note_right(path: Path, workspace: Workspace) -> None:
    """So that the file, as long as it is unchanged, need not be read again to tell whose it is."""
    from clusterctl.state.workspace import write_atomic

    with suppress(OSError, UnicodeDecodeError, MachineError):
        if workspace.root.is_dir() and not workspace.removing.exists():
            known = workspace.read_specs
            noted = known.read_text(errors="replace").split() if known.exists() else []
            write_atomic(workspace.read_specs, "\n".join([*noted, _digest(path)][-_NOTED:]) + "\n")


def _digest(path: Path) -> str:
    return hashlib.sha256(__version__.encode() + b"\0" + path.read_bytes()).hexdigest()


@contextmanager
def naming_lock_holder(workspace: Workspace) -> Iterator[None]:
    """While another clusterctl raises the cluster or takes it down, that is why it does not answer.

    Raises:
        LockedError: the body failed for want of an answer, and another clusterctl holds its lock.
    """
    try:
        yield
    except (NotUpError, SchedulerError, TransportError) as exc:
        worker = workspace.worker()
        if worker is None or exc.had_side_effects:
            raise
        raise LockedError(
            f"cluster {workspace.root.name!r} is locked",
            why=f"{worker}; until then: {exc.cause}",
            fix="wait until it is done",
        ) from exc


@contextmanager
def open_session(screen: Screen, options: Options, *, patience_s: float | None = None) -> Iterator[Session]:
    """A connection to the controller as the job user; the scheduler is waited for ``patience_s``."""
    from clusterctl.scheduler.session import PATIENCE_S, session

    workspace = workspace_of(screen, options)
    with naming_lock_holder(workspace):
        with session(None, workspace, patience_s=patience_s or PATIENCE_S) as opened:
            yield opened
        if refusal := opened.ledger.refusal:
            screen.note(f"note: {refusal.what} ({refusal.why}): what became of jobs is asked anew next time")


def spec_file(options: Options) -> Path | None:
    from clusterctl.spec.names import find_spec

    return options.file or find_spec(Path.cwd())


def _only_cluster(screen: Screen, options: Options, *, named: bool = False) -> str | None:
    """The cluster that is meant where no spec says it; None: the built-in one, or one is named.

    Raises:
        UsageError: several are up, and none of them is the built-in one; or it must be ``named``.
    """
    from clusterctl.spec.names import DEFAULT_CLUSTER

    up = clusters("")
    if options.cluster is not None or spec_file(options) or not up or DEFAULT_CLUSTER in up:
        return None
    if named or len(up) > 1:
        raise UsageError(
            "no cluster is named, and there is no cluster.yaml here",
            code="no-cluster-named",
            why=f"{'these are' if len(up) > 1 else 'this one is'} up: {', '.join(up)}",
            fix=f"name it: `--cluster {up[0]}`, or its spec: -f FILE",
        )
    screen.note(Notice("only-cluster-up", f"using cluster {up[0]!r} (the only one that is up)"))
    return up[0]


def _named(options: Options) -> Workspace:
    from clusterctl.spec.names import is_cluster_name
    from clusterctl.state.workspace import Workspace

    name = options.cluster or ""
    if options.file is not None:
        raise excluded("-f", "--cluster")
    if not is_cluster_name(name):
        raise _unknown(name)
    return Workspace.of(name)


def _unknown(name: str) -> UsageError:
    return UsageError(
        f"there is no cluster {name!r}",
        code="unknown-cluster",
        fix="`clusterctl list` shows the clusters there are",
    )
