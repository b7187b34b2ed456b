"""Run a job undisturbed, then once for each fault, and judge whether it survives. Only on a local
cluster.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.phases import provider_of
from clusterctl.cluster.up import UpOptions, up
from clusterctl.errors import Failure, Notice, RehearsalError, SchedulerError, UsageError
from clusterctl.jobs.bundled import reject_invalid_arguments
from clusterctl.jobs.prepare import Preparer, Submission, read_jobs
from clusterctl.jobs.queue import known_jobs
from clusterctl.jobs.submit import PreparedJob, Submitter
from clusterctl.jobs.watch import diagnosis_of, raise_unless_completed
from clusterctl.providers.base import Provider
from clusterctl.rehearse.observation import Observation, looks_of, results_of
from clusterctl.rehearse.verdict import (
    Fault,
    FaultResult,
    RunWithFault,
    RunWithoutFault,
    best_interval_s,
    explained,
    hangs_too_often,
    is_identical,
    judge,
    not_survived,
)
from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec
from clusterctl.util import formatting
from clusterctl.util.progress import LineReporter

# The shortest silence that may be a hang, and the length of a job after a fault at most: so many
# times its undisturbed length, and so many seconds for restarts and hangs.
SILENCE_S = 10
LONGEST_TIMES = 3
LONGEST_MORE_S = 120.0
# How long an undisturbed job may run, and how often its job fails, by default.
LIMIT_S = 600.0
MTBF_S = 172_800.0
# How long a job may take to save and end after the signal, besides the time of a checkpoint.
_GRACE_S = 10.0
# Slurm reports a job that it is going to requeue as ended, but only for a moment.
_SURE_S = 2.0
_STATE_S = 1.0
_SETTLED_S = 10.0
# A job that waits longer than this after the loss of its node finds no other node that is free and fits.
_WAITS_S = 5.0
_DEFAULT_SIGNAL: Final = "USR1"
# Cuts the largest file of a checkpoint to its half, as a crash in the middle of a write would.
_TEAR: Final = """\
IFS=' ' read -r size file < <(find "$1" -type f -printf '%s %p\\n' | sort -nr)
[ "$size" -gt 0 ] && truncate -s $((size / 2)) -- "$file"
"""
_NO_CHECKPOINTS: Final = (
    "the job wrote no checkpoint, so each restart begins from zero: rehearse it with a shorter "
    "interval of checkpoints"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The result of a rehearsal. mtbf_s: the assumed mean time between failures of the job."""

    name: str
    undisturbed: RunWithoutFault
    trials: tuple[FaultResult, ...]
    mtbf_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the result as `-o json` shows it."""
        observed = self.undisturbed.observed
        best_s = self.best_interval_s
        return {
            "name": self.name,
            "undisturbed": {
                "job_id": observed.job_id,
                "seconds": round(observed.seconds, 1),
                "steps": observed.last_step_before,
                "checkpoints": [write.as_dict() for write in observed.writes],
                "files": {
                    **self.undisturbed.results["checkpoints"],
                    **self.undisturbed.results["outputs"],
                },
            },
            "faults": [each.as_dict() for each in self.trials],
            "save_s": observed.save_s,
            "interval_s": observed.interval_s,
            "best_interval_s": best_s,
            "mtbf_s": self.mtbf_s,
        }

    @property
    def best_interval_s(self) -> float | None:
        save_s = self.undisturbed.observed.save_s
        return None if save_s is None else round(best_interval_s(save_s, self.mtbf_s), 1)

    @property
    def survives(self) -> bool:
        return not not_survived(self.trials)

    def raise_unless_survived(self) -> None:
        """Raise RehearsalError with each fault that the job did not survive."""
        failed = not_survived(self.trials)
        if failed:
            causes = {
                each.fault: ", ".join(filter(None, (each.verdict, each.cause))) for each in failed
            }
            error = RehearsalError(
                f"{self.name} did not survive {len(failed)} of {len(self.trials)} faults",
                why="\n".join(f"{fault}: {cause}" for fault, cause in causes.items()),
                fix="docs/restarts.md explains the lines that the program lacks",
                failures=tuple(
                    Failure(RehearsalError.code, f"{f}: {cause}", about=RehearsalError.about)
                    for f, cause in causes.items()
                ),
            )
            error.answer = self.as_dict()
            raise error


def job_to_rehearse(target: str, options: Mapping[str, object]) -> JobSpec:
    """Return the job for a target of `rehearse`. options: as for ``read_jobs``.

    Raises:
        UsageError, SpecError: there is no such job, an option is wrong, or there are several jobs
            or tasks.
    """
    jobs = read_jobs(target, {**options, "requeue": True, "hang": f"end@{SILENCE_S}"})
    if len(jobs) > 1 or jobs[0].array:
        raise UsageError(
            f"{target} has several jobs or tasks",
            about="rehearsal",
            why="a rehearsal runs a single job several times",
            fix="name the script of a single job",
        )
    reject_invalid_arguments(jobs)
    return jobs[0]


@dataclass(frozen=True)
class Rehearser:
    """Runs the jobs of a rehearsal. report: called with each line about its progress.

    limit_s: how long the undisturbed job may run. mtbf_s: the assumed mean time between failures of
        the job.
    """

    session: Session
    report: LineReporter
    limit_s: float = LIMIT_S
    mtbf_s: float = MTBF_S

    def rehearse(self, preparer: Preparer, job: JobSpec, faults: Sequence[Fault]) -> Rehearsal:
        """Run the job without a fault, and then with each of ``faults``.

        Raises:
            UsageError: the cluster is not local, or has no Slurm, or the job takes too long.
            JobFailedError, JobCancelledError: the job fails without a fault.
        """
        reject_other_clusters(self.session)
        self._provider.start_ahead()
        (prepared,) = preparer.prepare(self.session, Submission.of((job,)))
        undisturbed = self._undisturbed(prepared)
        if not undisturbed.observed.writes:
            self.report(Notice("no-checkpoints", _NO_CHECKPOINTS))
            faults = [fault for fault in faults if fault is not Fault.CHECKPOINT_TORN]
        prepared = replace(prepared, token="")
        runs = [self._disturbed(prepared, fault, undisturbed) for fault in faults]
        # The length of a training may also differ from run to run.
        if any(judge(undisturbed, run).may_be_chance for run in runs):
            undisturbed = self._compared(prepared, undisturbed)
        trials = explained([judge(undisturbed, run) for run in runs])
        return Rehearsal(
            name=prepared.job.name, undisturbed=undisturbed, trials=trials, mtbf_s=self.mtbf_s
        )

    @cached_property
    def _provider(self) -> Provider:
        return provider_of(self.session.spec.provider)

    @cached_property
    def _cluster_id(self) -> str:
        return self.session.workspace.cluster_id()

    def _undisturbed(self, prepared: PreparedJob) -> RunWithoutFault:
        name = prepared.job.name
        with self._job(prepared, "without a fault") as observed:
            for _ in self._watch(observed, self.limit_s):
                pass
            if not observed.state:
                raise UsageError(
                    f"{name} has not ended within {formatting.duration(int(self.limit_s))}",
                    code="wait-timeout",
                    about="rehearsal",
                    fix="rehearse a training with fewer steps, or use a longer --timeout",
                )
            raise_unless_completed(self.session, [self._info(observed)])
            results = results_of(self.session.transport, observed.folder)
        observed.select_checkpoints()
        self.report(f"{name} takes {observed.seconds:.0f} s without a fault")
        return RunWithoutFault(observed, results)

    def _compared(self, prepared: PreparedJob, undisturbed: RunWithoutFault) -> RunWithoutFault:
        """Run the job without a fault again, to find out whether its results are always the
        same.
        """
        again = self._undisturbed(prepared)
        steps = min(undisturbed.observed.last_step, again.observed.last_step)
        undisturbed = replace(undisturbed, fewest_steps=steps)
        same_numbers = undisturbed.newest_checkpoint == again.newest_checkpoint
        if same_numbers and is_identical(undisturbed.results, again.results) is not False:
            return undisturbed
        text = "the job's results differ from run to run without a fault, so they are not compared"
        self.report(Notice("results-not-repeatable", text))
        return replace(undisturbed, repeats=False)

    def _disturbed(
        self, prepared: PreparedJob, fault: Fault, undisturbed: RunWithoutFault
    ) -> RunWithFault:
        longest_s = LONGEST_TIMES * undisturbed.observed.seconds + LONGEST_MORE_S
        with self._job(prepared, fault) as observed:
            observed.numbered = undisturbed.observed.numbered
            for _ in self._watch(observed, longest_s):
                if observed.fault_at is None and _is_due(fault, undisturbed.observed, observed):
                    self._cause(fault, prepared.job, observed)
                elif observed.killed and observed.waits_s > _WAITS_S:
                    self._start(observed)
                elif fault is Fault.TIME_LIMIT and _ignores_signal(observed):
                    self._signal_ranks(observed, signal.SIGKILL)
                if hangs_too_often(fault, observed):
                    break
            has_completed = observed.state == JobState.COMPLETED
            results = results_of(self.session.transport, observed.folder) if has_completed else {}
            cause = "" if has_completed else self._cause_of_end(observed)
        disturbed = RunWithFault(fault, observed, results, cause)
        self.report(f"{fault}: {judge(undisturbed, disturbed).verdict} ({observed.seconds:.0f} s)")
        return disturbed

    @contextmanager
    def _job(self, prepared: PreparedJob, note: str) -> Iterator[Observation]:
        """Submit a job, and yield its observation. Afterwards, end it, and start a node that was
        killed.
        """
        noted = prepared.job.model_copy(update={"note": f"rehearsal: {note}"})
        submitted = Submitter(self.session, self.report).submit(
            replace(prepared, request=prepared.request.of(noted))
        )
        observed = Observation(submitted.job_id, submitted.remote_dir)
        try:
            yield observed
        finally:
            if not observed.state:
                with suppress(SchedulerError):
                    self.session.scheduler.cancel([observed.job_id])
                # Processes that are stopped do not end by SIGTERM.
                self._signal_ranks(observed, signal.SIGKILL)
            self._start(observed)

    def _watch(self, observed: Observation, longest_s: float) -> Iterator[None]:
        """Update ``observed``, and yield, until the job has ended or ``longest_s`` seconds have
        passed.
        """
        asked = time.monotonic()
        ended = 0.0
        deadline = asked + longest_s
        with closing(looks_of(self.session.transport, observed.folder)) as looks:
            for look in looks:
                observed.add(look)
                now = time.monotonic()
                if now - asked > _STATE_S or observed.has_ended:
                    job = self._info(observed)
                    observed.waits = (
                        job.reason or "no reason" if job.state is JobState.PENDING else ""
                    )
                    observed.waits_s = observed.waits_s + now - asked if observed.waits else 0.0
                    asked = now
                    ended = (ended or now) if job.ended else 0.0
                    if ended and (now - ended > _SURE_S or observed.has_ended):
                        observed.state = job.state.value
                        return
                yield
                if now > deadline:
                    return

    def _info(self, observed: Observation) -> JobInfo:
        return known_jobs(self.session, [observed.job_id])[0]

    def _cause(self, fault: Fault, job: JobSpec, observed: Observation) -> None:
        """Cause a fault, and record its time in ``observed`` if it could be caused."""
        at = time.time()
        run = self.session.transport.run
        if fault is Fault.NODE_KILLED:
            hit = self._kill_host(observed)
        elif fault is Fault.TIME_LIMIT:
            name = (job.signal or _DEFAULT_SIGNAL).partition("@")[0]
            hit = not run(
                ["scancel", "--batch", f"--signal={name}", observed.job_id], check=False
            ).rc
        elif fault is Fault.CHECKPOINT_TORN:
            hit = self._signal_ranks(observed, signal.SIGKILL) and self._tear(observed)
        else:
            number = signal.SIGKILL if fault is Fault.RANK_KILLED else signal.SIGSTOP
            hit = self._signal_ranks(observed, number, last=True)
        observed.fault_at = at if hit else None

    def _tear(self, observed: Observation) -> bool:
        """Tear the newest checkpoint, now that no rank writes any more. Return whether it is
        torn.
        """
        with closing(looks_of(self.session.transport, observed.folder)) as looks:
            observed.add(next(looks))
        argv = ["bash", "-c", _TEAR, "tear", f"{observed.folder}/{observed.writes[-1].path}"]
        return not self.session.transport.run(argv, check=False).rc

    def _kill_host(self, observed: Observation) -> bool:
        """Kill the last node of the job. Start it again at once if the job needs it."""
        nodes = self._info(observed).nodes
        if not nodes:
            return False
        observed.killed = nodes[-1]
        self._provider.kill_host(self._cluster_id, observed.killed)
        if not any(
            node.usable and node.name not in nodes for node in self.session.scheduler.nodes()
        ):
            self._start(observed)
        return True

    def _start(self, observed: Observation) -> None:
        """Start the node that was killed, by `up`."""
        if observed.killed:
            self.report(Notice("rehearsal-repairs", f"starting {observed.killed} again"))
            up(ClusterContext.of(self.session.spec, workspace=self.session.workspace), UpOptions())
            observed.killed = ""

    def _signal_ranks(
        self, observed: Observation, number: signal.Signals, *, last: bool = False
    ) -> bool:
        """Send a signal to all ranks or to the last. Return whether there was such a rank."""
        return bool(
            self._provider.signal_ranks(self._cluster_id, observed.job_id, number, last=last)
        )

    def _cause_of_end(self, observed: Observation) -> str:
        """Return in words why the job has not completed."""
        if observed.waits:
            return f"it was not started again: {observed.waits}"
        if hang := observed.history[-1].hang:
            return hang.summary
        diagnosis = diagnosis_of(self.session, [self._info(observed)])
        return diagnosis.cause if diagnosis else "it made no progress"


def reject_other_clusters(session: Session) -> None:
    """Raise UsageError unless the cluster is local and has Slurm, which restarts jobs."""
    if not session.spec.provider.shares_kernel:
        raise UsageError(
            "a rehearsal needs a local cluster",
            code="unsupported",
            about="rehearsal",
            why="it kills processes and nodes",
            fix="use a spec with `provider: {type: local}`; `clusterctl init` writes such a spec",
        )
    session.site.reject_without_slurm()


def _is_due(fault: Fault, undisturbed: Observation, observed: Observation) -> bool:
    """Return whether the job has made enough progress for the fault: a checkpoint, or half of its
    time.
    """
    half_s = undisturbed.seconds / 2
    running_s = time.time() - min(observed.starts, default=time.time())
    # A hang is noticed sooner if a few changes of the job's files have shown how often they change.
    if not undisturbed.writes or (
        fault is Fault.RANK_FROZEN and running_s < min(half_s, _SETTLED_S)
    ):
        return running_s > half_s
    # If the newest checkpoint is torn, the job may continue from the previous.
    return len(observed.writes) > (fault is Fault.CHECKPOINT_TORN and len(undisturbed.writes) > 1)


def _ignores_signal(observed: Observation) -> bool:
    """Return whether the job has not ended in time after the signal that announces its time
    limit.
    """
    if observed.fault_at is None or observed.history[-1].end:
        return False
    grace_s = _GRACE_S + 2 * (observed.save_s or 0.0)
    return observed.restarted is None and time.time() > observed.fault_at + grace_s
