"""runs: collected runs are listed, shown, compared and removed; no cluster is needed."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from clusterctl.cli.job_table import shown_elapsed, shown_time
from clusterctl.cli.options import Options, folder_path, run_names
from clusterctl.cli.output import Screen
from clusterctl.errors import ClusterctlError, CollectError, Notice, UsageError, excluded
from clusterctl.runs.collect import collect
from clusterctl.runs.compare import Difference, compare, compare_losses
from clusterctl.runs.find import (
    FIELDS,
    TIMES,
    USUAL_METRICS,
    Row,
    metric_names,
    named_run,
    ranked,
)
from clusterctl.runs.query import RunQuery, select_runs
from clusterctl.scheduler.session import Session
from clusterctl.state.ledger import Metric, Value
from clusterctl.transport.tree import shown_size

_LAST: Final = 50  # runs that are listed for people
_BASIC: Final = ("run", "state", "submitted", "elapsed", "nodes")
_MOST_METRICS: Final = 3
_NONE: Final = "-"

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run: its folder, its name below ./runs, or its job's id. Of an array, 12_3 is a task.",
        autocompletion=run_names,
    ),
]


def list_(
    screen: Screen,
    options: Options,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Only runs for which this holds: lr=0.1, loss<2, name~bert, state!=FAILED. Repeatable.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="KEY,...",
            help="Show these instead of the usual columns: fields, options of the program, metrics.",
        ),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(metavar="KEY", help="Lowest first. Default: the newest first.")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", "-r", help="Reverse the order.")] = False,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Submitted since: 7d, 12h, or 2026-01-31.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only runs with this tag. Repeatable.")] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="The tasks of this sweep, the best first.", autocompletion=run_names
        ),
    ] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="A line for each task of an array.")] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=1, help=f"At most so many. Default: {_LAST}; in JSON all."),
    ] = None,
    folder: Annotated[
        list[Path] | None,
        typer.Option(
            "--dir",
            parser=folder_path,
            metavar="PATH",
            help="A folder with runs. Default: ./runs. Repeatable.",
        ),
    ] = None,
    everywhere: Annotated[
        bool,
        typer.Option("--everywhere", help="Runs in all folders that `collect` wrote to on this machine."),
    ] = False,
) -> None:
    """List collected runs, newest first.

    Keys: run, job, name, state, final, exit, user, cluster, partition, nodes, submitted, started, ended,
    collected, elapsed, cost, tags, note; any option of the program, such as lr; any metric, such as loss,
    loss.min, loss.max.
    """
    if folder and everywhere:
        raise excluded("--dir", "--everywhere")
    if sweep is not None:
        if where or columns or reverse or since or tag or tasks or limit or folder or everywhere:
            raise UsageError(
                "--sweep ranks all tasks of one sweep; only --sort goes with it",
                code="options-exclusive",
                fix="leave out the others",
            )
        answer, lines = ranking_of(screen, named_run(sweep), sort)
        screen.result(answer, *lines)
        return
    chosen = [key.strip() for key in (columns or "").split(",") if key.strip()]
    query = RunQuery(
        where=where or (),
        columns=chosen,
        sort=sort,
        reverse=reverse,
        since=since,
        tags=tag or (),
        tasks=tasks,
        cluster=options.cluster,
    )
    found = select_runs(query, folder or (), everywhere=everywhere)
    for note in found.notes:
        screen.note(note)
    most = limit or (len(found.rows) if screen.json else _LAST)
    shown = found.rows[:most]
    keys = chosen or [*_BASIC, *_metric_columns(shown, sort)]
    keys = list(dict.fromkeys((*([] if "run" in keys else ["run"]), *keys)))
    answer = {"runs": [_answer(row) for row in shown], "total": len(found.rows)}
    lines = _table(screen, shown, keys) if shown else [_none_text(found.searched)]
    screen.result(answer, *lines)
    if not screen.json and (older := len(found.rows) - most) > 0:
        more = f"--limit {len(found.rows)}, or choose with --where, --since, --tag"
        screen.note(f"{older} more: {more}")


def ranking_of(screen: Screen, run: Row, metric: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """The tasks of a sweep by the metric that ranks it, the best first: for programs, and for people.

    Raises:
        UsageError: nothing ranks them.
    """
    rows, metric = ranked(run, metric)
    keys = (run.run.sweep or {}).get("keys") or []
    columns = ["job", *keys, metric, *(name for name in _metric_columns(rows) if name != metric), "state"]
    lines = _table(screen, rows, columns)
    if (best := rows[0].value(metric)) is not None:
        values = " ".join(f"{key}={shown_value(rows[0].value(key))}" for key in keys)
        lines += ["", f"best: {rows[0].value('job')} {values}: {metric} {shown_value(best)}"]
    answer = {"sweep": run.run.job_id, "metric": metric, "runs": [_answer(row) for row in rows]}
    return answer, lines


def note_ranking(screen: Screen, session: Session, job_id: str) -> dict[str, Any] | None:
    """Collect a sweep and note its ranking. None: no task has a metric."""
    try:
        (run,) = collect(session, [job_id])
        answer, lines = ranking_of(screen, Row(run))
    except (CollectError, UsageError) as exc:  # how the tasks ended is still to be shown
        screen.note(f"note: {exc.cause}")
        return None
    screen.note(*lines, "", f"job {job_id} ({run.name}) {run.state}: {run.directory}")
    return answer


def _none_text(rows: Sequence[Row]) -> str:
    if rows:
        return Notice("no-run-matches", "no run is like that")
    return Notice("no-runs", "no runs; `clusterctl collect` brings them here")


def _metric_columns(rows: Sequence[Row], sort: str | None = None) -> list[str]:
    """The metrics that are shown unasked, and the key that the runs are sorted by."""
    having = [name for name in metric_names(rows) if name in USUAL_METRICS]
    return [*([sort] if sort is not None and sort not in _BASIC else []), *having[:_MOST_METRICS]]


def _table(screen: Screen, rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    head = [key.upper() if key == key.lower() else key for key in keys]
    return screen.table(head, [[_cell(row, key) for key in keys] for row in rows])


def _cell(row: Row, key: str) -> str:
    value = row.value(key)
    if value is None and key in row.metrics and row.metrics[key].nonfinite:
        return "nan"  # or infinite
    return shown_value(value, key)


def shown_value(value: Value, key: str = "") -> str:
    """A value as a table shows it; ``key`` says what it is."""
    if value is None or value == "":
        return _NONE
    if key in TIMES:
        return shown_time(int(value))
    if key == "elapsed":
        return shown_elapsed(int(value))
    if key == "cost":
        return f"{float(value):.2f}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _answer(row: Row) -> dict[str, Any]:
    """A row as `-o json` shows it: its fields, the configuration and the metrics."""
    fields = {key: row.value(key) for key in FIELDS}
    job = row.task.id if row.task else row.run.job_id
    more = {"job": job, "dir": str(row.folder), "tags": list(row.run.tags)}
    metrics = {name: asdict(metric) for name, metric in row.metrics.items()}
    return {**fields, **more, "config": row.config, "metrics": metrics}


def show(screen: Screen, options: Options, run: Run) -> None:
    """Show one collected run in full.

    Shows what it was asked for, where it ran, its metrics, and why it failed.
    """
    row = named_run(run)
    lines = [f"{name:<11}{value}" for name, value in _about(row) if value not in {"", _NONE}]
    if row.config:
        options_of = [[key, _NONE if value is None else str(value)] for key, value in row.config.items()]
        lines += ["", *screen.table(["OPTION", "VALUE"], options_of)]
    if row.metrics:
        lines += ["", *_metric_table(screen, row)]
    if row.tasks:
        keys = ["job", "state", "exit", "elapsed", *_metric_columns(row.tasks)]
        lines += ["", *_table(screen, row.tasks, keys)]
    lines += _why(row)
    record = row.run.model_dump(mode="json", exclude={"directory"})
    screen.result({"run": {**record, "dir": str(row.folder)}}, *lines)


def _why(row: Row) -> list[str]:
    """Why it failed; of an array, why its worst task did."""
    said = row.run.diagnosis or {}
    if not said or (row.task is not None and said.get("job_id") not in {None, row.task.id}):
        return []
    lines = said.get("lines")
    quoted = [f"| {line}" for line in lines] if isinstance(lines, list) else []
    which = f"job {said.get('job_id') or row.run.job_id}"
    return ["", f"{which}: {said.get('cause', '')}", *quoted, f"fix: {said.get('fix', '')}"]


def _about(row: Row) -> list[tuple[str, str]]:
    run = row.run
    fields = ("name", "exit", "user", "cluster", "partition", "submitted", "started", "ended")
    since = "" if run.final else f", when it was collected ({shown_time(int(run.collected_at))})"
    about = [
        ("run", row.shown),
        ("job", _cell(row, "job")),
        ("state", f"{row.record.state}{since}"),
        *((key, _cell(row, key)) for key in (*fields, "elapsed", "cost", "tags", "note")),
        ("nodes", ", ".join(row.record.nodes)),
        ("arguments", shlex.join(run.args)),
        ("folder", str(row.folder)),
    ]
    left = f"{len(run.skipped)} (`skipped` in run.json)" if run.skipped else ""
    files = [("files", f"{run.files}, {shown_size(run.bytes)}"), ("left there", left)]
    return about if row.task else about + files


def _metric_table(screen: Screen, row: Row) -> list[str]:
    def at(value: float | None, step: int | None) -> str:
        return shown_value(value) + (f" at {step}" if value is not None and step is not None else "")

    def line(name: str, one: Metric) -> list[str]:
        return [name, at(one.last, one.last_step), at(one.min, one.min_step), at(one.max, one.max_step)]

    rows = [[*line(name, one), str(one.nonfinite or "")] for name, one in row.metrics.items()]
    return screen.table(["METRIC", "LAST", "LOWEST", "HIGHEST", "NAN OR INF"], rows)


def diff(
    screen: Screen,
    options: Options,
    first: Annotated[
        str, typer.Argument(metavar="A", help="A run, as in `runs show`.", autocompletion=run_names)
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.", autocompletion=run_names)],
) -> None:
    """Compare two runs.

    Shows what differs in the job, code, configuration, data, environment, hardware and result, and whether
    the losses are identical, step by step.
    """
    a, b = named_run(first), named_run(second)
    found = compare(a, b)
    lines: list[str] = []
    for section in dict.fromkeys(one.section for one in found):
        rows = [_compared(one) for one in found if one.section == section]
        lines += [*([""] if lines else []), *screen.table([section.upper(), a.shown, b.shown], rows)]
    lines = lines or ["nothing differs"]
    if losses := compare_losses(a, b):
        lines += ["", f"losses: {losses}"]
    answer = {"a": str(a.folder), "b": str(b.folder), "differences": [asdict(one) for one in found]}
    screen.result({**answer, "losses": losses and asdict(losses)}, *lines)


def _compared(one: Difference) -> list[str]:
    key = one.key if one.section == "result" else ""
    a, b = shown_value(one.a, key), shown_value(one.b, key)
    return [one.key, *((a, b) if a != b else (repr(one.a), repr(one.b)))]


def rm(
    screen: Screen,
    options: Options,
    run: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs, as in `runs show`.", autocompletion=run_names),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove collected runs from this machine, after asking.

    On the cluster nothing changes.
    """
    rows = [named_run(name) for name in run]
    if inner := next((row for row in rows if row.task is not None), None):
        raise UsageError(
            f"{inner.shown} is one task of a run",
            code="run-is-a-task",
            fix=f"name the whole run: {inner.run.directory.name}",
        )
    runs = list({row.run.directory: row.run for row in rows}.values())
    for one in runs:
        screen.note(f"{one.directory}: {one.state}, {shown_time(one.submit_time)}")
    size = shown_size(sum(_size(path) for one in runs for path in one.directory.rglob("*")))
    what = runs[0].directory.name if len(runs) == 1 else f"{len(runs)} runs"
    screen.confirm(f"remove {what} ({size}) from this machine for good?", yes=yes)
    removed: list[str] = []
    for one in runs:
        hidden = one.directory.with_name(f".{one.directory.name}.removed")
        try:
            one.directory.rename(hidden)  # so that none is a run that lacks something
            removed.append(str(one.directory))
            shutil.rmtree(hidden)
        except OSError as exc:
            screen.known = {"removed": removed}
            screen.note(*(f"removed {path}" for path in removed))
            place = hidden if removed[-1:] == [str(one.directory)] else one.directory
            raise ClusterctlError(
                f"{place.name} can't be removed",
                code="folder-not-removable",
                where=str(place),
                why=exc.strerror or str(exc),
            ) from exc
    screen.result({"removed": removed}, *(f"removed {path}" for path in removed))


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0
