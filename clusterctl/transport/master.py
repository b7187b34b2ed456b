"""SSH connections that commands share (OpenSSH's ControlMaster), each held by an ssh process.

ssh shares them by itself, as the `ssh_config` tells it. clusterctl opens a connection before the
first command, so that many commands at once share it, and replaces a connection that does not
answer.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import connect_options, login_of
from clusterctl.transport.openssh import NO_CONNECTION, OpenSSH, is_private, login_socket
from clusterctl.transport.refusals import (
    connection_error,
    entry_of,
    login_refused_error,
    may_need_answers,
)

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
# The socket of an ssh that is stopped takes connections until its queue is full.
_CONNECT_S = 1.0
# A connection outlives the command that opens it, and must not keep the user's folder in use.
_PLACE = "/"
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
    """An SSH connection that commands share, held by an ssh process. path: of its control socket.

    watch: a connection to the control socket. An idle ssh does not exit while ``watch`` is open.
    """

    path: Path
    watch: socket.socket

    @classmethod
    def at(cls, path: Path) -> Master | None:
        """Return the connection with this control socket; None if no ssh process serves it."""
        watch = socket.socket(socket.AF_UNIX)
        watch.settimeout(_CONNECT_S)
        try:
            watch.connect(str(path))
        except OSError:
            watch.close()
            return None
        return cls(path, watch)

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Wait up to ``within_s`` seconds for the end of the connection. Return whether it has
        ended.
        """
        if self.watch.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.watch, 0)
        return bool(poll.poll(within_s * 1000))

    def leave(self) -> None:
        """Leave the connection open for other commands, until it is idle for too long. May be
        called twice.
        """
        self.watch.close()
        with suppress(OSError):
            os.utime(self.path)


def open_master(
    config: Path,
    host: str,
    user: str | None,
    *,
    checks: bool = True,
    start: bool = True,
    asks: bool = False,
) -> Master | None:
    """Return a shared connection to a host. Return None if each command must connect separately.

    The `ssh_config` tells ssh to share the connections to hosts that clusterctl has configured.

    checks: whether to check that an open connection answers. Otherwise, and for the login of an
        attached cluster, it is checked only if it was not used in the last minute.
    start: whether to open a connection, or check the open one.
    asks: whether ssh may ask the user of an attached cluster, on this terminal, for a password and
        the like.

    Raises:
        HostKeyError, KeyRefusedError: the host has another key, or refuses the cluster's key.
        UnreachableError, TransportError: the host can't be reached, or ssh rejects the
            `ssh_config`.
    """
    is_login = login_of(config) is not None
    path = socket_of(config, host, user)
    if path is None or not config.exists():
        return None
    if (is_login or not checks) and (master := _recent(path)) is not None:
        return master
    settings = _settings(config, host) if is_login else {}
    if is_login and not path.exists() and (master := _users_master(settings)) is not None:
        return master
    if not start:
        return None
    ssh = OpenSSH(config, user)
    options = [*connect_options(settings)]
    if is_login:
        options += ["-S", str(path), "-o", "ControlMaster=auto"]
        options += ["-o", f"ControlPersist={LOGIN_IDLE_S}"]
    worker = None if is_login or not path.exists() else Workspace(config.parent).lock_holder()
    is_others = worker is not None and worker.pid != os.getpid()
    if (error := _start(ssh, host, options, path, may_end=not is_others)) is not None:
        if is_others:
            # Ansible may use it, on a host that is only slow to answer.
            return None
        if not (asks and may_need_answers(error)):
            raise connection_error(host, config, error, user)
        _log_in(config, ssh.argv(host, "true", *_ASKING, *options))
    return Master.at(path)


def _recent(path: Path) -> Master | None:
    """Return the connection with this socket, if it was used in the last minute."""
    with suppress(OSError):
        if time.time() - path.stat().st_mtime < FRESH_S:
            return Master.at(path)
    return None


def socket_of(config: Path, host: str, user: str | None) -> Path | None:
    """Return the control socket of the connection that commands share; None if no connection may be
    shared.
    """
    if login_of(config) is not None:
        return login_socket(config)
    entry = entry_of(host, config)
    path = entry.get("ControlPath", "").replace("%r", user or entry.get("User", ""))
    return Path(path) if path and is_private(Path(path).parent) else None


def _start(ssh: OpenSSH, host: str, options: list[str], path: Path, *, may_end: bool) -> str | None:
    """Open a connection with its socket at ``path``, unless it is open. Return ssh's messages if it
    fails.

    may_end: replace an open connection that does not answer.
    """
    # ssh opens a connection if no ssh holds it, or if a killed ssh has left its socket. A
    # connection that was idle for long may be dead without its ssh knowing, as after a laptop's
    # sleep, so the first try is short.
    answer_s, start_s = (_ANSWER_S, _START_S) if login_of(ssh.config) is None else _LOGIN_LIMITS_S
    words = ssh.background(host, "true", *_TALKATIVE, *options)
    for limit_s in (answer_s, start_s) if path.exists() else (start_s,):
        rc, stderr = _run_ssh(words, limit_s)
        if rc is not None or not may_end:
            break
        end_connection(path)
    if rc not in {None, NO_CONNECTION} or _NO_SOCKET.search(stderr):
        return None
    if not stderr or _BY_PROXY in stderr:
        # A persistent ssh discards its ProxyCommand's messages, so repeat the attempt with a plain
        # ssh.
        # Other failures are not retried, because a server may block users after many failed logins.
        words = ssh.background(host, "true", "-S", "none", *_TALKATIVE)
        _, stderr = _run_ssh(words, start_s)
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
    return Master.at(Path(settings.get("controlpath", "none")))


def _log_in(config: Path, words: list[str]) -> None:
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
        words, cwd=_PLACE, stdin=pipe, stdout=nothing, process_group=0, bufsize=0
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
        for path in list(folder.iterdir()):
            end_connection(path)
        folder.rmdir()


def end_connection(path: Path) -> None:
    """End the shared connection with this control socket, also if it is in use, or does not
    answer.
    """
    _run_ssh(["ssh", "-F", "/dev/null", "-O", "exit", "-S", str(path), "host"], _EXIT_S)
    path.unlink(missing_ok=True)


def _run_ssh(words: list[str], limit_s: float) -> tuple[int | None, str]:
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
            words, cwd=_PLACE, stdin=nothing, stdout=nothing, stderr=stderr, process_group=0
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
