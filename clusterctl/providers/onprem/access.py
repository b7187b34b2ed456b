"""The owner's SSH access to on-prem machines: plain ssh with their keys and agent, and sudo.

It is used until the admin account exists. Commands run without a terminal; a password for sudo goes to its
standard input, and nowhere else.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from clusterctl.providers.base import Confirm, OfferedKey, host_port
from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.workspace import write_atomic
from clusterctl.util.assets import Rule, digest, first_rule, render, table
from clusterctl.util.process import on_each, run, temporary_folder
from clusterctl.util.progress import NO_LIMIT, Limit

# paramiko looks for `invoke`, which would take 0.1 s of each verb, for one directive of an ssh_config,
# `Match exec`, that ours never has, and does without where there is none.
_HIDDEN = "invoke" not in sys.modules
if _HIDDEN:
    sys.modules["invoke"] = None  # type: ignore[assignment]
import paramiko  # noqa: E402

if _HIDDEN:
    del sys.modules["invoke"]

_JUMP: Final = re.compile(r"(?:(?P<user>[^@]+)@)?(?P<host>[^:]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True, slots=True)
class SshHost:
    """A machine that ssh goes to: one of the spec, or one on the way (``before``) to it.

    ``alias`` is its name in the ssh_config, ``title`` that in messages and in known_hosts.
    """

    alias: str
    title: str
    host: str
    port: int
    user: str | None
    key: str | None
    before: SshHost | None = None
    host_key: str | None = None

    @property
    def path(self) -> tuple[SshHost, ...]:
        """The hops up to this one, the first one first."""
        return (*(self.before.path if self.before else ()), self)

    @property
    def where(self) -> str:
        return host_port(self.host, self.port)


def ssh_host(name: str, machine: OnpremHost) -> SshHost:
    """A machine of the spec, with those on the way to it; their aliases stay as long as the way does."""
    before: SshHost | None = None
    for text in machine.jump or ():
        match = _JUMP.fullmatch(text)
        assert match is not None  # noqa: S101 - the spec's pattern
        title = host_port(match["host"], int(match["port"] or 22))
        behind = before.alias if before else ""
        alias = f"jump-{digest(match['user'] or '', title, machine.key or '', behind)[:8]}"
        port = int(match["port"] or 22)
        before = SshHost(alias, title, match["host"], port, match["user"], machine.key, before)
    address = (machine.address or name).strip("[]")
    port = machine.port or 22
    return SshHost(name, name, address, port, machine.user, machine.key, before, machine.host_key)


def ssh_hosts(machines: Mapping[str, OnpremHost]) -> tuple[SshHost, ...]:
    """These machines after all those on the way to them, each once, the nearest ones first."""
    ends = [ssh_host(name, machine) for name, machine in machines.items()]
    jumps = dict.fromkeys(jump for end in ends for jump in end.path[:-1])
    return (*sorted(jumps, key=lambda jump: len(jump.path)), *ends)


def access_config(machines: Mapping[str, OnpremHost], trusted_hosts: Path) -> str:
    """How the user's own account reaches every machine, and those on the way."""
    return render("access_config.j2", hosts=ssh_hosts(machines), trusted_hosts=trusted_hosts)


def address_of(host: str, config: Path) -> str:
    """Return the address of a host of an `ssh_config`.

    Raises:
        TransportError: the file can't be read.
    """
    try:
        return str(paramiko.SSHConfig.from_path(str(config)).lookup(host)["hostname"])
    except (OSError, paramiko.ConfigParseError) as exc:
        raise TransportError(
            f"the SSH configuration does not say how to reach {host}",
            code="ssh-config-incomplete",
            where=str(config),
            why=str(exc),
            fix="run `clusterctl up`, which writes it",
            host=host,
        ) from exc


_RULES: Final = Path(__file__).with_name("data") / "refusals.yaml"
NO_LOGIN: Final = "login failed"
_OFFERED: Final = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


class AccessError(ProvisionError):
    """A machine does not let its owner in, or not to root."""

    def __init__(self, failure: Failure) -> None:
        why, fix = failure.cause, failure.fix
        super().__init__(
            NO_LOGIN, code=failure.code, why=why, fix=fix, host=failure.host, failures=(failure,)
        )

    @classmethod
    def of(cls, host: str, code: str, cause: str, fix: str) -> AccessError:
        return cls(Failure(code, cause, host, "access", fix))


def explain(stderr: str, *, host: str, user: str, address: str) -> AccessError | None:
    """What ssh or sudo means by that; None where no rule knows it."""
    if (found := first_rule(table(_RULES, tuple[Rule, ...]), stderr)) is None:
        return None
    rule, groups = found
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    offered = _OFFERED.search(stderr)
    words = {
        "user": user,
        "address": address,
        "said": lines[-1],
        "offered": offered[0] if offered else "another",
    }
    return AccessError(rule.failure({**words, **groups}, host=host, phase="access"))


def no_ssh(exc: OSError) -> MachineError:
    """Return the error of a machine that could not start ssh."""
    fix = "install OpenSSH's client"
    return MachineError("missing tool: ssh", code="tool-missing", why=str(exc), fix=fix)


ANSWER_S: Final = 20.0


def raise_failures(failed: Mapping[str, ClusterctlError], *, what: str, then: str) -> None:
    """Raise what went wrong on some hosts as one error, with one failure each."""
    if failed:
        failures = [
            replace(failure, host=failure.host or host, phase=failure.phase or "access")
            for host, exc in failed.items()
            for failure in exc.failures
        ]
        raise ProvisionError.of_hosts(f"{what}: {{hosts}}", failures, code="hosts-unreachable", then=then)


USERS_OWN: Final = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))
_KINDS: Final = ("ssh-ed25519", *(f"ecdsa-sha2-nistp{bits}" for bits in (256, 384, 521)), "ssh-rsa")


class HostKeys:
    """The trusted keys of a cluster's machines and of those on the way, kept in one file."""

    def __init__(self, file: Path, config: Path, *, accepted: Collection[str] = ()) -> None:
        """``config`` says how the machines on the way are reached; ``accepted`` are fingerprints."""
        self._file = file
        self._config = config
        self._accepted = frozenset(accepted)
        self._keys = _read(file)

    def key_of(self, host: str) -> str:
        return self._keys[host]

    def trust(
        self,
        machines: Mapping[str, OnpremHost],
        confirm: Confirm,
        limit: Limit = NO_LIMIT,
        *,
        find_all: bool = False,
    ) -> Mapping[str, ClusterctlError]:
        """Have a key of every machine, and of those on the way; those that did not show one, and why.

        What ``confirm`` raises ends it: nothing that was shown is kept then. To ``find_all``, machines with
        unconfirmed keys are among the result instead.
        """
        peers = ssh_hosts(machines)
        lost: dict[str, ClusterctlError] = {}
        for distance in sorted({len(peer.path) for peer in peers}):  # each round is reached through the last
            there = [peer for peer in peers if len(peer.path) == distance]
            lost |= {
                peer.title: lost[peer.before.title]
                for peer in there
                if peer.before and peer.before.title in lost
            }
            asked = [peer for peer in there if peer.title not in lost]
            lost |= self._round(asked, confirm, limit, find_all=find_all)
        return {name: lost[name] for name in machines if name in lost}

    def _round(
        self, peers: Sequence[SshHost], confirm: Confirm, limit: Limit, *, find_all: bool
    ) -> Mapping[str, ClusterctlError]:
        """Trust machines whose way is trusted already."""
        for peer in peers:
            if known := peer.host_key or self._keys.get(peer.title) or _users_own(peer):
                self._keys[peer.title] = known
        # A confirmed key is only ever replaced by one that is named: a changed one is somebody in between.
        asked = {peer.title: peer for peer in peers if peer.title not in self._keys or self._accepted}
        found, failed = on_each(list(asked), lambda title: _offered(asked[title], self._config), limit=limit)
        fine = {title: one for title, one in found.items() if one.fingerprint in self._accepted}
        unknown = [one for title, one in found.items() if title not in fine and title not in self._keys]
        try:
            if unknown:
                confirm(unknown)
        except ProvisionError as exc:
            if not find_all:
                raise
            failed |= {
                str(one.host): ProvisionError(one.cause, code=one.code, fix=one.fix, failures=(one,))
                for one in exc.failures
            }
            unknown = []
        self._keys |= {one.title: one.key for one in (*fine.values(), *unknown)}
        write_atomic(self._file, "".join(f"{title} {key}\n" for title, key in sorted(self._keys.items())))
        return {title: exc for title, exc in failed.items() if title not in self._keys}


def _read(file: Path) -> dict[str, str]:
    with suppress(FileNotFoundError):
        pairs = (line.partition(" ") for line in file.read_text().splitlines())
        return {title: key for title, _, key in pairs if key}
    return {}


def _users_own(peer: SshHost, files: Sequence[Path] = USERS_OWN) -> str | None:
    """The key that the user's own ssh knows under its address."""
    for file in files:
        known = paramiko.HostKeys()
        with suppress(OSError, RuntimeError):
            known.load(str(file.expanduser()))
        keys = known.lookup(peer.where)
        for kind in _KINDS:
            if keys is not None and kind in keys:
                return f"{kind} {keys[kind].get_base64()}"
    return None


def _offered(peer: SshHost, config: Path) -> OfferedKey:
    """Ask a machine for its key; nobody logs in. Those on the way must show the keys that are trusted."""
    with temporary_folder() as folder:
        shown = folder / "known_hosts"
        options = ("StrictHostKeyChecking=accept-new", f'UserKnownHostsFile="{shown}"', "HashKnownHosts=no",
                   "PreferredAuthentications=none")  # fmt: skip
        words = ("ssh", "-F", str(config), *(f"-o{option}" for option in options), "--", peer.alias, "true")
        try:
            stderr = run(words, timeout_s=ANSWER_S).stderr
        except subprocess.TimeoutExpired:
            stderr = f"it timed out after {ANSWER_S:g} s"
        except OSError as exc:
            raise no_ssh(exc) from exc
        key = next(iter(_read(shown).values()), None)  # of the name in lower case
    if key is not None:
        sha = hashlib.sha256(b64decode(key.split()[1])).digest()
        return OfferedKey(peer.title, peer.where, key, f"SHA256:{b64encode(sha).decode().rstrip('=')}")
    user = next((one.user for one in peer.path if one.user), "you")
    raise explain(stderr, host=peer.title, user=user, address=peer.where) or UnreachableError(
        f"no SSH server at {peer.where}",
        why=stderr.strip(),
        fix="see that it is switched on, that sshd runs, and that no firewall is in between",
        host=peer.title,
    )
