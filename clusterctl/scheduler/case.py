"""The case of a job whose cause is searched: the facts that were collected, and what follows from
them.

Usually a single rank fails first, and other ranks fail as a consequence. The launcher's messages
tell the first failed rank, and this rank's own log, if it exists, has the error.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

from clusterctl.scheduler.advice import OWN, Advice
from clusterctl.scheduler.base import JobInfo, NodeInfo, StepInfo
from clusterctl.scheduler.failed_rank import (
    Failed,
    failed_by_itself,
    first_failed,
    host_of,
    nodes_lost_by,
    with_reported_signal,
)
from clusterctl.scheduler.history import LOST_SERVER, Attempt
from clusterctl.scheduler.program_error import (
    End,
    ProgramError,
    find_error,
    without_long_lines,
)
from clusterctl.spec.units import format_duration
from clusterctl.transport.tree import format_size
from clusterctl.util.terminal import plain_line

# Slurm takes a year for jobs without a time limit, so that a later start is no estimate.
_LONGEST_S = 60 * 86_400
_GROUP_COLUMNS = 200
_GROUP: Final = re.compile(r"ExceptionGroup: .* \((\d+) sub-exceptions\)$", re.MULTILINE)
# Slurm samples the memory of a rank at intervals. A smaller share of the limit is not the peak.
_SEEN: Final = 0.8
# The end of a fix that is to read the log.
SHOW_LOG: Final = "`clusterctl logs`"
_UNITS: Final = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MEMORY: Final = re.compile(r"\bmem=([0-9.]+)([KMGT]?)")
_STOPPED: Final = re.compile(r"^stopped by a signal; ", re.MULTILINE)
_STEP_KILLED: Final = re.compile(
    r"^slurmstepd\S*: error: StepId=(\S+) exceeded (?:job |step )?memory limit", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What this machine has of a file or a module that a job did not find. Empty: nothing. The
    paths are quoted for a shell.

    home: the pattern for --include that selects only the file or folder.
    above: the folder that --folder must name.
    partly: the folder that was sent without some of its files.
    venv: the virtual environment that contains the file.
    inside: the file's path below the program's folder, if it was sent and the program searches the
        job's folder.
    elsewhere: the module's place in another folder of the repository. root: that folder.
    beside: the value that PYTHONPATH needs; of a file: the folder in which it was sent.
    own: the package of the user that lacks the module.
    """

    home: str = ""
    above: str = ""
    partly: str = ""
    venv: str = ""
    inside: str = ""
    elsewhere: str = ""
    root: str = ""
    beside: str = ""
    own: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packages:
    """Where a job has its packages of Python from, and from where it could have them. The values
    are quoted for a shell.

    listed: the file that lists packages: of the job, or beside its program.
    way: what to do about the file beside the program if only another tool reads it.
    choices: normalized name -> the value of --requirements, for packages of extras and groups that
        the job did not choose.
    image: of --container. environment: of --env-path.
    """

    listed: str = ""
    way: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    environment: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Facts about a job.

    log: end of the job's own log. stdout: the part of it that is the job's stdout, if its stderr is
        another file, so that the order of their lines is unknown. ranks: rank -> end of the rank's
        log.
    ends: failed rank -> record of when and how the rank ended (see ``first_failed``).
    attempt: the job's last attempt. lost: node -> reason of the nodes that stopped answering.
    unfit: node -> what it lacks to run jobs, of the nodes of a job that could not start there.
    folder: the folder of the program on the cluster. "": the job's folder.
    left_here: called with a file, or the path of a module, that the job did not find. Returns what
        this machine has of it.
    packages: called if the job lacks a package of Python. Returns from where it could have it.
    excluded: patterns of files that were not sent (--exclude).
    script: text of the job's script, if this machine still has it as it was sent. "": unknown.
    was_read: whether the job's logs were read, so that an empty log is known to be empty.
    is_full: whether the file system of the job's folder has no room, so that it may lack lines.
    advice: what users can do about the cluster itself.
    nodes: all nodes of the cluster, for a waiting job; empty if they are unknown.
    required: the nodes that a waiting job asks for by name.
    """

    job: JobInfo
    log: str = ""
    stdout: str = ""
    ranks: Mapping[int, str] | None = None
    ends: Mapping[int, str] = field(default_factory=dict)
    tasks_per_node: int | None = None
    attempt: Attempt = field(default_factory=Attempt)
    lost: Mapping[str, str] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[StepInfo, ...] = ()
    cancelled_by: str = ""
    folder: str = ""
    left_here: Callable[..., Here] = lambda _, is_module: Here()  # noqa: ARG005
    packages: Callable[[], Packages] = Packages
    excluded: tuple[str, ...] = ()
    script: str = ""
    was_read: bool = False
    is_full: bool = False
    advice: Advice = OWN
    nodes: Sequence[NodeInfo] = ()
    required: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job failed or waits.

    match: the text in the log's evidence that shows it, if it is in the log.
    failed: the rank that failed first, if it is another than in ``Case``.
    """

    code: str
    cause: str
    fix: str
    match: re.Match[str] | None = None
    failed: Failed | None = None


def fix_with_log(fix: str, command: str) -> str:
    """Return a fix with the command that shows the job's log: once, if the fix is to read it."""
    if fix.endswith(SHOW_LOG):
        return f"{fix.removesuffix(SHOW_LOG)}{command}"
    return f"{fix}; the whole log: {command}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job whose cause is searched. The properties are words for the texts of causes; "" if they
    are unknown.

    failed: the first rank that failed. raw: the job's log with shortened lines, and with the
        launcher's messages. error: the program's error in the logs.
    lost: node -> reason of the nodes that stopped answering.
    is_explained: whether a rank failed by itself, not because a node was lost.
    sent: the signal at which a bundled job stopped, or "".
    groups: the named groups of the patterns of the cause that is being tried.
    """

    evidence: Evidence
    failed: Failed
    raw: str
    error: ProgramError
    lost: Mapping[str, str]
    is_explained: bool
    sent: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, evidence: Evidence, failed: Failed | None = None) -> Self:
        """Prepare the facts. failed: the first rank that failed. None: search for it."""
        raw = without_long_lines(evidence.log)
        failed = failed or first_failed(
            raw,
            evidence.job,
            evidence.tasks_per_node,
            ranks=evidence.ranks or {},
            ends=evidence.ends,
        )
        error = _error_of(evidence, failed, raw)
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
        attempt = evidence.attempt
        failed = with_reported_signal(failed, raw, (attempt.how, attempt.signal))
        sent = attempt.signal if _STOPPED.search(raw) else ""
        if sent:
            # The payload stops with the exit code of SIGTERM at each signal.
            failed = replace(failed, signal=sent, exit_code=None)
        return cls(
            evidence=evidence,
            failed=failed,
            raw=raw,
            error=error,
            lost=lost,
            is_explained=is_explained,
            sent=sent,
        )

    def with_groups(self, *matches: re.Match[str] | None) -> Self:
        """Return the case with the named groups of the matches, shortened to a plain line."""
        groups = {
            # A carriage return inside a message must not hide the part before it.
            name: plain_line(value.rstrip("\r").replace("\r", " "))[:_GROUP_COLUMNS]
            for match in matches
            if match is not None
            for name, value in match.groupdict("").items()
        }
        return replace(self, groups=groups) if groups else self

    def __getitem__(self, name: str) -> str:
        """Return the text of a named group; "" if the group took no part in the match."""
        return self.groups[name]

    def writer_of(self, match: re.Match[str] | None) -> Failed:
        """Return the rank that wrote the text of a match in the error.

        The rank that failed first may be silent, because the program reports its errors on another
        rank.
        """
        if match is None or self.failed.rank is None:
            return self.failed
        start = self.error.text.rfind("\n", 0, match.start()) + 1
        line = self.error.text[start:].partition("\n")[0]
        writers = [rank for rank, log in (self.evidence.ranks or {}).items() if line in log]
        if len(writers) != 1 or self.failed.rank in writers:
            return self.failed
        host = host_of(writers[0], self.job, self.evidence.tasks_per_node)
        return replace(self.failed, rank=writers[0], host=host)

    # --- The job ---------------------------------------------------------------------------------
    @property
    def job(self) -> JobInfo:
        return self.evidence.job

    @property
    def repair(self) -> str:
        """How to repair the cluster, as an instruction."""
        return self.evidence.advice.repair

    @property
    def is_operator(self) -> bool:
        """Whether the reader operates the cluster."""
        return self.evidence.advice.is_operator

    @property
    def is_open(self) -> bool:
        """Whether the job has recorded no end."""
        return self.evidence.attempt.is_open

    @property
    def wrote_nothing(self) -> bool:
        """Whether the log is known to be empty."""
        return self.evidence.was_read and not self.error.shown

    @property
    def nodes(self) -> str:
        """The job's nodes, separated by commas."""
        return ", ".join(self.job.nodes)

    @property
    def on_node(self) -> str:
        """The job's first node as an argument of `clusterctl ssh`, if the reader may log in there."""
        return f" {self.job.nodes[0]}" if self.is_operator and self.job.nodes else ""

    @property
    def asked(self) -> str:
        """The number of nodes that the job asks for: ``4 nodes``."""
        asked = re.search(r"\bnode=(\d+)", self.job.tres)
        return f"{asked[1]} nodes" if asked else ""

    @property
    def soon(self) -> str:
        """Slurm's estimate of the start: ``; Slurm expects to start it in 5m``."""
        soon = self.job.expected_start - time.time() if self.job.expected_start else 0
        is_near = 0 < soon < _LONGEST_S
        return f"; Slurm expects to start it in {format_duration(round(soon))}" if is_near else ""

    @property
    def elapsed(self) -> str:
        """How long the last attempt took."""
        job = self.job
        elapsed = (job.end_time or 0) - job.last_start if job.last_start else 0
        return format_duration(elapsed) if elapsed > 0 else ""

    @property
    def limit(self) -> str:
        """The job's time limit: `` of 2h``."""
        return f" of {format_duration(self.job.time_limit_s)}" if self.job.time_limit_s else ""

    @property
    def by(self) -> str:
        """The user who cancelled the job: `` by ada``."""
        return f" by {self.evidence.cancelled_by}" if self.evidence.cancelled_by else ""

    @property
    def excluded(self) -> str:
        """`` and without --exclude data``, if that was used."""
        excluded = self.evidence.excluded
        return f" and without --exclude {shlex.join(excluded)}" if excluded else ""

    @property
    def hung(self) -> str:
        """The hang that lasted until the end, as a clause."""
        hang = self.evidence.attempt.hang
        if hang is None:
            return ""
        return f"; the job had made no progress for {hang.duration}: {hang.summary}"

    # --- The place of the failure ----------------------------------------------------------------
    @property
    def at(self) -> str:
        """The place of the failure: `` in rank 1 on demo-train-2``."""
        place = str(self.failed)
        return f" in {place}" if self.failed.rank is not None else f" {place}" if place else ""

    @property
    def where(self) -> str:
        """The place of the failure in parentheses: `` (rank 1 on demo-train-2)``."""
        place = str(self.failed)
        return f" ({place})" if place else ""

    @property
    def group(self) -> str:
        """That the exception is one of several: ``, one of 2 exceptions of an ExceptionGroup``."""
        sizes = _GROUP.findall(self.raw)
        return f", one of {sizes[-1]} exceptions of an ExceptionGroup" if sizes else ""

    @property
    def place(self) -> str:
        """The last line of the program in the traceback: `` at train.py, line 7``."""
        frame = self.error.own_frame
        return f" at {self._below(frame.file)}, line {frame.line}" if frame is not None else ""

    @property
    def shadow(self) -> str:
        """The program's file that a library imported in place of a package."""
        return self._below(self.error.shadow)

    def _below(self, file: str) -> str:
        """Return the path of a file below the program's folder."""
        return file.removeprefix(f"{self.evidence.folder or self.job.work_dir}/")

    @property
    def unfit(self) -> str:
        """What nodes lack to run jobs: ``the shared folder /shared is not mounted (n2)``."""
        return "; ".join(f"{lack} ({node})" for node, lack in self.evidence.unfit.items())

    @property
    def lost_nodes(self) -> str:
        """The nodes that stopped answering."""
        return ", ".join(self.lost)

    @property
    def lost_why(self) -> str:
        """Slurm's reasons why nodes were lost."""
        return ", ".join(dict.fromkeys(self.lost.values()))

    @property
    def lost_at(self) -> str:
        """The node of a rank that lost its slurmstepd, and so ended with an exit code of its
        own.
        """
        failed = self.failed
        return f" on {failed.host}" if failed.exit_code == LOST_SERVER and failed.host else ""

    # --- Memory ----------------------------------------------------------------------------------
    @property
    def more_memory(self) -> str:
        """``ask for more with --mem, ``, if Slurm runs the jobs."""
        return "" if self.job.prefix else "ask for more with --mem, "

    @property
    def used(self) -> str:
        """The memory of the largest rank, if it was near the limit: ``: 3.9 GiB used of 4 GiB``."""
        largest = self._largest_seen
        used = f"{format_size(largest.peak)} used" if largest.peak else ""
        limit = self._memory_limit
        of_limit = f"{' of' if used else 'more than'} {format_size(limit)}" if limit else ""
        host = f" on {largest.peak_host}" if largest.peak_host and not str(self.failed) else ""
        return f"{host}: {used}{of_limit}" if used or of_limit else ""

    @property
    def measured(self) -> str:
        """The largest memory that Slurm knows: ``; Slurm measured up to 1.0 GiB of 4.0 GiB``."""
        peak = self._largest.peak
        if not peak:
            return ""
        of_limit = f" of {format_size(self._memory_limit)}" if self._memory_limit else ""
        return f"; Slurm measured up to {format_size(peak)}{of_limit}"

    @property
    def nearly(self) -> str:
        """The largest memory of a rank, if it was near the limit: ``3.9 GiB of its 4 GiB``."""
        peak = self._largest_seen.peak
        limit = self._memory_limit
        return f"{format_size(peak)} of its {format_size(limit)}" if peak and limit else ""

    @property
    def _memory_limit(self) -> int:
        """The memory of the job on each node, in bytes; 0 if it is unknown."""
        match = _MEMORY.search(self.job.tres)
        nodes = max(1, len(self.job.nodes))
        return int(float(match[1]) * _UNITS[match[2]] / nodes) if match else 0

    @property
    def _largest(self) -> StepInfo:
        """The step with the largest memory that Slurm measured."""
        return max(self.evidence.steps, key=lambda step: step.peak, default=StepInfo(""))

    @property
    def _largest_seen(self) -> StepInfo:
        """The step with the largest memory; an empty step if Slurm has missed the peak."""
        largest = self._largest
        return StepInfo("") if largest.peak < _SEEN * self._memory_limit else largest


def _error_of(evidence: Evidence, failed: Failed, raw: str) -> ProgramError:
    """Return the program's error. raw: the job's log with shortened lines."""
    ranks = evidence.ranks or {}
    rank_log = ranks.get(failed.rank) if failed.rank is not None else None
    stderr = evidence.log.removeprefix(evidence.stdout)
    end = End.of(
        failed.exit_code,
        failed.signal,
        log=raw,
        script=evidence.script,
        is_ordered=not (evidence.stdout.strip() and stderr.strip()),
    )
    return find_error(
        None if rank_log is None else without_long_lines(rank_log),
        raw,
        show_noise=failed.rank is None,
        is_shared=_is_shared(failed, rank_log, raw, ranks),
        end=end,
    )


def _is_shared(failed: Failed, rank_log: str | None, log: str, ranks: Mapping[int, str]) -> bool:
    """Return whether several ranks write to the log in which the error is searched."""
    is_of_ranks = failed.rank is not None or len(ranks) > 1 or "\nsrun: error: " in f"\n{log}"
    return (rank_log is None and is_of_ranks) or "ChildFailedError" in log


def _largest(failed: Failed, log: str, steps: Sequence[StepInfo]) -> Failed:
    """If slurmstepd killed a whole step for its memory, return the rank with the largest memory."""
    killed = {match[1] for match in _STEP_KILLED.finditer(log)}
    step = next((step for step in steps if step.id in killed and step.peak), None)
    if step is None:
        return failed
    return replace(failed, rank=step.peak_task, host=step.peak_host or failed.host)
