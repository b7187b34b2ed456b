"""sudo on machines of the user: without a password, or with the user's, asked once for each process.

The password stays in memory. It reaches sudo on the standard input of the command, and Ansible in
the same way. It is proven on one host before any other host gets it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clusterctl.errors import TransportError
from clusterctl.util.assets import ErrorRule, first_rule, read_table
from clusterctl.util.process import Result

# The words before a command that runs as another user, such as root.
AS_ROOT: Final = ("sudo", "-n")
# Rules match sudo's messages, so they must be English. Cached credentials (-k) would change the
# messages. The command shows that sudo allows any, as Ansible needs.
_TRY: Final = ("env", "LC_ALL=C", "sudo", "-k")
_ANYTHING: Final = ("sh", "-c", ":")
_ASKING: Final = ("-S", "-p", "")
_RULES: Final = Path(__file__).with_name("data") / "sudo.yaml"
# Runs a command after the line of its stdin that is the mark. The rules of a host may ask for no
# password where another user is meant: sudo then leaves the password on stdin.
_AFTER_MARK: Final = (
    "sh",
    "-c",
    'while IFS= read -r line && [ "$line" != "$0" ]; do :; done; exec "$@"',
)
_TRIES: Final = 2
_REFUSES_COMMAND: Final = "is not allowed to execute"
NO_ROOT: Final = "you can't become root"
# With `requiretty`, sudo refuses a session without a terminal. This program gives the session of its
# arguments a terminal, and leaves their stdin, stdout and stderr as they are.
_TERMINAL: Final = """\
import fcntl, os, pty, sys, termios
main, end = pty.openpty()
pid = os.fork()
if pid == 0:
    os.setsid()
    fcntl.ioctl(end, termios.TIOCSCTTY, 0)
    os.execvp(sys.argv[1], sys.argv[1:])
os.close(end)
sys.exit(os.waitpid(pid, 0)[1] >> 8)
"""
_ON_TERMINAL: Final = ("/usr/bin/python3", "-I", "-S", "-c", _TERMINAL)


class SudoError(TransportError):
    """The user can't become root on a host."""


def asked_of_program() -> str | None:
    """Return the output of the program SUDO_ASKPASS, called as sudo calls it. None: it is not set."""
    if program := os.environ.get("SUDO_ASKPASS"):
        with suppress(OSError):
            words = (program, "sudo password: ")
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            return done.stdout.partition("\n")[0] or None
    return None


@dataclass(frozen=True, slots=True)
class SudoMethod:
    """How the user runs sudo on a host. words: the command line. password: None if sudo asks for no
    password.
    """

    words: Sequence[str] = ("sudo",)
    password: str | None = None

    def command(self, argv: Sequence[str]) -> tuple[Sequence[str], bytes]:
        """Return (the command of ``argv``, which begins with AS_ROOT, the first bytes for its
        stdin).
        """
        rest = argv[len(AS_ROOT) :]
        if self.password is None:
            return (*self.words, "-n", *rest), b""
        target = rest[:3] if tuple(rest[:2]) == ("-H", "-u") else ()  # see as_user
        mark = secrets.token_hex(8)
        command = (*self.words, "-k", *_ASKING, *target, *_AFTER_MARK, mark, *rest[len(target) :])
        return command, f"{self.password}\n{mark}\n".encode()


# Runs a command (argv, stdin) on a host.
Run = Callable[[Sequence[str], bytes], Result]


@dataclass(slots=True, eq=False)
class Passwords:
    """The user's password for sudo, which all hosts share.

    ask: asks the user. Returns None if the user can't be asked.
    """

    ask: Callable[[], str | None] = asked_of_program
    _password: str | None = field(default=None, init=False, repr=False)
    _is_proven: bool = field(default=False, init=False)
    _is_refused: bool = field(default=False, init=False)
    _hosts: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def way_to(self, host: str, run: Run) -> SudoMethod:
        """Find out how the user runs sudo on a host. Raise SudoError if that is not possible."""
        words: Sequence[str] = ()
        error = _refusal(run((*_TRY, "-n", *_ANYTHING), b""), host)
        if error is not None and error.about == "terminal":
            words = _ON_TERMINAL
            error = _refusal(run((*words, *_TRY, "-n", *_ANYTHING), b""), host)
        if error is None:
            return SudoMethod((*words, "sudo"))
        if error.about != "password":
            raise error
        password = self._prove((*words, *_TRY, *_ASKING, *_ANYTHING), host, run, error)
        self._hosts[host] = password
        return SudoMethod((*words, "sudo"), password)

    def of(self, hosts: Collection[str]) -> Mapping[str, str]:
        """Return host -> password, for those of the hosts that have accepted it."""
        return {host: text for host, text in self._hosts.items() if host in hosts}

    def _prove(self, argv: Sequence[str], host: str, run: Run, needed: SudoError) -> str:
        """Return the password, which the host accepts. Other hosts wait until the first host
        accepts it.
        """
        with self._lock:
            if not self._is_proven:
                return self._first_proof(argv, host, run, needed)
            password = self._password or ""
        if error := _refusal(run(argv, f"{password}\n".encode()), host):
            raise error
        return password

    def _first_proof(self, argv: Sequence[str], host: str, run: Run, needed: SudoError) -> str:
        for left in reversed(range(_TRIES)):
            password = None if self._is_refused else self._password or self.ask()
            if password is None:
                self._is_refused = True
                raise needed
            error = _refusal(run(argv, f"{password}\n".encode()), host)
            if error is None:
                self._password = password
                self._is_proven = True
                return password
            if error.about != "wrong-password":
                # sudo judges a command after it has accepted the password.
                if _REFUSES_COMMAND in error.why:
                    self._password = password
                    self._is_proven = True
                raise error
            self._password = None
            self._is_refused = not left
            if not left:
                raise error
        raise needed


# The password of this process's user.
PASSWORDS: Final = Passwords()


def _refusal(result: Result, host: str) -> SudoError | None:
    """Return why sudo did not run the command; None if it did."""
    if result.rc == 0:
        return None
    said = result.stderr.strip()
    problem = f"{host}: {NO_ROOT}"
    if (match := first_rule(read_table(_RULES, tuple[ErrorRule, ...]), said)) is None:
        return SudoError(problem, code="sudo", about="refused", why=said, host=host)
    rule, groups = match
    failure = rule.failure({"said": said.split("\n")[-1], **groups}, host=host, phase="access")
    return SudoError(
        problem,
        code=failure.code,
        about=failure.about,
        why=failure.cause,
        fix=failure.fix,
        host=host,
        failures=(failure,),
    )
