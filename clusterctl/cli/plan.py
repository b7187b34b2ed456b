"""plan: what `up` would do. And how that is shown and asked about, where `up` does it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from clusterctl.cli.options import Options, verb
from clusterctl.cli.own_machines import AskBecomePass, looking_hands
from clusterctl.cli.show import Screen
from clusterctl.cli.which import spec_of

if TYPE_CHECKING:
    from clusterctl.cluster.plan import Plan
    from clusterctl.providers.base import HostChange, Planned
    from clusterctl.spec import ClusterSpec

CHANGES: Final = 3  # the exit code of --check
HOURS_A_DAY: Final = 24
CURRENCY: Final = "USD"


def plan(
    screen: Screen,
    options: Options,
    check: Annotated[bool, typer.Option("--check", help="Exit 3 if `up` would change anything.")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show the lines that would change on machines of your own.")
    ] = False,
    ask_become_pass: AskBecomePass = False,
) -> int:
    """Show what `up` would do, what it costs, whose jobs end.

    It only looks: it compares the spec with the cluster as it was raised, and with its live hosts.
    """
    return show_plan(
        screen, spec_of(screen, options), check=check, diff=diff, ask_become_pass=ask_become_pass
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
    from clusterctl.cluster import lifecycle
    from clusterctl.cluster import plan as planning
    from clusterctl.state.workspace import Workspace

    provider = lifecycle.provider_of(spec.provider, looking_hands(ask_password=ask_become_pass))
    with screen.working("looking"):
        found = planning.plan(spec, Workspace.of(spec.name), provider, report=lambda _: None)
    lines = text(screen, spec, found)
    for task in found.tasks:
        if diff and task.diff:
            lines += ["", str(task), *task.diff.splitlines()]
    screen.result(as_dict(spec, found), *lines)
    return CHANGES if check and not found.is_empty else 0


def asking(
    screen: Screen, *, yes: bool, apart: Callable[[], AbstractContextManager[None]]
) -> Callable[[Plan], None]:
    """Shows a plan, and asks where it destroys data or may cost more; ``apart`` gives the screen to that.

    Without a terminal only what destroys data needs ``yes``.
    """

    def agree(found: Plan) -> None:
        planned = found.hosts
        hosts = [host.name for host in planned.destroyed]
        gone = [*([_folded(hosts)] if hosts else []), *planned.other_lost]
        leaving = [host.name for host in planned.given_back]
        if not gone and not leaving and not planned.may_cost_more:
            return
        with apart():
            screen.note(*_hosts(screen, planned, kept=False), *planned.other, *_cost(planned))
            if gone:
                screen.confirm(f"remove {', '.join(gone)}, with all data there?", yes=yes)
            elif leaving:
                screen.confirm(f"give {_folded(leaving)} back to whom it belongs, as it was?", yes=yes)
            elif sys.stdin.isatty() and sys.stderr.isatty():
                screen.confirm("make this, at that price?", yes=yes)

    return agree


def text(screen: Screen, spec: ClusterSpec, found: Plan) -> list[str]:
    """The plan as people read it: its parts, each below an empty line."""
    return [line for part in _parts(screen, spec, found) for line in ("", *part)][1:]


def as_dict(spec: ClusterSpec, found: Plan) -> dict[str, Any]:
    """The plan as `-o json` shows it."""
    return {
        "cluster": spec.name,
        "provider": spec.provider.type,
        "changes": list(_changes(found)),
        "kept": [host.name for host in found.hosts.hosts if host.action == "keep"],
        "harms": [
            {
                "job_id": harm.job.id,
                "name": harm.job.name,
                "user": harm.job.user,
                "nodes": harm.job.nodes,
                "why": harm.why,
            }
            for harm in found.jobs.harms
        ],
        "harms_unknown": found.jobs.unknown,
        "cost": _cost_dict(found.hosts),
        "notes": found.notes,
        "tasks": [{"host": one.host, "task": one.task, "diff": one.diff} for one in found.tasks],
    }


def _changes(found: Plan) -> Iterator[dict[str, Any]]:
    for host in found.hosts.changes:
        yield _change("host", host.name, host.action, host.what, host.why, host.usd_per_hour)
    for what in found.hosts.other:
        yield _change("other", "", "change", what)
    for setting in found.settings:
        yield _change("setting", setting.key, "change", setting.what)
    for drift in found.drift:
        yield _change("drift", drift.host, "mend", drift.what)


def _change(
    kind: str, name: str, action: str, what: str, why: str = "", usd_per_hour: float | None = None
) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": name,
        "action": action,
        "what": what,
        "why": why,
        "usd_per_hour": usd_per_hour,
    }


def _cost_dict(planned: Planned) -> dict[str, Any] | None:
    cost = planned.cost
    if cost is None:
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
        ("to be mended:", found.drift),
        ("tasks that would change a host:", found.tasks),
        ("jobs that this ends, so `up` refuses it without --force:", found.jobs.harms),
        ("notes:", found.notes),
    ):
        if lines:
            yield [title, *(f"  {line}" for line in lines)]
    if found.jobs.unknown:
        unknown = found.jobs.unknown
        yield [f"which jobs this ends can't be told, so `up` refuses it without --force: {unknown}"]
    if cost := _cost(found.hosts):
        yield cost


def _hosts(screen: Screen, planned: Planned, *, kept: bool) -> list[str]:
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
        [action, _folded([host.name for host in hosts]), what, why, *([_sum(hosts)] if priced else [])]
        for (action, what, why), hosts in rows.items()
    ]
    return screen.table([*head, *(["USD AN HOUR"] if priced else [])], table)


def _sum(hosts: list[HostChange]) -> str:
    prices = [host.usd_per_hour for host in hosts if host.usd_per_hour is not None]
    return f"{sum(prices):.2f}" if prices else "-"


def _cost(planned: Planned) -> list[str]:
    cost = planned.cost
    if cost is None:
        return []
    now = f"; now {_money(cost.now)}" if cost.now not in {0, cost.then} else ""
    lines = [f"cost: {_money(cost.then)}{now}"]
    if cost.unpriced:
        lines.append(f"not in it, for their price is not known: {_folded(list(cost.unpriced))}")
    if planned.priced_on:
        lines.append(f"list prices of {planned.priced_on}")
    return lines


def _money(per_hour: float) -> str:
    return f"{per_hour:.2f} {CURRENCY} an hour, {per_hour * HOURS_A_DAY:.2f} a day"


def _folded(names: list[str]) -> str:
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(names))


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(verb(plan))
