"""Ranks that stay: one MPI job runs the programs of many tests, each on a communicator of its own.

    mpirun -n 4 python -m tests.unit.payload.ranks SOCKET

A start of Python, NumPy and MPI costs each rank 0.2 s of CPU time, and most programs compute less than that.
A program that ends as under mpirun by MPI_Abort, or does not end, takes the job along, and the next program
starts another.
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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from payload import peak
from payload.comm.world import MPI

SIZE = 4
_START_S = 120
_STRAGGLE_S = 60  # for the other ranks of one that failed
_LAUNCHER = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "ORTE_")

Request = tuple[Sequence[str], str, int]
"""A program and its arguments, its working directory, and its number of ranks; 0 without a launcher."""


class Ranks:
    """The way to such a job, which starts with the first program and ends with this object."""

    def __init__(self, start: Callable[..., subprocess.Popen[str]]) -> None:
        """
        Args:
            start: starts `python` with these arguments on so many ranks.
        """
        self._start = start
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))  # a socket's path may be too long in pytest's
        self._outputs = [self._folder / name for name in ("stdout", "stderr")]
        self._job: subprocess.Popen[str] | None = None
        self._ranks: list[Connection] = []

    def run(self, argv: Sequence[str], ranks: int, *, seconds: float) -> subprocess.CompletedProcess[str]:
        """Run `payload ...` or a file of Python.

        Args:
            ranks: on the first ones of the job; 0 for one without a launcher.
            seconds: the time that it has.
        """
        for path in self._outputs:
            path.write_text("")
        if not self._job:
            self._join()
        try:
            code = self._code(argv, ranks, seconds)
        except BaseException:
            self._end()
            raise
        errors = self._end() if code is None else ""
        output, said = (path.read_text() for path in self._outputs)
        return subprocess.CompletedProcess(argv, 1 if code is None else code, output, said + errors)

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        if self._job:
            self._job.communicate(timeout=_START_S)
        shutil.rmtree(self._folder)

    def _join(self) -> None:
        """Start the job, and wait for its ranks."""
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
        """The first exit code that is not 0; None if a rank died, or did not end."""
        running = self._ranks[: ranks or 1]
        for rank in running:
            rank.send((argv, str(Path.cwd()), ranks))
        code, deadline = 0, time.monotonic() + seconds
        while running:
            ready = wait(running, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                return None
            for rank in ready:
                try:
                    found = rank.recv()
                except (EOFError, ConnectionResetError):
                    return None
                if found and not code:
                    code, deadline = found, min(deadline, time.monotonic() + _STRAGGLE_S)
                running.remove(rank)
        return code

    def _end(self) -> str:
        """End the job, and return what mpirun says of that."""
        assert self._job
        self._job.terminate()
        errors = self._job.communicate()[1]
        for rank in self._ranks:
            rank.close()
        self._job, self._ranks = None, []
        return errors


def _serve(address: str, *outputs: str) -> None:
    """Be a rank until the other end closes."""
    MPI.Init()
    everyone = MPI.COMM_WORLD
    MPI.Init = lambda: None  # programs start MPI
    sys.modules["torch"] = None  # type: ignore[assignment]  # tensorboardX would load it for 2 s
    for name in ("train", "eval", "export", "align", "models", "allreduce", "gemm", "probe", "bench"):
        importlib.import_module(f"payload.{name}")
    peak._SECONDS = 0.001  # smaller than in earnest: nobody asks how fast this machine multiplies
    gc.freeze()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        asked = Connection(server.detach())
    asked.send(everyone.rank)
    while True:
        try:
            argv, folder, ranks = asked.recv()
        except EOFError:
            return
        launched = {"OMPI_COMM_WORLD_RANK": str(everyone.rank), "OMPI_COMM_WORLD_SIZE": str(ranks)}
        MPI.COMM_WORLD = everyone.Create_group(everyone.group.Incl(range(ranks))) if ranks else MPI.COMM_SELF
        os.environ.clear()
        os.environ.update(environ | (launched if ranks else {}))
        os.chdir(folder)
        with _as_before(), _redirected(outputs):
            code = _run(argv)
        gc.collect()  # what holds a lock of a folder
        asked.send(code)


def _run(argv: Sequence[str]) -> int:
    """Return a program's exit code."""
    sys.argv, sys.excepthook = list(argv), sys.__excepthook__
    try:
        if argv[0] == "payload":
            runpy.run_module("payload", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # which ends all ranks once the program has started MPI
        return 1
    return 0


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Undo what a program does to the payload's modules."""
    before = [(vars(m), dict(vars(m))) for name, m in sys.modules.items() if name.startswith("payload.")]
    yield
    for names, values in before:
        names.update(values)


@contextlib.contextmanager
def _redirected(outputs: Sequence[str]) -> Iterator[None]:
    """Standard output and error go to the end of these files."""
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
