"""Runs the tasks of an array inside a single job. Uses only the standard library of Python 3.8 or
newer.

    pack.py run --tasks=NUMBERS [OPTION...] --files=FOLDER PROGRAM...
        --tasks=NUMBERS   the tasks' numbers, such as 0-4999,7000
        --most=N          the maximum number of tasks at the same time
        --fit             as many tasks at a time as a node's CPUs allow. Default: as many as the
                          job has Slurm tasks on the node
        --files=FOLDER    the folder of the program's files
        --start=FOLDER    the folder below it in which the program starts
        --sweep           pass the task's values in sweep-tasks.json to the program
        --secrets=FOLDER  the folder with variables that only the tasks get
    pack.py work [OPTION...] PROGRAM...

job.py starts `run` on the job's first node as its program. `run` starts `work` on each node with
srun, and tells it by srun's standard input which task to start; `work` prints each end. Slurm is
not asked about single tasks. A task has its own folder with its logs, a folder with its files, and
its own session, as in a job array: what signals its process group signals no other task, and
processes of this group that it leaves running are killed. Each end is added to the file
packed.jsonl. If the job starts again, tasks that have succeeded there do not run again.

`run` ends with 0 if all tasks have succeeded, with 1 if a task has failed twice, and with 75 if the
job has to start again for the remaining tasks.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from payload.node import history, ports, processes, task
from payload.node.job import prepare_folder, read_sweep, say, take_sweep_values
from payload.node.output import ProgramOutput, readable
from payload.node.requeue import JobEvents, own_nodes

RECORDS = "packed.jsonl"
LOGS = ("stdout.log", "stderr.log")
# A failed task runs once more.
ATTEMPTS = 2
# `work` prints a line at least this often. A node that prints nothing for SILENT_S is lost.
ALIVE_S = 10.0
SILENT_S = 90.0
# `run` looks each second. If it has not looked for longer, it was stopped.
STOPPED_S = 10.0
# How often the number of ended tasks is written to the log.
PROGRESS_S = 10.0
MOST_NAMED = 10
# Open files of `work`: of each slot a port, two pipes and two logs, twice while a task starts.
FILES_PER_SLOT = 5
OTHER_FILES = 64
ENDING = (signal.SIGTERM, signal.SIGINT)
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
# Variables of the step. MPI programs would look for its other ranks.
STEP_ONLY = ("SLURM_STEP", "SLURM_LABELIO", "SLURM_CPU_BIND", "PMI")
# Options of `run` that `work` gets.
_PASSED = ("files", "start", "secrets")
# PyTorch's variables of a task, which is a single rank.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_RANK": "0"}


class PackTasks:
    """The tasks of a job, which are waiting, running or ended.

    failures: number of a task -> how often it has failed in this attempt of the job.
    """

    def __init__(self, numbers: Sequence[int], records: str) -> None:
        self._records = records
        statuses = {record["task"]: record["status"] for record in _records_in(records)}
        self.succeeded = {number for number in numbers if statuses.get(number) == 0}
        self.failures: Counter[int] = Counter()
        self.waiting = deque(number for number in numbers if number not in self.succeeded)
        self._again: list[int] = []
        self.total = len(numbers)

    @property
    def failed(self) -> list[int]:
        """The numbers of the tasks that have failed for the last time."""
        return sorted(number for number, count in self.failures.items() if count == ATTEMPTS)

    def next(self) -> int | None:
        """Return the next task to start. Failed tasks come last, if others have succeeded: if all
        tasks fail, the program itself is wrong.
        """
        if self.waiting:
            return self.waiting.popleft()
        return self._again.pop(0) if self._again and self.succeeded else None

    def end(self, number: int, status: int, *, is_cut: bool = False, **facts: object) -> None:
        """Record the end of a task. status: its exit code, or -N if signal N ended it. is_cut: whether
        it ended because the job is being ended.
        """
        cut = {"is_cut": True} if is_cut and status else {}
        with open(self._records, "a") as file:
            file.write(json.dumps({"task": number, **facts, "status": status, **cut}) + "\n")
        if status == 0:
            self.succeeded.add(number)
            self.failures.pop(number, None)
        if status == 0 or cut:
            return
        self.failures[number] += 1
        if self.failures[number] < ATTEMPTS:
            self._again.append(number)

    def give_up(self) -> None:
        """Count the tasks as failed that would only run again if another task had succeeded."""
        for number in self._again:
            self.failures[number] = ATTEMPTS
        self._again = []


def _records_in(path: str) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a file's whole lines. The last may be cut off by a lost node."""
    for line in task.text_of(path).splitlines():
        with suppress(ValueError, TypeError, LookupError):
            record = json.loads(line)
            if isinstance(record["task"], int) and isinstance(record["status"], int):
                yield record


class PackNode(NamedTuple):
    """A node of the job. rank: of `work` in its step. free: the numbers of its unused slots.
    running: task -> its slot.
    """

    name: str
    rank: int
    free: list[int]
    running: dict[int, int]


def slots_of(options: Mapping[str, str], nodes: Sequence[str]) -> dict[str, int]:
    """Return node -> how many tasks it runs at a time."""
    cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    name = "SLURM_JOB_CPUS_PER_NODE" if "fit" in options else "SLURM_TASKS_PER_NODE"
    counts = os.environ.get(name, "1")
    each = cpus if "fit" in options else 1
    return {
        node: max(1, int(task.tasks_of_node(counts, number)) // each)
        for number, node in enumerate(nodes)
    }


class Pack:
    """The step of `work` on all nodes, and the tasks that it runs.

    is_ending: whether no task is to be started any more, because the job is about to end.
    """

    def __init__(self, options: Mapping[str, str], program: Sequence[str]) -> None:
        names = own_nodes()
        self._slots = slots_of(options, names)
        self._most = int(options.get("most") or 0) or sum(self._slots.values())
        numbers = numbers_in(options["tasks"])
        self.tasks = PackTasks(numbers, RECORDS)
        self._nodes: dict[int, PackNode] = {}
        self._seen: dict[int, float] = {}
        self._lost: list[str] = []
        self._notices: list[int] = []
        self._looked = time.monotonic()
        self._reported = ""
        self.is_ending = False
        passed = [f"--{name}={options[name]}" for name in _PASSED if name in options]
        passed += ["--sweep"] if "sweep" in options else []
        count = str(len(names))
        srun = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--label"]
        srun += ["--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0"]
        counts = {"slots": max(self._slots.values()), "count": len(numbers)}
        counts.update(min=min(numbers), max=max(numbers))
        passed += [f"--{name}={number}" for name, number in counts.items()]
        if "SLURM_CPUS_PER_TASK" in os.environ:
            passed.append(f"--cpus={os.environ['SLURM_CPUS_PER_TASK']}")
        work = [sys.executable, "-IS", os.path.abspath(__file__), "work", *passed, *program]
        # With these variables, the step would have only the CPUs of a single task.
        unset = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK")
        environment = {name: text for name, text in os.environ.items() if name not in unset}
        self._srun = subprocess.Popen(
            [*srun, *work],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            restore_signals=True,
        )

    @property
    def running(self) -> list[int]:
        """The numbers of the tasks whose end no node has told."""
        return sorted(number for node in self._nodes.values() for number in node.running)

    def run(self) -> None:
        """Run all tasks. Return when they have ended, or the step has."""
        output = self._srun.stdout
        assert output is not None  # noqa: S101 - it is a pipe
        os.set_blocking(output.fileno(), False)
        rest = b""
        reported = time.monotonic()
        while True:
            if select.select([output], [], [], task.POLL_S)[0]:
                data = os.read(output.fileno(), task.CHUNK)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line.decode(errors="replace"))
            self._forget_silent_nodes()
            while self._notices:
                self._tell(f"signal {self._notices.pop(0)}")
            self._start_tasks()
            if time.monotonic() - reported > PROGRESS_S:
                reported = time.monotonic()
                self._report()
        self._srun.wait()
        self._report()

    def signal(self, number: int) -> None:
        """Start no more tasks, and pass a signal on to them."""
        self.is_ending = True
        if number in ENDING:
            with suppress(ProcessLookupError):
                self._srun.send_signal(number)
        else:
            # Slurm would signal all processes of the step, also those that the signal ends.
            self._notices.append(number)

    def _take(self, line: str) -> None:
        """Take a line of `work`: RANK: on NODE, RANK: alive, or RANK: end TASK STATUS START END, with
        cut in place of end for a task that `work` had to end.
        """
        label, _, text = line.partition(":")
        verb, *words = text.split() or [""]
        if not label.strip().isdigit():
            return
        rank = int(label)
        if verb == "on":
            slots = self._slots.get(words[0], 1)
            self._nodes[rank] = PackNode(words[0], rank, list(range(slots)), {})
        if rank not in self._nodes:
            return
        self._seen[rank] = time.monotonic()
        node = self._nodes[rank]
        if verb in ("end", "cut"):
            number, status = int(words[0]), int(words[1])
            node.free.append(node.running.pop(number))
            if self.is_ending and status == history.SAVED:
                # The task has saved its work, and goes on when the job starts again.
                return
            start, end = map(float, words[2:])
            is_cut = verb == "cut"
            self.tasks.end(number, status, is_cut=is_cut, node=node.name, start=start, end=end)

    def _start_tasks(self) -> None:
        running = sum(len(node.running) for node in self._nodes.values())
        for node in sorted(self._nodes.values(), key=lambda node: -len(node.free)):
            while node.free and running < self._most and not self.is_ending:
                number = self.tasks.next()
                if number is None:
                    break
                node.running[number] = node.free.pop(0)
                running += 1
                self._tell(f"{node.rank} {number} {node.running[number]}")
        if self._seen and not running:
            if not self.is_ending:
                self.tasks.give_up()
            self._tell("")
        if self._lost and not running:
            # srun would wait for the lost nodes.
            self._srun.terminate()

    def _tell(self, line: str) -> None:
        """Write a line for `work` on all nodes. Empty: it ends."""
        pipe = self._srun.stdin
        # The end of the step is seen in its output.
        with suppress(BrokenPipeError, ValueError):
            if line:
                pipe.write(f"{line}\n".encode())  # type: ignore[union-attr]
                pipe.flush()  # type: ignore[union-attr]
            else:
                pipe.close()  # type: ignore[union-attr]

    def _forget_silent_nodes(self) -> None:
        """Give the tasks of nodes that have been silent for long to the other nodes."""
        now = time.monotonic()
        if now - self._looked > STOPPED_S:
            # This process was stopped, as Slurm does to suspend a job, and so were the nodes.
            self._seen = dict.fromkeys(self._seen, now)
        self._looked = now
        for rank, seen in list(self._seen.items()):
            if now - seen > SILENT_S:
                node = self._nodes.pop(rank)
                del self._seen[rank]
                self._lost.append(node.name)
                self.tasks.waiting.extendleft(node.running)
                goes_on = "its tasks start again on the other nodes"
                rest = goes_on if self._nodes else "no other node is left"
                task.complain(f"{node.name} has not answered for {SILENT_S:.0f} s; {rest}")

    def _report(self) -> None:
        """Write the number of ended tasks to the log, and to the file that shows progress."""
        done = len(self.tasks.succeeded)
        failed = len(self.tasks.failed)
        text = f", {failed} failed" if failed else ""
        line = f"{done} of {self.tasks.total} tasks have succeeded{text}"
        if line != self._reported:
            self._reported = line
            say(line)
            with suppress(OSError), open(os.environ["CLUSTERCTL_HEARTBEAT"], "w") as file:
                file.write(f"{done}\n")


def numbers_in(text: str) -> list[int]:
    """Return the numbers of a list such as 0-4,7."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def run(words: Sequence[str]) -> int:
    """Run all tasks, and return the exit status."""
    options, program = task.split(words)
    pack = Pack(options, program)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: pack.signal(number))
    pack.run()
    failed = pack.tasks.failed
    running = pack.running
    left = pack.tasks.total - len(pack.tasks.succeeded) - len(failed)
    if failed:
        text = f"{len(failed)} of {pack.tasks.total} packed tasks failed: {named(failed)}"
        JobEvents().add("cause", code="packed-tasks", text=text, task=failed[0])
        task.complain(f"{text}; see task-{failed[0]}/stderr.log")
    if left and not pack.is_ending:
        were = f"; these were running: {named(running)}" if running else ""
        task.complain(f"the step has ended before {left} tasks{were}")
    if left and pack.is_ending:
        return history.SAVED
    return 1 if failed or left else 0


def named(numbers: Sequence[int]) -> str:
    """Return the first of some tasks' numbers as text."""
    return ", ".join(map(str, numbers[:MOST_NAMED])) + (", ..." if numbers[MOST_NAMED:] else "")


class RunningTask(NamedTuple):
    """A task that runs on this node. closing: of its output and its logs. start: Unix time."""

    process: subprocess.Popen[bytes]
    output: ProgramOutput
    closing: ExitStack
    start: float


class Worker:
    """Runs tasks on this node. running: those that have not ended, by their numbers."""

    def __init__(self, options: Mapping[str, str], program: Sequence[str]) -> None:
        self._options = options
        self._program = list(program)
        self._secrets = task.read_secrets(options)
        self._sweep = read_sweep(".") if "sweep" in options else None
        # Whether the tasks were told to end.
        self._is_ending = False
        self.running: dict[int, RunningTask] = {}
        self._gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        job = int(os.environ.get("SLURM_JOB_ID", "0"))
        self._allow_files(int(options["slots"]))
        self._ports = [ports.claim_job_port(job + slot)[0] for slot in range(int(options["slots"]))]

    @staticmethod
    def _allow_files(slots: int) -> None:
        """Allow this process two pipes and two logs for each slot, if the limit is lower."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < (count := FILES_PER_SLOT * slots + OTHER_FILES):
            with suppress(ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))

    def start(self, number: int, slot: int) -> None:
        """Start a task, and print its end at once if that fails."""
        start = time.time()
        folder = f"task-{number}"
        files = os.path.join(self._options["files"], folder)
        where = self._options.get("start", "")
        try:
            os.makedirs(folder, exist_ok=True)
            prepare_folder(files, where, is_task=True)
            words: list[str] = []
            variables: dict[str, str] = {}
            if self._sweep is not None:
                words, variables = take_sweep_values(self._sweep, number, files)
            variables.update(self._variables(number, slot))
            self.running[number] = self._launch(
                [*self._program, *words], os.path.join(files, where), variables, folder
            )
        except OSError as exc:
            task.complain(f"task {number} can't start: {exc}")
            self._emit(number, 127 if isinstance(exc, FileNotFoundError) else 126, start)
            return
        if self._is_ending:
            # The signal came before.
            self.running[number].process.terminate()

    def _launch(
        self, program: Sequence[str], where: str, variables: Mapping[str, str], folder: str
    ) -> RunningTask:
        """Start a program in the folder ``where``, with its logs in ``folder``. Raises OSError."""
        with ExitStack() as closing:
            logs = []
            for name in LOGS:
                how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                logs.append(os.open(f"{folder}/{name}", how, 0o666))
                closing.callback(os.close, logs[-1])
            output = ProgramOutput(logs)
            closing.callback(output.end, task.DRAIN_FAILED_S)
            start = time.time()
            try:
                process = subprocess.Popen(
                    program,
                    cwd=where,
                    env={**os.environ, **self._secrets, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=output.streams[0],
                    stderr=output.streams[1],
                    start_new_session=True,
                )
            finally:
                output.started()
            return RunningTask(process, output, closing.pop_all(), start)

    def _variables(self, number: int, slot: int) -> dict[str, str]:
        """Return the variables that differ between tasks."""
        job = os.environ.get("SLURM_JOB_ID", "0")
        host = task.host_name()
        ours = {
            # As in a job of its own.
            **task.slurm_variables(ALONE, per_node=1, nodes=host),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": host,
            "SLURM_ARRAY_JOB_ID": job,
            "SLURM_ARRAY_TASK_ID": str(number),
            "SLURM_ARRAY_TASK_COUNT": self._options["count"],
            "SLURM_ARRAY_TASK_MIN": self._options["min"],
            "SLURM_ARRAY_TASK_MAX": self._options["max"],
            "SLURM_SUBMIT_DIR": self._options["files"],
            "MASTER_ADDR": host,
            "MASTER_PORT": str(self._ports[slot]),
            "CLUSTERCTL_HEARTBEAT": os.path.abspath(f"task-{number}/heartbeat"),
        }
        if "cpus" in self._options:
            ours["SLURM_CPUS_PER_TASK"] = self._options["cpus"]
        if self._gpus:
            # Slots that share a GPU, or GPUs that share a slot.
            slots = int(self._options["slots"])
            own = self._gpus[slot::slots] or [self._gpus[slot % len(self._gpus)]]
            ours["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        return ours

    @property
    def sources(self) -> dict[int, ProgramOutput]:
        """The pipes with the output of tasks."""
        return {
            source: running.output
            for running in self.running.values()
            for source in running.output.sources
        }

    def reap(self) -> None:
        """Print the end of each task that has ended."""
        for number, running in list(self.running.items()):
            process = running.process
            # Until `wait`, no other process group gets this number.
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
                running.closing.close()
                del self.running[number]
                self._emit(number, status, running.start)

    def _emit(self, number: int, status: int, start: float) -> None:
        for name in LOGS:
            with suppress(OSError):
                if not os.path.getsize(f"task-{number}/{name}"):
                    os.unlink(f"task-{number}/{name}")
        verb = "cut" if self._is_ending else "end"
        say(f"{verb} {number} {status} {start:.3f} {time.time():.3f}")

    def signal(self, number: int) -> None:
        """Pass a signal on to the tasks. Those that do not handle a notice of the end keep running."""
        self._is_ending = self._is_ending or number in ENDING
        for running in self.running.values():
            process = running.process
            if number in ENDING or processes.handles(process.pid, number):
                process.send_signal(number)


def work(arguments: Sequence[str]) -> int:
    """Run the tasks on this node that `run` tells, until the end of standard input."""
    options, program = task.split(arguments)
    try:
        worker = Worker(options, program)
    except task.CannotStartError as exc:
        return exc.of_rank()
    own_rank = os.environ.get("SLURM_PROCID", "0")
    for name in [name for name in os.environ if name.startswith(STEP_ONLY)]:
        del os.environ[name]
    for number in ENDING:
        signal.signal(number, lambda number, _: worker.signal(number))
    # The end of a task ends `select`.
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    say(f"on {task.host_name()}")
    rest = b""
    said = time.monotonic()
    inputs = [0, reads]
    while 0 in inputs or worker.running:
        sources = worker.sources
        ready = readable([*inputs, *sources], ALIVE_S)
        # Input for other nodes also ends `select`.
        if time.monotonic() - said >= ALIVE_S:
            said = time.monotonic()
            say("alive")
        if reads in ready:
            os.read(reads, task.CHUNK)
        for source in sources.keys() & {*ready}:
            sources[source].copy(source)
        if 0 in ready:
            data = os.read(0, task.CHUNK)
            if not data:
                inputs.remove(0)
            *lines, rest = (rest + data).split(b"\n")
            for words in (line.decode().split() for line in lines):
                if words[0] == "signal":
                    worker.signal(int(words[1]))
                elif words[0] == own_rank:
                    worker.start(int(words[1]), int(words[2]))
        worker.reap()
    return 0


if __name__ == "__main__":
    command, *rest_of_line = sys.argv[1:]
    sys.exit(run(rest_of_line) if command == "run" else work(rest_of_line))
