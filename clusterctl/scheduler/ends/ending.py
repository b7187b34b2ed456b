"""How a job ended, or its present state, in the words of every view.

What the cluster tells of a live job and what a collected run has of it (runs/facts.py) become the
same value. `wait`, `submit --wait`, `jobs ID`, messages, the line of `collect`, `runs show` and
reports choose its parts. What is not known, such as the cost before `collect`, is absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from clusterctl.errors import Quoted
from clusterctl.scheduler.base import (
    GOING_ON,
    JobInfo,
    JobState,
    Outcome,
    elapsed_of,
    format_exit,
    plain,
    reason_in_words,
    worst_job,
)
from clusterctl.scheduler.ends.diagnosis import Diagnosis, show_log
from clusterctl.scheduler.slurm.values import fold_nodes
from clusterctl.spec.names import first_few
from clusterctl.state.attempts import AttemptRecord
from clusterctl.util import formatting
from clusterctl.util.formatting import Fact

if TYPE_CHECKING:
    from clusterctl.state.run_record import TaskRecord

_MOST_NAMED: Final = 16
_VERBS: Final = {
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "ended",
    Outcome.GOES_ON: "is waiting",
}
# Reasons of Slurm that the exit code tells, too.
_SAYS_NOTHING: Final = frozenset({"NonZeroExitCode", "JobLaunchFailure"})
# Slurm keeps this reason of a job that has waited for its next attempt.
_REQUEUED: Final = "BeginTime"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a job, an array or a task of an array ended, or its present state.

    state: Slurm's; of an array, of its worst task or, while tasks wait or run, of one of those.
        reason, exit_code, signal: of the same task. states: state -> number of tasks.
    when: what a person reads after the state, such as "when it was collected".
    nodes: of all attempts; while a job or task waits or runs, those that it has now.
    start_time, end_time: Unix seconds, of the first and last attempt. elapsed_s: as ``elapsed_of``
        defines it. attempts: empty for several tasks.
    diagnosis: why the job, or the first failed task, ended so, or why it waits.
    logs: the job in the command that shows its log.
    """

    job_id: str
    name: str = ""
    user: str = ""
    partition: str = ""
    account: str = ""
    state: str = JobState.UNKNOWN.value
    states: Mapping[str, int] = field(default_factory=dict)
    when: str = ""
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    nodes: tuple[str, ...] = ()
    submit_time: int | None = None
    start_time: int | None = None
    end_time: int | None = None
    elapsed_s: int | None = None
    node_hours: float = 0.0
    cost_usd: float | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    diagnosis: Diagnosis | None = None
    logs: str = ""

    @classmethod
    def of(
        cls, jobs: Sequence[JobInfo], diagnosis: Diagnosis | None = None, *, job_id: str = ""
    ) -> Ending:
        """Return what is known of a job or task, or of an array by its tasks. job_id: of an array
        with a single task.
        """
        shown = next((job for job in jobs if not job.ended), worst_job(jobs))
        starts = [job.first_start for job in jobs if job.first_start is not None]
        ends = [job.end_time for job in jobs if job.end_time is not None]
        submits = [job.submit_time for job in jobs if job.submit_time is not None]
        return cls(
            job_id=job_id or (shown.id if len(jobs) == 1 else shown.whole_id),
            name=shown.name,
            user=shown.user,
            partition=shown.partition,
            account=shown.account,
            state=shown.state.value,
            states=Counter(job.state.value for job in jobs),
            reason=shown.reason,
            exit_code=shown.exit_code,
            signal=shown.signal,
            nodes=told_nodes(jobs),
            submit_time=min(submits, default=None),
            start_time=min(starts, default=None),
            end_time=max(ends, default=None) if all(job.ended for job in jobs) else None,
            elapsed_s=elapsed_of(jobs),
            node_hours=sum(job.node_hours for job in jobs),
            attempts=jobs[0].known_attempts if len(jobs) == 1 else (),
            diagnosis=diagnosis,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the end as `-o json` shows it. Times are Unix seconds."""
        keys = (
            "job_id name state reason exit_code signal exit nodes submit_time start_time end_time"
        )
        keys += " elapsed_s suspended_s node_hours attempts"
        return {
            **{key: plain(getattr(self, key)) for key in keys.split()},
            "states": dict(self.states),
            "diagnosis": self.diagnosis and self.diagnosis.as_dict(),
        }

    @property
    def exit(self) -> str:
        """Name of the signal, otherwise the exit code. "" if both are unknown."""
        return format_exit(self.exit_code, self.signal)

    @property
    def suspended_s(self) -> int:
        """Seconds for which Slurm had stopped the job."""
        return sum(attempt.suspended_s for attempt in self.attempts)

    @property
    def told_state(self) -> str:
        """The state, or the number of tasks in each state, and when that was so."""
        counts = ", ".join(f"{count} {state}" for state, count in self.states.items())
        state = counts if sum(self.states.values()) > 1 else self.state
        return f"{state} {self.when}".rstrip()

    @property
    def nodes_in_words(self) -> str:
        """The nodes as a hostlist or, if that is long, the first of them."""
        folded = fold_nodes(self.nodes)
        is_short = folded.count(",") < _MOST_NAMED
        return folded if is_short else first_few(self.nodes, _MOST_NAMED)

    @property
    def outcome(self) -> str:
        """A text such as ``FAILED after 6m40s on n[1-2] (exit 3)``. An array has the
        number of tasks in each state.
        """
        # A job that never began has no nodes; one that ran has them, also if it took less than a second.
        has_run = self.state not in GOING_ON and (self.elapsed_s or self.nodes)
        is_known = has_run and self.elapsed_s is not None
        after = f" after {formatting.duration(self.elapsed_s)}" if is_known else ""
        on = f" on {self.nodes_in_words}" if self.nodes else ""
        is_of_one = sum(self.states.values()) <= 1
        code = f"exit {self.exit}" if self.exit not in {"", "0"} and is_of_one else ""
        why = self.told_reason or code
        cost = "" if self.cost_usd is None else f", {formatting.cost(self.cost_usd)}"
        return f"{self.told_state}{after}{on}{f' ({why})' if why else ''}{cost}"

    @property
    def told_reason(self) -> str:
        """Slurm's reason, unless the exit code tells it, or it is why an ended job had waited."""
        has_waited = self.reason == _REQUEUED and self.state not in GOING_ON
        says_nothing = has_waited or self.reason in _SAYS_NOTHING
        return "" if says_nothing else reason_in_words(self.reason)

    @property
    def line(self) -> str:
        return f"job {self.job_id} ({self.name}) {self.outcome}"

    @property
    def facts(self) -> list[Fact]:
        """The known values, with their names."""
        listed = [
            Fact("job", self.job_id),
            Fact("name", self.name),
            Fact("user", self.user),
            Fact("state", self.told_state),
            Fact("reason", self.told_reason),
            Fact("exit", self.exit),
            Fact("partition", self.partition),
            Fact("account", self.account),
            Fact("nodes", self.nodes_in_words),
            Fact("submitted", self.submit_time, "moment"),
            Fact("started", self.start_time, "moment"),
            Fact("ended", self.end_time, "moment"),
            Fact("elapsed", self.elapsed_s, "duration"),
            Fact("suspended", self.suspended_s or None, "duration"),
            Fact("node hours", self.node_hours or None, "hours"),
            Fact("cost", self.cost_usd, "cost"),
            Fact("attempts", "; ".join(map(str, self.attempts[1:] and self.attempts))),
        ]
        return [fact for fact in listed if fact.is_known]

    # --- Why ------------------------------------------------------------------------------------
    @property
    def cause(self) -> str:
        return self.diagnosis.cause if self.diagnosis else ""

    @property
    def summary(self) -> str:
        """A line such as ``job 12 (train) failed: out of memory on n2: 3.9 GiB used of 4 GiB``."""
        if (told := self.diagnosis) is None:
            return summary_of(self.job_id, self.name, self.state, "")
        return summary_of(told.job_id, self.name, told.state or self.state, told.cause)

    @property
    def fix(self) -> str:
        """The fix, with the command that shows the job's log: once, if the fix is to read it."""
        if (told := self.diagnosis) is None:
            return ""
        own = show_log(told.job_id)
        command = show_log(self.logs) if self.logs else own
        if told.fix.endswith(own):
            return f"{told.fix.removesuffix(own)}{command}"
        return f"{told.fix}; the whole log: {command}" if told.lines else told.fix

    @property
    def remarks(self) -> list[str]:
        """Other facts that may explain the end, and the hints."""
        return [*self.diagnosis.explanations] if self.diagnosis else []

    @property
    def log(self) -> list[str]:
        """The last lines of the log of the rank that failed first, or a note in their place."""
        return [*self.diagnosis.quoted] if self.diagnosis else []

    def details(self, *, log_is_shown: bool = False) -> Iterator[str]:
        """Yield the lines that a person sees below the summary and above the fix.

        log_is_shown: the job's log is on the screen already, so that it is not quoted.
        """
        yield self.outcome
        yield from (() if log_is_shown else (Quoted(f"| {line}") for line in self.log))
        yield from self.remarks

    @property
    def verdict(self) -> list[str]:
        """The outcome and, of a failure, cause, remarks and fix."""
        fixes = [f"fix: {self.fix}"] if self.fix else []
        why = [self.summary, *self.remarks, *fixes] if self.cause else []
        return [self.outcome, *why]


def told_nodes(tasks: Iterable[JobInfo | TaskRecord]) -> tuple[str, ...]:
    """Return the nodes of all attempts of tasks that have ended, and the present nodes of others."""
    nodes: dict[str, None] = {}
    for task in tasks:
        attempts = () if task.state in GOING_ON else task.attempts
        nodes |= dict.fromkeys(node for each in (*attempts, task) for node in each.nodes)
    return tuple(nodes)


def summary_of(job_id: str, name: str, state: str, cause: str) -> str:
    """Return why a job in a state of Slurm ended or waits, in a line."""
    outcome = JobState.__members__.get(state, JobState.UNKNOWN).outcome
    return f"job {job_id} ({name}) {_VERBS.get(outcome, 'completed')}: {cause}"
