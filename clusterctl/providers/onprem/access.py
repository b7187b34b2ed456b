"""SSH access to on-prem machines as their owner: plain ssh with the owner's keys, agent and
configuration.
"""

from __future__ import annotations

import getpass
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Final

from clusterctl.errors import (
    ClusterctlError,
    Failure,
    MachineError,
    ProvisionError,
    TransportError,
    UnreachableError,
)
from clusterctl.providers.base import FINGERPRINT, Confirm, OfferedKey, host_port
from clusterctl.spec.hosts import OnpremHost
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.inventory import KEEPALIVE, connection_name
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.openssh import BRIEF_S
from clusterctl.transport.refusals import find_mistake
from clusterctl.transport.ssh import Connections
from clusterctl.util.assets import ErrorRule, digest, first_rule, read_table, render
from clusterctl.util.disk import translating_write_errors
from clusterctl.util.process import call_on_hosts, parallel_map, run
from clusterctl.util.progress import NO_LIMIT, Deadline

_SSH_PORT: Final = 22
# In a ProxyCommand.
_TOKEN: Final = re.compile("%.")
# ssh itself connects through a list of jump hosts.
_JUMP: Final = re.compile(r"(?:(?P<user>[^@,]+)@)?(?P<name>[^@:,]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True, slots=True)
class SshHost:
    """A machine of the spec that ssh connects to.

    title: name in the ssh_config, in messages and in known_hosts.
    """

    title: str
    host: str
    port: int
    user: str | None
    key: str | None
    host_key: str | None = None

    @property
    def address(self) -> str:
        return host_port(self.host, self.port)


def ssh_host(name: str, machine: OnpremHost) -> SshHost:
    address = (machine.address or name).strip("[]")
    return SshHost(
        name, address, machine.port or _SSH_PORT, machine.user, machine.key, machine.host_key
    )


@dataclass(frozen=True, slots=True)
class JumpHost:
    """A jump host of the owner's ssh configuration (ProxyJump), which has the rest of its settings."""

    name: str
    user: str | None
    port: str | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """The spec's settings with what the owner's ssh configuration adds to them.

    jumps: name of a machine -> the jump host that ssh connects through.
    """

    settings: OnpremSettings
    jumps: Mapping[str, JumpHost]

    @property
    def machines(self) -> Mapping[str, OnpremHost]:
        return self.settings.machines


def as_ssh_resolves(settings: OnpremSettings) -> Resolved:
    """Return the settings with the user, address, port and jump host that ssh uses for each machine,
    which the owner's own configuration may set. Raise TransportError if ssh can't read that
    configuration.
    """
    machines = settings.machines
    resolved = parallel_map([*machines.items()], lambda pair: _as_ssh_resolves(*pair))
    hosts = {name: machine for name, (machine, _) in zip(machines, resolved, strict=True)}
    jumps = {name: jump for name, (_, jump) in zip(machines, resolved, strict=True) if jump}
    return Resolved(settings.model_copy(update={"hosts": hosts}), jumps)


def _as_ssh_resolves(name: str, machine: OnpremHost) -> tuple[OnpremHost, JumpHost | None]:
    if machine.is_here:
        return machine, None
    words: list[str] = []
    if machine.address not in (None, name):
        words += ["-o", f"HostName={machine.address}"]
    if machine.port not in (None, _SSH_PORT):
        words += ["-p", str(machine.port)]
    if machine.user:
        words += ["-l", machine.user]
    said = ssh_settings([*words, "--", name])
    if "hostname" not in said:
        # ssh says why when it connects.
        return machine, None
    found = {"address": said["hostname"], "user": said["user"], "port": int(said["port"])}
    match = _JUMP.fullmatch(said.get("proxyjump", ""))
    jump = JumpHost(match["name"], match["user"], match["port"]) if match else None
    return machine.model_copy(update=found), jump


def ssh_settings(words: Sequence[str]) -> Mapping[str, str]:
    """Return the settings that ssh reads for this command line, by their names in small letters.

    Raises TransportError for a mistake in the owner's configuration, MachineError without ssh.
    """
    try:
        resolved = run(["ssh", "-G", *words])
    except OSError as exc:
        raise no_ssh(exc) from exc
    if error := find_mistake(resolved.stderr):
        raise error
    return dict(line.partition(" ")[::2] for line in resolved.stdout.splitlines())


def access_config(
    machines: Mapping[str, OnpremHost],
    workspace: Workspace,
    proxies: Mapping[str, Sequence[str]],
    keys: Mapping[str, str],
    jumps: Collection[JumpHost] = (),
) -> str:
    """Return the ssh_config for logging in to all machines as their owner.

    proxies: name of a machine -> its ProxyCommand. keys: name of a machine -> its host key, if that
        is known. jumps: jump hosts, which are no machines of the spec. ssh shares all connections.
    """
    hosts = [ssh_host(name, machine) for name, machine in machines.items()]
    return render(
        "access_config.j2",
        hosts=hosts,
        names={
            host.title: connection_name(host.title, keys[host.title], host.user)
            for host in hosts
            if host.user and host.title in keys
        },
        jumps=[(jump, digest(*map(str, astuple(jump)))[:8]) for jump in jumps],
        here={name for name, machine in machines.items() if machine.is_here},
        proxies=proxies,
        workspace=workspace,
        idle_s=BRIEF_S,
        keepalive=KEEPALIVE,
    )


_RULES: Final = Path(__file__).with_name("data") / "refusals.yaml"
NO_LOGIN: Final = "login failed"


class AccessError(ProvisionError):
    """The owner of a machine can't log in to it."""

    def __init__(self, failure: Failure) -> None:
        cause = failure.cause
        fix = failure.fix
        super().__init__(
            NO_LOGIN,
            code=failure.code,
            about=failure.about,
            why=cause,
            fix=fix,
            host=failure.host,
            failures=(failure,),
        )

    @classmethod
    def of(cls, host: str, code: str, cause: str, fix: str, *, about: str) -> AccessError:
        return cls(Failure(code, cause, host, "access", fix, about=about))


def explain(stderr: str, *, host: str, user: str, address: str) -> AccessError | None:
    """Return an error that explains a message of ssh, if a rule in refusals.yaml matches it."""
    if (match := first_rule(read_table(_RULES, tuple[ErrorRule, ...]), stderr)) is None:
        return None
    rule, groups = match
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    offered = FINGERPRINT.search(stderr)
    words = {
        "user": user,
        "address": address,
        "said": lines[-1],
        "offered": offered[0] if offered else "another",
    }
    return AccessError(rule.failure({**words, **groups}, host=host, phase="access"))


def explain_error(exc: TransportError, peer: SshHost) -> ClusterctlError:
    """Return the error of a login to a machine, explained if a rule in refusals.yaml matches it."""
    address = exc.jump_host or peer.address
    user = "you" if exc.jump_host else peer.user or getpass.getuser()
    error = explain(f"{exc.what}\n{exc.why}", host=peer.title, user=user, address=address)
    if error is None or not exc.jump_host:
        return error or exc
    (failure,) = error.failures
    return AccessError(replace(failure, cause=f"jump host {exc.jump_host}: {failure.cause}"))


def no_ssh(exc: OSError) -> MachineError:
    """Return the error for the case that ssh can't be started on this machine."""
    fix = "install OpenSSH's client"
    return MachineError("missing tool: ssh", code="tool-missing", why=str(exc), fix=fix)


ANSWER_S: Final = 20.0


def raise_failures(failed: Mapping[str, ClusterctlError], *, summary: str, then: str) -> None:
    """Raise a single error with the failures of all hosts in ``failed``, if any. ``then``: the next
    step.
    """
    if failed:
        failures = [
            replace(failure, host=failure.host or host, phase=failure.phase or "access")
            for host, exc in failed.items()
            for failure in exc.failures
        ]
        raise ProvisionError.of_hosts(
            f"{summary}: {{hosts}}", failures, code="unreachable", about="hosts", then=then
        )


USERS_OWN: Final = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))
_KINDS: Final = ("ssh-ed25519", *(f"ecdsa-sha2-nistp{bits}" for bits in (256, 384, 521)), "ssh-rsa")


class HostKeys:
    """The host keys of a cluster's machines that the owner trusts: those in the owner's known_hosts
    and in the spec. ``file`` has them by name, for ssh.
    """

    def __init__(self, file: Path, connections: Connections) -> None:
        """Read no file yet. connections: to jump hosts."""
        self._file = file
        self._connections = connections
        self._keys: dict[str, str] = {}

    def key_of(self, host: str) -> str:
        return self._keys[host]

    @property
    def known(self) -> Mapping[str, str]:
        """Name of a machine -> its key."""
        return {**_read(self._file), **self._keys}

    def remember(self, keys: Mapping[str, str]) -> None:
        """Trust these keys, by the name of the machine."""
        self._keys |= keys
        lines = [f"{title} {key}\n" for title, key in sorted(self.known.items())]
        write_atomic(self._file, "".join(lines))

    def trust(
        self,
        machines: Mapping[str, OnpremHost],
        confirm: Confirm,
        limit: Deadline = NO_LIMIT,
        *,
        find_all: bool = False,
    ) -> Mapping[str, ClusterctlError]:
        """Find a trusted key of each machine. Return name -> error, for machines without a key.

        confirm: asks the user about keys that are not trusted yet. Confirmed keys are added to the
            user's known_hosts. If ``confirm`` raises, no key is saved.
        find_all: whether to return errors about unconfirmed keys, instead of raising an error.
        """
        peers = {name: ssh_host(name, machine) for name, machine in machines.items()}
        # A machine may be the jump host of others.
        self.remember({name: key for name, peer in peers.items() if (key := _trusted_key(peer))})
        to_ask = {name: peer for name, peer in peers.items() if name not in self._keys}
        offered, failed = call_on_hosts(
            list(to_ask), lambda title: _offered_key(to_ask[title], self._connections), limit=limit
        )
        try:
            if offered:
                confirm([*offered.values()])
        except ProvisionError as exc:
            if not find_all:
                raise
            failed |= {
                str(failure.host): ProvisionError(
                    failure.cause,
                    code=failure.code,
                    about=failure.about,
                    fix=failure.fix,
                    failures=(failure,),
                )
                for failure in exc.failures
            }
        else:
            _add_to_users_own(offered.values())
            self._keys |= {title: key.key for title, key in offered.items()}
        self.remember({})
        return failed


def _read(file: Path) -> dict[str, str]:
    with suppress(FileNotFoundError):
        pairs = (line.partition(" ") for line in file.read_text().splitlines())
        return {title: key for title, _, key in pairs if key}
    return {}


def _add_to_users_own(keys: Collection[OfferedKey]) -> None:
    """Add host keys that the user has confirmed to the user's known_hosts."""
    if not keys:
        return
    file = USERS_OWN[0].expanduser()
    with translating_write_errors(file):
        file.parent.mkdir(mode=0o700, exist_ok=True)
        with file.open("a+") as stream:
            stream.seek(0)
            text = stream.read()
            stream.write("\n" if text and not text.endswith("\n") else "")
            stream.writelines(f"{key.address} {key.key}\n" for key in keys)


def _trusted_key(peer: SshHost) -> str | None:
    """Return the host key of ``peer`` in the known_hosts files of the user and of this machine, else
    that in the spec, if any.
    """
    return _users_own(peer) or peer.host_key


def _users_own(peer: SshHost, files: Sequence[Path] = USERS_OWN) -> str | None:
    for file in files:
        command = ("ssh-keygen", "-F", peer.address, "-f", str(file.expanduser()))
        with suppress(OSError):
            found = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False
            )
            lines = [line.split() for line in found.stdout.splitlines()]
            # Comments begin with #, and keys that must not be trusted by themselves with a marker.
            keys = {line[1]: line[2] for line in lines if line[2:] and line[0][0] not in "#@"}
            for kind in _KINDS:
                if kind in keys:
                    return f"{kind} {keys[kind]}"
    return None


def _offered_key(peer: SshHost, connections: Connections) -> OfferedKey:
    """Ask a machine for its host key without logging in."""
    from clusterctl.transport.paramiko_ssh import offered_key  # noqa: PLC0415

    try:
        connections.prepare(peer.title)
    except TransportError as exc:
        raise explain_error(exc, peer) from exc
    try:
        key = offered_key(*_way_to(peer.title, connections.ssh_config), limit_s=ANSWER_S)
    except ConnectionError as exc:
        reason = str(exc)
    else:
        return OfferedKey(peer.title, peer.address, key)
    user = peer.user or getpass.getuser()
    raise explain(reason, host=peer.title, user=user, address=peer.address) or UnreachableError(
        f"no SSH server at {peer.address}",
        why=reason.strip(),
        fix="check that the machine is on, that sshd runs, and that no firewall blocks the port",
        host=peer.title,
    )


def _way_to(alias: str, ssh_config: Path) -> tuple[str, int, tuple[str, ...]]:
    """Return the address and the port of a machine, and the words of the program that carries the
    connection, as ssh reads them in the owner's configuration. No words: no program.
    """
    settings = ssh_settings(["-F", str(ssh_config), "--", alias])
    address = settings.get("hostname", alias)
    port = settings.get("port", str(_SSH_PORT))
    if jumps := settings.get("proxyjump"):
        *first, last = jumps.split(",")
        before = ("-J", ",".join(first)) if first else ()
        target = last if "://" in last else f"ssh://{last}"
        words = ("ssh", "-F", str(ssh_config), *before, "-W", f"[{address}]:{port}", "--", target)
        return address, int(port), words
    command = settings.get("proxycommand")
    if command is None:
        return address, int(port), ()
    tokens = {"%%": "%", "%h": address, "%n": alias, "%p": port, "%r": settings.get("user", "")}
    line = _TOKEN.sub(lambda token: tokens.get(token[0], token[0]), command)
    return address, int(port), ("sh", "-c", f"exec {line}")
