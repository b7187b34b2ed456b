"""SSH connections that commands share (OpenSSH's ControlMaster), each held by an ssh process.

The control sockets are in a private folder beside the `ssh_config`.
"""

from __future__ import annotations

import copy
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import TransportError
from clusterctl.state.workspace import Workspace
from clusterctl.transport import openssh
from clusterctl.transport.login import connect_options, login_of
from clusterctl.transport.openssh import NO_CONNECTION, OpenSSH
from clusterctl.transport.refusals import (
    connection_error,
    login_refused_error,
    may_need_answers,
    proxy_of,
)
from clusterctl.util.process import SHORT, temporary_folder

IDLE_S = 300
# The `ssh_config` has the same time for connections to jump hosts. While a host behind the jump
# host is connected, the connection is not idle.
JUMP_IDLE_S = 10
# A connection used more recently than this is used without a check: the next command notices if it
# is dead.
FRESH_S = 60.0
_ANSWER_S = 10.0
# The same for the login of an attached cluster. A new connection there may need an answer of the
# user, and a session may take a minute to open.
LOGIN_IDLE_S = 8 * 3600
_LOGIN_LIMITS_S = (60.0, 180.0)
# ssh has limits of its own, such as ConnectTimeout in the `ssh_config`.
_START_S = 75.0
_EXIT_S = 10.0
# Time to connect to the socket of a new connection. A connection without a watcher ends after this
# time.
_WATCHED_WITHIN_S = 3
_STDIN = 0
# In the foreground ssh shows its messages itself, among them the site's instructions.
_ASKING = ("-T", "-o", "BatchMode=no", "-o", "LogLevel=INFO", "-o", "ClearAllForwardings=yes")
# A server refuses a login with words of the site, such as those of /etc/nologin, which ssh prints
# at INFO.
_TALKATIVE = ("-o", "LogLevel=INFO")
# ssh's name for the host if a ProxyCommand carries the connection.
_BY_PROXY = "UNKNOWN port"
# ssh's own words if no server answers, in a line of their own.
_TIMED_OUT = re.compile(
    r"^(ssh: connect to host .+: )?Connection( to \S+ port \d+)? timed out", re.MULTILINE
)
_NO_SOCKET = re.compile("unix_listener|mux listener|ControlSocket")


@dataclass(frozen=True, slots=True)
class Master:
    """An SSH connection that commands share, held by an ssh process. folder, name: of its control
    socket.

    watch: a connection to the control socket. An idle ssh does not exit while ``watch`` is open.
    stays: whether ``close`` leaves the SSH connection open for the next clusterctl command.
    """

    folder: Path
    name: str
    watch: socket.socket
    stays: bool

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Wait up to ``within_s`` seconds for the end of the connection. Return whether it has
        ended.
        """
        if self.watch.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.watch, 0)
        return bool(poll.poll(within_s * 1000))

    def close(self) -> None:
        """End the connection, unless ``stays`` is set. May be called twice."""
        self.watch.close()
        if not self.stays:
            _end_connection(self.folder, self.name)
            return
        with suppress(OSError):
            os.utime(self.folder / self.name)


def open_master(
    config: Path,
    host: str,
    user: str | None,
    *,
    stays: bool,
    start: bool = True,
    socket_name: str = "",
    asks: bool = False,
) -> Master | None:
    """Return a shared connection to a host. Return None if each command must connect separately.

    stays: whether to share the connection with later clusterctl commands, until the `ssh_config`
        file is replaced. Otherwise the connection ends with this process, even if the process is
        killed. The connection to an attached cluster always stays.
    start: whether to open a connection if no connection is open.
    socket_name: use this socket, which the `ssh_config` names too. Needs ``stays``.
    asks: whether ssh may ask the user of an attached cluster, on this terminal, for a password and
        the like.

    Raises:
        HostKeyError, KeyRefusedError: the host has another key, or refuses the cluster's key.
        UnreachableError, TransportError: the host can't be reached, or ssh rejects the
            `ssh_config`.
    """
    folder = _private_folder(config)
    if folder is None or not config.exists():
        return None
    is_login = login_of(config) is not None
    stays = stays or is_login
    name = secrets.token_hex(8)
    if stays:
        name = socket_name or openssh.socket_name(config, host, user)
        with suppress(OSError):
            if time.time() - (folder / name).stat().st_mtime < FRESH_S:
                return Master(folder, name, _connect(folder, name), stays)
    settings = _settings(config, host) if is_login else {}
    if (
        is_login
        and not (folder / name).exists()
        and (master := _users_master(settings)) is not None
    ):
        return master
    if not start:
        return None
    idle_s = _idle_s(is_login=is_login, is_jump=bool(socket_name), stays=stays)
    options = ["-S", f"./{name}", "-o", "ControlMaster=auto"]
    options += ["-o", f"ControlPersist={idle_s}", *(() if stays else ("-f", "-N"))]
    options += connect_options(settings)
    command = "true" if stays else ""
    ssh = OpenSSH(config, user)
    if (error := _start(ssh, host, command, options, folder / name)) is not None:
        if not (asks and may_need_answers(error)):
            raise connection_error(host, config, error, user)
        _log_in(config, ssh.argv(host, command, *_ASKING, *options), folder)
    try:
        return Master(folder, name, _connect(folder, name), stays)
    except OSError:
        return None


def _idle_s(*, is_login: bool, is_jump: bool, stays: bool) -> int:
    """Return after how many seconds without a command a connection ends."""
    if is_login:
        return LOGIN_IDLE_S
    return JUMP_IDLE_S if is_jump else IDLE_S if stays else _WATCHED_WITHIN_S


def _start(ssh: OpenSSH, host: str, command: str, options: list[str], path: Path) -> str | None:
    """Open a connection with its socket at ``path``, unless it is open. Return ssh's messages if it
    fails.
    """
    # ssh opens a connection if no ssh holds it, or if a killed ssh has left its socket. A
    # connection that was idle for long may be dead without its ssh knowing, as after a laptop's
    # sleep, so the first try is short.
    answer_s, start_s = (_ANSWER_S, _START_S) if login_of(ssh.config) is None else _LOGIN_LIMITS_S
    for limit_s in (answer_s, start_s) if path.exists() else (start_s,):
        rc, stderr = _run_ssh(
            ssh.background(host, command, *_TALKATIVE, *options), path.parent, limit_s
        )
        if rc is not None:
            break
        _end_connection(path.parent, path.name)
    if rc not in {None, NO_CONNECTION} or _NO_SOCKET.search(stderr):
        return None
    if not stderr or _BY_PROXY in stderr:
        # A persistent ssh discards its ProxyCommand's messages, so repeat the attempt with a plain
        # ssh.
        # No other attempt is repeated: a server that refuses logins may shut out who asks often.
        words = ssh.background(host, "true", "-S", "none", *_TALKATIVE)
        _, stderr = _run_ssh(words, path.parent, start_s)
    return stderr


def may_ask() -> bool:
    """Return whether ssh may ask the user: this is the main thread of a command that has the
    terminal.
    """
    try:
        has_terminal = os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:
        return False
    return has_terminal and threading.current_thread() is threading.main_thread()


def _settings(config: Path, host: str) -> dict[str, str]:
    """Return ssh's settings for the login of an attached cluster, by their names in small letters."""
    command = OpenSSH(config).background(host, "", "-G")
    settings = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False
    ).stdout
    return dict(line.partition(" ")[::2] for line in settings.splitlines())


def _users_master(settings: Mapping[str, str]) -> Master | None:
    """Return the connection that the user's own ssh has opened to the login, if it is open."""
    path = Path(settings.get("controlpath", "none"))
    try:
        return Master(path.parent, path.name, _connect(path.parent, path.name), stays=True)
    except OSError:
        return None


def _log_in(config: Path, words: list[str], folder: Path) -> None:
    """Run ssh on this terminal, where it may ask the user. Raises KeyRefusedError,
    KeyboardInterrupt.

    ssh gets a process group of its own, and the terminal for as long as it runs. The ssh that
    connects to a jump host stays in this group, so a later Ctrl-C does not end the connection.
    """
    # ssh must have the terminal before it asks.
    words = ["sh", "-c", 'read -r _ && exec "$@" </dev/null', "sh", *words]
    pipe = subprocess.PIPE
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        words, cwd=folder, stdin=pipe, stdout=nothing, process_group=0, bufsize=0
    )
    assert process.stdin is not None  # noqa: S101
    # Taking the terminal back from a group in the background would stop this program.
    previous = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    status = None
    try:
        os.tcsetpgrp(_STDIN, process.pid)
        process.stdin.write(b"\n")
        _, status = os.waitpid(process.pid, os.WUNTRACED)
    finally:
        os.tcsetpgrp(_STDIN, os.getpgrp())
        signal.signal(signal.SIGTTOU, previous)
        process.stdin.close()
        if status is None or os.WIFSTOPPED(status):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        else:
            process.returncode = os.waitstatus_to_exitcode(status)
    # The user has ended ssh with Ctrl-C, or stopped it with Ctrl-Z.
    if status is None or not os.WIFEXITED(status):
        raise KeyboardInterrupt
    if process.returncode == NO_CONNECTION:
        raise login_refused_error(config)


def end_all_connections(config: Path) -> None:
    """End the shared connections to all hosts of this `ssh_config`, including connections in
    use.
    """
    folder = Workspace(config.parent).connections
    with suppress(OSError):
        for socket_file in list(folder.iterdir()):
            _end_connection(folder, socket_file.name)


def _run_ssh(words: list[str], folder: Path, limit_s: float) -> tuple[int | None, str]:
    """Run ssh. Return (exit status, stderr), with status None if ssh ran longer than ``limit_s``.

    If no server answers, the last line of stderr tells how long ssh has waited.
    """
    # A file instead of a pipe, because the ssh that stays in the background may keep its stderr
    # open.
    with tempfile.TemporaryFile() as stderr:
        nothing = subprocess.DEVNULL
        started = time.monotonic()
        # The ProxyCommand of a shared connection stays in this group, so the group must outlive
        # clusterctl.
        process = subprocess.Popen(
            words, cwd=folder, stdin=nothing, stdout=nothing, stderr=stderr, process_group=0
        )
        try:
            rc = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None, f"no answer within {limit_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        waited_s = time.monotonic() - started
        stderr.seek(0)
        text = stderr.read().decode(errors="replace")
    if _TIMED_OUT.search(text):
        text = f"{text.rstrip()}\nno answer within {waited_s:.0f} s"
    return rc, text


def _private_folder(config: Path) -> Path | None:
    """Return the folder for sockets, created if missing; None if other users could enter the
    folder.
    """
    folder = Workspace(config.parent.absolute()).connections
    try:
        # Root must not create a folder in a user's workspace.
        if config.parent.stat().st_uid == os.geteuid():
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return folder if is_private and status.st_uid == os.geteuid() else None


def _connect(folder: Path, name: str) -> socket.socket:
    """Connect to the socket of a shared connection; raise OSError if no ssh process serves it."""
    watch = socket.socket(socket.AF_UNIX)
    try:
        # The real path may be too long for a socket's address.
        with temporary_folder(SHORT) as short:
            (short / "to").symlink_to(folder)
            watch.connect(str(short / "to" / name))
    except BaseException:
        watch.close()
        raise
    return watch


def _end_connection(folder: Path, name: str) -> None:
    _run_ssh(["ssh", "-F", "/dev/null", "-O", "exit", "-S", f"./{name}", "host"], folder, _EXIT_S)
    (folder / name).unlink(missing_ok=True)


class Jumps:
    """The connections to the jump hosts of an `ssh_config`, which all hosts behind a jump host
    share.
    """

    def __init__(self) -> None:
        self._masters: dict[str, Master | None] = {}
        self._failed: dict[str, tuple[float, TransportError]] = {}
        self._lock = threading.Lock()

    def open(self, host: str, config: Path) -> None:
        """Open the connection to the jump host of ``host``, if it is behind a jump host and not
        connected.

        Raise the jump host's error, as an error of ``host``, if it can't be reached. Threads that
        wait for the same connection get the same error, so a broken tunnel is tried once, not once
        for each host.
        """
        asked = time.monotonic()
        jump = proxy_of(host, config).jump
        if jump is None:
            return
        jump_host, name = jump
        with self._lock:
            master = self._masters.get(name)
            if master is not None and not master.has_ended():
                return
            failed_at, error = self._failed.get(name, (0.0, None))
            if error is None or failed_at < asked:
                try:
                    self._masters[name] = open_master(
                        config, jump_host, None, stays=True, socket_name=name
                    )
                    return
                except TransportError as exc:
                    error = exc
                    self._failed[name] = (time.monotonic(), exc)
        raise _behind(host, jump_host, error)

    def close(self) -> None:
        with self._lock:
            for master in filter(None, self._masters.values()):
                master.close()
            self._masters.clear()


def _behind(host: str, jump_host: str, error: TransportError) -> TransportError:
    """Return the error of a jump host as the error of a host behind it."""
    copied = copy.copy(error)
    copied.what = f"{host}: its SSH connection goes through {jump_host}, which can't be reached"
    copied.host = host
    return copied
