"""The commands up (creates, changes or repairs a cluster) and image bake (builds node images)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

from clusterctl.agent.limits import check_use
from clusterctl.cli.advice import first_job
from clusterctl.cli.options import flag, option, takes
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import (
    NoWait,
    Phases,
    Yes,
    for_operators,
    phase_dicts,
    phase_table,
    prompts_for,
)
from clusterctl.cli.plan import as_dict, cost_lines, hosts_table, show_plan, text
from clusterctl.cluster import up as cluster_up
from clusterctl.cluster.bake import bake_image
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.dry_run import reject_up
from clusterctl.cluster.nodes import expand_hosts
from clusterctl.cluster.plan import Plan, prompt_about
from clusterctl.cluster.up import UpOptions
from clusterctl.errors import ClusterctlError
from clusterctl.providers.registry import provider_of
from clusterctl.scheduler.slurm.availability import out_text
from clusterctl.spec.load import CurrentUser, job_user_notes
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.workspace import WAIT_S, Workspace
from clusterctl.util.confine import Asked
from clusterctl.util.numbers import counted

Discard = Annotated[
    bool,
    option("Delete data that exists only on hosts that are removed or recreated.", "--discard"),
]
# The fields of UpOptions, and the options about prompts and locks.
_UP_FLAGS: Final = {
    "reconfigure": flag(bool, "Reconfigure all hosts, even unchanged ones.", "--reconfigure"),
    "discard": Discard,
    "limit": flag(
        list[str],
        "Configure only these on-prem hosts and the controller. Accepts host lists such as "
        "gpu[01-04].",
        metavar="HOST",
    ),
    "no_wait": NoWait,
    "yes": Yes,
    "dry_run": flag(
        bool,
        "Show what would change, as `clusterctl plan` does, or why `up` would refuse it.",
        "--dry-run",
    ),
}


@for_operators
@takes(_UP_FLAGS)
def up(screen: Screen, **given: Any) -> int:
    """Create or repair the cluster. Exits 0 only after an MPI job has run across all idle nodes.

    Prompts before it removes hosts or creates billed resources. Without a terminal, removal needs
    --yes.
    """
    spec = spec_of(screen.chosen())
    nodes = sum(partition.nodes for partition in spec.partitions)
    # A cluster in a cloud costs until `down`, so its node hours have no bound.
    check_use(Asked(nodes=nodes, node_hours=None if spec.provider.is_cloud else 0.0))
    dry_run = given.pop("dry_run", False)
    # The provider's helper process starts in the background during the following checks.
    if not dry_run:
        provider_of(spec.provider).start_ahead()
    screen.note(*(f"note: {line}" for line in job_user_notes(spec, CurrentUser.current())))
    if "limit" in given:
        given["limit"] = expand_hosts(given["limit"])
    return show_changes(screen, spec, **given) if dry_run else bring_up(screen, spec, **given)


def show_changes(
    screen: Screen,
    spec: ClusterSpec,
    *,
    yes: bool = False,
    no_wait: bool = False,
    **options: Any,
) -> int:
    """Show the effect of ``bring_up`` with the same arguments. Return the exit code."""
    prompts = prompts_for(screen)
    up_options = UpOptions(**options)
    limited = spec
    if up_options.limit is not None:
        provider = provider_of(spec.provider)
        limited = provider.limited(spec, Workspace.of(spec.name), up_options.limit)

    def more(plan: Plan) -> dict[str, Any]:
        _reject_up(screen, ClusterContext.of(limited, prompts=prompts), plan, up_options)
        return {"dry_run": True}

    return show_plan(screen, limited, prompts, more=more)


def _reject_up(screen: Screen, cluster: ClusterContext, plan: Plan, options: UpOptions) -> None:
    """Raise the error with which `up` would stop, after showing the plan."""
    try:
        reject_up(cluster, plan, options)
    except ClusterctlError:
        screen.partial_answer = {**as_dict(cluster.spec, plan), "dry_run": True}
        if not screen.json:
            screen.note(*text(screen, cluster.spec, plan), "")
        raise


def bring_up(
    screen: Screen,
    spec: ClusterSpec,
    *,
    yes: bool = False,
    no_wait: bool = False,
    **options: Any,
) -> int:
    """Create or repair this spec's cluster, and show the result. ``options``: as in UpOptions."""
    prompts = prompts_for(screen)
    phases = Phases(screen)
    cluster = ClusterContext.of(
        spec, reporter=phases, prompts=prompts, wait_s=0 if no_wait else WAIT_S
    )

    def approve_plan(plan: Plan) -> None:
        approve(screen, plan, yes=yes)

    try:
        with phases.shown(
            "`clusterctl up` continues from here; `clusterctl down` removes the cluster"
        ):
            result = cluster_up.up(cluster, UpOptions(approve=approve_plan, **options))
    finally:
        screen.partial_answer = {"repaired": [asdict(repair) for repair in cluster.repairs]}
    screen.note(*(f"note: {line}" for line in result.notes))
    nodes = [host.name for host in result.inventory.compute]
    # A job that names no partition runs in the first.
    ready = set(result.inventory.partitions[0].nodes) - result.verification.drained.keys()
    answer = {
        "cluster": spec.name,
        "provider": result.inventory.provider,
        "ready": True,
        "nodes": nodes,
        "probed": result.verification.verified,
        "not_probed": [*result.verification.busy, *result.verification.drained],
        "phases": phase_dicts(result.phases),
        "notes": result.notes,
        **screen.partial_answer,
        "workspace": str(Workspace.of(spec.name).root),
    }
    screen.result(
        answer,
        *phase_table(screen, result.phases, total=True),
        f"cluster {spec.name!r} is up: 1 controller, {counted(len(nodes), 'node')}"
        f"{out_text(result.verification.drained)}",
        first_job(len(ready)),
    )
    return 0


@for_operators
def bake(screen: Screen, no_wait: NoWait = False, yes: Yes = False) -> None:
    """Build the image for new nodes, unless it exists for this configuration.

    With `provider: {image: {bake: true}}`, `up` builds and uses the image itself. A build uses a
    billed machine for a few minutes. The machine's type and price are shown first; on a terminal
    you are asked.
    """
    spec = spec_of(screen.chosen())
    settings = spec.provider.baking()
    if spec.provider != settings:
        screen.note(
            "note: `up` only uses the image if the spec has `provider: {image: {bake: true}}`"
        )
    phases = Phases(screen)

    def confirm(images: tuple[str, ...]) -> None:
        with screen.still():
            screen.note(*images)
            if screen.can_prompt:
                screen.confirm("build the image at this price?", yes=yes)

    baked = spec.model_copy(update={"provider": settings})
    cluster = ClusterContext.of(
        baked, reporter=phases, wait_s=0 if no_wait else WAIT_S, verb="bake"
    )
    with phases.shown("`clusterctl image bake` starts over and removes the unfinished image"):
        origin = bake_image(cluster, confirm)
    screen.note(*(f"note: {line}" for line in cluster.notes))
    summary = "built the image" if origin == "made" else "the image already exists"
    screen.result(
        {"cluster": spec.name, "made": origin == "made", "phases": phase_dicts(cluster.phases)},
        *phase_table(screen, cluster.phases),
        f"{summary}; `clusterctl cache list` shows its cost, `clusterctl cache prune --images` "
        "removes it",
    )


def approve(screen: Screen, plan: Plan, *, yes: bool) -> None:
    """Show a plan. Unless ``yes`` is set, ask if it destroys data or may cost more.

    Without a terminal, only a plan that destroys data requires ``yes``.
    """
    planned = plan.hosts
    prompt = prompt_about(plan)
    if not prompt and not planned.may_cost_more:
        return
    with screen.still():
        screen.note(*hosts_table(screen, planned, kept=False), *planned.other, *cost_lines(planned))
        screen.note(*(f"note: {line}" for line in planned.notes))
        if prompt:
            screen.confirm(prompt, yes=yes)
        elif screen.can_prompt:
            screen.confirm("create these resources at this price?", yes=yes)
