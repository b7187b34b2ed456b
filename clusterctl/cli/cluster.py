"""up, down, status, cache: the verbs of a cluster's life."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli.completion import job_ids
from clusterctl.cli.job import job_table, not_brought_home
from clusterctl.cli.options import (
    AskBecomePass,
    Options,
    OutFolder,
    naming_lock_holder,
    prompts_for,
    spec_of,
    workspace_of,
)
from clusterctl.cli.output import Phases, Screen
from clusterctl.cli.up import NoWait, Yes, phase_dicts, unfinished
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.providers.base import Leftover
    from clusterctl.spec.models import ClusterSpec, Provider
    from clusterctl.transport.base import Transport


_STATUS_WAIT_S = 10.0  # for Slurm, which may be starting: who asks how it is wants to know soon


def down(
    screen: Screen,
    options: Options,
    yes: Yes = False,
    discard_runs: Annotated[
        bool, typer.Option("--discard-runs", help="Do not collect the runs that are not collected yet.")
    ] = False,
    discard_run: Annotated[
        list[str] | None,
        typer.Option(
            "--discard-run",
            metavar="ID",
            help="Do not collect the run of this job. Repeatable.",
            autocompletion=job_ids,
        ),
    ] = None,
    out: OutFolder = None,
    no_wait: NoWait = False,
    ask_become_pass: AskBecomePass = False,
    forget: Annotated[
        list[str] | None,
        typer.Option(
            "--forget", metavar="HOST", help="Do not wait for this on-prem host: it is gone for good."
        ),
    ] = None,
    orphans: Annotated[
        bool,
        typer.Option(
            "--orphans",
            help="Remove orphans: clusters of that name without a workspace. Shows them and asks.",
        ),
    ] = False,
    project: Annotated[
        str | None,
        typer.Option("--project", help="With --orphans: the Google Cloud project, if there is no spec."),
    ] = None,
) -> None:
    """Collect runs, remove the cluster, and verify the cleanup."""
    from clusterctl.cluster import down as cluster_down
    from clusterctl.cluster.nodes import names_of
    from clusterctl.cluster.session import Run
    from clusterctl.state import lock

    if orphans:
        down_orphans(screen, options, project=project, yes=yes, ask_become_pass=ask_become_pass)
        return
    if project is not None:
        raise UsageError("--project is for --orphans", fix="say --orphans, or leave it out")
    workspace = workspace_of(screen, options)
    name = workspace.root.name
    is_own = cluster_down.is_of_own_machines(workspace)
    what = "and give its machines back as they were" if is_own else "with all data on its nodes"
    screen.confirm(f"take cluster {name!r} down, {what}?", yes=yes)
    phases = Phases(screen, verbose=options.verbose)
    wanted = cluster_down.DownOptions(
        discard_runs=discard_runs,
        discard=discard_run or (),
        out=out,
        gone=names_of(forget or ()),
        prompts=prompts_for(screen, ask_password=ask_become_pass),
    )
    with unfinished(screen, phases, "`clusterctl down` goes on from here"), phases.shown():
        done = cluster_down.down(
            Run(workspace=workspace, reporter=phases, wait_s=0 if no_wait else lock.WAIT_S), wanted
        )
    for entry in done.discarded:
        screen.note(f"discarded the run of {entry.shown}")
    for run in done.runs:
        screen.note(f"collected {run.directory}")
        if not run.final:
            screen.note(f"note: job {run.job_id} ({run.name}) was {run.state} and ended with the cluster")
        if gone := not_brought_home(run):
            screen.note(f"note: {gone}; it is gone with the cluster")
    size = _cached_mib(screen) if done.on_this_machine else 0
    answer = {
        "cluster": name,
        "runs": [str(r.directory) for r in done.runs],
        "discarded": [entry.job_id for entry in done.discarded],
        "phases": phase_dicts(done.phases),
    }
    verified = "cleanup verified"
    if not done.looked:
        verified = "its last machines are forgotten" if forget else "nothing had been put on any machine"
    lines = [f"cluster {name!r} is down; {verified}"]
    if size:
        lines.append(f"the node image stays cached ({size} MiB); `clusterctl cache prune` removes it")
    screen.result({**answer, "cache_mib": size}, *lines)


def status(screen: Screen, options: Options) -> None:
    """Show the state of nodes and jobs."""
    from clusterctl.providers.pending import pending_releases
    from clusterctl.scheduler import session
    from clusterctl.scheduler.base import active_jobs
    from clusterctl.transport.ssh import Connections

    workspace = workspace_of(screen, options)
    with naming_lock_holder(workspace):
        inventory = session.inventory_of(workspace)
        with Connections(workspace.ssh_config) as connections:
            scheduler = session.admin_scheduler(inventory, connections, patience_s=_STATUS_WAIT_S)
            nodes, active = scheduler.nodes(), active_jobs(scheduler)
            is_cloud = inventory.traits.is_cloud
            controller = connections.to(inventory.controller.name)
            by_itself = auto_down(session.applied_spec(workspace), controller) if is_cloud else None
    left = pending_releases(workspace)
    ready = {n.name for n in nodes if n.usable} >= {h.name for h in inventory.compute}
    answer = {
        "cluster": inventory.cluster,
        "provider": inventory.provider,
        "ready": ready,
        "nodes": [
            {"name": n.name, "state": n.shown, "cpus": n.cpus, "memory_mib": n.memory_mib, "reason": n.reason}
            for n in nodes
        ],
        "jobs": [j.as_dict() for j in active],
        "auto_down": by_itself,
        "pending_releases": [one.as_dict() for one in left],
    }
    rows = [[n.name, n.shown, n.cpus, n.memory_mib, n.reason] for n in nodes]
    lines = [f"cluster {inventory.cluster} ({inventory.provider}): {'ready' if ready else 'NOT ready'}", ""]
    lines += screen.table(["NODE", "STATE", "CPUS", "MEMORY_MIB", "REASON"], rows)
    if active:
        lines += ["", *job_table(screen, active)]
    if by_itself:
        state = "" if by_itself["armed"] else ", but its timer does not run: `clusterctl up` starts it"
        lines += ["", f"an idle cluster takes itself down after {by_itself['after']}{state}"]
    for one in left:
        lines += ["", str(one), f"  {one.fix}"]
    screen.result(answer, *lines)


def auto_down(spec: ClusterSpec, controller: Transport) -> dict[str, Any] | None:
    """After which time without work the cluster takes itself down, and whether the timer for that runs."""
    from clusterctl.spec.units import format_duration

    if (idle_s := spec.provider.idle_timeout_s) is None:
        return None
    state = controller.run(
        ["systemctl", "is-active", "clusterctl-auto-down.timer"], check=False
    ).stdout.strip()
    return {"after": format_duration(idle_s), "armed": state == "active"}


def cache_prune(screen: Screen, options: Options) -> None:
    """Remove node images that no cluster uses."""
    _cache(screen, prune=True)


def cache_list(screen: Screen, options: Options) -> None:
    """List the cached node images."""
    _cache(screen, prune=False)


def _cache(screen: Screen, *, prune: bool) -> None:
    from clusterctl.providers.registry import cached_images

    images = cached_images(prune=prune, report=lambda what: screen.note(str(what)))
    rows = [[i.key, i.size_mib, ", ".join(i.used_by) or "-"] for i in images]
    empty = ["nothing to remove" if prune else "the image cache is empty"]
    lines = screen.table(["REMOVED" if prune else "IMAGE", "MIB", "USED BY"], rows) if rows else empty
    screen.result({"images": [i.model_dump() for i in images]}, *lines)


def _cached_mib(screen: Screen) -> int:
    from clusterctl.providers.registry import cached_images

    return sum(image.size_mib for image in cached_images(report=lambda what: screen.note(str(what))))


def down_orphans(
    screen: Screen, options: Options, *, project: str | None, yes: bool, ask_become_pass: bool = False
) -> None:
    """Find them, show what there is with its cost, ask, and remove it all."""
    from clusterctl.cluster import down as cluster_down
    from clusterctl.cluster.session import provider_of
    from clusterctl.providers.pending import pending_releases
    from clusterctl.state.workspace import Workspace

    settings, name = _where(screen, options, project)
    provider = provider_of(settings, prompts_for(screen, ask_password=ask_become_pass))
    with screen.working("looking"):
        found = cluster_down.find_orphans(provider, Workspace.of(name))
    orphans = [{"cluster_id": key, "left": [asdict(one) for one in left]} for key, left in found.items()]
    answer = {"cluster": name, "provider": settings.type, "orphans": orphans}
    for one in pending_releases(Workspace.of(name)):  # of a cluster that has a workspace
        screen.note(f"note: {one}", f"  {one.fix}")
    if not found:
        here = " on this machine; -f or --project says where else to look" if settings.shares_kernel else ""
        screen.result(answer, f"cluster {name!r} has no orphans{here}")
        return
    screen.note(*_lines(found))
    which = ", ".join(found)
    screen.confirm(f"remove all of this ({which})? It may be somebody else's", yes=yes)
    phases = Phases(screen, verbose=options.verbose)
    with phases.shown():
        for cluster_id in found:
            cluster_down.remove_cluster(provider, cluster_id, None, partial(phases, "destroy"))
    screen.result(answer, f"cluster {name!r} ({which}) is down; cleanup verified")


def _where(screen: Screen, options: Options, project: str | None) -> tuple[Provider, str]:
    """Whom to ask, and for which name. Who says only the name means a local one where no spec is known."""
    from clusterctl.spec.gcp import whole_project
    from clusterctl.spec.models import DEFAULT_PROVIDER

    if project is None:
        if options.cluster is not None and not workspace_of(screen, options).spec.exists():
            return DEFAULT_PROVIDER, options.cluster
        spec = spec_of(screen, options)
        return spec.provider, spec.name
    if options.cluster is None or options.file is not None:
        raise UsageError(
            "--project needs the name of a cluster and no spec file", fix="say --cluster NAME with it"
        )
    return whole_project(project), options.cluster


def _lines(found: Mapping[str, tuple[Leftover, ...]]) -> list[str]:
    lines = []
    for cluster_id, left in found.items():
        cost = sum(one.usd_per_hour or 0 for one in left)
        lines.append(f"cluster {cluster_id}" + (f", {cost:.2f} USD an hour:" if cost else ":"))
        lines += [f"  {one}" for one in left]
    return lines


@dataclass(frozen=True, slots=True)
class _Listed:
    """One cluster. ``nodes`` is None where its record can't be read, ``usd_per_hour`` without prices.

    ``fix`` is the command that removes an orphan.
    """

    cluster: str
    provider: str
    state: str
    nodes: int | None
    workspace: str
    id: str | None
    usd_per_hour: float | None = None
    fix: str = ""


def list_(screen: Screen, options: Options) -> None:
    """List your clusters, and orphans on this machine.

    States: `up`; `unfinished` and `damaged`, which `clusterctl up` repairs; `elsewhere`, created with another
    CLUSTERCTL_HOME; `orphaned`, without a workspace, which `clusterctl down --orphans` removes.
    """
    del options
    noted = list(_noted())
    found = noted + list(_on_this_machine({one.id for one in noted}))
    lines = _table(screen, found) if found else ["no clusters"]
    screen.result({"clusters": [asdict(one) for one in found]}, *lines)


def _table(screen: Screen, found: Sequence[_Listed]) -> list[str]:
    head = ["CLUSTER", "PROVIDER", "STATE", "NODES", "WORKSPACE"]
    rows = [[c.cluster, c.provider, c.state, "-" if c.nodes is None else c.nodes, c.workspace] for c in found]
    if any(c.usd_per_hour is not None for c in found):
        head.insert(-1, "USD AN HOUR")
        for row, one in zip(rows, found, strict=True):
            row.insert(-1, "-" if one.usd_per_hour is None else f"{one.usd_per_hour:.2f}")
    fixes = (("", f"cluster {one.cluster!r} is orphaned; remove it: {one.fix}") for one in found if one.fix)
    return [*screen.table(head, rows), *itertools.chain(*fixes)]


def _noted() -> Iterator[_Listed]:
    """Those of this state folder that `up` has raised."""
    from pydantic import ValidationError

    from clusterctl.spec.models import PROVIDERS
    from clusterctl.state.inventory import Inventory
    from clusterctl.state.workspace import state_home

    cloud = next(name for name, traits in PROVIDERS.items() if traits.is_cloud)
    for folder in sorted(state_home().glob("*/terraform")):
        if not (folder.parent / "hosts.json").exists():
            yield _Listed(folder.parent.name, cloud, "unfinished", None, str(folder.parent), None)
    for path in sorted(state_home().glob("*/hosts.json")):
        where = str(path.parent)
        try:
            inventory = Inventory.model_validate_json(path.read_bytes())
        except ValidationError:
            yield _Listed(path.parent.name, "-", "damaged", None, where, None)
            continue
        nodes = len(inventory.compute)
        yield _Listed(
            inventory.cluster,
            inventory.provider,
            "up",
            nodes,
            where,
            inventory.cluster_id,
            inventory.usd_per_hour,
        )


def _on_this_machine(known: set[str | None]) -> Iterator[_Listed]:
    """Local ones that are not among those: half made, of another state folder, or with none any more."""
    from clusterctl.errors import ClusterctlError
    from clusterctl.providers.registry import clusters_on_this_machine
    from clusterctl.spec.models import DEFAULT_PROVIDER
    from clusterctl.state.workspace import state_home

    try:
        here = clusters_on_this_machine()
    except ClusterctlError:  # no right to look, or not Linux: then there are none of ours either
        return
    for one, is_orphan in here:
        if one.id in known:
            continue
        fix = ""
        if is_orphan:
            state, fix = "orphaned", f"clusterctl down --orphans --cluster {one.name}"
        else:
            state = "unfinished" if Path(one.workspace).parent == state_home() else "elsewhere"
        nodes = sum(not name.endswith("-ctl") for name in one.numbers)
        yield _Listed(one.name, DEFAULT_PROVIDER.type, state, nodes, one.workspace, one.id, fix=fix)
