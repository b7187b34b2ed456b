"""Which ports TCP does not reach between hosts: each host connects to all others, once all of them listen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from clusterctl.errors import ClusterctlError, Failure, TransportError
from clusterctl.hosts.checks import Finding
from clusterctl.hosts.probe import NO_FIREWALL, Firewall, HostFacts
from clusterctl.hosts.roles import role_ports
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Host
from clusterctl.transport.base import Connect, Conversation, lines, remote_argv
from clusterctl.util.process import on_each
from clusterctl.util.progress import NO_LIMIT, Limit

NFS_PORT: Final = 2049
_SRUN: Final = 61000  # the first port of SrunPortRange
_START_S = 20.0  # for a program to begin to listen
_ASK_S = 6.0  # for which the others are tried
_ASK_PER_NODE_S = 0.1
_SHOWN = 3  # pairs in the failure of one host
_DROPPED = "see their load, and what drops their traffic: firewalls, routes, cables"

# What lets the hosts through: of firewalls whose rules are not read, in general.
_OPENING: Final = {
    "firewalld": "`clusterctl up` lets the cluster's hosts through firewalld",
    "ufw": "`for host in {spaced}; do sudo ufw allow from $host; done`",
    "iptables": (
        "`sudo iptables -I INPUT -s {listed} -j ACCEPT`, and keep it: `netfilter-persistent save`, "
        "on Rocky Linux `service iptables save`"
    ),
    "nftables": (
        "`sudo nft insert rule inet filter input ip saddr {{ {listed} }} accept` (`sudo nft list ruleset` "
        "names the table and the chain), and write the same into the file that nftables.service loads"
    ),
}

# Starts a command on the host of this name, to converse with it.
StartOnHost = Callable[[str, Sequence[str]], AbstractContextManager[Conversation]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A host that tries the others.

    address: its own on the cluster's network.
    ports: those that the others try, beside the one that the kernel chooses, as MPI has it do.
    opens: whether to listen on these ports, if no program does.
    tried: whether the others try it.
    """

    address: str
    ports: tuple[int, ...] = ()
    opens: bool = False
    tried: bool = True


@dataclass(frozen=True, slots=True)
class Answers:
    """What the hosts said of each other.

    unreached: host -> another host -> the port that the first does not reach there -> why.
    silent: the hosts that did not answer -> how they failed.
    """

    unreached: Mapping[str, Mapping[str, Mapping[int, str]]]
    silent: Mapping[str, ClusterctlError]


@dataclass(frozen=True, slots=True)
class _Listening:
    """A host on which the program listens on ``ports``, the one that the kernel chose first."""

    talk: Conversation
    said: Iterator[bytes]
    ports: tuple[int, ...]


def unconnected(
    addresses: Mapping[str, str], to: Connect, *, start_s: float = _START_S
) -> tuple[Failure, ...]:
    """The hosts that TCP does not join with each other, one failure each; none when all reach all.

    Those that do not listen for the others after ``start_s`` are at fault alone: nothing refuses connections.
    """
    peers = {name: Peer(address) for name, address in addresses.items()}
    answers = unreached_ports(peers, lambda host, argv: to(host).converse(argv), start_s=start_s)
    causes: dict[str, list[str]] = {}
    for near, others in answers.unreached.items():
        for far, whys in others.items():
            for host in (near, far):
                causes.setdefault(host, []).append(f"{near} can't reach {far}: {'; '.join(whys.values())}")
    for host, said in causes.items():  # of 64 nodes that reach none, there would be 2,016 pairs
        if (more := len(said) - _SHOWN) > 0:
            causes[host] = [*said[:_SHOWN], f"and {more} more such pairs"]
    silence = (exc.on(host, "verify") for host, exc in answers.silent.items())
    return (
        *(replace(one, cause=f"it was asked which hosts it reaches: {one.cause}") for one in silence),
        *(Failure("network", "; ".join(said), host, "verify", _DROPPED) for host, said in causes.items()),
    )


def unreached_ports(
    peers: Mapping[str, Peer], start: StartOnHost, *, start_s: float = _START_S, limit: Limit = NO_LIMIT
) -> Answers:
    """Have the hosts try each other's ports, while all of them listen."""
    if len(peers) < 2:  # noqa: PLR2004
        return Answers({}, {})
    seconds = str(_ASK_S + _ASK_PER_NODE_S * len(peers))
    with ExitStack() as talks:

        def listen(name: str) -> _Listening:
            opened = peers[name].ports if peers[name].opens else ()
            argv = remote_argv("clusterctl.hosts.remote_pairs", seconds, json.dumps(opened))
            talk = talks.enter_context(start(name, argv))
            too_long = TransportError(f"{name} says too much", code="answer-too-long", host=name)
            said = lines(iter(talk.receive, b""), too_long)
            return _Listening(talk, said, tuple(_answer(talk, said)))

        def ask(name: str) -> dict[str, dict[int, str]]:
            tried = {
                other: (peers[other].address, _tried(peers[other], one))
                for other, one in listening.items()
                if other != name and peers[other].tried
            }
            listening[name].talk.send(json.dumps(tried).encode() + b"\n")
            answer = _answer(listening[name].talk, listening[name].said)
            return {other: {int(port): why for port, why in ports.items()} for other, ports in answer.items()}

        within_s = min(start_s + _ASK_PER_NODE_S * len(peers), limit.rest_s)
        # Under a load of hundreds a login takes minutes: only who listens by then is connected to.
        first = Limit.within(within_s, limit.clock)
        listening, late = on_each(peers, listen, most=len(peers), limit=first)
        unreached, failed = on_each(listening, ask, most=len(peers), limit=limit)
    return Answers(unreached, {**late, **failed})


def _tried(peer: Peer, one: _Listening) -> dict[int, bool]:
    """Port -> whether the program listens on it there, or else a daemon may."""
    return {port: port in one.ports for port in (one.ports[0], *peer.ports)}


def _answer(talk: Conversation, said: Iterator[bytes]) -> Any:
    for line in said:
        with suppress(ValueError):  # the account's shell may say more
            return json.loads(line)
    talk.finish()  # raises why it has ended
    raise TransportError("it has ended without an answer", code="ended-without-answer")


def needed_ports(spec: ClusterSpec, host: Host, *, exports: bool) -> tuple[int, ...]:
    """The ports of a host that the cluster's other hosts need; ``exports``: the shared folder is there."""
    by_ssh = (host.port,) if spec.scheduler == "none" else ()  # mpirun starts ranks by SSH
    return (*role_ports(spec, host.roles), _SRUN, *((NFS_PORT,) if exports else ()), *by_ssh)


def examine_ports(
    peers: Mapping[str, Peer],
    members: Mapping[str, str],
    facts: Mapping[str, HostFacts],
    start: StartOnHost,
    limit: Limit = NO_LIMIT,
) -> Iterator[Finding]:
    """Have the peers connect to each other; which of them do not let others through to a port.

    A finding for all hosts that do not reach the same ports of a host, for the same cause.

    members: name -> address of all hosts of the cluster, which the fix lets through.
    """
    answers = unreached_ports(peers, start, limit=limit)
    yield from not_looked_at(answers.silent)
    kept_out: dict[tuple[str, str, str], list[str]] = {}
    for name, others in answers.unreached.items():
        for other, ports in others.items():
            for why in dict.fromkeys(ports.values()):
                listed = ", ".join(str(port) for port, cause in sorted(ports.items()) if cause == why)
                kept_out.setdefault((other, listed, why), []).append(name)
    for (host, listed, why), names in kept_out.items():
        firewalls = {name: facts[name].firewall for name in (host, *names)}
        yield _closed(members, firewalls, listed, why)


def _closed(members: Mapping[str, str], firewalls: Mapping[str, Firewall], ports: str, why: str) -> Finding:
    """The finding of ports of the first host of ``firewalls`` that the others of them do not reach."""
    host, *names = firewalls
    firewall = firewalls[host]
    also = "".join(f", on {name} {firewalls[name]}" for name in names if firewalls[name].name != NO_FIREWALL)
    cause = (
        f"{', '.join(names)} can't reach {members[host]}, port {ports}: {why}; "
        f"the firewall in force on {host} is {firewall}{also}"
    )
    port = ports.partition(",")[0]
    trace = (
        f"`traceroute -T -p {port} {members[host]}` on {names[0]} shows what drops it on the way: open that"
    )
    if firewall.name == NO_FIREWALL:
        return Finding(host, "error", "network", "the cluster's hosts can't reach it", cause, trace)
    sources = [address for name, address in members.items() if name != host]
    opening = _OPENING[firewall.name].format(spaced=" ".join(sources), listed=",".join(sources))
    what = "a firewall keeps the cluster's hosts out"
    return Finding(host, "error", "firewall", what, cause, f"{opening}; if it stays so, {trace}")


def not_looked_at(failed: Mapping[str, ClusterctlError]) -> Iterator[Finding]:
    what, fix = "what it reaches was not looked at", "run the same command again"
    for host, one in failed.items():
        if isinstance(one, TransportError):  # what else is wrong, the other checks say
            yield Finding(host, "warning", "not-looked-at", what, one.cause, one.fix or fix)
