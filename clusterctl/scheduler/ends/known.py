"""The causes that Slurm, the kernel or job.py state, for which a job ended.

The output of a program is never a cause here: excerpt.py selects lines of it, and hints.py explains
known messages. To add a cause, add it to the rule of its source (Slurm, the kernel, job.py). A rule
tries its causes from the top, and ``_RULES`` has the order of the rules.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from clusterctl.scheduler.base import NO_LOG_SIGNAL, JobInfo, JobState
from clusterctl.scheduler.ends.excerpt import Excerpt
from clusterctl.scheduler.ends.facts import Evidence, Facts
from clusterctl.scheduler.ends.failed_rank import FailedRank, signal_name
from clusterctl.scheduler.ends.log_text import compiled, short, without_long_lines
from clusterctl.scheduler.history import LOST_SERVER, LOST_SLURMSTEPD, left_mpi
from clusterctl.scheduler.sites.advice import ANOTHER_FOLDER
from clusterctl.util import formatting

_EXAMINE: Final = "`clusterctl doctor` shows what the node lacks"
_AGAIN: Final = "submit again; without --no-requeue, Slurm returns the job to the queue by itself"
_CONTINUE: Final = "continue with the command at the end of the log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a job ended or waits. failed: the rank that failed first, if the cause knows it better."""

    code: str
    what: str
    fix: str
    failed: FailedRank | None = None


# Of a job of which tasks inside it failed.
PACKED_TASKS: Final = "packed-tasks"
# The fix for each cause that job.py, or the program that knows it, has recorded: see
# ``Attempt.causes``. task: the number of the first failed task of a pack.
_FIXES: Final = {
    "build-failed": "correct what these lines say; build.log of the run has the whole output, and "
    "--module NAME loads a compiler of the site",
    "module-not-loaded": "`clusterctl ssh -- 'bash -lc \"module avail\"'` lists the modules",
    "secrets-gone": "submit the job again, or `clusterctl replay RUN`: values are removed with their "
    "job",
    "not-staged": "correct SOURCE:TARGET of --set stage=; both are paths on the nodes",
    "image-unfit": "correct --container or --mount, or what the node lacks; `clusterctl submit --help` "
    "names the kinds of images",
    PACKED_TASKS: "`clusterctl logs {job}_{task}` shows the output of the first; after "
    "`clusterctl collect`, `clusterctl replay {job} --failed` runs them again",
}
_COLUMNS: Final = 400
_PROLOG: Final = r"^slurmstepd\S*: error: Prolog failure on node (?P<node>\S+)"
# Slurm's lines about memory. The step that they name belongs to the job.
_OUT_OF_MEMORY: Final = (
    r"^(?:srun|slurmstepd\S*): error: (?:.*?StepId=(?P<job>\d+)\S* )?.*?(?:exceeded \w* ?memory limit"
    r"(?: \((?P<peak>\d+) > (?P<most>\d+)\))?|[Oo]ut [Oo]f [Mm]emory$|oom.kill event"
    r"(?: in StepId=(?P<job2>\d+))?)"
)
_NO_STEPD: Final = r"^srun: error: Timed out waiting for job step to complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A job whose cause is searched. log: with shortened lines, and with the launcher's messages."""

    facts: Facts
    evidence: Evidence
    excerpt: Excerpt
    log: str

    @property
    def is_silent(self) -> bool:
        """Whether the log is known to be empty."""
        return (
            self.evidence.was_read
            and not self.log.strip()
            and not any(text.strip() for text in (self.evidence.ranks or {}).values())
        )

    @property
    def is_explained(self) -> bool:
        """Whether a rank failed by itself, not because a node was lost."""
        has_exception = bool(self.excerpt.exception) and not self.excerpt.is_consequence
        return self.facts.is_by_itself or has_exception

    @property
    def by(self) -> str:
        by = self.facts.cancelled_by
        return f" by {by}" if by else ""

    @property
    def saved(self) -> str:
        """That the work is saved: ``; its work is saved after iteration 253``, or ""."""
        iteration = self.facts.attempt.saved_iteration
        return f"; its work is saved after iteration {iteration}" if iteration else ""

    @property
    def examine(self) -> str:
        """The command that shows the unmet needs of a node."""
        advice = self.evidence.advice
        return _EXAMINE if advice.is_operator else advice.repair


def known_cause(facts: Facts, evidence: Evidence, excerpt: Excerpt) -> Cause | None:
    """Return the cause that Slurm, the kernel or job.py states, or None."""
    case = _Case(
        facts=facts, evidence=evidence, excerpt=excerpt, log=without_long_lines(evidence.log)
    )
    cause = next((cause for rule in _RULES for cause in rule(case)), None)
    if cause is not None and cause.failed is None and facts.lost and not case.is_explained:
        return replace(cause, failed=FailedRank(host=next(iter(facts.lost))))
    return cause


def _never_ran(case: _Case) -> Iterator[Cause]:
    """Yield why Slurm did not run the job."""
    facts, job = case.facts, case.facts.job
    has_run = job.nodes or job.elapsed_s or job.prefix
    if not has_run and job.state is JobState.NODE_FAIL:
        yield Cause(
            code="never-started",
            what="the job never started: a node or partition that it asked for left the cluster",
            fix="submit again, for nodes and a partition that `clusterctl status` shows",
        )
    if not has_run and job.state is JobState.FAILED:
        yield Cause(
            code="never-started",
            what=f"the job never started: Slurm rejected it ({job.reason or 'no reason given'})",
            fix="submit again, and ask for no more than `clusterctl status` shows",
        )
    if job.signal == NO_LOG_SIGNAL and facts.unfit:
        is_operator = case.evidence.advice.is_operator
        more = ": the node gets no job until this is corrected" if is_operator else ""
        yield Cause(
            code="node-unfit",
            what="the job could not start, because Slurm could not open its log; its node is now "
            f"drained: {facts.unfit_nodes}",
            fix=f"submit again{more}; {case.examine}",
        )
    if job.state is JobState.CANCELLED and (prolog := compiled(_PROLOG).search(case.log)):
        unfit = f": {facts.unfit_nodes}" if facts.unfit else ""
        yield Cause(
            code="node-unfit",
            what=f"node {prolog['node']} did not pass the check that Slurm runs before a job "
            f"(Prolog){unfit}",
            fix=f"{_AGAIN}; {case.examine}",
        )
    if job.signal == NO_LOG_SIGNAL and case.is_silent:
        nodes = ", ".join(job.nodes)
        on_node = f" {job.nodes[0]}" if job.nodes else ""
        fix = (
            f"`clusterctl ssh{on_node} -- namei -l {shlex.quote(job.work_dir or '.')}` shows which "
            "folder is missing or not the user's: correct it, and submit again; `clusterctl doctor` "
            "shows if a file system is not mounted"
        )
        if not case.evidence.advice.is_operator:
            # The login node has written the job's files into this folder.
            fix = ANOTHER_FOLDER
        yield Cause(
            code="log-not-writable",
            what=f"the job could not start: Slurm could not open its log on {nodes or 'its node'}, "
            f"because {job.work_dir or 'its folder'} is missing there or the user may not write to it",
            fix=fix,
        )
    if re.search(r"user.env|GETENV", job.reason):
        yield Cause(
            code="user-environment",
            what="the login environment of the job's user could not be read",
            fix="check ~/.bashrc and ~/.profile on the cluster (`clusterctl ssh`)",
        )


def _by_state(case: _Case) -> Iterator[Cause]:
    """Yield the cause that Slurm's state of the job tells."""
    facts, job, saved = case.facts, case.facts.job, case.saved
    match job.state:
        case JobState.NODE_FAIL:
            yield _lost_node(case)
        case JobState.PREEMPTED:
            yield Cause(
                code="preempted",
                what="preempted by a job of higher priority",
                fix="submit again; with --requeue and checkpoints, Slurm restarts the job and it "
                "continues from its last checkpoint",
            )
        case JobState.CANCELLED if "DependencyNeverSatisfied" in job.reason:
            yield Cause(
                code="cancelled",
                what="cancelled, because a job that this job depends on failed",
                fix="submit again without that dependency",
            )
        case JobState.CANCELLED:
            yield Cause(
                code="cancelled",
                what=f"cancelled{case.by}{saved}",
                fix=f"if the job was ended by mistake, {_CONTINUE if saved else 'submit it again'}",
            )
        case JobState.REVOKED:
            yield Cause(
                code="revoked",
                what="another cluster of the federation runs the job",
                fix="look for the job on that cluster with `squeue --federation`",
            )
        case JobState.BOOT_FAIL:
            yield Cause(
                code="boot-failure",
                what=f"the job's node could not start the job: {job.reason or 'no reason given'}",
                fix=f"{case.evidence.advice.repair}, then submit again",
            )
        case JobState.DEADLINE:
            yield Cause(
                code="deadline",
                what="the job could not end before its deadline",
                fix="submit again without --deadline, or with a shorter --time",
            )
        case JobState.TIMEOUT:
            limit = f" of {formatting.duration(job.time_limit_s)}" if job.time_limit_s else ""
            after = formatting.duration(facts.elapsed_s) if facts.elapsed_s else "an unknown time"
            hang = facts.attempt.hang
            hung = f"; the job had made {hang}" if hang else ""
            longer = (
                "if it was still at work, use a longer --time, such as --time 2h; with --signal and "
                "--requeue a program can save its work before the limit and go on"
            )
            by_itself = f"{_CONTINUE}; with --requeue, the job continues by itself"
            yield Cause(
                code="time-limit",
                what=f"time limit{limit} reached after {after}{hung}{saved}",
                fix=by_itself if saved else longer,
            )
        case JobState.PURGED:
            yield Cause(
                code="no-record",
                what="Slurm no longer has a record of the job",
                fix="look for the job's folder on the cluster with `clusterctl ssh`; it may still "
                "exist",
            )


def _by_supervisor(case: _Case) -> Iterator[Cause]:
    """Yield why job.py, which supervises the job, has ended it."""
    attempt = case.facts.attempt
    if attempt.stop == "chain-over":
        yield Cause(
            code="stopped-chain-over",
            what="the time of --set chain= is over",
            fix="submit again with a longer --set chain=; with --from-run, `train` continues from its "
            "newest checkpoint",
        )
    if attempt.hang and attempt.hang.ended_job:
        yield Cause(
            code="hang",
            what=f"{attempt.hang}",
            fix="correct the program where the ranks wait; if the program was only slow, use --hang "
            "warn",
        )
    for alarm in attempt.alarms[::-1]:
        if alarm.ended_job:
            yield Cause(
                code="alarm",
                what=str(alarm),
                fix="correct the cause of the waste; if it is intended, use --set alarm="
                f"{alarm.kind}=warn",
            )


def killed_for_memory(job: JobInfo, log: str) -> re.Match[str] | None:
    """Return the first line with which Slurm says that it or the kernel killed processes of the job
    for their memory, or None. The job's script may have survived that.

    log: of the job, with the launcher's messages.
    """
    for match in compiled(_OUT_OF_MEMORY).finditer(log):
        # A program may print such a line of another job.
        told = match["job"] or match["job2"]
        if job.task is not None or told in (None, str(job.number)):
            return match
    return None


def _by_memory(case: _Case) -> Iterator[Cause]:
    """Yield that Slurm or the kernel has ended processes for their memory."""
    facts, job = case.facts, case.facts.job
    more = "" if job.prefix else "ask for more with --mem, "
    fix = f"{more}use more nodes, or a smaller batch"
    match = killed_for_memory(job, case.log)
    # A script may have survived that, and have failed for another reason.
    if job.state is not JobState.OUT_OF_MEMORY and (match is None or facts.handled):
        return
    used = ""
    if match is not None and match["peak"]:
        peak, most = (formatting.size(int(match[name])) for name in ("peak", "most"))
        used = f": {peak} used of {most}"
    elif facts.is_near_limit:
        used = f": {formatting.size(facts.peak)} used of {formatting.size(facts.memory_limit)}"
    elif facts.memory_limit:
        used = f": more than {formatting.size(facts.memory_limit)}"
    elif facts.peak:
        used = f": {formatting.size(facts.peak)} used"
    on = f" on {facts.peak_host}" if facts.is_near_limit and facts.peak_host else ""
    yield Cause(code="out-of-memory", what=f"out of memory{facts.at or on}{used}", fix=fix)


def _by_loss(case: _Case) -> Iterator[Cause]:
    """Yield that a node, or the processes of Slurm on it, were lost."""
    facts, job = case.facts, case.facts.job
    is_killed = job.state is JobState.FAILED and "RaisedSignal:9" in job.reason
    is_open = is_killed and facts.attempt.is_open
    if facts.lost and (is_open or not case.is_explained):
        yield _lost_node(case)
    is_seen = LOST_SLURMSTEPD in facts.attempt.causes
    if (is_seen or compiled(_NO_STEPD).search(case.log)) and not case.is_explained:
        failed = facts.failed
        at = f" on {failed.host}" if failed.exit_code == LOST_SERVER and failed.host else ""
        yield Cause(
            code="lost-slurmstepd",
            what=f"a node or its slurmstepd, the process of Slurm that runs the ranks, was lost{at}",
            fix="look for a kill of slurmstepd in slurmd's log on the node (/var/log/slurm) and in "
            "`dmesg`; with --requeue and checkpoints, the job continues by itself",
        )
    if is_open:
        yield Cause(
            code="killed-supervisor",
            what="job.py, which supervises the job on its first node, was killed by SIGKILL, and "
            "with it the program, whose last output may be missing",
            fix="look for a `kill` on the node, and in `dmesg` for its kernel, which kills processes "
            "for lack of memory; with --requeue, the job is restarted",
        )


def _lost_node(case: _Case) -> Cause:
    facts, job = case.facts, case.facts.job
    why = ", ".join(filter(None, dict.fromkeys(facts.lost.values())))
    nodes = ", ".join(facts.lost) or ", ".join(job.nodes) or "of the job"
    told = (why or "no reason given") if facts.lost else "it stopped answering"
    return Cause(
        code="lost-node",
        what=f"node {nodes} was lost: {told}",
        fix="check the node with `clusterctl status`; if it does not come back, "
        f"{case.evidence.advice.repair}; then submit again; with --requeue and checkpoints, the job "
        "continues by itself",
    )


def _by_record(case: _Case) -> Iterator[Cause]:
    """Yield why the program was not started, or which of its tasks failed, as the job recorded it."""
    causes = case.facts.attempt.causes
    for code, fix in _FIXES.items():
        if cause := causes.get(code):
            words = {"job": case.facts.job.id, "task": cause.task}
            yield Cause(code=code, what=short(cause.text, _COLUMNS), fix=fix.format(**words))


def _by_signal(case: _Case) -> Iterator[Cause]:
    """Yield the sender of the signal, if it is known."""
    facts, job, log = case.facts, case.facts.job, case.log
    signal = facts.failed.signal
    left = left_mpi(log, case.evidence.ends)
    if left and not case.excerpt.exception and signal in {"SIGKILL", "SIGTERM"}:
        rank, _ = left
        yield Cause(
            code="left-mpi",
            what=f"rank {rank} ended with exit code 0 before MPI_Finalize, and Slurm then "
            "killed the other ranks",
            fix="all ranks must take part in each collective and end with MPI_Finalize: look "
            f"for sys.exit, os._exit or an early return in rank {rank} (`clusterctl logs {job.id} "
            f"--rank {rank}`)",
            failed=FailedRank(rank=rank, host=job.nodes[0] if len(job.nodes) == 1 else ""),
        )
    if facts.sent:
        mistaken = "if the job was ended by mistake, "
        saved = case.saved
        again = "submit it again; with --save-interval, it can continue"
        yield Cause(
            code="stopped",
            what=f"stopped by {facts.sent}, which was sent to the job{saved}",
            fix=f"{mistaken}{_CONTINUE if saved else again}",
        )
    named = signal or signal_name(facts.failed.exit_code or 0)
    if named and named == facts.attempt.notice:
        yield Cause(
            code="notice-not-handled",
            what=f"ended by {named}{facts.at}, with which Slurm announced the time limit "
            "(#SBATCH --signal)",
            fix=f"handle {named} in the program, as docs/restarts.md shows, or use a longer --time",
        )


def _by_lack_of_words(case: _Case) -> Iterator[Cause]:
    """Yield that the job was not launched, or that its log could not be written."""
    failed = case.facts.failed
    if "JobLaunchFailure" in case.facts.job.reason and not (failed.exit_code or failed.signal):
        yield Cause(
            code="launch-failure",
            what="a node could not launch the job",
            fix="check the nodes with `clusterctl status`, and read slurmd's log on the node "
            "(/var/log/slurm)",
        )
    if case.facts.failed.exit_code and case.is_silent and case.evidence.is_full:
        yield Cause(
            code="disk-full",
            what=f"{case.facts.end}{case.facts.at}; its log is empty, and the file system of the "
            "job's folder is full",
            fix="remove or collect files there, then submit again; `df -h` and `quota` show the room",
        )


_RULES: Final[tuple[Callable[[_Case], Iterator[Cause]], ...]] = (
    _never_ran,
    _by_state,
    _by_supervisor,
    _by_memory,
    _by_loss,
    _by_record,
    _by_signal,
    _by_lack_of_words,
)
