"""The commands node drain, resume, reboot, add, remove, replace and forget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from clusterctl.cli.options import argument, flag, option, takes
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import NoWait, Yes, for_operators
from clusterctl.cli.up import Discard, bring_up, show_changes
from clusterctl.cli.waiting import timeout_of
from clusterctl.cluster import nodes
from clusterctl.cluster.nodes import NodeState
from clusterctl.errors import UsageError
from clusterctl.providers.registry import provider_of
from clusterctl.scheduler.admin import scheduler_of
from clusterctl.scheduler.base import Jobs, Nodes
from clusterctl.spec.hosts import is_this_machine
from clusterctl.state.chosen import naming_lock_holder
from clusterctl.state.chosen_spec import spec_of_existing
from clusterctl.state.inventory import Inventory, applied_spec, inventory_of
from clusterctl.state.workspace import WAIT_S, Workspace
from clusterctl.transport.base import Connect
from clusterctl.transport.ssh import Connections

Names = Annotated[
    list[str], argument("Node names, or host lists such as gpu[01-04].", metavar="NODE...")
]
Reason = Annotated[
    str, option("The reason, which sinfo and `status` show.", "--reason", metavar="TEXT")
]
_REASON_REBOOT = "clusterctl: is to be booted"
# The options of commands that add machines to the cluster.
_JOINING = {
    "yes": Yes,
    "no_wait": NoWait,
}


@for_operators
def drain(
    screen: Screen,
    names: Names,
    reason: Reason,
    wait: Annotated[bool, option("Wait until no job runs on the nodes.")] = False,
    timeout: Annotated[
        str | None, option("With --wait: give up after this time.", metavar="TIME")
    ] = None,
) -> None:
    """Drain nodes: no new jobs start, running jobs continue. `up` does not resume drained nodes."""
    if not reason.strip():
        raise UsageError(
            "--reason is empty",
            about="reason",
            fix="write a reason for other users",
        )
    with _cluster(screen) as (inventory, scheduler):
        chosen = _chosen(inventory, names)
        scheduler.drain(chosen, reason)
        states = nodes.states(scheduler, chosen)
        if wait:
            states = _wait_idle(screen, scheduler, chosen, timeout_of(timeout))
    _show(screen, states)


@for_operators
def resume(screen: Screen, names: Names) -> None:
    """Resume nodes, so that jobs can start on them again."""
    with _cluster(screen) as (inventory, scheduler):
        states = nodes.resume(scheduler, _chosen(inventory, names))
    _show(screen, states)


@for_operators
@takes(_JOINING)
def add(screen: Screen, names: Names, **options: Any) -> int:
    """Add machines of the spec to the running cluster.

    Only the new nodes are configured; all other nodes learn their addresses. Running jobs continue.
    """
    spec = spec_of_existing(screen.chosen())
    provider_of(spec.provider).check_single_hosts()
    inventory = inventory_of(Workspace.of(spec.name))
    chosen = nodes.expand_hosts(names)
    if present := [name for name in chosen if inventory.host(name)]:
        fix = (
            f"to repair: `clusterctl up --limit {','.join(present)}`; to replace: `clusterctl "
            f"node replace {' '.join(present)}`"
        )
        message = f"these hosts are already in the cluster: {', '.join(present)}"
        raise UsageError(message, code="exists", about="host", fix=fix)
    return bring_up(screen, spec, limit=chosen, **options)


@for_operators
@takes(
    {
        "discard": Discard,
        "yes": Yes,
        "no_wait": NoWait,
        "dry_run": flag(
            bool,
            "Show what would change, or why it would be refused. Change nothing.",
            "--dry-run",
        ),
    }
)
def remove(screen: Screen, names: Names, *, dry_run: bool = False, **options: Any) -> int:
    """Remove nodes from the cluster and release the machines. Other nodes and their jobs are not
    affected.
    """
    workspace = screen.chosen().workspace()
    inventory = inventory_of(workspace)
    spec = applied_spec(workspace)
    provider = provider_of(spec.provider)
    provider.check_single_hosts()
    chosen = _chosen(inventory, names)
    fewer = provider.without(spec, chosen)
    options["limit"] = (inventory.controller.name, *chosen)
    if dry_run:
        return show_changes(screen, fewer, **options)
    code = bring_up(screen, fewer, **options)
    screen.note(
        f"also remove {', '.join(chosen)} from your spec file, or the next `up` adds them again"
    )
    return code


@for_operators
@takes({"discard": Discard, **_JOINING})
def replace(screen: Screen, names: Names, **options: Any) -> int:
    """Replace the machines of nodes; the node names stay.

    Local nodes are recreated, and the data on their disks is lost. For your own machines you
    confirm the new host keys; the old machines are released, at once or when they answer again.
    """
    spec = spec_of_existing(screen.chosen())
    workspace = Workspace.of(spec.name)
    provider = provider_of(spec.provider)
    provider.check_replacement()
    inventory = inventory_of(workspace)
    chosen = nodes.expand_hosts(names)
    if provider.recreates_hosts:
        nodes.check_names(inventory, chosen)
        # Other changes in the spec file are not applied.
        return bring_up(screen, applied_spec(workspace), replaced=chosen, **options)
    # After an unfinished replacement, a node may be missing in the inventory.
    present = tuple(name for name in chosen if inventory.host(name))
    nodes.check_names(inventory, present)
    return bring_up(screen, spec, limit=chosen, replaced=present, **options)


@for_operators
def forget(screen: Screen, names: Names, yes: Yes = False, no_wait: NoWait = False) -> None:
    """Forget removed nodes that could not be released and no longer exist."""
    workspace = screen.chosen().workspace()
    chosen = nodes.expand_hosts(names)
    nodes.check_pending_release(workspace, chosen)
    screen.confirm(f"forget {', '.join(chosen)}? clusterctl's software stays on them", yes=yes)
    with workspace.lock("node forget", wait_s=0 if no_wait else WAIT_S, waiting=screen.note):
        nodes.check_pending_release(workspace, chosen)
        forgotten = nodes.forget_machines(workspace, chosen)
    screen.result({"forgotten": chosen}, f"forgotten: {'; '.join(forgotten)}")


@for_operators
def reboot(
    screen: Screen,
    names: Names,
    timeout: Annotated[
        str | None,
        option(
            "Give up, and reboot nothing, if jobs are still running after this time.",
            metavar="TIME",
        ),
    ] = None,
    no_wait: NoWait = False,
) -> int:
    """Reboot nodes once idle: drain them, wait for running jobs, then reboot.

    After its reboot a node is configured, verified and resumed. A node that was already drained
    stays drained.
    """
    workspace = screen.chosen().workspace()
    timeout_s = timeout_of(timeout)
    with naming_lock_holder(workspace):
        inventory = inventory_of(workspace)
    chosen = _chosen(inventory, names)
    _refuse_reboot(inventory, chosen)
    # The lock keeps another `up` from resuming the nodes.
    with (
        workspace.lock("node reboot", wait_s=0 if no_wait else WAIT_S, waiting=screen.note),
        Connections(workspace.ssh_config) as connections,
    ):
        # The inventory may have changed during the wait for the lock.
        inventory = inventory_of(workspace)
        nodes.check_names(inventory, chosen)
        scheduler = _operator(inventory, connections.to)
        nodes.drain_usable(scheduler, chosen, _REASON_REBOOT)
        _wait_idle(screen, scheduler, chosen, timeout_s)
        nodes.check_drained(scheduler, chosen)
        screen.note(f"rebooting {', '.join(chosen)}")
        nodes.reboot({name: connections.to(name) for name in chosen})
        spec = applied_spec(workspace)
    # `up` recognizes the reason of the drain, and resumes the nodes once they are configured.
    limit = chosen if provider_of(spec.provider).takes_single_hosts else None
    return bring_up(screen, spec, limit=limit, yes=True, no_wait=no_wait)


def _refuse_reboot(inventory: Inventory, names: Sequence[str]) -> None:
    """Raise UsageError for nodes that can't be rebooted: local nodes, and clusterctl's machine."""
    if inventory.traits.shares_kernel:
        raise UsageError(
            "local nodes can't be rebooted, because they share this machine's kernel",
            code="unsupported",
            about="reboot",
            fix="repair them with `clusterctl up`; `clusterctl node replace HOST` recreates a node",
        )
    for host in inventory.compute:
        address = host.ssh_address or host.address
        if host.name in names and is_this_machine(address):
            raise UsageError(
                f"{host.name} can't be rebooted, because clusterctl runs on it",
                code="unsupported",
                about="reboot-of-this-machine",
                why=f"its address is {address}; a reboot would also kill clusterctl",
                fix="reboot this machine yourself while no job runs, then run `clusterctl up`",
            )


@contextmanager
def _cluster(screen: Screen) -> Iterator[tuple[Inventory, Nodes]]:
    workspace = screen.chosen().workspace()
    with naming_lock_holder(workspace), Connections(workspace.ssh_config) as connections:
        inventory = inventory_of(workspace)
        yield inventory, _operator(inventory, connections.to)


def _operator(inventory: Inventory, to: Connect) -> Nodes:
    scheduler = scheduler_of(inventory, to)
    if not scheduler.drains_nodes:
        raise UsageError(
            "nodes can't be drained without Slurm",
            code="unsupported",
            about="slurm",
            fix="maintain the nodes while no job runs, then run `clusterctl up`",
        )
    return scheduler


def _chosen(inventory: Inventory, names: Sequence[str]) -> tuple[str, ...]:
    chosen = nodes.expand_hosts(names)
    nodes.check_names(inventory, chosen)
    return chosen


def _wait_idle(
    screen: Screen, scheduler: Jobs, names: Sequence[str], timeout_s: float | None
) -> tuple[NodeState, ...]:
    for ids in nodes.wait_idle(scheduler, names, timeout_s=timeout_s):
        screen.note(f"waiting for job {ids}")
    return nodes.states(scheduler, names)


def _show(screen: Screen, states: Sequence[NodeState]) -> None:
    rows = [
        (state.node.name, state.node.shown, state.node.reason, [job.id for job in state.jobs])
        for state in states
    ]
    answer = [dict(zip(("name", "state", "reason", "jobs"), row, strict=True)) for row in rows]
    table = [[*row, ",".join(jobs) or "-"] for *row, jobs in rows]
    screen.result({"nodes": answer}, *screen.table(["NODE", "STATE", "REASON", "JOBS"], table))
