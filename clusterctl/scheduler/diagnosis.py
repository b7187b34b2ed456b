"""Diagnosis of a job: why it failed or waits, from the scheduler's answers and the job's logs.

``diagnose`` is a pure function. The possible causes are in data/causes.toml, and those that need
more than a pattern in causes.py; the first cause that matches is the diagnosis. Usually a single
rank fails first, and other ranks fail as a consequence. The launcher's messages tell the first
failed rank, and this rank's own log, if it exists, has the error.
"""

from __future__ import annotations

import re
import shlex
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from clusterctl.scheduler import causes, waiting
from clusterctl.scheduler.attempts import LastAttempt
from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo, Outcome, StepInfo
from clusterctl.scheduler.causes import Explanation
from clusterctl.scheduler.failed_rank import (
    LOST_SERVER,
    Failed,
    failed_by_itself,
    first_failed,
    host_of,
    nodes_lost_by,
)
from clusterctl.scheduler.program_error import (
    End,
    ProgramError,
    find_error,
    search,
    without_long_lines,
)
from clusterctl.spec.units import format_duration
from clusterctl.state.workspace import REPAIR
from clusterctl.transport.tree import format_size
from clusterctl.util.assets import fill_in
from clusterctl.util.terminal import plain_line

_DATA: Final = Path(__file__).with_name("data") / "causes.toml"
# Placeholders for files of this machine.
_LOCAL: Final = frozenset({"above", "beside", "elsewhere", "home", "listed", "own", "venv"})
_WORD_COLUMNS = 200
# Slurm takes a year for jobs without a time limit, so that a later start is no estimate.
_LONGEST_S = 60 * 86_400
# Stands for the job's id in a diagnosis that several jobs share. It can't be in a text of a job.
_JOB: Final = "\0"
# A line ends with this text instead of showing an empty log.
WROTE_NOTHING: Final = "wrote nothing to its log"
_READ_THE_LOG: Final = re.compile(r"read the (?:end of the )?log(?:: `clusterctl logs`|, [^;]*)?")
_NO_LOG: Final = "submit again with more output: `set -x` in a shell script shows each command"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """An entry of causes.toml, which explains the fields. The cause applies if all its conditions
    hold.
    """

    code: str
    state: str = ""
    reason: str = ""
    log: Sequence[str] = ()
    launcher: Sequence[str] = ()
    signal: str = ""
    exit: int | None = None
    when: Sequence[str] = ()
    stop: str = ""
    cause: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """The content of causes.toml. noise, consequence: patterns of messages that are not a job's own
    error.
    """

    noise: Sequence[str]
    consequence: Sequence[str]
    packages: Mapping[str, str]
    causes: Sequence[Cause]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Facts about a job.

    log: end of the job's own log. stdout: the part of it that is the job's stdout, if its stderr is
        another file, so that the order of their lines is unknown. ranks: rank -> end of the rank's
        log.
    ends: failed rank -> record of when and how the rank ended (see ``first_failed``).
    attempt: the job's last attempt. lost: node -> reason of the nodes that stopped answering.
    folder: the folder of the program on the cluster. "": the job's folder.
    left_here: called with a file, or the path of a module, that the job did not find. Returns
        placeholder -> text for the causes that depend on the files of this machine.
    excluded: patterns of files that were not sent (--exclude).
    script: text of the job's script, if this machine still has it as it was sent. "": unknown.
    was_read: whether the job's logs were read, so that an empty log is known to be empty.
    is_foreign: whether other people operate the cluster.
    nodes: all nodes of the cluster, for a waiting job; empty if they are unknown.
    required: the nodes that a waiting job asks for by name.
    """

    job: JobInfo
    log: str = ""
    stdout: str = ""
    ranks: Mapping[int, str] | None = None
    ends: Mapping[int, str] = field(default_factory=dict)
    tasks_per_node: int | None = None
    attempt: LastAttempt = field(default_factory=LastAttempt)
    lost: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[StepInfo, ...] = ()
    cancelled_by: str = ""
    folder: str = ""
    left_here: Callable[..., Mapping[str, str]] = lambda _, is_module: {}  # noqa: ARG005
    excluded: tuple[str, ...] = ()
    script: str = ""
    was_read: bool = False
    is_foreign: bool = False
    nodes: Sequence[NodeInfo] = ()
    required: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Reason why a job ended or waits.

    state: Slurm's state. code: code of the cause in causes.toml. lines: relevant lines of the log.
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

    def for_job(self, job: JobInfo) -> Diagnosis:
        """Return the same diagnosis of another job."""
        return replace(self, job_id=job.id, name=job.name, fix=self.fix.replace(_JOB, job.id))

    @property
    def has_log(self) -> bool:
        """Whether the job may have written a log. A pending job has none."""
        is_empty = any(WROTE_NOTHING in line for line in self.lines[:1])
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
            if self.reason in {"", "None", "NonZeroExitCode", "JobLaunchFailure"}
            else self.reason
        )
        code = f"exit code {self.exit_code}" if self.exit_code else ""
        rank_and_host = str(Failed(rank=self.rank, host=self.host))
        return ", ".join(
            filter(
                None,
                (self.state, reason and f"reason {reason}", rank_and_host, self.signal or code),
            )
        )


@cache
def catalogue() -> Catalogue:
    """Return the content of causes.toml. It is not validated, because pydantic is slow to
    import.
    """
    tables = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    return Catalogue(causes=[Cause(**row) for row in tables.pop("causes")], **tables)


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the reason why a job failed, was cancelled or waits."""
    return _diagnose(evidence).for_job(evidence.job)


def _diagnose(evidence: Evidence) -> Diagnosis:
    """Return a diagnosis with ``_JOB`` in place of the job's id in commands."""
    case = _Case.of(evidence)
    found = case.find()
    if (writer := case.writer_of(found)) != case.failed:
        case = _Case.of(evidence, writer)
        found = case.find()
    code = found.code
    cause = found.cause
    fix = found.fix
    for stop in catalogue().causes:
        if stop.stop and stop.stop == evidence.attempt.stop:
            words = {"cause": found.cause, "fix": found.fix}
            code = stop.code
            cause = fill_in(stop.cause, words)
            fix = fill_in(stop.fix, words)
    if evidence.was_read and not case.error.shown:
        fix = _READ_THE_LOG.sub(_NO_LOG, fix)
    job = evidence.job
    failed = found.failed or case.failed
    return Diagnosis(
        job_id=job.id,
        name=job.name,
        state=job.state.value,
        reason=job.reason,
        code=code,
        cause=cause,
        fix=fix,
        rank=failed.rank,
        host=failed.host,
        exit_code=failed.exit_code,
        signal=failed.signal,
        lines=case.error.lines_from(found.match) if job.ended else (),
    )


def diagnose_waiting(
    jobs: Iterable[JobInfo],
    *,
    is_foreign: bool,
    nodes: Sequence[NodeInfo] = (),
    required: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[Diagnosis]:
    """Yield a diagnosis of each pending job.

    is_foreign: whether other people operate the cluster. nodes: all nodes; empty if they are
        unknown.
    required: number of a job -> the nodes that it asks for by name.
    """
    waits = [job for job in jobs if job.state is JobState.PENDING]
    diagnoses: dict[tuple[object, ...], Diagnosis] = {}
    for job in waits:
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
        if key not in diagnoses:
            evidence = Evidence(job=job, is_foreign=is_foreign, nodes=nodes, required=own)
            diagnoses[key] = _diagnose(evidence)
        yield diagnoses[key].for_job(job)


@dataclass(frozen=True, slots=True)
class _Case:
    """Facts about a job, prepared for the search for a cause. raw: the job's log with shortened
    lines.
    """

    evidence: Evidence
    failed: Failed
    raw: str
    error: ProgramError
    words: Mapping[str, str]

    @classmethod
    def of(cls, evidence: Evidence, failed: Failed | None = None) -> _Case:
        """Prepare the facts. failed: the first rank that failed. None: search for it."""
        raw = without_long_lines(evidence.log)
        failed = failed or first_failed(
            raw,
            evidence.job,
            evidence.tasks_per_node,
            ranks=evidence.ranks or {},
            ends=evidence.ends,
        )
        rank_log = (evidence.ranks or {}).get(failed.rank) if failed.rank is not None else None
        stderr = evidence.log.removeprefix(evidence.stdout)
        end = End.of(
            failed.exit_code,
            failed.signal,
            log=raw,
            script=evidence.script,
            is_ordered=not (evidence.stdout.strip() and stderr.strip()),
        )
        error = find_error(
            None if rank_log is None else without_long_lines(rank_log),
            raw,
            noise=catalogue().noise,
            consequences=catalogue().consequence,
            show_noise=failed.rank is None,
            is_shared=_is_shared(failed, rank_log, raw, evidence.ranks or {}),
            end=end,
        )
        lost = evidence.lost or nodes_lost_by(raw)
        own_end = failed_by_itself(failed, raw, evidence.ends)
        # A rank that loses another rank may also end with an exit code of its own.
        is_explained = own_end is not None and bool(own_end.signal or not lost)
        is_explained |= bool(error.tracebacks) and not error.is_consequence
        if own_end is not None and own_end.signal == "SIGKILL" and own_end.rank is not None:
            # A killed rank had no last words. What it wrote before was not its end.
            error = error if error.tracebacks else replace(error, evidence="")
        if lost and not is_explained:
            failed = Failed(host=next(iter(lost)))
        failed = _largest(failed, raw, evidence.steps)
        words = _words(replace(evidence, lost=lost), failed)
        if _STOPPED.search(raw) and evidence.attempt.signal:
            # The payload stops with the exit code of SIGTERM at each signal.
            failed = replace(failed, signal=evidence.attempt.signal)
            words["sent"] = failed.signal
        words["traceback"] = "1" if error.tracebacks else ""
        words["system"] = "" if error.is_own else "1"
        folder = f"{evidence.folder or evidence.job.work_dir}/"
        if (frame := error.own_frame) is not None:
            words["place"] = f" at {frame.file.removeprefix(folder)}, line {frame.line}"
        words["shadow"] = error.shadow.removeprefix(folder)
        words["unexplained"] = "" if is_explained else "1"
        return cls(evidence, failed, raw, error, words)

    def find(self) -> Explanation:
        """Return the first cause that applies."""
        asked = set()
        for cause in catalogue().causes:
            found = None if cause.code in asked else self._ask_functions(cause.code)
            if found is not None:
                return found
            asked.add(cause.code)
            if not cause.stop and (words := self.words_of(cause)) is not None:
                match = search(cause.log, self.error.evidence)
                return Explanation(
                    cause.code, fill_in(cause.cause, words), fill_in(cause.fix, words), match
                )
        raise AssertionError("the last cause always applies")

    def _ask_functions(self, code: str) -> Explanation | None:
        """Return what the functions before a code in causes.toml find."""
        if self.evidence.job.ended:
            failed = (function(self._failed_job) for function in causes.BEFORE.get(code, ()))
            return next(filter(None, failed), None)
        evidence = self.evidence
        words = self.words
        facts = waiting.WaitingJob(
            job=evidence.job,
            nodes=evidence.nodes,
            required=evidence.required,
            soon=words["soon"],
            repair=words["repair"],
            is_foreign=evidence.is_foreign,
        )
        return next(
            filter(None, (function(facts) for function in waiting.BEFORE.get(code, ()))), None
        )

    @property
    def _failed_job(self) -> causes.FailedJob:
        evidence = self.evidence
        return causes.FailedJob(
            job=evidence.job,
            failed=self.failed,
            raw=self.raw,
            error=self.error,
            at=self.words["at"],
            left_here=lambda name: evidence.left_here(name, is_module=False),
            excluded=self.words["excluded"],
            ended=frozenset(evidence.ends),
            script=evidence.script,
            port=evidence.attempt.port,
        )

    def writer_of(self, cause: Explanation) -> Failed:
        """Return the rank that wrote the text by which ``cause`` applies.

        The rank that failed first may be silent, because the program reports its errors on another
        rank.
        """
        match = cause.match
        if match is None or self.failed.rank is None:
            return self.failed
        line = self.error.text[self.error.text.rfind("\n", 0, match.start()) + 1 :].partition("\n")[
            0
        ]
        writers = [rank for rank, log in (self.evidence.ranks or {}).items() if line in log]
        if len(writers) != 1 or self.failed.rank in writers:
            return self.failed
        host = host_of(writers[0], self.evidence.job, self.evidence.tasks_per_node)
        return replace(self.failed, rank=writers[0], host=host)

    def words_of(self, cause: Cause) -> dict[str, str] | None:
        """If all conditions of a cause hold, return placeholder -> value for its texts; otherwise
        None.
        """
        job = self.evidence.job
        failed = self.failed
        words = dict(self.words)
        code = failed.exit_code or 0
        if cause.state not in ("", job.state) or cause.signal not in ("", failed.signal):
            return None
        if cause.exit not in (None, code):
            return None
        reasons = (cause.reason,) if cause.reason else ()
        for patterns, text in (
            (reasons, job.reason),
            (cause.launcher, self.raw),
            (cause.log, self.error.evidence),
        ):
            if patterns:
                if (match := search(patterns, text)) is None:
                    return None
                words |= {
                    name: plain_line(value)[:_WORD_COLUMNS]
                    for name, value in match.groupdict("").items()
                }
        packages = catalogue().packages
        module = words.get("module", "")
        top_module = module.partition(".")[0]
        words["package"] = packages.get(module) or packages.get(top_module) or top_module
        if "peak" in words:
            words["used"] = (
                f": {format_size(int(words['peak']))} used of {format_size(int(words['most']))}"
            )
        if not _LOCAL.isdisjoint(cause.when):
            name = words.get("file") or module.replace(".", "/")
            words |= self.evidence.left_here(name, is_module="file" not in words)
        return words if all(words.get(name) for name in cause.when) else None


def _is_shared(failed: Failed, rank_log: str | None, log: str, ranks: Mapping[int, str]) -> bool:
    """Return whether several ranks write to the log in which the error is searched."""
    is_of_ranks = failed.rank is not None or len(ranks) > 1 or "\nsrun: error: " in f"\n{log}"
    return (rank_log is None and is_of_ranks) or "ChildFailedError" in log


def _words(evidence: Evidence, failed: Failed) -> dict[str, str]:
    """Return placeholder -> value for texts in causes.toml: the values that are the same for all
    causes.
    """
    job = evidence.job
    place = str(failed)
    elapsed = (job.end_time or 0) - (job.last_start or 0) if job.last_start else 0
    soon = job.expected_start - time.time() if job.expected_start else 0
    hang = evidence.attempt.hang
    silent = hang.duration if hang else ""
    asked = re.search(r"\bnode=(\d+)", job.tres)
    words = {
        "asked": f"{asked[1]} nodes" if asked else "",
        "at": f" in {place}" if failed.rank is not None else f" {place}" if place else "",
        "where": f" ({place})" if place else "",
        "by": f" by {evidence.cancelled_by}" if evidence.cancelled_by else "",
        "elapsed": format_duration(elapsed) if elapsed > 0 else "",
        "excluded": f" and without --exclude {shlex.join(evidence.excluded)}"
        if evidence.excluded
        else "",
        "soon": f"; Slurm expects to start it in {format_duration(round(soon))}"
        if 0 < soon < _LONGEST_S
        else "",
        "exit": str(failed.exit_code or ""),
        "hang": hang.summary if hang and hang.ended_job else "",
        "host": failed.host,
        "lost": ", ".join(evidence.lost),
        # A rank that has lost its slurmstepd ends with an exit code of its own.
        "lost_at": f" on {failed.host}" if failed.exit_code == LOST_SERVER and failed.host else "",
        "lost_why": ", ".join(dict.fromkeys(evidence.lost.values())),
        "job": _JOB,
        "open": "1" if evidence.attempt.is_open else "",
        "memory": "" if job.prefix else "ask for more with --mem, ",
        "nodes": ", ".join(job.nodes),
        "silent": silent if hang and hang.ended_job else "",
        "hung": f"; the job had made no progress for {silent}: {hang.summary}" if hang else "",
        "partition": job.partition,
        "operator": "" if evidence.is_foreign else "1",
        "rank": "" if failed.rank is None else str(failed.rank),
        "reason": job.reason,
        "repair": REPAIR[evidence.is_foreign],
        "signal": failed.signal,
        "slurm": "" if job.prefix else "1",
        "state": job.state.value,
    }
    words["limit"] = f" of {format_duration(job.time_limit_s)}" if job.time_limit_s else ""
    return words | _memory(evidence, failed)


def _largest(failed: Failed, log: str, steps: Sequence[StepInfo]) -> Failed:
    """If slurmstepd killed a whole step for its memory, return the rank with the largest memory."""
    killed = {match[1] for match in _STEP_KILLED.finditer(log)}
    step = next((step for step in steps if step.id in killed and step.peak), None)
    if step is None:
        return failed
    return replace(failed, rank=step.peak_task, host=step.peak_host or failed.host)


def _memory(evidence: Evidence, failed: Failed) -> dict[str, str]:
    match = _MEMORY.search(evidence.job.tres)
    nodes = max(1, len(evidence.job.nodes))
    limit = int(float(match[1]) * _UNITS[match[2]] / nodes) if match else 0
    largest = max(evidence.steps, key=lambda step: step.peak, default=StepInfo(""))
    measured = f"; Slurm measured up to {format_size(largest.peak)}" if largest.peak else ""
    if largest.peak < _SEEN * limit:
        # Slurm samples the memory at intervals, and has missed the peak.
        largest = StepInfo("")
    used = f"{format_size(largest.peak)} used" if largest.peak else ""
    of_limit = f"{' of' if used else 'more than'} {format_size(limit)}" if limit else ""
    host = f" on {largest.peak_host}" if largest.peak_host and not str(failed) else ""
    return {
        "used": f"{host}: {used}{of_limit}" if used or of_limit else "",
        "measured": f"{measured} of {format_size(limit)}" if measured and limit else measured,
        "nearly": f"{format_size(largest.peak)} of its {format_size(limit)}"
        if used and limit
        else "",
    }


_STOPPED: Final = re.compile(r"^stopped by a signal; ", re.MULTILINE)
_STEP_KILLED: Final = re.compile(
    r"^slurmstepd\S*: error: StepId=(\S+) exceeded (?:job |step )?memory limit", re.MULTILINE
)
_SEEN: Final = 0.8
_UNITS: Final = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MEMORY: Final = re.compile(r"\bmem=([0-9.]+)([KMGT]?)")
