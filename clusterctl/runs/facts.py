"""What is told of a run: sections of facts, from the files that `collect` wrote.

`runs show`, the line of `collect` and `submit --wait`, and reports choose sections, and page.py
renders them as text, HTML, Markdown or JSON. So each fact has one wording and one text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import CollectError, Notice
from clusterctl.runs.compare import compare, environment_of, hardware_of, mapping, software_of
from clusterctl.runs.curve import STEP
from clusterctl.runs.find import KINDS, Row, is_usual, key_of, metric_names, swept_keys
from clusterctl.runs.page import Chart, Kind, Section, Series, Table
from clusterctl.runs.resources import resources_of
from clusterctl.runs.series import config_of
from clusterctl.runs.time_use import TimeUse, total_time_use
from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.ends.diagnosis import Diagnosis, cause_column, notices_of
from clusterctl.scheduler.ends.ending import Ending, told_nodes
from clusterctl.spec.metrics import Goal, goal_of
from clusterctl.spec.names import first_few
from clusterctl.state.run_record import Metric, Value
from clusterctl.util import formatting
from clusterctl.util.formatting import Fact
from clusterctl.util.numbers import counted

MOST_NAMED: Final = 16
MOST_METRICS: Final = 3
OPTION_HEAD: Final = ("option", "value")
# The report and the table of a scaling have the medians of these metrics.
SPEEDS: Final = ("samples_per_s", "tokens_per_s")


def facts_of(row: Row, *parts: Callable[[Row], Section]) -> list[Section]:
    """Return sections of a run or an array's task, without those that are empty. parts: functions
    of this module.
    """
    return [section for part in parts if (section := part(row)).has_content]


def ending_of(row: Row) -> Ending:
    """Return how a run, or a task of an array, ended."""
    run = row.run
    record = row.record
    tasks = row.task_records
    # The task by which the state was chosen, too.
    told = next((task for task in tasks if task.state == record.state), None)
    job_id = str(row.value("job"))
    diagnosis = Diagnosis.read((row.task or run).diagnosis)
    return Ending(
        job_id=job_id,
        name=run.name,
        user=run.user,
        partition=run.partition,
        account=run.account,
        state=record.state,
        states=Counter(task.state for task in tasks),
        when="" if run.final else "when it was collected",
        reason=told.reason if told else "",
        exit_code=told.exit_code if told else None,
        signal=told.signal if told else None,
        nodes=told_nodes(tasks),
        submit_time=run.submit_time,
        start_time=record.start_time,
        end_time=record.end_time,
        elapsed_s=record.elapsed_s,
        node_hours=record.node_hours,
        cost_usd=run.cost_usd if row.task is None else None,
        attempts=record.attempts,
        diagnosis=diagnosis,
        logs=f"{run.cluster}/{diagnosis.job_id if diagnosis else job_id}",
    )


def line_of(row: Row, folder: Path) -> str:
    """Return a run in a line. folder: its folder, as the line shows it."""
    advice = "".join(f"; {text}" for text in [resources_of(row).advice] if text)
    return f"{ending_of(row).line}: {folder}{advice}"


def job_facts(row: Row) -> Section:
    run = row.run
    keys = "cluster gpu_energy collected".split()
    listed = [
        Fact("run", row.shown),
        *ending_of(row).facts,
        *(Fact(label_of(key), row.value(key), KINDS.get(key, "")) for key in keys),
        Fact("not collected", first_few([skipped.path for skipped in run.not_here], MOST_NAMED)),
        Fact("left out", "; ".join(row.record.left_out)),
    ]
    if row.task is None:
        listed += [Fact("files", run.files), Fact("size", run.bytes, "size")]
    return Section("Job", facts=[fact for fact in listed if fact.is_known])


def label_of(key: str) -> str:
    return key.replace("_", " ").replace("gpu", "GPU")


def time_facts(row: Row) -> Section:
    """Return how a run or task used its time; of an array all tasks together."""
    uses = total_time_use([row])
    total = sum(uses.values())
    if not total:
        return Section("Time")
    unit, size = formatting.fitting_unit("s", [total])
    bars = [Series(use, [(row.run.name, seconds / size)]) for use, seconds in uses.items()]
    rows = [
        (use, formatting.duration(seconds), formatting.percent(100 * seconds / total))
        for use, seconds in uses.items()
    ]
    rows.append(("all", formatting.duration(total), formatting.percent(100)))
    head = ("use", "time of all tasks" if row.tasks else "time", "share")
    is_divided = uses.keys() & {TimeUse.DATA, TimeUse.CHECKPOINT, TimeUse.EVALUATION}
    text = (
        "the program recorded no time of its data, checkpoints and evaluations, which is within "
        "useful"
    )
    return Section(
        "Time",
        [text] if TimeUse.USEFUL in uses and not is_divided else (),
        [Chart("Time of the job", bars, x="", y=unit, kind=Kind.BARS)],
        [Table(head, rows)],
    )


def resource_facts(row: Row) -> Section:
    resources = resources_of(row)
    rows = [
        (each.resource, each.asked, each.used, formatting.percent(each.share))
        for each in resources.amounts
    ]
    table = Table(("resource", "asked for", "used", "share"), rows)
    return Section("Asked for and used", resources.lines, tables=[table])


def configuration(row: Row) -> Section:
    """Return tables of the options that the user gave and, folded, of those with their defaults."""
    run = row.run
    parsed, words = config_of(run.args)
    # The table has the options, except those of a sweep.
    arguments = run.args if words or not parsed.keys() <= row.config.keys() else ()
    more = {"arguments": " ".join(arguments), "tags": ", ".join(run.tags), "note": run.note or ""}
    options = {
        key: formatting.given(value) for key, value in row.config.items() if value is not None
    }
    own = row.given_options
    rows = [
        *((key, text) for key, text in options.items() if key in own),
        *((key, text) for key, text in more.items() if text),
    ]
    defaults = [(key, text) for key, text in options.items() if key not in own]
    tables = [Table(OPTION_HEAD, rows), defaults_table(OPTION_HEAD, defaults)]
    return Section("Configuration", tables=[table for table in tables if table.rows])


def defaults_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    title = f"{counted(len(rows), 'option')} with the default value"
    return Table(head, rows, title, folded=True)


def environment(row: Row) -> Section:
    facts: Mapping[str, Any] = {}
    with suppress(CollectError):
        facts = environment_of(row)
    values = {**software_of(facts), **hardware_of(facts)}
    if git := mapping(facts, "client", "git"):
        changed = " with uncommitted changes" if git.get("status") else ""
        values["git"] = f"{git.get('commit')}{changed}"
    values["clusterctl"] = mapping(facts, "client").get("clusterctl")
    listed = [Fact(key, value) for key, value in values.items()]
    return Section("Environment", facts=[fact for fact in listed if fact.is_known])


def metric_values(row: Row) -> Section:
    """Return the last, lowest and highest value of each metric, and which were no numbers."""

    def cells(name: str, metric: Metric) -> Sequence[str]:
        axis = "" if metric.axis == STEP else f"{metric.axis} "

        def at(value: Value, place: float | None) -> str:
            is_placed = value is not None and place is not None
            return formatting.metric(value, name) + f" at {axis}{place}" * is_placed

        last = row.nonfinite(f"metric.{name}") or metric.last
        return (
            name,
            at(last, metric.last_step),
            at(metric.min, metric.min_step),
            at(metric.max, metric.max_step),
        )

    rows = [cells(name, metric) for name, metric in row.metrics.items()]
    table = Table(("metric", "last", "lowest", "highest"), rows)
    return Section("Values", [*metric_lines(row)], tables=[table] if rows else ())


def metric_lines(row: Row) -> Iterator[str]:
    """Yield how the first metrics changed, and which metrics were no numbers."""
    changed = [
        name
        for name in metric_names([row])
        if name not in SPEEDS and row.metrics[name].min != row.metrics[name].max
    ]
    for name in changed[:2]:
        metric = row.metrics[name]
        if metric.count <= 1 or metric.last is None or metric.first is None:
            continue
        ends = formatting.metric(metric.first, name), formatting.metric(metric.last, name)
        low, high = formatting.metric(metric.min, name), formatting.metric(metric.max, name)
        spread = f", between {low} and {high}"
        if (goal := goal_of(name)) is not None:
            is_highest = goal is Goal.MAX
            best = metric.max if is_highest else metric.min
            spread = f", at best {high if is_highest else low}" if best != metric.last else ""
        elif {metric.min, metric.max} == {metric.first, metric.last}:
            spread = ""
        count = counted(metric.count, "value")
        yield f"{name} went from {ends[0]} to {ends[1]}{spread}, in {count}"
    for name, metric in row.metrics.items():
        if metric.nonfinite:
            place = metric.nonfinite_step
            first_at = "" if place is None else f", first at {metric.axis} {place}"
            counts = f"{metric.nonfinite:,} of {metric.count:,} values"
            yield f"{name} was NaN or infinite in {counts}{first_at}"


def task_table(row: Row) -> Section:
    keys = [*swept_keys(row), "state", "exit", "elapsed", *usual_metrics(row.tasks)]
    tasks = {str(task.value("job")): task for task in row.tasks}
    if not tasks:
        return Section("Tasks")
    return Section("Tasks", tables=[with_causes(table_of("job", tasks, keys), row.tasks)])


def with_causes(table: Table, rows: Sequence[Row]) -> Table:
    """Return a table of tasks, with the column of the causes of those that failed, if there are any."""
    told = {id(row): found for row in rows if (found := Diagnosis.read(row.record.diagnosis))}
    causes = cause_column(told.values())
    if not causes:
        return table
    job_ids = [told[id(row)].job_id if id(row) in told else "" for row in rows]
    column = [causes.get(job_id, formatting.NONE) for job_id in job_ids]
    cells = [[*cells, cause] for cells, cause in zip(table.rows, column, strict=True)]
    return replace(table, head=(*table.head, "cause"), rows=cells)


def usual_metrics(rows: Sequence[Row], most: int = MOST_METRICS) -> list[str]:
    """Return the keys of the first usual metrics."""
    return [key_of(name, rows) for name in metric_names(rows) if is_usual(name)][:most]


def table_of(head: str, rows: Mapping[str, Row], keys: Sequence[str]) -> Table:
    """Return a table with these values of some runs. head: the title of the column with the runs'
    titles.
    """
    cells = [[title, *(row.text(key) for key in keys)] for title, row in rows.items()]
    return Table((head, *keys), cells)


def log_lines(row: Row) -> Section:
    ending = ending_of(row)
    cause = ending.cause
    log = ending.log
    # The cause often quotes the last line.
    is_told = bool(cause) and len(log) == 1 and (cause in log[0] or log[0].strip() in cause)
    return Section("From the log", log=() if is_told else log)


def outcome(row: Row) -> Section:
    """Return how the run ended: state, duration, nodes; for a failure also cause and remedy; and what
    may be wrong with tasks that completed.
    """
    return Section("Outcome", [*ending_of(row).verdict, *notes_of(row)])


def notes_of(row: Row) -> list[Notice]:
    """Return a note on each thing that may be wrong with a job, or with tasks, that completed."""
    tasks = [*row.task_records, *(() if row.task else row.run.packed)]
    told = (Diagnosis.read(task.diagnosis) for task in tasks)
    return notices_of(filter(None, told))


def missing_of(row: Row) -> Iterator[str]:
    """Yield what a run does not have."""
    if not row.run.final:
        yield (
            "the rest of the run: it was collected before the job ended; run `clusterctl "
            "collect` again"
        )
    if count := len(row.run.not_here):
        plural = "s or folders that were" if count > 1 else " or folder that was"
        yield f"{count} file{plural} not collected (`skipped` in run.json)"
    if row.record.state == JobState.PURGED:
        yield "the scheduler's record of the job: it no longer existed when the run was collected"


def difference_sections(
    rows: Mapping[str, Row], missing: list[str], *, with_results: bool = False
) -> Iterator[Section]:
    """Yield a section for each kind of differences between the first run and the rest.

    rows: title of a run -> run. missing: gets messages about unreadable runs.
    with_results: whether results are compared, too.
    """
    first, *others = rows
    cells: dict[tuple[str, str], dict[str, str]] = {}
    titles = [first]
    for title in others:
        try:
            differences = compare(rows[first], rows[title])
        except CollectError as exc:
            missing.append(f"the differences between {first} and {title}: {exc.cause}")
            continue
        titles.append(title)
        for each in differences:
            if with_results or each.section != "result":
                own, other = each.texts
                cells.setdefault((each.section, each.key), {first: own})[title] = other
    given = {key for row in rows.values() for key in row.given_options}
    for section in dict.fromkeys(section for section, _ in cells):
        lines = {
            key: (key, *(values.get(title, values[first]) for title in titles))
            for (row_section, key), values in cells.items()
            if row_section == section
        }
        # Fold options that have their default and that a program lacks.
        folded = [
            line
            for key, line in lines.items()
            if section == "configuration" and key not in given and formatting.NONE in line
        ]
        head = (section, *titles)
        tables = [
            Table(head, [line for line in lines.values() if line not in folded]),
            defaults_table(head, folded),
        ]
        yield Section(f"Differs: {section}", tables=[table for table in tables if table.rows])
