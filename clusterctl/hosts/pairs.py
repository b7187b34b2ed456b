"""Find ports of hosts that other hosts can't reach: all hosts listen, then each host tries other
hosts.
"""

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
from clusterctl.transport.base import Connect, Conversation, remote_argv, split_lines
from clusterctl.util.process import call_on_hosts
from clusterctl.util.progress import NO_LIMIT, Deadline

NFS_PORT: Final = 2049
# The first port of SrunPortRange.
_SRUN: Final = 61000
# Time limits for programs to start listening, and to try all other hosts.
_START_S = 20.0
_ASK_S = 6.0
_ASK_PER_NODE_S = 0.1
_SHOWN = 3  # pairs
_DROPPED = "check the load of these hosts, and the firewalls, routes and cables between them"

# How to let the hosts through each firewall.
_OPENING: Final = {
    "firewalld": "`clusterctl up` lets the cluster's hosts through firewalld",
    "ufw": "`for host in {spaced}; do sudo ufw allow from $host; done`",
    "iptables": (
        "`sudo iptables -I INPUT -s {listed} -j ACCEPT`, and keep it: `netfilter-persistent save`, "
        "on Rocky Linux `service iptables save`"
    ),
    "nftables": (
        "`sudo nft insert rule inet filter input ip saddr {{ {listed} }} accept` (`sudo "
        "nft list ruleset` shows the table and the chain), and add the rule to the file that "
        "nftables.service loads"
    ),
}

# Starts a command on a host. Arguments: host, command. Returns the conversation with the command.
StartOnHost = Callable[[str, Sequence[str]], AbstractContextManager[Conversation]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A host in a test of connections.

    address: the host's address on the cluster's network.
    ports: the ports that other hosts try. They also try a port that the kernel chooses, like those
        of MPI.
    opens: whether the test program listens on these ports, unless another program does already.
    tried: whether other hosts try to connect to this host.
    """

    address: str
    ports: tuple[int, ...] = ()
    opens: bool = False
    tried: bool = True


@dataclass(frozen=True, slots=True)
class ConnectionResults:
    """The results of a test of connections between hosts.

    unreached: host -> other host -> port of the other host that the first host can't reach ->
        cause.
    silent: the errors of hosts that did not answer, by host.
    """

    unreached: Mapping[str, Mapping[str, Mapping[int, str]]]
    silent: Mapping[str, ClusterctlError]


@dataclass(frozen=True, slots=True)
class _Listening:
    """A host on which the test program listens on ``ports``. The kernel chose the first port."""

    talk: Conversation
    output: Iterator[bytes]
    ports: tuple[int, ...]


def find_unconnected_hosts(
    addresses: Mapping[str, str], to: Connect, *, start_s: float = _START_S
) -> tuple[Failure, ...]:
    """Return a failure for each host with a failed TCP connection to or from another host.

    A host that does not listen within ``start_s`` gets a failure, and other hosts do not try to
    reach it.
    """
    peers = {name: Peer(address) for name, address in addresses.items()}
    answers = unreached_ports(peers, lambda host, argv: to(host).converse(argv), start_s=start_s)
    causes: dict[str, list[str]] = {}
    for near, causes_by_host in answers.unreached.items():
        for far, reasons in causes_by_host.items():
            for host in (near, far):
                causes.setdefault(host, []).append(
                    f"{near} can't reach {far}: {'; '.join(reasons.values())}"
                )
    # 64 nodes that can't reach each other would have 2,016 pairs.
    for host, pairs in causes.items():
        if (more := len(pairs) - _SHOWN) > 0:
            causes[host] = [*pairs[:_SHOWN], f"and {more} more such pairs"]
    silence = (exc.on(host, "verify") for host, exc in answers.silent.items())
    return (
        *(
            replace(error, cause=f"its test of the other hosts failed: {error.cause}")
            for error in silence
        ),
        *(
            Failure("network", "; ".join(pairs), host, "verify", _DROPPED)
            for host, pairs in causes.items()
        ),
    )


def unreached_ports(
    peers: Mapping[str, Peer],
    start: StartOnHost,
    *,
    start_s: float = _START_S,
    limit: Deadline = NO_LIMIT,
) -> ConnectionResults:
    """Make all hosts in ``peers`` listen, then connect to each other. Return the ports not
    reached.
    """
    if len(peers) < 2:  # noqa: PLR2004
        return ConnectionResults({}, {})
    seconds = str(_ASK_S + _ASK_PER_NODE_S * len(peers))
    with ExitStack() as talks:

        def listen(name: str) -> _Listening:
            opened = peers[name].ports if peers[name].opens else ()
            argv = remote_argv("clusterctl.hosts.remote_pairs", seconds, json.dumps(opened))
            talk = talks.enter_context(start(name, argv))
            too_long = TransportError(
                f"the answer of {name} is too long", code="answer-too-long", host=name
            )
            output = split_lines(iter(talk.receive, b""), too_long)
            return _Listening(talk, output, tuple(_answer(talk, output)))

        def ask(name: str) -> dict[str, dict[int, str]]:
            tried = {
                other: (peers[other].address, _tried(peers[other], listener))
                for other, listener in listening.items()
                if other != name and peers[other].tried
            }
            listening[name].talk.send(json.dumps(tried).encode() + b"\n")
            answer = _answer(listening[name].talk, listening[name].output)
            return {
                other: {int(port): text for port, text in ports.items()}
                for other, ports in answer.items()
            }

        within_s = min(start_s + _ASK_PER_NODE_S * len(peers), limit.rest_s)
        # On an overloaded host, a login takes minutes. Only hosts that listen in time are tried.
        first = Deadline.within(within_s, limit.clock)
        listening, late = call_on_hosts(peers, listen, most=len(peers), limit=first)
        unreached, failed = call_on_hosts(listening, ask, most=len(peers), limit=limit)
    return ConnectionResults(unreached, {**late, **failed})


def _tried(peer: Peer, listener: _Listening) -> dict[int, bool]:
    """Return port to try -> whether the test program listens on it. If not, maybe a daemon does."""
    return {port: port in listener.ports for port in (listener.ports[0], *peer.ports)}


def _answer(talk: Conversation, output: Iterator[bytes]) -> Any:
    for line in output:
        # The account's shell may print other lines.
        with suppress(ValueError):
            return json.loads(line)
    # If the program failed, this raises its error.
    talk.finish()
    raise TransportError("the test program ended without an answer", code="ended-without-answer")


def needed_ports(spec: ClusterSpec, host: Host, *, exports: bool) -> tuple[int, ...]:
    """Return the ports of a host that other hosts need. ``exports``: the host exports the shared
    folder.
    """
    by_ssh = (host.port,) if spec.scheduler_needs.starts_by_ssh else ()
    return (*role_ports(spec, host.roles), _SRUN, *((NFS_PORT,) if exports else ()), *by_ssh)


def examine_ports(
    peers: Mapping[str, Peer],
    members: Mapping[str, str],
    facts: Mapping[str, HostFacts],
    start: StartOnHost,
    limit: Deadline = NO_LIMIT,
) -> Iterator[Finding]:
    """Make the hosts in ``peers`` connect to each other. Yield findings about ports that can't be
    reached.

    If several hosts can't reach a port of a host for the same cause, there is a single finding.
    members: host -> address, for all hosts of the cluster; the advice names them in firewall rules.
    facts: host -> its facts, such as the firewall. start: starts a command on a host.
    """
    answers = unreached_ports(peers, start, limit=limit)
    yield from untested_findings(answers.silent)
    kept_out: dict[tuple[str, str, str], list[str]] = {}
    for name, unreached_of in answers.unreached.items():
        for other, ports in unreached_of.items():
            for reason in dict.fromkeys(ports.values()):
                port_list = ", ".join(
                    str(port) for port, cause in sorted(ports.items()) if cause == reason
                )
                kept_out.setdefault((other, port_list, reason), []).append(name)
    for (host, port_list, reason), names in kept_out.items():
        firewalls = {name: facts[name].firewall for name in (host, *names)}
        yield _closed(members, firewalls, port_list, reason)


def _closed(
    members: Mapping[str, str], firewalls: Mapping[str, Firewall], ports: str, text: str
) -> Finding:
    host, *names = firewalls
    firewall = firewalls[host]
    also = "".join(
        f", on {name} {firewalls[name]}" for name in names if firewalls[name].name != NO_FIREWALL
    )
    cause = (
        f"{', '.join(names)} can't reach {members[host]}, port {ports}: {text}; "
        f"the firewall in force on {host} is {firewall}{also}"
    )
    port = ports.partition(",")[0]
    trace = (
        f"`traceroute -T -p {port} {members[host]}` on {names[0]} shows where packets are "
        "dropped; allow them"
    )
    if firewall.name == NO_FIREWALL:
        return Finding(host, "error", "network", "other hosts can't reach this host", cause, trace)
    sources = [address for name, address in members.items() if name != host]
    opening = _OPENING[firewall.name].format(spaced=" ".join(sources), listed=",".join(sources))
    title = "a firewall blocks connections between the cluster's hosts"
    return Finding(
        host, "error", "firewall", title, cause, f"{opening}; if that does not help, {trace}"
    )


def untested_findings(failed: Mapping[str, ClusterctlError]) -> Iterator[Finding]:
    title = "the host's connections to other hosts were not tested"
    fix = "run the same command again"
    for host, error in failed.items():
        # Other checks report other errors.
        if isinstance(error, TransportError):
            yield Finding(host, "warning", "not-looked-at", title, error.cause, error.fix or fix)
