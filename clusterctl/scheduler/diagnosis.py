"""Why a job failed or waits: a ``Diagnosis`` of what the scheduler and its logs say.

``diagnose`` is pure; the causes are data (data/causes.toml): the first that fits is named. Of several ranks,
most fail only because one did: which, the launcher's own words tell, and its error is taken from its own
log where there is one.
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

from clusterctl.scheduler.base import JobInfo, JobState, Outcome, StepInfo
from clusterctl.scheduler.failed_rank import Failed, first_failed
from clusterctl.spec.units import format_duration
from clusterctl.transport.tree import shown_size
from clusterctl.util.assets import filled
from clusterctl.util.terminal import plain_line

_DATA: Final = Path(__file__).with_name("data") / "causes.toml"
_FRAMES = 3  # of a traceback, its last
_MESSAGE_LINES = 8  # of an exception
_TAIL_LINES = 10
_COLUMNS = 400
_LONGEST = 2 * _COLUMNS
_WORD_COLUMNS = 200


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One entry of causes.toml, which says what its conditions are; all of them must hold."""

    code: str
    state: str = ""
    reason: str = ""
    log: Sequence[str] = ()
    launcher: Sequence[str] = ()
    signal: str = ""
    exit: int | None = None
    when: Sequence[str] = ()
    cause: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """The whole of causes.toml."""

    noise: Sequence[str]
    consequence: Sequence[str]
    packages: Mapping[str, str]
    causes: Sequence[Cause]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a job. ``log`` is the end of what it wrote, ``ranks`` that of each rank's own log.

    ``ends`` has of each rank that failed when and how, as ``failed_rank`` reads it.

    ``left_here`` tells of a file or module the path beside the script here, if it was not sent; "" if not.
    ``excluded`` are the patterns of what was not to be sent.
    """

    job: JobInfo
    log: str = ""
    ranks: Mapping[int, str] | None = None
    ends: Mapping[int, str] = field(default_factory=dict)
    tasks_per_node: int | None = None
    steps: tuple[StepInfo, ...] = ()
    cancelled_by: str = ""
    left_here: Callable[[str], str] = lambda _: ""
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a job ended or waits. ``state`` is Slurm's word, ``code`` names the cause in causes.toml.

    ``rank`` and ``host`` are of the first rank that failed, ``signal`` is a name such as SIGSEGV; they are
    None or "" where they are not known. ``lines`` are those of its log that matter.
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
        """As `-o json` and run.json have it."""
        said = {name: getattr(self, name) for name in self.__slots__}  # asdict copies each value
        return {**said, "lines": list(self.lines)}

    def with_lines(self, *lines: str) -> Diagnosis:
        return replace(self, lines=lines)

    @property
    def summary(self) -> str:
        """The first line: ``job 12 (train) failed: out of memory on demo-train-2: 3.9 GiB used of 4 GiB``."""
        outcome = JobState(self.state).outcome
        verb = {Outcome.FAILED: "failed", Outcome.CANCELLED: "ended", Outcome.GOES_ON: "waits"}
        return f"job {self.job_id} ({self.name}) {verb.get(outcome, 'completed')}: {self.cause}"

    @property
    def details(self) -> str:
        """The state, and where and how the first rank ended: ``FAILED, rank 1 on n2, exit code 1``."""
        reason = "" if self.reason in {"", "None", "NonZeroExitCode", "JobLaunchFailure"} else self.reason
        code = f"exit code {self.exit_code}" if self.exit_code else ""
        where = str(Failed(rank=self.rank, host=self.host))
        return ", ".join(
            filter(None, (self.state, reason and f"reason {reason}", where, self.signal or code))
        )


@cache
def catalogue() -> Catalogue:
    """What causes.toml says; models would take longer to import than it takes to read."""
    known = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    return Catalogue(causes=[Cause(**row) for row in known.pop("causes")], **known)


def diagnose(evidence: Evidence) -> Diagnosis:
    """Why a job failed, was cancelled or waits."""
    case = _Case.of(evidence)
    job, failed = evidence.job, case.failed
    cause, words = next(
        (one, words) for one in catalogue().causes if (words := case.words_of(one)) is not None
    )
    return Diagnosis(
        job_id=job.id,
        name=job.name,
        state=job.state.value,
        reason=job.reason,
        code=cause.code,
        cause=filled(cause.cause, words),
        fix=filled(cause.fix, words),
        rank=failed.rank,
        host=failed.host,
        exit_code=failed.exit_code,
        signal=failed.signal,
        lines=case.error.lines_of(cause) if job.ended else (),
    )


def waiting(jobs: Iterable[JobInfo]) -> list[Diagnosis]:
    """Return what each of the jobs that wait is waiting for."""
    waits = [job for job in jobs if job.state is JobState.PENDING]
    found: dict[tuple[str, int | None], Diagnosis] = {}
    for job in waits:
        if (key := (job.reason, job.expected_start)) not in found:
            found[key] = diagnose(Evidence(job=job))
    return [replace(found[job.reason, job.expected_start], job_id=job.id, name=job.name) for job in waits]


@dataclass(frozen=True, slots=True)
class _Case:
    """A job's end, in which causes are looked for."""

    evidence: Evidence
    failed: Failed
    raw: str  # all of the log
    error: _Error
    words: Mapping[str, str]

    @classmethod
    def of(cls, evidence: Evidence) -> _Case:
        raw = _readable(evidence.log)
        failed = first_failed(
            raw, evidence.job, evidence.tasks_per_node, ranks=evidence.ranks or {}, ends=evidence.ends
        )
        own = (evidence.ranks or {}).get(failed.rank) if failed.rank is not None else None
        error = _error(None if own is None else _readable(own), raw, show_noise=failed.rank is None)
        words = _words(evidence, failed) | {"traceback": "1" if error.is_traceback else ""}
        return cls(evidence, failed, raw, error, words)

    def words_of(self, cause: Cause) -> dict[str, str] | None:
        """What fills its texts; None unless all of its conditions hold."""
        job, failed, found = self.evidence.job, self.failed, dict(self.words)
        code = failed.exit_code or 0
        if cause.state not in ("", job.state) or cause.signal not in ("", failed.signal):
            return None
        if cause.exit not in (None, code):
            return None
        reasons = (cause.reason,) if cause.reason else ()
        for patterns, text in (
            (reasons, job.reason),
            (cause.launcher, self.raw),
            (cause.log, self.error.text),
        ):
            if patterns:
                if (match := _search(patterns, text)) is None:
                    return None
                found |= {
                    name: plain_line(value)[:_WORD_COLUMNS] for name, value in match.groupdict("").items()
                }
        packages, module = catalogue().packages, found.get("module", "")
        top = module.partition(".")[0]
        found["package"] = packages.get(module) or packages.get(top) or top
        if "peak" in found:
            found["used"] = f": {shown_size(int(found['peak']))} used of {shown_size(int(found['most']))}"
        if "home" in cause.when:
            found["home"] = self.evidence.left_here(found.get("file") or module.replace(".", "/"))
        return found if all(found.get(name) for name in cause.when) else None


def _search(patterns: Iterable[str], text: str) -> re.Match[str] | None:
    return next((match for one in patterns if (match := re.search(one, text, re.MULTILINE))), None)


def _words(evidence: Evidence, failed: Failed) -> dict[str, str]:
    """What can stand in a cause and a fix, as causes.toml says."""
    job, at = evidence.job, str(failed)
    elapsed = (job.end_time or 0) - (job.start_time or 0) if job.start_time else 0
    soon = job.expected_start - time.time() if job.expected_start else 0
    words = {
        "at": f" in {at}" if failed.rank is not None else f" {at}" if at else "",
        "where": f" ({at})" if at else "",
        "by": f" by {evidence.cancelled_by}" if evidence.cancelled_by else "",
        "elapsed": format_duration(elapsed) if elapsed > 0 else "",
        "excluded": f" and without --exclude {shlex.join(evidence.excluded)}" if evidence.excluded else "",
        "soon": f"; Slurm expects to start it in {format_duration(round(soon))}" if soon > 0 else "",
        "exit": str(failed.exit_code or ""),
        "host": failed.host,
        "memory": "" if job.prefix else "ask for more with --mem, ",
        "nodes": ", ".join(job.nodes),
        "rank": "" if failed.rank is None else str(failed.rank),
        "reason": job.reason,
        "signal": failed.signal,
        "slurm": "" if job.prefix else "1",
        "state": job.state.value,
    }
    words["limit"] = f" of {format_duration(job.time_limit_s)}" if job.time_limit_s else ""
    return words | _memory(evidence, failed)


def _memory(evidence: Evidence, failed: Failed) -> dict[str, str]:
    """How much memory was used of how much on a node."""
    match = _MEMORY.search(evidence.job.tres)
    nodes = max(1, len(evidence.job.nodes))
    limit = int(float(match[1]) * _UNITS[match[2]] / nodes) if match else 0
    top = max(evidence.steps, key=lambda step: step.peak, default=StepInfo(""))
    if top.peak < _SEEN * limit:  # Slurm looks now and then, and has seen less than there was at the end
        top = StepInfo("")
    used = f"{shown_size(top.peak)} used" if top.peak else ""
    of = f"{' of' if used else 'more than'} {shown_size(limit)}" if limit else ""
    host = f" on {top.peak_host}" if top.peak_host and not str(failed) else ""
    return {"used": f"{host}: {used}{of}" if used or of else ""}


_SEEN: Final = 0.8
_UNITS: Final = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MEMORY: Final = re.compile(r"\bmem=([0-9.]+)([KMGT]?)")


_LABEL: Final = re.compile(r"^\[(?:rank|default)\d+\]: ?", re.MULTILINE)
_CHAINED: Final = re.compile(r"\n\n(?:During handling of|The above exception was) .*\n\n")
_TRACEBACK: Final = re.compile(
    r"^(?P<frames>(?:Traceback \(most recent call last\):\n)?"
    r"(?:  File .*\n(?:    .*\n|  \[Previous line.*\n)*+)++)"  # possessive: hostile logs take no time
    rf"(?P<message>[A-Za-z_][\w.]*(?:: .*|:)?(?:\n(?!Traceback|\s*$).*){{0,{_MESSAGE_LINES - 1}}})?+",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class _Error:
    """The error as the program said it: causes are looked for in ``text``, and ``shown`` is shown."""

    text: str
    shown: tuple[str, ...]
    is_traceback: bool

    def lines_of(self, cause: Cause) -> tuple[str, ...]:
        """The traceback; else what follows from the line that the cause was found in; else the end."""
        if self.is_traceback or not cause.log:
            return self.shown
        if (found := _search(cause.log, self.text)) is None:
            return self.shown
        rest = self.text[self.text.rfind("\n", 0, found.start() + 1) + 1 :]
        return tuple(_shown_lines(rest.split("\n")))[:_TAIL_LINES]


def _error(own: str | None, whole: str, *, show_noise: bool) -> _Error:
    """The last traceback that is not only about the end of another rank, else the end of the log.

    It is looked for in the ``own`` log of the rank that failed first, then in the ``whole`` of the job's.
    Where there is an own log, what other ranks say of that rank's end is no cause. With ``show_noise``, the
    launcher's words are the error where there is nothing else.
    """
    consequence = re.compile("|".join(catalogue().consequence))
    texts = (_without_noise(own or ""), _without_noise(whole))
    last_resort = texts[1] if own is None or _TRACEBACK.search(texts[0]) else None
    for text in texts:
        chains = list(_chains(text))
        primary = [chain for chain in chains if not consequence.search(chain[-1]["message"])]
        if primary or (chains and text is last_resort):
            chain = (primary or chains)[-1]
            frames = chain[-1]["frames"].splitlines()
            starts = [i for i, line in enumerate(frames) if line.startswith("  File ")]
            shown = [*frames[: starts[0]], *frames[starts[-_FRAMES:][0] :], *chain[-1]["message"].split("\n")]
            said = "\n".join(one.group() for one in chain)
            return _Error(said, tuple(_shown_lines(shown)), is_traceback=True)
    if own is not None and not texts[0].strip():
        others = (line for line in _TRACEBACK.sub("", texts[1]).split("\n") if not consequence.search(line))
        return _Error("\n".join([*others][-_MOST_LINES:]), (), is_traceback=False)
    said = next(filter(str.strip, (*texts, whole if show_noise else "")), "")
    last = [line for line in said.split("\n") if line.strip()]
    shown = list(_shown_lines(last[-_TAIL_LINES:]))
    return _Error("\n".join(last[-_MOST_LINES:]), tuple(shown), is_traceback=False)


_MOST_LINES = 200  # in which a cause is looked for


def _chains(text: str) -> Iterator[list[re.Match[str]]]:
    """Tracebacks, those together of which one was raised while another was handled."""
    chain: list[re.Match[str]] = []
    for match in _TRACEBACK.finditer(text):
        if match["message"] is None:  # frames that no exception follows
            continue
        between = text[chain[-1].end() : match.start()] if chain else ""
        if chain and not _CHAINED.fullmatch(between):
            yield chain
            chain = []
        chain.append(match)
    if chain:
        yield chain


def _shown_lines(lines: list[str]) -> Iterator[str]:
    return (plain_line(line)[-_COLUMNS:] for line in lines)


def _readable(text: str) -> str:
    """Without PyTorch's ``[rank0]: `` before each line, and without the middle of lines that are very long.

    Patterns are looked for in what a job wrote: a line of megabytes would take them hours.
    """
    lines = _LABEL.sub("", text).split("\n")
    return "\n".join(line if len(line) <= _LONGEST else line[:_COLUMNS] + line[-_COLUMNS:] for line in lines)


def _without_noise(text: str) -> str:
    """The log without what only surrounds a failure."""
    for pattern in catalogue().noise:
        text = re.sub(pattern, "", text, flags=re.MULTILINE)
    return text
