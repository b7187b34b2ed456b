"""up, image bake: the cluster is created, changed or repaired, or the image of its nodes is made ahead."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from clusterctl.cli.options import flag, option, takes
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import (
    AcceptHostKey,
    AskBecomePass,
    NoWait,
    Phases,
    Yes,
    phase_dicts,
    phase_table,
    prompts_for,
)
from clusterctl.cli.plan import cost_lines, hosts_table, show_plan
from clusterctl.cluster import up as cluster_up
from clusterctl.cluster.bake import bake_ahead
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.nodes import names_of
from clusterctl.cluster.plan import Plan, prompt_about
from clusterctl.cluster.up import UpOptions
from clusterctl.errors import excluded
from clusterctl.providers.registry import provider_of
from clusterctl.spec.load import CurrentUser, job_user_notes
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.workspace import WAIT_S, Workspace

Discard = Annotated[
    bool, option("Lose what exists only on hosts that are removed or made anew.", "--discard")
]
# Fields of UpOptions, and how `up` is asked.
_UP_FLAGS: Final = {
    "reconfigure": flag(bool, "Configure every host, drifted or not.", "--reconfigure"),
    "force": flag(bool, "Cancel jobs that a changed spec has no nodes for.", "--force"),
    "discard": Discard,
    "bundle": flag(Path, "Install on-prem hosts from this bundle, now and in later runs.", metavar="FILE"),
    "own_repositories": flag(bool, "Install from the hosts' own package repositories again.", "--no-bundle"),
    "limit": flag(
        list[str],
        "Configure only these on-prem hosts and the controller. Takes host lists such as gpu[01-04].",
        metavar="HOST",
    ),
    "no_wait": NoWait,
    "yes": Yes,
    "ask_become_pass": AskBecomePass,
    "accept_host_key": AcceptHostKey,
    "dry_run": flag(bool, "Show what would change, as `clusterctl plan` does.", "--dry-run"),
}


@takes(_UP_FLAGS)
def up(screen: Screen, **given: Any) -> int:
    """Create the cluster, or repair it. Exits 0 only after an MPI job has run across all idle nodes.

    Prompts before it removes hosts or creates billed resources. Without a terminal, removing needs --yes.
    """
    if given.keys() >= {"bundle", "own_repositories"}:
        raise excluded("--bundle", "--no-bundle")
    spec = spec_of(screen.chosen())
    dry_run = given.pop("dry_run", False)
    if not dry_run:  # what has to be started for it starts while the rest is read
        provider_of(spec.provider).start_ahead()
    screen.note(*(f"note: {line}" for line in job_user_notes(spec, CurrentUser.current())))
    if dry_run:
        return show_plan(screen, spec, ask_become_pass=given.get("ask_become_pass", False))
    if "limit" in given:
        given["limit"] = names_of(given["limit"])
    return bring_up(screen, spec, **given)


def bring_up(
    screen: Screen,
    spec: ClusterSpec,
    *,
    yes: bool = False,
    no_wait: bool = False,
    ask_become_pass: bool = False,
    accept_host_key: tuple[str, ...] = (),
    **options: Any,
) -> int:
    """Have the cluster of this spec up, or the hosts that it is limited to, and show how it went.

    options: fields of UpOptions.
    """
    prompts = prompts_for(screen, ask_password=ask_become_pass, accepted=accept_host_key)
    phases = Phases(screen)
    cluster = ClusterContext.of(spec, reporter=phases, prompts=prompts, wait_s=0 if no_wait else WAIT_S)
    try:
        with phases.shown("`clusterctl up` goes on from here, `clusterctl down` removes what there is"):
            done = cluster_up.up(cluster, UpOptions(approve=partial(approve, screen, yes=yes), **options))
    finally:
        screen.known = {"repaired": [asdict(repair) for repair in cluster.repairs]}
    screen.note(*(f"note: {line}" for line in done.notes))
    nodes = [host.name for host in done.inventory.compute]
    answer = {
        "cluster": spec.name,
        "provider": done.inventory.provider,
        "ready": True,
        "nodes": nodes,
        "probed": done.verification.verified,
        "not_probed": [*done.verification.busy, *done.verification.drained],
        "phases": phase_dicts(done.phases),
        "notes": done.notes,
        **screen.known,
        "workspace": str(Workspace.of(spec.name).root),
    }
    screen.result(
        answer,
        *phase_table(screen, done.phases, total=True),
        f"cluster {spec.name!r} is up: 1 controller, {len(nodes)} nodes",
        f"submit a job with `clusterctl submit train --nodes {min(len(nodes), 2)} --follow`",
    )
    return 0


def bake(screen: Screen, no_wait: NoWait = False, yes: Yes = False) -> None:
    """Make the image that new nodes start from, unless there is one of this configuration.

    `up` does it by itself, and uses it, with `provider: {image: {bake: true}}`. It takes a machine for some
    minutes, which is billed: shows which and its price, and on a terminal prompts first.
    """
    spec = spec_of(screen.chosen())
    settings = spec.provider.baking()
    if spec.provider != settings:
        screen.note("note: `up` uses it once the spec says `provider: {image: {bake: true}}`")
    phases = Phases(screen)

    def confirm(images: tuple[str, ...]) -> None:
        with screen.still():
            screen.note(*images)
            if screen.can_prompt:
                screen.confirm("make this at that price?", yes=yes)

    baked = spec.model_copy(update={"provider": settings})
    cluster = ClusterContext.of(baked, reporter=phases, wait_s=0 if no_wait else WAIT_S, verb="bake")
    with phases.shown("`clusterctl image bake` begins anew, and removes what is left"):
        became = bake_ahead(cluster, confirm)
    screen.note(*(f"note: {line}" for line in cluster.notes))
    done = "the image is made" if became == "made" else "the image was there"
    screen.result(
        {"cluster": spec.name, "made": became == "made", "phases": phase_dicts(cluster.phases)},
        *phase_table(screen, cluster.phases),
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
