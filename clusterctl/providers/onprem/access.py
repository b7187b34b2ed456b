"""The user's own way to their machines: plain ssh with their keys and agent, and sudo.

It is used until our own account is there. Commands run without a terminal; a password for sudo goes to its
standard input, and nowhere else.
"""

from __future__ import annotations

import errno
import getpass
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from clusterctl.errors import (
    ClusterctlError,
    CommandError,
    Failure,
    MachineError,
    ProvisionError,
    UnreachableError,
)
from clusterctl.providers.onprem.refusals import AccessError, explained
from clusterctl.providers.onprem.ssh_files import place
from clusterctl.spec.onprem import OnpremHost
from clusterctl.transport.base import shown
from clusterctl.util.lifetime import under_subreaper
from clusterctl.util.parallel import parallel_map

ANSWER_S: Final = 120.0
_SSH_FAILED: Final = 255
# Their messages are read: they must be English. Credentials that sudo remembers would change what it reads.
_SUDO: Final = ("env", "LC_ALL=C", "sudo", "-k")

T = TypeVar("T")


class Access:
    """The machines of a spec as their owner reaches them, by the ``access_config`` that was written."""

    def __init__(self, machines: Mapping[str, OnpremHost], config: Path, *, password: str | None) -> None:
        self._machines = machines
        self._config = config
        self._password = password
        self._asks: dict[str, bool] = {}  # whether sudo wants the password, once that is known
        self._lock = threading.Lock()

    def run(self, host: str, argv: Sequence[str], stdin: bytes = b"", *, timeout_s: float = ANSWER_S) -> str:
        """Run a command as the user; its standard output.

        Raises:
            AccessError: ssh, or sudo in the command, refused.
            CommandError: the command failed.
            UnreachableError: no answer in time.
        """
        words = [*self._way_to(host), shlex.join(argv)]
        try:
            rc, stdout, said = _run(words, stdin, timeout_s)
        except subprocess.TimeoutExpired as exc:
            what = f"{host}: no answer from `{shown(argv)}` within {timeout_s:g} s"
            raise UnreachableError(what, host=host, fix="look at the host's load") from exc
        except OSError as exc:
            raise MachineError("missing tool: ssh", why=str(exc), fix="install OpenSSH's client") from exc
        if rc == 0:
            return stdout.decode(errors="replace")
        stderr = said.decode(errors="replace")
        if rc == _SSH_FAILED or "sudo" in argv:
            known = explained(stderr, host=host, user=self.user(host), address=self._place(host))
            if known is not None:
                raise known
        raise CommandError(
            f"`{shown(argv)}` failed with exit status {rc}",
            rc=rc,
            stderr=stderr,
            where=host,
            host=host,
        )

    def root(self, host: str, argv: Sequence[str], stdin: bytes = b"") -> str:
        """Run a command as root; its standard output. Errors as of ``run``."""
        if self._machines[host].become == "none":
            return self.run(host, argv, stdin)
        if self._wants_password(host):
            password = f"{self._password}\n".encode()
            return self.run(host, (*_SUDO, "-S", "-p", "", "--", *argv), password + stdin)
        return self.run(host, (*_SUDO, "-n", "--", *argv), stdin)

    def user(self, host: str) -> str:
        """Whom we log in as there."""
        return self._machines[host].user or getpass.getuser()

    def is_here(self, host: str) -> bool:
        """Whether that is the machine that clusterctl runs on."""
        return self._machines[host].is_here

    def _way_to(self, host: str) -> tuple[str, ...]:
        """What runs a command line there."""
        if self.is_here(host):
            return ("sh", "-c")
        return ("ssh", "-F", str(self._config), "-T", "--", host)

    def _place(self, host: str) -> str:
        machine = self._machines[host]
        return place(machine.address or host, machine.port or 22)

    def _wants_password(self, host: str) -> bool:
        """Whether sudo asks for one there. A wrong one is tried once, with nothing behind it."""
        with self._lock:
            if host in self._asks:
                return self._asks[host]
        asks = False
        try:
            self.run(host, (*_SUDO, "-n", "true"))
        except AccessError as exc:
            if exc.refusal != "sudo-password" or self._password is None:
                raise
            self.run(host, (*_SUDO, "-S", "-p", "", "true"), f"{self._password}\n".encode())
            asks = True
        with self._lock:
            self._asks[host] = asks
        return asks


def _run(words: Sequence[str], stdin: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
    """Run a program that ends with us: its exit status, and what it said.

    Raises:
        OSError: it is not there.
        TimeoutExpired: it took too long, and was ended.
    """
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), words[0])
    pipe = subprocess.PIPE
    with subprocess.Popen(under_subreaper(words), stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
        return process.returncode, stdout, stderr


def each(hosts: Sequence[str], ask: Callable[[str], T]) -> tuple[dict[str, T], dict[str, ClusterctlError]]:
    """What every host answered, and how some failed; all are asked at once, and none stops the others."""

    def answer(host: str) -> T | ClusterctlError:
        try:
            return ask(host)
        except ClusterctlError as exc:
            return exc

    answers = dict(zip(hosts, parallel_map(hosts, answer), strict=True))
    failed = {host: one for host, one in answers.items() if isinstance(one, ClusterctlError)}
    return {host: one for host, one in answers.items() if not isinstance(one, ClusterctlError)}, failed


def refuse(failed: Mapping[str, ClusterctlError], *, what: str, then: str) -> None:
    """Raise what went wrong on some hosts as one error, with one failure each.

    Raises:
        ProvisionError: something did; ``then`` says how to go on.
    """
    if failed:
        raise refused(
            [failure for host, exc in failed.items() for failure in _of(host, exc)], what=what, then=then
        )


def refused(failures: Sequence[Failure], *, what: str, then: str) -> ProvisionError:
    """One error of several hosts: what is wrong with each, and what to do about it."""
    hosts = ", ".join(dict.fromkeys(str(failure.host) for failure in failures))
    lines = [f"{failure.host}: {failure.cause}" for failure in failures]
    fixes = dict.fromkeys(failure.fix for failure in failures if failure.fix)
    return ProvisionError(
        f"{what}: {hosts}",
        why="\n".join(lines),
        fix="\n".join([*fixes, then]),
        failures=tuple(failures),
    )


def _of(host: str, exc: ClusterctlError) -> list[Failure]:
    return [
        Failure(f.code, f.cause, f.host or host, f.phase or "access", f.fix, f.retryable)
        for f in exc.failures
    ]
