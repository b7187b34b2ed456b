"""One MPI job that runs the programs of many tests, one after the other, each on a communicator of
its own.

    mpirun -n 4 python -m tests.integration.payload.ranks SOCKET STDOUT STDERR

The start of Python, NumPy and MPI takes 0.2 s of CPU time for each rank, and most programs compute
less. A program that calls MPI_Abort, or does not end, ends the job; the next program starts a new
one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from payload.__main__ import main
from payload.comm.world import MPI
from payload.training import peak

SIZE = 4
_START_S = 120
_ABORT_S = 5
# The time that other ranks have after one failed.
_STRAGGLE_S = 60
LAUNCHERS = ("SLURM_", "OMPI_", "PMIX_", "PMI_")
"""The beginnings of environment variables by which a launcher tells a program its rank."""


class Ranks:
    """The connection to such a job. The first program starts the job, and ``close`` ends it."""

    def __init__(self, start: Callable[..., subprocess.Popen[str]]) -> None:
        """
        Args:
            start: takes a number of ranks and the arguments of Python, and starts it by mpirun.
        """
        self._start = start
        # A socket's path may be too long in pytest's.
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._outputs = [self._folder / name for name in ("stdout", "stderr")]
        self._job: subprocess.Popen[str] | None = None
        self._ranks: list[Connection] = []

    def run(
        self, argv: Sequence[str], ranks: int, *, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `payload ...` or a file of Python in the current folder and environment.

        Args:
            ranks: how many ranks run it. 0: one rank, which sees no launcher.
            seconds: the limit after which the job is ended, and the exit code is 1.
        """
        # As if it were started here, for the guard in tests/unit/conftest.py.
        sys.audit("subprocess.Popen", argv[0], argv, None, None)
        if self._job and self._job.poll() is not None:
            self._end()
        if not self._job:
            self._begin()
        # New files: a process that outlived an aborted program may still write to the old ones.
        for path in self._outputs:
            path.unlink(missing_ok=True)
            path.touch()
        try:
            code = self._code(argv, ranks, seconds)
        except BaseException:
            self._end()
            raise
        more = (
            ""
            if code is not None
            else f"the job has ended, or not within {seconds} s\n{self._end()}"
        )
        output, errors = (path.read_text() for path in self._outputs)
        return subprocess.CompletedProcess(argv, 1 if code is None else code, output, errors + more)

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        if self._job:
            self._job.communicate(timeout=_START_S)
        shutil.rmtree(self._folder)

    def _begin(self) -> None:
        """Start the job, and wait until its ranks have connected."""
        address = self._folder / "socket"
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(_START_S)
            listener.bind(str(address))
            listener.listen()
            self._job = self._start(SIZE, "-m", __name__, str(address), *map(str, self._outputs))
            accepted = [Connection(listener.accept()[0].detach()) for _ in range(SIZE)]
        self._ranks = [rank for _, rank in sorted((rank.recv(), rank) for rank in accepted)]

    def _code(self, argv: Sequence[str], ranks: int, seconds: float) -> int | None:
        """Return the first exit code that is not 0, or 0; None if a rank died or did not end."""
        running = self._ranks[: ranks or 1]
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)
        }
        for rank in running:
            rank.send((argv, ranks, str(Path.cwd()), environ | {"OMP_NUM_THREADS": "1"}))
        code = 0
        deadline = time.monotonic() + seconds
        while running:
            ready = wait(running, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                return None
            for rank in [each for each in running if each in ready]:
                try:
                    found = rank.recv()
                except (EOFError, ConnectionResetError):
                    return None
                if found and not code:
                    code = found
                    deadline = min(deadline, time.monotonic() + _STRAGGLE_S)
                running.remove(rank)
        return code

    def _end(self) -> str:
        """End the job, and return the messages of mpirun."""
        assert self._job
        with contextlib.suppress(subprocess.TimeoutExpired):
            # After MPI_Abort mpirun ends by itself, and crashes if SIGTERM comes at the same time.
            self._job.wait(_ABORT_S)
        self._job.terminate()
        errors = self._job.communicate()[1]
        for rank in self._ranks:
            rank.close()
        self._job = None
        self._ranks = []
        return errors


def _serve(address: str, *outputs: str) -> None:
    """Run programs as one rank of the job until the other end of the socket closes."""
    MPI.Init()
    everyone = MPI.COMM_WORLD
    MPI.Init = lambda: None  # each program calls it
    # tensorboardX would import PyTorch, for 2 s.
    sys.modules["torch"] = None  # type: ignore[assignment]
    for name in ("train", "eval", "export", "allreduce", "gemm", "probe", "bench"):
        importlib.import_module(f"payload.commands.{name}")
    # Shorter than in production: no test asks for the speed of this machine.
    peak._SECONDS = 0.001
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        asked = Connection(server.detach())
    asked.send(everyone.rank)
    while True:
        try:
            argv, ranks, folder, environ = asked.recv()
        except EOFError:
            return
        launched = {"OMPI_COMM_WORLD_RANK": str(everyone.rank), "OMPI_COMM_WORLD_SIZE": str(ranks)}
        group = everyone.group.Incl(range(ranks))
        MPI.COMM_WORLD = everyone.Create_group(group) if ranks else MPI.COMM_SELF  # type: ignore[misc]
        os.environ.clear()
        os.environ.update(environ | (launched if ranks else {}))
        os.chdir(folder)
        # Python shows a warning once for each place in the code: here, once in each program.
        with _modules_kept(), _redirected(outputs), warnings.catch_warnings():
            code = _run(argv)
        # An object in a cycle may hold the lock of a folder.
        gc.collect()
        asked.send(code)


def _run(argv: Sequence[str]) -> int:
    """Run a program as Python would, and return its exit code."""
    sys.argv = list(argv)
    sys.excepthook = sys.__excepthook__
    try:
        if argv[0] == "payload":
            # runpy would warn of payload.__main__, which some programs import, in the first run
            # after them.
            return main(argv[1:])
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        # If the program has started MPI, this is the payload's hook, which calls MPI_Abort.
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


@contextlib.contextmanager
def _modules_kept() -> Iterator[None]:
    """Restore names in the payload's modules that a program replaces."""
    before = [
        (vars(m), dict(vars(m))) for name, m in sys.modules.items() if name.startswith("payload.")
    ]
    yield
    for names, values in before:
        names.update(values)


@contextlib.contextmanager
def _redirected(outputs: Sequence[str]) -> Iterator[None]:
    """Append standard output and standard error to these files."""
    sys.stdout.flush()
    kept = [os.dup(number) for number in (1, 2)]
    for number, path in enumerate(outputs, 1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    yield
    sys.stdout.flush()
    sys.stderr.flush()
    for number, before in enumerate(kept, 1):
        os.dup2(before, number)
        os.close(before)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
