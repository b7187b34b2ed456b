"""Diagnosis of a job that failed, was cancelled, or waits.

``diagnose`` is a pure function of the evidence. Each step runs once, and none looks back: the facts
(facts.py), the lines that are shown (excerpt.py), the cause, if Slurm, the kernel or job.py states it
(known.py, waiting_causes.py), and hints about the shown lines (hints.py, certain_hints.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final

from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo, reason_in_words
from clusterctl.scheduler.ends.certain_hints import certain_hints, hints_of_frames, hints_of_script
from clusterctl.scheduler.ends.diagnosis import Diagnosis, Hint, show_log
from clusterctl.scheduler.ends.excerpt import BY_ANOTHER, OF_JOB, OF_OTHERS, Excerpt, excerpt_of
from clusterctl.scheduler.ends.facts import Evidence, Facts
from clusterctl.scheduler.ends.failed_rank import FailedRank
from clusterctl.scheduler.ends.hints import hint_of_end, hinted_lines, usual_hint
from clusterctl.scheduler.ends.known import Cause, known_cause
from clusterctl.scheduler.ends.log_text import short
from clusterctl.scheduler.ends.waiting_causes import waiting_cause
from clusterctl.scheduler.sites.advice import Advice

# The fix if the log is empty.
_NO_LOG: Final = "submit again with more output: `set -x` in a shell script shows each command"
# Causes that name the failed part without the reason, which the program's lines may tell.
_WITH_HINTS: Final = frozenset({"build-failed", "module-not-loaded", "time-limit"})
# A certain hint that holds however the program failed.
_OF_ANY_END: Final = "other-scheduler"
# Python ends with this exit code at an uncaught exception.
_UNCAUGHT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A job, what is known of it, and the cause, if Slurm, the kernel or job.py states it."""

    facts: Facts
    evidence: Evidence
    known: Cause | None
    excerpt: Excerpt
    hints: tuple[Hint, ...]

    @property
    def diagnosis(self) -> Diagnosis:
        job = self.facts.job
        excerpt = self.excerpt
        told = self.known or self._end
        failed = (self.known and self.known.failed) or self.facts.failed
        return Diagnosis(
            job_id=job.id,
            name=job.name,
            state=job.state.value,
            reason=job.reason,
            code=told.code,
            cause=told.what,
            fix=told.fix,
            rank=failed.rank,
            host=failed.host,
            exit_code=(job.exit_code if job.exit_code == failed.in_a_shell else failed.exit_code),
            signal=failed.signal,
            remarks=self._remarks(told.what),
            hints=self.hints,
            source="" if excerpt.source == OF_JOB else excerpt.source,
            lines=excerpt.lines,
            last_line=excerpt.last_complaint,
            note="" if excerpt.lines or not job.ended else self._why_no_lines(failed),
            facts=self.facts.told,
        )

    def _why_no_lines(self, failed: FailedRank) -> str:
        evidence = self.evidence
        if evidence.unread:
            return evidence.unread
        if not evidence.was_read:
            return ""
        if evidence.is_full:
            return "the job's log is empty, and the file system of its folder is full"
        writer = "the job" if failed.rank is None else f"rank {failed.rank}"
        return f"{writer} wrote nothing to its log"

    @property
    def _end(self) -> Cause:
        """How the job ended, in place of a cause."""
        facts = self.facts
        failed = facts.failed
        at = facts.at
        said = self._last_words
        fix = self._fix_of_end
        if self._is_by_exception:
            return Cause(
                code="python-exception", what=f"{facts.end}{at}; last exception{said}", fix=fix
            )
        if failed.signal:
            return Cause(code="signal", what=f"{failed.signal}{at}{said}", fix=fix)
        if failed.exit_code:
            return Cause(code="exit-code", what=f"exit code {failed.exit_code}{at}{said}", fix=fix)
        reason = reason_in_words(facts.job.reason) or "no reason given"
        return Cause(code="unknown", what=f"{facts.job.state.value}{at}: {reason}{said}", fix=fix)

    @property
    def _is_by_exception(self) -> bool:
        """Whether the end of the log is an exception, with which Python can have ended so."""
        failed = self.facts.failed
        is_possible = not failed.signal and failed.exit_code in {None, 0, _UNCAUGHT}
        excerpt = self.excerpt
        is_last = not excerpt.last and excerpt.beside_of != "stderr" and not excerpt.part
        is_own = excerpt.source != OF_OTHERS
        return is_possible and bool(excerpt.exception) and is_last and is_own

    @property
    def _last_words(self) -> str:
        """The last exception, unless many lines come after it. The last line is left out: often it does
        not say why, such as `Execution halted`.
        """
        excerpt = self.excerpt
        if not excerpt.exception or excerpt.between:
            return ""
        part = f" in {excerpt.part}" if excerpt.part else ""
        part += f" of {OF_OTHERS}" if excerpt.source == OF_OTHERS else ""
        place = f" at {excerpt.place}" if excerpt.place else ""
        exception = f"{part}{place}: {short(excerpt.exception)}"
        return exception if self._is_by_exception else f"; last exception{exception}"

    @property
    def _fix_of_end(self) -> str:
        # The program may have gone on after another line.
        end = self.excerpt.exception if self._is_by_exception else self.excerpt.last_line
        certain = (hint for hint in self.hints if hint.is_certain and hint.line in {"", end})
        if hint := next((hint for hint in certain if hint.name != _OF_ANY_END), None):
            return hint.fix
        if self.evidence.was_read and not self.excerpt.lines:
            return _NO_LOG
        unknown = "a hint above may help" if self.hints else "no remedy is known"
        return f"{unknown}; the whole log: {show_log(self.facts.job.id)}"

    def _remarks(self, cause: str) -> tuple[str, ...]:
        """Return other facts that may explain the end, without what the cause says."""
        facts = self.facts
        # Without a known cause, the cause has the rank and its end.
        is_known = self.known is not None and facts.end != facts.job.state.value
        first = [f"the first process to end: {facts.end}{facts.at}"] if is_known else []
        return tuple(each for each in (*first, *facts.remarks) if cause not in each)


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis of a job that has ended, or waits."""
    facts = Facts.of(evidence)
    if evidence.job.state is JobState.PENDING:
        waits = waiting_cause(evidence)
        case = _Case(facts=facts, evidence=evidence, known=waits, excerpt=Excerpt(), hints=())
        return case.diagnosis
    excerpt = excerpt_of(evidence, facts.failed) if evidence.job.ended else Excerpt()
    known = known_cause(facts, evidence, excerpt)
    case = _Case(
        facts=facts,
        evidence=evidence,
        known=known,
        excerpt=excerpt,
        hints=tuple(_hints(facts, known, excerpt, evidence)),
    )
    return case.diagnosis


def _hints(
    facts: Facts, known: Cause | None, excerpt: Excerpt, evidence: Evidence
) -> Iterator[Hint]:
    """Yield a hint about the end, then those about the script.

    The first is a certain one, or else the usual meaning of the line that ended the job, or else that
    of the signal or the exit code.
    """
    if known is not None and known.code not in _WITH_HINTS:
        return
    lines = [*hinted_lines(excerpt)]
    said = chain(
        hints_of_frames(excerpt), certain_hints(lines, evidence), usual_hint(lines, evidence)
    )
    end = hint_of_end(facts) if known is None else ()
    ways = (end, said) if facts.failed.signal in BY_ANOTHER else (said, end)
    for hint in (*islice(chain(*ways), 1), *hints_of_script(evidence)):
        yield _of_job(hint, facts.job.id)


def _of_job(hint: Hint, job_id: str) -> Hint:
    """Return a hint with the number of the job in its commands."""
    return replace(hint, fix=hint.fix.replace("clusterctl logs ID", f"clusterctl logs {job_id}"))


def diagnose_waiting(
    jobs: Iterable[JobInfo],
    *,
    advice: Advice,
    nodes: Sequence[NodeInfo] = (),
    required: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[Diagnosis]:
    """Yield a diagnosis of each pending job.

    advice: remedies on the cluster itself. nodes: all nodes. Empty: unknown.
    required: number of a job -> the nodes that it asks for by name.
    """
    # Jobs that wait for the same reason share a cause, because there may be thousands of them.
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
            own,
        )
        if (found := shared.get(key)) is None:
            found = diagnose(Evidence(job=job, advice=advice, nodes=nodes, required=own))
            if job.id not in found.fix:
                shared[key] = found
        yield replace(found, job_id=job.id, name=job.name)
