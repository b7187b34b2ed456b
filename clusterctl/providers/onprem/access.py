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
import socket
import subprocess
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from clusterctl.errors import (
    ClusterctlError,
    CommandError,
    Failure,
    MachineError,
    ProvisionError,
    UnreachableError,
)
from clusterctl.providers.base import Confirm, OfferedKey
from clusterctl.providers.pending import host_port
from clusterctl.spec.base import Model
from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.journal import digest
from clusterctl.state.workspace import write_atomic
from clusterctl.transport.base import shown
from clusterctl.transport.target import ProxySocket, paramiko
from clusterctl.util.parallel import on_each
from clusterctl.util.process import under_subreaper

CONNECT_S: Final = 15  # each of the jumps takes its time
_JUMP: Final = re.compile(r"(?:(?P<user>[^@]+)@)?(?P<host>[^:]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True, slots=True)
class JumpHost:
    """A machine that others are reached through; ``before`` is the one that itself is reached through."""

    user: str | None
    host: str
    port: int
    key: str | None
    before: JumpHost | None = None

    @property
    def alias(self) -> str:
        """Its name in the ssh_config; the same as long as the path to it is."""
        return f"jump-{digest(repr(self))[:8]}"

    @property
    def title(self) -> str:
        """Its name in messages and in known_hosts."""
        return host_port(self.host, self.port)

    @property
    def path(self) -> Iterator[JumpHost]:
        """The hops up to this one, the first one first."""
        if self.before is not None:
            yield from self.before.path
        yield self


def jump_host_of(machine: OnpremHost) -> JumpHost | None:
    """The machine that leads to this one; None where it is reached directly."""
    jump: JumpHost | None = None
    for text in machine.jump or ():
        match = _JUMP.fullmatch(text)
        assert match is not None  # noqa: S101 - the spec's pattern
        jump = JumpHost(match["user"], match["host"], int(match["port"] or 22), machine.key, jump)
    return jump


def jump_hosts(machines: Iterable[OnpremHost]) -> tuple[JumpHost, ...]:
    """Every machine on the way to these, each once, the nearest ones first."""
    last = (jump_host_of(machine) for machine in machines)
    found = dict.fromkeys(jump for one in last if one is not None for jump in one.path)
    return tuple(sorted(found, key=lambda jump: len(tuple(jump.path))))


def access_config(machines: Mapping[str, OnpremHost], trusted_hosts: Path) -> str:
    """How the user's own account reaches every machine, and those on the way."""
    blocks = [_block(jump.alias, jump.title, jump) for jump in jump_hosts(machines.values())]
    for name, one in machines.items():
        machine = JumpHost(one.user, one.address or name, one.port or 22, one.key, jump_host_of(one))
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


def _block(alias: str, title: str, machine: JumpHost) -> str:
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

    def __init__(self, host: str, code: str, cause: str, fix: str, *, retryable: bool = False) -> None:
        failure = Failure(code, cause, host, "access", fix, retryable)
        super().__init__(NO_LOGIN, why=cause, fix=fix, host=host, failures=(failure,))
        self.refusal = code


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
            return AccessError(host, rule.code, cause, fix, retryable=rule.retryable)
    return None


ANSWER_S: Final = 120.0
_SSH_FAILED: Final = 255
# Their messages are read: they must be English. Credentials that sudo remembers would change what it reads.
_SUDO: Final = ("env", "LC_ALL=C", "sudo", "-k")


class Access:
    """The machines of a spec as their owner reaches them, by the ``access_config`` that was written."""

    def __init__(self, machines: Mapping[str, OnpremHost], config: Path, *, password: str | None) -> None:
        self._machines = machines
        self._config = config
        self._password = password
        self._asks: dict[str, bool] = {}  # whether sudo wants the password, once that is known

    def run(self, host: str, argv: Sequence[str], stdin: bytes = b"", *, timeout_s: float = ANSWER_S) -> str:
        """Run a command as the user; its standard output."""
        ssh = ("ssh", "-F", str(self._config), "-T", "--", host)
        words = [*(("sh", "-c") if self.is_here(host) else ssh), shlex.join(argv)]
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
            machine = self._machines[host]
            user, address = (
                machine.user or getpass.getuser(),
                host_port(machine.address or host, machine.port or 22),
            )
            if (known := explain(stderr, host=host, user=user, address=address)) is not None:
                raise known
        what = f"`{shown(argv)}` failed with exit status {rc}"
        raise CommandError(what, rc=rc, stderr=stderr, where=host, host=host)

    def root(self, host: str, argv: Sequence[str], stdin: bytes = b"") -> str:
        """Run a command as root; its standard output. Errors as of ``run``."""
        if self._machines[host].become == "none":
            return self.run(host, argv, stdin)
        if self._wants_password(host):
            password = f"{self._password}\n".encode()
            return self.run(host, (*_SUDO, "-S", "-p", "", "--", *argv), password + stdin)
        return self.run(host, (*_SUDO, "-n", "--", *argv), stdin)

    def is_here(self, host: str) -> bool:
        """Whether that is the machine that clusterctl runs on."""
        return self._machines[host].is_here

    def _wants_password(self, host: str) -> bool:
        """Whether sudo asks for one there. A wrong one is tried once, with nothing behind it."""
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
        self._asks[host] = asks
        return asks


def _run(words: Sequence[str], stdin: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
    """Run a program that ends with us: its exit status, and what it said."""
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


def raise_failures(failed: Mapping[str, ClusterctlError], *, what: str, then: str) -> None:
    """Raise what went wrong on some hosts as one error, with one failure each."""
    if failed:
        failures = [
            replace(failure, host=failure.host or host, phase=failure.phase or "access")
            for host, exc in failed.items()
            for failure in exc.failures
        ]
        raise ProvisionError.of_hosts(f"{what}: {{hosts}}", failures, then=then)


USERS_OWN: Final = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))
_KINDS: Final = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
)
_ANSWER_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Peer:
    """A machine whose key is needed, and how to get to it. ``title`` is also its HostKeyAlias."""

    title: str
    address: str
    port: int
    through: JumpHost | None
    host_key: str | None = None

    @property
    def path(self) -> tuple[JumpHost, ...]:
        """The machines on the way to it, the first one first."""
        return tuple(self.through.path) if self.through else ()


class HostKeys:
    """The trusted keys of a cluster's machines and of those on the way, kept in one file."""

    def __init__(self, file: Path, config: Path, *, accepted: Collection[str] = ()) -> None:
        """``config`` says how the machines on the way are reached; ``accepted`` are fingerprints."""
        self._file = file
        self._config = config
        self._accepted = frozenset(accepted)
        self._keys = _read(file)

    def key_of(self, host: str) -> str:
        """The trusted key of a machine of the spec."""
        return self._keys[host]

    def trust(self, machines: Mapping[str, OnpremHost], confirm: Confirm) -> Mapping[str, ClusterctlError]:
        """Have a key of every machine, and of those on the way; those that did not show one, and why.

        What ``confirm`` raises ends it: nothing that was shown is kept then.
        """
        nearest = [_Peer(h.title, h.host, h.port, h.before) for h in jump_hosts(machines.values())]
        asked = [
            _Peer(name, one.address or name, one.port or 22, jump_host_of(one), one.host_key)
            for name, one in machines.items()
        ]
        lost: dict[str, ClusterctlError] = {}
        distances = {peer: len(peer.path) for peer in (*nearest, *asked)}
        for distance in sorted(set(distances.values())):  # each round is reached through machines before it
            peers = [peer for peer, far in distances.items() if far == distance]
            cut_off = {
                peer.title: lost[jump.title]
                for peer in peers
                for jump in reversed(peer.path)
                if jump.title in lost
            }
            lost |= cut_off
            lost |= self._round([peer for peer in peers if peer.title not in cut_off], confirm)
        return {name: lost[name] for name in machines if name in lost}

    def _round(self, peers: Sequence[_Peer], confirm: Confirm) -> Mapping[str, ClusterctlError]:
        """Trust machines whose way is trusted already."""
        for peer in peers:
            if known := peer.host_key or self._keys.get(peer.title) or _users_own(peer):
                self._keys[peer.title] = known
        # A confirmed key is only ever replaced by one that is named: a changed one is somebody in between.
        asked = {peer.title: peer for peer in peers if peer.title not in self._keys or self._accepted}
        found, failed = on_each(list(asked), lambda title: _offered(asked[title], self._config))
        fine = {title: one for title, one in found.items() if one.fingerprint in self._accepted}
        unknown = [one for title, one in found.items() if title not in fine and title not in self._keys]
        if unknown:
            confirm(unknown)
        self._keys |= {one.title: one.key for one in (*fine.values(), *unknown)}
        self._write()
        return {title: exc for title, exc in failed.items() if title not in self._keys}

    def _write(self) -> None:
        text = "".join(f"{title} {key}\n" for title, key in sorted(self._keys.items()))
        if not self._file.exists() or self._file.read_text() != text:
            write_atomic(self._file, text)


def _read(file: Path) -> dict[str, str]:
    with suppress(FileNotFoundError):
        pairs = (line.partition(" ") for line in file.read_text().splitlines())
        return {title: key for title, _, key in pairs if key}
    return {}


def _users_own(peer: _Peer, files: Sequence[Path] = USERS_OWN) -> str | None:
    """The key that the user's own ssh knows under its address."""
    for file in files:
        known = paramiko.HostKeys()
        with suppress(OSError, RuntimeError):
            known.load(str(file.expanduser()))
        keys = known.lookup(host_port(peer.address.strip("[]"), peer.port))
        for kind in _KINDS:
            if keys is not None and kind in keys:
                return f"{kind} {keys[kind].get_base64()}"
    return None


def _offered(peer: _Peer, config: Path) -> OfferedKey:
    """Ask a machine for its key; nobody logs in."""
    address = peer.address.strip("[]")
    try:
        sock = _connected(address, peer, config)
    except socket.gaierror as exc:
        raise _unknown(peer, exc) from exc
    except OSError as exc:
        raise _silent(peer, exc.strerror or str(exc)) from exc
    try:
        with closing(sock), closing(paramiko.Transport(sock)) as transport:  # type: ignore[arg-type]
            transport.banner_timeout = _ANSWER_S
            transport.start_client(timeout=_ANSWER_S)
            key = transport.get_remote_server_key()
    except (paramiko.SSHException, OSError, EOFError) as exc:
        said = sock.said() if isinstance(sock, ProxySocket) else ""
        raise _silent(peer, said or str(exc)) from exc
    where = host_port(address, peer.port)
    return OfferedKey(peer.title, where, f"{key.get_name()} {key.get_base64()}", key.fingerprint)


def _connected(address: str, peer: _Peer, config: Path) -> socket.socket | ProxySocket:
    if peer.through is None:
        return socket.create_connection((address, peer.port), timeout=CONNECT_S)
    argv = ["ssh", "-F", str(config), "-W", f"[{address}]:{peer.port}", peer.through.alias]
    proxy = ProxySocket(shlex.join(argv))
    proxy.settimeout(_ANSWER_S)
    return proxy


def _unknown(peer: _Peer, exc: socket.gaierror) -> ClusterctlError:
    """Its name leads nowhere from here."""
    cause = f"this machine does not know the name {peer.address}: {exc.strerror}"
    fix = "write an address that leads there into the spec (address: 10.0.0.11), or have the name known here"
    retryable = exc.errno == socket.EAI_AGAIN  # a name server that does not answer now
    return _unreachable(peer, cause, fix, retryable=retryable)


def _silent(peer: _Peer, said: str) -> ClusterctlError:
    """Why a machine did not show its key: in ssh's words, if those of the way to it are known."""
    user = next((jump.user for jump in peer.path if jump.user), "you")
    where = host_port(peer.address, peer.port)
    if peer.path and (known := explain(said, host=peer.title, user=user, address=where)):
        return known
    fix = "see that it is switched on, that sshd runs, and that no firewall is in between"
    return _unreachable(peer, f"no SSH server at {where}: {said}", fix, retryable=True)


def _unreachable(peer: _Peer, cause: str, fix: str, *, retryable: bool) -> UnreachableError:
    failure = Failure(UnreachableError.code, cause, peer.title, "access", fix, retryable)
    return UnreachableError(f"{peer.title}: {cause}", host=peer.title, fix=fix, failures=(failure,))
