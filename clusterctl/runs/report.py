"""Reports of a run, of a comparison of runs, and of a sweep, built from the runs' folders alone.

Charts show the program's metrics (series.py) and the nodes' telemetry; the rest comes from run.json and
environment.json. Any file may be damaged or hostile, so unreadable data is listed as missing.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import CollectError, UsageError
from clusterctl.runs.compare import compare, compare_losses, environment_of, hardware_of, mapping, software_of
from clusterctl.runs.find import USUAL_METRICS, Row, latest_tasks, metric_names, ranked
from clusterctl.runs.folder import collected_files
from clusterctl.runs.page import (
    REPORT_FILE,
    Chart,
    Kind,
    Report,
    Section,
    Series,
    Table,
    thinned,
    write_report,
)
from clusterctl.runs.series import Record, finite, hangs_in, is_number, read_results, records, restarts_in
from clusterctl.runs.telemetry import compare_ranks, node_charts
from clusterctl.scheduler.attempts import Restart
from clusterctl.scheduler.base import JobState, Outcome
from clusterctl.spec.sweep import Goal, goal_of
from clusterctl.spec.units import format_duration
from clusterctl.state.ledger import RunRecord, Value, node_hours
from clusterctl.state.submissions import ENVIRONMENT_FILE, RUN_FILE

_MOST_CHARTS: Final = 16
_MOST_LINES: Final = 16  # per chart
_MOST_POINTS: Final = 50_000  # per metric
# Columns for further metrics in a ranking.
_MORE_METRICS: Final = 4
# The clocks of hosts differ a little, and Slurm reports whole seconds.
_CLOCK_S: Final = 2.0
_SPLIT: Final = re.compile(r"^(?:train(?:ing)?|val(?:id(?:ation)?)?|eval(?:uation)?|test|dev)[/_.]")
# Metrics of the bundled `train` that the report shows in sentences or in charts of their own.
_OWN_CHARTS: Final = frozenset(
    "seconds data_ms comm_total_ms comm_exposed_ms skipped eval_windows stall_s write_s bytes".split()
)
# The parts of a step's time.
_PARTS: Final = ("compute", "exposed communication", "data")


@dataclass
class _Facts:
    """The metrics that the program of a run or task wrote over time, with times in milliseconds.

    steps: (step, (compute, communication, data)). stalls: step -> time for a checkpoint. hosts: rank -> host.
    """

    series: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    steps: list[tuple[float, Sequence[float]]] = field(default_factory=list)
    stalls: dict[int, float] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    compute: list[tuple[Sequence[float], Sequence[float], int]] = field(default_factory=list)
    began: float | None = None
    ended: float | None = None
    pipelined: bool = False
    is_ours: bool = False

    @classmethod
    def of(cls, row: Row) -> _Facts:
        facts = cls()
        for number, record in enumerate(records(row.folder)):
            facts._add(number, record)
        start, end = row.record.start_time or 0, row.record.end_time or math.inf
        for moment in (facts.began, facts.ended):
            if moment is not None and not start - _CLOCK_S <= moment <= end + _CLOCK_S:
                # The program used another clock, such as the seconds since its start.
                facts.began = facts.ended = None
        return facts

    def _add(self, number: int, record: Record) -> None:
        line, x = record.line, float(number if record.step is None else record.step)
        for name, value in record.values.items():
            _append(self.series[name], (x, value))
        if record.time is not None:
            self.began = min(self.began or record.time, record.time)
            self.ended = max(self.ended or record.time, record.time)
        match record.kind:
            case "run":
                self.is_ours = True
                listed = line.get("ranks")
                ranks = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
                self.hosts = {number: str(row.get("host", "")) for number, row in enumerate(ranks)}
                self.pipelined = mapping(line, "config").get("pp", 1) != 1
            case "iteration":
                numbers = _finite(line.get(key) for key in ("seconds", "comm_exposed_ms", "data_ms"))
                if len(numbers) == len(_PARTS):
                    seconds, exposed, data = numbers
                    _append(self.steps, (x, (max(0.0, 1e3 * seconds - exposed - data), exposed, data)))
            case "checkpoint":
                self.stalls |= {int(x): 1e3 * seconds for seconds in _finite([line.get("stall_s")])}
            case "evaluation":
                means, slowest, windows = (line.get(key) for key in ("compute_ms", "slowest", "windows"))
                if isinstance(means, list) and isinstance(slowest, list) and isinstance(windows, int):
                    complete = len(means) == len(_finite(means)) == len(_finite(slowest)) == len(slowest)
                    if complete and 0 < windows < _MOST_POINTS:
                        self.compute.append((means, slowest, windows))


def _finite(values: Iterable[Any]) -> list[float]:
    return [number for number in map(finite, values) if number is not None]


def _append(values: list[Any], value: Any) -> None:
    """Append a value. If the list becomes very long, drop every second value."""
    values.append(value)
    if len(values) > _MOST_POINTS:
        del values[1::2]


def report_of(rows: Sequence[Row]) -> Report:
    """Return the report of a run, the report of a job array, or the comparison of several runs.

    Raises:
        UsageError: no metric ranks the tasks of a sweep.
    """
    if len(rows) > 1:
        return _comparison_report(rows)
    return _array_report(rows[0]) if rows[0].tasks else _run_report(rows[0])


def write_report_beside(run: RunRecord) -> None:
    """Write the report into the folder of a collected run, unless the report there is up to date.

    Errors are ignored, so that `collect` and `down` continue. `clusterctl report` shows them.
    """
    with suppress(Exception):
        path = report_path(Row(run))
        if not path.exists() or path.stat().st_mtime_ns < (run.directory / RUN_FILE).stat().st_mtime_ns:
            write_report(report_of([Row(run)]), path)


def report_path(row: Row) -> Path:
    """Return the path for the report of a run or task. Raises UsageError if the job wrote a file there."""
    path = row.folder / REPORT_FILE
    name = os.fsencode(path.relative_to(row.run.directory))
    if os.path.lexists(path) and name in collected_files(row.run.directory):
        raise UsageError(
            f"the run's folder already has a {REPORT_FILE} that the job wrote",
            code="file-of-the-job",
            where=str(path),
            fix="choose another file with --out FILE",
        )
    return path


def _run_report(row: Row) -> Report:
    facts, missing = _Facts.of(row), list(_missing(row))
    software = _environment_section(row, missing)
    nodes, missing_telemetry = node_charts(row.folder, row.record.nodes)
    missing += missing_telemetry
    results = [Table(*result) for result in read_results(row.folder, limit=_MOST_LINES)]
    if not facts.series and not results:
        missing.append("metrics: the program wrote no metrics.jsonl, TensorBoard file or metrics.csv")
    speed, restarts, ranks = list(_speed_lines(facts)), restarts_in(row.folder), _rank_section(facts)
    hangs = [
        f"{datetime.fromtimestamp(hang.since, UTC):%H:%M:%S} UTC: {hang}" for hang in hangs_in(row.folder)
    ]
    sections = [
        Section("Results", tables=results),
        _metric_charts({"": facts}, missing),
        Section("Time of a step", speed, list(_step_charts(facts))),
        ranks,
        Section("Nodes", charts=nodes),
        Section("Restarts", [str(restart) for restart in restarts[-_MOST_LINES:]]),
        Section("Hangs", hangs[-_MOST_LINES:]),
        _scheduler_section(row, facts),
        _configuration_section(row),
        software,
    ]
    verdict = [
        *_outcome_lines(row),
        *_restart_lines(restarts),
        *hangs[-1:],
        *_metric_changes(row, facts),
        *speed,
        *ranks.lines,
    ]
    return Report(row.shown, verdict, _has_completed(row), missing, _without_empty(sections))


def _without_empty(sections: Iterable[Section]) -> list[Section]:
    return [part for part in sections if part.lines or part.charts or any(t.rows for t in part.tables)]


def _has_completed(row: Row) -> bool | None:
    """Return True if the run completed, False if it failed, None if it was cancelled or is still running."""
    with suppress(ValueError):
        return {Outcome.COMPLETED: True, Outcome.FAILED: False}.get(JobState(row.record.state).outcome)
    return None


def _outcome_lines(row: Row) -> Iterator[str]:
    """Yield lines on how the run ended: state, duration, nodes, cost; for a failure also cause and remedy."""
    record, elapsed = row.record, _shown(row.value("elapsed"), "elapsed")
    location = f" on {len(record.nodes)} node{'s' if len(record.nodes) > 1 else ''}" if record.nodes else ""
    after = f" after {elapsed}" if elapsed != "-" else ""
    hours = node_hours([row.task] if row.task else row.run.tasks)
    cost = f": {hours:.3g} node hours" if hours else ""
    if row.run.cost_usd is not None and row.task is None:
        cost += f", about {row.run.cost_usd:.2f} USD"
    state = record.state if row.run.final else f"{record.state} when it was collected"
    yield f"{state}{after}{location}{cost}"
    diagnosis = row.run.diagnosis or {}
    if diagnosis.get("cause") and (row.task is None or diagnosis.get("job_id") in {None, row.task.id}):
        yield f"{diagnosis['cause']}; fix: {diagnosis.get('fix', '')}"
        lines = diagnosis.get("lines")
        yield from (f"| {line}" for line in lines) if isinstance(lines, list) else ()


def _restart_lines(restarts: Sequence[Restart]) -> Iterator[str]:
    if restarts:
        counts = [restart.steps_lost for restart in restarts if restart.steps_lost is not None]
        lost = f" with {sum(counts)} steps lost" if len(counts) == len(restarts) else ""
        total = f"restarted {len(restarts)} times{lost}; the last: " if len(restarts) > 1 else ""
        yield f"{total}{restarts[-1]}"


def _metric_changes(row: Row, facts: _Facts) -> Iterator[str]:
    for name in list(metric_names([row]))[:2]:
        metric, points = row.metrics[name], facts.series.get(name, ())
        if metric.last is None or len(points) <= 1:
            continue
        spread = (
            f", between {_shown(metric.min)} and {_shown(metric.max)}" if metric.min != metric.max else ""
        )
        if name in USUAL_METRICS:
            best = metric.max if goal_of(name) == Goal.MAX else metric.min
            spread = f", at best {_shown(best)}" if best != metric.last else ""
        values = f"{_shown(points[0][1])} to {_shown(metric.last)}{spread}"
        yield f"{name} went from {values}, in {metric.count} values"
    for name, metric in row.metrics.items():
        if metric.nonfinite:
            first = "" if metric.nonfinite_step is None else f", first at step {metric.nonfinite_step}"
            yield f"{name} was NaN or infinite in {metric.nonfinite} of {metric.count} values{first}"


def _speed_lines(facts: _Facts) -> Iterator[str]:
    for name in ("samples_per_s", "tokens_per_s"):
        if values := _finite(y for _, y in facts.series.get(name, ())):
            unit = name.removesuffix("_per_s")
            yield f"{_shown(statistics.median(values))} {unit} per second at the median"
    if facts.steps:
        sums = {name: sum(parts[index] for _, parts in facts.steps) for index, name in enumerate(_PARTS)}
        sums |= {"checkpoints": sum(facts.stalls.values())} if facts.stalls else {}
        total = sum(sums.values())
        if 0 < total < math.inf:
            shares = ", ".join(f"{100 * value / total:.0f} % {name}" for name, value in sums.items())
            yield f"{_shown(total / len(facts.steps))} ms per step: {shares}"


def _step_charts(facts: _Facts) -> Iterator[Chart]:
    if facts.steps:
        size = math.ceil(len(facts.steps) / 100)
        chunks = [facts.steps[at : at + size] for at in range(0, len(facts.steps), size)]
        areas = [
            Series(name, [(part[-1][0], sum(times[at] for _, times in part) / len(part)) for part in chunks])
            for at, name in enumerate(_PARTS)
        ]
        yield Chart("Time of a step", areas, y="ms", kind=Kind.AREAS)
    if facts.stalls:
        stalls = [(str(step), stall) for step, stall in sorted(facts.stalls.items())[-100:]]
        yield Chart("Checkpoints", [Series("wait of rank 0", stalls)], y="ms", kind=Kind.BARS)


def _rank_section(facts: _Facts) -> Section:
    count = len(facts.compute[0][0]) if facts.compute else 0
    evaluations = [values for values in facts.compute if len(values[0]) == count]
    windows = sum(weight for _, _, weight in evaluations)
    if count <= 1:
        return Section("Ranks")
    means = [sum(times[rank] * weight for times, _, weight in evaluations) / windows for rank in range(count)]
    slowest = [sum(slow[rank] for _, slow, _ in evaluations) for rank in range(count)]
    hosts = [facts.hosts.get(rank) or "" for rank in range(count)]
    pipelined = "stages of a pipeline are not compared"
    text = pipelined if facts.pipelined else compare_ranks(means, slowest, windows, hosts)
    bars = [(f"{rank} {hosts[rank]}".strip(), mean) for rank, mean in enumerate(means)]
    chart = Chart("Computing per step", [Series("compute", bars)], "rank", "ms", Kind.BARS)
    return Section("Ranks", [text], [chart])


def _metric_charts(runs: Mapping[str, _Facts], missing: list[str], only: Sequence[str] = ()) -> Section:
    """Return charts of the metrics ``only`` (empty: all), with a line per run. ``missing``: gets messages."""
    groups: dict[str, list[str]] = defaultdict(list)
    is_bundled = any(facts.is_ours for facts in runs.values())
    for name in dict.fromkeys(name for facts in runs.values() for name in facts.series):
        if not (name in _OWN_CHARTS and is_bundled) and (not only or name in only):
            groups[_SPLIT.sub("", name)].append(name)

    def order(group: str) -> tuple[bool, int, str]:
        """Return a sort key: losses and accuracies come first, metrics that never changed come last."""
        curves = (facts.series.get(name, ()) for name in groups[group] for facts in runs.values())
        words = ("loss", "acc", "perplexity", "bits", "samples_per_s", "tokens_per_s")
        rank = next((rank for rank, word in enumerate(words) if word in group), len(words))
        return len({y for curve in curves for _, y in curve}) == 1, rank, group

    if len(groups) > _MOST_CHARTS:
        missing.append(f"charts of {len(groups) - _MOST_CHARTS} more metrics")
    charts = []
    for group in sorted(groups, key=order)[:_MOST_CHARTS]:
        names, series = groups[group], []
        for title, facts in runs.items():
            for name in names:
                if points := facts.series.get(name):
                    words = [title, name] if len(names) > 1 else [title or name]
                    series.append(Series(" ".join(filter(None, words)), thinned(points)))
        charts.append(Chart(group if len(names) > 1 else names[0], series))
    return Section("Metrics", charts=charts)


def _scheduler_section(row: Row, facts: _Facts) -> Section:
    run, record = row.run, row.record
    moments = (
        ("queue", run.submit_time, record.start_time),
        ("start-up, until the first metric", record.start_time, facts.began),
        ("run", facts.began or record.start_time, facts.ended or record.end_time),
        ("exit, after the last metric", facts.ended, record.end_time),
    )
    spans = [(name, max(0.0, b - a)) for name, a, b in moments if a and b and b - a > -_CLOCK_S]
    bars = [Series(name, [(run.name, span)]) for name, span in spans]
    keys = "job state exit user cluster partition nodes elapsed cost".split()
    lines = [
        *((key, _shown(row.value(key), key)) for key in keys),
        ("attempts", "; ".join(map(str, record.attempts if record.attempts[1:] else ()))),
        ("account", run.account),
        ("on", _listed(record.nodes)),
        *((name, f"{span:.1f} s") for name, span in spans),
        ("not collected", _listed([skipped.path for skipped in run.not_here])),
    ]
    table = Table(("", ""), [line for line in lines if line[1] not in {"", "-"}])
    charts = [Chart("Time of the job", bars, x="", y="s", kind=Kind.BARS)] if bars else []
    return Section("Scheduler", charts=charts, tables=[table])


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _MOST_LINES} more" if len(words) > _MOST_LINES else ""
    return ", ".join(words[:_MOST_LINES]) + more


def _configuration_section(row: Row) -> Section:
    run = row.run
    extra_rows = (("arguments", " ".join(run.args)), ("tags", ", ".join(run.tags)), ("note", run.note or ""))
    options = [(key, _shown(value)) for key, value in row.config.items()]
    rows = [*options, *(extra for extra in extra_rows if extra[1])]
    return Section("Configuration", tables=[Table(("option", "value"), rows)])


def _environment_section(row: Row, missing: list[str]) -> Section:
    facts: Mapping[str, Any] = {}
    with suppress(CollectError):
        facts = environment_of(row)
    if not facts:
        missing.append(f"the environment: {ENVIRONMENT_FILE} does not exist or is damaged")
        return Section("Environment")
    rows = [(key, _shown(value)) for key, value in {**software_of(facts), **hardware_of(facts)}.items()]
    if git := mapping(facts, "client", "git"):
        rows.append(("git", f"{git.get('commit')}{' with uncommitted changes' if git.get('status') else ''}"))
    rows.append(("clusterctl", str(mapping(facts, "client").get("clusterctl") or "-")))
    return Section("Environment", tables=[Table(("", ""), [cells for cells in rows if cells[1] != "-"])])


def _missing(row: Row) -> Iterator[str]:
    if not row.run.final:
        yield "the rest of the run: it was collected before the job ended; run `clusterctl collect` again"
    if count := len(row.run.not_here):
        yield f"{count} files or folders that were not collected (`skipped` in run.json)"
    if row.record.state == JobState.PURGED:
        yield "the scheduler's record of the job: it no longer existed when the run was collected"


def _comparison_report(rows: Sequence[Row]) -> Report:
    """Return the report that compares runs. Its results and charts show only the best task of a sweep."""
    missing: list[str] = []
    first, shown = rows[0], {_title(row, rows): _best_task(row) for row in rows}
    table: dict[tuple[str, str], list[str]] = {}
    for column, other in enumerate(rows[1:], 1):
        try:
            differences = compare(first, other)
        except CollectError as exc:
            missing.append(f"the differences between {first.shown} and {other.shown}: {exc.cause}")
            continue
        # The results have a table of their own.
        for difference in (each for each in differences if each.section != "result"):
            values = table.setdefault((difference.section, difference.key), ["", *"=" * (len(rows) - 1)])
            values[0], values[column] = _shown(difference.a), _shown(difference.b)
    changes = []
    for section in dict.fromkeys(section for section, _ in table):
        lines = [(key, *values) for (row_section, key), values in table.items() if row_section == section]
        changes.append(Section(f"Differs: {section}", tables=[Table(("", *shown), lines)]))
    if len(rows) > _MOST_LINES:
        missing.append(f"lines of {len(rows) - _MOST_LINES} more runs in the charts")
    verdict = [f"{len(rows)} runs: {_describe_differences(table, missing)}"]
    if len(rows) == 2 and (losses := compare_losses(*rows)):  # noqa: PLR2004 - a pair
        verdict.append(f"losses: {losses}")
    verdict += [f"{row.shown}: {next(_outcome_lines(row))}" for row in rows[:_MOST_LINES]]
    best = list(shown.values())
    keys = [name for name in metric_names(best) if name in USUAL_METRICS][:_MORE_METRICS]
    results = Section("Results", tables=[_table("run", shown, [*keys, "state", "elapsed"])])
    charts = _metric_charts({title: _Facts.of(shown[title]) for title in list(shown)[:_MOST_LINES]}, missing)
    sections = _without_empty([results, *changes, charts])
    return Report(f"{len(rows)} runs compared", verdict, None, missing, sections)


def _title(row: Row, rows: Sequence[Row]) -> str:
    return row.shown if [other.shown for other in rows].count(row.shown) == 1 else str(row.folder)


def _best_task(row: Row) -> Row:
    """Return the best task of a sweep, or the run itself if it is not a sweep."""
    with suppress(UsageError):
        return ranked(row)[0][0]
    return row


def _describe_differences(differences: Mapping[tuple[str, str], object], missing: Sequence[str]) -> str:
    if differences:
        return f"they differ in {', '.join([key for _, key in differences][:12])}"
    if missing:
        return "the differences can't be read"
    return "job, code, configuration, data, environment and hardware are the same"


def _array_report(run: Row) -> Report:
    """Return the report of a sweep or another job array: ranked tasks, and a chart of each parameter."""
    missing, tasks, metric = list(_missing(run)), latest_tasks(run), ""
    if usual := next(metric_names(tasks), None):
        try:
            tasks, metric = ranked(run)
        except UsageError as exc:
            missing.append(f"the sweep's own ranking: {exc.what}")
            tasks, metric = ranked(run, usual)
    else:
        missing.append("metrics: no task wrote any")
    keys = (run.run.sweep or {}).get("keys") or []
    outcomes = [_has_completed(task) for task in tasks]
    ok = True if all(outcomes) else False if False in outcomes else None
    ended, *details = _outcome_lines(run)
    verdict = [ended, *(() if ok else details), f"{outcomes.count(True)} of {len(tasks)} tasks completed"]
    if metric and (best := tasks[0].value(metric)) is not None:
        values = "".join(f" {key}={_shown(tasks[0].value(key))}" for key in keys)
        verdict.insert(1, f"best: task {tasks[0].number},{values}: {metric} {_shown(best)}")
    for other in dict.fromkeys(task.run.job_id for task in tasks if task.run.token != run.run.token):
        numbers = sorted(task.number for task in tasks if task.run.job_id == other)
        verdict.append(f"tasks {_listed(numbers)} ran again in job {other}")
    if metric and len(tasks) > _MOST_LINES:
        missing.append(f"in the charts of metrics, all tasks but the best {_MOST_LINES}")
    facts = {task.number: _Facts.of(task) for task in tasks[:_MOST_LINES] if metric}
    other_metrics = [name for name in metric_names(tasks) if name in USUAL_METRICS and name != metric]
    columns = [*keys, *filter(None, [metric]), *other_metrics[:_MORE_METRICS], "state", "elapsed"]
    sections = [
        Section("Ranking", tables=[_table("task", {task.number: task for task in tasks}, columns)]),
        Section("Parameters", charts=[_parameter_chart(key, metric, tasks) for key in keys if metric]),
        _metric_charts(facts, missing, [metric, "loss", "train_loss"]),
        _scheduler_section(run, _Facts()),
        _configuration_section(run),
        _environment_section(run, missing),
    ]
    return Report(run.shown, verdict, ok, missing, _without_empty(sections))


def _table(head: str, rows: Mapping[str, Row], keys: Sequence[str]) -> Table:
    cells = [[title, *(_shown(row.value(key), key) for key in keys)] for title, row in rows.items()]
    return Table((head, *keys), cells)


def _parameter_chart(key: str, metric: str, tasks: Sequence[Row]) -> Chart:
    pairs = [(task.value(key), task.value(metric)) for task in tasks]
    plotted = [(x, y) for x, y in pairs if x is not None and isinstance(y, float)]
    if all(is_number(x) for x, _ in plotted):
        points: list[tuple[Any, float]] = sorted(plotted)
    else:
        points = sorted((str(x), y) for x, y in plotted)
    return Chart(f"{metric} by {key}", [Series(metric, points)], key, metric, Kind.POINTS)


def _shown(value: Value, key: str = "") -> str:
    if value is None or value == "":
        return "-"
    if key == "elapsed" and isinstance(value, int):
        return format_duration(value)
    return f"{value:.5g}" if isinstance(value, float) else str(value)
