"""Diagnosis of a job that failed, was cancelled, or waits, for people and programs.

``diagnose`` is a pure function of the evidence. Each step runs once, and none looks back: the facts
(facts.py), the lines that are shown (excerpt.py), the cause, if Slurm, the kernel or job.py states it
(known.py, waiting_causes.py), and hints about the shown lines (hints.py, certain_hints.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Final

from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo, plain, reason_in_words
from clusterctl.scheduler.ends.certain_hints import certain_hints, hints_of_frames, hints_of_script
from clusterctl.scheduler.ends.ending import show_log
from clusterctl.scheduler.ends.excerpt import BY_ANOTHER, OF_OTHERS, Excerpt, excerpt_of
from clusterctl.scheduler.ends.facts import Evidence, Facts
from clusterctl.scheduler.ends.failed_rank import FailedRank
from clusterctl.scheduler.ends.hints import Hint, hint_of_end, hinted_lines, usual_hint
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
class Diagnosis:
    """Why a job ended or waits, as far as it is known.

    known: the cause, if Slurm, the kernel or job.py states it. was_read: whether the log was read.
    note: text in place of the log's lines, such as why the log can't be read. "": no text.
    """

    facts: Facts
    known: Cause | None
    excerpt: Excerpt = field(default_factory=Excerpt)
    hints: tuple[Hint, ...] = ()
    was_read: bool = False
    note: str = ""

    def with_note(self, note: str) -> Diagnosis:
        return replace(self, note=note)

    @property
    def job_id(self) -> str:
        return self.facts.job.id

    @property
    def state(self) -> str:
        """Slurm's state."""
        return self.facts.job.state.value

    @property
    def failed(self) -> FailedRank:
        """The rank that failed first."""
        return (self.known and self.known.failed) or self.facts.failed

    @property
    def rank(self) -> int | None:
        return self.failed.rank

    @property
    def host(self) -> str:
        return self.failed.host

    @property
    def exit_code(self) -> int | None:
        """The exit code, also 128 + N beside the signal N if the job itself ended with that."""
        of_job = self.facts.job.exit_code
        return of_job if of_job == self.failed.in_a_shell else self.failed.exit_code

    @property
    def signal(self) -> str:
        """The name of the signal, or ""."""
        return self.failed.signal

    @property
    def code(self) -> str:
        """The code of the known cause; otherwise how the job ended: python-exception, signal, exit-code,
        or unknown.
        """
        return (self.known or self._end).code

    @property
    def cause(self) -> str:
        """The known cause, otherwise the facts: ``exit code 1 in rank 3 on n2; last exception at
        fit.py:12: ValueError: odd``.
        """
        return (self.known or self._end).what

    @property
    def fix(self) -> str:
        """The fix: for the known cause, otherwise of the first certain hint, or to read the log."""
        return (self.known or self._end).fix

    @property
    def _end(self) -> Cause:
        """How the job ended, in place of a cause."""
        facts, fix = self.facts, self._fix_of_end
        failed, at, said = facts.failed, facts.at, self._last_words
        if self._is_by_exception:
            return Cause(
                code="python-exception", what=f"{facts.end}{at}; last exception{said}", fix=fix
            )
        if failed.signal:
            return Cause(code="signal", what=f"{failed.signal}{at}{said}", fix=fix)
        if failed.exit_code:
            return Cause(code="exit-code", what=f"exit code {failed.exit_code}{at}{said}", fix=fix)
        reason = reason_in_words(facts.job.reason) or "no reason given"
        return Cause(code="unknown", what=f"{self.state}{at}: {reason}{said}", fix=fix)

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
        if self.was_read and not self.excerpt.lines:
            return _NO_LOG
        unknown = "a hint above may help" if self.hints else "not known"
        return f"{unknown}; the whole log: {show_log(self.facts.job.id)}"

    @property
    def remarks(self) -> list[str]:
        """Other facts that may explain the end, without what the cause says, and the hints."""
        facts = self.facts
        # Without a known cause, the cause has the rank and its end.
        is_known = self.known is not None and facts.end != self.state
        first = [f"the first end: {facts.end}{facts.at}"] if is_known else []
        remarks = [each for each in (*first, *facts.remarks) if self.cause not in each]
        return [*remarks, *(hint.told(self.fix) for hint in self.hints)]

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as `-o json` and run.json show it."""
        job = self.facts.job
        return {
            "job_id": job.id,
            "name": job.name,
            "state": self.state,
            "reason": job.reason,
            "code": self.code,
            "cause": self.cause,
            "fix": self.fix,
            "rank": self.rank,
            "host": self.host,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "remarks": self.remarks,
            "lines": list(self.excerpt.lines),
            "note": self.note,
            "facts": self.facts.as_dict(),
            "shown": plain(self.excerpt),
            "hints": [hint.as_dict() for hint in self.hints],
        }


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis of a job that has ended, or waits."""
    facts = Facts.of(evidence)
    if evidence.job.state is JobState.PENDING:
        return Diagnosis(facts=facts, known=waiting_cause(evidence))
    excerpt = excerpt_of(evidence, facts.failed) if evidence.job.ended else Excerpt()
    known = known_cause(facts, evidence, excerpt)
    return Diagnosis(
        facts=facts,
        known=known,
        excerpt=excerpt,
        hints=tuple(_hints(facts, known, excerpt, evidence)),
        was_read=evidence.was_read,
    )


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
        yield replace(found, facts=replace(found.facts, job=job))
