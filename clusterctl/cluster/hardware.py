"""What came or went of the hosts' hardware since they were configured: cards, CPUs, memory.

Slurm ends the jobs of a node whose GPUs or CPUs change in number. A node at work is left as it was told of,
and taken up once its jobs have ended; so is one that is not to be touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from clusterctl.hosts.gpus import Driver
from clusterctl.hosts.report import HostReport, NodeFacts
from clusterctl.scheduler.models import NodeInfo
from clusterctl.scheduler.slurm.config import gres, promised_mib
from clusterctl.spec import ClusterSpec
from clusterctl.spec.units import format_size
from clusterctl.state.inventory import Inventory

_SAME_MEMORY: Final = 0.01  # the kernel's figure moves by some MiB from boot to boot
_NEAR: Final = re.compile(r"\([^)]*\)")

Views = Mapping[str, HostReport]
AtWork = Callable[[Collection[str]], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a node is configured for.

    ``facts`` is None where the inventory says its size. ``cards`` are those on the PCI bus, where something
    is installed for them.
    """

    facts: NodeFacts | None = None
    driver: Driver = field(default_factory=Driver)
    cards: int = 0


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The nodes as they are to be configured: ``views`` are what they show, but for those that wait.

    ``changes`` says in words what came or went of a host beside what is ``noted`` of it, ``waiting`` why a
    host must wait for it.
    """

    views: Views
    changes: Mapping[str, str] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    noted: Mapping[str, Hardware] = field(default_factory=dict)

    @property
    def unchanged(self) -> Views:
        """The views as if none of the hardware had changed."""
        return as_noted(self.views, self.noted, self.changes)

    @property
    def taken_up(self) -> dict[str, str]:
        """The changes that are made now."""
        return {host: words for host, words in self.changes.items() if host not in self.waiting}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of those that wait."""
        return tuple(f"{host}: {self.changes[host]}: {why}" for host, why in self.waiting.items())


def hardware(spec: ClusterSpec, inventory: Inventory, views: Views) -> dict[str, Hardware]:
    """Node -> what it is configured for."""
    counted = spec.software.nvidia.installs
    return {
        host.name: Hardware(
            replace(view.facts, mpi=()) if view.facts and host.cpus is None and inventory.has_slurm else None,
            replace(view.driver, fault=""),
            view.cards if counted else 0,
        )
        for host in inventory.compute
        if (view := views.get(host.name))
    }


def node_config(
    spec: ClusterSpec,
    inventory: Inventory,
    views: Views,
    noted: Mapping[str, Hardware],
    at_work: AtWork,
    *,
    limit: Collection[str] = (),
) -> NodeConfig:
    """How the nodes are to be configured, beside what was noted of them; with a ``limit`` others wait.

    ``at_work`` says of such nodes which must wait for jobs, and why; it is asked only where Slurm would end
    them.
    """
    views = steady(views, noted)
    now = hardware(spec, inventory, views)
    changes = {
        host: "; ".join(_words(noted[host], has)) or "its GPUs are connected otherwise"
        for host, has in now.items()
        if host in noted and has != noted[host]
    }
    if not changes:
        return NodeConfig(views)
    # Cards on the bus whose driver fails have not gone: the node keeps its GPUs until it answers again.
    mute = [host for host in changes if _is_mute(views[host]) and noted[host].driver.cards]
    changes |= dict.fromkeys(mute, "its driver does not answer")
    waiting = {host: f"it stays as it was; nvidia-smi says: {views[host].driver.fault}" for host in mute}
    beyond = [host for host in changes if limit and host not in limit]
    waiting |= dict.fromkeys(beyond, "it is left as it was")
    ending = {host for host in changes if host not in waiting and _ends_jobs(noted[host], now[host])}
    if ending and inventory.has_slurm:
        waiting |= at_work(ending)
    return NodeConfig(as_noted(views, noted, waiting), changes, waiting, noted)


def as_registered(
    noted: Mapping[str, Hardware], tried: Mapping[str, Hardware], nodes: Iterable[NodeInfo]
) -> dict[str, Hardware]:
    """What was noted, but where Slurm has what an `up` that did not end tried: there jobs may hold that."""
    found = dict(noted)
    for node in nodes:
        had, has = noted.get(node.name), tried.get(node.name)
        if has and _is_registered(has, node) and not (had and _is_registered(had, node)):
            found[node.name] = has
    return found


def steady(views: Views, noted: Mapping[str, Hardware]) -> Views:
    """The views, with memory as it was noted where it is the same but for what the kernel takes."""
    return {host: _steady(view, noted.get(host, Hardware())) for host, view in views.items()}


def as_noted(views: Views, noted: Mapping[str, Hardware], hosts: Collection[str]) -> Views:
    """The views, with the hardware of these hosts as it was noted."""
    return {**views, **{host: _as_noted(views[host], noted[host]) for host in hosts}}


def _is_registered(has: Hardware, node: NodeInfo) -> bool:
    """Whether Slurm gives jobs this of the node. It adds to GPUs which sockets they are near."""
    if _NEAR.sub("", node.gres) != gres(has.driver.gpus):
        return False
    told = (node.cpus, node.memory_mib)
    return has.facts is None or told == (has.facts.cpus, promised_mib(has.facts))


def _is_mute(view: HostReport) -> bool:
    """Whether there are cards, and a driver that does not tell of them."""
    return bool(view.driver.fault and view.cards)


def _steady(view: HostReport, had: Hardware) -> HostReport:
    if view.facts is None or had.facts is None:
        return view
    memory_mib = had.facts.memory_mib
    same = abs(view.facts.memory_mib - memory_mib) <= _SAME_MEMORY * memory_mib
    return replace(view, facts=replace(view.facts, memory_mib=memory_mib)) if same else view


def _as_noted(view: HostReport, had: Hardware) -> HostReport:
    facts = replace(had.facts, mpi=view.facts.mpi) if had.facts and view.facts else had.facts
    facts = facts or (view.facts and replace(view.facts, gpus=had.driver.gpus))
    return replace(view, facts=facts, driver=had.driver, cards=had.cards)


def _ends_jobs(had: Hardware, has: Hardware) -> bool:
    """Whether Slurm would end jobs there, or could not keep what they were given."""
    if gres(had.driver.gpus) != gres(has.driver.gpus):
        return True
    if had.facts is None or has.facts is None:
        return False
    return _cores(had.facts) != _cores(has.facts) or has.facts.memory_mib < had.facts.memory_mib


def _words(had: Hardware, has: Hardware) -> Iterator[str]:
    """What came or went."""
    before, after = gres(had.driver.gpus), gres(has.driver.gpus)
    shown = has.driver.cards - had.driver.cards
    cards = _counted(shown or has.cards - had.cards)
    if before != after:
        yield f"{cards or 'other GPUs'}: gres {after or 'none'} (was {before or 'none'})"
    elif cards:
        yield f"{cards}, {'which no driver shows yet' if not shown else 'none of them for jobs'}"
    if had.facts and has.facts:
        if had.facts.cpus != has.facts.cpus:
            yield f"{has.facts.cpus} CPUs (was {had.facts.cpus})"
        elif _cores(had.facts) != _cores(has.facts):
            yield "its CPUs are counted otherwise"
        if had.facts.memory_mib != has.facts.memory_mib:
            yield f"{format_size(has.facts.memory_mib)} of memory (was {format_size(had.facts.memory_mib)})"


def _counted(more: int) -> str:
    """``1 card more``, ``2 cards fewer``."""
    if not more:
        return ""
    return f"{abs(more)} card{'s' if abs(more) > 1 else ''} {'more' if more > 0 else 'fewer'}"


def _cores(facts: NodeFacts) -> tuple[int, ...]:
    return (facts.cpus, facts.boards, facts.sockets, facts.cores_per_socket, facts.threads_per_core)
