"""The commands runs and report, which list, show, compare, remove and report collected runs."""

from __future__ import annotations

import shutil
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

from clusterctl.cli.options import (
    OutputFormat,
    Words,
    argument,
    flag,
    folder_path,
    option,
    run_names,
    takes,
)
from clusterctl.cli.output import Screen
from clusterctl.errors import (
    ClusterctlError,
    CollectError,
    Notice,
    UsageError,
    excluded,
    unaccompanied,
)
from clusterctl.runs import figure as figures
from clusterctl.runs.collect import collect_runs
from clusterctl.runs.compare import compare, compare_losses
from clusterctl.runs.facts import (
    configuration,
    difference_sections,
    facts_of,
    job_facts,
    line_of,
    log_lines,
    metric_values,
    outcome,
    resource_facts,
    task_table,
    time_facts,
    usual_metrics,
)
from clusterctl.runs.find import (
    FIELDS,
    Row,
    TaskRanking,
    failed_tasks,
    latest_tasks,
    named_rows,
    named_run,
    newest_run,
    ranked,
    reject_unknown_keys,
    repeat_command,
    swept_keys,
)
from clusterctl.runs.groups import grouped
from clusterctl.runs.page import REPORT_FILE, Section, Table, write_report
from clusterctl.runs.query import RunQuery, all_columns, cells, select_runs
from clusterctl.runs.report import report_of, report_path
from clusterctl.runs.scaling import is_scaling, scaling_of
from clusterctl.runs.tabular import as_csv, latex
from clusterctl.runs.time_use import TimeUse, total_time_use
from clusterctl.scheduler.base import JobInfo
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec
from clusterctl.spec.metrics import goal_given
from clusterctl.spec.names import LocalValue
from clusterctl.util import formatting

# The maximum number of listed runs without --limit.
_LAST: Final = 50
_BASIC: Final = ("run", "state", "submitted", "elapsed", "nodes")
_NONE: Final = formatting.NONE
# What `runs show` shows of a run.
_SHOWN: Final = (
    job_facts,
    time_facts,
    resource_facts,
    configuration,
    metric_values,
    task_table,
    log_lines,
    outcome,
)
# What is printed for a paper or a program.
_PAPER: Final = (OutputFormat.MD, OutputFormat.CSV, OutputFormat.LATEX)

Run = Annotated[
    str,
    argument(
        "A run: its folder, its name in ./runs, or its job ID. For an array, 12_3 names one task.",
        metavar="RUN",
        tab=run_names,
        local=LocalValue.NAME,
    ),
]

# All are fields of RunQuery, except columns, over, sweep, ledger, limit, folders and everywhere.
_LIST_FLAGS: Final[Mapping[str, Any]] = {
    "where": flag(
        list[str],
        "Only runs that match a condition: lr=0.1, loss<2, name~bert, state!=FAILED. Repeatable.",
        metavar="CONDITION",
    ),
    "columns": flag(
        str,
        "Show these columns instead of the default: fields, options of the program, metrics.",
        metavar="KEY,...",
    ),
    "sort": flag(str, "Sort by this key, lowest first. Default: newest first.", metavar="KEY"),
    "reverse": flag(bool, "Reverse the order.", "--reverse", "-r"),
    "since": flag(str, "Only runs submitted since 7d, 12h, or 2026-01-31.", metavar="TIME"),
    "tags": flag(list[str], "Only runs with this tag. Repeatable.", "--tag"),
    "sweep": flag(
        str,
        "List the tasks of this sweep, the best first.",
        metavar="RUN",
        tab=run_names,
        local=LocalValue.NAME,
    ),
    "goal": flag(
        str,
        "With --sweep: whether the metric's lowest (min) or highest (max) value is best. Default: "
        "by the metric's name.",
        metavar="min|max",
        tab=("min", "max"),
    ),
    "over": flag(
        str,
        "Show means of the runs that differ only in these options, such as seed.",
        metavar="KEY,...",
    ),
    "tasks": flag(bool, "Show a line for each task of an array.", "--tasks"),
    "ledger": flag(bool, "Show how the runs used their time, and the sum.", "--ledger"),
    "limit": flag(
        int,
        f"Show at most this many. Default: {_LAST}; in JSON: all.",
        "--limit",
        "-n",
        least=1,
        metavar="N",
    ),
    "folders": flag(
        list[Path],
        "List the runs in this folder. Default: ./runs. Repeatable.",
        "--dir",
        parser=folder_path,
        metavar="PATH",
    ),
    "everywhere": flag(
        bool, "List runs in all folders of this machine with collected runs.", "--everywhere"
    ),
}


@takes(_LIST_FLAGS)
def list_(
    screen: Screen,
    output: Annotated[
        OutputFormat | None,
        option("Show the table as text, JSON, Markdown, CSV or LaTeX.", "--output", "-o"),
    ] = None,
    **given: Any,
) -> None:
    """List collected runs, newest first.

    Keys to show, sort by or filter: run, job, name, state, final, exit, user, cluster, partition,
    nodes, tasks_per_node, submitted, started, ended, collected, elapsed, node_hours, gpu_energy
    (J), cost (USD), tags, note; any option of the program, such as lr; any metric, such as loss,
    loss.min, loss.max.
    """
    _reject_excluded(screen, given)
    is_ledger = given.pop("ledger", False)
    chosen = _words(given.pop("columns", ""))
    over = _words(given.pop("over", ""))
    listed = _list_sweep if "sweep" in given else _list_runs
    listed(screen, given, chosen, over, is_ledger=is_ledger)


def _reject_excluded(screen: Screen, given: Mapping[str, Any]) -> None:
    """Raise UsageError for options that can't be combined, or need another one."""
    if given.keys() >= {"folders", "everywhere"}:
        raise excluded("--dir", "--everywhere")
    if "ledger" in given and (given.keys() & {"columns", "goal", "over"} or screen.form in _PAPER):
        raise excluded("--ledger", "--columns, --goal, --over or another --output")
    if "over" in given and given.keys() & {"sort", "reverse", "limit", "goal", "tasks"}:
        raise excluded("--over", "--sort, --reverse, --limit, --goal or --tasks")
    if "sweep" not in given:
        if "goal" in given:
            raise unaccompanied("--goal", "--sweep")
        return
    is_ranking = not given.keys() & {"ledger", "over"}
    shape = {
        "sweep",
        "ledger",
        "over",
        *(["sort", "goal", "reverse"] if is_ranking else ["columns"]),
    }
    if given.keys() - shape:
        raise excluded(
            "--sweep",
            "other options than --sort, --goal, --reverse; or --over, --columns; or --ledger",
        )


def _list_runs(
    screen: Screen,
    given: dict[str, Any],
    chosen: Sequence[str],
    over: Sequence[str],
    *,
    is_ledger: bool,
) -> None:
    """List runs that meet conditions; or, with ``over``, means of them."""
    limit, folders, everywhere = (
        given.pop(name, None) for name in ("limit", "folders", "everywhere")
    )
    # Means are over tasks, and of columns that only some have.
    shape = {"tasks": True} if over else {"columns": chosen}
    choice = screen.chosen()
    # ./runs has the runs of this project, also those of another cluster than that of ./cluster.yaml.
    cluster = choice.named_cluster() if choice.is_given else None
    query = RunQuery(**given, **shape, cluster=cluster)
    selected = select_runs(query, folders or (), everywhere=bool(everywhere))
    screen.note(*selected.notes)
    if not selected.rows:
        line = Notice("no-run-matches", "no run matches the conditions")
        if not selected.searched:
            line = Notice("no-runs", "no runs yet; `clusterctl collect` copies them here")
        if screen.form not in _PAPER:
            screen.result({"runs": [], "total": 0}, line)
            return
        # The table for a paper or a program has its head alone.
        screen.note(line)
    if over:
        _show_groups(screen, selected.rows[::-1], over, chosen)
    else:
        _list_rows(screen, selected.rows, query, limit, is_ledger=is_ledger)


def _list_rows(
    screen: Screen, rows: Sequence[Row], query: RunQuery, limit: int | None, *, is_ledger: bool
) -> None:
    """List runs that meet a query, with its columns or the usual ones."""
    total = len(rows)
    most = limit or (total if screen.json or screen.form in _PAPER else _LAST)
    shown = rows[:most]
    if is_ledger:
        answer, lines = _ledger_table(screen, shown)
        screen.result({**answer, "total": total}, *lines)
    elif screen.form == OutputFormat.CSV and not query.columns:
        screen.document({}, as_csv(*all_columns(shown)))
    else:
        keys = query.columns or [*_BASIC, *_metric_columns(shown, query.sort)]
        keys = keys if "run" in keys else ["run", *keys]
        answer = {"runs": [_answer(row) for row in shown], "total": total}
        _show_rows(screen, answer, shown, [*dict.fromkeys(keys)])
    if not screen.json and total > most:
        more = f"--limit {total}, or filter with --where, --since, --tag"
        screen.note(f"{total - most} more: {more}")


def _words(text: str) -> list[str]:
    return [key.strip() for key in text.split(",") if key.strip()]


def _list_sweep(
    screen: Screen,
    given: Mapping[str, Any],
    chosen: Sequence[str],
    over: Sequence[str],
    *,
    is_ledger: bool,
) -> None:
    """List the tasks of a sweep, the best first; or, with ``over``, means of them."""
    sweep = named_run(given["sweep"], screen.chosen())
    tasks = latest_tasks(sweep) or [sweep]
    if is_ledger:
        answer, lines = _ledger_table(screen, tasks)
        screen.result(answer, *lines)
        return
    if over:
        _show_groups(screen, tasks, over, chosen)
        return
    ranking = ranked(
        sweep,
        given.get("sort"),
        goal=goal_given(given.get("goal")),
        reverse=given.get("reverse", False),
    )
    answer, keys, notes = _ranking(sweep, ranking)
    _show_rows(screen, answer, ranking.tasks, keys, *notes)


def _show_rows(
    screen: Screen, answer: dict[str, Any], rows: Sequence[Row], keys: Sequence[str], *notes: str
) -> None:
    """Show values of runs in the form that the user chose."""
    if screen.form == OutputFormat.CSV:
        screen.document({}, as_csv(keys, cells(rows, keys)))
    elif screen.form in _PAPER:
        measured = [
            key not in FIELDS and not any(row.is_option(key) for row in rows) for key in keys
        ]
        _print_table(screen, keys, [[row.text(key) for key in keys] for row in rows], measured)
    else:
        screen.result(answer, *_table(screen, rows, keys), *notes)
        return
    screen.note(*(note for note in notes if note))


def _print_table(
    screen: Screen,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    measured: Sequence[bool],
    notes: Sequence[str] = (),
) -> None:
    """Print a table as LaTeX or Markdown. measured: whether a column has figures."""
    text = (
        latex(head, rows, measured, notes)
        if screen.form == OutputFormat.LATEX
        else Table(head, rows).as_markdown()
    )
    screen.document({}, text)


def _show_groups(
    screen: Screen, rows: Sequence[Row], over: Sequence[str], chosen: Sequence[str]
) -> None:
    """Show means over runs that differ only in the options ``over``. chosen: metrics or all."""
    reject_unknown_keys(rows, over)
    reject_unknown_keys(rows, chosen, as_metrics=True)
    groups = grouped(rows, over, chosen)
    head, rows_of = groups.table()
    notes = [*groups.notes()]
    if screen.form == OutputFormat.CSV:
        screen.document({}, as_csv(*groups.figures()))
    elif screen.form in _PAPER:
        measured = [at >= len(groups.keys) for at in range(len(head))]
        _print_table(screen, head, rows_of, measured, notes)
    else:
        answer = {
            "runs": [_answer(row) for row in rows],
            "over": over,
            "groups": [
                {
                    "options": each.options,
                    "n": len(each.counted),
                    "metrics": {
                        name: spread and spread.as_dict()
                        for name in groups.metrics
                        for spread in [each.spread(name)]
                    },
                    "runs": [row.shown for row in each.counted],
                    "diverged": [row.shown for row in each.diverged],
                    "left_out": each.left_out,
                }
                for each in groups.groups
            ],
        }
        screen.result(answer, *screen.table(_titles(head), rows_of))
    screen.note(*notes)


def _ledger_table(screen: Screen, rows: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
    """Return how runs used their time for the JSON answer, and as a table of shares in percent."""
    ledgers = [total_time_use([row]) for row in rows]
    total = {use: sum(ledger.get(use, 0.0) for ledger in ledgers) for use in TimeUse}
    uses = [use for use in TimeUse if total[use]]

    def line(name: str, ledger: Mapping[str, float]) -> list[str]:
        whole = sum(ledger.values())
        shares = [
            formatting.percent(100 * ledger[use] / whole, "") if use in ledger else _NONE
            for use in uses
        ]
        return [name, formatting.duration(round(whole)), *shares]

    lines = [line(row.shown, ledger) for row, ledger in zip(rows, ledgers, strict=True)]
    if len(rows) > 1:
        lines.append(line("sum", {use: total[use] for use in uses}))
    answer = {
        "runs": [
            {"run": row.shown, "job": row.value("job"), "dir": str(row.folder), "seconds": ledger}
            for row, ledger in zip(rows, ledgers, strict=True)
        ],
        "sum": {use: total[use] for use in uses},
    }
    head = ["RUN", "TIME", *(f"{use.upper()} %" for use in uses)]
    return answer, screen.table(head, lines)


def _ranking(run: Row, ranking: TaskRanking) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the ranking of a collected sweep for the JSON answer, the keys of its table, and the
    lines below.
    """
    rows = ranking.tasks
    metric = ranking.metric
    swept = swept_keys(run)
    more = [name for name in _metric_columns(rows) if name != metric]
    keys = list(dict.fromkeys(["job", *swept, metric, "state", *more]))
    lines: list[str] = []
    if ranking.best is not None:
        values = "".join(f" {key}={ranking.best.text(key)}" for key in swept)
        best = f"{metric} {ranking.best.text(metric)}"
        lines += ["", f"best: {ranking.best.value('job')}{values}: {best} ({ranking.goal_words})"]
    elif ranking.goal is not None:
        text = f"no task that completed has a value of {metric}, so none is the best"
        lines += ["", Notice("sweep-without-best", f"{text} ({ranking.goal_words})")]
    lines += _failed_tasks(run, rows)
    answer = {
        "sweep": run.run.job_id,
        "metric": metric,
        "goal": ranking.goal,
        "best": None if ranking.best is None else ranking.best.value("job"),
        "runs": [_answer(row) for row in rows],
    }
    return answer, keys, lines


def _failed_tasks(run: Row, rows: Sequence[Row]) -> list[Notice]:
    """Return lines about tasks to repeat, and repeated tasks that ran other code than the rest."""
    failed = failed_tasks(rows)
    text = (
        f"{len(failed)} of {len(rows)} tasks did not complete; to repeat them: "
        f"{repeat_command(run)}"
    )
    lines = [Notice("sweep-incomplete", text)] if failed else []
    jobs = {row.run.source: row.run.full_id for row in rows}
    if len(jobs) > 1:
        first, second, *_ = sorted(jobs.values(), key=lambda job: (len(job), job))
        text = (
            f"jobs {first} and {second} ran different code: `clusterctl runs diff {first} {second}`"
        )
        lines.append(Notice("sweep-of-two-programs", text))
    return lines


def show_tables(
    screen: Screen,
    session: Session,
    rows: Sequence[dict[str, Any]],
    jobs: Sequence[JobSpec],
    ended: Sequence[JobInfo],
) -> None:
    """Collect sweeps and scalings that have ended, and show their rankings and tables.

    rows: a dict for each of the ``jobs``, as `-o json` shows it. A sweep's ranking is added to its
        dict, the table of a scaling to that of its last job; None after an error.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row, job in zip(rows, jobs, strict=True):
        if job.scaling or (
            job.sweep and all(info.ended for info in ended if info.whole_id == row["job_id"])
        ):
            groups.setdefault(job.name if job.scaling else row["job_id"], []).append(row)
    for group in groups.values():
        key = "sweep" if len(group) == 1 else "scaling"
        group[-1][key] = _show_table(screen, session, [row["job_id"] for row in group])


def _show_table(screen: Screen, session: Session, job_ids: Sequence[str]) -> dict[str, Any] | None:
    """Collect a sweep or the jobs of a scaling, and show the table of collected runs. Return it, or
    None.
    """
    runs: list[Row] = []
    try:
        for run in collect_runs(session, job_ids):
            runs += [Row(run)]
    except CollectError as exc:
        # The error is not raised, so that the caller can still show the state of the jobs.
        screen.note(f"note: {exc.cause}")
        if not runs:
            return None
    try:
        if runs[0].run.scaling:
            answer, lines = scaling_table(screen, runs)
        else:
            ranking = ranked(runs[0])
            answer, keys, notes = _ranking(runs[0], ranking)
            lines = [*_table(screen, ranking.tasks, keys), *notes]
    except UsageError as exc:
        screen.note(f"note: {exc.cause}; {exc.fix}")
        return None
    ends = [line_of(row, row.folder) for row in runs]
    if not screen.json:
        screen.result(answer, *lines)
    screen.note(*ends)
    return answer


def _metric_columns(rows: Sequence[Row], sort: str | None = None) -> list[str]:
    return [*([sort] if sort is not None and sort not in _BASIC else []), *usual_metrics(rows)]


def _table(screen: Screen, rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    return screen.table(_titles(keys), [[row.text(key) for key in keys] for row in rows])


def _titles(keys: Sequence[str]) -> list[str]:
    return [key.upper() if key == key.lower() else key for key in keys]


def _answer(row: Row) -> dict[str, Any]:
    fields = {key: row.value(key) for key in FIELDS}
    job = row.task.id if row.task else row.run.job_id
    more = {"job": job, "dir": str(row.folder), "tags": list(row.run.tags)}
    metrics = {name: asdict(metric) for name, metric in row.metrics.items()}
    return {**fields, **more, "config": row.config, "metrics": metrics}


def show(screen: Screen, run: Run) -> None:
    """Show a collected run in full.

    Shows its resources, what it used of them and what to ask for next time, its nodes, its options
    and metrics, and of a failure the facts and hints; for a scaling, its table.
    """
    rows = named_rows(run, screen.chosen())
    if is_scaling(rows):
        scaling, lines = scaling_table(screen, rows)
        screen.result({"scaling": scaling}, *lines)
        return
    (row,) = rows
    sections = facts_of(row, *_SHOWN)
    record = row.run.model_dump(mode="json", exclude={"directory"})
    answer = {
        "run": {**record, "dir": str(row.folder)},
        "sections": [section.as_dict() for section in sections],
    }
    screen.result(answer, *_lines(screen, sections), "", f"folder: {row.folder}")


def _lines(screen: Screen, sections: Sequence[Section]) -> list[str]:
    parts = [section.as_text(screen.table) for section in sections]
    return [line for part in parts for line in ("", *part)][1:]


def scaling_table(screen: Screen, rows: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
    """Return the scaling for the JSON answer, and the lines to show: its table and its verdict."""
    scaling = scaling_of(rows)
    table = scaling.table()
    missing = [f"missing: {fact}" for fact in scaling.missing]
    lines = [
        *screen.table(table.head, table.rows),
        "",
        *scaling.notes(),
        *scaling.verdict(),
        *missing,
    ]
    return asdict(scaling), lines


def diff(
    screen: Screen,
    first: Annotated[
        str,
        argument("A run, as in `runs show`.", metavar="A", tab=run_names, local=LocalValue.NAME),
    ],
    second: Annotated[
        str, argument("Another run.", metavar="B", tab=run_names, local=LocalValue.NAME)
    ],
) -> None:
    """Compare two runs.

    Shows differences in the job, code, configuration, data, environment, hardware and result, and
    whether the losses are identical at each step.
    """
    a = named_run(first, screen.chosen())
    b = named_run(second, screen.chosen())
    differences = compare(a, b)
    titles = (a.shown, b.shown) if a.shown != b.shown else (str(a.folder), str(b.folder))
    rows = dict(zip(titles, (a, b), strict=True))
    missing: list[str] = []
    sections = [*difference_sections(rows, missing, with_results=True)] if differences else []
    lines = _lines(screen, sections) or ["no differences"]
    if losses := compare_losses(a, b):
        lines += ["", f"losses: {losses}"]
    answer = {
        "a": str(a.folder),
        "b": str(b.folder),
        "differences": [asdict(entry) for entry in differences],
    }
    screen.result({**answer, "losses": losses and asdict(losses)}, *lines)


def rm(
    screen: Screen,
    run: Annotated[
        list[str],
        argument(
            "Runs, as in `runs show`.", metavar="RUN...", tab=run_names, local=LocalValue.NAME
        ),
    ],
    yes: Annotated[bool, option("Do not ask.", "--yes", "-y")] = False,
) -> None:
    """Remove collected runs from this machine, after asking.

    The cluster is not changed.
    """
    rows = [named_run(name, screen.chosen(), certain=True) for name in run]
    if inner := next((row for row in rows if row.task is not None), None):
        raise UsageError(
            f"{inner.shown} can't be removed, because it is a single task of a run",
            about="task",
            fix=f"name the whole run: {inner.run.directory.name}",
        )
    runs = list({row.run.directory: row.run for row in rows}.values())
    for record in runs:
        screen.note(f"{record.directory}: {record.state}, {formatting.moment(record.submit_time)}")
    size = formatting.size(
        sum(_size(path) for record in runs for path in record.directory.rglob("*"))
    )
    title = runs[0].directory.name if len(runs) == 1 else f"{len(runs)} runs"
    screen.confirm(f"permanently remove {title} ({size}) from this machine?", yes=yes)
    removed: list[str] = []
    screen.partial_answer = {"removed": removed}
    for record in runs:
        hidden = record.directory.with_name(f".{record.directory.name}.removed")
        try:
            # The rename hides the run, so that an interrupted removal leaves no incomplete run.
            record.directory.rename(hidden)
            removed.append(str(record.directory))
            shutil.rmtree(hidden)
        except OSError as exc:
            raise ClusterctlError(
                f"the run's folder {record.directory.name} can't be removed",
                code="file-unwritable",
                about="folder",
                where=str(exc.filename or record.directory),
                why=exc.strerror or str(exc),
            ) from exc
    screen.result(screen.partial_answer, *(f"removed {path}" for path in removed))


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0


ReportFile = Annotated[
    Path | None,
    option(
        f"The file to write. Default: {REPORT_FILE} in the run's folder, or here for several runs.",
        parser=folder_path,
        metavar="FILE",
    ),
]


def _rows_of(screen: Screen, names: Sequence[str]) -> list[Row]:
    rows = (row for name in names for row in named_rows(name, screen.chosen()))
    return list({row.folder: row for row in rows}.values())


def report(
    screen: Screen,
    run: Annotated[
        Words,
        argument(
            "Runs, as in `runs show`. Default: the newest run in ./runs.",
            metavar="[RUN...]",
            tab=run_names,
            local=LocalValue.NAME,
        ),
    ] = None,
    out: ReportFile = None,
    open_: Annotated[bool, option("Open the report in the browser.", "--open")] = False,
    output: Annotated[
        OutputFormat | None,
        option(
            "Print the report as JSON or Markdown, without writing a file.",
            "--output",
            "-o",
            values=("text", "json", "md"),
        ),
    ] = None,
) -> None:
    """Write the report of a run, a sweep, or several runs.

    The report is a single HTML file that needs no network: the verdict, then metrics, time per
    step, ranks, nodes, the job, configuration and environment. For several runs, it begins
    with the differences.
    """
    is_markdown = screen.form == OutputFormat.MD
    if (is_markdown or screen.json) and (out or open_):
        raise excluded("-o json or -o md", "--out or --open")
    rows = _rows_of(screen, run) if run else [newest_run()]
    content = report_of(rows)
    if is_markdown:
        screen.document({}, content.as_markdown())
        return
    facts = content.as_dict()
    if screen.json:
        screen.result({"report": facts})
        return
    path = out or (report_path(rows[0]) if len(rows) == 1 else Path(REPORT_FILE))
    write_report(content, path)
    missing = [f"missing: {fact}" for fact in facts["missing"]]
    screen.result({}, *facts["verdict"], *missing, "", f"report: {path}")
    if open_ and not webbrowser.open(path.absolute().as_uri()):
        raise UsageError(
            f"no browser on this machine can open {path}",
            code="tool-missing",
            about="browser",
            fix="copy the file to a machine with a browser; it needs no other file",
        )


def figure(
    screen: Screen,
    metric: Annotated[str, argument("A metric, such as loss.", metavar="METRIC")],
    run: Annotated[
        list[str],
        argument(
            "Runs, as in `runs show`.", metavar="RUN...", tab=run_names, local=LocalValue.NAME
        ),
    ],
    out: Annotated[
        Path | None,
        option(
            "The file to write: FILE.pdf, .svg, or .csv for the points. Default: METRIC.pdf, here.",
            parser=folder_path,
            metavar="FILE",
        ),
    ] = None,
    over: Annotated[
        str,
        option(
            "Draw means of the runs that differ only in these options. Default: the seeds.",
            metavar="KEY,...",
        ),
    ] = "",
    width: Annotated[
        float,
        option(
            "The width in inches: by default that of a column.", least=1, most=20, metavar="INCHES"
        ),
    ] = figures.COLUMN_IN,
    log: Annotated[bool, option("Draw a logarithmic axis of the metric.")] = False,
) -> None:
    """Write a figure of a metric for a paper.

    It has a line for each group of runs whose options are equal but for their seed: the mean, with
    a band of the standard deviation. Runs that are in no line are named.
    """
    path = out or Path(f"{metric.replace('/', '-')}{figures.FORMS[0]}")
    if path.suffix not in figures.FORMS:
        raise UsageError(
            f"{path} is not the name of a figure",
            about="figure-form",
            fix=f"end it with {', '.join(figures.FORMS[:-1])} or {figures.FORMS[-1]}",
        )
    rows = _rows_of(screen, run)
    parts = [part for row in rows for part in (latest_tasks(row) if row.tasks else [row])]
    drawn = figures.MetricFigure.of(parts, metric, _words(over))
    drawn.write(path, width_in=width, log=log)
    lines = [
        *(
            f"{line.group.name or metric}: n={line.count}, {len(line.points)} {drawn.means.axis}s"
            + (f", of one of {line.stride} values" if line.stride > 1 else "")
            for line in drawn.means.lines
        ),
        *drawn.notes(),
        f"figure: {path}",
    ]
    answer = {
        "figure": str(path),
        "metric": metric,
        "lines": [
            {"options": line.group.options, "n": line.count, "points": len(line.points)}
            for line in drawn.means.lines
        ],
        "left_out": drawn.left_out,
    }
    screen.result(answer, *lines)
