"""Runs a rank of a job on its node. Uses only the standard library of Python 3.8 or newer.

    task.py [--of=srun|mpirun|torchrun] [--per-node=RANKS] [--secrets=FOLDER] PROGRAM...

    --of=LAUNCHER      the launcher that starts this process. Default: srun
    --per-node=RANKS   the number of ranks per node, for mpirun
    --secrets=FOLDER   the folder with variables that only ranks get

A launcher starts this program for each rank. This program sets the variables that PyTorch reads,
records the output of PROGRAM, and ends with the same status or signal. This file imports few
modules, because the modules signal and contextlib alone would double the start-up time. job.py
imports the functions in the first half.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import LockType, allocate_lock, start_new_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable, Mapping, Sequence
else:
    import _signal as signal

# The folder on each host in which Ansible installs files for jobs.
HOST_FOLDER = "/opt/clusterctl"
# The file of variables that only ranks get: NAME=VALUE, each ended by a null byte.
SECRETS = "environ"
# The folder of the ranks' logs, of the records of their ends, and of why ranks could not start.
RANKS = "rank-logs"
PASSED_ON = frozenset(
    getattr(signal, f"SIG{name}") for name in "HUP INT QUIT ALRM TERM USR1 USR2".split()
)
# Signals that end a program by default.
FATAL = frozenset((1, 2, 3, 4, 6, 7, 8, 9, 11, 13, 14, 15))
# Python ignores these signals, and child processes would inherit that.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
# How long to read output after PROGRAM has ended, because it may have left processes running.
# Shorter after a failure, because other ranks wait for the failed rank.
DRAIN_S = 5.0
DRAIN_FAILED_S = 1.0
POLL_S = 1.0
FOREVER_S = 1e6
CHUNK = 1 << 16
# How long the start of a line is held back until the rest of the line follows.
LINE_S = 0.5


class CannotStartError(Exception):
    """A program can't start. code: of the cause. text: a line that says it. status: of the job."""

    def __init__(self, code: str, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.status = status

    def of_rank(self) -> int:
        """Say why a rank can't start, and leave that for job.py, which only the first node has.
        Return the exit status.
        """
        complain(self.text)
        folder = os.path.join(os.path.dirname(os.environ.get("CLUSTERCTL_HEARTBEAT", "")), RANKS)
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            return self.status
        cause = f"{self.code} {self.text}".encode(errors="replace")
        write_file(f"{folder}/{rank}.cause", os.O_TRUNC, cause)
        return self.status


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the leading options --NAME=VALUE as name -> value, and the program with its
    arguments.
    """
    options: dict[str, str] = {}
    for number, word in enumerate(words):
        if not word.startswith("--"):
            return options, list(words[number:])
        name, _, value = word[2:].partition("=")
        options[name] = value
    return options, []


def start(
    program: list[str],
    stdin: int = 0,
    stdout: int = 1,
    stderr: int = 2,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Start a program with default signal handling, and return its pid. stdin, ...: open
    descriptors.
    """
    return os.posix_spawnp(
        program[0],
        program,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, file, number)
            for number, file in enumerate((stdin, stdout, stderr))
        ],
        setsigmask=(),
        setsigdef=IGNORED_BY_PYTHON,
    )


def start_or_exit(
    program: list[str],
    stdin: int = 0,
    stdout: int = 1,
    stderr: int = 2,
    *,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Start a program. If that fails, exit with the status that a shell would return."""
    try:
        return start(program, stdin, stdout, stderr, environment)
    except OSError as exc:
        sys.exit(not_started(program, exc))


def become(program: list[str]) -> int:
    """Replace this process by a program. If that fails, return the status that a shell would
    return.
    """
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as exc:
        return not_started(program, exc)


def not_started(program: list[str], exc: OSError) -> int:
    complain(f"{program[0]}: {exc.strerror}")
    return 127 if isinstance(exc, FileNotFoundError) else 126


def complain(text: str) -> None:
    os.write(2, f"clusterctl: {text}\n".encode(errors="surrogateescape"))


def output_of(program: list[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the output of a program, or "" if the program cannot be started or fails."""
    reads, writes = os.pipe()
    try:
        pid = start(program, stdout=writes, environment=environment)
    except OSError:
        os.close(reads)
        return ""
    finally:
        os.close(writes)
    with open(reads, errors="replace") as pipe:
        output = pipe.read()
    return output if os.waitpid(pid, 0)[1] == 0 else ""


def hold_signals() -> None:
    """Block the signals for which ``supervise`` will wait."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})


def wake_regularly() -> None:
    """Let ``supervise`` return at least every ``POLL_S`` seconds.

    sigtimedwait has a time-out of its own, but if this process is stopped and continued meanwhile,
    as Slurm does to suspend a job, Python may return a signal that was never sent.
    """

    def wake() -> None:
        while True:
            time.sleep(POLL_S)
            os.kill(os.getpid(), signal.SIGCHLD)

    start_new_thread(wake, ())


def supervise(pid: int, on_signal: Callable[[int], None]) -> int | None:
    """Wait for a signal. If program ``pid`` has then ended, return its exit code, or -N if signal N
    ended it, else None.

    on_signal: called with each signal but SIGCHLD. ``hold_signals`` blocks signals and this
        function fetches them, so that no signal is passed on to a program that has ended.
    """
    number = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD}).si_signo
    if number != signal.SIGCHLD:
        on_signal(number)
        return None
    ended, status = os.waitpid(pid, os.WNOHANG)
    return exit_code(status) if ended else None


def exit_code(status: int) -> int:
    """Convert a status from waitpid to an exit code, or -N if signal N ended the program."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def as_in_shell(code: int) -> int:
    """Return the exit status that a shell has for an exit code, or for signal N (-N)."""
    return code if code >= 0 else 128 - code


def open_for_writing(path: str, how: int) -> int:
    """Open a file for writing, or /dev/null if that fails. how: flags for os.open, such as
    O_APPEND.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | how, 0o666)
    except OSError:
        return os.open(os.devnull, os.O_RDWR)


def text_of(path: str) -> str:
    """Return the text of a file, or "" if it cannot be read. Bytes that are not UTF-8 are
    replaced.
    """
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def write_file(path: str, how: int, data: bytes) -> None:
    """Write to the file ``path``, ignoring errors. how: see ``open_for_writing``."""
    file = open_for_writing(path, how)
    write_all(file, data)
    os.close(file)


def write_all(file: int, data: bytes) -> None:
    """Write to a file, ignoring errors such as a full disk or a closed pipe."""
    try:
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        pass


def host_name() -> str:
    """Return Slurm's name of this node, or the short host name without Slurm."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]


def take_host_variables() -> None:
    """Set the environment variables that this node's TaskProlog script prints, as Slurm itself
    would.
    """
    prolog = f"{HOST_FOLDER}/task-prolog"
    if os.access(prolog, os.X_OK):
        for line in output_of([prolog]).splitlines():
            name, _, value = line[len("export ") :].partition("=")
            os.environ[name] = value


def read_secrets(options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in the folder of ``--secrets``, {} without this option.

    CannotStartError: they are gone.
    """
    if "secrets" not in options:
        return {}
    try:
        with open(f"{options['secrets']}/{SECRETS}", errors="surrogateescape") as file:
            pairs = [entry.partition("=") for entry in file.read().split("\0") if entry]
    except OSError as exc:
        raise CannotStartError(
            "secrets-gone", f"{host_name()} has no values of --secret any more ({exc.strerror})"
        ) from None
    return {name: value for name, _, value in pairs}


def mark_restart(files: Iterable[int]) -> bool:
    """Return whether Slurm has restarted the job. If so, write a note into the open ``files``
    (logs).
    """
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    for file in files if restarts != "0" else ():
        write_all(file, f"\nclusterctl: restart {restarts} of this job\n".encode())
    return restarts != "0"


def rank(words: Sequence[str]) -> int:
    """Run a program as a rank, given the arguments of task.py, and return the exit status."""
    options, program = split(words)
    launcher = options.get("of", "srun")
    describe_rank(launcher, int(options.get("per-node", "1")))
    try:
        os.environ.update(read_secrets(options))
    except CannotStartError as exc:
        return exc.of_rank()
    if launcher == "mpirun":
        take_host_variables()
    choose_mig_device()
    if os.environ.get("LOCAL_RANK") == "0":
        warn_of_full_folder(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108
    log = open_log() if os.environ["WORLD_SIZE"] != "1" else None
    if log is None:
        return become(program)
    hold_signals()
    streams = []
    drained = []
    for target in (1, 2):
        source, stream = os.pipe()
        streams.append(stream)
        drained.append(allocate_lock())
        drained[-1].acquire()
        start_new_thread(record, (source, target, log, drained[-1]))
    pid = start_or_exit(program, 0, *streams)
    for stream in streams:
        os.close(stream)
    has_reached_it = is_signalled_with_its_program(launcher)
    code = None
    while code is None:
        code = supervise(pid, lambda number: None if has_reached_it else os.kill(pid, number))
    if code:
        # Record when this rank failed: other ranks, which lose their connection to it, may end
        # first. A shell's status would not tell a signal from an exit code.
        end = f"{time.time():.6f} {code} {host_name()}\n"
        write_file(f"rank-logs/{os.environ['RANK']}.end", os.O_TRUNC, end.encode())
    # Wait for the output, because slurmstepd kills remaining processes of the task when this
    # process ends.
    deadline = time.monotonic() + (DRAIN_FAILED_S if code else DRAIN_S)
    for lock in drained:
        lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
    return end_alike(code)


def describe_rank(launcher: str, per_node: int) -> None:
    """Set PyTorch's variables, such as RANK, unless `submit --env` has set them, and this node's
    HOSTNAME.

    per_node: ranks per node.
    """
    get = os.environ.get
    if launcher == "torchrun":
        variables = {"NODE_RANK": get("GROUP_RANK", "0")}
    elif launcher == "mpirun":
        number = get("OMPI_COMM_WORLD_RANK", "0")
        variables = {
            "RANK": number,
            "WORLD_SIZE": get("OMPI_COMM_WORLD_SIZE", "1"),
            "LOCAL_RANK": get("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            "LOCAL_WORLD_SIZE": get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            "NODE_RANK": str(int(number) // per_node),
        }
    else:
        node = get("SLURM_NODEID", "0")
        variables = {
            "RANK": get("SLURM_PROCID", "0"),
            "WORLD_SIZE": get("SLURM_STEP_NUM_TASKS") or get("SLURM_NTASKS", "1"),
            "LOCAL_RANK": get("SLURM_LOCALID", "0"),
            "LOCAL_WORLD_SIZE": tasks_of_node(get("SLURM_STEP_TASKS_PER_NODE", "1"), int(node)),
            "NODE_RANK": node,
        }
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    # Launchers pass on the name of the node on which the job's script runs.
    os.environ["HOSTNAME"] = os.uname().nodename
    if launcher == "mpirun" and "SLURM_JOB_ID" in os.environ:
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        os.environ.update(slurm_variables(variables, per_node, nodes))


def slurm_variables(rank: Mapping[str, str], per_node: int, nodes: str) -> dict[str, str]:
    """Return Slurm's variables for a rank that srun has not started.

    rank: PyTorch's variables. per_node: ranks per node. nodes: Slurm's list of the nodes, or "".

    mpirun passes on the variables of the batch script, and on other nodes those of the step of its
    daemon, so that libraries that detect Slurm, such as Lightning, would see another number of
    ranks on each node.
    """
    size = int(rank["WORLD_SIZE"])
    full, rest = divmod(size, per_node)
    counts = [f"{per_node}(x{full})" if full > 1 else str(per_node)] if full else []
    tasks = ",".join(counts + ([str(rest)] if rest else []))
    count = str(full + (rest > 0))
    variables = {"PROCID": rank["RANK"], "LOCALID": rank["LOCAL_RANK"], "NODEID": rank["NODE_RANK"]}
    variables.update(dict.fromkeys(("NTASKS", "NPROCS", "STEP_NUM_TASKS"), rank["WORLD_SIZE"]))
    variables.update(dict.fromkeys(("NNODES", "STEP_NUM_NODES"), count))
    variables.update(dict.fromkeys(("TASKS_PER_NODE", "STEP_TASKS_PER_NODE"), tasks))
    variables.update(dict.fromkeys(("NODELIST", "STEP_NODELIST"), nodes) if nodes else {})
    return {f"SLURM_{name}": value for name, value in variables.items()}


def tasks_of_node(counts: str, node: int) -> str:
    """Return the number of tasks on a node. counts: Slurm's list for all nodes, such as 2(x3),1."""
    size = "1"
    nodes = 0
    for count in counts.split(","):
        size, _, times = count.partition("(x")
        nodes += int(times.rstrip(")") or 1)
        if nodes > node:
            break
    return size


def choose_mig_device() -> None:
    """Select a MIG device (a part of a GPU) for this rank, because a process can use only a single
    device.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is None and "SLURM_JOB_ID" not in os.environ:
        devices = ",".join(text_of(f"{HOST_FOLDER}/gpus").split())
    if devices and "MIG-" in devices and os.environ["LOCAL_WORLD_SIZE"] != "1":
        parts = devices.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = parts[int(os.environ["LOCAL_RANK"]) % len(parts)]


def warn_of_full_folder(folder: str) -> None:
    """Write to the log if a folder for temporary files is full.

    Otherwise, MPI waits for a minute, and its error does not name the folder.
    """
    try:
        room = os.statvfs(folder)
    except OSError:
        return
    lack = "space" if not room.f_bavail else "inodes" if room.f_files and not room.f_favail else ""
    if lack:
        complain(
            f"{folder} of {host_name()} has no free {lack}, so MPI and other programs may fail"
        )


def open_log() -> int | None:
    """Open the log of this rank's output. Return None if that fails."""
    path = f"rank-logs/{os.environ['RANK']}"
    try:
        os.makedirs("rank-logs", exist_ok=True)
        log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        if mark_restart([log]) and os.path.exists(f"{path}.end"):
            os.unlink(f"{path}.end")
    except OSError:
        return None
    return log


def is_signalled_with_its_program(launcher: str) -> bool:
    """Return whether a signal from the launcher reaches this rank's program, not only this
    process.
    """
    # Slurm signals all processes of a task, unless it tracks them by cgroups.
    if launcher == "srun":
        return f"/job_{os.environ.get('SLURM_JOB_ID')}/step_" not in text_of("/proc/self/cgroup")
    # mpirun and torchrun signal the process group of a rank that leads a group.
    return os.getpgrp() == os.getpid()


def record(source: int, target: int, log: int, drained: LockType) -> None:
    """Copy a rank's output from ``source`` to ``log`` and ``target``. At its end, release
    ``drained``.

    ``target`` gets whole lines, because the words of several ranks would mix in a line. The start
    of a line waits there for ``LINE_S`` seconds. ``log`` gets all output at once.
    """
    start = b""
    deadline = FOREVER_S
    while True:
        if start and not is_readable(source, deadline - time.monotonic()):
            write_all(target, start)
            start = b""
        chunk = os.read(source, CHUNK)
        if not chunk:
            break
        write_all(log, chunk)
        lines = start + chunk
        end = len(lines) if len(lines) > CHUNK else max(lines.rfind(b"\n"), lines.rfind(b"\r")) + 1
        if end or not start:
            deadline = time.monotonic() + LINE_S
        write_all(target, lines[:end])
        start = lines[end:]
    write_all(target, start)
    drained.release()


def is_readable(file: int, wait_s: float) -> bool:
    """Return whether a file can be read within ``wait_s`` seconds; False if no time is left."""
    # This import would take time at each start, and few programs write parts of lines.
    from select import select

    return wait_s > 0 and bool(select([file], [], [], wait_s)[0])


def end_alike(code: int) -> int:
    """If a signal ended the program (-N), end this process with the same signal. Otherwise return
    the program's exit code.
    """
    number = -code
    if number in FATAL:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    return as_in_shell(code)


if __name__ == "__main__":
    # Do not wait for threads that still read from remaining processes.
    os._exit(rank(sys.argv[1:]))
