"""Diagnosis of a job: why it failed or waits, from the scheduler's answers and the job's logs.

``diagnose`` is a pure function. The possible causes are in causes.py; the first cause that applies
is the diagnosis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from clusterctl.scheduler.advice import Advice
from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo, Outcome, reason_in_words
from clusterctl.scheduler.case import Case, Evidence, Explanation
from clusterctl.scheduler.causes import first_cause
from clusterctl.scheduler.excerpt import excerpt_of
from clusterctl.scheduler.failed_rank import Failed, is_survived
from clusterctl.scheduler.program_error import (
    UNCAUGHT,
    ProgramError,
    goes_on_after,
    is_shell,
    part_ended,
    without_long_lines,
)
from clusterctl.scheduler.script_end import (
    goes_on_after_errors,
    is_of_earlier_command,
    is_of_earlier_file,
)
from clusterctl.util.terminal import plain_line

# A line has one of these texts instead of showing an empty log.
WROTE_NOTHING: Final = "wrote nothing to its log"
EMPTY_LOG: Final = "the job's log is empty"
_COLUMNS: Final = 200
_EMPTY: Final = (WROTE_NOTHING, EMPTY_LOG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Reason why a job ended or waits.

    state: Slurm's state. code: code of the cause in causes.py. lines: excerpt of the log.
    rank, host: of the first rank that failed; None and "" if unknown. signal: a name such as
        SIGSEGV, or "".
    """

    job_id: str
    name: str
    state: str
    reason: str
    code: str
    cause: str
    fix: str
    rank: int | None = None
    host: str = ""
    exit_code: int | None = None
    signal: str = ""
    lines: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as `-o json` and run.json show it."""
        # asdict would copy each value.
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "lines": list(self.lines)}

    def with_lines(self, *lines: str) -> Diagnosis:
        return replace(self, lines=lines)

    @property
    def has_log(self) -> bool:
        """Whether the job may have written a log. A pending job has none."""
        is_empty = any(text in line for line in self.lines[:1] for text in _EMPTY)
        return self.state != JobState.PENDING and not is_empty

    @property
    def summary(self) -> str:
        """A line such as ``job 12 (train) failed: out of memory on demo-train-2: 3.9 GiB used of 4
        GiB``.
        """
        outcome = JobState(self.state).outcome
        verb = {Outcome.FAILED: "failed", Outcome.CANCELLED: "ended", Outcome.GOES_ON: "is waiting"}
        return f"job {self.job_id} ({self.name}) {verb.get(outcome, 'completed')}: {self.cause}"

    @property
    def details(self) -> str:
        """State of the job and how its first failed rank ended: ``FAILED, rank 1 on n2, exit code
        1``.
        """
        reason = (
            ""
            if self.reason in {"NonZeroExitCode", "JobLaunchFailure"}
            else reason_in_words(self.reason)
        )
        code = f"exit code {self.exit_code}" if self.exit_code else ""
        rank_and_host = str(Failed(rank=self.rank, host=self.host))
        return ", ".join(
            filter(
                None,
                (self.state, reason and f"reason {reason}", rank_and_host, self.signal or code),
            )
        )


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the reason why a job failed, was cancelled or waits."""
    case = Case.of(evidence)
    found = first_cause(case)
    if (writer := case.writer_of(found.match)) != case.failed:
        case = Case.of(evidence, writer)
        found = first_cause(case)
    found = _of_part(case, _of_script(case, found))
    job = evidence.job
    failed = found.failed or case.failed
    return Diagnosis(
        job_id=job.id,
        name=job.name,
        state=job.state.value,
        reason=job.reason,
        code=found.code,
        cause=found.cause,
        fix=found.fix,
        rank=failed.rank,
        host=failed.host,
        exit_code=failed.exit_code,
        signal=failed.signal,
        lines=excerpt_of(evidence, failed).lines if job.ended else (),
    )


def _of_part(case: Case, found: Explanation) -> Explanation:
    """Return the explanation with the part of the program that the exception ended."""
    ranks = case.evidence.ranks or {}
    own_log = ranks.get(case.failed.rank, "") if case.failed.rank is not None else ""
    part = part_ended(without_long_lines(f"{own_log}\n{case.raw}"), case.error)
    if not part or case.job.state is not JobState.FAILED:
        return found
    return replace(found, cause=f"{found.cause}; it ended {part}, and may not have ended the rest")


def _of_script(case: Case, found: Explanation) -> Explanation:
    """Return the explanation with what shows that a shell script has gone on after its cause."""
    evidence = case.evidence
    job = case.job
    if job.state is not JobState.FAILED or not is_shell(evidence.script):
        return found
    if is_survived(case.failed, case.raw, job.exit_code):
        own = Failed(host=case.failed.host, exit_code=job.exit_code)
        cause = (
            f"exit code {job.exit_code} of the script, after the failure of a step: {found.cause}"
        )
        return replace(found, code="exit-code", cause=cause, failed=own)
    stderr = evidence.log.removeprefix(evidence.stdout)
    if goes_on_after_errors(evidence.script) and any(
        goes_on_after(without_long_lines(text), case.error) for text in (evidence.stdout, stderr)
    ):
        return _survived(found, "log")
    if case.failed.rank is None and job.exit_code:
        return _of_end(case, found, job.exit_code)
    return found


def _survived(found: Explanation, what: str) -> Explanation:
    """Return the explanation of an error that need not be the end. what: continues after it."""
    cause = f"{found.cause}; the {what} continues after it, so the script may have failed otherwise"
    return replace(found, cause=cause)


def _of_end(case: Case, found: Explanation, exit_code: int) -> Explanation:
    """Return the explanation without what commands wrote that the script went on after."""
    script = case.evidence.script
    error = case.error
    if error.tracebacks:
        frames = error.tracebacks[0].frames
        program = next((frame.file for frame in frames if frame.is_own), "")
        if not is_of_earlier_file(program, script, exit_code):
            return found
        if exit_code != UNCAUGHT:
            bare = replace(case, error=ProgramError("", "", error.shown))
            return _quoting(first_cause(bare), error.tracebacks[0].message.partition("\n")[0])
        return _survived(found, "script")
    lines = error.evidence.split("\n")
    earlier = [line for line in lines if is_of_earlier_command(line, script, exit_code)]
    if not earlier:
        return found
    rest = "\n".join(" " * len(line) if line in earlier else line for line in lines)
    own = first_cause(replace(case, error=replace(error, evidence=rest)))
    return _quoting(own, earlier[-1])


def _quoting(own: Explanation, line: str) -> Explanation:
    """Return the explanation with the error of an earlier command, if nothing else explains the
    end.
    """
    if own.code != "exit-code":
        return own
    said = plain_line(line)[:_COLUMNS]
    return replace(
        own,
        cause=f"{own.cause}; the script continued after this error in its log: {said}",
        fix="`set -x` in the script shows each command, and `set -e` ends the script at the first "
        "that fails",
    )


def diagnose_waiting(
    jobs: Iterable[JobInfo],
    *,
    advice: Advice,
    nodes: Sequence[NodeInfo] = (),
    required: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[Diagnosis]:
    """Yield a diagnosis of each pending job.

    advice: what users can do about the cluster itself. nodes: all nodes; empty if they are unknown.
    required: number of a job -> the nodes that it asks for by name.
    """
    # Jobs that wait for the same reason share a diagnosis, because there may be thousands of them.
    shared: dict[tuple[object, ...], Diagnosis] = {}
    for job in jobs:
        if job.state is not JobState.PENDING:
            continue
        own = tuple((required or {}).get(job.number, ()))
        key = (
            job.reason,
            job.expected_start,
            job.partition,
            job.tres,
            job.time_limit_s,
            job.exceeds,
            own,
        )
        if (found := shared.get(key)) is None:
            found = diagnose(Evidence(job=job, advice=advice, nodes=nodes, required=own))
            if job.id not in found.fix:
                shared[key] = found
        yield replace(found, job_id=job.id, name=job.name)
