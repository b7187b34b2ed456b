"""node drain, resume, reboot, add, remove, replace, forget: nodes one by one, the others untouched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from clusterctl.cli.job import timeout_of
from clusterctl.cli.options import argument, option, takes
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import AcceptHostKey, AskBecomePass, NoWait, Yes
from clusterctl.cli.up import Discard, bring_up
from clusterctl.cluster import nodes
from clusterctl.cluster.nodes import NodeState
from clusterctl.errors import UsageError
from clusterctl.scheduler.admin import scheduler_of
from clusterctl.scheduler.base import Jobs, Nodes
from clusterctl.spec.hosts import is_this_machine
from clusterctl.spec.onprem import own_machines
from clusterctl.state.chosen import naming_lock_holder
from clusterctl.state.chosen_spec import spec_of_existing
from clusterctl.state.inventory import Inventory, applied_spec, inventory_of
from clusterctl.state.workspace import WAIT_S, Workspace
from clusterctl.transport.base import Connect
from clusterctl.transport.ssh import Connections

Names = Annotated[list[str], argument("Node names, or host lists such as gpu[01-04].", metavar="NODE...")]
Reason = Annotated[str, option("Reason, as sinfo and `status` show it.", "--reason", metavar="TEXT")]
Force = Annotated[bool, option("Cancel the jobs that run on the nodes.", "--force")]
_REASON_REBOOT = "clusterctl: is to be booted"
# What taking a machine into the cluster may need.
_JOINING = {"yes": Yes, "no_wait": NoWait, "ask_become_pass": AskBecomePass, "accept_host_key": AcceptHostKey}


def drain(
    screen: Screen,
    names: Names,
    reason: Reason,
    wait: Annotated[bool, option("Wait until no job runs on the nodes.")] = False,
    timeout: Annotated[str | None, option("With --wait: the longest wait.", metavar="TIME")] = None,
) -> None:
    """Drain nodes: no new jobs start, running jobs go on. `up` leaves drained nodes as they are."""
    if not reason.strip():
        raise UsageError(
            "--reason is empty", code="reason-empty", fix="say why, for whoever looks at the nodes"
        )
    with _cluster(screen) as (inventory, scheduler):
        chosen = _chosen(inventory, names)
        scheduler.drain(chosen, reason)
        found = nodes.states(scheduler, chosen)
        if wait:
            found = _wait_idle(screen, scheduler, chosen, timeout_of(timeout))
    _show(screen, found)


def resume(screen: Screen, names: Names) -> None:
    """Resume nodes: jobs can start on them again."""
    with _cluster(screen) as (inventory, scheduler):
        found = nodes.resume(scheduler, _chosen(inventory, names))
    _show(screen, found)


@takes(_JOINING)
def add(screen: Screen, names: Names, **joining: Any) -> int:
    """Add machines of the spec to the running cluster.

    Only the new nodes are configured; the others get their addresses. Running jobs go on.
    """
    spec = spec_of_existing(screen.chosen())
    own_machines(spec.provider)
    inventory = inventory_of(Workspace.of(spec.name))
    chosen = nodes.names_of(names)
    if there := [name for name in chosen if inventory.host(name)]:
        fix = f"`clusterctl up --limit {','.join(there)}` repairs it, `clusterctl node replace` takes another"
        raise UsageError(f"already in the cluster: {', '.join(there)}", code="host-exists", fix=fix)
    return bring_up(screen, spec, limit=chosen, **joining)


@takes({"force": Force, "discard": Discard, "yes": Yes, "no_wait": NoWait})
def remove(screen: Screen, names: Names, **how: Any) -> int:
    """Remove nodes from the cluster and restore the machines. Other nodes and their jobs go on."""
    workspace = screen.chosen().workspace()
    inventory = inventory_of(workspace)
    spec = applied_spec(workspace)
    own_machines(spec.provider)
    chosen = _chosen(inventory, names)
    fewer = nodes.spec_without(spec, chosen)
    done = bring_up(screen, fewer, limit=(inventory.controller.name, *chosen), **how)
    screen.note(f"take {', '.join(chosen)} out of your spec file, too: else the next `up` adds them again")
    return done


@takes({"force": Force, "discard": Discard, **_JOINING})
def replace(screen: Screen, names: Names, **how: Any) -> int:
    """Replace the machines of nodes; the node names stay.

    Local nodes are made anew, and what is on their disks is lost. Of machines of your own new host keys are
    confirmed, and the old ones are released; one that does not answer is released once it does.
    """
    spec = spec_of_existing(screen.chosen())
    workspace = Workspace.of(spec.name)
    is_local = spec.provider.shares_kernel
    if not is_local:
        own_machines(spec.provider)
    inventory = inventory_of(workspace)
    chosen = nodes.names_of(names)
    there = tuple(name for name in chosen if inventory.host(name))  # none, of one that failed half way
    nodes.check_names(inventory, chosen if is_local else there)
    if is_local:  # of a spec that says more since, nothing else is done
        spec = applied_spec(workspace)
    return bring_up(screen, spec, limit=None if is_local else chosen, replaced=there, **how)


def forget(screen: Screen, names: Names, yes: Yes = False, no_wait: NoWait = False) -> None:
    """Forget removed nodes that could not be released and are gone for good."""
    workspace = screen.chosen().workspace()
    chosen = nodes.names_of(names)
    nodes.check_pending_release(workspace, chosen)
    screen.confirm(f"forget {', '.join(chosen)}? What is ours stays on them", yes=yes)
    with workspace.lock("node forget", wait_s=0 if no_wait else WAIT_S, waiting=screen.note):
        nodes.check_pending_release(workspace, chosen)
        which = nodes.forget(workspace, chosen)
    screen.result({"forgotten": chosen}, f"forgotten: {'; '.join(which)}")


def reboot(
    screen: Screen,
    names: Names,
    timeout: Annotated[
        str | None, option("The longest wait for running jobs; after it nothing is rebooted.", metavar="TIME")
    ] = None,
    no_wait: NoWait = False,
) -> int:
    """Reboot nodes once idle: they are drained, and running jobs end first.

    After its reboot a node is configured, verified and resumed. One that was drained before stays drained.
    """
    workspace, timeout_s = screen.chosen().workspace(), timeout_of(timeout)
    with naming_lock_holder(workspace):
        inventory = inventory_of(workspace)
    chosen = _chosen(inventory, names)
    _refuse_reboot(inventory, chosen)
    with (  # an `up` meanwhile would put them back
        workspace.lock("node reboot", wait_s=0 if no_wait else WAIT_S, waiting=screen.note),
        Connections(workspace.ssh_config) as connections,
    ):
        inventory = inventory_of(workspace)  # it may have changed while we waited
        nodes.check_names(inventory, chosen)
        scheduler = _operator(inventory, connections.to)
        nodes.drain_usable(scheduler, chosen, _REASON_REBOOT)
        _wait_idle(screen, scheduler, chosen, timeout_s)
        nodes.check_drained(scheduler, chosen)
        screen.note(f"booting {', '.join(chosen)}")
        nodes.reboot({name: connections.to(name) for name in chosen})
        spec = applied_spec(workspace)
    # Ours are put back by it once they are configured, by the reason that they were given.
    limit = chosen if inventory.traits.user_owned else None
    return bring_up(screen, spec, limit=limit, yes=True, no_wait=no_wait)


def _refuse_reboot(inventory: Inventory, names: Sequence[str]) -> None:
    """That these nodes can be booted, and jobs be kept from beginning there."""
    if inventory.traits.shares_kernel:
        raise UsageError(
            "local nodes have no kernel of their own to boot",
            code="node-without-kernel",
            fix="`clusterctl up` restarts what is wrong with them",
        )
    for host in inventory.compute:
        address = host.ssh_address or host.address
        if host.name in names and is_this_machine(address):
            raise UsageError(
                f"{host.name} is the machine that you are on",
                code="node-is-this-machine",
                why=f"its address is {address}: whatever runs here would end with it, clusterctl, too",
                fix="boot it yourself while no job runs, then `clusterctl up`",
            )


@contextmanager
def _cluster(screen: Screen) -> Iterator[tuple[Inventory, Nodes]]:
    """The cluster that is meant, with who runs its jobs as its admin."""
    workspace = screen.chosen().workspace()
    with naming_lock_holder(workspace), Connections(workspace.ssh_config) as connections:
        inventory = inventory_of(workspace)
        yield inventory, _operator(inventory, connections.to)


def _operator(inventory: Inventory, to: Connect) -> Nodes:
    """Slurm, whose nodes can be drained.

    Raises:
        UsageError: the cluster has no Slurm.
    """
    scheduler = scheduler_of(inventory, to)
    if not isinstance(scheduler, Nodes):
        raise UsageError(
            "nodes without Slurm cannot be drained, so a job could start on them",
            code="needs-slurm",
            fix="work on them while no job runs, then run `clusterctl up`",
        )
    return scheduler


def _chosen(inventory: Inventory, names: Sequence[str]) -> tuple[str, ...]:
    chosen = nodes.names_of(names)
    nodes.check_names(inventory, chosen)
    return chosen


def _wait_idle(
    screen: Screen, scheduler: Jobs, names: Sequence[str], timeout_s: float | None
) -> tuple[NodeState, ...]:
    for ids in nodes.wait_idle(scheduler, names, timeout_s=timeout_s):
        screen.note(f"at work: job {ids}")
    return nodes.states(scheduler, names)


def _show(screen: Screen, found: Sequence[NodeState]) -> None:
    rows = [(one.node.name, one.node.shown, one.node.reason, [job.id for job in one.jobs]) for one in found]
    answer = [dict(zip(("name", "state", "reason", "jobs"), row, strict=True)) for row in rows]
    table = [[*row, ",".join(jobs) or "-"] for *row, jobs in rows]
    screen.result({"nodes": answer}, *screen.table(["NODE", "STATE", "REASON", "JOBS"], table))
