"""The evidence that was collected about a job, and the facts that follow from it.

Usually a single rank fails first, and other ranks fail as a consequence. The launcher's messages
tell the first failed rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo, StepInfo
from clusterctl.scheduler.ends.diagnosis import EndFacts
from clusterctl.scheduler.ends.failed_rank import (
    FailedRank,
    failed_by_itself,
    first_failed,
    is_survived,
    nodes_lost_by,
    signal_name,
    with_reported_signal,
)
from clusterctl.scheduler.ends.log_text import without_long_lines
from clusterctl.scheduler.history import LOST_SLURMSTEPD, Attempt
from clusterctl.scheduler.sites.advice import OWN, Advice
from clusterctl.util import formatting

# Slurm samples the memory of a rank at intervals. A smaller share of the limit is not the peak.
_NEAR: Final = 0.8
_UNITS: Final = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MEMORY: Final = re.compile(r"\bmem=([0-9.]+)([KMGT]?)")
# Shells that continue after a command that fails.
_SHELL: Final = re.compile(r"#!.*\b(?:ba|da|k|z)?sh\b")
_STEP_KILLED: Final = re.compile(
    r"^slurmstepd\S*: error: StepId=(\S+) exceeded (?:job |step )?memory limit", re.MULTILINE
)
_NO_PROGRESS: Final = "no-progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMatch:
    """The place on this machine of a file or module that a job did not find. Empty: not found. The
    paths are quoted for a shell.

    home: the pattern for --include that selects only the file or folder.
    above: the folder that --folder must name.
    venv: the virtual environment that contains the file.
    inside: the file's path below the program's folder, if it was sent and the program searches the
        job's folder.
    elsewhere: the module's place in another folder of the repository. root: that folder.
    beside: the value that PYTHONPATH needs.
    own: the package of the user that lacks the module.
    """

    home: str = ""
    above: str = ""
    venv: str = ""
    inside: str = ""
    elsewhere: str = ""
    root: str = ""
    beside: str = ""
    own: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packages:
    """The sources of a job's Python packages: the ones in use, and possible ones. The values are
    quoted for a shell.

    listed: the file that lists packages: of the job, or beside its program.
    way: the advice on a file beside the program that only another tool reads.
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
    unfit: node -> its unmet need, for nodes on which the job could not start.
    folder: the folder of the program on the cluster. "": the job's folder.
    left_here: called with a file, or the path of a module, that the job did not find. Returns its
        place on this machine.
    packages: called if the job lacks a package of Python. Returns the possible sources of the
        package.
    excluded: patterns of files that were not sent (--exclude).
    script: text of the job's script, if this machine still has it as it was sent. "": unknown.
    was_read: whether the job's logs were read, so that an empty log is known to be empty. unread:
        why they were not, for people.
    is_full: whether the file system of the job's folder has no room, so that it may lack lines.
    advice: remedies on the cluster itself.
    nodes: all nodes of the cluster, for a waiting job. Empty: unknown.
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
    left_here: Callable[..., LocalMatch] = lambda _, is_module: LocalMatch()  # noqa: ARG005
    packages: Callable[[], Packages] = Packages
    excluded: tuple[str, ...] = ()
    script: str = ""
    was_read: bool = False
    unread: str = ""
    is_full: bool = False
    advice: Advice = OWN
    nodes: Sequence[NodeInfo] = ()
    required: Sequence[str] = ()


def is_shell(script: str) -> bool:
    """Return whether a script is a shell script, by its first line."""
    return _SHELL.match(script) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """How a job ended, as Slurm, the launcher and job.py report it.

    failed: the first rank that failed, its host, and its exit code or signal.
    is_by_itself: whether the rank failed by itself, and was not ended because another rank failed.
    handled: the rank whose failure the job's script has survived. None: there is no such rank.
    lost: node that stopped answering -> reason. unfit: node that could not start the job -> reason.
    peak, peak_host: largest memory of a task that Slurm measured, in bytes, and its node. 0: unknown.
    memory_limit: memory of the job on each node, in bytes. 0: unknown.
    elapsed_s: duration of the last attempt, in seconds. 0: unknown.
    sent: the signal at which a bundled job stopped and saved its work, or "".
    """

    job: JobInfo
    failed: FailedRank
    is_by_itself: bool
    handled: FailedRank | None
    lost: Mapping[str, str]
    unfit: Mapping[str, str]
    peak: int
    peak_host: str
    memory_limit: int
    elapsed_s: int
    cancelled_by: str
    attempt: Attempt
    sent: str

    @classmethod
    def of(cls, evidence: Evidence) -> Facts:
        """Return the facts that follow from the evidence."""
        job = evidence.job
        log = without_long_lines(evidence.log)
        attempt = evidence.attempt
        failed = first_failed(
            log,
            job,
            evidence.tasks_per_node,
            ranks=evidence.ranks or {},
            ends=evidence.ends,
            killed_at=attempt.killed_at,
        )
        lost = evidence.lost or nodes_lost_by(log)
        own_end = failed_by_itself(
            failed, log, evidence.ends, is_srun_killed=LOST_SLURMSTEPD in attempt.causes
        )
        failed = with_reported_signal(
            _largest(failed, log, evidence.steps), log, (attempt.how, attempt.signal)
        )
        handled = None
        is_failed = job.state is JobState.FAILED
        if is_failed and is_shell(evidence.script) and is_survived(failed, log, job.exit_code):
            handled = failed
            only_node = job.nodes[0] if len(job.nodes) == 1 else ""
            failed = FailedRank(host=only_node, exit_code=job.exit_code)
        sent = attempt.signal if attempt.interrupted else ""
        if sent:
            # The payload stops with the exit code of SIGTERM at each signal.
            failed = replace(failed, signal=sent, exit_code=None)
        memory = _MEMORY.search(job.tres)
        largest = max(evidence.steps, key=lambda step: step.peak, default=StepInfo(""))
        return cls(
            job=job,
            failed=failed,
            is_by_itself=own_end is not None and bool(own_end.signal or not lost),
            handled=handled,
            lost=lost,
            unfit=evidence.unfit,
            peak=largest.peak,
            peak_host=largest.peak_host,
            memory_limit=(
                int(float(memory[1]) * _UNITS[memory[2]] / max(1, len(job.nodes))) if memory else 0
            ),
            elapsed_s=job.known_attempts[-1].seconds if job.known_attempts else 0,
            cancelled_by=evidence.cancelled_by,
            attempt=attempt,
            sent=sent,
        )

    @property
    def end(self) -> str:
        """How the rank ended: ``exit code 3``, ``SIGSEGV``, or the job's state."""
        code = f"exit code {self.failed.exit_code}" if self.failed.exit_code else ""
        return self.failed.signal or code or self.job.state.value

    @property
    def at(self) -> str:
        """The place of the failure: `` in rank 1 on n2``, or ""."""
        place = str(self.failed)
        return f" in {place}" if self.failed.rank is not None else f" {place}" if place else ""

    @property
    def is_near_limit(self) -> bool:
        """Whether the memory was near its limit."""
        return bool(self.memory_limit) and self.peak >= _NEAR * self.memory_limit

    @property
    def memory(self) -> str:
        """The largest memory of a task: ``3.9 GiB of 4.0 GiB``."""
        limit = f" of {formatting.size(self.memory_limit)}" if self.memory_limit else ""
        return f"{formatting.size(self.peak)}{limit}"

    @property
    def unfit_nodes(self) -> str:
        """The unmet needs of nodes, such as ``the shared folder /shared is not mounted (n2)``."""
        return "; ".join(f"{lack} ({node})" for node, lack in self.unfit.items())

    @property
    def remarks(self) -> Iterator[str]:
        """Other facts that may explain the end, a line each."""
        attempt = self.attempt
        if self.handled is not None:
            code = self.handled.signal or f"exit code {self.handled.exit_code}"
            yield f"the script continued after {code} {self.handled}"
        elif (
            self.failed.rank is not None
            and self.job.exit_code
            and self.job.exit_code != self.failed.in_a_shell
        ):
            name = signal_name(self.job.exit_code)
            yield (
                f"the job itself ended with exit code {self.job.exit_code}"
                f"{f', as a shell does after {name}' if name else ''}"
            )
        if self.peak and (self.is_near_limit or self.failed.signal == "SIGKILL"):
            on = f" on {self.peak_host}" if self.peak_host else ""
            yield f"memory: Slurm measured up to {self.memory}{on}"
        for node, why in self.lost.items():
            yield f"lost node: {node}{f' ({why})' if why else ''}"
        if self.unfit:
            yield f"unfit node: {self.unfit_nodes}"
        if attempt.hang:
            yield f"hang: {attempt.hang}"
        for alarm in attempt.alarms:
            yield f"alarm: {alarm}"
        if attempt.stop == _NO_PROGRESS:
            yield (
                "not restarted: the job had failed several times in a row without a newer checkpoint "
                "or step"
            )

    @property
    def told(self) -> EndFacts:
        attempt = self.attempt
        return EndFacts(
            elapsed_s=self.elapsed_s or None,
            time_limit_s=self.job.time_limit_s,
            memory_peak=self.peak or None,
            memory_limit=self.memory_limit or None,
            lost=dict(self.lost),
            unfit=dict(self.unfit),
            cancelled_by=self.cancelled_by,
            not_restarted=attempt.stop,
            hang=str(attempt.hang) if attempt.hang else "",
            alarms=tuple(str(alarm) for alarm in attempt.alarms),
        )


def _largest(failed: FailedRank, log: str, steps: Sequence[StepInfo]) -> FailedRank:
    """If slurmstepd killed a whole step for its memory, return the rank with the largest memory."""
    killed = {match[1] for match in _STEP_KILLED.finditer(log)}
    step = next((step for step in steps if step.id in killed and step.peak), None)
    if step is None:
        return failed
    return replace(failed, rank=step.peak_task, host=step.peak_host or failed.host)
