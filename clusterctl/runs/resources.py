"""What a run asked for and what it used, and what to ask for next time.

The figures are from Slurm's record of the job and its steps, and from telemetry. `collect` has them
in run.json. Advice needs enough evidence, and leaves a margin above what the same job needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clusterctl.runs.find import Row
from clusterctl.runs.table import stored
from clusterctl.runs.telemetry_files import (
    BUSY,
    BUSY_CORES,
    CORE_S,
    CORES,
    GPU_AT_WORK,
    JOB_MIB,
    UNKNOWN_GPU,
    NodeFile,
)
from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.slurm.accounting import StepsUse
from clusterctl.scheduler.slurm.values import GPU, amounts_of
from clusterctl.spec.units import GIB_MIB, MIB
from clusterctl.state.run_record import ResourceUse, TaskRecord
from clusterctl.util import formatting

# What is advised, as a multiple of the most that was used: by telemetry, which looks each few
# seconds, and by Slurm's accounting, which looks each 30 seconds.
_SEEN: Final = 1.25
_ACCOUNTED: Final = 1.5
_TIME: Final = 1.5
_CORES: Final = 1.25
_MEAN_CORES: Final = 2.0
# Less is not advised, and advice saves at least this share of what was asked for.
_LEAST_MIB: Final = 512
_LEAST_S: Final = 600
_SAVES: Final = 1 / 3
# The evidence that advice needs.
_SHORTEST_S: Final = 180
_SHORTEST_ACCOUNTED_S: Final = 600
_FEWEST_SAMPLES: Final = 20


@dataclass(frozen=True, slots=True)
class Amount:
    """A resource, what a run asked for, and what it used, as text.

    share: of what it asked for, in percent. None: unknown.
    """

    resource: str
    asked: str
    used: str
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Resources:
    """What a run asked for and used.

    flags: options of `submit` for the next time, such as ``--mem 6GiB``. margins: how these follow
        from what was used.
    """

    amounts: Sequence[Amount] = ()
    flags: Sequence[str] = ()
    margins: Sequence[str] = ()

    @property
    def advice(self) -> str:
        """A text such as ``next time: --mem 6GiB --time 40m``; "" without advice."""
        return f"next time: {' '.join(self.flags)}" if self.flags else ""

    @property
    def lines(self) -> list[str]:
        """The advice as sentences."""
        return [f"{self.advice} ({'; '.join(self.margins)})"] if self.flags else []


@dataclass(slots=True)
class _NodeUse:
    """The samples of a node. gpus: for each, the highest percentage of its use, and their sum and
    number.

    memory_mib: of the job's control group. node_mib: of all processes of the node. busy: the most
    cores that were busy at once.
    """

    samples: int = 0
    memory_mib: float = 0.0
    node_mib: float = 0.0
    cores: int = 0
    busy: float = 0.0
    busy_s: float = 0.0
    gpus: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    is_gpu_unknown: bool = False


def resources_of(row: Row) -> Resources:
    """Return what a run or task asked for and used; of an array, the most of its tasks."""
    tasks = [task for task in row.task_records if task.attempts and task.tres]
    if not tasks:
        return Resources()
    uses = [task.used for task in tasks]
    asked = amounts_of(tasks[0].tres)
    nodes = max(1, int(asked.get("node", 1)))
    amounts = [*_amounts(row, tasks, uses, asked, nodes)]
    flags: list[str] = []
    margins: list[str] = []
    has_all = len(tasks) == len(row.task_records)
    if row.run.final and has_all and all(each.state == JobState.COMPLETED for each in tasks):
        for flag, margin in _advice(row, tasks, uses, asked, nodes):
            flags.append(flag)
            margins.append(margin)
    return Resources(amounts, flags, margins)


def _amounts(
    row: Row,
    tasks: Sequence[TaskRecord],
    uses: Sequence[ResourceUse],
    asked: Mapping[str, float],
    nodes: int,
) -> Iterator[Amount]:
    """Yield the resources whose use is known. asked: of all nodes."""
    most = " of a task" if len(tasks) > 1 else ""
    if memory := max(max(use.memory_mib, use.accounted_mib) for use in uses):
        asked_mib = asked.get("mem", 0.0) / MIB / nodes
        known = f"{formatting.size(asked_mib * MIB)} on each node" if asked_mib else "-"
        share = 100 * memory / asked_mib if asked_mib else None
        yield Amount(
            "memory", known, f"{formatting.size(memory * MIB)}, the most seen{most}", share
        )
    elapsed = max((task.elapsed_s or 0 for task in tasks), default=0)
    if elapsed:
        limit = tasks[0].time_limit_s
        known = "no limit" if limit is None else formatting.duration(limit)
        share = 100 * elapsed / limit if limit else None
        longest = f", the most{most}" if most else ""
        yield Amount("time", known, f"{formatting.duration(elapsed)}{longest}", share)
    core_s = [
        (use.core_s, task.elapsed_s)
        for use, task in zip(uses, tasks, strict=True)
        if use.core_s is not None and task.elapsed_s
    ]
    if core_s and (cpus := asked.get("cpu")):
        mean = sum(used or 0.0 for used, _ in core_s) / sum(seconds or 0 for _, seconds in core_s)
        yield Amount(
            "CPUs", f"{cpus:.0f}", f"{formatting.number(mean, 3)} on average", 100 * mean / cpus
        )
    if gpus := asked.get(GPU):
        counts = [use.gpus for use in uses if use.gpus is not None]
        means = [use.gpu_mean for use in uses if use.gpu_mean is not None]
        if counts and means:
            mean = sum(means) / len(means)
            used = f"{max(counts)} on a node, {formatting.number(mean, 3)} busy on average"
            yield Amount("GPUs", f"{gpus / nodes:.0f} on each node", used, 100 * mean / gpus)
    if ran := max(use.tasks for use in uses):
        each = row.run.tasks_per_node
        yield Amount("tasks", f"{each * nodes}" if each else "-", f"{ran}")


def _advice(
    row: Row,
    tasks: Sequence[TaskRecord],
    uses: Sequence[ResourceUse],
    asked: Mapping[str, float],
    nodes: int,
) -> Iterator[tuple[str, str]]:
    """Yield options of `submit`, each with its margin, for which there is enough evidence."""
    shortest = min(task.elapsed_s or 0 for task in tasks)
    is_seen = min(use.samples for use in uses) >= _FEWEST_SAMPLES
    is_accounted = shortest >= _SHORTEST_ACCOUNTED_S
    asked_mib = asked.get("mem", 0.0) / MIB / nodes
    seen = min(use.memory_mib for use in uses) > 0 and is_seen
    accounted = min(use.accounted_mib for use in uses) > 0 and is_accounted
    if asked_mib and (seen or accounted):
        factor = _SEEN if seen else _ACCOUNTED
        most = max(max(use.memory_mib, use.accounted_mib) for use in uses)
        wanted = _rounded_mib(max(_LEAST_MIB, most * factor))
        if wanted <= (1 - _SAVES) * asked_mib:
            margin = f"memory: {100 * factor - 100:.0f} % more than the most that was seen"
            yield f"--mem {formatting.exact_size(wanted)}", margin
    longest = max(task.elapsed_s or 0 for task in tasks)
    limit = tasks[0].time_limit_s
    if shortest >= _SHORTEST_S and all(len(task.attempts) == 1 for task in tasks):
        seconds = _rounded_s(max(_LEAST_S, longest * _TIME))
        if limit is not None and seconds <= (1 - _SAVES) * limit:
            margin = f"time: {100 * _TIME - 100:.0f} % more than it took, and at least 10m"
            yield f"--time {formatting.duration(seconds)}", margin
    yield from _cpu_advice(row, tasks, uses, asked, nodes)
    gpus = asked.get(GPU, 0.0) / nodes
    counts = [use.gpus for use in uses]
    if gpus > 1 and is_seen and shortest >= _SHORTEST_S and None not in counts:
        used = max(count or 0 for count in counts)
        if 0 < used < gpus:
            yield f"--gpus {used}", "GPUs: those that did anything"


def _cpu_advice(
    row: Row,
    tasks: Sequence[TaskRecord],
    uses: Sequence[ResourceUse],
    asked: Mapping[str, float],
    nodes: int,
) -> Iterator[tuple[str, str]]:
    ranks = row.run.tasks_per_node
    shortest = min(task.elapsed_s or 0 for task in tasks)
    if not ranks or shortest < _SHORTEST_S:
        return
    own = asked.get("cpu", 0.0) / nodes / ranks
    if all(use.cores > 0 and use.samples >= _FEWEST_SAMPLES for use in uses):
        cores = max(use.cores for use in uses) / ranks * _CORES
        margin = f"CPUs: {100 * _CORES - 100:.0f} % more than the most that were busy at once"
    elif shortest >= _SHORTEST_ACCOUNTED_S and all(use.core_s is not None for use in uses):
        means = (
            (use.core_s or 0.0) / (task.elapsed_s or 1)
            for use, task in zip(uses, tasks, strict=True)
        )
        cores = max(means) / nodes / ranks * _MEAN_CORES
        margin = f"CPUs: {_MEAN_CORES:.0f} times the average use"
    else:
        return
    wanted = max(1, math.ceil(cores))
    if wanted <= (1 - _SAVES) * own:
        yield f"--cpus {wanted}", margin


def _rounded_mib(mib: float) -> int:
    """Round up to a size that people write: quarters of a GiB, from 8 GiB on whole GiB."""
    unit = GIB_MIB if mib >= 8 * GIB_MIB else GIB_MIB // 4
    return math.ceil(mib / unit) * unit


def _rounded_s(seconds: float) -> int:
    """Round up to 5 minutes; from 3 hours on to 30 minutes."""
    unit = 1800 if seconds >= 3 * 3600 else 300
    return math.ceil(seconds / unit) * unit


def used_by(folder: Path, task: TaskRecord, steps: StepsUse) -> ResourceUse:
    """Return what a job or array task used. folder: of its files. steps: by Slurm's accounting."""
    names = [*dict.fromkeys(node for each in task.attempts for node in each.nodes)]
    asked = amounts_of(task.tres)
    count = max(1, int(asked.get("node", 1)))
    nodes = [_node_use(folder, name) for name in names]
    use = ResourceUse(
        accounted_mib=steps.memory_mib, core_s=steps.core_s or None, tasks=steps.tasks
    )
    if nodes:
        use.samples = min(node.samples for node in nodes)
        use.memory_mib = max(node.memory_mib for node in nodes)
        # On a shared node, other jobs have used some of the cores and of the memory.
        if all(0 < node.cores <= asked.get("cpu", 0.0) / count for node in nodes):
            use.cores = max(node.busy for node in nodes)
            use.memory_mib = use.memory_mib or max(node.node_mib for node in nodes)
            use.core_s = sum(node.busy_s for node in nodes) or use.core_s
        own_gpus = asked.get(GPU, 0.0) / count
        if own_gpus and all(
            len(node.gpus) == own_gpus and not node.is_gpu_unknown for node in nodes
        ):
            use.gpus = max(
                sum(most >= GPU_AT_WORK for most, _, _ in node.gpus.values()) for node in nodes
            )
            use.gpu_mean = sum(
                total / count / 100 for node in nodes for _, total, count in node.gpus.values()
            )
    return use


def _node_use(folder: Path, node: str) -> _NodeUse:
    """Return what telemetry saw on a node."""
    found = _NodeUse()
    for block in stored(NodeFile(folder, node)):
        columns = {name: column.within(0, math.inf) for name, column in block.columns.items()}
        found.samples += len(block.place.ys)
        found.memory_mib = max(found.memory_mib, *columns.get(JOB_MIB, ()), 0.0)
        found.node_mib = max(
            found.node_mib, *(each / MIB for each in columns.get("Memory", ())), 0.0
        )
        found.cores = int(columns[CORES][-1])
        found.busy = max(found.busy, *columns.get(BUSY_CORES, ()), 0.0)
        found.busy_s += sum(columns.get(CORE_S, ()))
        found.is_gpu_unknown |= UNKNOWN_GPU in columns
        for name in (name for name in columns if name.startswith(BUSY)):
            most, total, count = found.gpus.get(name, (0.0, 0.0, 0))
            uses = columns[name]
            found.gpus[name] = max(most, *uses), total + sum(uses), count + len(uses)
    return found
