"""Why a proof job failed: whether the nodes reach each other at all, then which node fails by itself."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clusterctl.errors import Failure, TransportError
from clusterctl.state.inventory import Inventory
from clusterctl.transport.base import Transport

_PROGRAM = (Path(__file__).parent / "remote_pairs.py").read_text(encoding="utf-8")
_PORTS = range(40_000, 60_000)
_LISTEN_S = 6.0
_LISTEN_PER_NODE_S = 0.1
_AT_ONCE = 32
_SHOWN = 3  # pairs in the failure of one host

Connect = Callable[[str], Transport]
Unreached = Mapping[str, Mapping[str, str]]  # node -> the ones it did not reach, and why


def cut_off(inventory: Inventory, hosts: Sequence[str], to: Connect) -> tuple[Failure, ...]:
    """The hosts that TCP does not join with each other, one failure each; none when all reach all."""
    unreached = _unreached(inventory, hosts, to) if len(hosts) > 1 else {}
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
    fix = "see what drops their traffic: firewalls, routes, cables"
    return tuple(Failure("network", _some(said), host, "verify", fix) for host, said in causes.items())


def _some(causes: Sequence[str]) -> str:
    """Enough of them to go on with: of 64 nodes that reach none, there would be 2,016."""
    more = len(causes) - _SHOWN
    return "; ".join(causes[:_SHOWN]) + (f"; and {more} more such pairs" if more > 0 else "")


def each_alone(hosts: Sequence[str], alone: Callable[[str], str | None]) -> tuple[Failure, ...]:
    """The hosts on which even a job of their own fails. ``alone`` runs it and returns its complaint."""
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(hosts))) as pool:
        said = list(pool.map(alone, hosts))
    return tuple(
        Failure("verify", cause, host, "verify") for host, cause in zip(hosts, said, strict=True) if cause
    )


def _unreached(inventory: Inventory, hosts: Sequence[str], to: Connect) -> Unreached:
    port = random.choice(_PORTS)  # noqa: S311
    seconds = _LISTEN_S + _LISTEN_PER_NODE_S * len(hosts)
    addresses = {host.name: host.address for host in inventory.hosts if host.name in hosts}

    def ask(name: str) -> Mapping[str, str]:
        peers = {other: address for other, address in addresses.items() if other != name}
        request = json.dumps({"port": port, "seconds": seconds, "peers": peers})
        argv = ["/usr/bin/python3", "-I", "-S", "-c", _PROGRAM, request]
        try:
            return dict(json.loads(to(name).run(argv, timeout_s=seconds + 30).stdout))
        except (TransportError, ValueError):  # what it can't say, the others see
            return {}

    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        return dict(zip(hosts, pool.map(ask, hosts), strict=True))
