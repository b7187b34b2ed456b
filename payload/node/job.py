"""Runs and watches a job on its nodes. Uses only the standard library of Python 3.8 or newer.

    job.py run [OPTION...] PROGRAM...
        --telemetry=SECONDS   run telemetry on all nodes, with a sample every SECONDS
        --hang=MODE@SECONDS   watch the job's progress (see hang.py)
        --alarms=RULES        name wasted time (see alarms.py)
        --requeue             have Slurm requeue the job unless it succeeds, is cancelled or cannot succeed
        --chain=SECONDS       requeue the job only until its attempts have run this long together
        --files=FOLDER        the folder of the program, for an array that of the task's program
        --start=FOLDER        the folder below it in which the program starts
        --array=ID            this is the task ID of an array in Slurm: create links in the folder of its
                              program to the job's sent files
        --sweep               pass the array task's values in sweep-tasks.json to the program
        --build=COMMAND       build the program first (see build.py)
        --secrets=FOLDER      the folder with variables that only the program or its ranks get
        --each-node           each node has this folder, because the nodes share no folder
        --image=PATH          make an image for the node's container engine first (see images.py), in the
                              folder of --kept
        --stage=JSON          copy files to the nodes' disks first (see stage.py): a list of [SOURCE, TARGET],
                              or [SOURCE, TARGET, "by-node"] if each node gets a share of the files
        --nodes=HOST,...      the job's nodes, without Slurm
        --ssh=COMMAND         the command that connects to a node
    job.py module-not-loaded [--array=ID] MODULE
    job.py shell [--secrets=FOLDER] PROGRAM...
    job.py torchrun PYTHON [OPTIONS OF TORCHRUN] PROGRAM...
    job.py container --image=PATH --kept=FOLDER --bind=FOLDER,... [--mounts=JSON] [--secrets=FOLDER]
                     --env=NAME,... PROGRAM...
    job.py prepare FOLDER FILES START
    job.py watch [--requeue=JOB] [--image=PATH --kept=FOLDER] [--stage=JSON] FOLDER SECONDS
                 [MODE@SECONDS FILES [HOST,... SSH]]

The job's script on the first node ends with `run`, which forwards signals to PROGRAM and returns
the exit status of PROGRAM. `run` records the start, each signal and the end in the file job.events,
and then a requeue or the reason against it. If the program can't start, `run` records the cause; so
does `module-not-loaded`, which the script starts if it can't load MODULE. With SIGTERM, `run`
records the state that Slurm gives the job, such as TIMEOUT. `shell` starts PROGRAM, the shell of
`clusterctl shell`, with a job's variables. On a node, `prepare` creates the folders of an array
task, `torchrun` starts PyTorch's agent, `container` starts PROGRAM in an image, `watch` starts
telemetry, and on the first node hang.py, and has Slurm requeue JOB if `run` was killed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

# The folder that holds the payload.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from payload.node import build, history, messages, ports, processes, restarts, secret_values, task
from payload.node.claim import end_unless_first
from payload.node.output import start_with_output
from payload.node.requeue import (
    FILES_S,
    STEP,
    JobEvents,
    Restart,
    is_notice,
    job_of,
    lost_nodes,
    own_log,
    own_nodes,
    requeue_unsupervised,
    start_facts,
    step_environment,
    wait_for,
    wait_until_ended,
)

RANK_VARIABLES = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK".split()
# After a failure, telemetry may wait for a dead node. It must not delay the requeue.
TELEMETRY_END_S = 3.0
TELEMETRY_FAILED_S = 0.3
# If a rank has failed, srun aborts its step: slurmstepd sends SIGTERM to the other ranks, and
# SIGKILL only after KillWait (30 s). Ranks that save at SIGTERM together with the failed rank can
# never do that, and if a slurmstepd is gone, no rank of its node gets a signal. So ranks that have
# not ended after this time are killed, and srun after this time once more. At a cancel or a time
# limit, srun writes the same line, but this process gets SIGTERM, and the ranks may use KillWait to
# save their work.
ABORTED_S = 3.0
# The lines of `watch` about files that are staged: a text for the log, and at the end "", or the code
# and text of a CannotStartError as JSON.
STAGING = "staging: "
STAGED = "staged: "
# The line of `watch` about a node that has lost the slurmstepd of its ranks.
LOST = "lost slurmstepd: "
# A shell returns this status if it finds no such program.
NOT_STARTED = 127
# srun reports the early end of a task.
TASK_ENDED = re.compile(r"srun: error: \S+: tasks? ")
# How long to wait for the first record of telemetry if the job is short.
TELEMETRY_START_S = 2.0


class Telemetry:
    """Processes that sample the load of each node (telemetry). If they fail, the job is not
    affected.
    """

    def __init__(self, options: Mapping[str, str], nodes: Sequence[str]) -> None:
        self._pids: list[int] = []
        self._open: list[int] = []
        self._log = task.open_for_writing("telemetry.log", os.O_TRUNC)
        environment = step_environment()
        # Slurm's own variables would limit the step to GPUs that it is not given.
        if given := os.environ.get("SLURM_GPUS_ON_NODE"):
            environment["CLUSTERCTL_JOB_GPUS"] = given
        for command in self._commands(options, nodes):
            # Each process has its own pipe, because ssh makes its input non-blocking for all
            # readers.
            reads, writes = os.pipe()
            self._open.append(writes)
            with suppress(OSError):
                self._pids.append(task.start(command, reads, self._log, self._log, environment))
            os.close(reads)

    @staticmethod
    def _commands(options: Mapping[str, str], nodes: Sequence[str]) -> list[list[str]]:
        """Return the commands that start telemetry: a single srun; without Slurm, a command for
        each node.
        """
        ssh = options.get("ssh", "")
        here = os.path.abspath(__file__)
        job = job_of(options)
        more = [f"--requeue={job}"] if job and "requeue" in options else []
        passed = ("alarms", "stage", "image", "kept")
        more += [f"--{name}={options[name]}" for name in passed if name in options]
        watch = [sys.executable, "-IS", here, "watch", *more, os.getcwd(), options["telemetry"]]
        first = [*watch, options.get("hang", ""), options["files"]]
        if not nodes:
            count = os.environ.get("SLURM_JOB_NUM_NODES", "1")
            # Slurm 24.11, which sets this variable, lets `srun --cpus-per-task=2 PROGRAM` without
            # --ntasks wait for the end of all other steps, except steps for other launchers.
            beside = ["--external-launcher"] if "SLURM_OOM_KILL_STEP" in os.environ else []
            return [[*STEP, *beside, f"--nodes={count}", f"--ntasks={count}", *first]]
        quoted = " ".join(map(shlex.quote, watch))
        first = [*first, ",".join(nodes), ssh]
        return [
            first if node == task.host_name() else [*ssh.split(), node, quoted] for node in nodes
        ]

    def await_staged_nodes(self, count: int) -> int:
        """Wait until ``count`` nodes have staged their files, and return the exit status of the job
        if its program can't run: a node has failed, or the job gets SIGTERM.

        The progress is written to the job's log. CannotStartError: a node can't be prepared.
        """
        shown: set[str] = set()
        while True:
            text = os.pread(self._log, 1 << 24, 0).decode(errors="replace")
            lines = text.rpartition("\n")[0].splitlines()
            texts = [line[len(STAGING) :] for line in lines if line.startswith(STAGING)]
            for text in texts:
                if text not in shown:
                    os.write(1, f"clusterctl: {text}\n".encode(errors="replace"))
            shown.update(texts)
            ends = [line[len(STAGED) :] for line in lines if line.startswith(STAGED)]
            if len(ends) >= count:
                refusals = [task.CannotStartError(**json.loads(end)) for end in ends if end]
                for refusal in refusals[1:]:
                    task.complain(refusal.text)
                if refusals:
                    raise refusals[0]
                return 0
            if signal.SIGTERM in signal.sigpending():
                return history.FROM_SHELL + signal.SIGTERM
            if self._has_ended() or any(map(TASK_ENDED.match, lines)):
                task.complain("not all nodes were prepared; see telemetry.log")
                return 1
            time.sleep(0.1)

    def _has_ended(self) -> bool:
        """Return whether one of the processes has ended that this job has started."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            return any(os.waitid(os.P_PID, pid, how) is not None for pid in self._pids)
        return True

    def kill_ranks(self) -> None:
        """Have `watch` kill the job's ranks on all nodes. Slurm does not do that in a step that it
        aborts.
        """
        for writes in self._open:
            with suppress(OSError):
                os.write(writes, b"kill\n")

    def end(self, patience_s: float) -> None:
        """End telemetry within ``patience_s`` seconds, and delete its log if it has no errors."""
        for writes in self._open:
            os.close(writes)
        wait_until_ended(self._pids, patience_s)
        lines = os.pread(self._log, task.CHUNK, 0).splitlines()
        # srun writes the first on each cluster on which Slurm binds no cores.
        ordinary = (b"lacks support for cpu binding", *map(str.encode, (STAGING, STAGED)))
        if all(any(text in line for text in ordinary) for line in lines):
            with suppress(OSError):
                os.unlink("telemetry.log")


class JobProgram:
    """The job's program, which runs on this node: usually a launcher of ranks."""

    def __init__(
        self,
        program: list[str],
        restart: Restart,
        telemetry: Telemetry,
        secrets: Mapping[str, str],
    ) -> None:
        self._restart = restart
        self._telemetry = telemetry
        self.launcher = restarts.launcher_of(program)
        environment = {**os.environ, **secrets}
        self._pid, self._copying = start_with_output(
            lambda out, err: task.start_or_exit(program, 0, out, err, environment=environment),
            (1, 2),
        )
        self.is_told = False

    def wait(self) -> int:
        """Wait for the end of the program, and return its exit code, or -N if signal N ended it.
        Kill it if it can't end by itself.
        """
        task.wake_regularly()
        is_killed = False
        aborted_since = math.inf
        kills = 0
        while (code := task.supervise(self._pid, self._pass_on)) is None:
            now = time.monotonic()
            if self.launcher == "srun" and not self.is_told and is_step_aborted():
                aborted_since = min(now, aborted_since)
            if not is_killed and must_end():
                is_killed = True
                self._pass_on(signal.SIGKILL)
            elif not (is_killed or self.is_told) and now - aborted_since > (kills + 1) * ABORTED_S:
                kills += 1
                is_killed = self._end_step(is_last=kills > 1)
        self._copying.end(task.DRAIN_S)
        return code

    def _end_step(self, *, is_last: bool) -> bool:
        """Kill the ranks of a step that srun has aborted, and srun if it can't end by itself.

        is_last: whether the ranks were killed before. Return whether srun was killed.
        """
        if nodes := nodes_without_slurmstepd():
            is_last = True
            text = f"srun waits for ranks that have no slurmstepd any more on {', '.join(nodes)}"
            JobEvents().add("cause", code=history.LOST_SLURMSTEPD, text=text)
            task.complain(f"{text}, and is killed")
        elif not is_last:
            task.complain("ranks do not end after the failure of another rank, and are killed")
        self._restart.record_signal(signal.SIGKILL)
        self._telemetry.kill_ranks()
        if is_last:
            os.kill(self._pid, signal.SIGKILL)
        return is_last

    def _pass_on(self, number: int) -> None:
        is_term = number == signal.SIGTERM
        self.is_told = self.is_told or is_term
        is_passed_on = is_handled = True
        if is_notice(number):
            is_passed_on, is_handled = self._announce(number)
        is_over = self._restart.record_signal(number, is_ignored=not is_handled)
        if number == signal.SIGKILL:
            signal_ranks(number)
        if not is_passed_on:
            return
        # At SIGTERM, srun kills its ranks at once. If Slurm ends the job, it signals the ranks
        # itself.
        if is_over or not (is_term and self.launcher == "srun" and signal_ranks(number)):
            os.kill(self._pid, number)

    def _announce(self, number: int) -> tuple[bool, bool]:
        """Return whether the program itself gets the notice of its time limit, and whether it or its
        ranks handle the notice.

        The signal would end a process that does not handle it before its time is over. The ranks of
        a shell script that does not handle it get it here.
        """
        if not self.launcher and processes.handles(self._pid, number):
            return True, True
        is_handled = processes.is_handled(os.environ.get("SLURM_JOB_ID", "none"), number)
        if is_handled is False:
            name = signal.Signals(number).name
            task.complain(
                f"the time limit is near; the program does not handle {name}, and keeps running"
            )
            return False, False
        if self.launcher:
            return True, True
        # A shell script without a trap would end, although its ranks can save their work.
        signal_ranks(number)
        return False, True


def must_end() -> bool:
    """Return whether a hang or an alarm is to end the program."""
    return any(map(os.path.exists, (restarts.HANG_FILE, restarts.ALARM_FILE)))


def is_step_aborted() -> bool:
    """Return whether srun has aborted its step in this attempt, or a node has lost the step's
    slurmstepd.
    """
    # srun's own messages in telemetry.log are about telemetry.
    is_aborted = restarts.is_aborted(restarts.end_of_file(own_log()))
    return is_aborted or bool(nodes_without_slurmstepd())


def nodes_without_slurmstepd() -> list[str]:
    """Return the nodes that have lost the slurmstepd of their ranks, as `watch` tells."""
    lines = restarts.end_of_file("telemetry.log").splitlines()
    return [line[len(LOST) :] for line in lines if line.startswith(LOST)]


def has_lost_node(program: Sequence[str], nodes: Sequence[str], *, is_told: bool) -> bool:
    """Return whether mpirun, which then ends with 0, has lost a node or was told to end.

    is_told: whether the program got SIGTERM, because its own node was shut down, for example.
    """
    if restarts.has_lost_daemon(restarts.end_of_file(own_log())):
        return True
    return restarts.launcher_of(program) == "mpirun" and (
        is_told or bool(lost_nodes(nodes or own_nodes(), history.DOWN))
    )


def run(words: Sequence[str]) -> int:
    """Run a job's program, given the arguments of `job.py run`, and return the program's exit
    status.
    """
    options, program = task.split(words)
    nodes = [node for node in options.get("nodes", "").split(",") if node]
    try:
        return run_program(options, program, nodes)
    finally:
        if "secrets" in options:
            secret_values.forget(options, nodes)


def prepare_program(options: Mapping[str, str]) -> Sequence[str]:
    """Create the folders of a job's program, and set the variables of its sweep. Return the arguments
    of the sweep. options: of `job.py run`.
    """
    files, start = options["files"], options.get("start", "")
    prepare_folder(files, start, is_task="array" in options)
    if "array" in options:
        prepare_nodes(files, start)
    if "sweep" not in options:
        return []
    number = int(os.environ["SLURM_ARRAY_TASK_ID"])
    words, variables = take_sweep_values(read_sweep(".."), number, files)
    os.environ.update(variables)
    return words


def run_program(options: Mapping[str, str], program: list[str], nodes: Sequence[str]) -> int:
    """Run a job's program, and return its exit status. nodes: the job's nodes, without Slurm.

    options: of `job.py run`.
    """
    slurmstepd = os.getppid()
    task.mark_restart([1, 2])
    events = JobEvents()
    try:
        options = without_ready_image(options)
        # The folders of tasks have links to the files of the build.
        if "build" in options:
            build.build(options)
    except task.CannotStartError as exc:
        return refuse(events, options, nodes, exc)
    program = [*program, *prepare_program(options)]
    set_variables(nodes)
    if (status := end_unless_first(events)) is not None:
        return status
    task.hold_signals()
    restart = Restart(events, options, program)
    begin = events.size
    if (status := restart.begin(nodes)) is not None:
        return status
    # A start that only ends the job has no values any more.
    try:
        secrets = task.read_secrets(options)
    except task.CannotStartError as exc:
        return events.add_refusal(exc)
    sender = messages.MessageProcess(secrets.get(messages.VARIABLE, ""), begin)
    telemetry = Telemetry(options, nodes)
    if needs_preparation(options) and (status := await_stages(telemetry, restart, events, nodes)):
        telemetry.end(TELEMETRY_FAILED_S)
        wait_until_ended(sender.end(), messages.LAST_S)
        return status
    # A launcher passes on the option, so that the ranks read their secrets themselves.
    is_passed_on = f"--secrets={options.get('secrets')}" in program
    running = JobProgram(program, restart, telemetry, {} if is_passed_on else secrets)
    code = running.wait()
    status = status_of_program(code, running, program, nodes)
    for cause, text in restarts.causes_of_ranks().items() if status else ():
        events.add("cause", code=cause, text=text)
    # Of ranks, the launcher's messages tell it.
    how = {} if running.launcher else {"how": ending_of(code)}
    events.add("end", status=status, **how)
    is_failure = "requeue" in options and status not in (0, history.SAVED)
    telemetry.end(TELEMETRY_FAILED_S if is_failure else TELEMETRY_END_S)
    if status and "requeue" in options:
        restart.requeue_or_stop(status)
    elif "requeue" in options and os.getppid() != slurmstepd:
        restart.end_again()
    if not running.is_told:
        restart.record_late_end()
    wait_until_ended(sender.end(), messages.LAST_S)
    return status


def refuse(
    events: JobEvents,
    options: Mapping[str, str],
    nodes: Sequence[str],
    exc: task.CannotStartError,
) -> int:
    """Record a start whose program can't start. Return the job's exit status."""
    restarts.forget_ends()
    events.add("start", **start_facts(job_of(options), nodes))
    return events.add_refusal(exc)


def refuse_module(words: Sequence[str]) -> int:
    """Record that this node can't load an environment module, and return the job's exit status.

    words: the arguments of `job.py module-not-loaded`.
    """
    options, (name,) = task.split(words)
    task.mark_restart([1, 2])
    text = f"{task.host_name()} can't load the environment module {name}"
    return refuse(JobEvents(), options, [], task.CannotStartError("module-not-loaded", text))


def ending_of(code: int) -> str:
    """Return how a process has ended: exit, or the name of a signal. code: see ``JobProgram.wait``."""
    try:
        return signal.Signals(-code).name if code < 0 else "exit"
    except ValueError:  # a signal without a name
        return f"signal {-code}"


def status_of_program(
    code: int, running: JobProgram, program: Sequence[str], nodes: Sequence[str]
) -> int:
    """Return the exit status of a program that has ended: the same with each launcher.

    code: of the process, or -N if signal N ended it.
    """
    status = task.as_in_shell(code)
    if status == 0 and has_lost_node(program, nodes, is_told=running.is_told):
        return history.LOST_PEER
    if status and running.launcher:
        log = restarts.end_of_file(own_log())
        is_told = running.is_told and running.launcher == "mpirun"
        return restarts.status_of_ranks(status, log, is_told=is_told)
    return status


def await_stages(
    telemetry: Telemetry, restart: Restart, events: JobEvents, nodes: Sequence[str]
) -> int:
    """Wait until all nodes have staged their files, and record it. Return the exit status of the job
    if its program can't run. nodes: the job's nodes, without Slurm.
    """
    since = time.time()
    try:
        status = telemetry.await_staged_nodes(len(nodes or own_nodes()))
    except task.CannotStartError as exc:
        status = events.add_cause(exc)
    events.add("staged", since=round(since, 3))
    if status > history.FROM_SHELL:
        restart.record_signal(signal.SIGTERM)
    if status:
        events.add("end", status=status)
    return status


def set_variables(nodes: Sequence[str], *, hand_on: bool = False) -> None:
    """Set the variables of a job. The current folder is the job's. nodes: the job's nodes, without
    Slurm.

    hand_on: whether a program that replaces this process keeps the port of the job.
    """
    if "SLURM_JOB_ID" not in os.environ:
        task.take_host_variables()
    # srun ignores SLURM_CPUS_PER_TASK, and reads SRUN_CPUS_PER_TASK instead.
    if "SLURM_CPUS_PER_TASK" in os.environ:
        set_for_this_job(SRUN_CPUS_PER_TASK=os.environ["SLURM_CPUS_PER_TASK"])
    # After `#SBATCH --export=NONE`, srun would pass none of a script's variables to its steps, not
    # even PATH.
    for name in ("SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV"):
        os.environ.pop(name, None)
    set_rendezvous(nodes, hand_on=hand_on)
    # A program that works without output writes to this file to show its progress.
    os.environ["CLUSTERCTL_HEARTBEAT"] = os.path.abspath("heartbeat")
    # If an operation of NCCL exceeds its time-out, PyTorch writes each rank's last operations to
    # such a file. ansible/roles/slurmd/files/sbatch unsets both.
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.abspath("rank-logs/nccl-"))


def shell(words: Sequence[str]) -> int:
    """Replace this process by a program that has the variables of a job, and its secrets, which are
    then removed. words: the arguments of `job.py shell`.

    The variable CLUSTERCTL_FORWARDED has the ports of this node that `clusterctl shell` forwards.
    The session claims these ports, so that a later session knows that they are in use.
    """
    options, program = task.split(words)
    set_variables([], hand_on=True)
    try:
        os.environ.update(task.read_secrets(options))
    except task.CannotStartError as exc:
        return exc.of_rank()
    if "secrets" in options:
        shutil.rmtree(options["secrets"], ignore_errors=True)
    for port in os.environ.pop("CLUSTERCTL_FORWARDED", "").split():
        if not ports.claim(int(port), hand_on=True):
            task.complain(
                f"port {port} of {task.host_name()} is already in use, so `--forward {port}` "
                "leads to a program of another session or job: start yours on another PORT, "
                f"with --forward {port}:PORT"
            )
    return task.become(program)


def signal_ranks(number: int) -> bool:
    """Send a signal to the job's steps but telemetry, and return whether Slurm has sent it.

    If only srun were killed, its ranks would live until the job ends. SIGKILL to the whole job
    cancels it.
    """
    job = os.environ.get("SLURM_JOB_ID")
    lines = (
        task.output_of(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j"])
        if job
        else ""
    )
    steps = [line.split() for line in lines.splitlines()]
    ranks = [step for step, *name in steps if name not in (["telemetry"], ["batch"], ["extern"])]
    command = ["scancel", f"--signal={signal.Signals(number).name[3:]}", *ranks]
    # The steps may end meanwhile.
    with open(os.devnull, "w") as null:
        return bool(ranks) and wait_for(command, null.fileno()) == 0


def prepare_folder(files: str, start: str, *, is_task: bool) -> None:
    """Create the links that the program needs in its folder ``files``. start: folder in which it
    starts.
    """
    if is_task:
        link_given_files(files, start)
    if start:
        # A program that writes its metrics in this folder writes them to its topmost folder.
        with suppress(OSError):
            metrics = f"{files}/{start}/metrics.jsonl"
            if os.path.isfile(metrics) and not os.path.lexists(f"{files}/metrics.jsonl"):
                os.rename(metrics, f"{files}/metrics.jsonl")
            os.symlink(os.path.relpath("metrics.jsonl", start), metrics)


def prepare_nodes(files: str, start: str) -> None:
    """Create the folders of an array task on all nodes, which may share no folder with the first
    node.
    """
    count = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if count != "1":
        step = ["timeout", FILES_S, *STEP, f"--nodes={count}", f"--ntasks={count}", "--chdir=/"]
        here = [sys.executable, "-IS", os.path.abspath(__file__)]
        task.output_of([*step, *here, "prepare", os.getcwd(), files, start], step_environment())


def prepare(folder: str, files: str, start: str) -> int:
    """Create the folders of an array task on this node. folder: the folder of the task's logs."""
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    prepare_folder(files, start, is_task=True)
    if os.path.exists("../sweep-tasks.json") and not os.path.exists(f"{files}/sweep-values.json"):
        take_sweep_values(read_sweep(".."), int(os.environ["SLURM_ARRAY_TASK_ID"]), files)
    return 0


def link_given_files(files: str, start: str) -> None:
    """Create links in ``files``, the folder of a task's program, to the sent files in its parent
    folder.

    The folder ``start`` is created, so that each task has its own, with links to the files in the
    job's. Each task has its own metrics.
    """
    sent = os.path.dirname(files)
    parts = start.split("/") if start else []
    for depth, next_part in enumerate((*parts, "")):
        below = "/".join(parts[:depth])
        target = os.path.join(files, below)
        source = os.path.join(sent, below)
        os.makedirs(target, exist_ok=True)
        for name in sent_names(source, has_tasks=depth == 0):
            if name not in (next_part, "metrics.jsonl"):
                with suppress(FileExistsError):
                    os.symlink(os.path.relpath(f"{source}/{name}", target), f"{target}/{name}")


@lru_cache(maxsize=None)
def sent_names(folder: str, *, has_tasks: bool) -> Sequence[str]:
    """Return the names in a folder of sent files, as they were first seen.

    has_tasks: whether folders of tasks may be among them, which are left out.
    """
    return [name for name in os.listdir(folder) if not (has_tasks and is_task_folder(name))]


def is_task_folder(name: str) -> bool:
    """Return whether this is the name of an array task's folder, such as task-3."""
    kind, _, number = name.rpartition("-")
    return kind == "task" and number.isdigit()


def read_sweep(folder: str) -> Mapping[str, Any]:
    """Return the content of sweep-tasks.json, which is in the job's folder. Exit if it is damaged."""
    try:
        with open(f"{folder}/sweep-tasks.json") as file:
            sweep = json.load(file)
        return {"tasks": list(sweep["tasks"]), "arguments": list(sweep["arguments"])}
    except (OSError, ValueError, LookupError, TypeError) as exc:
        task.complain(f"sweep-tasks.json can't be read: {exc!r}")
        sys.exit(2)


def take_sweep_values(
    sweep: Mapping[str, Any], number: int, files: str
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the variables SWEEP_NAME of a task of a sweep.

    files: the folder of the task's program, which gets the values in sweep-values.json.
    """
    try:
        values = dict(sweep["tasks"][number])
        words = list(sweep["arguments"][number])
    except (ValueError, LookupError, TypeError) as exc:
        task.complain(f"sweep-tasks.json does not contain valid values of task {number}: {exc!r}")
        sys.exit(2)
    with open(f"{files}/sweep-values.json", "w") as file:
        file.write(json.dumps(values) + "\n")
    names = {
        key: "".join(letter if letter.isalnum() else "_" for letter in key.lstrip("+"))
        for key in values
    }
    return words, {f"SWEEP_{names[key].upper()}": str(value) for key, value in values.items()}


def set_rendezvous(nodes: Sequence[str], *, hand_on: bool) -> None:
    """Set MASTER_ADDR and MASTER_PORT, at which PyTorch's ranks meet. `submit --env` overrides
    them.

    hand_on: whether a program that replaces this process keeps the port.
    """
    # If another job submitted this job, sbatch has passed on its variables.
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    job = (
        os.environ.get("SLURM_JOB_ID") or os.environ.get("CLUSTERCTL_JOB_ID", "").lstrip("m") or "0"
    )
    port, is_of_jobs = ports.claim_job_port(int(job), hand_on=hand_on)
    if not is_of_jobs:
        task.complain(
            f"no port from {ports.FIRST_PORT} to {ports.FIRST_PORT + ports.PORTS - 1} is free on "
            f"{task.host_name()}, so MASTER_PORT is {port}, which a firewall between the nodes "
            "may block"
        )
    set_for_this_job(MASTER_ADDR=nodes[0] if nodes else task.host_name(), MASTER_PORT=str(port))


def set_for_this_job(**ours: str) -> None:
    """Set variables that sbatch does not pass to the jobs that this job submits."""
    earlier = os.environ.get("CLUSTERCTL_SET", "")
    os.environ.update(ours, CLUSTERCTL_SET=" ".join((earlier, *map("=".join, ours.items()))))


def torchrun(python: str, *words: str) -> int:
    """Replace this process by torchrun, which starts this node's ranks. words: its options, the
    program.
    """
    options, program = task.split(words)
    for name in list(os.environ):
        # Ranks that use MPI must not connect to the launcher's MPI.
        if name.startswith(("OMPI_", "PMIX_")):
            del os.environ[name]
    # By default, SIGUSR1 ends the agent, and Slurm then ends ranks that are saving their work.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2")
    task.take_host_variables()
    rendezvous = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    agent = [
        python,
        "-m",
        "torch.distributed.run",
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    agent += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous}",
        f"--local-addr={task.host_name()}",
    ]
    return task.become([*agent, "--no-python", *program])


def container(words: Sequence[str]) -> int:
    """Replace this process by a program in a container image. The program inherits the environment."""
    # Few jobs need this module, which imports others that are slow.
    from payload.node import images

    options, program = task.split(words)
    folders = options["bind"].split(",")
    # PMIx stores the data that ranks share in a folder of slurmd.
    if os.environ.get("PMIX_SERVER_TMPDIR"):
        folders.append(os.environ["PMIX_SERVER_TMPDIR"])
    gpus = os.environ.get("SLURM_JOB_GPUS") or os.environ.get("SLURM_STEP_GPUS")
    has_gpus = gpus or (
        "SLURM_JOB_ID" not in os.environ and task.output_of(["nvidia-smi", "--list-gpus"])
    )
    names = [name for name in options["env"].split(",") if name]
    mounts = json.loads(options.get("mounts", "[]"))
    inside = images.ContainerView(folders, mounts, names, bool(has_gpus))
    try:
        # The image does not see the file with the secrets.
        os.environ.update(task.read_secrets(options))
        if "convert" in options:
            images.prepare(options["image"], options["kept"], task.complain)
        command, environment = images.command(options["image"], options["kept"], inside, program)
    except (images.ImageError, OSError) as exc:
        local = (
            os.environ.get("SLURM_LOCALID") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or "0"
        )
        return no_image(exc).of_rank() if local == "0" else NOT_STARTED
    except task.CannotStartError as exc:
        return exc.of_rank()
    os.environ.clear()
    os.environ.update(environment)
    return task.become(command)


class Slurmstepds:
    """The slurmstepds of the program's step on this node. Each has a socket with the step's number.

    The program's step is the first besides telemetry's, ``own_step``. Users may start more steps in
    the job.
    """

    def __init__(self, job: str, own_step: str) -> None:
        # The numbers of Slurm's own steps, such as batch, have ten digits.
        self._pattern = re.compile(rf" (/\S*_{job}\.(?!{own_step}$)\d{{1,9}})$", re.MULTILINE)
        self._first: frozenset[str] = frozenset()
        self._alive: frozenset[str] = frozenset()
        self._missing: frozenset[str] = frozenset()

    def killed(self) -> list[str]:
        """Return the steps that have lost their slurmstepd: its socket is unused, but was not
        removed.

        A slurmstepd that ends by itself removes its socket a moment later, so a loss is returned
        only when it is seen twice, in two calls.
        """
        present = frozenset(self._pattern.findall(task.text_of("/proc/net/unix")))
        self._first = self._first or present
        alive = present & self._first
        missing = frozenset(path for path in self._alive - alive if os.path.exists(path))
        killed = missing & self._missing
        self._missing = missing
        self._alive = (alive | missing) - killed
        return sorted(path.rpartition("_")[2] for path in killed)


def watch(words: Sequence[str]) -> int:
    """Run telemetry on this node, given the arguments of `job.py watch`, until stdin closes.

    At a line in stdin, kill the job's ranks on this node. If the arguments tell how, also watch the
    job's progress, on the first of its nodes.
    """
    options, (folder, seconds, *hang_words) = task.split(words)
    is_first_node = os.environ.get("SLURM_NODEID", "0") == "0"
    may_requeue = is_first_node and "requeue" in options
    os.chdir(folder)
    # Slurm sends the signal of `#SBATCH --signal` to all steps. It is meant for the program.
    notices = task.PASSED_ON - {signal.SIGTERM}
    for number in notices:
        signal.signal(number, signal.SIG_IGN)
    # The mark separates these processes from the job's ranks.
    os.environ.update(PYTHONPATH=ROOT, OMP_NUM_THREADS="1", **{processes.WATCHER: "1"})
    telemetry = start_telemetry(seconds)
    locks = prepare_node(options) if needs_preparation(options) else []
    watchers = []
    if is_first_node and hang_words:
        mode, files, *where = hang_words
        watchers += start_watcher("hang.py", "watch", folder, mode, files, *where) if mode else []
        rules = options.get("alarms", "")
        watchers += start_watcher("alarms.py", folder, rules, files, seconds) if rules else []
    # If `run` is killed, Slurm ends all steps. This process then still has to requeue the job.
    if may_requeue:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The programs that were started above ignore the signal.
    for number in notices if is_first_node else ():
        signal.signal(number, record_notice)
    watch_steps(os.environ.get("SLURM_JOB_ID", "none"), os.environ.get("SLURM_STEP_ID", ""))
    if may_requeue:
        requeue_unsupervised(options["requeue"])
    for watcher in watchers:
        os.kill(watcher, signal.SIGKILL)
    for lock in locks:
        os.close(lock)
    return end_telemetry(telemetry)


def record_notice(number: int, _: object) -> None:
    """Record a signal if it announces the time limit. Slurm has sent it to all steps."""
    if is_notice(number):
        JobEvents().add_notice(number)


def without_ready_image(options: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options of `run`, without the image of a container that nodes can run as it is.

    CannotStartError: there is no such image.
    """
    if "image" not in options:
        return options
    from payload.node import images

    try:
        if images.kind_of(options["image"]) in images.RAW:
            return options
    except images.ImageError as exc:
        raise no_image(exc) from exc
    return {name: value for name, value in options.items() if name != "image"}


def no_image(exc: Exception) -> task.CannotStartError:
    """Return the error for an image that this node can't use."""
    text = f"the container image can't be used on {task.host_name()}: {exc}"
    return task.CannotStartError("image-unfit", text, NOT_STARTED)


def needs_preparation(options: Mapping[str, str]) -> bool:
    """Return whether each node has to do something before the program starts."""
    return "stage" in options or "image" in options


def prepare_node(options: Mapping[str, str]) -> list[int]:
    """Make the image of a container and stage files on this node, and tell `run`.

    Return open files whose locks keep the staged files.
    """
    # Few jobs need these modules, which import others that are slow.
    from payload.node import images, stage

    node = task.host_name()
    locks: list[int] = []
    try:
        if "image" in options:
            images.prepare(
                options["image"], options["kept"], lambda text: say(f"{STAGING}{node}: {text}")
            )
        own, count = (os.environ.get(f"SLURM_{name}") for name in ("NODEID", "JOB_NUM_NODES"))
        place = int(own or 0), int(count or 1)
        for source, target, *how in json.loads(options.get("stage", "[]")):
            staged = stage.stage(
                source,
                target,
                lambda text, target=target: say(f"{STAGING}{node}: {target}: {text}"),  # type: ignore[misc]
                place if how else None,
            )
            locks += staged.locks
            say(f"{STAGING}{node}: {staged}")
    # `run` waits for an answer of each node.
    except images.ImageError as exc:
        refuse_node(no_image(exc))
    except Exception as exc:
        what = exc if isinstance(exc, stage.StageError) else repr(exc)
        text = f"files of --set stage= can't be staged on {node}: {what}"
        refuse_node(task.CannotStartError("not-staged", text))
    else:
        say(STAGED)
    return locks


def refuse_node(exc: task.CannotStartError) -> None:
    """Tell `run` that this node can't be prepared."""
    cause = {"code": exc.code, "text": exc.text, "status": exc.status}
    say(f"{STAGED}{json.dumps(cause)}")


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode(errors="surrogateescape"))


def start_telemetry(seconds: str) -> int:
    """Start telemetry with a reading every ``seconds``, and return its pid."""
    program = [
        sys.executable,
        "-m",
        "payload",
        "telemetry",
        "--interval",
        seconds,
        "--out",
        "telemetry",
    ]
    return task.start_or_exit(program, stdin=os.open(os.devnull, os.O_RDONLY))


def end_telemetry(pid: int) -> int:
    """End telemetry after its first reading, and return its exit status."""
    first_readings = f"telemetry/{task.host_name()}.jsonl"
    deadline = time.monotonic() + TELEMETRY_START_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        has_written = os.path.exists(first_readings) and os.path.getsize(first_readings) > 0
        if has_written or time.monotonic() > deadline:
            os.kill(pid, signal.SIGTERM)
            break
        time.sleep(0.05)
    return task.as_in_shell(task.exit_code(os.waitpid(pid, 0)[1]))


def start_watcher(program: str, *words: str) -> list[int]:
    """Start a program of this folder that watches the job, and return its pid; [] if that fails."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), program)
    try:
        return [task.start([sys.executable, "-IS", script, *words])]
    except OSError:
        return []


def watch_steps(job: str, own_step: str) -> None:
    """Until stdin closes, kill the job's ranks at a line in stdin, and report lost slurmstepds."""
    stepds = Slurmstepds(job, own_step)
    while True:
        if task.is_readable(0, task.POLL_S):
            if not os.read(0, task.CHUNK):
                return
            processes.kill_ranks(job)
        for step in stepds.killed():
            task.complain(f"step {step} has no slurmstepd any more on {task.host_name()}")
            say(f"{LOST}{task.host_name()}")


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "run":
        sys.exit(run(words))
    if verb == "shell":
        sys.exit(shell(words))
    if verb == "module-not-loaded":
        sys.exit(refuse_module(words))
    if verb == "prepare":
        sys.exit(prepare(*words))
    if verb == "container":
        sys.exit(container(words))
    sys.exit(torchrun(*words) if verb == "torchrun" else watch(words))
