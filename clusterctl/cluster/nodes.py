"""Draining, resuming and rebooting nodes, and adding or removing machines of a cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from clusterctl.errors import (
    Failure,
    SchedulerError,
    TransportError,
    UsageError,
    WaitTimeoutError,
)
from clusterctl.providers.base import REPLACED, load_known_hosts, pending_releases
from clusterctl.providers.registry import provider_of
from clusterctl.scheduler.admin import active_jobs
from clusterctl.scheduler.base import JobInfo, Jobs, NodeInfo, Nodes
from clusterctl.spec.hosts import expand
from clusterctl.spec.names import reject_unknown
from clusterctl.state.inventory import (
    CONTROLLER,
    Inventory,
    applied_spec,
    inventory_of,
)
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import Transport
from clusterctl.util.process import parallel_map
from clusterctl.util.progress import Clock

# Slurm's reason for nodes that `up` drains. Verification resumes them.
REASON: Final = "clusterctl: the cluster changes"
# A server with eight GPUs tests its memory for many minutes before it boots.
BOOT_S: Final = 1800.0
_ANSWER_S: Final = 20.0
_BOOT_ID: Final = ("cat", "/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class NodeState:
    node: NodeInfo
    jobs: tuple[JobInfo, ...] = ()


def resume(scheduler: Nodes, names: Sequence[str]) -> tuple[NodeState, ...]:
    """Resume these nodes. Return their states afterwards."""
    out_of_service = [
        state.node.name for state in states(scheduler, names) if not state.node.usable
    ]
    # Slurm refuses to resume nodes that are in service.
    if out_of_service:
        scheduler.resume(out_of_service)
    return states(scheduler, names)


def states(scheduler: Jobs, names: Collection[str]) -> tuple[NodeState, ...]:
    """Return the states of these nodes, with their active jobs."""
    active = active_jobs(scheduler)
    return tuple(
        NodeState(node, tuple(job for job in active if node.name in job.nodes))
        for node in scheduler.nodes()
        if node.name in names
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All nodes and active jobs. The jobs were read after the nodes in ``drained`` were drained."""

    nodes: Mapping[str, NodeInfo]
    jobs: tuple[JobInfo, ...]
    drained: tuple[str, ...] = ()


def drain_usable(scheduler: Nodes, names: Collection[str], reason: str) -> Snapshot:
    """Drain the nodes in ``names`` that are in service. Return all nodes and active jobs.

    Without Slurm no node is drained. After an error, resume the nodes.
    """
    nodes = {node.name: node for node in scheduler.nodes()}
    usable = tuple(sorted(name for name in names if name in nodes and nodes[name].usable))
    with resuming(scheduler, usable):
        drained = scheduler.drain(usable, reason) if usable else ()
        return Snapshot(nodes, active_jobs(scheduler), drained)


@contextmanager
def resuming(scheduler: Nodes, drained: Sequence[str]) -> Iterator[None]:
    """Resume nodes that were drained by ``drain_usable`` if the block fails or is interrupted."""
    try:
        yield
    except BaseException:
        if drained:
            with suppress(SchedulerError, TransportError):
                scheduler.resume(drained)
        raise


def wait_idle(scheduler: Jobs, names: Sequence[str], *, timeout_s: float | None) -> Iterator[str]:
    """Wait until no job runs on these nodes. Yield the running jobs' ids each time they change.

    Raise WaitTimeoutError if jobs still run after ``timeout_s`` seconds. The nodes stay drained.
    """
    reported_ids = ""
    for _ in scheduler.clock.polls(timeout_s):
        ids = ", ".join(
            dict.fromkeys(job.id for state in states(scheduler, names) for job in state.jobs)
        )
        if not ids:
            return
        if ids != reported_ids:
            yield ids
            reported_ids = ids
    raise WaitTimeoutError(
        f"jobs are still running on {', '.join(names)}: {reported_ids}",
        fix="wait longer, or cancel the jobs with `clusterctl cancel ID`",
    )


def check_drained(scheduler: Jobs, names: Sequence[str]) -> None:
    """Raise SchedulerError if a job runs on these nodes, or could start there."""
    if usable := [s.node.name for s in states(scheduler, names) if s.node.usable or s.jobs]:
        raise SchedulerError(
            f"no node was rebooted: jobs can start or run again on {', '.join(usable)}",
            code="in-use",
            about="node",
            why="the nodes were resumed while clusterctl waited for their jobs to end",
            fix=f"run the command again: `clusterctl node reboot {','.join(names)}`",
        )


def reboot(hosts: Mapping[str, Transport], *, timeout_s: float = BOOT_S) -> None:
    """Reboot hosts in parallel, and wait until they are up again, each at most ``timeout_s``.

    Raise TransportError, with a failure for each host that did not answer or did not come back.
    """
    reasons = dict(
        zip(hosts, parallel_map([*hosts.values()], lambda h: _reboot(h, timeout_s)), strict=True)
    )
    if failures := [
        Failure("not-ready", reason, host, "reboot", about="reboot")
        for host, reason in reasons.items()
        if reason
    ]:
        fix = (
            "check the host's console; when the host answers again, `clusterctl up` resumes the "
            "node"
        )
        raise TransportError.of_hosts(
            "{hosts} did not come back after the reboot",
            failures,
            about="rebooted-node",
            fix=fix,
        )


def _reboot(host: Transport, timeout_s: float) -> str:
    """Reboot a host, and wait until it is up again. Return "", or the reason for a failure."""
    try:
        boot_id = host.run(_BOOT_ID, timeout_s=_ANSWER_S).stdout
    except TransportError as exc:
        return f"the host was not rebooted: {exc.why or exc.what}"
    # The host may close the connection before the command has returned.
    with suppress(TransportError):
        host.run(("sudo", "-n", "systemctl", "reboot"), check=False, timeout_s=_ANSWER_S)
    reason = "the host accepted the reboot command, but keeps running"
    for _ in Clock().polls(timeout_s):
        host.close()
        try:
            if host.run(_BOOT_ID, timeout_s=_ANSWER_S).stdout != boot_id:
                return ""
        except TransportError as exc:
            reason = exc.why or exc.what
    return reason


def check_names(inventory: Inventory, names: Sequence[str]) -> None:
    node_names = [host.name for host in inventory.compute]
    reject_unknown(
        names, node_names, "the cluster has no node", f"its nodes are {', '.join(node_names)}"
    )


def expand_hosts(ranges: Iterable[str]) -> tuple[str, ...]:
    """Expand ranges such as gpu[01-03] to host names without duplicates. UsageError: bad range."""
    try:
        return tuple(dict.fromkeys(name for text in ranges for name in expand(text)))
    except ValueError as exc:
        raise UsageError(
            "invalid host range",
            about="hostlist",
            why=str(exc),
            fix="use the form gpu[01-03],gpu07",
        ) from exc


@contextmanager
def replacing(workspace: Workspace, names: Collection[str]) -> Iterator[None]:
    """Record that these host names belong to new machines, and the old ones are to be released.

    If the `with` block raises, undo these changes of the records.
    """
    former = [host for host in load_known_hosts(workspace).values() if host.name in names]
    if not former:
        yield
        return
    inventory = inventory_of(workspace)
    provider = provider_of(applied_spec(workspace).provider)
    files = (workspace.inventory, workspace.joining, workspace.known_hosts)
    contents = {path: path.read_bytes() for path in files if path.exists()}
    releases = [
        provider.record_pending(host, inventory, workspace, why=REPLACED) for host in former
    ]
    _forget_hosts(workspace, names)
    try:
        yield
    except BaseException:
        for path, content in contents.items():
            write_atomic(path, content)
        for release in releases:
            release.remove()
        raise


def forget_machines(workspace: Workspace, names: Collection[str]) -> tuple[str, ...]:
    """Remove lost machines from the record of machines to release, or of the cluster's hosts.

    If both records have a name, remove it only from the machines to release. Return a line per
    removal.
    """
    if not names:
        return ()
    releases = pending_releases(workspace)
    members = load_known_hosts(workspace)
    known_names = {*members, *(release.host.name for release in releases)}
    if workspace.spec.exists():
        # The user may repeat a command that has already removed the machine.
        known_names |= set(applied_spec(workspace).provider.machines)
    reject_unknown(names, known_names, "there is no record of a machine")
    matching = [release for release in releases if release.host.name in names]
    leaving = members_among(workspace, names)
    if leaving:
        _forget_hosts(workspace, leaving)
    forgotten = []
    for release in matching:
        release.remove()
        remark = " (the host that now has this name stays)" if release.host.name in members else ""
        forgotten.append(f"{release.title}, pending release{remark}")
    return (*forgotten, *(f"{name}, host of the cluster" for name in leaving))


def members_among(workspace: Workspace, names: Iterable[str]) -> Sequence[str]:
    """Return the names of lost machines that ``forget_machines`` takes for hosts of the cluster."""
    pending = {release.host.name for release in pending_releases(workspace)}
    return [name for name in names if name not in pending]


def check_pending_release(workspace: Workspace, names: Iterable[str]) -> None:
    released_names = {release.host.name for release in pending_releases(workspace)}
    fix = (
        f"machines with a pending release: {', '.join(sorted(released_names)) or 'none'}; remove "
        "a machine from the cluster with `clusterctl node remove HOST` or `clusterctl down --forget HOST`"
    )
    reject_unknown(names, released_names, "there is no machine with a pending release", fix)


def _forget_hosts(workspace: Workspace, names: Collection[str]) -> None:
    for path in (workspace.inventory, workspace.joining):
        try:
            inventory = Inventory.read(path.read_bytes())
        except (FileNotFoundError, ValueError):
            continue
        hosts = [host for host in inventory.hosts if host.name not in names]
        if not hosts:
            path.unlink()
            continue
        # An inventory needs a controller, even during `down`.
        if not any(host.is_controller for host in hosts):
            hosts[0] = replace(hosts[0], roles=(CONTROLLER, *hosts[0].roles))
        inventory = replace(inventory, hosts=tuple(hosts))
        write_atomic(path, inventory.text)
    file = workspace.known_hosts
    if file.exists():
        lines = file.read_text().splitlines(keepends=True)
        write_atomic(file, "".join(line for line in lines if line.partition(" ")[0] not in names))
