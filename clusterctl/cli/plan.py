"""plan: what `up` would do is shown, with its cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from clusterctl.cli.options import Options
from clusterctl.cli.output import Screen
from clusterctl.cli.prompts import AskBecomePass, read_only_prompts
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.plan import Plan, preview
from clusterctl.errors import Notice, UsageError
from clusterctl.providers.base import HostChange, HostPlan
from clusterctl.scheduler.slurm_parse import fold_nodes
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.chosen_spec import spec_of

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
    # `up` and `plan` without this option have no use for what `doctor` can do.
    from clusterctl.cli.doctor import preflight_of, report_dict, report_lines

    with screen.working("looking"):
        report = preflight_of(spec, ask_become_pass=ask_become_pass)
    lines = report_lines(screen, report)
    if not report.findings:
        lines += [*([""] if lines else []), "nothing stands in the way of `clusterctl up`"]
    screen.result({**report_dict(spec, report), "provider": spec.provider.type}, *lines)
    return 1 if report.errors else 0


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
        yield hosts_table(screen, found.hosts, kept=True)
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
    if cost := cost_lines(found.hosts):
        yield cost


def hosts_table(screen: Screen, planned: HostPlan, *, kept: bool) -> list[str]:
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


def cost_lines(planned: HostPlan) -> list[str]:
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
