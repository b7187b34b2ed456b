"""node drain, resume, add, remove, replace: nodes one by one, the others and their jobs untouched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli.cluster import NoWait, Yes, raise_cluster
from clusterctl.cli.options import Options, verb
from clusterctl.cli.own_machines import AcceptHostKey, AskBecomePass, hands
from clusterctl.cli.show import Screen
from clusterctl.cli.watching import timeout_of
from clusterctl.cli.which import spec_of, telling_who_works, workspace_of
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.inventory import Inventory
    from clusterctl.nodes import NodeState
    from clusterctl.scheduler.base import Scheduler
    from clusterctl.workspace import Workspace

Names = Annotated[
    list[str], typer.Argument(metavar="NODE...", help="Nodes, or ranges of them such as gpu[01-04].")
]
Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why: whoever looks at the nodes reads it.")
]
Force = Annotated[bool, typer.Option("--force", help="End the jobs that are at work there.")]
_REPLACED = "another machine takes its place"


def drain(
    screen: Screen,
    options: Options,
    names: Names,
    reason: Reason,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no job is at work there.")] = False,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="With --wait: not longer than this.")
    ] = None,
) -> None:
    """Let no more jobs begin on nodes. Those that run go on; `up` leaves the nodes as they are."""
    from clusterctl import nodes

    if not reason.strip():
        raise UsageError("--reason is empty", fix="say why, for whoever looks at the nodes")
    with _cluster(screen, options) as (_, inventory, scheduler):
        chosen = _chosen(inventory, names)
        found = nodes.drain(scheduler, chosen, reason)
        if wait:
            found = nodes.wait_idle(
                scheduler,
                chosen,
                timeout_s=timeout_of(timeout),
                on_change=lambda ids: screen.note(f"at work: job {', '.join(ids)}"),
            )
    _show(screen, found)


def resume(screen: Screen, options: Options, names: Names) -> None:
    """Let jobs begin on nodes again."""
    from clusterctl import nodes

    with _cluster(screen, options) as (_, inventory, scheduler):
        found = nodes.resume(scheduler, _chosen(inventory, names))
    _show(screen, found)


def add(
    screen: Screen,
    options: Options,
    names: Names,
    yes: Yes = False,
    no_wait: NoWait = False,
    ask_become_pass: AskBecomePass = False,
    accept_host_key: AcceptHostKey = None,
) -> int:
    """Take machines into the cluster that the spec names, and that are not in it yet.

    Only they are configured; the others learn their names and addresses, and running jobs go on.
    """
    from clusterctl import access, membership
    from clusterctl.workspace import Workspace

    spec = spec_of(screen, options)
    membership.own_machines(spec)
    inventory = access.inventory_of(Workspace.of(spec.name))
    chosen = membership.names_of(names)
    if there := [name for name in chosen if inventory.host(name)]:
        fix = f"`clusterctl up --limit {','.join(there)}` mends it, `clusterctl node replace` takes another"
        raise UsageError(f"already in the cluster: {', '.join(there)}", fix=fix)
    own = hands(screen, ask_password=ask_become_pass, accepted=accept_host_key)
    return raise_cluster(screen, options, spec, limit=chosen, hands=own, yes=yes, no_wait=no_wait)


def remove(
    screen: Screen,
    options: Options,
    names: Names,
    force: Force = False,
    yes: Yes = False,
    no_wait: NoWait = False,
) -> int:
    """Give nodes back to their owner, as they were. The other nodes and their jobs go on."""
    from clusterctl import access, membership

    workspace = workspace_of(screen, options)
    inventory = access.inventory_of(workspace)
    spec = access.spec_as_raised(workspace)
    membership.own_machines(spec)
    chosen = _chosen(inventory, names)
    fewer = membership.without(spec, chosen)
    concerned = (inventory.controller.name, *chosen)
    own = hands(screen, ask_password=False)
    done = raise_cluster(
        screen, options, fewer, limit=concerned, hands=own, force=force, yes=yes, no_wait=no_wait
    )
    screen.note(f"take {', '.join(chosen)} out of your spec file, too: else the next `up` adds them again")
    return done


def replace(
    screen: Screen,
    options: Options,
    names: Names,
    force: Force = False,
    yes: Yes = False,
    no_wait: NoWait = False,
    ask_become_pass: AskBecomePass = False,
    accept_host_key: AcceptHostKey = None,
) -> int:
    """Put other machines in the place of nodes, under the same names. Their host keys are confirmed anew."""
    from clusterctl import membership, nodes

    spec = spec_of(screen, options)
    membership.own_machines(spec)
    own = hands(screen, ask_password=ask_become_pass, accepted=accept_host_key)
    with _cluster(screen, options) as (workspace, inventory, scheduler):
        chosen = membership.names_of(names)
        there = _known(inventory, chosen)
        if inventory.controller.name in chosen:
            fix = "take the cluster down, and raise it anew"
            raise UsageError(
                f"{inventory.controller.name} leads the cluster: nothing can take its place", fix=fix
            )
        if there:
            found = nodes.drain(scheduler, there, _REPLACED)
            if not force:
                _refuse_at_work(scheduler, found)
            membership.forget(workspace, there)
    return raise_cluster(
        screen, options, spec, limit=chosen, hands=own, force=force, yes=yes, no_wait=no_wait
    )


def _refuse_at_work(scheduler: Scheduler, found: Sequence[NodeState]) -> None:
    """Refuse nodes that jobs are at work on; they are put back as they were."""
    from clusterctl import nodes

    try:
        nodes.refuse_at_work(found)
    except UsageError:
        nodes.resume(scheduler, [state.node.name for state in found])
        raise


@contextmanager
def _cluster(screen: Screen, options: Options) -> Iterator[tuple[Workspace, Inventory, Scheduler]]:
    """The cluster that is meant, with who runs its jobs as its admin."""
    from clusterctl import access
    from clusterctl.transport.connections import Connections

    workspace = workspace_of(screen, options)
    with telling_who_works(workspace), Connections(workspace.ssh_config) as connections:
        inventory = access.inventory_of(workspace)
        yield workspace, inventory, access.admins_scheduler(inventory, connections)


def _chosen(inventory: Inventory, names: Sequence[str]) -> tuple[str, ...]:
    from clusterctl import membership, nodes

    chosen = membership.names_of(names)
    nodes.check_names(inventory, chosen)
    return chosen


def _known(inventory: Inventory, names: Sequence[str]) -> tuple[str, ...]:
    """Those that the cluster knows: one that could not be replaced before is forgotten already."""
    from clusterctl import nodes

    known = tuple(name for name in names if inventory.host(name))
    nodes.check_names(inventory, known)
    return known


def _show(screen: Screen, found: Sequence[NodeState]) -> None:
    rows = [[s.node.name, s.node.shown, s.node.reason, ",".join(j.id for j in s.jobs) or "-"] for s in found]
    answer: list[dict[str, Any]] = [
        {
            "name": one.node.name,
            "state": one.node.shown,
            "reason": one.node.reason,
            "jobs": [job.id for job in one.jobs],
        }
        for one in found
    ]
    screen.result({"nodes": answer}, screen.table(["NODE", "STATE", "REASON", "JOBS"], rows))


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    group = typer.Typer(help="Nodes one by one: the others and their jobs go on.", no_args_is_help=True)
    for function in (drain, resume, add, remove, replace):
        group.command()(verb(function))
    app.add_typer(group, name="node")
