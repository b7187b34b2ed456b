"""The owner's SSH access to on-prem machines: plain ssh with their keys and agent, and sudo.

It is used until the admin account exists. Commands run without a terminal; a password for sudo goes to its
standard input, and nowhere else.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import shlex
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from pydantic import TypeAdapter

from clusterctl.errors import (
    ClusterctlError,
    CommandError,
    Failure,
    MachineError,
    ProvisionError,
    UnreachableError,
)
from clusterctl.providers.pending import host_port
from clusterctl.providers.prompts import failed_hosts
from clusterctl.spec.base import Model
from clusterctl.spec.onprem import OnpremHost
from clusterctl.state.journal import digest
from clusterctl.transport.base import shown
from clusterctl.util.parallel import parallel_map
from clusterctl.util.process import under_subreaper

CONNECT_S: Final = 15  # each of the jumps takes its time
_JUMP: Final = re.compile(r"(?:(?P<user>[^@]+)@)?(?P<host>[^:]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True, slots=True)
class Hop:
    """A machine that others are reached through; ``before`` is the one that itself is reached through."""

    user: str | None
    host: str
    port: int
    key: str | None
    before: Hop | None = None

    @property
    def alias(self) -> str:
        """What the ssh_config calls it; the same as long as the way there is."""
        return f"jump-{digest(repr(self))[:8]}"

    @property
    def title(self) -> str:
        """What people call it, and known_hosts, too."""
        return host_port(self.host, self.port)

    @property
    def way(self) -> Iterator[Hop]:
        """The hops up to this one, the first one first."""
        if self.before is not None:
            yield from self.before.way
        yield self


def last_hop(machine: OnpremHost) -> Hop | None:
    """The machine that leads to this one; None where it is reached directly."""
    hop: Hop | None = None
    for text in machine.jump or ():
        match = _JUMP.fullmatch(text)
        assert match is not None  # noqa: S101 - the spec's pattern
        hop = Hop(match["user"], match["host"], int(match["port"] or 22), machine.key, hop)
    return hop


def hops(machines: Iterable[OnpremHost]) -> tuple[Hop, ...]:
    """Every machine on the way to these, each once, the nearest ones first."""
    ways = (hop.way for machine in machines if (hop := last_hop(machine)) is not None)
    found = dict.fromkeys(hop for way in ways for hop in way)
    return tuple(sorted(found, key=lambda hop: len(tuple(hop.way))))


def access_config(machines: Mapping[str, OnpremHost], trusted_hosts: Path) -> str:
    """How the user's own account reaches every machine, and those on the way."""
    blocks = [_block(hop.alias, hop.title, hop) for hop in hops(machines.values())]
    for name, one in machines.items():
        machine = Hop(one.user, one.address or name, one.port or 22, one.key, last_hop(one))
        blocks.append(_block(name, name, machine))
    common = (
        "Host *\n"
        "    BatchMode yes\n"
        f'    UserKnownHostsFile "{trusted_hosts}"\n'
        "    GlobalKnownHostsFile /dev/null\n"
        "    StrictHostKeyChecking yes\n"
        "    UpdateHostKeys no\n"
        "    ForwardAgent no\n"
        f"    ConnectTimeout {CONNECT_S}\n"
        "    ServerAliveInterval 15\n"
        "    ServerAliveCountMax 4\n"
        "    LogLevel ERROR\n"
    )
    head = "# Written by clusterctl: the way to these machines of those whose they are\n"
    return head + "\n".join([*blocks, common])


def _block(alias: str, title: str, machine: Hop) -> str:
    lines = [f"HostName {machine.host.strip('[]')}", f"Port {machine.port}", f"HostKeyAlias {title}"]
    lines += [f"User {machine.user}"] if machine.user else []
    if machine.key:
        lines += [f'IdentityFile "{machine.key.replace("%", "%%")}"', "IdentitiesOnly yes"]
    lines += [f"ProxyJump {machine.before.alias}"] if machine.before else []
    return f"Host {alias}\n" + "".join(f"    {line}\n" for line in lines)


_RULES: Final = Path(__file__).with_name("data") / "refusals.toml"
NO_LOGIN: Final = "login failed"
_OFFERED: Final = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


class Rule(Model):
    """One entry of refusals.toml."""

    code: str
    match: str
    cause: str
    fix: str
    retryable: bool = False


class AccessError(ProvisionError):
    """A machine does not let its owner in, or not to root."""

    def __init__(self, host: str, failure: Failure) -> None:
        super().__init__(NO_LOGIN, why=failure.cause, fix=failure.fix, host=host, failures=(failure,))
        self.refusal = failure.code


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, in their order."""
    return TypeAdapter(tuple[Rule, ...]).validate_python(tomllib.loads(_RULES.read_text())["rule"])


def explain(stderr: str, *, host: str, user: str, address: str) -> AccessError | None:
    """What ssh or sudo means by that; None where no rule knows it."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    offered = _OFFERED.search(stderr)
    words: Mapping[str, str] = {
        "host": host,
        "user": user,
        "address": address,
        "said": lines[-1].strip() if lines else "",
        "offered": offered[0] if offered else "another",
    }
    for rule in rules():
        if re.search(rule.match, stderr):
            cause, fix = rule.cause.format(**words), rule.fix.format(**words)
            return AccessError(host, Failure(rule.code, cause, host, "access", fix, rule.retryable))
    return None


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
            known = explain(stderr, host=host, user=self.user(host), address=self._place(host))
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
        return host_port(machine.address or host, machine.port or 22)

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


def on_each(hosts: Sequence[str], ask: Callable[[str], T]) -> tuple[dict[str, T], dict[str, ClusterctlError]]:
    """What every host answered, and how some failed; all are asked at once, and none stops the others."""

    def answer(host: str) -> T | ClusterctlError:
        try:
            return ask(host)
        except ClusterctlError as exc:
            return exc

    answers = dict(zip(hosts, parallel_map(hosts, answer), strict=True))
    failed = {host: one for host, one in answers.items() if isinstance(one, ClusterctlError)}
    return {host: one for host, one in answers.items() if not isinstance(one, ClusterctlError)}, failed


def raise_failures(failed: Mapping[str, ClusterctlError], *, what: str, then: str) -> None:
    """Raise what went wrong on some hosts as one error, with one failure each.

    Raises:
        ProvisionError: something did; ``then`` says how to go on.
    """
    if failed:
        raise failed_hosts(
            [failure for host, exc in failed.items() for failure in _failures_of(host, exc)],
            what=what,
            then=then,
        )


def _failures_of(host: str, exc: ClusterctlError) -> list[Failure]:
    return [
        Failure(f.code, f.cause, f.host or host, f.phase or "access", f.fix, f.retryable)
        for f in exc.failures
    ]
