"""Collected runs (results of jobs, copied to this machine): the record run.json.

Unknown keys in run.json are ignored, because another version of clusterctl may have written the
file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    computed_field,
)
from typing_extensions import TypedDict  # until Python 3.12

from clusterctl.errors import CollectError
from clusterctl.state.attempts import AttemptRecord
from clusterctl.state.ledger import RUN_FILE, UNCHANGED, has_files_of_runs, token_of_run


class _Stored(BaseModel):
    # Most verbs read no record, so the model is built only when needed.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


@dataclass(slots=True)
class Metric:
    """A metric of a run: its last, lowest and highest value, each with its place.

    axis: the unit of the places (``last_step`` ...): ``step``, ``epoch``, or ``row`` without both.
    first: the first value. None if it is NaN or infinite.
    last: None if the last value is NaN or infinite. last_nonfinite: then ``nan``, ``inf`` or
        ``-inf``.
    nonfinite: number of values that are NaN or infinite. nonfinite_step: the first place of such a
        value.
    repeated: number of values with a place that an earlier value has, or is behind.
    """

    first: float | None = None
    last: float | None = None
    last_step: int | float | None = None
    min: float | None = None
    min_step: int | float | None = None
    max: float | None = None
    max_step: int | float | None = None
    count: int = 0
    nonfinite: int = 0
    nonfinite_step: int | float | None = None
    last_nonfinite: str | None = None
    axis: str = "step"
    repeated: int = 0


@dataclass(slots=True)
class ResourceUse:
    """What a job or array task used. memory_mib, accounted_mib, cores: the most on a node, by
    telemetry or by Slurm's accounting. 0: unknown.

    core_s: the time of all cores together. None: unknown.
    samples: the fewest samples of telemetry of a node.
    gpus: the most GPUs of a node that did anything. gpu_mean: busy GPUs of all nodes, on average.
    tasks: the most of a step.
    """

    memory_mib: float = 0.0
    accounted_mib: float = 0.0
    cores: float = 0.0
    core_s: float | None = None
    samples: int = 0
    gpus: int | None = None
    gpu_mean: float | None = None
    tasks: int = 0


Value = str | int | Annotated[float, Field(allow_inf_nan=False)] | bool | None
_LATEST = 1 << 40  # Unix seconds
Time = Annotated[int, Field(ge=0, le=_LATEST)]  # Unix seconds


class SweepRecord(TypedDict, total=False):
    """The options that a sweep varies (``keys``), and the metric and goal (min, max) that rank its
    tasks.

    form: that of a task's arguments, such as ``key=value``. None: ``--key value``, or
        ``--key=value`` for a value that begins with a dash.
    """

    version: int
    keys: list[str]
    form: str | None
    metric: str | None
    goal: str | None


class ScalingRecord(TypedDict, total=False):
    """The options of `submit --scaling`. All jobs of a scaling have the same name and the same
    options.
    """

    nodes: list[int] | None
    tasks: list[int] | None
    gpus: list[int] | None
    weak: bool
    repeats: int
    metric: str | None
    goal: str | None
    time_to: str | None


def _with_plausible_times(attempt: AttemptRecord) -> AttemptRecord:
    if not all(0 <= time <= _LATEST for time in (attempt.start_time, attempt.end_time or 0)):
        raise ValueError(f"no time between 0 and {_LATEST}")
    return attempt


_Attempts = tuple[Annotated[AttemptRecord, AfterValidator(_with_plausible_times)], ...]


class TaskRecord(_Stored):
    """The final state of a job, or of a task of a job array. Times are Unix seconds.

    nodes: those of the last attempt. start_time: of the first attempt. end_time: of the job.
    attempts: an entry for each start, so several for a requeued job. Empty: the job has not
        started.
    interruptions: the job's restarts, as `clusterctl jobs ID -o json` shows them.
    node_hours: of all attempts. A shared node counts in full; an attempt that has not ended: 0.
    gpu_energy_j: joules that the GPUs used in all attempts, by their counters. None: no counter is
        known.
    tres: the resources that Slurm allocated in the last attempt: ``cpu=2,mem=200M,node=1``.
    time_limit_s: None: unlimited or unknown.
    time_use: seconds by use, such as queue and useful, from the submission to the end.
    diagnosis: why it failed or was cancelled, or what may be wrong although it completed
        (scheduler/ends/diagnosis.py). None: nothing is to be said.
    """

    id: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    nodes: tuple[str, ...] = ()
    start_time: Time | None = None
    end_time: Time | None = None
    config: dict[str, Value] = {}
    given: tuple[str, ...] | None = None
    metrics: dict[str, Metric] = {}
    left_out: tuple[str, ...] = ()
    interruptions: tuple[dict[str, Any], ...] = ()
    attempts: _Attempts = ()
    gpu_energy_j: float | None = None
    tres: str = ""
    time_limit_s: int | None = None
    used: ResourceUse = ResourceUse()
    time_use: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}
    diagnosis: dict[str, Any] | None = None

    @property
    def elapsed_s(self) -> int | None:
        """Seconds of all attempts together; None before the first start or the last end."""
        is_over = bool(self.attempts) and self.attempts[-1].end_time is not None
        return sum(attempt.seconds for attempt in self.attempts) if is_over else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def node_hours(self) -> float:
        return sum(len(attempt.nodes) * attempt.seconds for attempt in self.attempts) / 3600

    @property
    def number(self) -> str:
        """The task's index in the array. "" for a job that is not an array."""
        return self.id.partition("_")[2]

    @property
    def folder(self) -> str:
        return f"task-{self.number}"

    def folder_in(self, directory: Path) -> Path:
        """Return the folder of the task in that of its run; the run's own, if it is not an array."""
        return directory / self.folder if self.number else directory


# From the most lenient to the strictest.
WhatDownDoes = Literal["", "deletes", "refuses"]
strictness: Final = get_args(WhatDownDoes).index


class SkippedFile(_Stored):
    """A file or folder of a job that `collect` did not copy, and why.

    path: path in the job's folder, made printable. bytes: total size. files: 0 if there is no data
        to copy.
    down: what `down` and `detach` do if they would remove it: refuse, unless there is a copy, or
        delete it without asking. "": it is not on the cluster.
    target: the target of a link, made printable; "" for other files.
    """

    path: str
    reason: str
    bytes: int = 0
    files: int = 1
    down: WhatDownDoes = "refuses"
    target: str = ""

    @property
    def only_there(self) -> bool:
        """Whether the file or folder holds data that exists only on the cluster."""
        return self.files > 0 and self.reason != UNCHANGED


def _fault(exc: OSError | ValueError) -> str:
    """Return why a record can't be read, in a line."""
    if isinstance(exc, OSError):
        return exc.strerror or str(exc)
    if not isinstance(exc, ValidationError):
        return str(exc).partition("\n")[0]
    first = exc.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else str(first["msg"])


class RunRecord(_Stored):
    """A collected run: the content of run.json in the folder ``directory``. Unknown values are
    None.

    token: distinguishes the run from jobs with the same id on earlier clusters of the same name.
    state: Slurm's job state; for an array, the state of the worst task or, while tasks wait or run,
        of the first of those.
    final: False if the job was still running when it was collected.
    submit_time, start_time, end_time, collected_at: Unix seconds.
    elapsed_s: as ``elapsed_of`` of the scheduler defines it.
    node_hours, gpu_energy_j: of all tasks.
    tasks_per_node: as `submit` set it; a script's own lines may set another number.
    price_per_hour: price of a node in USD. cost_usd: cost of all nodes of all tasks.
    source: hash of the job's input files, as in source.json.
    diagnosis: that of the first task with the run's state, else of the first that has one.
    args: arguments of the program. config: the program's options and its configuration in
        metrics.jsonl. given: which of them the user set, as the program tells. None: it does not.
        Each task of an array has its own ``config``, ``given`` and ``metrics``.
    left_out: sentences on metrics that were written and that the record does not have.
    tags, note: set by the user. sweep: the varied options of a sweep, and how its tasks are ranked.
    packed: the tasks that ran inside this job (`submit --pack`). Their times, nodes and energy are
        part of the job's.
    shares_machine: whether the nodes are containers of the same machine.
    scaling: set for a job of a scaling. The runs of a scaling have the same name.
    replay_of: token of the run that this run repeats. of_failed: whether only the failed tasks of
        that run were repeated; their results then replace the failed tasks in rankings.
    """

    version: int = 1
    token: str
    cluster: str
    scheduler: str = "slurm"
    job_id: str
    name: str
    user: str
    partition: str
    account: str
    qos: str = ""
    state: str
    final: bool
    tasks: tuple[TaskRecord, ...]
    nodes: tuple[str, ...]
    submit_time: Time | None
    start_time: Time | None
    end_time: Time | None
    elapsed_s: int | None
    tasks_per_node: int | None = None
    price_per_hour: float | None = None
    cost_usd: float | None = None
    collected_at: float
    remote_dir: str
    files: int
    bytes: int
    source: str | None = None
    args: tuple[str, ...] = ()
    config: dict[str, Value] = {}
    given: tuple[str, ...] | None = None
    metrics: dict[str, Metric] = {}
    left_out: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    note: str | None = None
    sweep: SweepRecord | None = None
    scaling: ScalingRecord | None = None
    packed: tuple[TaskRecord, ...] = ()
    shares_machine: bool = False
    replay_of: str | None = None
    of_failed: bool = False
    skipped: tuple[SkippedFile, ...] = ()
    directory: Path = Path()

    @property
    def not_here(self) -> list[SkippedFile]:
        """The files and folders in ``skipped``, without submitted files that this machine has
        anyway.
        """
        return [skipped for skipped in self.skipped if skipped.reason != UNCHANGED]

    @property
    def attempts(self) -> tuple[AttemptRecord, ...]:
        """The attempts of a job; () for several tasks, which have attempts of their own."""
        return self.tasks[0].attempts if len(self.tasks) == 1 else ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def node_hours(self) -> float:
        return sum(task.node_hours for task in self.tasks)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def diagnosis(self) -> dict[str, Any] | None:
        told = [task for task in self.tasks if task.diagnosis]
        own = [task for task in told if task.state == self.state]
        return next((task.diagnosis for task in (*own, *told)), None)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gpu_energy_j(self) -> float | None:
        joules = [task.gpu_energy_j for task in self.tasks if task.gpu_energy_j is not None]
        return sum(joules) if joules else None

    @property
    def full_id(self) -> str:
        """The job id with the cluster, ``CLUSTER/ID``, which means the same wherever a command is
        run.
        """
        return f"{self.cluster}/{self.job_id}"

    @property
    def is_array(self) -> bool:
        return any(task.number for task in self.tasks)

    @classmethod
    def load(cls, directory: Path) -> RunRecord:
        """Read the record in a run's folder. Raise CollectError if it is missing or damaged."""
        path = directory / RUN_FILE
        try:
            return cls.model_validate_json(path.read_bytes()).model_copy(
                update={"directory": directory}
            )
        except (OSError, ValueError) as exc:
            if has_files_of_runs(directory) or token_of_run(directory):
                raise CollectError(
                    f"the record of the run {directory.name} is missing or damaged",
                    code="record-damaged",
                    about="run",
                    where=str(path),
                    why=_fault(exc),
                    fix="`clusterctl collect` with the ID of its job collects the run again, if "
                    "the cluster still has the job",
                ) from exc
            message = f"{directory} is not a collected run"
            fix = "pass a folder that was created by `clusterctl collect`"
            raise CollectError(
                message, code="file-invalid", about="run", where=str(path), why=_fault(exc), fix=fix
            ) from exc

    def as_json(self) -> str:
        """Return the content of run.json, without the path of its folder."""
        return self.model_dump_json(indent=2, exclude={"directory"}) + "\n"
