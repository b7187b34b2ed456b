"""Sessions over a connection that the ssh program keeps open, between verbs and for several at once.

The program is a master of OpenSSH's multiplexing. It serves a socket in a private folder beside the
`ssh_config`; this is what a client says there (PROTOCOL.mux of OpenSSH, version 4). It ends by itself after
``IDLE_S`` without a session, and soon after the connection broke. Linux only: elsewhere there is no way to a
socket whose path is long.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import ENDED_BY_SIGNAL, enlarge

IDLE_S = 300
_HELLO, _NEW_SESSION, _TERMINATE = 0x00000001, 0x10000002, 0x10000005
_OPENED, _EXIT_MESSAGE = 0x80000006, 0x80000004
_VERSION = 4
_NO_ESCAPE = 0xFFFFFFFF
_GREETING_S = 2.0  # the master is on this machine
_OPENING_S = 5.0  # the host opens a session without starting a process
_START_S = 75.0  # ssh has limits of its own, that of the file's ConnectTimeout among them
_SETTLE_S = 1.0
_LOCK_S = 5.0
_CHUNK = 1 << 16


class Master:
    """A connection that ssh keeps. ``folder`` is a descriptor of its socket's folder, which this closes."""

    def __init__(self, folder: int, name: str) -> None:
        """Raises OSError where none is kept, or it does not answer."""
        self._path = f"/proc/self/fd/{folder}/{name}"  # the real path may be longer than a socket's can be
        # As long as this one is open, so is the connection, and it does not end for want of sessions.
        self._watch = _greeted(self._path)
        self._folder = folder
        self._sessions: set[Session] = set()

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether the connection is no more, or we have closed it."""
        if self._watch.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._watch, select.POLLIN)
        return bool(poll.poll(within_s * 1000))  # it says nothing unasked

    def session(self, command: str, most_stderr: int = 64 << 20) -> Session:
        """Run a command of the remote shell; of its stderr the last ``most_stderr`` bytes are kept.

        Raises:
            OSError: it was not run. A connection on which no session can be opened in time is ended.
            MayHaveRunError: that could not be ended, so that the command may still be run.
        """
        with ExitStack() as ours, ExitStack() as theirs:
            stdin, to_stdin = _pipe(theirs, ours)
            from_stdout, stdout = _pipe(ours, theirs)
            from_stderr, stderr = _pipe(ours, theirs)
            control = ours.enter_context(_greeted(self._path))
            flags = (False, False, False, False, _NO_ESCAPE)  # terminal, X11, agent, subsystem
            words = (_text(""), struct.pack(">5I", *flags), _text(""), _text(command))
            _send(control, _NEW_SESSION, struct.pack(">I", 0), *words)
            for fd in (stdin, stdout, stderr):
                socket.send_fds(control, [b"\0"], [fd])
            control.settimeout(_OPENING_S)
            try:
                kind, body = _receive(control)
            except TimeoutError:
                _end(self._path)
                if _may_be_opened(control):
                    raise MayHaveRunError from None
                raise
            if kind != _OPENED:
                raise ConnectionRefusedError(body[8:].decode(errors="replace"))
            session = Session(self, control, to_stdin, from_stdout, from_stderr, most=most_stderr)
            ours.pop_all()
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """End our sessions; the connection stays. Calling it twice is fine."""
        if self._watch.fileno() >= 0:
            self._watch.close()
            os.close(self._folder)
        for session in [*self._sessions]:
            session.hang_up()


class MayHaveRunError(Exception):
    """Nobody knows whether a command was run."""


class Session:
    """A command that runs: its pipes, and how it ended. It is told to end when its ``stdin`` is closed."""

    def __init__(
        self, master: Master, control: socket.socket, stdin: int, stdout: int, stderr: int, *, most: int
    ) -> None:
        self._master, self._control = master, control
        self._said = bytearray()
        self._hearing = threading.Thread(target=self._hear, args=(stderr, most), daemon=True)
        try:
            self._hearing.start()
        except RuntimeError as exc:
            raise OSError("this machine starts no more threads") from exc
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb", buffering=0)
        self.stdout: IO[bytes] = os.fdopen(stdout, "rb", buffering=0)

    def wait(self, timeout_s: float) -> int:
        """The exit status, or ENDED_BY_SIGNAL, once all of its output is here.

        Raises:
            TimeoutError: it has not ended by then.
            ConnectionError: the connection broke.
        """
        deadline, status = time.monotonic() + timeout_s, None
        with suppress(ConnectionError):  # it closes its end when all is said
            while True:
                self._control.settimeout(max(0.001, deadline - time.monotonic()))
                kind, body = _receive(self._control)
                if kind == _EXIT_MESSAGE:
                    (status,) = struct.unpack(">I", body[4:8])
        if status is None and self._master.has_ended(_SETTLE_S):
            raise ConnectionError
        return ENDED_BY_SIGNAL if status is None else status

    def complaint(self) -> str:
        """The end of its stderr, once it has ended."""
        self._hearing.join(_SETTLE_S)
        return self._said.decode(errors="replace")

    def _hear(self, stderr: int, most: int) -> None:
        with os.fdopen(stderr, "rb", buffering=0) as pipe:
            while chunk := pipe.read(_CHUNK):
                self._said += chunk
                del self._said[:-most]

    def hang_up(self) -> None:
        """End the command, whoever waits for it."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._master._sessions.discard(self)
        for each in (self._control, self.stdin, self.stdout):
            each.close()


def kept(config: Path, host: str, user: str | None, *, start: bool = True) -> Master | None:
    """The connection to a host of this file that is open, or is opened now; None where none can be.

    Not ``start``: only one that is open.

    Why not, ssh says in words for people: who needs a reason connects in another way.
    """
    workspace = Workspace(config.parent)
    try:
        # A cluster that takes itself down when it is idle is not, as long as somebody is connected.
        if workspace.removing.exists() or b"auto_down" in workspace.spec.read_bytes():
            return None
    except FileNotFoundError:
        pass
    try:
        folder = _folder(config)
    except OSError:
        return None
    with ExitStack() as stack:
        stack.callback(os.close, folder)
        with suppress(OSError, subprocess.SubprocessError):
            # Of these very files: a connection that older ones describe is not used again.
            status = config.stat()
            here = os.uname().nodename  # machines may share a home, and none reaches another's socket
            words = (here, host, user, status.st_ino, status.st_mtime_ns)
            name = hashlib.sha256(repr(words).encode()).hexdigest()[:16]
            try:
                master = Master(folder, name)
            except OSError:
                if not start:
                    return None
                master = _started(config, host, user, folder, name)
            stack.pop_all()
            return master
    return None


def end_all(config: Path) -> None:
    """End the connections to all hosts of this file, whoever uses them."""
    with suppress(OSError):
        folder = Path(f"/proc/self/fd/{_folder(config)}")
        try:
            for path in folder.iterdir():
                _end(str(path))
        finally:
            os.close(int(folder.name))


def _folder(config: Path) -> int:
    """A descriptor of the folder of the sockets; an OSError where there can't be one for us alone."""
    path = Workspace(config.parent).connections
    if sys.platform != "linux" or shutil.which("ssh") is None:
        raise OSError
    if config.parent.stat().st_uid == os.geteuid():  # not as root in a folder of a user
        path.mkdir(mode=0o700, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(folder)
        raise PermissionError
    return folder


def _started(config: Path, host: str, user: str | None, folder: int, name: str) -> Master:
    """Start ssh, which goes to the background once it is connected and serves its socket."""
    with _locked(folder):  # a second ssh would find the socket's name taken, and stay without one
        with suppress(OSError):
            return Master(folder, name)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)  # of one that was killed, or stands still
        words = ["ssh", "-F", str(config.absolute()), "-f", "-N", "-M", "-S", f"./{name}"]
        words += ["-o", f"ControlPersist={IDLE_S}", "-o", "BatchMode=yes"]
        words += ["-l", user] if user is not None else []
        nothing = subprocess.DEVNULL
        subprocess.run(
            [*words, "--", host],
            cwd=f"/proc/self/fd/{folder}",
            pass_fds=[folder],
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            timeout=_START_S,
            check=True,
        )
        return Master(folder, name)


@contextmanager
def _locked(folder: int) -> Iterator[None]:
    """Hold the folder; raises BlockingIOError where another one takes long with it."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    try:
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Both ends of a pipe, and who closes which."""
    ends = os.pipe()
    enlarge(ends[0])
    reader.callback(os.close, ends[0])
    writer.callback(os.close, ends[1])
    return ends


def _greeted(path: str) -> socket.socket:
    with ExitStack() as stack:
        control = stack.enter_context(socket.socket(socket.AF_UNIX))
        control.settimeout(_GREETING_S)
        control.connect(path)
        _send(control, _HELLO, struct.pack(">I", _VERSION))
        kind, body = _receive(control)
        if kind != _HELLO or struct.unpack(">I", body[:4]) != (_VERSION,):
            raise ConnectionError("it speaks another version")
        stack.pop_all()
        return control


def _end(path: str) -> None:
    with suppress(OSError), _greeted(path) as control:
        _send(control, _TERMINATE, struct.pack(">I", 0))
        while True:
            _receive(control)  # until it is closed


def _may_be_opened(control: socket.socket) -> bool:
    """Whether a session that was asked for is open, or may be later: not once the master has ended."""
    control.settimeout(_GREETING_S)
    try:
        while _receive(control)[0] != _OPENED:
            pass
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def _send(control: socket.socket, kind: int, *parts: bytes) -> None:
    packet = struct.pack(">I", kind) + b"".join(parts)
    control.sendall(struct.pack(">I", len(packet)) + packet)


def _receive(control: socket.socket) -> tuple[int, bytes]:
    """The kind of the next packet, and what follows that."""
    (length,) = struct.unpack(">I", _exactly(control, 4))
    packet = _exactly(control, length)
    return struct.unpack(">I", packet[:4])[0], packet[4:]


def _exactly(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (chunk := control.recv(min(_CHUNK, size - len(data)))):
            raise ConnectionError("it was closed")
        data += chunk
    return data


def _text(text: str) -> bytes:
    raw = os.fsencode(text)
    return struct.pack(">I", len(raw)) + raw
