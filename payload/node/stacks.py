"""Finds out where the ranks of a job are on this node. Uses only the standard library of Python 3.8
or newer.

    python -I stacks.py FOLDER

This program observes the processes of the job for ``WINDOW_S`` seconds, and writes the stacks of
each rank to FOLDER/rank-logs/RANK.stack. It prints a JSON object per rank, with the keys of
``Rank`` but ``stack``, and
another for the node: ``{"node": NAME, "ranks": COUNT, "network": BYTES_PER_S, "disk":
BYTES_PER_S}``. With -S, Python would not find pynvml, which reads the use of GPUs.

Ranks that wait in MPI use as much processor time as ranks that compute. So the program samples the
machine instruction of running threads, which is in MPI's library while a rank waits. A GPU that
waits for another GPU is busy, too, but does not use its memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from payload.node import task
from payload.node.native import innermost_function
from payload.node.nvml import Gpus
from payload.node.processes import WATCHER
from payload.node.python_stacks import Frame, place_of, python_stacks

WINDOW_S = 2.0
ROUNDS = 50
SLOWEST_S = 10.0
# A rank runs its own code if this many rounds find a thread in it. A rank that waits in a library
# spends most of its time in system calls, so few rounds find a thread in the library.
OWN_ROUNDS = 5
WAIT_ROUNDS = 1
# A rank runs if it uses this share of a core.
FEW_TICKS = 0.1
# Ranks that transfer more than this in ``WINDOW_S`` are not waiting. Polling also transfers a few
# bytes.
FEW_BYTES = 1 << 16
MOST_PROCESSES_OF_RANK = 16
# Limits of a printed rank: its workers, and the bytes of each text. slurmstepd sends output in
# messages of at most 1024 bytes, and srun mixes the messages of several nodes, so a longer line
# could be broken.
MOST_WORKERS = 3
MOST_BYTES = 100
SECTOR_BYTES = 512
TRACE_S = 0.05
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# How many words of a stack are searched for the caller of the C library.
CALLER_WORDS = 64
# Programs that start a rank, and wait for it.
_STARTERS = re.compile(
    r"(?:srun|orted|prted|prterun|mpirun|mpiexec|slurmstepd|payload/node/(?:job|task)\.py)$"
)
_WRAPPERS = re.compile(
    r"(?:bash|sh|dash|env|time|apptainer|singularity|starter.*|python\S* \S*torchrun)$"
)
# Libraries in which a rank waits for other ranks or for a GPU.
_WAITS = (
    ("NCCL", re.compile(r"libnccl")),
    ("CUDA", re.compile(r"libcuda|libnvidia|libhsa|libamdhip")),
    (
        "MPI",
        re.compile(r"libmpi|libopen-|libpmix|libuc[mpst]|libu?ct_|libpsm|libfabric|mca_|libevent"),
    ),
)
LIBRARIES = tuple(name for name, _ in _WAITS)
# A wait calls these, too.
_NEUTRAL = re.compile(r"libc[.-]|libpthread|ld-linux|libm\.so|\[")
SLEEP = "sleep"
NFS = "NFS"
FUSE = "FUSE"
FROZEN = "frozen file system"
# The disks of the node do not serve a rank that waits in these.
NO_DISK = (NFS, FUSE, FROZEN)
# Function of the kernel in which a process waits -> its meaning.
_KERNEL = (
    (re.compile(r"nanosleep"), SLEEP),
    (re.compile(r"fuse|request_wait_answer"), FUSE),
    (re.compile(r"locks_|flock"), "file lock"),
    (re.compile(r"wait_for_partner"), "opening of a pipe"),
    (re.compile(r"percpu_rwsem|sb_start"), FROZEN),
    (re.compile(r"pipe"), "pipe read"),
    (re.compile(r"futex"), "lock"),
    (re.compile(r"poll|select"), "poll"),
    (re.compile(r"nfs|rpc"), NFS),
    (re.compile(r"recv|sk_|tcp|unix|inet|skb"), "socket read"),
    (re.compile(r"folio|page|bit_wait|io_schedule|jbd2|xfs|ext4|writeback"), "disk"),
    (re.compile(r"do_wait|wait4|waitid"), "wait for a process"),
)
# States of a rank that may be a hang, and states that are not.
STOPPED = "stopped"
TRACED = "traced"
BLOCKED = "blocked"
WAITING = "waiting"
ENDED = "ended"
COMPUTING = "computing"
TRANSFERRING = "reading or writing files"
RUNNING = "running"
BUSY = (COMPUTING, TRANSFERRING, RUNNING, TRACED)


class Process(NamedTuple):
    """A process of the job. words: its command line. started: clock ticks since the system's
    start.
    """

    pid: int
    parent: int
    words: tuple[str, ...]
    started: int = 0

    @property
    def age(self) -> tuple[int, int]:
        """A key by which older processes come first. The numbers of processes begin again."""
        return self.started, self.pid


class Rank(NamedTuple):
    """Where a rank is.

    doing: a constant of this module. within: the library, or the service of the kernel, in which it
        waits.
    place: the innermost line of the program, such as train.py:88. source: the text of this line.
    workers: the places, with their source, of the rank's other processes.
    asleep: whether the rank may continue by itself (see ``Activity``). cpu_s: processor time used
        so far.
    """

    rank: int
    node: str
    pid: int
    doing: str
    within: str
    place: str
    source: str
    workers: tuple[str, ...]
    stack: tuple[str, ...]
    asleep: bool = False
    cpu_s: float = 0.0


def ranks_here(environment: Mapping[str, str] = os.environ) -> dict[int, list[Process]]:
    """Return rank -> its processes on this node, for the job of ``environment``.

    A launcher's variables name the rank. If no process has such a variable, the job's program is
    rank 0.
    """
    named: dict[int, list[Process]] = {}
    of_step: dict[int, list[Process]] = {}
    of_script: dict[int, list[Process]] = {}
    for process, variables in _processes():
        get = variables.get
        if get("SLURM_JOB_ID") != environment.get("SLURM_JOB_ID") or WATCHER in variables:
            continue
        if any(map(_STARTERS.search, process.words[:3])):
            continue
        number = get("RANK") or get("OMPI_COMM_WORLD_RANK") or ""
        if number.isdigit():
            named.setdefault(int(number), []).append(process)
        elif "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables:
            of_step.setdefault(int(variables["SLURM_PROCID"]), []).append(process)
        elif "SLURM_JOB_ID" in variables:
            of_script.setdefault(0, []).append(process)
    return named or of_step or of_script


def _processes() -> Iterator[tuple[Process, dict[str, str]]]:
    """Yield this user's processes with the environment with which they were started."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        # The process may end meanwhile, or belong to another user.
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/environ", errors="replace") as file:
                pairs = (text.partition("=")[::2] for text in file.read().split("\0"))
                variables = dict(pairs)
            words = tuple(task.text_of(f"/proc/{name}/cmdline").split("\0")[:-1])
            if words:
                status = _stat(f"/proc/{name}")
                process = Process(int(name), int(status[1]), words, int(status[19]))
                yield process, variables


def _stat(folder: str) -> list[str]:
    """Return the fields of a stat file in /proc, from the state on."""
    return task.text_of(f"{folder}/stat").rpartition(")")[2].split()


def main_process(processes: Sequence[Process]) -> Process:
    """Return the process that runs a rank's program: it neither started the program nor was started
    by it.
    """
    pids = {process.pid for process in processes}
    main = min(
        (p for p in processes if p.parent not in pids), key=lambda p: p.age, default=processes[0]
    )
    while _WRAPPERS.search(main.words[0].rpartition("/")[2]):
        children = [process for process in processes if process.parent == main.pid]
        if not children:
            break
        main = min(children, key=lambda process: process.age)
    return main


class Tracer:
    """Reads the machine instruction of running threads. ``is_refused``: the system does not allow
    that.

    A thread that waits in a system call is never stopped, because some calls would return an error.
    """

    SEIZE = 0x4206
    INTERRUPT = 0x4207
    GETREGSET = 0x4204
    DETACH = 17
    REGISTERS = 1
    ALL_CHILDREN = 0x40000000

    def __init__(self) -> None:
        self._ptrace = ctypes.CDLL(None).ptrace
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._ptrace.restype = ctypes.c_long
        # The indices of the instruction's address and of the stack pointer among the registers.
        self._index = {"x86_64": 16, "aarch64": 32}.get(platform.machine())
        self._pointer_index = {"x86_64": 19, "aarch64": 31}.get(platform.machine(), 0)
        # Thread -> its stack pointer, when it was last observed.
        self.stack_pointers: dict[int, int] = {}
        # Threads that were told to stop, and have not stopped yet.
        self._seized: set[int] = set()
        self._maps: dict[int, list[tuple[int, int, str]]] = {}
        self.is_refused = self._index is None

    def library_of(self, pid: int, thread: int) -> str:
        """Return the name of the file that a thread executes, or "" if that is unknown."""
        if thread in self._seized:
            return self._release(pid, thread, TRACE_S)
        if self._index is None or self._ptrace(self.SEIZE, thread, None, None):
            self.is_refused = self.is_refused or os.path.exists(f"/proc/{thread}")
            return ""
        self._ptrace(self.INTERRUPT, thread, None, None)
        self._seized.add(thread)
        return self._release(pid, thread, TRACE_S)

    def release(self) -> None:
        """Let all threads run again. The end of this program would do so, too."""
        for thread in list(self._seized):
            self._release(0, thread, WINDOW_S)

    def _release(self, pid: int, thread: int, patience_s: float) -> str:
        """Wait until a thread has stopped, let it run again, and return the name of the file."""
        registers = (ctypes.c_uint64 * 64)()
        vector = (ctypes.c_uint64 * 2)(ctypes.addressof(registers), ctypes.sizeof(registers))
        deadline = time.monotonic() + patience_s
        try:
            while os.waitpid(thread, os.WNOHANG | self.ALL_CHILDREN) == (0, 0):
                # On a busy node, a thread stops only when it is its turn to run.
                if time.monotonic() > deadline:
                    return ""
                time.sleep(0.0002)
        except ChildProcessError:
            self._seized.discard(thread)
            return ""
        self._ptrace(self.GETREGSET, thread, self.REGISTERS, ctypes.addressof(vector))
        pointer = self.stack_pointers[thread] = registers[self._pointer_index]
        name = self._file_at(pid, registers[self._index or 0])
        if _NEUTRAL.match(name):
            name = self._caller(pid, pointer) or name
        self._ptrace(self.DETACH, thread, None, None)
        self._seized.discard(thread)
        return name

    def _file_at(self, pid: int, address: int) -> str:
        name = self._mapped(pid, address)
        if not name:
            # The program may have loaded a library since the last call.
            self._maps[pid] = [*_executable_maps(pid)]
            name = self._mapped(pid, address)
        return name or "?"

    def _mapped(self, pid: int, address: int) -> str:
        return next(
            (name for start, end, name in self._maps.get(pid, ()) if start <= address < end), ""
        )

    def _caller(self, pid: int, pointer: int) -> str:
        """Return the file that called the C library, by the return addresses on a thread's
        stack.
        """
        try:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(pointer)
                words = struct.unpack(f"={CALLER_WORDS}Q", memory.read(8 * CALLER_WORDS))
        except (OSError, ValueError, OverflowError, struct.error):
            return ""
        names = (self._mapped(pid, word) for word in words)
        return next((name for name in names if name and not _NEUTRAL.match(name)), "")


def _executable_maps(pid: int) -> Iterator[tuple[int, int, str]]:
    for line in task.text_of(f"/proc/{pid}/maps").splitlines():
        fields = line.split(maxsplit=5)
        if "x" in fields[1]:
            start, _, end = fields[0].partition("-")
            yield int(start, 16), int(end, 16), fields[5].rpartition("/")[2] if fields[5:] else "?"


class Activity:
    """The activity of a rank's processes while they were observed."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = processes
        self.main = main_process(processes)
        self._before = self._counters()
        self._rounds: dict[str, int] = {}
        self._waits: dict[str, int] = {}
        self._samples = self._blocked = self._runnable = 0

    def sample(self, tracer: Tracer) -> None:
        """Look at the threads that run now."""
        kinds = set()
        self._samples += 1
        for process in self.processes:
            for thread, state, _ in _threads(process.pid):
                self._blocked += state == "D" and thread == self.main.pid
                if state in "Rt":
                    kinds.add(_kind(tracer.library_of(process.pid, thread)))
        self._runnable += bool(kinds)
        for kind in kinds:
            self._rounds[kind] = self._rounds.get(kind, 0) + 1
        if "own" not in kinds and (libraries := sorted(kinds & {*LIBRARIES})):
            self._waits[libraries[0]] = self._waits.get(libraries[0], 0) + 1

    @property
    def waits(self) -> dict[str, int]:
        """The number of rounds in which threads were in each library, and no thread elsewhere."""
        return {name: count for name, count in self._waits.items() if count}

    def judge(self, *, can_trace: bool) -> tuple[str, str]:
        """Return the ``doing`` and ``within`` of ``Rank``. can_trace: whether samples were
        possible.
        """
        folder = f"/proc/{self.main.pid}"
        state = (_stat(folder) or "Z")[0]
        if state in "TtZX":
            return {"T": STOPPED, "t": TRACED}.get(state, ENDED), ""
        now = self._counters()
        ticks, transferred = (now[index] - self._before[index] for index in (0, 1))
        if transferred > FEW_BYTES:
            return TRANSFERRING, ""
        waits = max(LIBRARIES, key=lambda name: self._rounds.get(name, 0))
        has_waited = self._rounds.get(waits, 0) >= WAIT_ROUNDS
        # On a busy node, a rank that could run all the time gets little processor time.
        is_running = (
            ticks > FEW_TICKS * WINDOW_S * TICKS_PER_S or self._runnable > self._samples // 2
        )
        if self._rounds.get("own", 0) >= OWN_ROUNDS or (is_running and not has_waited):
            return (COMPUTING if can_trace else RUNNING), ""
        state = BLOCKED if self._blocked > self._samples // 2 else WAITING
        return state, waits if has_waited else _wait_of(self.main.pid)

    def cpu_s(self, doing: str) -> float:
        """Return the seconds of processor time that the rank has used, with ended threads and
        processes.

        Other processes of a rank that is stopped or blocked may still run.
        """
        processes = [self.main] if doing in (STOPPED, BLOCKED) else self.processes
        stats = [_stat(f"/proc/{process.pid}")[11:15] for process in processes]
        return sum(int(ticks) for stat in stats for ticks in stat) / TICKS_PER_S

    def is_asleep(self, processes: Sequence[Process]) -> bool:
        """Return whether a rank may continue by itself. processes: of the rank now.

        A process sleeps for a fixed time, or the rank has started or ended a process.
        """
        has_changed = {each.pid for each in self.processes} ^ {each.pid for each in processes}
        return bool(has_changed) or any(_wait_of(each.pid) == SLEEP for each in processes)

    def _counters(self) -> tuple[int, int]:
        """Return the clock ticks of processor time that the rank has used, and the bytes
        transferred.
        """
        ticks = transferred = 0
        for process in self.processes:
            ticks += sum(used for _, _, used in _threads(process.pid))
            lines = task.text_of(f"/proc/{process.pid}/io").splitlines()
            transferred += sum(
                int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar"))
            )
        return ticks, transferred


def meaning(function: str) -> str:
    """Return the meaning of a function of the kernel, or its name if the meaning is unknown."""
    return next((words for pattern, words in _KERNEL if pattern.search(function)), function)


def _wait_of(pid: int) -> str:
    """Return the function of the kernel in which a process waits, in words."""
    return meaning(task.text_of(f"/proc/{pid}/wchan").strip("0"))


def _threads(pid: int) -> Iterator[tuple[int, str, int]]:
    """Yield (id, state, clock ticks of processor time) of each thread of a process."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            fields = _stat(f"/proc/{pid}/task/{name}")
            if fields:
                yield int(name), fields[0], int(fields[11]) + int(fields[12])


def _kind(library: str) -> str:
    if not library or _NEUTRAL.match(library):
        return ""
    return next((name for name, pattern in _WAITS if pattern.match(library)), "own")


def network_bytes() -> int:
    """Return the bytes through this node's network interfaces since boot."""
    total = 0
    for line in task.text_of("/proc/net/dev").splitlines()[2:]:
        name, _, numbers = line.partition(":")
        columns = numbers.split()
        if name.strip() != "lo":
            total += int(columns[0]) + int(columns[8])
    return total


def disk_bytes() -> int:
    """Return the bytes read from and written to disks since boot."""
    lines = [line.split() for line in task.text_of("/proc/diskstats").splitlines()]
    return sum(int(fields[5]) + int(fields[9]) for fields in lines) * SECTOR_BYTES


def with_gpu(doing: str, within: str, memory_use: int | None) -> str:
    """Return what a rank does, and its GPU for it: a GPU computes, unless it waits for another
    rank.

    memory_use: how much of the time the GPU's memory was in use, in percent; None: unknown.
    """
    if doing != WAITING or within not in ("CUDA", "NCCL") or memory_use == 0:
        return doing
    return RUNNING if memory_use is None else COMPUTING


def observe(node: str) -> Iterator[Rank]:
    """Observe the ranks on this node, then yield where they are."""
    activities = {
        rank: Activity(processes[:MOST_PROCESSES_OF_RANK])
        for rank, processes in sorted(ranks_here().items())
    }
    tracer = Tracer()
    deadline = time.monotonic() + SLOWEST_S
    for _ in range(ROUNDS if activities else 0):
        if time.monotonic() > deadline:
            break
        for activity in activities.values():
            activity.sample(tracer)
        time.sleep(WINDOW_S / ROUNDS)
    tracer.release()
    processes_now = ranks_here() if activities else {}
    gpu_use = Gpus().memory_use()
    for rank, activity in activities.items():
        main = activity.main
        doing, within = activity.judge(can_trace=not tracer.is_refused)
        doing = with_gpu(doing, within, gpu_use)
        texts: list[str] = []
        places: dict[int, tuple[str, str]] = {}
        for process in activity.processes:
            stacks = python_stacks(process.pid)
            texts += [f"process {process.pid}: {' '.join(process.words)}", *_texts(stacks)]
            if stacks:
                places[process.pid] = place_of(process.pid, next(iter(stacks.values())))
        if main.pid not in places:
            function = innermost_function(main.pid, tracer.stack_pointers.get(main.pid, 0))
            places[main.pid] = (
                ":".join(filter(None, (os.path.basename(main.words[0]), function))),
                "",
            )
        place, source = places.pop(main.pid)
        workers = tuple(sorted({": ".join(filter(None, each)) for each in places.values()}))
        facts = (rank, node, main.pid, doing, within, place, source, workers, tuple(texts))
        is_asleep = activity.is_asleep(processes_now.get(rank, [])[:MOST_PROCESSES_OF_RANK])
        yield Rank(*facts, is_asleep, round(activity.cpu_s(doing), 2))


def _texts(stacks: Mapping[str, Sequence[Frame]]) -> Iterator[str]:
    for name, frames in stacks.items():
        yield f"{name} (innermost call first):"
        yield from map(str, frames)


def short(rank: Rank) -> dict[str, object]:
    """Return the fields of a rank without its stack, cut so that they fit on a line of 900
    bytes.
    """
    fields = {name: value for name, value in rank._asdict().items() if name != "stack"}
    texts = {name: _cut(fields[name]) for name in ("within", "place", "source")}
    return {**fields, **texts, "workers": [_cut(text) for text in rank.workers[:MOST_WORKERS]]}


def _cut(text: str) -> str:
    """Cut out the middle of a text that has more than ``MOST_BYTES`` bytes in JSON."""
    kept = len(text) // 2
    cut = text
    while len(json.dumps(cut)) > MOST_BYTES:
        kept -= 1
        cut = f"{text[:kept]}...{text[-kept:]}"
    return cut


def write_ranks(ranks: Iterable[Rank], folder: str, node: str) -> int:
    """Write the stack of each rank to a file in ``folder``, and print where the rank is. Return
    the number of ranks.
    """
    with suppress(OSError):
        os.makedirs(f"{folder}/rank-logs", exist_ok=True)
    count = 0
    for rank in ranks:
        count += 1
        file = task.open_for_writing(f"{folder}/rank-logs/{rank.rank}.stack", os.O_TRUNC)
        head = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} rank {rank.rank} on {node}"
        text = "\n".join((f"{head}: {rank.doing} {rank.within}".rstrip(), *rank.stack, ""))
        task.write_all(file, text.encode(errors="surrogateescape"))
        os.close(file)
        emit(short(rank))
    return count


def main(folder: str) -> None:
    """Write the stacks of the ranks on this node to files in ``folder``, and print where the ranks
    are.
    """
    node = task.host_name()
    begin = time.monotonic()
    before = (network_bytes(), disk_bytes())
    count = write_ranks(observe(node), folder, node)
    after = (network_bytes(), disk_bytes())
    elapsed_s = time.monotonic() - begin
    network, disk = (round((after[index] - before[index]) / elapsed_s) for index in (0, 1))
    emit({"node": node, "ranks": count, "network": network, "disk": disk})


def emit(answer: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
