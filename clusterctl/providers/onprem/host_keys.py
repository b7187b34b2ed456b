"""Which host keys are trusted: the spec's, those confirmed before, those that the user's ssh knows."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.errors import ClusterctlError, Failure, UnreachableError
from clusterctl.providers.onprem.access import CONNECT_S, Hop, explain, hops, last_hop, on_each
from clusterctl.providers.pending import host_port
from clusterctl.providers.prompts import Confirm, OfferedKey
from clusterctl.spec.onprem import OnpremHost
from clusterctl.state.workspace import write_atomic
from clusterctl.transport.target import ProxySocket, paramiko

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
    through: Hop | None
    host_key: str | None = None


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
        nearest = [_Peer(h.title, h.host, h.port, h.before) for h in hops(machines.values())]
        rounds = _by_distance([*nearest, *(_peer(name, machine) for name, machine in machines.items())])
        lost: dict[str, ClusterctlError] = {}
        for peers in rounds:
            lost |= self._round([peer for peer in peers if not _is_cut_off(peer, lost)], confirm)
        for name, machine in machines.items():
            way = tuple(hop.way) if (hop := last_hop(machine)) else ()
            if broken := [one.title for one in way if one.title in lost]:
                lost[name] = lost[broken[0]]
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


def _peer(name: str, machine: OnpremHost) -> _Peer:
    return _Peer(name, machine.address or name, machine.port or 22, last_hop(machine), machine.host_key)


def _by_distance(peers: Sequence[_Peer]) -> Iterator[list[_Peer]]:
    """The nearest first: each round is reached through machines of those before."""
    distances = {peer: len(tuple(peer.through.way)) if peer.through else 0 for peer in peers}
    for distance in sorted(set(distances.values())):
        yield [peer for peer in dict.fromkeys(peers) if distances[peer] == distance]


def _is_cut_off(peer: _Peer, lost: Mapping[str, ClusterctlError]) -> bool:
    return peer.through is not None and any(hop.title in lost for hop in peer.through.way)


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
    """Ask a machine for its key; nobody logs in.

    Raises:
        AccessError: the machine on the way refused.
        UnreachableError: it does not answer as an SSH server does.
    """
    address = peer.address.strip("[]")
    try:
        sock = _connected(address, peer, config)
    except socket.gaierror as exc:
        raise _unknown(peer, exc) from exc
    except OSError as exc:
        raise _silent(peer, exc.strerror or str(exc)) from exc
    transport: paramiko.Transport | None = None
    try:
        transport = paramiko.Transport(sock)  # type: ignore[arg-type]  # a proxy's is like a socket
        transport.banner_timeout = _ANSWER_S
        transport.start_client(timeout=_ANSWER_S)
        key = transport.get_remote_server_key()
    except (paramiko.SSHException, OSError, EOFError) as exc:
        _close(transport, sock)
        said = sock.said() if isinstance(sock, ProxySocket) else ""
        raise _silent(peer, said or str(exc)) from exc
    finally:
        _close(transport, sock)
    where = host_port(address, peer.port)
    return OfferedKey(peer.title, where, f"{key.get_name()} {key.get_base64()}", key.fingerprint)


def _connected(address: str, peer: _Peer, config: Path) -> socket.socket | ProxySocket:
    if peer.through is None:
        return socket.create_connection((address, peer.port), timeout=CONNECT_S)
    argv = ["ssh", "-F", str(config), "-W", f"[{address}]:{peer.port}", peer.through.alias]
    proxy = ProxySocket(shlex.join(argv))
    proxy.settimeout(_ANSWER_S)
    return proxy


def _close(transport: paramiko.Transport | None, sock: socket.socket | ProxySocket) -> None:
    if transport is not None:
        transport.close()
    sock.close()


def _unknown(peer: _Peer, exc: socket.gaierror) -> ClusterctlError:
    """Its name leads nowhere from here."""
    cause = f"this machine does not know the name {peer.address}: {exc.strerror}"
    fix = "write an address that leads there into the spec (address: 10.0.0.11), or have the name known here"
    retryable = exc.errno == socket.EAI_AGAIN  # a name server that does not answer now
    failure = Failure(UnreachableError.code, cause, peer.title, "access", fix, retryable)
    return UnreachableError(f"{peer.title}: {cause}", host=peer.title, fix=fix, failures=(failure,))


def _silent(peer: _Peer, said: str) -> ClusterctlError:
    """Why a machine did not show its key: in ssh's words, if those of the way to it are known."""
    way = tuple(peer.through.way) if peer.through else ()
    user = next((hop.user for hop in way if hop.user), "you")
    where = host_port(peer.address, peer.port)
    if way and (known := explain(said, host=peer.title, user=user, address=where)):
        return known
    cause = f"no SSH server at {where}: {said}"
    fix = "see that it is switched on, that sshd runs, and that no firewall is in between"
    failure = Failure(UnreachableError.code, cause, peer.title, "access", fix, retryable=True)
    return UnreachableError(f"{peer.title}: {cause}", host=peer.title, fix=fix, failures=(failure,))
