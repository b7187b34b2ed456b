"""The causes for which jobs wait or end, in the order in which they are tried.

The first cause that applies is a job's diagnosis. To add a cause, add an entry to ``WAITING`` or
``ENDED`` above those that are less certain. An entry is a ``Cause``, or a function if the evidence
is more than a pattern: see missing_files.py and cause_functions.py, and waiting.py for jobs that
wait.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

from clusterctl.scheduler.availability import NO_NODES
from clusterctl.scheduler.base import NO_LOG_SIGNAL, JobState
from clusterctl.scheduler.case import SHOW_LOG, Case, Explanation
from clusterctl.scheduler.cause_functions import (
    ended_by_alarm,
    ended_by_hang,
    launcher_crashed,
    left_mpi,
    master_port_in_use,
    mpi_without_pmix,
    never_started,
    no_input,
    notice_not_handled,
    step_without_path,
    unanswered_read,
)
from clusterctl.scheduler.failed_rank import signal_name
from clusterctl.scheduler.missing_files import (
    NO_MODULE,
    data_stayed_at_home,
    file_stayed_at_home,
    log_has_another_path,
    missing_file,
    missing_module,
    way_to_packages,
)
from clusterctl.scheduler.missing_packages import (
    missing_header,
    missing_package,
    missing_tool,
    missing_tool_of_build,
)
from clusterctl.scheduler.program_error import search
from clusterctl.scheduler.waiting import beyond_group_limit, unavailable_nodes
from clusterctl.transport.tree import format_size

# A text, or a function that writes it from the case.
Text = str | Callable[[Case], str]
# A pattern, or patterns that are tried one after the other. ^ and $ match at lines.
Patterns = str | tuple[str, ...]
# Returns an explanation, or None if its cause does not apply. A ``Cause`` is such a function.
CauseFunction = Callable[[Case], Explanation | None]


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause that patterns, a state, a signal or an exit code show. It applies if all its
    conditions hold.

    state: state of the job. reason: pattern in the scheduler's reason.
    signal, exit_code: how the first rank that failed ended. Exit code 0: unknown, or not its own.
    when: a further condition, which returns a true value if it holds.
    launcher: patterns in the complete log, with the messages of Slurm and the launchers.
    log: patterns in the error, which is the last relevant Python traceback, or the end of the log
        without messages that only surround it, and without lines after which the program kept
        running (program_error.py).
    why: what happened. fix: what to do. Their functions get the case with the patterns' named
        groups: ``case["module"]``.
    """

    code: str
    _: KW_ONLY
    state: JobState | None = None
    reason: Patterns = ()
    signal: str = ""
    exit_code: int | None = None
    when: Callable[[Case], object] = lambda _: True
    launcher: Patterns = ()
    log: Patterns = ()
    why: Text
    fix: Text

    def __call__(self, case: Case) -> Explanation | None:
        if (
            self.state not in (None, case.job.state)
            or self.signal not in ("", case.failed.signal)
            or self.exit_code not in (None, case.failed.exit_code or 0)
            or not self.when(case)
        ):
            return None
        matches = []
        for patterns, text in (
            (self.reason, case.job.reason),
            (self.launcher, case.raw),
            (self.log, case.error.evidence),
        ):
            if patterns:
                match = search((patterns,) if isinstance(patterns, str) else patterns, text)
                if match is None:
                    return None
                matches.append(match)
        case = case.with_groups(*matches)
        in_error = matches[-1] if self.log else None
        return Explanation(self.code, _text(self.why, case), _text(self.fix, case), in_error)


def _text(text: Text, case: Case) -> str:
    return text if isinstance(text, str) else text(case)


def not_quoted(case: Case) -> bool:
    """Return whether the system raised the error. The message of a ValueError or the like may quote
    anything.
    """
    return not case.error.is_own


def _in_a_shell(case: Case) -> str:
    """Return what an exit code means if it is a shell's: any program may return it."""
    code = case.failed.exit_code or 0
    if name := signal_name(code):
        is_near = name == "SIGKILL" and case.nearly
        memory = f"; {case.nearly} of memory were in use" if is_near else ""
        return f", which a shell returns for a program that {name} has ended{memory}"
    means = {126: "can't execute a program", 127: "does not find a command"}
    return f", which a shell returns if it {means[code]}" if code in means else ""


# The last messages of a bundled job that a signal has stopped.
_SAVED: Final = (
    r"saved after iteration (?P<iteration>\d+)\n(?:.*\n)?"
    r"unless the job is restarted, continue with: "
)
# A script did not activate an environment, as shells and the tools write it.
_NO_VENV: Final = r"""(?P<file>[^'":\s]*/bin/activate)['"]?: (?:line \d+: )?No such file"""
_LINE_OF_SCRIPT = r"^\S+: (?:line )?\d+: "
_CONDAS = r"(?:conda|mamba|micromamba|activate)"
_NO_CONDA: Final = (
    rf"(?P<say>\b{_CONDAS}: command not found)$",
    rf"{_LINE_OF_SCRIPT}(?P<say>{_CONDAS}: not found)$",
    rf"{_LINE_OF_SCRIPT}(?P<say>activate: No such file or directory)$",
    r"(?P<say>[^'\":\s]*/profile\.d/(?:conda|mamba)\.sh: No such file or directory)$",
    r"^(?P<say>Env\w+NotFound: .*|CondaError: Run 'conda init' .*)",
)
_MODULES = r"(?P<tool>module|ml)"
_NO_MODULES: Final = (
    rf"(?:^|[\s:]){_MODULES}: command not found$",
    rf"{_LINE_OF_SCRIPT}{_MODULES}: not found$",
)
# Lmod, and Environment Modules.
_UNKNOWN_MODULE: Final = (
    r"following module\(s\) are unknown: \"(?P<module>[^\"\s]+)",
    r"Unable to locate a modulefile for '(?P<module>[^'\s]+)'",
)
# They run programs in an environment that they make.
_RUNNERS = r"(?P<tool>uv|poetry|pipenv|pdm|hatch|pixi|rye)"
_NO_RUNNER: Final = (
    rf"(?:^|[\s:]){_RUNNERS}: command not found$",
    rf"{_LINE_OF_SCRIPT}{_RUNNERS}: not found$",
    rf"execve\(\): {_RUNNERS}: No such file or directory",
)
# What a program lacks without its environment.
_LACKS: Final = (
    NO_MODULE,
    r": command not found$",
    rf"{_LINE_OF_SCRIPT}\S+: not found$",
    r": cannot open shared object file",
    r"fatal error: \S+: No such file or directory",
    r"execve\(\): [^:\n]+: No such file or directory",
)
_EXAMINE: Final = "`clusterctl doctor` shows what the node lacks"
_AGAIN: Final = "submit again; without --no-requeue, Slurm returns the job to the queue by itself"
# Longer than the check before a job takes.
_CHECK_S: Final = 60
_MAKE_EXECUTABLE: Final = (
    "run `chmod +x` on your machine and submit again, or put the interpreter in front, as in "
    "`bash FILE`"
)
# The fix in place of "read the log" if the log is empty.
_NO_LOG: Final = "submit again with more output: `set -x` in a shell script shows each command"

WAITING: Final[Sequence[CauseFunction]] = (
    Cause(
        "held-after-launch-failure",
        reason=r"launch.fail.*requeued.held",
        why="held by Slurm, because a node could not start the job",
        fix=lambda case: (
            f"{case.repair}; or try again with `clusterctl ssh -- scontrol release {case.job.id}`"
        ),
    ),
    Cause(
        "user-environment",
        reason=r"(?i)user.env.retrieval.fail",
        why="held by Slurm, because the login environment of the job's user could not be read",
        fix=lambda case: (
            "correct ~/.bashrc and ~/.profile on the cluster (`clusterctl ssh`), then "
            f"`clusterctl ssh -- scontrol release {case.job.id}`"
        ),
    ),
    Cause(
        "dependency-never-satisfied",
        reason=r"DependencyNeverSatisfied",
        why="the job can never start, because a job that this job depends on failed",
        fix="cancel the job with `clusterctl cancel`, and submit it again with another dependency",
    ),
    Cause(
        "waiting-for-dependency",
        reason=r"^Dependency\b",
        why="another job must end first",
        fix="wait; `clusterctl jobs` shows the other job",
    ),
    unavailable_nodes,
    # Slurm also gives this reason for nodes that are drained.
    Cause(
        "waiting-for-unavailable-nodes",
        reason=r"ReqNodeNotAvail.*[Rr]eserved",
        why=lambda case: f"nodes that the job needs are drained or reserved{case.soon}",
        fix=(
            "`clusterctl ssh -- sinfo -R` shows drained nodes, `clusterctl ssh -- scontrol show "
            "reservation` shows reservations; a job with a shorter --time may start before a "
            "reservation"
        ),
    ),
    Cause(
        "waiting-for-nodes-out-of-service",
        reason=NO_NODES,
        why="nodes that the job needs are out of service",
        fix=lambda case: (
            f"{case.repair}; `clusterctl ssh -- sinfo -R` shows why they are out of service"
        ),
    ),
    Cause(
        "held",
        reason=r"JobHeldUser",
        why="the job is held: it starts only after it is released",
        fix=lambda case: (
            f"release the job with `clusterctl ssh -- scontrol release {case.job.id}`, or cancel "
            "it with `clusterctl cancel`"
        ),
    ),
    Cause(
        "held",
        reason=r"JobHeldAdmin",
        why="an administrator holds the job",
        fix=lambda case: (
            (
                "ask the administrator, or release the job with `clusterctl ssh --admin -- sudo "
                f"scontrol release {case.job.id}`"
            )
            if case.is_operator
            else "ask the site's administrators, or cancel the job with `clusterctl cancel`"
        ),
    ),
    Cause(
        "held",
        reason=r"requeued.in.held.state",
        why=(
            "the job was requeued and is held (scontrol requeuehold): it starts only after it is "
            "released"
        ),
        fix=lambda case: (
            (
                "release the job with `clusterctl ssh --admin -- sudo scontrol release "
                f"{case.job.id}`, or cancel it with `clusterctl cancel`"
            )
            if case.is_operator
            else "ask the site's administrators, or cancel the job with `clusterctl cancel`"
        ),
    ),
    Cause(
        "held",
        reason=r"JobHoldMaxRequeue",
        why="held by Slurm, because the job was requeued too often",
        fix=lambda case: (
            "read the log with `clusterctl logs`; then release the job with `clusterctl ssh -- "
            f"scontrol release {case.job.id}`, or cancel it"
        ),
    ),
    Cause(
        "waiting-for-time",
        reason=r"^BeginTime$",
        why=lambda case: f"the start time of the job has not come yet{case.soon}",
        fix="wait; Slurm also starts a requeued job only after a pause",
    ),
    Cause(
        "partition-down",
        reason=r"PartitionDown|PartitionInactive",
        why="the partition is down or inactive",
        fix=lambda case: (
            "use another --partition, or set this partition to UP with `scontrol update`"
            if case.is_operator
            else "use another --partition, or ask the site's administrators"
        ),
    ),
    Cause(
        "waiting-beyond-partition",
        reason=r"PartitionConfig",
        why=lambda case: (
            f"the job can never start: it asks for {case.asked or 'more nodes'}, more than "
            f"partition {case.job.partition} has now"
        ),
        fix=lambda case: (
            (
                "cancel the job with `clusterctl cancel`, and ask for fewer --nodes; or give the "
                "partition more nodes in the spec, and run `clusterctl up`"
            )
            if case.is_operator
            else (
                "cancel the job with `clusterctl cancel`, and ask for fewer --nodes, a shorter "
                "--time or another --partition"
            )
        ),
    ),
    Cause(
        "waiting-beyond-limits",
        reason=r"PartitionTimeLimit",
        why=lambda case: (
            f"the job can never start: partition {case.job.partition} does not allow its time "
            f"limit{case.limit}"
        ),
        fix=(
            "cancel the job with `clusterctl cancel`, and use a shorter --time or another "
            "--partition"
        ),
    ),
    Cause(
        "waiting-beyond-limits",
        reason=r"PartitionNodeLimit|BadConstraints|NodeConfig\w*|MaxMemPerLimit",
        why=lambda case: (
            "the job can never start, because it asks for more than the partition has "
            f"({case.job.reason})"
        ),
        fix=(
            "cancel the job with `clusterctl cancel`, then ask for less or use another "
            "--partition; `clusterctl status` shows the nodes"
        ),
    ),
    Cause(
        "waiting-beyond-job-limit",
        reason=r"(?:QOS|Assoc)(?:Max\w+Per(?:Job|Node)(?:Limit)?$|Min\w+)",
        why=lambda case: (
            "the job can never start: its account or QOS does not allow a job of this size "
            f"({case.job.reason})"
        ),
        fix=(
            "cancel the job with `clusterctl cancel`, and ask for another size, or use another "
            "--qos or --account; `clusterctl ssh -- sacctmgr show qos` shows limits"
        ),
    ),
    Cause(
        "waiting-without-permission",
        reason=r"(?:Account|QOS)NotAllowed|Invalid(?:Account|QOS)",
        why=lambda case: (
            "the job can never start: its account or QOS may not use partition "
            f"{case.job.partition} ({case.job.reason})"
        ),
        fix=(
            "cancel the job with `clusterctl cancel`, and use another --account, --qos or "
            "--partition"
        ),
    ),
    Cause(
        "reservation-gone",
        reason=r"Reservation(?:Deleted|Invalid)",
        why="the job can never start, because its reservation no longer exists",
        fix="cancel the job with `clusterctl cancel`, and submit it again without the reservation",
    ),
    Cause(
        "waiting-for-own-array",
        reason=r"JobArrayTaskLimit",
        why=(
            "as many tasks of this array are running as the array allows, such as 4 with --array "
            "1-10%4"
        ),
        fix=lambda case: (
            "wait, or raise the limit with `clusterctl ssh -- scontrol update "
            f"jobid={case.job.id} arraytaskthrottle=N`"
        ),
    ),
    beyond_group_limit,
    Cause(
        "waiting-for-quota",
        reason=r"(?:QOS|Assoc|Max\w+Per(?:Account|User))\w*",
        why=lambda case: (
            f"other jobs have used up a limit of the account or QOS ({case.job.reason}){case.soon}"
        ),
        fix="wait for those jobs to end, or ask for less",
    ),
    Cause(
        "waiting-for-licenses",
        reason=r"^Licenses\b",
        why="the licenses that the job needs are in use",
        fix="wait",
    ),
    Cause(
        "waiting-for-reservation",
        reason=r"^Reservation$",
        why=lambda case: f"the reservation has not begun yet{case.soon}",
        fix="wait",
    ),
    Cause(
        "waiting-for-priority",
        reason=r"^Priority$",
        why=lambda case: f"jobs of higher priority are ahead in the queue{case.soon}",
        fix="wait; `clusterctl jobs` shows the queue",
    ),
    Cause(
        "waiting-for-resources",
        reason=r"^Resources$",
        why=lambda case: (
            f"other jobs are using the nodes, cores or memory that the job needs{case.soon}"
        ),
        fix="wait, or ask for less; `clusterctl status` shows which nodes are free",
    ),
    Cause(
        "waiting-for-the-scheduler",
        reason=r"^(?:None)?$",
        why=lambda case: f"Slurm has not considered the job yet{case.soon}",
        fix="wait a few seconds",
    ),
    Cause(
        "waiting-for-another-reason",
        why=lambda case: f"Slurm gives the reason {case.job.reason}{case.soon}",
        fix="`man squeue` explains the reason in its section JOB REASON CODES",
    ),
)
ENDED: Final[Sequence[CauseFunction]] = (
    # --- Ended by the scheduler or by a person ----------------------------------------------------
    never_started,
    Cause(
        "node-unfit",
        when=lambda case: case.job.signal == NO_LOG_SIGNAL and case.unfit,
        why=lambda case: (
            "the job could not start, because Slurm could not open its log; its node is now "
            f"drained: {case.unfit}"
        ),
        fix=lambda case: (
            f"submit again: the node gets no job until this is corrected; {_EXAMINE}"
            if case.is_operator
            else f"submit again; {case.repair}"
        ),
    ),
    Cause(
        "node-unfit",
        state=JobState.CANCELLED,
        launcher=r"^slurmstepd\S*: error: Prolog failure on node (?P<node>\S+)",
        why=lambda case: (
            f"node {case['node']} did not pass the check that Slurm runs before a job (Prolog)"
            + (f": {case.unfit}" if case.unfit else "")
        ),
        fix=lambda case: f"{_AGAIN}; {_EXAMINE if case.is_operator else case.repair}",
    ),
    Cause(
        "node-unfit",
        state=JobState.CANCELLED,
        when=lambda case: (
            case.unfit and case.wrote_nothing and (case.job.elapsed_s or 0) < _CHECK_S
        ),
        why=lambda case: (
            f"cancelled{case.by} before it wrote anything, as Slurm does if a node does not pass "
            f"the check before a job (Prolog): {case.unfit}"
        ),
        fix=lambda case: f"{_AGAIN}; {_EXAMINE if case.is_operator else case.repair}",
    ),
    Cause(
        "log-not-writable",
        when=lambda case: case.job.signal == NO_LOG_SIGNAL and case.wrote_nothing,
        why=lambda case: (
            f"the job could not start: Slurm could not open its log on {case.nodes or 'its node'}, "
            f"because {case.job.work_dir or 'its folder'} is missing there or the user may not "
            "write to it"
        ),
        fix=lambda case: (
            f"`clusterctl ssh{case.on_node} -- namei -l {shlex.quote(case.job.work_dir or '.')}` "
            "shows which folder is missing or not the user's: correct it, and submit again"
            + (
                "; `clusterctl doctor` shows if a file system is not mounted"
                if case.is_operator
                else ""
            )
        ),
    ),
    Cause(
        "lost-node",
        state=JobState.NODE_FAIL,
        when=lambda case: case.lost,
        why=lambda case: f"node {case.lost_nodes} was lost: {case.lost_why or 'no reason given'}",
        fix=lambda case: (
            f"check the node with `clusterctl status`; if it does not come back, {case.repair}; "
            "then submit again; with --requeue, Slurm restarts the job by itself"
        ),
    ),
    Cause(
        "lost-node",
        state=JobState.NODE_FAIL,
        why=lambda case: "node failure: " + (case.nodes or "the job's node") + " stopped answering",
        fix=lambda case: (
            f"check the node with `clusterctl status`; if it does not come back, {case.repair}; "
            "then submit again; with --requeue, Slurm restarts the job by itself"
        ),
    ),
    Cause(
        "preempted",
        state=JobState.PREEMPTED,
        why="preempted by a job of higher priority",
        fix=(
            "submit again; with --requeue and checkpoints, Slurm restarts the job and it "
            "continues from its last checkpoint"
        ),
    ),
    Cause(
        "cancelled",
        state=JobState.CANCELLED,
        reason=r"DependencyNeverSatisfied",
        why="cancelled, because a job that this job depends on failed",
        fix="submit again without that dependency",
    ),
    Cause(
        "cancelled",
        state=JobState.CANCELLED,
        launcher=_SAVED,
        why=lambda case: (
            f"cancelled{case.by}; its work is saved after iteration {case['iteration']}"
        ),
        fix="if the job was ended by mistake, continue with the command at the end of the log",
    ),
    Cause(
        "cancelled",
        state=JobState.CANCELLED,
        why=lambda case: f"cancelled{case.by}",
        fix="if the job was ended by mistake, submit it again",
    ),
    Cause(
        "revoked",
        state=JobState.REVOKED,
        why="another cluster of the federation runs the job",
        fix="look for the job on that cluster with `squeue --federation`",
    ),
    Cause(
        "boot-failure",
        state=JobState.BOOT_FAIL,
        why=lambda case: (
            f"the job's node could not start the job: {case.job.reason or 'no reason given'}"
        ),
        fix=lambda case: f"{case.repair}, then submit again",
    ),
    Cause(
        "deadline",
        state=JobState.DEADLINE,
        why="the job could not end before its deadline",
        fix="submit again without --deadline, or with a shorter --time",
    ),
    Cause(
        "time-limit",
        state=JobState.TIMEOUT,
        launcher=_SAVED,
        why=lambda case: (
            f"time limit{case.limit} reached after "
            f"{case.elapsed or 'an unknown time'}{case.hung}; its work is saved after iteration "
            f"{case['iteration']}"
        ),
        fix=(
            "continue with the command at the end of the log; with --requeue, the job continues "
            "by itself"
        ),
    ),
    Cause(
        "time-limit",
        state=JobState.TIMEOUT,
        why=lambda case: (
            f"time limit{case.limit} reached after {case.elapsed or 'an unknown time'}{case.hung}"
        ),
        fix=(
            "use a longer --time, such as --time 2h; with --signal and --requeue the job can "
            "save its work before the limit"
        ),
    ),
    Cause(
        "no-record",
        state=JobState.PURGED,
        why="Slurm no longer has a record of the job",
        fix="look for the job's folder on the cluster with `clusterctl ssh`; it may still exist",
    ),
    ended_by_hang,
    ended_by_alarm,
    Cause(
        "out-of-memory",
        state=JobState.OUT_OF_MEMORY,
        why=lambda case: f"out of memory{case.at}{case.used}",
        fix=lambda case: f"{case.more_memory}use more nodes, or a smaller batch",
    ),
    Cause(
        "out-of-memory",
        launcher=(
            r"^(?:srun|slurmstepd\S*): error: .*exceeded (?:job |step )?memory limit "
            r"\((?P<peak>\d+) > (?P<most>\d+)\)"
        ),
        why=lambda case: (
            f"out of memory{case.at}: {format_size(int(case['peak']))} used of "
            f"{format_size(int(case['most']))}"
        ),
        fix=lambda case: f"{case.more_memory}use more nodes, or a smaller batch",
    ),
    Cause(
        "out-of-memory",
        launcher=(
            r"^(?:srun|slurmstepd\S*): error: .*exceeded \w* ?memory limit",
            r"^(?:srun|slurmstepd\S*): error: .*(?:[Oo]ut [Oo]f [Mm]emory$|oom.kill event)",
        ),
        why=lambda case: f"out of memory{case.at}{case.used}",
        fix=lambda case: f"{case.more_memory}use more nodes, or a smaller batch",
    ),
    Cause(
        "lost-node",
        when=lambda case: case.lost and not case.is_explained,
        why=lambda case: f"node {case.lost_nodes} was lost: {case.lost_why or 'no reason given'}",
        fix=lambda case: (
            f"check the node with `clusterctl status`; if it does not come back, {case.repair}; "
            "then submit again; with --requeue and checkpoints, the job continues by itself"
        ),
    ),
    missing_header,
    missing_tool_of_build,
    Cause(
        "build-failed",
        # The excerpt shows the last lines of the build before this line.
        log=(
            r"(?:^.*\n){0,4}^clusterctl: the build failed on (?P<host>\S+) with (?P<end>.*?): "
            r"(?P<command>.*)"
        ),
        why=lambda case: f"--build {case['command']} failed on {case['host']} with {case['end']}",
        fix="correct what these lines say; build.log of the run has the whole output, and --module NAME "
        "loads a compiler of the site",
    ),
    Cause(
        "module-not-loaded",
        log=r"^clusterctl: the module (?P<module>\S+) can't be loaded on (?P<host>\S+)",
        why=lambda case: f"{case['host']} can't load the environment module {case['module']}",
        fix="`clusterctl ssh -- 'bash -lc \"module avail\"'` lists the modules",
    ),
    Cause(
        "secrets-gone",
        log=(
            r"^clusterctl: the values of `submit --secret` can't be read on (?P<host>\S+) "
            r"\((?P<reason>.*)\)"
        ),
        why=lambda case: f"{case['host']} has no values of --secret any more ({case['reason']})",
        fix="submit the job again, or `clusterctl replay` its run: values are removed with their job",
    ),
    Cause(
        "not-staged",
        launcher=r"^clusterctl: files can't be staged on (?P<host>[^\s:]+): (?P<reason>.+)$",
        why=lambda case: f"files of --stage can't be staged on {case['host']}: {case['reason']}",
        fix="correct SOURCE:TARGET of --stage; both are paths on the nodes",
    ),
    Cause(
        "image-unfit",
        launcher=(
            r"^clusterctl: the image of --container can't be used on (?P<host>[^\s:]+): (?P<reason>.+)$"
        ),
        why=lambda case: f"the container image can't be used on {case['host']}: {case['reason']}",
        fix="correct --container or --mount, or what the node lacks; `clusterctl submit --help` "
        "names the kinds of images",
    ),
    Cause(
        "lost-slurmstepd",
        launcher=(
            r"^clusterctl: srun waits for ranks that have no slurmstepd any more",
            r"^srun: error: Timed out waiting for job step to complete",
        ),
        when=lambda case: not case.is_explained,
        why=lambda case: (
            "a node or its slurmstepd, the process of Slurm that runs the ranks, was "
            f"lost{case.lost_at}"
        ),
        fix=(
            "look for a kill of slurmstepd in slurmd's log on the node (/var/log/slurm) and in "
            "`dmesg`; with --requeue and checkpoints, the job continues by itself"
        ),
    ),
    Cause(
        "lost-node",
        state=JobState.FAILED,
        reason=r"RaisedSignal:9\b",
        when=lambda case: case.is_open and case.lost,
        why=lambda case: f"node {case.lost_nodes} was lost: {case.lost_why or 'no reason given'}",
        fix=lambda case: (
            f"check the node with `clusterctl status`; if it does not come back, {case.repair}; "
            "then submit again; with --requeue and checkpoints, the job continues by itself"
        ),
    ),
    Cause(
        "killed-supervisor",
        state=JobState.FAILED,
        reason=r"RaisedSignal:9\b",
        when=lambda case: case.is_open,
        why=(
            "job.py, which supervises the job on its first node, was killed by SIGKILL, and with "
            "it the program"
        ),
        fix=(
            "look for a `kill` on the node, and in `dmesg` for its kernel, which kills processes "
            "for lack of memory; with --requeue, the job is restarted"
        ),
    ),
    Cause(
        "user-environment",
        reason=r"user.env|GETENV",
        why="the login environment of the job's user could not be read",
        fix="check ~/.bashrc and ~/.profile on the cluster (`clusterctl ssh`)",
    ),
    # --- Signals that tell the cause --------------------------------------------------------------
    launcher_crashed,
    left_mpi,
    no_input,
    Cause(
        "cuda-illegal-address",
        log=(
            r"CUDA error: an illegal memory access",
            r"CUDA_ERROR_ILLEGAL_ADDRESS",
            r"illegal memory access was encountered",
        ),
        when=not_quoted,
        why=lambda case: f"CUDA: illegal memory access{case.at}",
        fix="run with --env CUDA_LAUNCH_BLOCKING=1 to find the kernel; check indices and shapes",
    ),
    Cause(
        "cuda-assert",
        log=r"device-side assert triggered",
        when=not_quoted,
        why=lambda case: f"CUDA: device-side assertion{case.at}",
        fix=(
            "run with --env CUDA_LAUNCH_BLOCKING=1 to find the kernel; often a label or an index "
            "is out of range"
        ),
    ),
    Cause(
        "shared-memory",
        log=(
            r"killed by signal: Bus error",
            r"out of shared memory",
            r"No space left on device.*/dev/shm",
            r"/dev/shm.*No space left",  # noqa: S108
            (
                r"unable to (?:write to|allocate shared memory|mmap|resize) .*</?torch_\d"
                r".*No space left"
            ),
        ),
        why=lambda case: f"shared memory (/dev/shm) is full{case.at}",
        fix=(
            "use fewer DataLoader workers, or "
            'torch.multiprocessing.set_sharing_strategy("file_system"); `ls -l /dev/shm` on the '
            "node (`clusterctl ssh HOST`) shows what earlier jobs left"
        ),
    ),
    Cause(
        "bus-error",
        signal="SIGBUS",
        why=lambda case: f"bus error{case.at}",
        fix=(
            "often /dev/shm is full, or a memory-mapped file was truncated: `df /dev/shm` and "
            "`ls -l /dev/shm` on the node (`clusterctl ssh HOST`) also show what earlier jobs "
            "left"
        ),
    ),
    Cause(
        "illegal-instruction",
        signal="SIGILL",
        why=lambda case: f"illegal instruction{case.at}: the program was built for another CPU",
        fix="build without -march=native, or for the nodes' CPU, or choose nodes with --constraint",
    ),
    Cause(
        "floating-point-exception",
        signal="SIGFPE",
        why=lambda case: f"floating point exception{case.at}: an integer was divided by zero",
        fix="debug the program; `--env PYTHONFAULTHANDLER=1` shows the Python line",
    ),
    Cause(
        "segmentation-fault",
        signal="SIGSEGV",
        why=lambda case: f"segmentation fault{case.at}",
        fix=(
            "`--env PYTHONFAULTHANDLER=1` shows the Python line; for C and Fortran, build with "
            "-g, and check array bounds and `ulimit -s`"
        ),
    ),
    Cause(
        "segmentation-fault",
        log=(
            r"Signal: Segmentation fault",
            r"Fatal Python error: Segmentation fault",
            r"segmentation fault occurred",
        ),
        why=lambda case: f"segmentation fault{case.at}",
        fix=(
            "check the last frame; perhaps a library was built for another Python, or an array "
            "is too small"
        ),
    ),
    # --- Memory -----------------------------------------------------------------------------------
    Cause(
        "cuda-out-of-memory",
        log=(
            r"CUDA (?:error: )?out of memory",
            r"^(?:torch|cupy)[\w.]*\.OutOfMemoryError",
            r"CUDA_ERROR_OUT_OF_MEMORY",
            r"cudaErrorMemoryAllocation",
            r"RESOURCE_EXHAUSTED: .*(?:[Oo]ut of memory|OOM|[Ff]ailed to allocate)",
            r"OOM when allocating tensor",
        ),
        when=not_quoted,
        why=lambda case: f"CUDA out of memory{case.at}",
        fix="use a smaller (micro-)batch, mixed precision, activation checkpointing or more GPUs",
    ),
    Cause(
        "java-memory",
        log=r"java\.lang\.OutOfMemoryError: (?P<say>[^\n]+)",
        why=lambda case: f"out of memory in Java{case.at}: {case['say']}",
        fix="give Java more memory, such as -Xmx4g, and ask for as much with --mem",
    ),
    Cause(
        "host-memory",
        log=(
            r"^(?:\S+: ?|\S*:)?(?:\w+\.)*_?(?:Array)?MemoryError(?::|\s*$)",
            r"std::bad_alloc",
            r"Cannot allocate memory",
            r"DefaultCPUAllocator: (?:not enough memory|can.t allocate)",
            r"[Uu]nable to allocate \S+ [KMGTPE]iB",
            # R, Julia, Go, Rust, gfortran, ifort
            r"cannot allocate vector of size",
            r"\bOutOfMemoryError\(\)",
            r"runtime: out of memory",
            r"memory allocation of \d+ bytes failed",
            r"Error allocating \d+ bytes",
            r"insufficient virtual memory",
            r"out of memory: an allocation failed",
        ),
        when=not_quoted,
        why=lambda case: f"out of memory{case.at}: an allocation was refused",
        fix=lambda case: (
            f"check the sizes of arrays; {case.more_memory}use more nodes, or a smaller batch"
        ),
    ),
    # If only a worker exceeds the memory, the kernel kills it, and the exception of its parent does
    # not name memory.
    Cause(
        "worker-killed",
        log=(
            r"^\S*BrokenProcessPool: ",
            r"DataLoader worker \(pid\S* \d+\) is killed by signal: Killed",
            r"ProcessExitedException: process \d+ terminated with signal SIGKILL",
            r"died with <Signals\.SIGKILL: 9>",
        ),
        why=lambda case: (
            f"a process of the program was killed{case.at}, probably for lack of "
            f"memory{case.measured}"
        ),
        fix=lambda case: (
            f"{case.more_memory}start fewer workers, or use a smaller batch; `dmesg` on the node "
            "shows whether its kernel killed the process"
        ),
    ),
    Cause(
        "worker-killed",
        launcher=r"exit codes of the workers are \{[^}\n]*SIGKILL",
        log=r"^\S*TerminatedWorkerError: ",
        why=lambda case: (
            f"a process of the program was killed{case.at}, probably for lack of "
            f"memory{case.measured}"
        ),
        fix=lambda case: (
            f"{case.more_memory}start fewer workers, or use a smaller batch; `dmesg` on the node "
            "shows whether its kernel killed the process"
        ),
    ),
    # --- Programs, modules, files -----------------------------------------------------------------
    Cause(
        "windows-newlines",
        log=(
            r"\r.{0,2}: (?:command not found|not found|No such file or directory|\[Errno 2\])",
            r"\\r': (?:command not found|No such file or directory)",
            r"bad interpreter.*\^M|\^M: bad interpreter",
            r"\$'\\r'",
        ),
        why=lambda case: f"a script has Windows line endings{case.at}",
        fix=r"convert the script with `sed -i 's/\r$//' SCRIPT`",
    ),
    Cause(
        "own-file-hides-package",
        log=(
            r"partially initialized module|cannot import name|has no attribute"
            r"|^ModuleNotFoundError"
        ),
        when=lambda case: case.shadow,
        why=lambda case: (
            f"your file {case.shadow} hides a package of the same name{case.at}: a library "
            "imported it"
        ),
        fix=lambda case: f"rename {case.shadow}",
    ),
    Cause(
        "own-file-hides-package",
        log=r"consider renaming '(?P<file>[^'\n]+)'",
        why=lambda case: f"your file {case['file']} hides a package of the same name{case.at}",
        fix=lambda case: f"rename {case['file']}",
    ),
    Cause(
        "download-without-internet",
        log=(
            r"couldn't connect to '?(?P<url>https?://[^\s']+)",
            r"(?P<url>LocalEntryNotFoundError|OfflineModeIsEnabled)",
            r"trying to load it from '(?P<url>https://huggingface\.co[^']*)",
            r"host='(?P<url>(?:[\w.-]+\.)?(?:huggingface\.co|hf\.co|pytorch\.org))",
        ),
        why=lambda case: (
            f"the program downloads from the internet{case.at}, which the nodes can't reach: "
            f"{case['url']}"
        ),
        fix=(
            "download on your machine (for Hugging Face: HF_HOME=hf python …), upload with "
            "`clusterctl put hf .`, and submit with --env HF_HOME=/shared/home/USER/hf --env "
            "HF_HUB_OFFLINE=1"
        ),
    ),
    # A script goes on after a line that failed to activate an environment, and its program then
    # lacks a module, a command or a library.
    Cause(
        "virtual-environment-not-sent",
        launcher=_NO_VENV,
        log=(_NO_VENV, *_LACKS),
        why=lambda case: (
            f"no file {case['file']}{case.at}: virtual environments are not sent with jobs"
        ),
        fix=lambda case: f"remove this line from the script; {way_to_packages(case)}",
    ),
    Cause(
        "modules-of-another-site",
        launcher=_NO_CONDA,
        log=(*_NO_CONDA, *_LACKS),
        why=lambda case: (
            f"the script can't activate its environment of conda{case.at}: {case['say']}"
        ),
        fix=lambda case: (
            "remove the line from the script, and submit with --env-path and the environment's "
            f"folder or name on the cluster; or {way_to_packages(case)}"
        ),
    ),
    Cause(
        "modules-of-another-site",
        launcher=_NO_MODULES,
        log=(*_NO_MODULES, *_LACKS),
        why=lambda case: f"command not found{case.at}: {case['tool']}",
        fix=(
            "remove the line from the script: a job has the packages of --requirements, and the "
            "programs of its nodes"
        ),
    ),
    Cause(
        "module-not-loaded",
        launcher=_UNKNOWN_MODULE,
        log=(*_UNKNOWN_MODULE, *_LACKS),
        why=lambda case: f"the script can't load the environment module {case['module']}{case.at}",
        fix="`clusterctl ssh -- 'bash -lc \"module avail\"'` lists the modules; remove the line, or "
        "correct the name",
    ),
    Cause(
        "command-not-found",
        launcher=_NO_RUNNER,
        log=(*_NO_RUNNER, *_LACKS),
        why=lambda case: f"command not found{case.at}: {case['tool']}",
        fix=lambda case: (
            f"start the program without `{case['tool']} run`, such as with python; "
            f"{way_to_packages(case)}"
        ),
    ),
    missing_module,
    missing_package,
    Cause(
        "relative-import-in-script",
        log=r"attempted relative import with no known parent package",
        why=lambda case: (
            f"a relative import in a program that was not started as a module{case.at}"
        ),
        fix="start it as a module of its package, such as `clusterctl submit -m PACKAGE.MODULE`",
    ),
    Cause(
        "missing-name",
        log=r"cannot import name '(?P<what>[^']+)' from '(?P<module>[^']+)'",
        why=lambda case: (
            f"{case['module']} has no {case['what']}{case.at}: the program expects another "
            f"version of {case['module']}"
        ),
        fix=(
            "set the right version in a requirements file, and submit with --requirements "
            "requirements.txt"
        ),
    ),
    Cause(
        "glibc",
        log=r"version `(?P<what>(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found",
        why=lambda case: (
            f"the nodes' operating system is too old for the program: no {case['what']}{case.at}"
        ),
        fix="build the program on the cluster (`clusterctl ssh`), or run it in a --container",
    ),
    Cause(
        "missing-library",
        log=r"(?<![\w.+-])(?P<what>[\w.+-]+\.so[\w.]*): cannot open shared object file",
        why=lambda case: f"missing shared library {case['what']}{case.at}",
        fix=(
            "install the library on the nodes, send it with the job and set --env "
            "LD_LIBRARY_PATH=…, or use a --container"
        ),
    ),
    Cause(
        "undefined-symbol",
        log=r"undefined symbol: (?P<what>\S+)",
        why=lambda case: f"library versions do not match{case.at}: undefined symbol {case['what']}",
        fix="build against the cluster's libraries, or set matching versions with --requirements",
    ),
    Cause(
        "wrong-architecture",
        log=(
            r"[Ee]xec format error",
            r"wrong ELF class",
            r"cannot execute binary file",
        ),
        why=lambda case: f"the program is built for another architecture{case.at}",
        fix="build the program on the cluster (`clusterctl ssh`)",
    ),
    log_has_another_path,
    file_stayed_at_home,
    data_stayed_at_home,
    step_without_path,
    missing_tool,
    Cause(
        "command-not-found",
        log=(
            r"(?:^|[\s:])(?P<what>[\w.+/-]+): command not found$",
            r"^\S+: (?:line )?\d+: (?P<what>[\w.+/-]+): not found$",
        ),
        why=lambda case: f"command not found{case.at}: {case['what']}",
        fix=(
            "use the full path of the command, install it on the nodes (`software.packages` of "
            "the spec), or use a --container; Python programs can be installed with "
            "--requirements"
        ),
    ),
    # subprocess starts a command that is not a path, or its folder `cwd` is missing: the traceback
    # is the same.
    Cause(
        "command-not-found",
        launcher=(
            r"in _execute_child\n(?:.*\n){1,2}FileNotFoundError: \[Errno 2\] "
            r"No such file or directory: .(?P<file>[\w.+-]+).$"
        ),
        log=r"^FileNotFoundError: \[Errno 2\] No such file or directory: .[\w.+-]+.$",
        why=lambda case: f"no command or folder {case['file']}{case.at}",
        fix=(
            "install the command on the nodes (`software.packages` of the spec), or create the "
            "folder that is passed as cwd; Python programs can be installed with --requirements"
        ),
    ),
    Cause(
        "command-not-found",
        log=r"unable to find the specified executable file(?:.*\n)*?Executable: (?P<what>.+)",
        why=lambda case: f"command not found{case.at}: mpirun cannot find {case['what']}",
        fix=lambda case: (
            f"use a path, such as ./{case['what']}, and check that the file is sent with the job"
        ),
    ),
    Cause(
        "command-not-found",
        log=r"execve\(\): (?P<what>[^:\n]+): No such file or directory",
        why=lambda case: f"command not found{case.at}: srun cannot find {case['what']}",
        fix=lambda case: (
            f"use a path, such as ./{case['what']}, and check that the file is sent with the job"
        ),
    ),
    Cause(
        "command-not-found",
        log=(
            r"""^(?:\S*/)?env: ['"\u2018]?(?P<what>[^'"\u2018\u2019\n]+)['"\u2019]?: """
            r"No such file or directory"
        ),
        why=lambda case: f"command not found{case.at}: {case['what']}",
        fix=(
            "correct the first line of the script, or install the command on the nodes "
            "(`software.packages` of the spec)"
        ),
    ),
    missing_file,
    Cause(
        "noexec",
        log=r"execve\(\): (?P<file>/\S+/slurm_script): Permission denied",
        why=lambda case: (
            f"programs in Slurm's spool folder can't be executed{case.at}: {case['file']}"
        ),
        fix=(
            "the file system is mounted noexec: find it with `clusterctl doctor`, and remount it "
            "with exec"
        ),
    ),
    Cause(
        "not-executable",
        # Shells write the same line, without this code, if they can't write a file for `>`.
        exit_code=126,
        log=(
            r"^\S+: (?:line \d+|\d+): (?P<file>\.{0,2}/?(?:[\w+-][\w.+-]*/)*[\w.+-]+): "
            r"Permission denied$"
        ),
        why=lambda case: f"not executable{case.at}: {case['file']}",
        fix=_MAKE_EXECUTABLE,
    ),
    Cause(
        "not-executable",
        log=(
            r"could not access\s+or execute an executable(?:.*\n)*?Executable: (?P<file>.+)",
            r"execve\(\): (?P<file>[^:\n]+): Permission denied",
        ),
        why=lambda case: f"not executable{case.at}: {case['file']}",
        fix=_MAKE_EXECUTABLE,
    ),
    Cause(
        "read-only-file-system",
        log=r"""Read-only file system(?:: ['"]?(?P<file>[^'"\n]+))?""",
        when=not_quoted,
        why=lambda case: (
            f"read-only file system{case.at}: {case['file'] or 'the log shows the file'}"
        ),
        fix="write to the program's current folder, or below /shared",
    ),
    Cause(
        "disk-quota",
        log=(
            r"[Dd]isk quota exceeded",
            r"EDQUOT",
        ),
        when=not_quoted,
        why=lambda case: f"disk quota exceeded{case.at}",
        fix=(
            "remove files on that file system (`quota -s` shows the quota), or write to another "
            "file system"
        ),
    ),
    Cause(
        "disk-full",
        log=(
            r"[Nn]o space left on device",
            r"ENOSPC",
            r"database or disk is full",
            r"Not enough free space to write \d+ bytes",
        ),
        when=not_quoted,
        why=lambda case: f"disk full{case.at}",
        fix=(
            "find the full disk with `df -h` on the node (`clusterctl ssh HOST`); collect and "
            "remove old runs, or write to another disk"
        ),
    ),
    Cause(
        "disk-full",
        log=r"^OSError: (?P<asked>\d+) requested and (?P<written>\d+) written",
        when=not_quoted,
        why=lambda case: (
            f"NumPy could write only {case['written']} of {case['asked']} values{case.at}: the "
            "disk is full, or a quota is used up"
        ),
        fix=(
            "find the full disk with `df -h` on the node (`clusterctl ssh HOST`), also /dev/shm "
            "and /tmp; remove files, or write to another disk"
        ),
    ),
    Cause(
        "too-many-files",
        log=(
            r"[Tt]oo many open files",
            r"EMFILE",
        ),
        when=not_quoted,
        why=lambda case: f"too many open files{case.at}",
        fix=(
            "close files, use fewer DataLoader workers, or raise the limit with `ulimit -n` in "
            "the script"
        ),
    ),
    Cause(
        "too-many-processes",
        log=(
            r"(?i)(?:fork|vfork|clone|thread|process)\b.*: Resource temporarily unavailable",
            r"can't start new thread",
        ),
        when=not_quoted,
        why=lambda case: f"too many processes or threads{case.at}",
        fix="lower OMP_NUM_THREADS, or use fewer DataLoader workers; `ulimit -u` shows the limit",
    ),
    # Python's traceback shows the call. Other calls, such as of a socket, have the same message.
    Cause(
        "too-many-processes",
        launcher=(
            r"(?:\bfork\w*\(|in _execute_child|in start_new_thread|in _launch|in start\n)"
            r".*\n(?:[ \t]+.*\n){0,3}?(?:BlockingIOError|OSError): \[Errno 11\] "
            r"Resource temporarily unavailable$"
        ),
        log=r"^(?:BlockingIOError|OSError): \[Errno 11\] Resource temporarily unavailable$",
        why=lambda case: f"too many processes or threads{case.at}",
        fix="lower OMP_NUM_THREADS, or use fewer DataLoader workers; `ulimit -u` shows the limit",
    ),
    Cause(
        "ssh-refused",
        log=(
            r"^(?:\S+: )?Permission denied \((?:publickey|password|keyboard-interactive|gssapi\S*)"
            r"[\w,-]*\)"
        ),
        why=lambda case: (
            f"ssh was refused{case.at}: the job has no key that the other host accepts"
        ),
        fix=(
            "jobs start programs on their nodes with srun or mpirun, which need no keys; for "
            "other hosts, put a key into ~/.ssh on the cluster (`clusterctl ssh`)"
        ),
    ),
    Cause(
        "permission-denied",
        log=(
            r"""[Pp]ermission denied: ['"]?(?P<file>[^'"\n]+)""",
            (
                r"""(?:^|: )(?:cannot \w+(?: \w+)* )?['"\u2018]?"""
                r"""(?P<file>[^'"\u2018\u2019:\s]+)['"\u2019]?: [Pp]ermission denied"""
            ),
            r"(?P<file>)[Pp]ermission denied",
        ),
        when=not_quoted,
        why=lambda case: f"permission denied{case.at}: {case['file'] or 'the log shows the file'}",
        fix=(
            "jobs run as an ordinary user: write to the job's folder or your home folder, and check "
            "the file with `ls -l`"
        ),
    ),
    # --- GPUs -------------------------------------------------------------------------------------
    Cause(
        "cuda-driver-too-old",
        log=(
            r"driver version is insufficient",
            r"driver on your system is too old",
            r"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            r"forward compatibility was attempted",
        ),
        when=not_quoted,
        why=lambda case: f"the NVIDIA driver is too old for this CUDA{case.at}",
        fix="use a build for an older CUDA with --requirements, or a newer driver (docs/gpus.md)",
    ),
    Cause(
        "invalid-device-ordinal",
        log=(
            r"invalid device ordinal",
            r"CUDA_ERROR_INVALID_DEVICE",
        ),
        when=not_quoted,
        why=lambda case: f"the program uses a GPU that the job does not have{case.at}",
        fix="use LOCAL_RANK as the GPU number, and ask for one GPU per rank with --gpus",
    ),
    Cause(
        "no-gpu",
        log=(
            r"no NVIDIA driver",
            r"No CUDA GPUs are available",
            r"Found no NVIDIA driver",
            r"CUDA_ERROR_NO_DEVICE",
            r"no CUDA-capable device",
            r"Torch not compiled with CUDA",
            r"CUDA is not available",
            r"torch\.cuda\.is_available\(\) is False",
            r"libcuda\.so",
            r"ProcessGroupNCCL is only supported with GPUs",
            r"Unable to initialize backend '(?:cuda|gpu)'",
        ),
        why=lambda case: f"no GPU found{case.at}",
        fix=(
            "ask for GPUs with --gpus in a partition that has them (`clusterctl status`); on "
            "CPUs, use the device cpu and the backend gloo"
        ),
    ),
    Cause(
        "cuda-no-kernel-image",
        log=r"no kernel image is available",
        when=not_quoted,
        why=lambda case: f"this CUDA build has no code for this GPU{case.at}",
        fix="with --requirements, use a build for the compute capability of this GPU",
    ),
    Cause(
        "cuda-version-library",
        log=r"lib(?:cudart|cublas|cudnn|nccl)[\w.]*: (?:cannot open|version)",
        why=lambda case: f"a CUDA library is missing or has the wrong version{case.at}",
        fix="set matching versions with --requirements",
    ),
    Cause(
        "gpu-lost",
        log=(
            r"GPU is lost",
            r"fallen off the bus",
            r"uncorrectable ECC error",
            r"CUDA error: unknown error",
            r"NVRM: Xid",
            r"\bXid \(PCI",
        ),
        when=not_quoted,
        why=lambda case: f"a GPU failed{case.at}",
        fix="drain the node (`clusterctl node drain NODE`), submit again, and see docs/gpus.md",
    ),
    Cause(
        "cuda-error",
        log=(
            r"CUDA error: (?P<say>.*)",
            r"CUDA driver error: (?P<say>.*)",
            r"(?P<say>cud(?:a|nn)Error\w+)",
        ),
        when=not_quoted,
        why=lambda case: f"CUDA error{case.at}: {case['say']}",
        fix="run with --env CUDA_LAUNCH_BLOCKING=1 to find the kernel",
    ),
    # --- Communication ----------------------------------------------------------------------------
    master_port_in_use,
    Cause(
        "port-in-use",
        log=(
            r"[Aa]ddress already in use",
            r"EADDRINUSE",
            r"errno: 98\b",
        ),
        when=not_quoted,
        why=lambda case: f"a port is already in use{case.at}",
        fix=(
            "if the program uses a fixed port, use MASTER_PORT, which was free when the job "
            "began; if the port is MASTER_PORT, another process took it since then: submit again"
        ),
    ),
    Cause(
        "nccl-timeout",
        log=(
            r"Watchdog caught collective operation timeout",
            r"ncclTimeout",
            r"collective operation timeout",
        ),
        when=not_quoted,
        why=lambda case: f"NCCL: a collective timed out{case.at}: a rank did not take part",
        fix=(
            "find the rank that stopped (`clusterctl logs --rank`); all ranks must call the same "
            "collectives in the same order"
        ),
    ),
    Cause(
        "nccl-network",
        log=(
            r"ncclSystemError",
            r"ncclRemoteError",
            r"NCCL WARN.*(?:connect|socket|ibv|Call to|NET/)",
        ),
        when=not_quoted,
        why=lambda case: f"NCCL: the connection between ranks failed{case.at}",
        fix=(
            "run with --env NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME selects the network interface, "
            "NCCL_IB_DISABLE=1 disables InfiniBand"
        ),
    ),
    Cause(
        "nccl-usage",
        log=(
            r"ncclInvalidUsage",
            r"ncclInvalidArgument",
            r"Duplicate GPU detected",
        ),
        when=not_quoted,
        why=lambda case: f"NCCL: invalid usage{case.at}; often two ranks use the same GPU",
        fix="use LOCAL_RANK as the GPU number, and at most one rank per GPU",
    ),
    Cause(
        "nccl",
        log=(
            r"ncclUnhandledCudaError",
            r"ncclInternalError",
            r"NCCL error",
            r"ncclCommInitRank.*[Ff]ailed",
        ),
        when=not_quoted,
        why=lambda case: f"NCCL error{case.at}",
        fix="run with --env NCCL_DEBUG=INFO, and read the lines that it adds to the log",
    ),
    Cause(
        "rendezvous",
        log=(
            r"RendezvousConnectionError",
            r"RendezvousTimeoutError",
            r"Timed out waiting for clients",
            r"client socket has timed out",
            r"timed out after \d+ms while trying to connect",
            r"connection to the C10d store has failed",
            r"DistStoreError",
            r"wait timeout after \d+ms",
        ),
        when=not_quoted,
        why=lambda case: f"the rendezvous of the ranks at MASTER_ADDR timed out{case.at}",
        fix=(
            "use MASTER_ADDR, MASTER_PORT and WORLD_SIZE as the job sets them, and check that "
            "every rank starts"
        ),
    ),
    Cause(
        "connection-refused",
        log=(
            r"[Cc]onnection refused",
            r"ECONNREFUSED",
        ),
        when=not_quoted,
        why=lambda case: f"connection refused{case.at}: no process listens on the port",
        fix=(
            "use MASTER_ADDR and MASTER_PORT as the job sets them, and check that rank 0 (or the "
            "server) has started"
        ),
    ),
    Cause(
        "unknown-host",
        log=(
            r"Name or service not known",
            r"Temporary failure in name resolution",
            r"getaddrinfo failed",
            r"Could not resolve host(?:name)?\b",
            r"unable to resolve host address",
            r"No address associated with hostname",
        ),
        when=not_quoted,
        why=lambda case: f"a host name cannot be resolved{case.at}",
        fix=(
            "nodes may have no internet access: upload data with `clusterctl put`, models with "
            "--include; between ranks, use MASTER_ADDR"
        ),
    ),
    Cause(
        "no-network",
        log=(
            r"Network is unreachable",
            r"No route to host",
        ),
        when=not_quoted,
        why=lambda case: f"the network connection failed{case.at}: no route to the host",
        fix=(
            "nodes may have no internet access: upload data with `clusterctl put`, and models "
            "with --include"
        ),
    ),
    Cause(
        "no-network",
        log=(
            r"Max retries exceeded(?!.*(?:SSL|certificate|too many redirects))",
            r"ConnectTimeout",
        ),
        when=not_quoted,
        why=lambda case: f"the network connection failed{case.at}: no answer from the host",
        fix=(
            "nodes may have no internet access: upload data with `clusterctl put`, and models "
            "with --include"
        ),
    ),
    Cause(
        "broken-pipe",
        log=r"^BrokenPipeError: ",
        why=lambda case: (
            "the reader of a pipe, or the other end of a connection, ended before the "
            f"program{case.at}"
        ),
        fix=(
            "if the output goes through a pipe, as in `PROGRAM | head`, check its last command; "
            "of several ranks, find the one that ended first with `clusterctl logs`"
        ),
    ),
    Cause(
        "connection-lost",
        log=(
            r"Connection (?:closed by peer|reset by peer)",
            r"Broken pipe",
            r"remote process exited",
        ),
        when=not_quoted,
        why=lambda case: f"a connection was lost{case.at}: the other end closed it",
        fix="if the other end is a rank, find the rank that ended first with `clusterctl logs`",
    ),
    Cause(
        "gloo-interface",
        log=(
            r"Unable to (?:find address for|resolve)",
            r"gloo.*(?:rv\.|ifname|interface)",
        ),
        when=not_quoted,
        why=lambda case: f"Gloo found no usable network interface{case.at}",
        fix="set the interface with --env GLOO_SOCKET_IFNAME=…",
    ),
    Cause(
        "gloo-connect",
        log=(
            r"(?i)gloo(?:.*\n)?.*(?:connect(?:ion|FullMesh)? .*(?:fail|refus|clos|reset|abort)"
            r"|connect\b.*(?:fail|refus|timed? ?out)|timed out|timeout)"
        ),
        when=not_quoted,
        why=lambda case: f"Gloo: the connection between ranks failed{case.at}",
        fix=(
            "find the rank that ended first with `clusterctl logs`; all ranks must call the same "
            "collectives in the same order"
        ),
    ),
    Cause(
        "mpi-slots",
        log=(
            r"not enough slots available",
            r"More processes requested than permitted",
        ),
        when=not_quoted,
        why="mpirun: not enough slots for the ranks",
        fix=(
            "ask for more slots with --nodes and --tasks-per-node, or start fewer ranks with "
            "mpirun -np"
        ),
    ),
    Cause(
        "mpi-launch",
        log=(
            r"ORTE was unable to reliably start",
            r"PRTE was unable to",
            r"ORTE does not know how to route",
            r"unable to launch the specified application",
            r"An ORTE daemon has unexpectedly failed",
            r"lost communication with (?:a|its) remote daemon",
        ),
        when=not_quoted,
        why="mpirun could not start the ranks on all nodes",
        fix=lambda case: (
            f"check the nodes with `clusterctl status`; if only this cluster fails, {case.repair}"
        ),
    ),
    Cause(
        "mpi-truncate",
        log=r"MPI_ERR_TRUNCATE",
        when=not_quoted,
        why=lambda case: f"MPI: a message is longer than its receive buffer{case.at}",
        fix="use the same count and type for send and receive; the traceback shows the call",
    ),
    Cause(
        "mpi-no-free-slots",
        launcher=(
            r"All nodes which are allocated for this job are already filled",
            r"An error occurred in MPI_Comm_spawn",
            (
                r"in mpi4py\.MPI\.Intracomm\.Spawn(?:_multiple)?\n"
                r"[^\n]*\bMPI_ERR_(?:UNKNOWN|SPAWN|UNSUPPORTED)"
            ),
        ),
        why=lambda case: (
            f"MPI_Comm_spawn could not start ranks{case.at}: only mpirun can start more ranks, "
            "and only in free tasks"
        ),
        fix=(
            "submit with --launcher mpirun --ranks N, less than the number of tasks; in a shell "
            "script: mpirun -n N"
        ),
    ),
    Cause(
        "mpi-error",
        log=r"(?P<what>MPI_ERR_\w+)(?:: (?P<say>[^\n]+))?",
        when=not_quoted,
        why=lambda case: f"MPI error {case['what']}{case.at}",
        fix=lambda case: f"check the call{case.place or ' that the traceback shows'}",
    ),
    # --- Arguments and the program itself ---------------------------------------------------------
    mpi_without_pmix,
    Cause(
        "arguments",
        log=(
            r"(?i)^usage: (?:.*\n){1,60}?(?-i:.*(?<![\w./:-])(?P<what>[\w./-]+): error: "
            r"(?P<say>.*(?:argument|invalid choice|expected|required).*))"
        ),
        why=lambda case: f"the program rejected its arguments{case.at}: {case['say']}",
        fix="correct the arguments in your script, or those after -- of `clusterctl submit`",
    ),
    Cause(
        "arguments",
        exit_code=2,
        log=(
            r"(?<![\w./:-])(?P<what>[\w./-]+): error: "
            r"(?P<say>.*(?:argument|invalid choice|expected|required).*)"
        ),
        why=lambda case: f"the program rejected its arguments{case.at}: {case['say']}",
        fix="correct the arguments in your script, or those after -- of `clusterctl submit`",
    ),
    Cause(
        "arguments",
        exit_code=2,
        log=r"(?i)^usage: ",
        why=lambda case: f"the program rejected its arguments{case.at}",
        fix="write the program's arguments after --",
    ),
    Cause(
        "usage",
        log=r"^payload: error: (?P<say>.*)",
        why=lambda case: f"{case['say']}",
        fix="see docs/payload.md, or `clusterctl submit … -- --help`",
    ),
    Cause(
        "syntax-error",
        log=r"(?P<exception>(?:SyntaxError|IndentationError|TabError): .*)",
        why=lambda case: f"syntax error{case.at}: {case['exception']}",
        fix="correct the line; the cluster's Python may be an older version than yours",
    ),
    Cause(
        "syntax-error",
        log=(
            r"(?<![\w./+-])(?P<what>[\w./+-]+): line (?P<line>\d+): "
            r"(?:syntax error|unexpected EOF).*"
        ),
        why=lambda case: f"syntax error{case.at}: {case['what']}, line {case['line']}",
        fix="correct the script; check it with `bash -n`",
    ),
    Cause(
        "assertion",
        log=r"""^(?P<exception>AssertionError.*)|Assertion [`'"](?P<say>.*)[`'"] failed""",
        why=lambda case: f"assertion failed{case.at}: {case['exception']}{case['say']}",
        fix=lambda case: f"correct the program{case.place or ' where the traceback ends'}",
    ),
    Cause(
        "keyboard-interrupt",
        log=r"^KeyboardInterrupt",
        why=lambda case: f"interrupted{case.at} by SIGINT (KeyboardInterrupt)",
        fix="if the job was ended by mistake, submit it again",
    ),
    Cause(
        "unpicklable",
        log=(
            r"Weights only load failed",
            r"UnpicklingError",
            r"Invalid magic number",
        ),
        why=lambda case: f"a checkpoint or pickle could not be read{case.at}",
        fix="check that the file is complete, and was written by a compatible version",
    ),
    Cause(
        "python-exception",
        log=(
            r"^(?P<exception>[A-Za-z_][\w.]*(?:Error|Exception|Warning|Exit|Interrupt|Abort)\b.*)",
            r"^(?P<exception>[A-Za-z_][\w.]*(?:: .*)?)$",
        ),
        when=lambda case: case.error.tracebacks,
        why=lambda case: f"{case['exception']}{case.where}{case.group}",
        fix=lambda case: f"correct the program{case.place or ' where the traceback ends'}",
    ),
    Cause(
        "cpp-exception",
        log=(
            r"terminate called after throwing an instance of '(?P<what>[^']+)'"
            r"(?:\s+what\(\): +(?P<say>.*))?"
        ),
        why=lambda case: (
            f"uncaught C++ exception {case['what']}{case.at}: {case['say'] or 'no message'}"
        ),
        fix="correct the program",
    ),
    # The same for programs that show no frames (sys.tracebacklimit), or log their exceptions
    # themselves.
    Cause(
        "python-exception",
        log=r"^(?P<exception>[A-Za-z_][\w.]*(?:Error|Exception)(?:: .*)?)\s*\Z",
        why=lambda case: f"{case['exception']}{case.where}",
        fix="correct the program",
    ),
    Cause(
        "mpi-abort",
        launcher=r"MPI_ABORT was invoked on rank",
        why=lambda case: f"the program called MPI_Abort{case.at}",
        fix=lambda case: _NO_LOG if case.wrote_nothing else "read the log's lines before the call",
    ),
    # --- Ends without a known cause ---------------------------------------------------------------
    Cause(
        "hung-after-end",
        launcher=(
            r"exiting improperly",
            r"collective timeout seq",
            r'did not (?:call|invoke) "?(?:finalize|MPI_Finalize)',
        ),
        why=lambda case: f"a rank ended{case.at} while other ranks waited for it",
        fix="all ranks must take part in each collective and end with MPI_Finalize",
    ),
    Cause(
        "abort",
        signal="SIGABRT",
        why=lambda case: f"aborted{case.at} (SIGABRT)",
        fix=lambda case: (
            (_NO_LOG if case.wrote_nothing else "read the end of the log")
            + "; `--env PYTHONFAULTHANDLER=1` shows the Python line"
        ),
    ),
    Cause(
        "broken-pipe",
        signal="SIGPIPE",
        why=lambda case: f"killed by SIGPIPE{case.at}: the reader of its pipe ended",
        fix="check the pipes in the script",
    ),
    Cause(
        "cpu-limit",
        signal="SIGXCPU",
        why=lambda case: f"CPU time limit reached{case.at}",
        fix="raise the limit with `ulimit -t` in the script",
    ),
    Cause(
        "file-size-limit",
        signal="SIGXFSZ",
        why=lambda case: f"file size limit reached{case.at}",
        fix="raise the limit with `ulimit -f` in the script",
    ),
    Cause(
        "killed",
        signal="SIGKILL",
        when=lambda case: case.nearly,
        why=lambda case: f"killed by SIGKILL{case.at}, with {case.nearly} of memory in use",
        fix=lambda case: (
            f"{case.more_memory}use more nodes, or a smaller batch; `dmesg` on the node shows "
            "whether its kernel killed the program"
        ),
    ),
    Cause(
        "killed",
        signal="SIGKILL",
        why=lambda case: f"killed by SIGKILL{case.at}; nothing shows a lack of memory",
        fix=(
            "look for a `kill` in the script, or for another user on the node; `dmesg` on the "
            "node shows whether its kernel killed the program"
        ),
    ),
    Cause(
        "stopped",
        launcher=_SAVED,
        when=lambda case: case.sent,
        why=lambda case: (
            f"stopped by {case.sent}, which was sent to the job; its work is saved after "
            f"iteration {case['iteration']}"
        ),
        fix="if the job was ended by mistake, continue with the command at the end of the log",
    ),
    Cause(
        "stopped",
        when=lambda case: case.sent,
        why=lambda case: f"stopped by {case.sent}, which was sent to the job",
        fix=(
            "if the job was ended by mistake, submit it again; with --save-interval, it can "
            "continue"
        ),
    ),
    notice_not_handled,
    Cause(
        "terminated",
        signal="SIGTERM",
        why=lambda case: f"ended by SIGTERM{case.at}; the sender is unknown",
        fix="look for a `kill` in the script, or for another user on the node",
    ),
    Cause(
        "signal",
        when=lambda case: case.failed.signal,
        why=lambda case: f"killed by {case.failed.signal}{case.at}",
        fix=lambda case: _NO_LOG if case.wrote_nothing else f"read the end of the log: {SHOW_LOG}",
    ),
    Cause(
        "launch-failure",
        reason=r"JobLaunchFailure",
        exit_code=0,
        why="a node could not launch the job",
        fix=(
            "check the nodes with `clusterctl status`, and read slurmd's log on the node "
            "(/var/log/slurm)"
        ),
    ),
    unanswered_read,
    Cause(
        "packed-tasks",
        launcher=(
            r"^clusterctl: (?P<failed>\d+) of (?P<all>\d+) tasks have failed: "
            r"(?P<tasks>(?P<first>\d+)[\d, .]*);"
        ),
        why=lambda case: f"{case['failed']} of {case['all']} packed tasks failed: {case['tasks']}",
        fix=lambda case: (
            f"`clusterctl logs {case.job.id}_{case['first']}` shows the output of the first; after "
            f"`clusterctl collect`, `clusterctl replay {case.job.id} --failed` runs them again"
        ),
    ),
    Cause(
        "exit-code",
        exit_code=75,
        why=lambda case: (
            f"exit code 75{case.at}, with which a program asks to be restarted after it has saved "
            "its work"
        ),
        fix=(
            "use --requeue; a restart counts as progress if it writes a newer checkpoint, or the "
            "step to the file $CLUSTERCTL_HEARTBEAT"
        ),
    ),
    Cause(
        "disk-full",
        when=lambda case: case.failed.exit_code and case.wrote_nothing and case.evidence.is_full,
        why=lambda case: (
            f"exit code {case.failed.exit_code}{case.at}; its log is empty, and the file system of "
            "the job's folder is full"
        ),
        fix="remove or collect files there, then submit again; `df -h` and `quota` show the room",
    ),
    Cause(
        "exit-code",
        when=lambda case: case.failed.exit_code,
        why=lambda case: f"exit code {case.failed.exit_code}{case.at}{_in_a_shell(case)}",
        fix=lambda case: _NO_LOG if case.wrote_nothing else f"read the end of the log: {SHOW_LOG}",
    ),
    Cause(
        "unknown",
        why=lambda case: f"{case.job.state.value}{case.at}: {case.job.reason or 'no reason given'}",
        fix=lambda case: _NO_LOG if case.wrote_nothing else f"read the log: {SHOW_LOG}",
    ),
)


def first_cause(case: Case) -> Explanation:
    """Return the first cause that applies to a job."""
    causes = WAITING if case.job.state is JobState.PENDING else ENDED
    # The last cause always applies.
    found = next(filter(None, (cause(case) for cause in causes)))
    return _not_restarted(found, case.evidence.attempt.stop)


def _not_restarted(last: Explanation, stop: str) -> Explanation:
    """Add why job.py did not restart the job to the cause of its last end."""
    match stop:
        case "no-progress":
            return Explanation(
                "stopped-no-progress",
                f"{last.cause}; not restarted, because the job had failed several times in a row "
                "without a newer checkpoint or step",
                last.fix,
                last.match,
                last.failed,
            )
        case "chain-over":
            return Explanation(
                "stopped-chain-over",
                "the time of --chain is over",
                "submit again with a longer --chain; with --from-run, `train` continues from its "
                "newest checkpoint",
                last.match,
                last.failed,
            )
    return last
