"""The report of a run, of several in comparison, or of a sweep, from their folders alone.

Charts come from what the program wrote over time (series.py) and from the telemetry of the nodes; the rest
from run.json and environment.json. All of it may be damaged, cut short or hostile: what can't be read is
named as missing.
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
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import CollectError, UsageError
from clusterctl.runs.compare import (
    compare,
    compare_losses,
    facts_of,
    hardware_of,
    mapping,
    software_of,
)
from clusterctl.runs.find import USUAL_METRICS, Row, latest_tasks, metric_names, ranked
from clusterctl.runs.folder import files_of
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
from clusterctl.runs.series import Record, finite, is_number, records
from clusterctl.runs.telemetry import compare_ranks, node_charts
from clusterctl.scheduler.base import JobState, Outcome
from clusterctl.spec.sweep import Goal, goal_of
from clusterctl.spec.units import format_duration
from clusterctl.state.ledger import RunRecord, Value, node_hours
from clusterctl.state.submissions import ENVIRONMENT_FILE, RUN_FILE

_MOST_CHARTS: Final = 16  # of metrics
_MOST_LINES: Final = 16  # in a chart of several runs
_MOST_POINTS: Final = 50_000  # of a metric
_MORE_METRICS: Final = 4  # in a ranking
_CLOCK_S: Final = 2.0  # by which clocks, and Slurm's whole seconds, may differ
_SPLIT: Final = re.compile(r"^(?:train(?:ing)?|val(?:id(?:ation)?)?|eval(?:uation)?|test|dev)[/_.]")
# Of the bundled train: told in words, or in charts of their own.
_OWN_CHARTS: Final = frozenset(
    "seconds data_ms comm_total_ms comm_exposed_ms skipped eval_windows stall_s write_s bytes".split()
)
_PARTS: Final = ("compute", "exposed communication", "data")  # of a step's time


@dataclass
class _Facts:
    """What the program of a run, or of a task, wrote over time."""

    series: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    steps: list[tuple[float, Sequence[float]]] = field(default_factory=list)  # milliseconds of _PARTS
    stalls: dict[int, float] = field(default_factory=dict)  # step -> milliseconds for a checkpoint
    hosts: dict[int, str] = field(default_factory=dict)  # of the ranks
    compute: list[tuple[Sequence[float], Sequence[float], int]] = field(default_factory=list)
    began: float | None = None
    ended: float | None = None
    pipelined: bool = False
    is_ours: bool = False  # whether the bundled `train` wrote it

    @classmethod
    def of(cls, row: Row) -> _Facts:
        facts = cls()
        for number, record in enumerate(records(row.folder)):
            facts._add(number, record)
        start, end = row.record.start_time or 0, row.record.end_time or math.inf
        for moment in (facts.began, facts.ended):
            if moment is not None and not start - _CLOCK_S <= moment <= end + _CLOCK_S:
                facts.began = facts.ended = None  # another clock, such as the seconds since its start
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
                ranks = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
                self.hosts = {place: str(one.get("host", "")) for place, one in enumerate(ranks)}
                self.pipelined = mapping(line, "config").get("pp", 1) != 1
            case "iteration":
                numbers = _finite(line.get(key) for key in ("seconds", "comm_exposed_ms", "data_ms"))
                if len(numbers) == len(_PARTS):
                    seconds, exposed, data = numbers
                    _append(self.steps, (x, (max(0.0, 1e3 * seconds - exposed - data), exposed, data)))
            case "checkpoint":
                self.stalls |= {int(x): 1e3 * one for one in _finite([line.get("stall_s")])}
            case "evaluation":
                means, slowest, windows = (line.get(key) for key in ("compute_ms", "slowest", "windows"))
                if isinstance(means, list) and isinstance(slowest, list) and isinstance(windows, int):
                    whole = len(means) == len(_finite(means)) == len(_finite(slowest)) == len(slowest)
                    if whole and 0 < windows < _MOST_POINTS:
                        self.compute.append((means, slowest, windows))


def _finite(values: Iterable[Any]) -> list[float]:
    """The values that are finite numbers."""
    return [one for one in map(finite, values) if one is not None]


def _append(found: list[Any], one: Any) -> None:
    """Add to a list, of which every second entry goes once it is very long."""
    found.append(one)
    if len(found) > _MOST_POINTS:
        del found[1::2]


def report_of(rows: Sequence[Row]) -> Report:
    """The report of one run, or of several in comparison; of an array, that of its tasks.

    Raises:
        UsageError: the tasks of a sweep have no metric that ranks them.
    """
    if len(rows) > 1:
        return _of_several(rows)
    return _of_array(rows[0]) if rows[0].tasks else _of_one(rows[0])


def write_beside(run: RunRecord) -> None:
    """Write the report into the folder of a run that has come home, unless it has one that is as new.

    A report that can't be made is no reason for `collect` or `down` to stop; `clusterctl report` says why.
    """
    with suppress(Exception):
        path = report_path(Row(run))
        if not path.exists() or path.stat().st_mtime_ns < (run.directory / RUN_FILE).stat().st_mtime_ns:
            write_report(report_of([Row(run)]), path)


def report_path(row: Row) -> Path:
    """Where the report of a run, or of a task, is written.

    Raises:
        UsageError: the job wrote a file of this name.
    """
    path = row.folder / REPORT_FILE
    name = os.fsencode(path.relative_to(row.run.directory))
    if os.path.lexists(path) and name in files_of(row.run.directory):
        raise UsageError(
            f"the job wrote a {REPORT_FILE} of its own",
            code="file-of-the-job",
            where=str(path),
            fix="name another file: --out FILE",
        )
    return path


def _of_one(row: Row) -> Report:
    facts, missing = _Facts.of(row), list(_missing(row))
    software = _software(row, missing)
    nodes, unknown = node_charts(row.folder, row.record.nodes)
    missing += unknown
    if not facts.series:
        missing.append("metrics: the program wrote no metrics.jsonl, TensorBoard file or metrics.csv")
    ranks = _ranks(facts)
    speed = list(_speed(facts))
    sections = [
        _metrics({"": facts}, missing),
        Section("Time of a step", speed, list(_step_charts(facts))),
        ranks,
        Section("Nodes", charts=nodes),
        _scheduler(row, facts),
        _asked(row),
        software,
    ]
    verdict = [*_ended(row), *_learned(row, facts), *speed, *ranks.lines]
    return Report(row.shown, verdict, _is_ok(row), missing, _filled(sections))


def _filled(sections: Iterable[Section]) -> list[Section]:
    return [one for one in sections if one.lines or one.charts or any(table.rows for table in one.tables)]


def _is_ok(row: Row) -> bool | None:
    """True where it completed, False where it failed, None where it was cancelled or goes on."""
    with suppress(ValueError):
        outcome = JobState(row.record.state).outcome
        return {Outcome.COMPLETED: True, Outcome.FAILED: False}.get(outcome)
    return None


def _ended(row: Row) -> Iterator[str]:
    """How it ended, after how long, where and at what cost; of a failure the cause and what to do."""
    record, elapsed = row.record, _shown(row.value("elapsed"), "elapsed")
    where = f" on {len(record.nodes)} node{'s' if len(record.nodes) > 1 else ''}" if record.nodes else ""
    after = f" after {elapsed}" if elapsed != "-" else ""
    hours = node_hours([row.task] if row.task else row.run.tasks)
    cost = f": {hours:.3g} node hours" if hours else ""
    if row.run.cost_usd is not None and row.task is None:
        cost += f", about {row.run.cost_usd:.2f} USD"
    state = record.state if row.run.final else f"{record.state} when it was collected"
    yield f"{state}{after}{where}{cost}"
    said = row.run.diagnosis or {}
    if said.get("cause") and (row.task is None or said.get("job_id") in {None, row.task.id}):
        yield f"{said['cause']}; fix: {said.get('fix', '')}"
        lines = said.get("lines")
        yield from (f"| {one}" for one in lines) if isinstance(lines, list) else ()


def _learned(row: Row, facts: _Facts) -> Iterator[str]:
    """How the main metrics changed."""
    for name in list(metric_names([row]))[:2]:
        metric, points = row.metrics[name], facts.series.get(name, ())
        if metric.last is None or len(points) <= 1:
            continue
        between = (
            f", between {_shown(metric.min)} and {_shown(metric.max)}" if metric.min != metric.max else ""
        )
        if name in USUAL_METRICS:
            best = metric.max if goal_of(name) == Goal.MAX else metric.min
            between = f", at best {_shown(best)}" if best != metric.last else ""
        values = f"{_shown(points[0][1])} to {_shown(metric.last)}{between}"
        yield f"{name} went from {values}, in {metric.count} values"
    for name, metric in row.metrics.items():
        if metric.nonfinite:
            yield f"{name} was NaN or infinite in {metric.nonfinite} of {metric.count} values"


def _speed(facts: _Facts) -> Iterator[str]:
    """How fast it was, and what a step's time was spent on."""
    for name in ("samples_per_s", "tokens_per_s"):
        if values := _finite(y for _, y in facts.series.get(name, ())):
            what = name.removesuffix("_per_s")
            yield f"{_shown(statistics.median(values))} {what} per second at the median"
    if facts.steps:
        sums = {name: sum(parts[at] for _, parts in facts.steps) for at, name in enumerate(_PARTS)}
        sums |= {"checkpoints": sum(facts.stalls.values())} if facts.stalls else {}
        whole = sum(sums.values())
        if 0 < whole < math.inf:
            shares = ", ".join(f"{100 * value / whole:.0f} % {name}" for name, value in sums.items())
            yield f"{_shown(whole / len(facts.steps))} ms per step: {shares}"


def _step_charts(facts: _Facts) -> Iterator[Chart]:
    if facts.steps:
        size = math.ceil(len(facts.steps) / 100)
        stretches = [facts.steps[at : at + size] for at in range(0, len(facts.steps), size)]
        areas = [
            Series(name, [(some[-1][0], sum(one[at] for _, one in some) / len(some)) for some in stretches])
            for at, name in enumerate(_PARTS)
        ]
        yield Chart("Time of a step", areas, y="ms", kind=Kind.AREAS)
    if facts.stalls:
        stalls = [(str(step), stall) for step, stall in sorted(facts.stalls.items())[-100:]]
        yield Chart("Checkpoints", [Series("wait of rank 0", stalls)], y="ms", kind=Kind.BARS)


def _ranks(facts: _Facts) -> Section:
    """How long each rank computed per step, and the node that kept the others waiting."""
    count = len(facts.compute[0][0]) if facts.compute else 0
    known = [one for one in facts.compute if len(one[0]) == count]
    windows = sum(one[2] for one in known)
    if count <= 1:  # there is none to wait for it
        return Section("Ranks")
    means = [sum(one[0][rank] * one[2] for one in known) / windows for rank in range(count)]
    slowest = [sum(one[1][rank] for one in known) for rank in range(count)]
    hosts = [facts.hosts.get(rank) or "" for rank in range(count)]
    pipelined = "stages of a pipeline are not compared"
    text = pipelined if facts.pipelined else compare_ranks(means, slowest, windows, hosts)
    bars = [(f"{rank} {hosts[rank]}".strip(), mean) for rank, mean in enumerate(means)]
    chart = Chart("Computing per step", [Series("compute", bars)], "rank", "ms", Kind.BARS)
    return Section("Ranks", [text], [chart])


def _metrics(runs: Mapping[str, _Facts], missing: list[str], only: Sequence[str] = ()) -> Section:
    """A chart for each metric, with those of training and evaluation in one; of several runs a line each."""
    groups: dict[str, list[str]] = defaultdict(list)
    ours = any(facts.is_ours for facts in runs.values())
    for name in dict.fromkeys(name for facts in runs.values() for name in facts.series):
        if not (name in _OWN_CHARTS and ours) and (not only or name in only):
            groups[_SPLIT.sub("", name)].append(name)

    def order(group: str) -> tuple[bool, int, str]:
        """What never changed comes last; else losses and accuracies come first."""
        found = (facts.series.get(name, ()) for name in groups[group] for facts in runs.values())
        words = ("loss", "acc", "perplexity", "bits", "samples_per_s", "tokens_per_s")
        place = next((place for place, one in enumerate(words) if one in group), len(words))
        return len({y for points in found for _, y in points}) == 1, place, group

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


def _scheduler(row: Row, facts: _Facts) -> Section:
    """How long the job waited, started, ran and ended, and what the scheduler knows of it."""
    run, record = row.run, row.record
    moments = (
        ("queue", run.submit_time, record.start_time),
        ("start-up, until the first metric", record.start_time, facts.began),
        ("run", facts.began or record.start_time, facts.ended or record.end_time),
        ("exit, after the last metric", facts.ended, record.end_time),
    )
    known = ((name, end - start) for name, start, end in moments if start and end)
    spans = [(name, max(0.0, span)) for name, span in known if span > -_CLOCK_S]
    bars = [Series(name, [(run.name, span)]) for name, span in spans]
    keys = "job state exit user cluster partition nodes elapsed cost".split()
    lines = [
        *((key, _shown(row.value(key), key)) for key in keys),
        ("account", run.account),
        ("on", _listed(record.nodes)),
        *((name, f"{span:.1f} s") for name, span in spans),
        ("left on the cluster", _listed([one.path for one in run.skipped])),
    ]
    table = Table(("", ""), [line for line in lines if line[1] not in {"", "-"}])
    charts = [Chart("Time of the job", bars, x="", y="s", kind=Kind.BARS)] if bars else []
    return Section("Scheduler", charts=charts, tables=[table])


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _MOST_LINES} more" if len(words) > _MOST_LINES else ""
    return ", ".join(words[:_MOST_LINES]) + more


def _asked(row: Row) -> Section:
    """What the run was asked for."""
    run = row.run
    more = (("arguments", " ".join(run.args)), ("tags", ", ".join(run.tags)), ("note", run.note or ""))
    rows = [*((key, _shown(value)) for key, value in row.config.items()), *(one for one in more if one[1])]
    return Section("Configuration", tables=[Table(("option", "value"), rows)])


def _software(row: Row, missing: list[str]) -> Section:
    """Versions, hardware and code; adds to what is ``missing``."""
    found: Mapping[str, Any] = {}
    with suppress(CollectError):
        found = facts_of(row)
    if not found:
        missing.append(f"the environment: {ENVIRONMENT_FILE} is not there, or is damaged")
        return Section("Environment")
    rows = [(key, _shown(value)) for key, value in {**software_of(found), **hardware_of(found)}.items()]
    if git := mapping(found, "client", "git"):
        rows.append(("git", f"{git.get('commit')}{' with uncommitted changes' if git.get('status') else ''}"))
    rows.append(("clusterctl", str(mapping(found, "client").get("clusterctl") or "-")))
    return Section("Environment", tables=[Table(("", ""), [one for one in rows if one[1] != "-"])])


def _missing(row: Row) -> Iterator[str]:
    if not row.run.final:
        yield "the rest of the run: it was collected while the job went on; collect again"
    if row.run.skipped:
        yield f"{len(row.run.skipped)} files or folders that were left on the cluster (`skipped` in run.json)"
    if row.record.state == JobState.PURGED:
        yield "the scheduler's record of the job, which was gone when it was collected"


def _of_several(rows: Sequence[Row]) -> Report:
    """Runs in comparison: first what differs. Of a sweep, its best task is shown."""
    missing: list[str] = []
    first, shown = rows[0], {_title(row, rows): _best(row) for row in rows}
    found: dict[tuple[str, str], list[str]] = {}
    for place, other in enumerate(rows[1:], 1):
        try:
            differences = compare(first, other)
        except CollectError as exc:
            missing.append(f"what differs between {first.shown} and {other.shown}: {exc.cause}")
            continue
        for one in (one for one in differences if one.section != "result"):  # which has its own table
            values = found.setdefault((one.section, one.key), ["", *["="] * (len(rows) - 1)])
            values[0], values[place] = _shown(one.a), _shown(one.b)
    differs = []
    for section in dict.fromkeys(section for section, _ in found):
        lines = [(key, *values) for (at, key), values in found.items() if at == section]
        differs.append(Section(f"Differs: {section}", tables=[Table(("", *shown), lines)]))
    if len(rows) > _MOST_LINES:
        missing.append(f"lines of {len(rows) - _MOST_LINES} more runs in the charts")
    verdict = [f"{len(rows)} runs: {_differing(found, missing)}"]
    if len(rows) == 2 and (losses := compare_losses(*rows)):  # noqa: PLR2004 - a pair
        verdict.append(f"losses: {losses}")
    verdict += [f"{row.shown}: {next(_ended(row))}" for row in rows[:_MOST_LINES]]
    best = list(shown.values())
    keys = [name for name in metric_names(best) if name in USUAL_METRICS][:_MORE_METRICS]
    results = Section("Results", tables=[_table("run", shown, [*keys, "state", "elapsed"])])
    charts = _metrics({title: _Facts.of(shown[title]) for title in list(shown)[:_MOST_LINES]}, missing)
    return Report(f"{len(rows)} runs compared", verdict, None, missing, _filled([results, *differs, charts]))


def _title(row: Row, rows: Sequence[Row]) -> str:
    """The run's name; its whole path where another has the same."""
    return row.shown if [one.shown for one in rows].count(row.shown) == 1 else str(row.folder)


def _best(row: Row) -> Row:
    """The best task of a sweep; another run itself."""
    with suppress(UsageError):
        return ranked(row)[0][0]
    return row


def _differing(found: Mapping[tuple[str, str], object], missing: Sequence[str]) -> str:
    if found:
        return f"they differ in {', '.join([key for _, key in found][:12])}"
    if missing:
        return "what differs can't be read"
    return "job, code, configuration, data, environment and hardware are the same"


def _of_array(run: Row) -> Report:
    """A sweep, or another array: its ranking, and each parameter against the metric."""
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
    outcomes = [_is_ok(task) for task in tasks]
    ok = True if all(outcomes) else False if False in outcomes else None
    ended, *why = _ended(run)
    verdict = [ended, *(() if ok else why), f"{outcomes.count(True)} of {len(tasks)} tasks completed"]
    if metric and (best := tasks[0].value(metric)) is not None:
        values = "".join(f" {key}={_shown(tasks[0].value(key))}" for key in keys)
        verdict.insert(1, f"best: task {tasks[0].number},{values}: {metric} {_shown(best)}")
    for other in dict.fromkeys(task.run.job_id for task in tasks if task.run.token != run.run.token):
        again = sorted(task.number for task in tasks if task.run.job_id == other)
        verdict.append(f"tasks {_listed(again)} ran again in job {other}")
    if metric and len(tasks) > _MOST_LINES:
        missing.append(f"in the charts of metrics, the tasks but for the best {_MOST_LINES}")
    facts = {task.number: _Facts.of(task) for task in tasks[:_MOST_LINES] if metric}
    others = [name for name in metric_names(tasks) if name in USUAL_METRICS and name != metric]
    columns = [*keys, *filter(None, [metric]), *others[:_MORE_METRICS], "state", "elapsed"]
    sections = [
        Section("Ranking", tables=[_table("task", {task.number: task for task in tasks}, columns)]),
        Section("Parameters", charts=[_against(key, metric, tasks) for key in keys if metric]),
        _metrics(facts, missing, [metric, "loss", "train_loss"]),
        _scheduler(run, _Facts()),
        _asked(run),
        _software(run, missing),
    ]
    return Report(run.shown, verdict, ok, missing, _filled(sections))


def _table(head: str, rows: Mapping[str, Row], keys: Sequence[str]) -> Table:
    cells = [[title, *(_shown(row.value(key), key) for key in keys)] for title, row in rows.items()]
    return Table((head, *keys), cells)


def _against(key: str, metric: str, tasks: Sequence[Row]) -> Chart:
    """A parameter of a sweep against its metric, a point for each task."""
    pairs = [(task.value(key), task.value(metric)) for task in tasks]
    known = [(x, y) for x, y in pairs if x is not None and isinstance(y, float)]
    if all(is_number(x) for x, _ in known):
        points: list[tuple[Any, float]] = sorted(known)
    else:
        points = sorted((str(x), y) for x, y in known)
    return Chart(f"{metric} by {key}", [Series(metric, points)], key, metric, Kind.POINTS)


def _shown(value: Value, key: str = "") -> str:
    if value is None or value == "":
        return "-"
    if key == "elapsed" and isinstance(value, int):
        return format_duration(value)
    return f"{value:.5g}" if isinstance(value, float) else str(value)
