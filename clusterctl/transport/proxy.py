"""A program whose standard streams are the connection: ssh_config's ProxyCommand, for paramiko.

paramiko's own never reads the program's stderr, which may stall it, and leaves a zombie. This one has real
sockets underneath, so that all timeouts hold.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
from contextlib import suppress

_STDERR_TAIL = 2000
_SETTLE_S = 1.0  # for a program that ends by itself once its input is closed


class ProxySocket:
    """As much of a socket as paramiko asks for. The program ends with it, and also when we are killed.

    Its streams are two pairs: programs that make their input non-blocking must not do it to their output.
    """

    def __init__(self, command: str) -> None:
        """Start the program.

        Raises:
            OSError: it can't be started; `strerror` says why.
        """
        try:
            argv = shlex.split(command)
        except ValueError as exc:
            raise OSError(f"not a command line: {command}: {exc}") from exc
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._to, stdin = socket.socketpair()
        self._from, stdout = socket.socketpair()
        try:
            with stdin, stdout:
                self._process = subprocess.Popen(
                    argv,
                    stdin=stdin.fileno(),
                    stdout=stdout.fileno(),
                    stderr=self._stderr,
                    start_new_session=True,
                )
        except BaseException:
            self._close_ours()
            raise
        self._closing = threading.Lock()
        self._closed = False  # paramiko looks at it, too
        self._said = ""

    def settimeout(self, timeout_s: float | None) -> None:
        """Bound each ``send`` and ``recv``."""
        self._to.settimeout(timeout_s)
        self._from.settimeout(timeout_s)

    def send(self, data: bytes) -> int:
        """Send some of the bytes; how many."""
        return self._to.send(data)

    def recv(self, size: int) -> bytes:
        """The next bytes; none at the end."""
        return self._from.recv(size)

    def said(self) -> str:
        """The end of what the program said on stderr; known once it is closed."""
        return self._said

    def close(self) -> None:
        """End the program, and all that it started in its session; calling it twice is fine."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            for ours in (self._to, self._from):
                with suppress(OSError):  # it has closed its end already
                    ours.shutdown(socket.SHUT_RDWR)
            try:
                self._process.wait(_SETTLE_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                self._said = self._tail()
                self._close_ours()

    def _tail(self) -> str:
        size = os.fstat(self._stderr.fileno()).st_size
        raw = os.pread(self._stderr.fileno(), _STDERR_TAIL, max(0, size - _STDERR_TAIL))
        return raw.decode(errors="replace").strip()

    def _close_ours(self) -> None:
        for each in (self._to, self._from, self._stderr):
            each.close()
