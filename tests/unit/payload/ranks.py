"""Ranks without Python's start: each is forked from a process that has imported the payload, NumPy and MPI.

    python -I -S ranks.py SOCKET ...           what mpirun starts in the place of `python ...`
    python -m tests.unit.payload.ranks SOCKET  who forks; it ends with its standard input

A rank has the environment, folder, outputs and signals of what mpirun started, and ends with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def _stand_in(address: str, argv: list[str]) -> None:
    """Take the place of a rank: hand over all that it is to have, pass signals on, and end as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = json.dumps([argv, os.getcwd(), dict(os.environ)]).encode()  # noqa: PTH109 (pathlib is slow)
        socket.send_fds(server, [b"%10d" % len(request)], [0, 1, 2])
        server.sendall(request)
        rank = int(server.recv(10))
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: _send(rank, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        code = int(server.recv(10))
    if code < 0:
        if -code in _SIGNALS:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _send(rank: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # mpirun ends ranks of an aborted job: this had ended
        os.kill(rank, number)


def _serve(address: str) -> None:
    """Fork until standard input ends; returns in each rank, which has its ``sys.argv``."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)  # noqa: T201
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of those that watch a rank
    while listener in select.select([listener, 0], [], [])[0]:
        asked, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _begin(asked)
        asked.close()
    os._exit(0)


def _begin(asked: socket.socket) -> None:
    """Fork a rank, in which alone this returns, and watch over it."""
    head, outputs, _, _ = socket.recv_fds(asked, 10, 3)
    with asked.makefile("rb") as file:
        argv, folder, environ = json.loads(file.read(int(head)))
    if (rank := os.fork()) != 0:
        watched = os.pidfd_open(rank)
        asked.sendall(b"%10d" % rank)
        if watched not in select.select([asked, watched], [], [])[0]:  # it was killed
            os.kill(rank, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
        try:
            asked.sendall(b"%10d" % code)
        finally:
            os._exit(0)
    asked.close()
    os.setsid()
    for number, output in enumerate(outputs):
        os.dup2(output, number)
        os.close(output)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = argv


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _stand_in(sys.argv[1], sys.argv[2:])
    for name in ("train", "eval", "allreduce", "gemm", "probe"):
        importlib.import_module(f"payload.{name}")
    gc.freeze()
    _serve(sys.argv[1])
    if sys.argv[0] == "payload":
        runpy.run_module("payload", run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = sys.argv[0].rpartition("/")[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
