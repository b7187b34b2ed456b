"""Connections that the ssh program keeps open, so that commands share them: OpenSSH's ControlMaster.

The socket of each connection lies in a private folder beside the `ssh_config`. Its ssh ends by itself after
``IDLE_S`` without a command, and soon after the connection broke.
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
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import HostKeyError, KeyRefusedError, TransportError
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import unreachable
from clusterctl.transport.openssh import ALONE, NO_CONNECTION, OpenSSH

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
        if "kex_exchange_identification" in said:
            # Of a connection that stays, ssh drops what the ProxyCommand says.
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
