"""Which hosts TCP does not join with each other: each connects to all others, once all of them listen."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from clusterctl.errors import ClusterctlError, Failure, TransportError
from clusterctl.state.inventory import Inventory
from clusterctl.transport.base import Connect, Conversation, lines, remote_argv
from clusterctl.util.process import on_each
from clusterctl.util.progress import Limit

_START_S = 20.0  # for a program to begin to listen
_ASK_S = 6.0  # for which the others are tried
_ASK_PER_NODE_S = 0.1
_SHOWN = 3  # pairs in the failure of one host
_OVERLOAD = 8  # processes that wait for each CPU
_DROPPED = "see their load, and what drops their traffic: firewalls, routes, cables"


def unconnected(
    inventory: Inventory, hosts: Sequence[str], to: Connect, *, start_s: float = _START_S
) -> tuple[Failure, ...]:
    """The hosts that TCP does not join with each other, one failure each; none when all reach all.

    Those that do not listen for the others after ``start_s`` are at fault alone: nothing refuses connections.
    """
    unreached, silent = _unreached(inventory, hosts, to, start_s) if len(hosts) > 1 else ({}, {})
    causes: dict[str, list[str]] = {}
    for one, other in itertools.combinations(hosts, 2):
        there, back = unreached.get(one, {}).get(other), unreached.get(other, {}).get(one)
        if there and back:
            cause = f"{one} and {other} can't reach each other: {one}: {there}; {other}: {back}"
        elif there or back:
            near, far = (one, other) if there else (other, one)
            cause = f"{near} can't reach {far}: {there or back}"
        else:
            continue
        for host in (one, other):
            causes.setdefault(host, []).append(cause)
    for host, said in causes.items():  # of 64 nodes that reach none, there would be 2,016 pairs
        if (more := len(said) - _SHOWN) > 0:
            causes[host] = [*said[:_SHOWN], f"and {more} more such pairs"]
    silence = (exc.on(host, "verify") for host, exc in silent.items())
    return (
        *(replace(one, cause=f"it was asked which hosts it reaches: {one.cause}") for one in silence),
        *(Failure("network", "; ".join(said), host, "verify", _DROPPED) for host, said in causes.items()),
    )


def _unreached(
    inventory: Inventory, hosts: Sequence[str], to: Connect, start_s: float
) -> tuple[dict[str, dict[str, str]], dict[str, ClusterctlError]]:
    """Node -> the others that it did not reach while they listened, and why; and those that say nothing."""
    seconds = _ASK_S + _ASK_PER_NODE_S * len(hosts)
    argv = remote_argv("clusterctl.cluster.remote_pairs", str(seconds))
    addresses = {host.name: host.address for host in inventory.hosts}
    with ExitStack() as talks:

        def listen(name: str) -> tuple[Conversation, Iterator[bytes], Any]:
            talk = talks.enter_context(to(name).converse(argv))
            said = lines(
                iter(talk.receive, b""),
                TransportError(f"{name} says too much", code="answer-too-long", host=name),
            )
            return talk, said, _answer(talk, said)

        def ask(name: str) -> dict[str, str]:
            talk, said, _ = listening[name]
            peers = {other: (addresses[other], one[0]) for other, (*_, one) in listening.items()}
            del peers[name]
            talk.send(json.dumps(peers).encode() + b"\n")
            return {to: why + _overload(*listening[to][2]) for to, why in _answer(talk, said).items()}

        limit = Limit.within(start_s + _ASK_PER_NODE_S * len(hosts))
        # Under a load of hundreds a login takes minutes: only who listens by then is connected to.
        listening, late = on_each(hosts, listen, most=len(hosts), limit=limit)
        answers, failed = on_each(listening, ask, most=len(hosts))
    return answers, {**late, **failed}


def _answer(talk: Conversation, said: Iterator[bytes]) -> Any:
    for line in said:
        with suppress(ValueError):  # the account's shell may say more
            return json.loads(line)
    talk.finish()  # raises why it has ended
    raise TransportError("it has ended without an answer", code="ended-without-answer")


def _overload(_: int, load: float, cpus: int) -> str:
    return f" (its load is {load:.0f} on {cpus} CPUs)" if load > _OVERLOAD * cpus else ""
