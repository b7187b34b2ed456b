"""up, down, status, cache: the verbs of a cluster's life."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli.completing import job_ids
from clusterctl.cli.job import job_table, not_brought_home
from clusterctl.cli.options import Options, OutFolder, verb
from clusterctl.cli.orphans import down_orphans
from clusterctl.cli.own_machines import AcceptHostKey, AskBecomePass, hands
from clusterctl.cli.phases import Phases
from clusterctl.cli.plan import asking, show_plan
from clusterctl.cli.show import Screen
from clusterctl.cli.which import spec_of, telling_who_works, workspace_of
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.cluster.converge import Mended
    from clusterctl.cluster.offline import Packages
    from clusterctl.cluster.phases import Phase
    from clusterctl.providers.onprem.hands import Hands
    from clusterctl.spec import ClusterSpec
    from clusterctl.transport.base import Transport

_STATUS_WAIT_S = 10.0  # for Slurm, which may be starting: who asks how it is wants to know soon

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
NoWait = Annotated[
    bool,
    typer.Option("--no-wait", help="Fail at once if another clusterctl works on the cluster; else wait."),
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="HOST",
        help="Touch these machines of your own alone, and what the controller says of them; also a range.",
    ),
]


@contextmanager
def _unfinished(screen: Screen, phases: Phases, then: str) -> Iterator[None]:
    """Say where Ctrl-C leaves the cluster."""
    try:
        yield
    except KeyboardInterrupt:
        if phases.begun:
            screen.note(f"stopped half way: {then}")
        raise


def up(
    screen: Screen,
    options: Options,
    reconfigure: Annotated[
        bool,
        typer.Option("--reconfigure", help="Configure every host anew, whether anything drifted or not."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="End jobs that a changed spec has no place for.")
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="FILE",
            help="Install machines of your own from this bundle, this time and from now on.",
        ),
    ] = None,
    no_bundle: Annotated[
        bool, typer.Option("--no-bundle", help="Install from the hosts' own repositories again.")
    ] = False,
    limit: Limit = None,
    no_wait: NoWait = False,
    yes: Yes = False,
    ask_become_pass: AskBecomePass = False,
    accept_host_key: AcceptHostKey = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done: `clusterctl plan`.")
    ] = False,
) -> int:
    """Raise the cluster, or mend it. Done means: an MPI job ran right across every node.

    It asks before it removes hosts, or makes what costs money. Without a terminal, removing needs --yes.
    """
    from clusterctl.cluster import offline
    from clusterctl.cluster.membership import names_of
    from clusterctl.spec.caller import Caller, notes

    if bundle is not None and no_bundle:
        raise UsageError("--bundle and --no-bundle exclude each other", fix="say one of them")
    spec = spec_of(screen, options)
    for line in notes(spec, Caller.current()):
        screen.note(f"note: {line}")
    if dry_run:
        return show_plan(screen, spec, ask_become_pass=ask_become_pass)
    return raise_cluster(
        screen,
        options,
        spec,
        limit=names_of(limit or ()),
        reconfigure=reconfigure,
        force=force,
        packages=offline.Packages(bundle, own=no_bundle),
        hands=hands(screen, ask_password=ask_become_pass, accepted=accept_host_key),
        yes=yes,
        no_wait=no_wait,
    )


def raise_cluster(
    screen: Screen,
    options: Options,
    spec: ClusterSpec,
    *,
    hands: Hands,
    limit: Sequence[str] = (),
    replaced: Sequence[str] = (),
    reconfigure: bool = False,
    force: bool = False,
    packages: Packages | None = None,
    yes: bool = False,
    no_wait: bool = False,
) -> int:
    """Have the cluster of this spec up, or what ``limit`` names of it, and say how it went.

    ``replaced`` ones are other machines than before.
    """
    from clusterctl.cluster import lifecycle, offline
    from clusterctl.state import lock
    from clusterctl.state.workspace import Workspace

    workspace = Workspace.of(spec.name)
    then = "`clusterctl up` goes on from here, `clusterctl down` removes what there is"
    phases = Phases(screen, verbose=options.verbose)
    screen.known = {"mended": []}

    def tell_mended(one: Mended) -> None:
        screen.known["mended"].append(asdict(one))
        screen.note(f"mended: {one}")

    with _unfinished(screen, phases, then), phases.shown():
        done = lifecycle.up(
            spec,
            workspace,
            reporter=phases,
            tell_mended=tell_mended,
            agree=asking(screen, yes=yes, apart=screen.still),
            reconfigure=reconfigure,
            force=force,
            packages=packages or offline.AS_BEFORE,
            limit=limit,
            replaced=replaced,
            hands=hands,
            wait_s=0 if no_wait else lock.WAIT_S,
        )
    for line in done.notes:
        screen.note(f"note: {line}")
    answer = {
        "cluster": spec.name,
        "provider": spec.provider.type,
        "ready": True,
        "nodes": [host.name for host in done.inventory.compute],
        "probed": done.proof.probed,
        "not_probed": [*done.proof.busy, *(node.host for node in done.proof.aside)],
        "phases": _phases(done.phases),
        "notes": done.notes,
        **screen.known,
        "workspace": str(workspace.root),
    }
    nodes = len(done.inventory.compute)
    screen.result(
        answer,
        *_phase_table(screen, done.phases),
        "",
        f"cluster {spec.name!r} is up: 1 controller, {nodes} nodes",
        f"submit a job with `clusterctl submit train --nodes {min(nodes, 2)} --follow`",
    )
    return 0


def down(
    screen: Screen,
    options: Options,
    yes: Yes = False,
    discard_runs: Annotated[
        bool, typer.Option("--discard-runs", help="Do not bring home what was not collected.")
    ] = False,
    discard_run: Annotated[
        list[str] | None,
        typer.Option(
            "--discard-run",
            metavar="ID",
            help="Do not bring home the run of this job; may be given several times.",
            autocompletion=job_ids,
        ),
    ] = None,
    out: OutFolder = None,
    no_wait: NoWait = False,
    ask_become_pass: AskBecomePass = False,
    forget: Annotated[
        list[str] | None,
        typer.Option(
            "--forget", metavar="HOST", help="This machine of your own is gone for good: do not wait for it."
        ),
    ] = None,
    orphans: Annotated[
        bool,
        typer.Option("--orphans", help="Those of its name whose workspace was lost: show them and ask."),
    ] = False,
    project: Annotated[
        str | None,
        typer.Option("--project", help="With --orphans: the Google Cloud project, where no spec says it."),
    ] = None,
) -> None:
    """Bring runs home, remove the cluster, prove that all is gone."""
    from clusterctl.cluster import lifecycle
    from clusterctl.cluster.membership import names_of
    from clusterctl.state import lock

    if orphans:
        down_orphans(screen, options, project=project, yes=yes, ask_become_pass=ask_become_pass)
        return
    if project is not None:
        raise UsageError("--project is for --orphans", fix="say --orphans, or leave it out")
    workspace = workspace_of(screen, options)
    name = workspace.root.name
    is_own = lifecycle.is_of_own_machines(workspace)
    what = "and give its machines back as they were" if is_own else "with all data on its nodes"
    screen.confirm(f"take cluster {name!r} down, {what}?", yes=yes)
    phases = Phases(screen, verbose=options.verbose)
    with _unfinished(screen, phases, "`clusterctl down` goes on from here"), phases.shown():
        done = lifecycle.down(
            workspace,
            name=name,
            reporter=phases,
            discard_runs=discard_runs,
            discard=discard_run or (),
            out=out,
            gone=names_of(forget or ()),
            hands=hands(screen, ask_password=ask_become_pass),
            wait_s=0 if no_wait else lock.WAIT_S,
        )
    for entry in done.discarded:
        screen.note(f"discarded the run of {entry.shown}")
    for run in done.runs:
        screen.note(f"collected {run.directory}")
        if not run.final:
            screen.note(f"note: job {run.job_id} ({run.name}) was {run.state} and ended with the cluster")
        if gone := not_brought_home(run):
            screen.note(f"note: {gone}; it is gone with the cluster")
    is_local = done.provider == "local"
    size = _cached_mib(screen) if is_local else 0
    answer = {
        "cluster": name,
        "runs": [str(r.directory) for r in done.runs],
        "discarded": [entry.job_id for entry in done.discarded],
        "phases": _phases(done.phases),
    }
    where = " at this machine" if is_local else ""
    proof = f"an independent look{where} found nothing of it"
    if not done.looked:
        proof = "its last machines are forgotten" if forget else "nothing had been put on any machine"
    lines = [f"cluster {name!r} is down; {proof}"]
    if size:
        lines.append(f"the node image stays cached ({size} MiB); `clusterctl cache prune` removes it")
    screen.result({**answer, "cache_mib": size}, *lines)


def status(screen: Screen, options: Options) -> None:
    """Nodes and jobs, as Slurm sees them."""
    from clusterctl import jobs
    from clusterctl.providers.onprem import left_behind
    from clusterctl.scheduler import session
    from clusterctl.transport.connections import Connections

    workspace = workspace_of(screen, options)
    with telling_who_works(workspace):
        inventory = session.inventory_of(workspace)
        with Connections(workspace.ssh_config) as connections:
            scheduler = session.admin_scheduler(inventory, connections, patience_s=_STATUS_WAIT_S)
            nodes, active = scheduler.nodes(), jobs.active(scheduler)
            is_google = inventory.provider == "gcp"
            controller = connections.to(inventory.controller.name)
            by_itself = auto_down(session.applied_spec(workspace), controller) if is_google else None
    left = left_behind.found(workspace)
    ready = {n.name for n in nodes if n.usable} >= {h.name for h in inventory.compute}
    answer = {
        "cluster": inventory.cluster,
        "provider": inventory.provider,
        "ready": ready,
        "nodes": [
            {"name": n.name, "state": n.shown, "cpus": n.cpus, "memory_mib": n.memory_mib, "reason": n.reason}
            for n in nodes
        ],
        "jobs": [jobs.as_dict(j) for j in active],
        "auto_down": by_itself,
        "left_behind": [left_behind.as_dict(one) for one in left],
    }
    rows = [[n.name, n.shown, n.cpus, n.memory_mib, n.reason] for n in nodes]
    lines = [f"cluster {inventory.cluster} ({inventory.provider}): {'ready' if ready else 'NOT ready'}", ""]
    lines += screen.table(["NODE", "STATE", "CPUS", "MEMORY_MIB", "REASON"], rows)
    if active:
        lines += ["", *job_table(screen, active)]
    if by_itself:
        state = "" if by_itself["armed"] else ", but its timer does not run: `clusterctl up` starts it"
        lines += ["", f"without work it takes itself down after {by_itself['after']}{state}"]
    for one in left:
        lines += ["", str(one), f"  {one.fix}"]
    screen.result(answer, *lines)


def auto_down(spec: ClusterSpec, controller: Transport) -> dict[str, Any] | None:
    """After which time without work the cluster takes itself down, and whether the timer for that runs."""
    from clusterctl.cluster.managed import AUTO_DOWN_TIMER
    from clusterctl.spec import GcpProvider
    from clusterctl.spec.units import format_duration

    if not isinstance(spec.provider, GcpProvider) or spec.provider.auto_down is None:
        return None
    state = controller.run(["systemctl", "is-active", AUTO_DOWN_TIMER], check=False).stdout.strip()
    return {"after": format_duration(spec.provider.auto_down), "armed": state == "active"}


def cache_prune(screen: Screen, options: Options) -> None:
    """Remove node images that no cluster uses."""
    _cache(screen, prune=True)


def cache_list(screen: Screen, options: Options) -> None:
    """Show the cached node images."""
    _cache(screen, prune=False)


def _cache(screen: Screen, *, prune: bool) -> None:
    from clusterctl.providers.local.provider import cached_images

    images = cached_images(prune=prune, report=lambda what: screen.note(str(what)))
    rows = [[i.key, i.size_mib, ", ".join(i.used_by) or "-"] for i in images]
    empty = ["nothing to remove" if prune else "the image cache is empty"]
    lines = screen.table(["REMOVED" if prune else "IMAGE", "MIB", "USED BY"], rows) if rows else empty
    screen.result({"images": [i.model_dump() for i in images]}, *lines)


def _cached_mib(screen: Screen) -> int:
    from clusterctl.providers.local.provider import cached_images

    return sum(image.size_mib for image in cached_images(report=lambda what: screen.note(str(what))))


def _phases(phases: tuple[Phase, ...]) -> list[dict[str, Any]]:
    return [{"phase": p.name, "seconds": p.seconds, "note": p.note} for p in phases]


def _phase_table(screen: Screen, phases: tuple[Phase, ...]) -> list[str]:
    rows: list[list[object]] = [[p.name, p.seconds, p.note] for p in phases]
    rows.append(["total", sum(p.seconds for p in phases), ""])
    return screen.table(["PHASE", "SECONDS", ""], rows)


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    for function in (up, down, status):
        app.command()(verb(function))
    cache = typer.Typer(help="The cache of node images.", no_args_is_help=True, rich_markup_mode=None)
    cache.command("list")(verb(cache_list))
    cache.command("prune")(verb(cache_prune))
    app.add_typer(cache, name="cache")
