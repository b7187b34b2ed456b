"""The ssh_config of the user's own way in. Our own account's is the inventory's, as on all providers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.spec.onprem import OnpremHost
from clusterctl.state.journal import digest

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
        return place(self.host, self.port)

    @property
    def way(self) -> Iterator[Hop]:
        """The hops up to this one, the first one first."""
        if self.before is not None:
            yield from self.before.way
        yield self


def place(host: str, port: int) -> str:
    """An address and a port, as known_hosts has them."""
    return host if port == 22 else f"[{host}]:{port}"  # noqa: PLR2004 - ssh's own


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
