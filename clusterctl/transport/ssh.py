"""Hosts over SSH: the ssh program runs each command, and reads the `ssh_config` that plain ``ssh -F`` reads.

Commands share a connection, OpenSSH's ControlMaster. Its socket lies in a private folder beside the
`ssh_config`. Its ssh ends by itself after ``IDLE_S`` without a command, and soon after the connection broke.
Only our key and our known_hosts count: no agent, no keys of the user's, no trust on first use.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import select
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from clusterctl.errors import HostKeyError, KeyRefusedError, TransportError
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import (
    ENDED_BY_SIGNAL,
    SILENCE_S,
    Conversation,
    Transport,
    failed,
    shown,
    unreachable,
    wrapped,
)
from clusterctl.transport.openssh import ALONE, NO_CONNECTION, OpenSSH, Talk, running
from clusterctl.util.process import Result

IDLE_S = 300
# A connection that was used more recently than this is trusted to live: a command tells soon enough.
FRESH_S = 60.0
_ANSWER_S = 10.0
# ssh has limits of its own, such as the ConnectTimeout of the file.
_START_S = 75.0
_EXIT_S = 2.0
# Time to connect to the socket of a new connection. A connection that nobody watches ends after it.
_WATCHED_WITHIN_S = 3
_NO_SOCKET = re.compile("unix_listener|mux listener|ControlSocket")


@dataclass(frozen=True, slots=True)
class Master:
    """One connection that ssh keeps. ``watch`` is connected to its socket, and closes when ssh ends.

    As long as ``watch`` is open, the connection does not end for want of commands. ``stays``: it is left to
    the next verb.
    """

    folder: Path
    name: str
    watch: socket.socket
    stays: bool

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Return whether the connection has ended, or has been closed by ``close``."""
        if self.watch.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.watch, 0)
        return bool(poll.poll(within_s * 1000))

    def close(self) -> None:
        """Leave the connection to the next verb, or end it if it is ours alone. Twice is fine."""
        self.watch.close()
        if not self.stays:
            _end(self.folder, self.name)
            return
        with suppress(OSError):
            os.utime(self.folder / self.name)


def open_master(
    config: Path, host: str, user: str | None, *, stays: bool, start: bool = True
) -> Master | None:
    """Return a connection to a host, which is opened if ``start``.

    stays: verbs share it as long as the `ssh_config` is the same file. Otherwise it ends with this process,
    however that ends. None: there is no such connection, and commands connect by themselves.

    Raises:
        HostKeyError: the host shows another key than the known one.
        KeyRefusedError: the host does not accept our key.
        UnreachableError: there is no connection.
        TransportError: the `ssh_config` can't be used.
    """
    folder = _private_folder(config)
    if folder is None or not config.exists():
        return None
    name = secrets.token_hex(8)
    if stays:
        status = config.stat()
        # Machines may share a home, and no machine reaches another's socket.
        words = (os.uname().nodename, host, user, status.st_ino, status.st_mtime_ns)
        name = hashlib.sha256(repr(words).encode()).hexdigest()[:16]
        with suppress(OSError):
            if time.time() - (folder / name).stat().st_mtime < FRESH_S:
                return Master(folder, name, _watch(folder, name), stays)
    if not start:
        return None
    # ssh opens the connection if there is none, or if one that was killed has left its socket. One that was
    # idle for long may be dead without its ssh knowing yet, as after a laptop's sleep: it gets little time.
    idle_s = IDLE_S if stays else _WATCHED_WITHIN_S
    ssh = OpenSSH(config, user)
    options = ["-S", f"./{name}", "-o", "BatchMode=yes", "-o", "ControlMaster=auto"]
    options += ["-o", f"ControlPersist={idle_s}", *(() if stays else ("-f", "-N"))]
    command = ssh.argv(host, "true" if stays else (), *options)
    for limit_s in (_ANSWER_S, _START_S) if (folder / name).exists() else (_START_S,):
        rc, said = _tried(command, folder, limit_s)
        if rc is not None:
            break
        _end(folder, name)
    if rc in {None, NO_CONNECTION} and not _NO_SOCKET.search(said):
        if not said or "kex_exchange_identification" in said:
            # ssh drops the words of a lasting connection's ProxyCommand, and has none if that ends early.
            _, said = _tried(ssh.argv(host, "true", *ALONE, "-o", "BatchMode=yes"), folder, _START_S)
        raise refusal(host, config, said, user)
    try:
        return Master(folder, name, _watch(folder, name), stays)
    except OSError:
        return None


def end_all(config: Path) -> None:
    """End the connections to all hosts of this file, whoever uses them."""
    folder = Workspace(config.parent).connections
    with suppress(OSError):
        for socket_file in list(folder.iterdir()):
            _end(folder, socket_file.name)


def refusal(host: str, config: Path, stderr: str, user: str | None = None) -> TransportError:
    """Return the error for a host that ssh could not connect to, by what ssh says."""
    said = [line.rstrip("\r") for line in stderr.strip().split("\n")]
    why = "\n".join(line for line in said if not line.startswith("@"))
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in stderr:
        what = f"{host} is not the host it should be"
        fix = "if the host was made anew on purpose, run `clusterctl up`; otherwise somebody is in between"
        return HostKeyError(what, where=str(config), why=why, fix=fix, host=host)
    if "Host key verification failed" in stderr:
        what = f"{host} has no known host key"
        fix = "run `clusterctl up`, which writes its hosts' keys; none is trusted on first use"
        return HostKeyError(what, where=str(config), why=why, fix=fix, host=host)
    if "Permission denied (" in stderr:
        what = f"{host} does not accept our key" + (f" for user {user}" if user else "")
        fix = "run `clusterctl up` again, which puts the key there"
        return KeyRefusedError(what, where=str(config), why=why, fix=fix, host=host)
    if "Can't open user config file" in stderr or "bad configuration option" in stderr:
        return TransportError(
            f"the SSH configuration does not say how to reach {host}",
            code="ssh-config-incomplete",
            where=str(config),
            why=why,
            fix="run `clusterctl up`, which writes it",
            host=host,
        )
    return unreachable(host, config, "no SSH connection", why)


def _tried(words: list[str], folder: Path, limit_s: float) -> tuple[int | None, str]:
    """Return the exit status of an ssh, None if it took too long, and what it says."""
    # A file: what ssh leaves in the background may keep its stderr open.
    with tempfile.TemporaryFile() as stderr:
        nothing = subprocess.DEVNULL
        # The ProxyCommand of a connection that stays remains in this group, so the group outlives us.
        process = subprocess.Popen(
            words, cwd=folder, stdin=nothing, stdout=nothing, stderr=stderr, process_group=0
        )
        try:
            rc = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None, f"there was no answer within {limit_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        stderr.seek(0)
        return rc, stderr.read().decode(errors="replace")


def _private_folder(config: Path) -> Path | None:
    """Return the folder of the sockets, made if it is not there; None if it can't be for us alone."""
    folder = Workspace(config.parent.absolute()).connections
    try:
        # Root makes no folder in a user's workspace.
        if config.parent.stat().st_uid == os.geteuid():
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return folder if is_private and status.st_uid == os.geteuid() else None


def _watch(folder: Path, name: str) -> socket.socket:
    """Connect to a socket; raises OSError if no ssh serves it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    watch = socket.socket(socket.AF_UNIX)
    try:
        # The real path may be longer than that of a socket can be. Linux only.
        watch.connect(f"/proc/self/fd/{opened}/{name}")
    except BaseException:
        watch.close()
        raise
    finally:
        os.close(opened)
    return watch


def _end(folder: Path, name: str) -> None:
    _tried(["ssh", "-F", "/dev/null", "-O", "exit", "-S", f"./{name}", "host"], folder, _EXIT_S)
    (folder / name).unlink(missing_ok=True)


_SETTLE_S = 1.0


@dataclass(slots=True, eq=False)
class SSHTransport:
    """One host of an `ssh_config`, as ``user`` (default: the one the file names); see ``Transport``.

    ``stays``: the connection is left open for the next verb. ``max_output`` bounds the bytes of stdout that
    ``run`` keeps, and those of stderr that it returns.
    """

    host: str
    config: Path
    _: KW_ONLY
    user: str | None = None
    stays: bool = False
    max_output: int = 64 << 20
    silence_s: float = SILENCE_S
    _master: Master | None = field(default=None, init=False)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set, init=False)
    _begun: dict[tuple[str, ...], tuple[ExitStack, Talk]] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        deadline = time.monotonic() + timeout_s
        line, script = wrapped(argv, env, reads=stdin is not None)
        with self._talk(argv, line, timeout_s) as talk:
            talk.deadline, talk.most_stderr = deadline, self.max_output
            # The end of its stdin would end a command that reads none.
            stdout = talk.exchange(script + (stdin or b""), self.max_output, close=stdin is not None)
            rc = talk.status()
            result = Result(rc, stdout.decode(errors="replace"), talk.complaint())
        if check and rc != 0:
            raise failed(self.host, argv, rc, result.stderr)
        return result

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        with self._conversation(argv, self.silence_s, reads=False) as talk:
            while chunk := talk.receive():
                yield chunk
            talk.ended()

    def begin(self, argv: Sequence[str]) -> None:
        with self._lock:
            if self.stays and self._master is None and _may_stay(self.config):
                self._master = open_master(self.config, self.host, self.user, stays=True, start=False)
            if self._master is None or self._master.has_ended():
                return
        with suppress(TransportError), ExitStack() as stack:
            talk = stack.enter_context(self._conversation(argv, self.silence_s))
            self._begun[tuple(argv)] = (stack.pop_all(), talk)

    @contextmanager
    def converse(self, argv: Sequence[str], *, silence_s: float | None = None) -> Iterator[Conversation]:
        stack, talk = self._begun.pop(tuple(argv), (ExitStack(), None))
        with stack:
            if talk is not None and talk.process.poll() is None:
                talk.silence_s = silence_s or self.silence_s
                yield talk
                return
        with self._conversation(argv, silence_s or self.silence_s) as talk:
            yield talk

    def close(self) -> None:
        for stack, _ in self._begun.values():
            stack.close()
        self._begun.clear()
        for process in list(self._running):
            process.kill()
        with self._lock:
            if self._master is not None:
                self._master.close()
            self._master = None

    @contextmanager
    def _conversation(self, argv: Sequence[str], silence_s: float, *, reads: bool = True) -> Iterator[Talk]:
        line, script = wrapped(argv, reads=reads)
        with self._talk(argv, line, silence_s) as talk:
            talk.send(script)
            yield talk

    @contextmanager
    def _talk(self, argv: Sequence[str], line: str, silence_s: float) -> Iterator[Talk]:
        """Start ssh, which runs a line of the login shell over the shared connection."""
        master = self._connected()
        # ssh connects by itself if the host takes no more sessions over a connection.
        options = ("-S", f"./{master.name}" if master else "none", "-T", "-o", "BatchMode=yes")
        words = OpenSSH(self.config, self.user).argv(self.host, line, *options)
        with running(words, cwd=master.folder if master else None, is_ssh=True) as process:
            self._running.add(process)
            try:
                yield _Command(self.host, argv, process, silence_s, is_wrapped=True, ssh=self, master=master)
            finally:
                self._running.discard(process)

    def _connected(self) -> Master | None:
        """Return the connection, opened if it is not; None if the next command has to connect by itself."""
        with self._lock:
            if self._master is not None and self._master.has_ended():
                self._master.close()
                self._master = None
            if self._master is None:
                stays = self.stays and _may_stay(self.config)
                self._master = open_master(self.config, self.host, self.user, stays=stays)
            return self._master


@dataclass(slots=True, kw_only=True)
class _Command(Talk):
    """A command on a host; ``master`` is the connection that it shares."""

    ssh: SSHTransport
    master: Master | None

    def _status(self, rc: int) -> int:
        """ssh says by 255 that it has no exit status: a signal ended the command, or the connection broke.

        If the command itself exits with 255, it is taken for one that a signal ended.
        """
        ended_here = rc == ENDED_BY_SIGNAL
        if rc != NO_CONNECTION and not ended_here:
            return rc
        if self.is_wrapped:
            # The command has not begun, so it is ssh that says why.
            raise refusal(self.host, self.ssh.config, self.complaint(), self.ssh.user)
        if ended_here or self.master is None or self.master.has_ended(_SETTLE_S):
            what = f"the connection broke during `{shown(self.argv)}`"
            raise unreachable(self.host, self.ssh.config, what, self.complaint())
        return ENDED_BY_SIGNAL


def _may_stay(config: Path) -> bool:
    """Return whether connections are left open for the next verb.

    A cluster that takes itself down when it is idle is not idle as long as somebody is connected.
    """
    workspace = Workspace(config.parent)
    try:
        return not workspace.removing.exists() and b"auto_down" not in workspace.spec.read_bytes()
    except FileNotFoundError:
        return True


class Connections(ExitStack):
    """The hosts of an `ssh_config`. As a context manager it closes them all.

    The connection to the host ``stays`` is left open for the next verb.
    """

    def __init__(self, ssh_config: Path, *, stays: str | None = None) -> None:
        super().__init__()
        self._ssh_config = ssh_config
        self._stays = stays
        self._open: dict[tuple[str, str | None], Transport] = {}
        self._lock = threading.Lock()

    def to(self, host: str, user: str | None = None) -> Transport:
        """Return the connection to a host of that name, as this user (default: the admin user)."""
        with self._lock:
            if (host, user) not in self._open:
                stays = host == self._stays
                self._open[host, user] = SSHTransport(host, self._ssh_config, user=user, stays=stays)
                self.callback(self._open[host, user].close)
            return self._open[host, user]
