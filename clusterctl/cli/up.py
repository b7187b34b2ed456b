"""up, image bake: the cluster is created, changed or repaired, or the image of its nodes is made ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from clusterctl.cli.options import Options
from clusterctl.cli.output import Screen
from clusterctl.cli.plan import cost_lines, hosts_table, show_plan
from clusterctl.cli.progress import Phases
from clusterctl.cli.prompts import AcceptHostKey, AskBecomePass, prompts_for
from clusterctl.cluster import up as cluster_up
from clusterctl.cluster.bake import bake_ahead
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.nodes import names_of
from clusterctl.cluster.phases import Phase
from clusterctl.cluster.plan import Plan, prompt_about
from clusterctl.cluster.up import UpOptions, UpResult
from clusterctl.errors import excluded
from clusterctl.providers.base import Prompts
from clusterctl.providers.registry import provider_of
from clusterctl.spec.load import CurrentUser, job_user_notes
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.workspace import WAIT_S, Workspace
from clusterctl.util.progress import shown_phase

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt.")]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Fail immediately if another clusterctl holds the cluster's lock.")
]
Discard = Annotated[
    bool, typer.Option("--discard", help="Lose what exists only on hosts that are removed or made anew.")
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="HOST",
        help="Configure only these on-prem hosts and the controller. Takes host lists such as gpu[01-04].",
    ),
]


def up(
    screen: Screen,
    options: Options,
    reconfigure: Annotated[
        bool, typer.Option("--reconfigure", help="Configure every host, drifted or not.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Cancel jobs that a changed spec has no nodes for.")
    ] = False,
    discard: Discard = False,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle", metavar="FILE", help="Install on-prem hosts from this bundle, now and in later runs."
        ),
    ] = None,
    no_bundle: Annotated[
        bool, typer.Option("--no-bundle", help="Install from the hosts' own package repositories again.")
    ] = False,
    limit: Limit = None,
    no_wait: NoWait = False,
    yes: Yes = False,
    ask_become_pass: AskBecomePass = False,
    accept_host_key: AcceptHostKey = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, as `clusterctl plan` does.")
    ] = False,
) -> int:
    """Create the cluster, or repair it. Exits 0 only after an MPI job has run across all idle nodes.

    Prompts before it removes hosts or creates billed resources. Without a terminal, removing needs --yes.
    """
    if bundle is not None and no_bundle:
        raise excluded("--bundle", "--no-bundle")
    spec = spec_of(options.chosen(screen))
    if not dry_run:  # what has to be started for it starts while the rest is read
        provider_of(spec.provider).start_ahead()
    for line in job_user_notes(spec, CurrentUser.current()):
        screen.note(f"note: {line}")
    if dry_run:
        return show_plan(screen, spec, ask_become_pass=ask_become_pass)
    wanted = UpOptions(
        reconfigure=reconfigure,
        force=force,
        discard=discard,
        bundle=bundle,
        own_repositories=no_bundle,
        limit=names_of(limit) if limit else None,
    )
    return bring_up(
        screen,
        options,
        spec,
        wanted,
        yes=yes,
        no_wait=no_wait,
        ask_become_pass=ask_become_pass,
        accept_host_key=accept_host_key,
    )


def bring_up(
    screen: Screen,
    options: Options,
    spec: ClusterSpec,
    wanted: UpOptions,
    *,
    yes: bool = False,
    no_wait: bool = False,
    ask_become_pass: bool = False,
    accept_host_key: Sequence[str] | None = None,
) -> int:
    """Have the cluster of this spec up, or the hosts that ``wanted`` limits it to, and show how it went."""
    prompts = prompts_for(screen, ask_password=ask_become_pass, accepted=accept_host_key)
    done = raise_cluster(screen, spec, wanted, prompts, yes=yes, no_wait=no_wait, verbose=options.verbose)
    for line in done.notes:
        screen.note(f"note: {line}")
    answer = {
        "cluster": spec.name,
        "provider": done.inventory.provider,
        "ready": True,
        "nodes": [host.name for host in done.inventory.compute],
        "probed": done.verification.verified,
        "not_probed": [*done.verification.busy, *done.verification.drained],
        "phases": phase_dicts(done.phases),
        "notes": done.notes,
        **screen.known,
        "workspace": str(Workspace.of(spec.name).root),
    }
    nodes = len(done.inventory.compute)
    rows: list[list[object]] = [[shown_phase(p.name), p.seconds, p.note] for p in done.phases]
    rows.append(["total", sum(p.seconds for p in done.phases), ""])
    screen.result(
        answer,
        *screen.table(["PHASE", "SECONDS", ""], rows),
        "",
        f"cluster {spec.name!r} is up: 1 controller, {nodes} nodes",
        f"submit a job with `clusterctl submit train --nodes {min(nodes, 2)} --follow`",
    )
    return 0


def raise_cluster(
    screen: Screen,
    spec: ClusterSpec,
    wanted: UpOptions,
    prompts: Prompts,
    *,
    yes: bool = False,
    no_wait: bool = False,
    verbose: bool = False,
) -> UpResult:
    """Have the cluster of this spec up, and show the phases. A plan that needs an answer is asked about."""
    phases = Phases(screen, verbose=verbose)
    wait_s = 0 if no_wait else WAIT_S
    cluster = ClusterContext.of(spec, reporter=phases, prompts=prompts, wait_s=wait_s)
    try:
        with phases.shown("`clusterctl up` goes on from here, `clusterctl down` removes what there is"):
            return cluster_up.up(cluster, replace(wanted, approve=partial(approve, screen, yes=yes)))
    finally:
        screen.known = {"repaired": [asdict(repair) for repair in cluster.repairs]}


def bake(screen: Screen, options: Options, no_wait: NoWait = False, yes: Yes = False) -> None:
    """Make the image that new nodes start from, unless there is one of this configuration.

    `up` does it by itself, and uses it, with `provider: {image: {bake: true}}`. It takes a machine for some
    minutes, which is billed: shows which and its price, and on a terminal prompts first.
    """
    spec = spec_of(options.chosen(screen))
    settings = spec.provider.baking()
    if spec.provider != settings:
        screen.note("note: `up` uses it once the spec says `provider: {image: {bake: true}}`")
    phases = Phases(screen, verbose=options.verbose)

    def confirm(images: tuple[str, ...]) -> None:
        with screen.still():
            screen.note(*images)
            if screen.can_prompt:
                screen.confirm("make this at that price?", yes=yes)

    baked = spec.model_copy(update={"provider": settings})
    cluster = ClusterContext.of(baked, reporter=phases, wait_s=0 if no_wait else WAIT_S, verb="bake")
    with phases.shown("`clusterctl image bake` begins anew, and removes what is left"):
        became = bake_ahead(cluster, confirm)
    for line in cluster.notes:
        screen.note(f"note: {line}")
    rows: list[list[object]] = [[shown_phase(p.name), p.seconds, p.note] for p in cluster.phases]
    done = "the image is made" if became == "made" else "the image was there"
    screen.result(
        {"cluster": spec.name, "made": became == "made", "phases": phase_dicts(tuple(cluster.phases))},
        *screen.table(["PHASE", "SECONDS", ""], rows),
        "",
        f"{done}; `clusterctl cache list` shows it with its cost, `cache prune --images` removes it",
    )


def approve(screen: Screen, found: Plan, *, yes: bool) -> None:
    """Show a plan, and ask before it destroys data or may cost more.

    yes: do not ask. Without a terminal only what destroys data needs it.
    """
    planned, prompt = found.hosts, prompt_about(found)
    if not prompt and not planned.may_cost_more:
        return
    with screen.still():
        screen.note(*hosts_table(screen, planned, kept=False), *planned.other, *cost_lines(planned))
        screen.note(*(f"note: {line}" for line in planned.notes))
        if prompt:
            screen.confirm(prompt, yes=yes)
        elif screen.can_prompt:
            screen.confirm("create this at that price?", yes=yes)


def phase_dicts(phases: tuple[Phase, ...]) -> list[dict[str, Any]]:
    return [{"phase": p.name, "seconds": p.seconds, "note": p.note} for p in phases]
