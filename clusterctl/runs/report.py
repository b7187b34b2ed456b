"""Reports of a run, of a comparison of runs, and of a sweep, built from the runs' folders alone.

Charts show the program's metrics (series.py) and the nodes' telemetry; the rest comes from run.json
and environment.json. Any file may be damaged or hostile, so unreadable data is listed as missing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.runs.charts import (
    MOST_LINES,
    PARTS,
    ProgramMetrics,
    metrics_section,
    parameter_chart,
    seeds_section,
    step_charts,
)
from clusterctl.runs.compare import (
    compare_losses,
)
from clusterctl.runs.facts import (
    SPEEDS,
    configuration,
    difference_sections,
    ending_of,
    environment,
    facts_of,
    job_facts,
    label_of,
    log_lines,
    metric_lines,
    missing_of,
    notes_of,
    resource_facts,
    table_of,
    time_facts,
    usual_metrics,
    with_causes,
)
from clusterctl.runs.find import (
    Row,
    TaskRanking,
    failed_tasks,
    key_of,
    latest_tasks,
    metric_names,
    metric_of,
    ranked,
    repeat_command,
    swept_keys,
)
from clusterctl.runs.folder import collected_files
from clusterctl.runs.groups import how_diverged
from clusterctl.runs.page import (
    REPORT_FILE,
    Chart,
    Kind,
    Report,
    Section,
    Series,
    Table,
    write_report,
)
from clusterctl.runs.resources import resources_of
from clusterctl.runs.results import results_section, size_charts
from clusterctl.runs.scaling import scaling_report
from clusterctl.runs.series import history_in, restarts_in, result_lines
from clusterctl.runs.telemetry import compare_ranks, node_use, nodes_section
from clusterctl.runs.telemetry_files import FIGURES
from clusterctl.scheduler.base import JobState, Outcome
from clusterctl.scheduler.ends.diagnosis import Diagnosis, lines_of_tasks
from clusterctl.scheduler.history import Alarm, Attempt, Hang
from clusterctl.spec.names import first_few
from clusterctl.state.ledger import ENVIRONMENT_FILE, RUN_FILE
from clusterctl.state.run_record import RunRecord
from clusterctl.util import formatting
from clusterctl.util.numbers import counted

# Columns for further metrics in a ranking.
_MORE_METRICS: Final = 4


def report_of(rows: Sequence[Row]) -> Report:
    """Return the report of a run, a job array or a scaling, or the comparison of several runs.

    Raises UsageError if no metric ranks the tasks of a sweep, or no run has the metric of a
    scaling.
    """
    if len(rows) > 1:
        return scaling_report(rows) or _comparison_report(rows)
    return _array_report(rows[0]) if rows[0].tasks else _run_report(rows[0])


def write_report_beside(run: RunRecord) -> None:
    """Write the report into the folder of a collected run, unless the report there is up to date.

    Errors are ignored, so that `collect` and `down` continue. `clusterctl report` shows them.
    """
    with suppress(Exception):
        path = report_path(Row(run))
        if (
            not path.exists()
            or path.stat().st_mtime_ns < (run.directory / RUN_FILE).stat().st_mtime_ns
        ):
            write_report(report_of([Row(run)]), path)


def report_path(row: Row) -> Path:
    """Return the path for the report of a run or task. Raises UsageError if the job wrote a file
    there.
    """
    path = row.folder / REPORT_FILE
    name = os.fsencode(path.relative_to(row.run.directory))
    if os.path.lexists(path) and name in collected_files(row.run.directory):
        raise UsageError(
            f"the run's folder already has a {REPORT_FILE} that the job wrote",
            code="exists",
            about="job-file",
            where=str(path),
            fix="choose another file with --out FILE",
        )
    return path


def _run_report(row: Row) -> Report:
    facts = ProgramMetrics.of(row)
    missing = list(missing_of(row))
    software = _environment(row, missing)
    nodes = nodes_section(row, facts, missing)
    lines = result_lines(row.folder, missing)
    results = results_section(lines)
    if not facts.curves and not results.tables and not facts.left_out:
        missing.append(
            "metrics: the program wrote no metrics.jsonl, TensorBoard file, metrics.csv or "
            "trainer_state.json"
        )
    speed = list(_speed_lines(facts))
    ranks = _rank_section(facts)
    restarts = restarts_in(row.folder, row.record.attempts)
    history = history_in(row.folder)
    hangs = [hang for attempt in history for hang in attempt.hangs]
    alarms = [alarm for attempt in history for alarm in attempt.all_alarms]
    ending = [*ending_of(row).verdict, *notes_of(row)]
    # The remarks on a failure may have them.
    found: list[Hang | Alarm] = [*hangs[-1:], *alarms[-1:]]
    last = [each for each in found if str(each) not in "\n".join(ending)]
    sections = [
        *facts_of(row, log_lines),
        replace(results, charts=size_charts({"": lines})),
        metrics_section({"": facts}, missing),
        Section("Time of a step", charts=list(step_charts(facts))),
        replace(ranks, lines=()),
        nodes,
        # The verdict has the last restart, the last hang and the last alarm.
        Section(
            "Restarts",
            [attempt.in_utc for attempt in restarts[-MOST_LINES:]] if restarts[1:] else (),
        ),
        Section("Hangs", [*_with_times(hangs[-MOST_LINES:])] if hangs[1:] else ()),
        Section("Alarms", [*_with_times(alarms[-MOST_LINES:])] if alarms[1:] else ()),
        *facts_of(row, time_facts, resource_facts, job_facts, configuration),
        *software,
    ]
    verdict = [
        *ending,
        *_restart_lines(restarts),
        *_with_times(last),
        *metric_lines(row),
        *speed,
        *ranks.lines,
        *filter(None, [resources_of(row).advice]),
    ]
    return Report(
        row.shown,
        verdict,
        _has_completed(row),
        missing,
        [each for each in sections if each.has_content],
    )


def _without_empty(sections: Iterable[Section]) -> list[Section]:
    return [section for section in sections if section.has_content]


def _has_completed(row: Row) -> bool | None:
    """Return True if the run completed, False if it failed, None if it was cancelled or is still
    running.
    """
    with suppress(ValueError):
        return {Outcome.COMPLETED: True, Outcome.FAILED: False}.get(
            JobState(row.record.state).outcome
        )
    return None


def _with_times(found: Iterable[Hang | Alarm]) -> Iterator[str]:
    return (f"{formatting.moment(each.since, utc=True)}: {each}" for each in found)


def _restart_lines(restarts: Sequence[Attempt]) -> Iterator[str]:
    if restarts:
        counts = [attempt.steps_lost for attempt in restarts if attempt.steps_lost is not None]
        lost = f" with {sum(counts)} steps lost" if len(counts) == len(restarts) else ""
        total = f"restarted {len(restarts)} times{lost}; the last: " if len(restarts) > 1 else ""
        yield f"{total}{restarts[-1].in_utc}"


def _speed_lines(facts: ProgramMetrics) -> Iterator[str]:
    for name in SPEEDS:
        if (median := facts.median(name)) is not None:
            unit = name.removesuffix("_per_s")
            stride = facts.samples[name].stride
            of = f" of one of {stride} values" if stride > 1 else ""
            yield f"median speed{of}: {formatting.metric(median, name)} {unit} per second"
    if means := facts.part_means:
        count = facts.parts[0].count
        sums = {name: mean * count for name, mean in zip(PARTS, means, strict=True)}
        if facts.stalls:
            sums["checkpoints"] = facts.stall_ms
        total = sum(sums.values())
        if 0 < total < math.inf:
            shares = ", ".join(
                f"{formatting.percent(100 * value / total)} {name}" for name, value in sums.items()
            )
            yield f"mean time of a step: {formatting.quantity(total / count, 'ms')}, of which {shares}"


def _rank_section(facts: ProgramMetrics) -> Section:
    ranks = facts.ranks
    means = ranks.means
    count = len(ranks.means)
    if count <= 1:
        return Section("Ranks")
    hosts = [facts.hosts.get(rank) or "" for rank in range(count)]
    pipelined = "stages of a pipeline are not compared"
    text = (
        pipelined if facts.pipelined else compare_ranks(means, ranks.slowest, ranks.windows, hosts)
    )
    bars = [(f"{rank} {hosts[rank]}".strip(), mean) for rank, mean in enumerate(means)]
    chart = Chart("Computing per step", [Series("mean", bars)], "rank", "ms, mean", Kind.BARS)
    return Section("Ranks", [text], [chart])


def _environment(row: Row, missing: list[str]) -> list[Section]:
    sections = facts_of(row, environment)
    if not sections:
        missing.append(f"the environment: {ENVIRONMENT_FILE} does not exist or is damaged")
    return sections


def _comparison_report(rows: Sequence[Row]) -> Report:
    """Return the report that compares runs. A sweep is compared by its best task, which the verdict
    names.
    """
    missing: list[str] = []
    best = [_best_task(row) for row in rows]
    compared = [row if task is None else task for row, (task, _) in zip(rows, best, strict=True)]
    titled = {_title(row, compared): row for row in compared}
    facts = {title: ProgramMetrics.of(titled[title]) for title in list(titled)[:MOST_LINES]}
    changes = [*difference_sections(titled, missing)]
    if len(rows) > MOST_LINES:
        missing.append(f"lines of {counted(len(rows) - MOST_LINES, 'more run')} in the charts")
    of = " of the compared tasks" if any(task is not None for task, _ in best) else ""
    verdict = [f"{len(rows)} runs: {_describe_differences(changes, missing, of)}"]
    if len(rows) == 2 and (losses := compare_losses(*rows) or compare_losses(*compared)):  # noqa: PLR2004 - a pair
        verdict.append(f"losses: {losses}")
    for row, (task, ranking) in zip(rows[:MOST_LINES], best, strict=False):
        figures = (
            f"; compared by its best {_named_task(task)}, by {ranking}" if task is not None else ""
        )
        # The table has the state and the times of a run that completed.
        if figures or not _has_completed(row):
            verdict.append(f"{row.shown}: {ending_of(row).outcome}{figures}")
    keys = usual_metrics(compared, _MORE_METRICS)
    results = [
        table_of("run", titled, [*keys, "state", "nodes", "elapsed"]),
        _use_table(titled, facts),
    ]
    sections = [
        Section("Results", charts=_size_charts(titled), tables=results),
        seeds_section(compared, keys) if keys else Section("Seeds"),
        *changes,
        metrics_section(facts, missing),
    ]
    return Report(
        f"{len(rows)} runs compared",
        verdict,
        None,
        missing,
        [each for each in sections if each.has_content],
    )


def _size_charts(rows: Mapping[str, Row]) -> list[Chart]:
    return size_charts(
        {title: result_lines(row.folder, []) for title, row in [*rows.items()][:MOST_LINES]}
    )


def _use_table(rows: Mapping[str, Row], runs: Mapping[str, ProgramMetrics]) -> Table:
    """Return a table of the time of a step and of the use of the nodes."""
    figures: dict[str, dict[str, str]] = {}
    for title, row in rows.items():
        step_ms = runs[title].mean_step_ms if title in runs else None
        own = {"step (mean)": formatting.quantity(step_ms, "ms")} if step_ms is not None else {}
        totals = {key: row.text(key) for key in ("node_hours", "gpu_energy", "cost")}
        own |= {label_of(key): text for key, text in totals.items() if text != formatting.NONE}
        use = node_use(row.folder, row.record.nodes)
        figures[title] = own | {
            figure.heading: formatting.quantity(use[figure.key] * figure.size, figure.unit)
            for figure in FIGURES
            if figure.key in use
        }
    heads = list(dict.fromkeys(head for own in figures.values() for head in own))
    cells = [[title, *(own.get(head, "-") for head in heads)] for title, own in figures.items()]
    return Table(("run", *heads), cells if heads else ())


def _title(row: Row, rows: Sequence[Row]) -> str:
    return row.shown if [other.shown for other in rows].count(row.shown) == 1 else str(row.folder)


def _best_task(row: Row) -> tuple[Row | None, str]:
    """Return the best task of a sweep, and what ranks its tasks; (None, "") for a run without a
    best task.
    """
    with suppress(UsageError):
        ranking = ranked(row)
        return ranking.best, str(ranking)
    return None, ""


def _named_task(task: Row) -> str:
    """Return a text such as ``task 3, lr=0.1 width=8``."""
    keys = swept_keys(task)
    values = " ".join(f"{key}={task.text(key)}" for key in keys)
    return f"task {task.number}{', ' if values else ''}{values}"


def _describe_differences(sections: Sequence[Section], missing: Sequence[str], of: str) -> str:
    tables = [table for section in sections for table in section.tables]
    keys = [row[0] for table in tables if not table.folded for row in table.rows]
    keys += [table.title for table in tables if table.folded]
    if keys:
        return f"they differ in {first_few([*dict.fromkeys(keys)], MOST_LINES)}"
    if missing:
        return "the differences can't be read"
    return f"job, code, configuration, data, environment and hardware{of} are the same"


def _array_report(run: Row) -> Report:
    """Return the report of a sweep or another job array: ranked tasks, and a chart of each
    parameter.
    """
    missing = list(missing_of(run))
    tasks = latest_tasks(run)
    ranking, missing_ranking = _rank(run, tasks)
    missing += missing_ranking
    metric = ""
    if ranking is not None:
        tasks = [*ranking.tasks]
        metric = ranking.metric
    keys = swept_keys(run)
    # A task without a number has the whole array's ID.
    in_order = sorted(tasks, key=lambda task: (len(task.number), task.number))
    outcomes = [_has_completed(task) for task in tasks]
    missing += _missing_of_tasks(tasks, in_order, keys, metric)
    titled = {f"task {task.number}": task for task in tasks}
    facts = {title: ProgramMetrics.of(titled[title]) for title in [*titled][:MOST_LINES] if metric}
    others = [name for name in usual_metrics(tasks, _MORE_METRICS + 1) if name != metric]
    columns = [*keys, *filter(None, [metric]), "state", *others[:_MORE_METRICS], "elapsed"]
    sections = [
        *facts_of(run, log_lines),
        Section(
            f"Ranking by {ranking}" if ranking is not None else "Tasks",
            tables=[
                with_causes(table_of("task", {task.number: task for task in tasks}, columns), tasks)
            ],
        ),
        Section(
            "Parameters", charts=[parameter_chart(key, metric, tasks) for key in keys if metric]
        ),
        Section("Results", charts=_size_charts(titled)),
        seeds_section(tasks, [metric, *others[:_MORE_METRICS]]) if metric else Section("Seeds"),
        metrics_section(facts, missing, [metric_of(metric), "loss", "train_loss"]),
        *facts_of(run, time_facts, resource_facts, job_facts, configuration),
        *_environment(run, missing),
    ]
    verdict = [*_array_verdict(run, ranking, in_order, outcomes)]
    return Report(run.shown, verdict, _all_true(outcomes), missing, _without_empty(sections))


def _rank(run: Row, tasks: Sequence[Row]) -> tuple[TaskRanking | None, list[str]]:
    """Return the ranking of a job array's tasks, if they have a metric, and what is missing in
    it.
    """
    metric = next(metric_names(tasks), None)
    if metric is None:
        return None, ["metrics: no task wrote any"]
    try:
        return ranked(run), []
    except UsageError as exc:
        how = f": {exc.fix}" if exc.about == "goal" else ""
        missing = [f"the sweep's own ranking: {exc.what}{how}"]
    try:
        return ranked(run, key_of(metric, tasks)), missing
    except UsageError:
        return None, missing


def _all_true(outcomes: Sequence[bool | None]) -> bool | None:
    """Return whether all outcomes are True. None: no outcome is False, but some are unknown."""
    if False in outcomes:
        return False
    return None if None in outcomes else True


def _array_verdict(
    run: Row, ranking: TaskRanking | None, tasks: Sequence[Row], outcomes: Sequence[bool | None]
) -> Iterator[str]:
    """Yield the lines at the top of the report of a job array.

    tasks: by number. outcomes: for each task, whether it completed.
    """
    ended, *details = ending_of(run).verdict
    yield ended
    if ranking is not None and ranking.goal is not None:
        yield _best_line(ranking)
    if not _all_true(outcomes):
        yield from details
    yield f"{outcomes.count(True)} of {len(tasks)} tasks completed"
    yield from notes_of(run)
    yield from _incomplete_tasks(run, tasks)
    if ranking is not None:
        yield from _diverged_tasks(ranking.metric, tasks)
    numbers_by_job: dict[str, list[str]] = {}
    for task in tasks:
        if task.run.token != run.run.token:
            numbers_by_job.setdefault(task.run.job_id, []).append(task.number)
    for job_id, numbers in numbers_by_job.items():
        yield f"tasks {first_few(numbers, MOST_LINES)} ran again in job {job_id}"


def _missing_of_tasks(
    tasks: Sequence[Row], in_order: Sequence[Row], keys: Sequence[str], metric: str
) -> Iterator[str]:
    """Yield what the report of a job array lacks of its tasks.

    tasks: best first. in_order: by number. keys: the swept options. metric: of the ranking, or "".
    """
    if keys and metric:
        numbers = [task.number for task in in_order if task.text(metric) == formatting.NONE]
        if numbers:
            plural = "" if len(numbers) == 1 else "s"
            yield f"the {metric} of task{plural} {first_few(numbers, MOST_LINES)}"
    if metric and len(tasks) > MOST_LINES:
        yield f"in the charts of metrics, all tasks but the best {MOST_LINES}"
    if partial := [task.number for task in tasks[MOST_LINES:] if task.record.left_out]:
        yield f"metrics of tasks {first_few(partial, MOST_LINES)} (`left_out` in run.json)"


def _best_line(ranking: TaskRanking) -> str:
    if ranking.best is None:
        return f"no task that completed has a value of {ranking.metric}, so none is the best"
    value = ranking.best.text(ranking.metric)
    return f"best: {_named_task(ranking.best)}: {ranking.metric} {value} ({ranking.goal_words})"


def _diverged_tasks(name: str, tasks: Sequence[Row]) -> Iterator[str]:
    """Yield the tasks whose last value of a metric is no number, and since when."""
    for task in tasks:
        if (how := how_diverged(task, name)) is not None:
            yield f"task {task.number} diverged: {how}"


def _incomplete_tasks(run: Row, tasks: Sequence[Row]) -> Iterator[str]:
    """Yield the tasks of an array that did not complete, by their causes, and the command that repeats
    failed tasks.
    """
    states = {
        str(task.value("job")): task.record.state
        for task in tasks
        if task.record.state != JobState.COMPLETED and not task.record.diagnosis
    }
    told = (Diagnosis.read(task.record.diagnosis) for task in tasks)
    yield from lines_of_tasks(states, filter(None, told))
    if failed_tasks(tasks):
        yield f"to repeat them: {repeat_command(run)}"
