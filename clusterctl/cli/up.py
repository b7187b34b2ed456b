"""plan, up, image bake: what `up` would do is shown, asked about and done, or its image is made ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from clusterctl.cli.options import Options
from clusterctl.cli.output import Phases, Screen, shown_phase
from clusterctl.cli.prompts import AcceptHostKey, AskBecomePass, prompts_for, read_only_prompts
from clusterctl.errors import Notice, UsageError, excluded
from clusterctl.scheduler.slurm_parse import fold_nodes
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.workspace import WAIT_S, Workspace

if TYPE_CHECKING:  # imported while the provider starts what it needs
    from clusterctl.cluster.context import Phase
    from clusterctl.cluster.plan import Plan
    from clusterctl.cluster.up import UpOptions, UpResult
    from clusterctl.providers.base import HostChange, HostPlan, Prompts
    from clusterctl.spec.models import ClusterSpec

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
    if not dry_run:  # what has to be started for it starts while the rest is imported
        from clusterctl.providers.registry import provider_of

        provider_of(spec.provider).start_ahead()
    from clusterctl.cluster.nodes import names_of
    from clusterctl.cluster.up import UpOptions
    from clusterctl.spec.load import CurrentUser, job_user_notes

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
        "provider": spec.provider.type,
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
    from clusterctl.cluster import up as cluster_up
    from clusterctl.cluster.context import ClusterContext

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
    from clusterctl.cluster.bake import bake_ahead
    from clusterctl.cluster.context import ClusterContext

    spec = spec_of(options.chosen(screen))
    settings = spec.provider.baking()
    if settings is None:
        raise UsageError(
            f"there is no image to make: the provider is {spec.provider.type}",
            code="no-image-to-bake",
            fix="run `clusterctl up`, which makes whatever its nodes need",
        )
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


CHANGES: Final = 3  # the exit code of --check
HOURS_A_DAY: Final = 24
CURRENCY: Final = "USD"


def plan(
    screen: Screen,
    options: Options,
    check: Annotated[bool, typer.Option("--check", help="Exit 3 if `up` would change anything.")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show the lines that would change in files of on-prem hosts.")
    ] = False,
    preflight: Annotated[
        bool,
        typer.Option("--preflight", help="Name all that would keep `up` from its end. Exits 1 if anything."),
    ] = False,
    ask_become_pass: AskBecomePass = False,
) -> int:
    """Show what `up` would change, and what it costs.

    Also names the jobs that would end. Changes nothing. Compares the spec with the applied spec and with the
    live hosts.
    """
    if preflight:
        if check or diff:
            raise UsageError(
                "--preflight excludes --check and --diff",
                code="options-exclusive",
                fix="run the one, then the other",
            )
        return show_preflight(screen, spec_of(options.chosen(screen)), ask_become_pass=ask_become_pass)
    return show_plan(
        screen, spec_of(options.chosen(screen)), check=check, diff=diff, ask_become_pass=ask_become_pass
    )


def show_plan(
    screen: Screen,
    spec: ClusterSpec,
    *,
    check: bool = False,
    diff: bool = False,
    ask_become_pass: bool = False,
) -> int:
    """Plan and show it; the exit code."""
    from clusterctl.cluster.context import ClusterContext
    from clusterctl.cluster.plan import preview

    with screen.working("looking"):
        prompts = read_only_prompts(ask_password=ask_become_pass)
        found = preview(ClusterContext.of(spec, prompts=prompts))
    lines = text(screen, spec, found)
    for task in found.tasks:
        if diff and task.diff:
            lines += ["", str(task), *task.diff.splitlines()]
    screen.result(as_dict(spec, found), *lines)
    return CHANGES if check and not found.is_empty else 0


def show_preflight(screen: Screen, spec: ClusterSpec, *, ask_become_pass: bool = False) -> int:
    """Look for what stands in the way of `up`, and show it; the exit code."""
    from clusterctl.cli.doctor import preflight_of, report_dict, report_lines

    with screen.working("looking"):
        report = preflight_of(spec, ask_become_pass=ask_become_pass)
    lines = report_lines(screen, report)
    if not report.findings:
        lines += [*([""] if lines else []), "nothing stands in the way of `clusterctl up`"]
    screen.result({**report_dict(spec, report), "provider": spec.provider.type}, *lines)
    return 1 if report.errors else 0


def approve(screen: Screen, found: Plan, *, yes: bool) -> None:
    """Show a plan, and ask before it destroys data or may cost more.

    yes: do not ask. Without a terminal only what destroys data needs it.
    """
    from clusterctl.cluster.plan import prompt_about

    planned, prompt = found.hosts, prompt_about(found)
    if not prompt and not planned.may_cost_more:
        return
    with screen.still():
        screen.note(*_hosts(screen, planned, kept=False), *planned.other, *_cost(planned))
        screen.note(*(f"note: {line}" for line in planned.notes))
        if prompt:
            screen.confirm(prompt, yes=yes)
        elif screen.can_prompt:
            screen.confirm("create this at that price?", yes=yes)


def text(screen: Screen, spec: ClusterSpec, found: Plan) -> list[str]:
    """The plan as people read it: its parts, each below an empty line."""
    return [line for part in _parts(screen, spec, found) for line in ("", *part)][1:]


def as_dict(spec: ClusterSpec, found: Plan) -> dict[str, Any]:
    """The plan as `-o json` shows it."""
    rows = [
        *(("host", one.name, one.action, one.what, one.why, one.usd_per_hour) for one in found.hosts.changes),
        *(("other", "", "change", what, "", None) for what in found.hosts.other),
        *(("setting", one.key, "change", one.what, "", None) for one in found.settings),
        *(("drift", one.host, "repair", one.what, "", None) for one in found.drift),
    ]
    keys, of_job = ("kind", "name", "action", "what", "why", "usd_per_hour"), ("name", "user", "nodes")
    return {
        "cluster": spec.name,
        "provider": spec.provider.type,
        "changes": [dict(zip(keys, row, strict=True)) for row in rows],
        "kept": [host.name for host in found.hosts.hosts if host.action == "keep"],
        "affected_jobs": [
            {"job_id": one.job.id, **{key: getattr(one.job, key) for key in of_job}, "why": one.why}
            for one in found.jobs.affected
        ],
        "affected_jobs_unknown": found.jobs.unknown,
        "cost": _cost_dict(found.hosts),
        "notes": found.notes,
        "tasks": [{"host": one.host, "task": one.what, "diff": one.diff} for one in found.tasks],
    }


def _cost_dict(planned: HostPlan) -> dict[str, Any] | None:
    if (cost := planned.cost) is None:
        return None
    return {
        "per_hour": round(cost.then, 4),
        "per_day": round(cost.then * HOURS_A_DAY, 2),
        "now_per_hour": round(cost.now, 4),
        "now_per_day": round(cost.now * HOURS_A_DAY, 2),
        "currency": CURRENCY,
        "priced_on": planned.priced_on,
        "unpriced": list(cost.unpriced),
    }


def _parts(screen: Screen, spec: ClusterSpec, found: Plan) -> Iterator[list[str]]:
    if found.is_empty:
        yield [f"cluster {spec.name!r} ({spec.provider.type}): no changes"]
    else:
        yield [f"cluster {spec.name!r} ({spec.provider.type}): `clusterctl up` would do this"]
        yield _hosts(screen, found.hosts, kept=True)
    for title, lines in (
        ("besides:", found.hosts.other),
        ("settings:", found.settings),
        ("drift:", found.drift),
        ("tasks that would change a host:", found.tasks),
        ("jobs that this ends, so `up` refuses it without --force:", found.jobs.affected),
        ("notes:", found.notes),
    ):
        if lines:
            yield [title, *(f"  {line}" for line in lines)]
    if found.jobs.unknown:
        unknown = found.jobs.unknown
        yield [f"which jobs this ends can't be told, so `up` refuses it without --force: {unknown}"]
    if cost := _cost(found.hosts):
        yield cost


def _hosts(screen: Screen, planned: HostPlan, *, kept: bool) -> list[str]:
    """A table of the hosts, equal ones in one row."""
    rows: dict[tuple[str, str, str], list[HostChange]] = {}
    for host in planned.hosts:
        if kept or host.action != "keep":
            rows.setdefault((host.action, host.what, host.why), []).append(host)
    if not rows:
        return []
    head = ["", "HOSTS", "WHAT", "WHY"]
    priced = planned.cost is not None
    table = [
        [action, fold_nodes([host.name for host in hosts]), what, why, *([_sum(hosts)] if priced else [])]
        for (action, what, why), hosts in rows.items()
    ]
    return screen.table([*head, *(["USD AN HOUR"] if priced else [])], table)


def _sum(hosts: list[HostChange]) -> str:
    prices = [host.usd_per_hour for host in hosts if host.usd_per_hour is not None]
    return f"{sum(prices):.2f}" if prices else "-"


def _cost(planned: HostPlan) -> list[str]:
    if (cost := planned.cost) is None:
        return []
    now = f"; now {_money(cost.now)}" if cost.now not in {0, cost.then} else ""
    lines = [f"cost: {_money(cost.then)}{now}"]
    if cost.unpriced:
        unpriced = fold_nodes(list(cost.unpriced))
        lines.append(Notice("price-unknown", f"not in it, for their price is not known: {unpriced}"))
    if planned.priced_on:
        lines.append(f"list prices of {planned.priced_on}")
    return lines


def _money(per_hour: float) -> str:
    return f"{per_hour:.2f} {CURRENCY} an hour, {per_hour * HOURS_A_DAY:.2f} a day"


def phase_dicts(phases: tuple[Phase, ...]) -> list[dict[str, Any]]:
    return [{"phase": p.name, "seconds": p.seconds, "note": p.note} for p in phases]
