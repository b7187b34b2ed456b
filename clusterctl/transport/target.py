"""A host of an `ssh_config`: its address, the host key it must have, and the socket to it."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from clusterctl.errors import HostKeyError, TransportError

# paramiko looks for `invoke`, which would take 0.1 s of each verb, for one directive of an ssh_config,
# `Match exec`, that ours never has, and does without where there is none.
_HIDDEN = "invoke" not in sys.modules
if _HIDDEN:
    sys.modules["invoke"] = None  # type: ignore[assignment]
import paramiko as paramiko  # noqa: E402, PLC0414 - handed on

if _HIDDEN:
    del sys.modules["invoke"]

_STDERR_TAIL = 2000
_SETTLE_S = 1.0  # for a ProxyCommand that ends by itself once its input is closed


@lru_cache(maxsize=4)
def _config(file: str, *_version: int) -> paramiko.SSHConfig:
    return paramiko.SSHConfig.from_path(file)


@lru_cache(maxsize=4)
def _known(file: str, *_version: int) -> paramiko.HostKeys:
    return paramiko.HostKeys(file)


def _version(file: Path) -> tuple[str, int, int, int]:
    """Arguments for what is parsed once for all hosts that are connected to at the same time."""
    status = file.stat()
    return str(file), status.st_ino, status.st_mtime_ns, status.st_size


@dataclass(frozen=True, slots=True)
class Target:
    """What the `ssh_config` says about one host."""

    address: str
    port: int
    alias: str
    user: str
    key: str
    known_hosts: Path
    proxy_command: str | None = None  # instead of a TCP connection
    connect_timeout_s: float | None = None

    @classmethod
    def read(cls, config: Path, host: str, user: str | None) -> Target:
        """Raises TransportError if the file can't be read or leaves out what we need."""
        try:
            options: dict[str, Any] = dict(_config(*_version(config)).lookup(host))
            return cls(
                address=options["hostname"],
                port=int(options.get("port", "22")),
                alias=options.get("hostkeyalias", host),
                user=user or options["user"],
                key=options["identityfile"][0],
                known_hosts=Path(options["userknownhostsfile"]),
                proxy_command=options.get("proxycommand"),
                connect_timeout_s=float(timeout) if (timeout := options.get("connecttimeout")) else None,
            )
        except (OSError, ValueError, KeyError, paramiko.ConfigParseError) as exc:
            raise TransportError(
                f"the SSH configuration does not say how to reach {host}",
                code="ssh-config-incomplete",
                where=str(config),
                why=f"it has no {exc}" if isinstance(exc, KeyError) else str(exc),
                fix="run `clusterctl up`, which writes it",
                host=host,
            ) from exc

    def host_keys(self) -> dict[str, paramiko.PKey]:
        """Key type -> the key that the host must have; raises OSError if `known_hosts` can't be read."""
        found = _known(*_version(self.known_hosts)).lookup(self.alias)
        return dict(found or {})


class Reject(paramiko.MissingHostKeyPolicy):
    """A host whose key we don't know is refused, whatever the user's own known_hosts says."""

    def __init__(self, known_hosts: Path) -> None:
        self._known_hosts = known_hosts

    def missing_host_key(self, _client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        what = f"{hostname} has no known host key"
        why = f"it offered {key.get_name()} {key.fingerprint}"
        fix = "run `clusterctl up`, which writes its hosts' keys; none is trusted on first use"
        raise HostKeyError(what, where=str(self._known_hosts), why=why, fix=fix, host=hostname)


def wrong_key(host: str, known_hosts: Path, exc: paramiko.BadHostKeyException) -> HostKeyError:
    """The error for a host that offered another key than the known one."""
    what = f"{host} is not the host it should be"
    why = f"it offered {exc.key.get_name()} {exc.key.fingerprint}, expected {exc.expected_key.fingerprint}"
    fix = "if the host was made anew on purpose, run `clusterctl up`; otherwise somebody is in between"
    return HostKeyError(what, where=str(known_hosts), why=why, fix=fix, host=host)


class ProxySocket:
    """A ProxyCommand as a socket for paramiko. The program ends with it, and also when we are killed.

    paramiko's own never reads the program's stderr, which may stall it, and leaves a zombie. This one has
    real sockets underneath, so that all timeouts hold. They are two pairs: programs that make their input
    non-blocking must not do it to their output.
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
        self.said = ""  # the end of its stderr, once it is closed

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
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_SETTLE_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                size = os.fstat(self._stderr.fileno()).st_size
                raw = os.pread(self._stderr.fileno(), _STDERR_TAIL, max(0, size - _STDERR_TAIL))
                self.said = raw.decode(errors="replace").strip()
                self._close_ours()

    def _close_ours(self) -> None:
        for each in (self._to, self._from, self._stderr):
            each.close()
