"""Comparison of two collected runs: job, code, configuration, data, environment, hardware, result,
losses.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

from clusterctl.errors import CollectError
from clusterctl.runs.curve import ROW, STEP
from clusterctl.runs.find import FIELDS, Row, as_text, is_usual
from clusterctl.runs.metric_files import MetricFiles
from clusterctl.runs.series import config_of, flat
from clusterctl.runs.table import stored
from clusterctl.spec.job_options import options_with
from clusterctl.spec.metrics import is_loss
from clusterctl.state.ledger import ENVIRONMENT_FILE, SOURCE_FILE
from clusterctl.state.run_record import Value
from clusterctl.transport.remote_open import read_json
from clusterctl.util import formatting
from clusterctl.util.numbers import counted

# Fields of a submission that don't affect the computation, or that other sections compare in full.
_NOT_THE_JOB: Final = frozenset(options_with(compared=False))
_RESULT: Final = ("state", "exit", "elapsed", "cost")
_PINNED: Final = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", re.MULTILINE)
_MAX_BYTES: Final = 64 << 20
_MAX_FILES: Final = 50
# Two image names may differ only at the end, so long texts are compared in full.
_LONGEST: Final = 1 << 16  # characters
# Of a run. Each takes 100 bytes of memory, twice.
_MAX_LOSSES: Final = 1 << 21
_MOST_MIB: Final = 1 << 40  # of a node


@dataclass(frozen=True, slots=True)
class RunDifference:
    """A value that differs between two runs: ``a`` in the first run, ``b`` in the second; None if
    missing.

    ``section`` is job, code, configuration, data, environment, hardware or result.
    """

    section: str
    key: str
    a: Value
    b: Value

    @property
    def texts(self) -> tuple[str, str]:
        """Both values as text: a result rounded, unless that hides the difference."""
        rounded = as_text(self.a, self.key), as_text(self.b, self.key)
        is_told = self.section == "result" and rounded[0] != rounded[1]
        return rounded if is_told else (formatting.given(self.a), formatting.given(self.b))


@dataclass(frozen=True, slots=True)
class Losses:
    """The comparison of two runs' losses. steps: the number of steps that both runs have.

    a, b: the number of steps of the first and the second run. first: the first step with different
        losses.
    largest: the largest difference; None if a differing loss is NaN or infinite, or if all losses
        are equal.
    axis: what a step is: ``step``, ``epoch``, or ``row`` if the program wrote neither.
    complete: whether all losses were compared. Of very many, only the first are.
    """

    identical: bool
    steps: int
    a: int
    b: int
    first: float | None = None
    largest: float | None = None
    axis: str = STEP
    complete: bool = True

    def __str__(self) -> str:
        steps = counted(self.steps, self.axis)
        totals = "" if self.a == self.b == self.steps else f" of {self.a:,} and {self.b:,}"
        limit = (
            ""
            if self.complete
            else f"; only the first {_MAX_LOSSES:,} losses of each run were compared"
        )
        if self.identical:
            return f"identical over {steps}{totals}{limit}"
        gap = "is not finite" if self.largest is None else f"is {formatting.number(self.largest)}"
        text = (
            f"different from {self.axis} {self.first} on, of {steps}{totals}: the largest "
            f"difference {gap}"
        )
        return text + limit


def compare_losses(a: Row, b: Row) -> Losses | None:
    """Compare two runs' metrics with ``loss`` in their names. Return None if no step is in both
    runs.
    """
    losses_a, complete_a = _losses(a)
    losses_b, complete_b = _losses(b)
    wrong: list[tuple[float, str]] = []
    largest = 0.0  # infinite after a difference that is not finite
    common: dict[tuple[str, str], set[float]] = defaultdict(set)
    for (task, name, axis), own in losses_a.items():
        other = losses_b.get((task, name, axis), {})
        places = own.keys() & other.keys()
        common[task, axis] |= places
        pairs = ((place, own[place], other[place]) for place in places)
        differ = [
            (place, abs(x - y))
            for place, x, y in pairs
            if x != y and not (math.isnan(x) and math.isnan(y))
        ]
        if differ:
            wrong.append((min(place for place, _ in differ), axis))
            gaps = [gap for _, gap in differ]
            largest = max(largest, *gaps) if all(map(math.isfinite, gaps)) else math.inf
    if not any(common.values()):
        return None
    first, axis = min(
        wrong, default=(None, next(axis for (_, axis), places in common.items() if places))
    )
    return Losses(
        not wrong,
        sum(map(len, common.values())),
        _count_steps(losses_a),
        _count_steps(losses_b),
        first=first,
        largest=largest if wrong and math.isfinite(largest) else None,
        axis=axis,
        complete=complete_a and complete_b,
    )


# (array task, metric, axis) -> step -> loss
_LossesOfRun: TypeAlias = dict[tuple[str, str, str], dict[float, float]]


def _count_steps(losses: _LossesOfRun) -> int:
    steps: dict[tuple[str, str], set[float]] = defaultdict(set)
    for (task, _, axis), own in losses.items():
        steps[task, axis] |= own.keys()
    return sum(map(len, steps.values()))


def _losses(row: Row) -> tuple[_LossesOfRun, bool]:
    """Return the first losses of a run, and whether these are all. For losses without a step, count
    from 1.
    """
    losses: _LossesOfRun = defaultdict(dict)
    total = 0
    tasks = row.tasks or [row]
    for task in tasks:
        number = task.number if len(tasks) > 1 else ""
        for block in stored(MetricFiles(task.folder)):
            for name, column in block.columns.items():
                if not is_loss(name):
                    continue
                own = losses[number, name, block.axis]
                # Lines of other metrics do not count.
                xs = (
                    range(len(own) + 1, len(own) + 1 + len(column.ys))
                    if block.axis == ROW
                    else column.xs
                )
                room = _MAX_LOSSES - total
                own.update(islice(zip(xs or (), column.ys, strict=True), room))
                total += len(column.ys)
                if total > _MAX_LOSSES:
                    return losses, False
    return losses, True


def compare(a: Row, b: Row) -> tuple[RunDifference, ...]:
    """Return the differences of two runs, section after section. CollectError: a run's file is
    damaged.
    """
    facts_a = environment_of(a)
    facts_b = environment_of(b)
    return (
        *_differences("job", _job(a, facts_a), _job(b, facts_b)),
        *_code(a, b, facts_a, facts_b),
        *_differences("configuration", _configuration(a), _configuration(b)),
        *_differences("data", _data(a), _data(b)),
        *_differences("environment", software_of(facts_a), software_of(facts_b)),
        *_differences("hardware", hardware_of(facts_a), hardware_of(facts_b)),
        *_differences("result", _result(a), _result(b)),
    )


def _differences(
    section: str, a: Mapping[str, Value], b: Mapping[str, Value]
) -> Iterator[RunDifference]:
    for key in dict.fromkeys((*a, *b)):
        if a.get(key) != b.get(key):
            yield RunDifference(section, key, a.get(key), b.get(key))


def environment_of(row: Row) -> Mapping[str, Any]:
    """Return a run's environment.json; empty without this file. Raises CollectError if it is
    damaged.
    """
    facts = _read(row.run.directory / ENVIRONMENT_FILE)
    return facts if isinstance(facts, dict) else {}


def _read(path: Path) -> Any:
    """Return a run's JSON file; None if the file is missing. Raises CollectError if it is
    damaged.
    """
    try:
        return read_json(os.fsencode(path.parent), os.fsencode(path.name), _MAX_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise CollectError(
            f"{path.name} in a run's folder can't be read",
            code="file-unreadable",
            about="run",
            where=str(path),
            why=str(exc).partition("\n")[0],
            fix="run `sha256sum -c SHA256SUMS` in the run's folder; if files are damaged, "
            "compare other runs",
        ) from exc


def mapping(value: Any, *keys: str) -> Mapping[str, Any]:
    """Return value[key1][key2]... for nested mappings; {} if a key is missing or a value is no
    mapping.
    """
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _flat_values(values: Mapping[str, Any]) -> dict[str, Value]:
    """Flatten nested mappings to names such as ``env.SEED``, and leave out empty values."""
    return {
        key: value
        for key, value in flat(values, longest=_LONGEST).items()
        if value not in (None, "[]", "")
    }


def _job(row: Row, facts: Mapping[str, Any]) -> dict[str, Value]:
    """Return a job's options of `clusterctl submit`, its cluster and its partition."""
    submission = mapping(facts, "client", "job")
    # The configuration lists the values of a sweep's task.
    sweep_keys = {"array", "sweep"} if row.task is not None else set()
    requested = {
        key: value for key, value in submission.items() if key not in _NOT_THE_JOB | sweep_keys
    }
    if isinstance(script := requested.get("script"), str):
        requested["script"] = Path(script).name
    job = {
        key: value
        for key, value in _flat_values(requested).items()
        if not key.startswith("env.SWEEP_")
    }
    return {**job, "cluster": row.run.cluster, "partition": row.run.partition}


def _code(
    a: Row, b: Row, facts_a: Mapping[str, Any], facts_b: Mapping[str, Any]
) -> Iterator[RunDifference]:
    """Yield differences in submitted files, clusterctl's version and, if files differ, git
    commits.
    """
    files_a = _files(a)
    files_b = _files(b)
    changed = list(_differences("code", files_a, files_b))
    yield from changed[:_MAX_FILES]
    if (more := len(changed) - _MAX_FILES) > 0:
        yield RunDifference("code", "more files", None, more)
    versions = (
        {"clusterctl": mapping(facts, "client").get("clusterctl")} for facts in (facts_a, facts_b)
    )
    yield from _differences("code", *versions)
    if changed:
        commits = [mapping(facts, "client", "git") for facts in (facts_a, facts_b)]
        yield from _differences("code", *({"commit": facts.get("commit")} for facts in commits))


def _files(row: Row) -> dict[str, Value]:
    """Return path -> shortened sha256, or "-> target" of a link, for all submitted files."""
    source = _read(row.run.directory / SOURCE_FILE)
    contents: dict[str, Value] = {}
    for kind, content in (("files", "sha256"), ("links", "target")):
        listed = source.get(kind) if isinstance(source, dict) else None
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict) and isinstance(value := entry.get(content), str):
                contents[str(entry.get("path"))] = value[:12] if kind == "files" else f"-> {value}"
    return contents


def _joined(tasks: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    """Join the values of an array's tasks. tasks: a task's number -> its values; "" for a single
    run.

    Values that differ between tasks come first, named ``task 3: lr``. A value of all tasks is named
    ``lr``.
    """
    keys = dict.fromkeys(key for values in tasks.values() for key in values)
    common = {key for key in keys if len({repr(values.get(key)) for values in tasks.values()}) == 1}
    own = {
        f"task {n}: {k}": v
        for n, values in tasks.items()
        for k, v in values.items()
        if k not in common
    }
    return own | {
        key: value for values in tasks.values() for key, value in values.items() if key in common
    }


def _configuration(row: Row) -> dict[str, Value]:
    """Return the program's options and other arguments."""
    arguments = " ".join(config_of(row.run.args)[1]) or None
    return {
        **_joined({task.number: task.config for task in row.tasks or [row]}),
        "arguments": arguments,
    }


def _data(row: Row) -> dict[str, Value]:
    """Return the sizes and checksums of training data that the first line of metrics.jsonl
    lists.
    """
    tasks: dict[str, Mapping[str, Value]] = {}
    for task in row.tasks or [row]:
        first = next(stored(MetricFiles(task.folder)), None)
        data = flat(mapping(first.lines[0], "data")) if first is not None and first.lines else {}
        # The configuration has the path of the data.
        data.pop("name", None)
        tasks[task.number] = {
            k: v[:12] if isinstance(v, str) and "sha256" in k else v for k, v in data.items()
        }
    return _joined(tasks)


def software_of(facts: Mapping[str, Any]) -> dict[str, Value]:
    """Return name -> version of Slurm, node software and Python packages in ``facts``
    (environment.json).
    """
    versions: dict[str, Value] = {"slurm": facts.get("slurm")}
    for host in mapping(facts, "hosts").values():
        versions |= _flat_values(mapping(host, "versions"))
    lock = mapping(facts, "client").get("requirements")
    return versions | dict(_PINNED.findall(lock)) if isinstance(lock, str) else versions


def hardware_of(facts: Mapping[str, Any]) -> dict[str, Value]:
    """Return {"nodes": text} with each kind of node (cores, CPU, memory, GPUs) in ``facts``, if
    any.
    """
    kinds = set()
    for host in mapping(facts, "hosts").values():
        if isinstance(host, Mapping):
            cores = host.get("cpus")
            memory = host.get("memory_total_mib")
            gpus = host.get("gpus")
            count = ""
            if isinstance(cores, list):
                count = counted(len(cores), "core")
            parts = [count, host.get("cpu_model")]
            parts += [
                formatting.size(memory << 20)
                if isinstance(memory, int) and 0 < memory < _MOST_MIB
                else ""
            ]
            listed = gpus if isinstance(gpus, list) else ()
            parts += [str(gpu.get("name")) for gpu in listed if isinstance(gpu, Mapping)]
            kinds.add(", ".join(str(part) for part in parts if part))
    return {"nodes": "; ".join(sorted(kinds))} if kinds else {}


def _result(row: Row) -> dict[str, Value]:
    row_values = {key: FIELDS[key](row) for key in _RESULT}
    tasks = row.tasks or [row]
    usual = {name for task in row.tasks for name in task.metrics if is_usual(name)}
    # Each task of an array has all metrics. The usual metrics are its result.
    last = {
        task.number: {
            key: metric.last for key, metric in task.metrics.items() if not usual or key in usual
        }
        for task in tasks
    }
    return row_values | _joined(last)
