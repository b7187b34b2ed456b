"""Nodes taken out of service and put back, and the machines that join or leave a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from clusterctl.errors import Failure, SchedulerError, TransportError, UsageError, WaitTimeoutError
from clusterctl.providers import registry
from clusterctl.providers.base import REPLACED, hosts_as_raised, pending_releases
from clusterctl.scheduler.base import JobInfo, Jobs, NodeInfo, Nodes, active_jobs
from clusterctl.spec.hosts import expand
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import reject_unknown
from clusterctl.spec.onprem import own_machines
from clusterctl.state.inventory import CONTROLLER, Inventory, applied_spec, inventory_of
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import Transport
from clusterctl.util.process import parallel_map
from clusterctl.util.progress import Clock

REASON: Final = "clusterctl: the cluster changes"  # of nodes that `up` drains, and resumes to verify them
BOOT_S: Final = 1800.0  # a server with eight GPUs tests its memory for many minutes
_ANSWER_S: Final = 20.0
_BOOT_ID: Final = ("cat", "/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node as the scheduler has it, and the jobs that are at work on it."""

    node: NodeInfo
    jobs: tuple[JobInfo, ...] = ()


def resume(scheduler: Nodes, names: Sequence[str]) -> tuple[NodeState, ...]:
    """Resume these nodes. Their states afterwards."""
    marked = [state.node.name for state in states(scheduler, names) if not state.node.usable]
    if marked:  # Slurm refuses to resume what is in service
        scheduler.resume(marked)
    return states(scheduler, names)


def states(scheduler: Jobs, names: Collection[str]) -> tuple[NodeState, ...]:
    active = active_jobs(scheduler)
    return tuple(
        NodeState(node, tuple(job for job in active if node.name in job.nodes))
        for node in scheduler.nodes()
        if node.name in names
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All nodes and active jobs, as they were once the nodes in ``drained`` took no new ones."""

    nodes: Mapping[str, NodeInfo]
    jobs: tuple[JobInfo, ...]
    drained: tuple[str, ...] = ()


def drain_usable(scheduler: Jobs, names: Collection[str], reason: str) -> Snapshot:
    """Drain those of these nodes that are in service, then look which jobs are at work.

    Without Slurm no node is drained. If the scheduler does not answer, none stays drained.
    """
    nodes = {node.name: node for node in scheduler.nodes()}
    if not isinstance(scheduler, Nodes):
        return Snapshot(nodes, active_jobs(scheduler))
    drained = tuple(sorted(name for name in names if name in nodes and nodes[name].usable))
    try:
        if drained:
            scheduler.drain(drained, reason)
        return Snapshot(nodes, active_jobs(scheduler), drained)
    except (SchedulerError, TransportError):
        with suppress(SchedulerError, TransportError):
            resume_drained(scheduler, drained)
        raise


def resume_drained(scheduler: Jobs, drained: Sequence[str]) -> None:
    """Resume the nodes that ``drain_usable`` has drained."""
    if drained and isinstance(scheduler, Nodes):
        scheduler.resume(drained)


def wait_idle(scheduler: Jobs, names: Sequence[str], *, timeout_s: float | None) -> Iterator[str]:
    """Wait until no job is at work on these nodes. Yield the ids of the jobs as often as they change.

    Raises:
        WaitTimeoutError: ``timeout_s`` has passed. The nodes stay as they are.
    """
    told = ""
    for _ in scheduler.clock.polls(timeout_s):
        ids = ", ".join(dict.fromkeys(job.id for state in states(scheduler, names) for job in state.jobs))
        if not ids:
            return
        if ids != told:
            yield ids
            told = ids
    raise WaitTimeoutError(
        f"jobs are still at work on {', '.join(names)}: {told}",
        fix="wait longer, or end them: `clusterctl cancel`; the nodes take no new ones",
    )


def check_drained(scheduler: Jobs, names: Sequence[str]) -> None:
    """Raise SchedulerError where a job is at work on these nodes, or could begin there."""
    if back := [s.node.name for s in states(scheduler, names) if s.node.usable or s.jobs]:
        raise SchedulerError(
            f"{', '.join(back)} takes jobs again: nothing was booted",
            code="node-resumed-meanwhile",
            why="somebody has put it back into service meanwhile",
            fix="say it again, once nobody needs it",
        )


def reboot(hosts: Mapping[str, Transport], *, timeout_s: float = BOOT_S) -> None:
    """Reboot these hosts in parallel, and wait until each of them is up again.

    Raises:
        TransportError: some did not answer, or did not come back in time; one failure a host.
    """
    back = dict(zip(hosts, parallel_map([*hosts.values()], lambda to: _boot(to, timeout_s)), strict=True))
    if failures := [Failure("reboot", why, host, "reboot") for host, why in back.items() if why]:
        fix = "look at its console; once it answers, `clusterctl up` puts it back into service"
        raise TransportError.of_hosts(
            "{hosts} did not come back", failures, code="nodes-did-not-come-back", fix=fix
        )


def _boot(host: Transport, timeout_s: float) -> str:
    """Boot one; why it is not up again, "" if it is."""
    try:
        before = host.run(_BOOT_ID, timeout_s=_ANSWER_S).stdout
    except TransportError as exc:
        return f"it was not booted: {exc.why or exc.what}"
    with suppress(TransportError):  # it may be gone before it has answered
        host.run(("sudo", "-n", "systemctl", "reboot"), check=False, timeout_s=_ANSWER_S)
    why = "it was told to, and goes on running"
    for _ in Clock().polls(timeout_s):
        host.close()
        try:
            if host.run(_BOOT_ID, timeout_s=_ANSWER_S).stdout != before:
                return ""
        except TransportError as exc:
            why = exc.why or exc.what
    return why


def check_names(inventory: Inventory, names: Sequence[str]) -> None:
    known = [host.name for host in inventory.compute]
    reject_unknown(names, known, "the cluster has no node", f"its nodes are {', '.join(known)}")


def names_of(ranges: Iterable[str]) -> tuple[str, ...]:
    """The hosts that are named, each once; a range stands for all of its hosts.

    Raises:
        UsageError: one is no range.
    """
    try:
        return tuple(dict.fromkeys(name for text in ranges for name in expand(text)))
    except ValueError as exc:
        raise UsageError(
            "that is no range of hosts", code="bad-hostlist", why=str(exc), fix="write it as gpu[01-03],gpu07"
        ) from exc


def limited(spec: ClusterSpec, workspace: Workspace, limit: Collection[str]) -> ClusterSpec:
    """Return the spec as far as it concerns these hosts; with other hosts as they are in the cluster now.

    Raises:
        UsageError: the spec has no such host, or its hosts are no machines of the user's own.
    """
    provider = own_machines(spec.provider)
    named = {p.name: spec.node_names(p) for p in spec.partitions}
    known = (*provider.machines, *itertools.chain(*named.values()))
    hint = "name it under provider.hosts, and in a partition"
    reject_unknown(limit, known, "the spec has no host", hint, where="--limit")
    there: dict[str, str | None] = {}
    if workspace.inventory.exists():
        there = {host.name: host.partition for host in inventory_of(workspace).compute}
        was = applied_spec(workspace).provider.machines  # the spec may no longer name some that stay
        gone = {name: was[name] for name in there if name in was and name not in provider.machines}
        provider = provider.model_copy(update={"hosts": {**provider.hosts, **gone}})
    elif provider.controller not in limit:
        raise UsageError(
            f"the controller, {provider.controller}, comes first",
            code="controller-first",
            where="--limit",
            why="nothing of the cluster is up yet",
            fix=f"name it, too: --limit {provider.controller},{','.join(limit)}",
        )
    nodes = {}
    for partition, names in named.items():
        stay = [name for name, was in there.items() if was == partition and name not in (*limit, *names)]
        nodes[partition] = [name for name in names if name in limit or there.get(name) == partition] + stay
    return _with(spec.model_copy(update={"provider": provider}), nodes)


def spec_without(spec: ClusterSpec, names: Collection[str]) -> ClusterSpec:
    """The spec without these nodes.

    Raises:
        UsageError: one leads the cluster, or none would be left.
    """
    provider = own_machines(spec.provider)
    if provider.controller in names:
        raise UsageError(
            f"{provider.controller} is the controller: it can't be removed",
            code="controller-not-removable",
            fix="take the cluster down, and create it with another controller",
        )
    left = {p.name: [n for n in spec.node_names(p) if n not in names] for p in spec.partitions}
    fewer = tuple(name for name in provider.login if name not in names)
    return _with(spec.model_copy(update={"provider": provider.model_copy(update={"login": fewer})}), left)


@contextmanager
def replacing(workspace: Workspace, names: Collection[str]) -> Iterator[None]:
    """Let other machines have these names. The former machines get a pending release.

    If the body fails, everything is as it was before.
    """
    former = [host for host in hosts_as_raised(workspace).values() if host.name in names]
    if not former:
        yield
        return
    inventory, spec = inventory_of(workspace), applied_spec(workspace)
    files = (workspace.inventory, workspace.joining, workspace.trusted_hosts, workspace.known_hosts)
    before = {path: path.read_bytes() for path in files if path.exists()}
    releases = [registry.record_pending(host, inventory, spec, workspace, why=REPLACED) for host in former]
    _forget_hosts(workspace, names)
    try:
        yield
    except BaseException:
        for path, content in before.items():
            write_atomic(path, content)
        for release in releases:
            release.remove()
        raise


def forget(workspace: Workspace, names: Collection[str]) -> tuple[str, ...]:
    """Forget machines that are gone for good: pending releases, or hosts of a cluster that is taken down.

    Of a name that both have, the pending release is forgotten. Returns the machines in words.
    """
    if not names:
        return ()
    left = pending_releases(workspace)
    members = hosts_as_raised(workspace)
    known = {*members, *(one.host.name for one in left)}
    if workspace.spec.exists():
        known |= set(applied_spec(workspace).provider.machines)  # the same command may come again
    reject_unknown(names, known, "nothing is known of a machine")
    behind = [one for one in left if one.host.name in names]
    others = [name for name in names if name not in {one.host.name for one in behind}]
    if others:
        _forget_hosts(workspace, others)
    said = []
    for one in behind:
        one.remove()
        stays = " (the host that has its name now stays)" if one.host.name in members else ""
        said.append(f"{one.title}, pending release{stays}")
    return (*said, *(f"{name}, of the cluster" for name in others))


def check_pending_release(workspace: Workspace, names: Iterable[str]) -> None:
    left = {one.host.name for one in pending_releases(workspace)}
    fix = (
        f"those are: {', '.join(sorted(left)) or 'none'}; one of the cluster leaves it by "
        "`clusterctl node remove`, or `clusterctl down --forget`"
    )
    reject_unknown(names, left, "there is no machine with a pending release", fix)


def _forget_hosts(workspace: Workspace, names: Collection[str]) -> None:
    """Remove these hosts and their keys from the records."""
    for path in (workspace.inventory, workspace.joining):
        try:
            inventory = Inventory.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            continue
        hosts = [host for host in inventory.hosts if host.name not in names]
        if not hosts:
            path.unlink()
            continue
        if not any(host.is_controller for host in hosts):  # somebody has to, also on the way down
            hosts[0] = hosts[0].model_copy(update={"roles": (CONTROLLER, *hosts[0].roles)})
        inventory = inventory.model_copy(update={"hosts": tuple(hosts)})
        write_atomic(path, inventory.model_dump_json(indent=2) + "\n")
    for file in (workspace.trusted_hosts, workspace.known_hosts):
        if file.exists():
            lines = file.read_text().splitlines(keepends=True)
            write_atomic(file, "".join(line for line in lines if line.partition(" ")[0] not in names))


def _with(spec: ClusterSpec, nodes: dict[str, list[str]]) -> ClusterSpec:
    """The spec with these nodes in its partitions; one without any goes."""
    partitions = tuple(
        p.model_copy(update={"hosts": ",".join(nodes[p.name]), "nodes": len(nodes[p.name])})
        for p in spec.partitions
        if nodes[p.name]
    )
    if not partitions:
        fix = "name a host of a partition, too, or take the whole cluster down: `clusterctl down`"
        raise UsageError("the cluster would have no node", code="no-node-left", fix=fix)
    return spec.model_copy(update={"partitions": partitions})
