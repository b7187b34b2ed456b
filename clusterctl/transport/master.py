"""Connections that the ssh program keeps open, so that commands share them: OpenSSH's ControlMaster.

The socket of each connection lies in a private folder beside the `ssh_config`. Its ssh ends by itself after
``IDLE_S`` without a command, and soon after the connection broke.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import select
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import HostKeyError, KeyRefusedError, TransportError
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import unreachable
from clusterctl.transport.openssh import OpenSSH, ending_with_us
from clusterctl.util.process import run

IDLE_S = 300
# A connection that was used more recently than this is trusted to live: a command tells soon enough.
FRESH_S = 60.0
_ANSWER_S = 10.0
# ssh has limits of its own, such as the ConnectTimeout of the file.
_START_S = 75.0
_EXIT_S = 2.0
_LOCK_S = 5.0
_LONGEST_PAUSE_S = 0.05
_NO_SOCKET = re.compile("unix_listener|mux listener|ControlSocket")


@dataclass(frozen=True, slots=True)
class Master:
    """One connection that ssh keeps. ``watch`` is connected to its socket, and closes when ssh ends.

    As long as ``watch`` is open, the connection does not end for want of commands. ``process`` is an ssh that
    ends with us.
    """

    folder: Path
    name: str
    watch: socket.socket
    process: subprocess.Popen[bytes] | None = None

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
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
            (self.folder / self.name).unlink(missing_ok=True)
            return
        with suppress(OSError):
            os.utime(self.folder / self.name)


def shared_master(config: Path, host: str, user: str | None, *, start: bool = True) -> Master | None:
    """Return the connection to a host that verbs share, which is opened if ``start``.

    It serves as long as the `ssh_config` is the same file. None: there is no such connection, and commands
    connect by themselves.

    Raises:
        TransportError: as ``own_master``.
    """
    folder = _private_folder(config)
    if folder is None:
        return None
    try:
        status = config.stat()
    except OSError:
        return None
    # Machines may share a home, and no machine reaches another's socket.
    words = (os.uname().nodename, host, user, status.st_ino, status.st_mtime_ns)
    name = hashlib.sha256(repr(words).encode()).hexdigest()[:16]
    if (master := _reused(OpenSSH(config, user), host, folder, name, check=start)) or not start:
        return master
    with _locked(folder) as held:
        if not held:
            return None
        # Another verb may have opened it meanwhile.
        with suppress(OSError):
            return Master(folder, name, _watch(folder, name))
        # An ssh that was killed leaves its socket.
        (folder / name).unlink(missing_ok=True)
        return _started(OpenSSH(config, user), host, folder, name, stays=True)


def own_master(config: Path, host: str, user: str | None) -> Master | None:
    """Open a connection to a host that ends with this process; None where commands connect by themselves.

    Raises:
        HostKeyError: the host shows another key than the known one.
        KeyRefusedError: the host does not accept our key.
        UnreachableError: there is no connection.
        TransportError: the `ssh_config` can't be used.
    """
    folder = _private_folder(config)
    if folder is None:
        return None
    return _started(OpenSSH(config, user), host, folder, secrets.token_hex(8), stays=False)


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


def _reused(ssh: OpenSSH, host: str, folder: Path, name: str, *, check: bool) -> Master | None:
    """Return the connection that an earlier verb has opened, if it still serves.

    One that was idle for long may be dead without ssh knowing yet, as after a laptop's sleep. ``check``: try
    such a connection, so that it is opened again before a command is lost on it. Otherwise it is not used.
    """
    try:
        idle_s = time.time() - (folder / name).stat().st_mtime
        watch = _watch(folder, name)
    except OSError:
        return None
    if idle_s < FRESH_S:
        return Master(folder, name, watch)
    if check:
        words = ssh.argv(host, "true", "-S", f"./{name}", "-o", "BatchMode=yes")
        with suppress(subprocess.SubprocessError):
            _quietly(words, folder, _ANSWER_S)
            return Master(folder, name, watch)
        _end(folder, name)
    watch.close()
    return None


def _started(ssh: OpenSSH, host: str, folder: Path, name: str, *, stays: bool) -> Master | None:
    """Start an ssh, which serves its socket once it is connected; ``stays``: in the background then."""
    lasting = ("-f", "-o", f"ControlPersist={IDLE_S}") if stays else ("-o", "ControlPersist=no")
    words = ssh.argv(host, (), "-N", "-M", "-S", f"./{name}", "-o", "BatchMode=yes", *lasting)
    nothing = subprocess.DEVNULL
    deadline, pause_s = time.monotonic() + _START_S, 0.002
    # A file: what ssh leaves in the background, such as a ProxyCommand, may keep its stderr open.
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            words,
            cwd=folder,
            stdin=nothing,
            stdout=nothing,
            stderr=stderr,
            process_group=ending_with_us(),
        )
        while process.poll() in {None, 0} and time.monotonic() < deadline:
            with suppress(OSError):
                return Master(folder, name, _watch(folder, name), None if stays else process)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        process.kill()
        process.wait()
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")
    if _NO_SOCKET.search(said):
        return None
    if stays and "kex_exchange_identification" in said:
        # Of a connection that stays, ssh drops what the ProxyCommand says.
        said = _said_once_more(ssh, host) or said
    raise refusal(host, ssh.config, said, ssh.user)


def _said_once_more(ssh: OpenSSH, host: str) -> str:
    """Connect again; return what ssh and its ProxyCommand say if that fails, too."""
    words = ssh.argv(host, "true", "-S", "none", "-o", "BatchMode=yes")
    with suppress(subprocess.SubprocessError, OSError):
        return run(words, timeout_s=_START_S).stderr
    return ""


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
    with suppress(OSError, subprocess.SubprocessError):
        _quietly(["ssh", "-F", "/dev/null", "-O", "exit", "-S", f"./{name}", "host"], folder, _EXIT_S)
    (folder / name).unlink(missing_ok=True)


def _quietly(words: list[str], folder: Path, timeout_s: float) -> None:
    nothing = subprocess.DEVNULL
    subprocess.run(
        words,
        cwd=folder,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        timeout=timeout_s,
        check=True,
        start_new_session=True,
    )


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the folder; yields False if another process takes long with it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline, held = time.monotonic() + _LOCK_S, False
    try:
        while not held and time.monotonic() < deadline:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                time.sleep(0.02)
        yield held
    finally:
        os.close(opened)
