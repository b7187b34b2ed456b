"""runs, report: collected runs are listed, shown, compared, removed and reported; no cluster is needed."""

from __future__ import annotations

import shlex
import shutil
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, Final

from clusterctl.cli.jobs import shown_elapsed, shown_time
from clusterctl.cli.options import argument, flag, folder_path, option, run_names, takes
from clusterctl.cli.output import Screen
from clusterctl.errors import ClusterctlError, CollectError, Notice, UsageError, excluded, unaccompanied
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
from clusterctl.runs.page import REPORT_FILE, write_report
from clusterctl.runs.query import RunQuery, select_runs
from clusterctl.runs.report import report_of, report_path
from clusterctl.scheduler.session import Session
from clusterctl.state.ledger import Metric, Value
from clusterctl.transport.tree import shown_size

_LAST: Final = 50  # runs that are listed for people
_BASIC: Final = ("run", "state", "submitted", "elapsed", "nodes")
_MOST_METRICS: Final = 3
_NONE: Final = "-"

Run = Annotated[
    str,
    argument(
        "A run: its folder, its name below ./runs, or its job's id. Of an array, 12_3 is a task.",
        metavar="RUN",
        tab=run_names,
    ),
]


# Each is a field of RunQuery, but for the last five.
_LIST_FLAGS: Final[Mapping[str, Any]] = {
    "where": flag(
        list[str],
        "Only runs for which this holds: lr=0.1, loss<2, name~bert, state!=FAILED. Repeatable.",
        metavar="CONDITION",
    ),
    "columns": flag(
        str,
        "Show these instead of the usual columns: fields, options of the program, metrics.",
        metavar="KEY,...",
    ),
    "sort": flag(str, "Lowest first. Default: the newest first.", metavar="KEY"),
    "reverse": flag(bool, "Reverse the order.", "--reverse", "-r"),
    "since": flag(str, "Submitted since: 7d, 12h, or 2026-01-31.", metavar="TIME"),
    "tags": flag(list[str], "Only runs with this tag. Repeatable.", "--tag"),
    "sweep": flag(str, "The tasks of this sweep, the best first.", metavar="RUN", tab=run_names),
    "tasks": flag(bool, "A line for each task of an array.", "--tasks"),
    "limit": flag(int, f"At most so many. Default: {_LAST}; in JSON all.", "--limit", "-n", min=1),
    "folders": flag(
        list[Path],
        "A folder with runs. Default: ./runs. Repeatable.",
        "--dir",
        parser=folder_path,
        metavar="PATH",
    ),
    "everywhere": flag(bool, "Runs in all folders that `collect` wrote to on this machine.", "--everywhere"),
}


@takes(_LIST_FLAGS)
def list_(screen: Screen, **given: Any) -> None:
    """List collected runs, newest first.

    Keys: run, job, name, state, final, exit, user, cluster, partition, nodes, submitted, started, ended,
    collected, elapsed, cost, tags, note; any option of the program, such as lr; any metric, such as loss,
    loss.min, loss.max.
    """
    if given.keys() >= {"folders", "everywhere"}:
        raise excluded("--dir", "--everywhere")
    if "sweep" in given:
        if given.keys() - {"sweep", "sort"}:
            raise excluded("--sweep", "all other options but --sort")
        answer, lines = ranking_of(screen, named_run(given["sweep"]), given.get("sort"))
        screen.result(answer, *lines)
        return
    chosen = [key.strip() for key in given.pop("columns", "").split(",") if key.strip()]
    limit, folders, everywhere = (given.pop(name, None) for name in ("limit", "folders", "everywhere"))
    query = RunQuery(**given, columns=chosen, cluster=screen.cluster)
    found = select_runs(query, folders or (), everywhere=bool(everywhere))
    for note in found.notes:
        screen.note(note)
    most = limit or (len(found.rows) if screen.json else _LAST)
    shown = found.rows[:most]
    keys = chosen or [*_BASIC, *_metric_columns(shown, query.sort)]
    keys = list(dict.fromkeys(keys if "run" in keys else ["run", *keys]))
    answer = {"runs": [_answer(row) for row in shown], "total": len(found.rows)}
    lines = _table(screen, shown, keys) if shown else [Notice("no-run-matches", "no run is like that")]
    if not found.searched:
        lines = [Notice("no-runs", "no runs; `clusterctl collect` brings them here")]
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
    fields = {key: row.value(key) for key in FIELDS}
    job = row.task.id if row.task else row.run.job_id
    more = {"job": job, "dir": str(row.folder), "tags": list(row.run.tags)}
    metrics = {name: asdict(metric) for name, metric in row.metrics.items()}
    return {**fields, **more, "config": row.config, "metrics": metrics}


def show(screen: Screen, run: Run) -> None:
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
    first: Annotated[str, argument("A run, as in `runs show`.", metavar="A", tab=run_names)],
    second: Annotated[str, argument("Another one.", metavar="B", tab=run_names)],
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
    run: Annotated[list[str], argument("Runs, as in `runs show`.", metavar="RUN...", tab=run_names)],
    yes: Annotated[bool, option("Do not ask.", "--yes", "-y")] = False,
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
    screen.known = {"removed": removed}
    for one in runs:
        hidden = one.directory.with_name(f".{one.directory.name}.removed")
        try:
            one.directory.rename(hidden)  # so that none is a run that lacks something
            removed.append(str(one.directory))
            shutil.rmtree(hidden)
        except OSError as exc:
            raise ClusterctlError(
                f"{one.directory.name} can't be removed",
                code="folder-not-removable",
                where=str(exc.filename or one.directory),
                why=exc.strerror or str(exc),
            ) from exc
    screen.result(screen.known, *(f"removed {path}" for path in removed))


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0


class Form(StrEnum):
    TEXT = "text"
    JSON = "json"
    MD = "md"


ReportFile = Annotated[
    Path | None,
    option(
        f"The file to write. Default: {REPORT_FILE} in the run's folder, of several runs here.",
        parser=folder_path,
        metavar="FILE",
    ),
]


def report(
    screen: Screen,
    run: Annotated[list[str], argument("Runs, as in `runs show`.", metavar="RUN...", tab=run_names)],
    out: ReportFile = None,
    open_: Annotated[bool, option("Show it in the browser.", "--open")] = False,
    serve: Annotated[bool, option("Serve it on this machine's loopback address until Ctrl-C.")] = False,
    port: Annotated[
        int, option("Port of --serve. Default: a free one.", min=0, max=65535, metavar="PORT")
    ] = 0,
    output: Annotated[
        Form | None, option("Show the same facts as JSON or Markdown; write no file.", "--output", "-o")
    ] = None,
) -> None:
    """Write the report of a run, a sweep, or several runs.

    It is one HTML file that needs no network: the verdict, then metrics, time per step, ranks, nodes, the
    scheduler, configuration and environment. Of several runs, what differs comes first.
    """
    if (screen.markdown or screen.json or serve) and (out or open_):
        raise excluded("-o json, -o md or --serve", "--out or --open")
    if serve and (screen.markdown or screen.json):
        raise excluded("-o", "--serve")
    if port and not serve:
        raise unaccompanied("--port", "--serve")
    rows = list({row.folder: row for row in map(named_run, run)}.values())
    found = report_of(rows)
    if screen.markdown:
        screen.document({}, found.as_markdown())
        return
    if screen.json:
        screen.result({"report": found.as_dict()})
        return
    if serve:
        _serve(screen, found.as_html().encode(), port)
        return
    path = out or (report_path(rows[0]) if len(rows) == 1 else Path(REPORT_FILE))
    write_report(found, path)
    facts = found.as_dict()
    screen.result(
        {}, *facts["verdict"], *(f"missing: {one}" for one in facts["missing"]), "", f"report: {path}"
    )
    if open_ and not webbrowser.open(path.absolute().as_uri()):
        raise UsageError(
            "there is no browser here", code="no-browser", fix="say --serve, and open the address elsewhere"
        )


def _serve(screen: Screen, page: bytes, port: int) -> None:
    """Answer every question with the page, until Ctrl-C."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as exc:
        raise ClusterctlError(
            f"port {port} can't be used",
            code="port-unusable",
            why=exc.strerror or str(exc),
            fix="say another --port",
        ) from exc
    with server:
        at = server.server_port
        screen.note(
            f"http://127.0.0.1:{at}/ until Ctrl-C; from another machine first: ssh -N -L {at}:127.0.0.1:{at} "
            "and this machine's name"
        )
        server.serve_forever()
