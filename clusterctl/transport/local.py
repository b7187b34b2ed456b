"""This machine as a host: commands are ordinary child processes."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from clusterctl.errors import CommandError
from clusterctl.transport.base import SILENCE_S, Conversation, Result, no_answer, shown

_CHUNK = 1 << 16
_PIPE = 1 << 18  # bytes; Linux lets anyone have four times that
_STDERR_TAIL = 1 << 16
_NOT_FOUND = 127  # the shell's exit status for it
_ENDED_BY_SIGNAL = -1


class LocalTransport:
    """Runs commands on this machine as this user."""

    silence_s = SILENCE_S

    @property
    def host(self) -> str:
        """Name of the host, for messages."""
        return "localhost"

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a command to its end; see ``Transport.run``."""
        with self._start(argv, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                stdout, stderr = process.communicate(stdin or b"", timeout=timeout_s)
            except subprocess.TimeoutExpired as exc:
                raise no_answer("localhost", argv, timeout_s) from exc
            finally:
                _end(process)
        rc = max(process.returncode, _ENDED_BY_SIGNAL)
        result = Result(rc, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
        if check and rc != 0:
            raise _failed(argv, rc, result.stderr)
        return result

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        """Run a command and yield its stdout as it comes; see ``Transport.stream``."""
        with (
            tempfile.TemporaryFile() as stderr,
            self._start(argv, env=None, stdin=subprocess.DEVNULL, stderr=stderr) as process,
        ):
            assert process.stdout is not None  # noqa: S101  # it is a pipe
            try:
                while chunk := _read(process.stdout, _CHUNK, argv, self.silence_s):
                    yield chunk
                rc = _status(process, argv, self.silence_s)
            finally:
                _end(process)
            if rc != 0:
                raise _failed(argv, rc, _tail(stderr))

    @contextmanager
    def converse(
        self, argv: Sequence[str], *, bulk: bool = False, silence_s: float | None = None
    ) -> Iterator[Conversation]:
        """Start a command and talk with it; see ``Transport.converse``."""
        with (
            tempfile.TemporaryFile() as stderr,
            self._start(argv, env=None, stdin=subprocess.PIPE, stderr=stderr) as process,
        ):
            if bulk:
                _widen(process)
            try:
                yield _Talk(argv, process, stderr, silence_s or self.silence_s)
            finally:
                _end(process)

    def close(self) -> None:
        """Nothing to close."""

    def _start(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None, stdin: int, stderr: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **env} if env else None,
                start_new_session=True,  # so that what it starts can be ended with it
            )
        except OSError as exc:
            raise CommandError(f"can't run `{shown(argv)}`", rc=_NOT_FOUND, stderr=str(exc)) from exc


@dataclass(frozen=True, slots=True)
class _Talk:
    """See ``Conversation``."""

    argv: Sequence[str]
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    silence_s: float

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None  # noqa: S101  # it is a pipe
        fd, left = self.process.stdin.fileno(), memoryview(data)
        os.set_blocking(fd, False)
        try:
            while left:
                _wait(fd, select.POLLOUT, self.argv, self.silence_s)
                left = left[os.write(fd, left) :]
        except BrokenPipeError:
            self.finish()
            raise _failed(self.argv, 0, "it ended before it had read all") from None

    def receive(self) -> bytes:
        assert self.process.stdout is not None  # noqa: S101
        return _read(self.process.stdout, _PIPE, self.argv, self.silence_s)

    def finish(self) -> None:
        assert self.process.stdin is not None  # noqa: S101
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        while self.receive():
            pass
        rc = _status(self.process, self.argv, self.silence_s)
        if rc != 0:
            raise _failed(self.argv, rc, _tail(self.stderr))


def _wait(fd: int, event: int, argv: Sequence[str], silence_s: float) -> None:
    """Return when a pipe of a command is ready, or at its end.

    Raises:
        NoAnswerError: it is not within that time.
    """
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(silence_s * 1000):
        raise no_answer("localhost", argv, silence_s)


def _read(pipe: IO[bytes], size: int, argv: Sequence[str], silence_s: float) -> bytes:
    """Some of what a command says; b"" at its end."""
    _wait(pipe.fileno(), select.POLLIN, argv, silence_s)
    return os.read(pipe.fileno(), size)


def _status(process: subprocess.Popen[bytes], argv: Sequence[str], silence_s: float) -> int:
    """The exit status of a command whose stdout is at its end."""
    try:
        return max(process.wait(silence_s), _ENDED_BY_SIGNAL)
    except subprocess.TimeoutExpired as exc:
        raise no_answer("localhost", argv, silence_s) from exc


def _widen(process: subprocess.Popen[bytes]) -> None:
    """Larger pipes: with the usual ones, much data means a change of process every 64 KiB."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(OSError):  # beyond what this user may have of them
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE)


def _tail(stderr: IO[bytes]) -> str:
    """The end of what a command said."""
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _STDERR_TAIL))
    return stderr.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs, with its children."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _failed(argv: Sequence[str], rc: int, stderr: str) -> CommandError:
    how = "was ended by a signal" if rc == _ENDED_BY_SIGNAL else f"failed with exit status {rc}"
    return CommandError(f"`{shown(argv)}` {how}", rc=rc, stderr=stderr, where="localhost", host="localhost")
