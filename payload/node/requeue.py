"""Restarts of a job with --requeue. Uses only the standard library of Python 3.8 or newer.

job.py calls this module on the job's first node. It records each attempt of the job in the file
job.events. After a failure, it has Slurm requeue the job, unless restarts.py returns a reason
against that.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from payload.node import history, restarts, task
from payload.node.history import LOST, Attempt

# These variables limit a job's steps. Telemetry must share the steps' cores and memory, and take no
# GPU.
STEP_VARIABLES = ("SLURM_NTASKS", "SLURM_CPU", "SLURM_MEM", "SLURM_GPU", "SLURM_NPROCS", "SRUN_")
STEP = (
    "srun --job-name=telemetry --overlap --ntasks-per-node=1 --cpus-per-task=1 --mem=0 --gres=none "
    "--cpu-bind=none --mpi=none --kill-on-bad-exit=0 --export=ALL"
).split()
# Each attempt has a step of telemetry and a step of ranks. After this many restarts, their numbers
# repeat.
STEPS = 2
DIFFERENT_RESTARTS = 8
EMPTY_STEPS_S = 10.0
# How long to try to requeue the job while slurmctld does not answer.
CONTROLLER_S = 600.0
CONTROLLER_PAUSE_S = 5.0
# If the state of a job has changed, the job was cancelled, or Slurm itself requeues it.
STILL_OURS = ("", "RUNNING", "COMPLETING TimeLimit", "TIMEOUT")
# Prints the node, and the number of each argument that names a file or a command there.
LIST_FILES = """\
found=$SLURMD_NODENAME number=0
for word; do
    number=$((number + 1))
    if [ -f "$word" ] || command -v -- "$word" >/dev/null; then found="$found $number"; fi
done
echo "$found"
"""
FILES_S = "10"
# How long to wait for the state of a job whose job.py was killed.
UNSUPERVISED_S = 20.0
UNSUPERVISED_PAUSE_S = 0.2
# Slurm's reasons for the end of such a job. A job that a person has cancelled has none of these.
UNSUPERVISED = ("RaisedSignal:", "NonZeroExitCode")
REPLACED = "replaced"
CANCELLED = "CANCELLED"
NO_EVENTS = "this job is not requeued: job.events cannot be written"
STARTED = re.compile(r"^NodeName=(\S+) .*\bSlurmdStartTime=(\d+)\b", re.MULTILINE)


class JobEvents:
    """The file job.events: a JSON object per line. folder: of the job. Default: the current."""

    def __init__(self, folder: str = "") -> None:
        self._path = os.path.join(folder, history.EVENTS_FILE)
        self._added = ""

    def read(self) -> Sequence[Attempt]:
        """Return the attempts since the submission, or since a person restarted a stopped job. Only
        this attempt if the file cannot be read.
        """
        texts = (task.text_of(self._path), self._added)
        read = (history.of_chain(history.attempts_of(text)) for text in texts)
        return next(filter(None, read), [])

    def drained_since(self, restarts: int) -> dict[str, str]:
        """Return node -> reason of the nodes that were drained since the last event, if an attempt
        before this one has recorded no start: a node may have refused it.

        restarts: how often Slurm has restarted the job.
        """
        last = history.attempts_of(task.text_of(self._path))[-1]
        missed = restarts > (last.number + 1 if last.start else 0)
        return drained_nodes(last.last or 0.0) if missed else {}

    @property
    def size(self) -> int:
        """The size of the file in bytes; 0 if it does not exist."""
        with suppress(OSError):
            return os.path.getsize(self._path)
        return 0

    def add_notice(self, number: int, *, is_ignored: bool = False) -> None:
        """Record a signal that announces the time limit. is_ignored: see ``Restart.record_signal``."""
        more: dict[str, object] = {"ignored": True} if is_ignored else {}
        if number == signal.SIGTERM:
            # Slurm lets the job run.
            more["state"] = "RUNNING"
        self.add("signal", signal=signal.Signals(number).name, notice=True, **more)

    def add_refusal(self, exc: task.CannotStartError) -> int:
        """Record why the job's program can't start, and the job's end. Return its exit status."""
        status = self.add_cause(exc)
        self.add("end", status=status)
        return status

    def add_cause(self, exc: task.CannotStartError) -> int:
        """Say and record why the job's program can't start. Return the job's exit status."""
        task.complain(exc.text)
        self.add("cause", code=exc.code, text=exc.text)
        return exc.status

    def add(self, event: str, **fields: object) -> bool:
        """Record an event on disk. Return whether that worked: the disk may be full."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n"
        self._added += line
        file = task.open_for_writing(self._path, os.O_APPEND)
        try:
            is_whole = os.write(file, line.encode()) == len(line.encode())
            # The node may be lost before the file system writes the line by itself. /dev/null
            # rejects this.
            with suppress(OSError):
                os.fsync(file)
            return is_whole
        except OSError:
            return False
        finally:
            os.close(file)


class Restart:
    """The restarts of a job with ``--requeue``."""

    def __init__(
        self, events: JobEvents, options: Mapping[str, str], program: Sequence[str]
    ) -> None:
        self._events = events
        self._options = options
        self._program = program
        files = options["files"]
        self._folders = [
            files,
            *(os.path.join(files, path) for path in restarts.folders_of(program)),
        ]
        self._job = job_of(options)

    def begin(self, nodes: Sequence[str]) -> int | None:
        """Record the start of an attempt, and how the previous attempt ended if job.py did not see
        its end.

        Return the exit status if the job should not run again.
        """
        facts = start_facts(self._job, nodes)
        past = self._events.read()
        # slurmctld forgets its last seconds if it is killed: the end of a job, perhaps also its
        # start.
        is_again = facts["restarts"] or (past and past[0].job == self._job != "")
        attempt = past[-1] if past and is_again and not past[-1].requeue else None
        if attempt and attempt.status == 0:
            task.complain(
                "Slurm has started this job again, but the job has completed (see job.events)"
            )
            return 0
        failure = failure_before(attempt) if attempt else None
        if failure:
            facts.update(failure, progress=self._progress(past))
        if drained := self._events.drained_since(int(os.environ.get("SLURM_RESTART_COUNT", "0"))):
            facts.update(drained=drained)
        self._events.add("start", **facts)
        for file in (restarts.HANG_FILE, restarts.ALARM_FILE):
            if os.path.exists(file):
                os.unlink(file)
        restarts.forget_ends()
        if failure and "requeue" in self._options and self._stops(self._events.read()):
            return 1
        start_empty_steps(int(os.environ.get("SLURM_RESTART_COUNT", "0")))
        return None

    def record_signal(self, number: int, *, is_ignored: bool = False) -> bool:
        """Record a signal, and return whether it is SIGTERM with which Slurm ends the job.

        For SIGTERM also record the state that Slurm gives the job, or RUNNING if it runs on.
        is_ignored: whether the signal announces the time limit, and the program does not handle it.
        """
        name = signal.Signals(number).name
        is_term = number == signal.SIGTERM
        state = restarts.state_by_slurm(restarts.end_of_file(own_log())) if is_term else ""
        if not state and is_notice(number):
            self._events.add_notice(number, is_ignored=is_ignored)
            return False
        if not is_term:
            self._events.add("signal", signal=name)
            return False
        self._events.add("signal", signal=name, state=state)
        # `scancel --signal=TERM` writes the same line to the log as `scancel`.
        if state == CANCELLED and self._job and self._ask()[0] == "RUNNING":
            self._events.add("signal", signal=name, state="RUNNING")
            return False
        return bool(state)

    def record_late_end(self) -> None:
        """Record that Slurm has ended the job after the end of its program, perhaps while telemetry
        ended.
        """
        state = restarts.state_by_slurm(restarts.end_of_file(own_log()))
        if state not in ("", "REQUEUED"):
            self._events.add("signal", signal="SIGTERM", state=state)

    def requeue_or_stop(self, status: int) -> None:
        """Have Slurm requeue this job, or record why not. status: exit status of the program.

        Do nothing if the user has cancelled the job, or if Slurm has already requeued it.
        """
        past = self._events.read()
        if not past or past[-1].requeue:
            task.complain(NO_EVENTS)
            return
        failure = self._failure(status, past[-1])
        reason = {"hang": "hang", "saved": "saved"}.get(str(failure["kind"]), "failed")
        facts = {"reason": reason, "status": status, **failure, "progress": self._progress(past)}
        failed = restarts.with_failure(past[-1], facts)
        past = [*past[:-1], failed]
        state, excluded = self._ask()
        if state not in STILL_OURS or self._stops(past):
            return
        # Slurm may end this process before scontrol has returned.
        if not self._events.add("requeue", **facts):
            task.complain(NO_EVENTS)
            return
        ran_s = (failed.ended or 0) - (failed.started or 0)
        task.complain(f"{failed.said} after {ran_s:.0f} s; this job is requeued")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._requeue():
            self._exclude(past, excluded)
        elif self._ask()[0] != REPLACED:
            # Slurm has refused, so that the job ends with this status.
            self._events.add("end", status=status)

    def end_again(self) -> None:
        """Have Slurm start this completed job again: it has not seen its end, because slurmstepd
        was killed.

        Otherwise the job would stay RUNNING until slurmctld misses it. ``begin`` ends the new
        attempt.
        """
        if self._job and self._ask()[0] in STILL_OURS:
            task.complain(
                "the slurmstepd of this job was killed: Slurm starts the job again to see its end"
            )
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._requeue()

    def _failure(self, status: int, attempt: Attempt) -> restarts.Facts:
        """Return how this attempt failed."""
        log = restarts.end_of_file(own_log())
        if restarts.launcher_of(self._program) == "srun":
            status = restarts.status_of_start(log) or status
        failure: restarts.Facts = restarts.failure_now(
            status,
            log,
            attempt.killed_at,
            is_signal=attempt.how != "exit",
            has_lost_slurmstepd=history.LOST_SLURMSTEPD in attempt.causes,
        )
        kind = str(failure["kind"])
        if restarts.is_usage(kind):
            # If all nodes have the same files, each restart would end like this attempt.
            bad = nodes_without_files(attempt.nodes, self._program, self._folders[0])
            return restarts.failure_of(bad, "missing files on") or failure
        if not failure["place"] and kind not in ("saved", "hang"):
            return restarts.failure_of(lost_nodes(attempt.nodes), "loss of") or failure
        # A signal that was passed on, such as SIGUSR1 before the time limit, is no fault of a node.
        # job.py sends SIGKILL itself, to the ranks that remain after a failure.
        if kind in {event.get("signal") for event in attempt.events} - {"SIGKILL"}:
            return {**failure, "suspects": []}
        return failure

    def _ask(self) -> tuple[str, str]:
        """Return the job's state with its reason, and the nodes that it must not use, in Slurm's
        form.

        The state is "" if Slurm does not answer, and REPLACED if Slurm has restarted the job
        elsewhere, because this node was cut off from the network.
        """
        columns = "--Format=State:30,Reason:250,RestartCnt:20,ExcNodes:5000"
        answer = task.output_of(["squeue", "--noheader", f"--jobs={self._job}", columns])
        state, reason, restart, excluded = (*answer.split(), *4 * [""])[:4]
        # A smaller number means that slurmctld was killed, and has forgotten the start of this
        # attempt.
        if restart.isdigit() and int(restart) > int(os.environ.get("SLURM_RESTART_COUNT", "0")):
            return REPLACED, ""
        return f"{state} {reason}".replace(" None", "").strip(), excluded.replace("(null)", "")

    def _requeue(self) -> bool:
        """Have Slurm requeue this job, and return whether it does. Try again while Slurm does not
        answer.
        """
        deadline = time.monotonic() + CONTROLLER_S
        while wait_for(["scontrol", "requeue", self._job]) != 0:
            state = self._ask()[0]
            # Slurm has refused, or answers again since then.
            if state:
                return state in STILL_OURS and wait_for(["scontrol", "requeue", self._job]) == 0
            if time.monotonic() > deadline:
                return False
            time.sleep(CONTROLLER_PAUSE_S)
            if self._ask()[0] not in STILL_OURS:
                return False
        return True

    def _progress(self, past: Sequence[Attempt]) -> tuple[int, int, int]:
        """Return how far the job has come: see ``Attempt.progress``."""
        number, step, written = restarts.progress(self._folders, past[0].started or 0.0)
        is_late = written - (past[-1].started or 0.0) >= restarts.LATE_S
        return number, step, written if is_late else 0

    def _stops(self, past: Sequence[Attempt]) -> bool:
        """Return whether the job should not run again. If so, record and print the reason."""
        chain_s = float(self._options.get("chain", "0"))
        reason = restarts.stop_reason(past, chain_s)
        if reason:
            failure = restarts.failures(past)[-1].failure
            facts = {key: failure[key] for key in restarts.FACTS if key in failure}
            self._events.add("stop", reason=reason, **facts)
            for line in restarts.explain(reason, past, chain_s).splitlines():
                task.complain(f"this job is not requeued: {line}")
        return bool(reason)

    def _exclude(self, past: Sequence[Attempt], excluded: str) -> None:
        """Have Slurm not use nodes again on which two attempts in a row failed, if the job can run
        on other nodes.

        excluded: the nodes that are excluded already, as Slurm writes them.
        """
        bad = restarts.bad_nodes(past)
        unused = hostnames(excluded)
        nodes = [node for node in bad if node not in unused]
        if not nodes:
            return
        every = ",".join(filter(None, (excluded, *nodes)))
        # The script has the job's options. Only Slurm knows the nodes that satisfy all of them.
        job = [
            f"--nodes={os.environ['SLURM_JOB_NUM_NODES']}",
            f"{os.environ['SLURM_SUBMIT_DIR']}/job.sbatch",
        ]
        with open(os.devnull, "w") as null:
            can_run = (
                wait_for(["sbatch", "--test-only", f"--exclude={every}", *job], null.fileno()) == 0
            )
        exclude = ["scontrol", "update", f"jobid={self._job}", f"excnodelist={every}"]
        if can_run and wait_for(exclude) == 0:
            self._events.add("excluded", nodes=nodes)


def start_facts(job: str, nodes: Sequence[str]) -> dict[str, object]:
    """Return the fields of the event of a start. nodes: of a job without Slurm."""
    numbers = {
        "restarts": "SLURM_RESTART_COUNT",
        "since": "SLURM_JOB_START_TIME",
        "until": "SLURM_JOB_END_TIME",
    }
    return {
        "nodes": nodes or own_nodes(),
        **{key: int(os.environ.get(name, "0")) for key, name in numbers.items()},
        "job": job,
        "partition": os.environ.get("SLURM_JOB_PARTITION", ""),
    }


def job_of(options: Mapping[str, str]) -> str:
    """Return Slurm's id of this job or array task, or "" without Slurm. options: of `job.py
    run`.
    """
    return options.get("array") or os.environ.get("SLURM_JOB_ID", "")


def failure_before(attempt: Attempt) -> restarts.Facts | None:
    """Return how the previous attempt failed, or None if job.py did see its end."""
    nodes = attempt.nodes
    # A node that dies may also kill job.py first.
    if lost := lost_nodes(nodes):
        return restarts.failure_of(lost, "loss of")
    if killed := [event for event in attempt.events if event["event"] == "unsupervised"]:
        return restarts.failure(
            f"end of job.py, which supervises the job ({killed[0].get('reason', '')})"
        )
    # After SIGTERM, Slurm or a person has ended the attempt.
    if restarts.is_explained(attempt):
        return None
    if lost := restarted_nodes(nodes, attempt.started or 0.0):
        return restarts.failure_of(lost, "loss of")
    return restarts.failure(f"no recorded end on {','.join(nodes)}")


def requeue_unsupervised(job: str) -> None:
    """Have Slurm requeue a job whose job.py was killed, and record that. Called in another step of
    the job.

    Do nothing if job.py has recorded an end, or SIGTERM, with which Slurm or a person ends a job.
    """
    events = JobEvents()
    past = events.read()
    is_unexplained = past and not restarts.is_explained(past[-1])
    deadline = time.monotonic() + UNSUPERVISED_S
    while is_unexplained and time.monotonic() < deadline:
        reason = task.output_of(
            ["squeue", "--noheader", f"--jobs={job}", "--Format=Reason:250"]
        ).strip()
        if reason.startswith(UNSUPERVISED):
            # The next attempt tells why, and whether the job should run again.
            events.add("unsupervised", reason=reason)
            wait_for(["scontrol", "requeue", job])
            return
        time.sleep(UNSUPERVISED_PAUSE_S)


def is_notice(number: int) -> bool:
    """Return whether Slurm sends this signal now, because the job's time limit is near (#SBATCH
    --signal).
    """
    script = task.text_of(f"{os.environ.get('SLURM_SUBMIT_DIR', '')}/job.sbatch")
    left_s = int(os.environ.get("SLURM_JOB_END_TIME", "0")) - time.time()
    return history.is_notice(script, signal.Signals(number).name, left_s)


def own_nodes() -> list[str]:
    """Return Slurm's names of the job's nodes."""
    return hostnames(os.environ.get("SLURM_JOB_NODELIST", task.host_name()))


def hostnames(names: str) -> list[str]:
    """Return the names in a list of Slurm's, such as n[1-3]."""
    if "[" in names:
        return task.output_of(["scontrol", "show", "hostnames", names]).split()
    return names.split(",")


def own_log() -> str:
    """Return the path of the file that standard error is written to, or "" if it is not a file."""
    return "/proc/self/fd/2" if stat.S_ISREG(os.fstat(2).st_mode) else ""


def lost_nodes(nodes: Sequence[str], lost: frozenset[str] = LOST) -> list[str]:
    """Return those of the nodes that Slurm considers down, or that do not answer."""
    if "SLURM_JOB_ID" not in os.environ or not nodes:
        return []
    columns = "--Format=NodeList:250,StateComplete:250"
    answer = task.output_of(
        ["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", columns]
    )
    rows = [line.split() for line in answer.splitlines()]
    # Slurm combines states, as in down+drain.
    states = {row[0]: row[1].upper().split("+") for row in rows if len(row) == 2}  # noqa: PLR2004
    return [node for node, of_node in states.items() if lost.intersection(of_node)]


def drained_nodes(since: float) -> dict[str, str]:
    """Return node -> reason of the nodes that were drained after a time."""
    ask = ["sinfo", "--noheader", "--Node", "--states=drain", "--format=%N|%H|%E"]
    answer = task.output_of(ask, {**os.environ, "SLURM_TIME_FORMAT": "%s"})
    rows = [line.strip().split("|", 2) for line in answer.splitlines() if line.count("|") >= 2]  # noqa: PLR2004
    return {node: why for node, at, why in rows if at.isdigit() and int(at) >= since}


def restarted_nodes(nodes: Sequence[str], since: float) -> list[str]:
    """Return those of the nodes whose slurmd has started after a time, because the nodes were
    restarted.
    """
    environment = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    answer = task.output_of(
        ["scontrol", "--oneliner", "show", "node", ",".join(nodes)], environment
    )
    starts = dict(STARTED.findall(answer))
    return [node for node in nodes if int(starts.get(node, "0")) > since]


def nodes_without_files(nodes: Sequence[str], program: Sequence[str], folder: str) -> list[str]:
    """Return the nodes that lack a file of the program, because a file system is missing, for
    example.

    folder: the folder of the program, where relative paths begin.

    A file is a word of the program's command line that is a file or a command on another node.
    Folders do not count, because programs create some of them. Return [] if a node does not answer.
    """
    if len(nodes) == 1 or "SLURM_JOB_ID" not in os.environ:
        return []
    step = [*STEP, f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", f"--chdir={folder}"]
    command = ["timeout", FILES_S, *step, "sh", "-c", LIST_FILES, "sh", *program]
    answer = task.output_of(command, step_environment())
    files = {row[0]: set(row[1:]) for row in map(str.split, answer.splitlines()) if row}
    every = set().union(*files.values())
    return [node for node in nodes if files[node] != every] if files.keys() == set(nodes) else []


def start_empty_steps(restart: int) -> None:
    """Start steps that do nothing, so that a restarted job's steps get other numbers than earlier
    steps.

    An attempt's steps on a node that was cut off may otherwise end the new steps of the same
    number, and the socket that a killed step leaves behind would keep a new step from starting.
    """
    command = [*STEP, "--nodes=1", "--ntasks=1", f"--nodelist={task.host_name()}", "true"]
    null = os.open(os.devnull, os.O_RDWR)
    count = STEPS * (restart % DIFFERENT_RESTARTS) if "SLURM_JOB_ID" in os.environ else 0
    pids = [task.start(command, null, null, null, step_environment()) for _ in range(count)]
    os.close(null)
    wait_until_ended(pids, EMPTY_STEPS_S)


def wait_until_ended(pids: Sequence[int], patience_s: float) -> None:
    """Wait for the end of child processes. Kill those that have not ended after ``patience_s``
    seconds.
    """
    deadline = time.monotonic() + patience_s
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.02)


def wait_for(command: list[str], stderr: int = 2) -> int:
    """Run a command, and return its exit status. stderr: open file for its errors. Default: the
    job's log.
    """
    try:
        code = task.exit_code(os.waitpid(task.start(command, stderr=stderr), 0)[1])
        return task.as_in_shell(code)
    except OSError as exc:
        return task.not_started(command, exc)


def step_environment() -> dict[str, str]:
    """Return the environment for a step that must not take the options of the job's own steps."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(STEP_VARIABLES)
    }
