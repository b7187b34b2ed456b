"""The commands plan (what `up` would change) and doctor (problems of hosts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Final

from clusterctl.cli.options import Words, argument, option
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import for_operators, prompts_for
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.phases import provider_of
from clusterctl.cluster.plan import Plan, preview
from clusterctl.cluster.verify import examine_cluster
from clusterctl.cluster.verify import find_obstacles as check_ahead
from clusterctl.errors import Failure, Notice, excluded
from clusterctl.hosts.checks import DoctorReport, findings_as_failures
from clusterctl.hosts.probe import GpuFacts
from clusterctl.packages.named_files import reject_named_by_spec
from clusterctl.providers.attached import SiteFact
from clusterctl.providers.base import (
    HostChange,
    HostPlan,
    Prompts,
    reject_unknown_keys,
)
from clusterctl.scheduler.slurm.values import fold_nodes
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.chosen_spec import spec_of, spec_of_existing
from clusterctl.state.workspace import Workspace
from clusterctl.util import formatting

# The exit code of --check if there are changes.
CHANGES: Final = 3
HOURS_A_DAY: Final = 24
CURRENCY: Final = "USD"


@for_operators
def plan(
    screen: Screen,
    check: Annotated[bool, option("Exit 3 if `up` would change anything.")] = False,
    diff: Annotated[
        bool, option("Show the lines that would change in files of on-prem hosts.")
    ] = False,
    preflight: Annotated[
        bool, option("List problems that would stop `up`; exit 1 if there are any.")
    ] = False,
) -> int:
    """Show what `up` would change, and its cost.

    Compares the spec with the spec of the last `up` and with the live hosts, and names each reason
    why `up` would refuse, such as jobs that would end. Changes nothing.
    """
    spec = spec_of(screen.chosen())
    prompts = prompts_for(screen)
    if not preflight:
        return show_plan(screen, spec, prompts, check=check, diff=diff)
    if check or diff:
        raise excluded("--preflight", "--check" if check else "--diff")
    # Unconfirmed host keys are findings.
    provider = provider_of(spec.provider, replace(prompts, confirm=reject_unknown_keys))
    with screen.working("checking"):
        report = check_ahead(spec, Workspace.of(spec.name), provider)
    lines = report_lines(screen, report)
    if not report.findings:
        lines += [*([""] if lines else []), "found nothing that would stop `clusterctl up`"]
    screen.result({**_report_dict(spec, report), "provider": spec.provider.type}, *lines)
    return 1 if report.errors else 0


def show_plan(
    screen: Screen,
    spec: ClusterSpec,
    prompts: Prompts,
    *,
    check: bool = False,
    diff: bool = False,
    more: Callable[[Plan], Mapping[str, Any]] = lambda _: {},
) -> int:
    """Show what `up` would change. Return the exit code. more: returns more fields of the answer."""
    if (packages := spec.software.python.requirements) is not None:
        reject_named_by_spec(packages)
    with screen.working("comparing"):
        plan = preview(ClusterContext.of(spec, prompts=prompts))
    lines = text(screen, spec, plan)
    for task in plan.tasks:
        if diff and task.diff:
            lines += ["", str(task), *task.diff.splitlines()]
    screen.result({**as_dict(spec, plan), **more(plan)}, *lines)
    return CHANGES if check and not plan.is_empty else 0


def text(screen: Screen, spec: ClusterSpec, plan: Plan) -> list[str]:
    """Return the lines of a plan: the changes that `up` would make, their cost, and notes."""
    return [line for part in _parts(screen, spec, plan) for line in ("", *part)][1:]


def as_dict(spec: ClusterSpec, plan: Plan) -> dict[str, Any]:
    rows = [
        *(
            ("host", host.name, host.action, host.what, host.why, host.usd_per_hour)
            for host in plan.hosts.changes
        ),
        *(("other", "", "change", change, "", None) for change in plan.hosts.other),
        *(("setting", setting.key, "change", setting.what, "", None) for setting in plan.settings),
        *(("drift", drift.host, "repair", drift.what, "", None) for drift in plan.drift),
    ]
    keys = ("kind", "name", "action", "what", "why", "usd_per_hour")
    return {
        "cluster": spec.name,
        "provider": spec.provider.type,
        "changes": [dict(zip(keys, row, strict=True)) for row in rows],
        "kept": [host.name for host in plan.hosts.hosts if host.action == "keep"],
        "cost": _cost_dict(plan.hosts),
        "stays": plan.stays,
        "notes": plan.notes,
        "tasks": [{"host": task.host, "task": task.task, "diff": task.diff} for task in plan.tasks],
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


def _parts(screen: Screen, spec: ClusterSpec, plan: Plan) -> Iterator[list[str]]:
    if plan.is_empty:
        yield [f"cluster {spec.name!r} ({spec.provider.type}): no changes"]
    else:
        yield [
            f"cluster {spec.name!r} ({spec.provider.type}): changes that `clusterctl up` would make"
        ]
        yield hosts_table(screen, plan.hosts, kept=True)
    for title, lines in (
        ("other changes:", plan.hosts.other),
        ("settings:", plan.settings),
        ("stays:", plan.stays),
        ("drift:", plan.drift),
        ("tasks that would change a host:", plan.tasks),
        ("notes:", plan.notes),
    ):
        if lines:
            yield [title, *(line for part in lines for line in _indented(str(part)))]
    if cost := cost_lines(plan.hosts):
        yield cost


def _indented(text: str) -> list[str]:
    """Return the lines of a text below a title, those after the first further to the right."""
    first, *rest = text.split("\n")
    return [f"  {first}", *(f"    {line}" for line in rest)]


def hosts_table(screen: Screen, planned: HostPlan, *, kept: bool) -> list[str]:
    rows: dict[tuple[str, str, str], list[HostChange]] = {}
    for host in planned.hosts:
        if kept or host.action != "keep":
            rows.setdefault((host.action, host.what, host.why), []).append(host)
    if not rows:
        return []
    head = ["", "HOSTS", "WHAT", "WHY"]
    priced = planned.cost is not None
    table = [
        [
            action,
            fold_nodes([host.name for host in hosts]),
            description,
            reason,
            *([_sum(hosts)] if priced else []),
        ]
        for (action, description, reason), hosts in rows.items()
    ]
    return screen.table([*head, *(["USD AN HOUR"] if priced else [])], table)


def _sum(hosts: list[HostChange]) -> str:
    prices = [host.usd_per_hour for host in hosts if host.usd_per_hour is not None]
    return formatting.cost(sum(prices) if prices else None, "")


def cost_lines(planned: HostPlan) -> list[str]:
    if (cost := planned.cost) is None:
        return []
    now = f"; now {_money(cost.now)}" if cost.now not in {0, cost.then} else ""
    lines = [f"cost: {_money(cost.then)}{now}"]
    if cost.unpriced:
        unpriced = fold_nodes(list(cost.unpriced))
        lines.append(
            Notice("price-unknown", f"the cost does not include {unpriced}: no price is known")
        )
    if planned.priced_on:
        lines.append(f"list prices of {planned.priced_on}")
    return lines


def _money(per_hour: float) -> str:
    return (
        f"{formatting.cost(per_hour)} an hour, {formatting.cost(per_hour * HOURS_A_DAY, '')} a day"
    )


def doctor(
    screen: Screen,
    hosts: Annotated[
        Words,
        argument(
            "Check only these hosts.",
            metavar="[HOST]...",
        ),
    ] = None,
) -> int:
    """Check the hosts and report problems.

    Checks SSH access, sudo, operating system, clock, names, disks, ports, firewall, locks, accounts
    and GPUs, and whether hosts of the cluster are as `up` wants them. Runs a small job on idle nodes, as
    `up` does; changes no setting. On-prem hosts can be checked before the first `up`. Exits 1 if a host
    cannot be part of the cluster, or differs from what `up` wants. On a cluster that other people run,
    it shows each fact about the cluster and how it was learned.
    """
    spec = spec_of_existing(screen.chosen())
    workspace = Workspace.of(spec.name)
    provider = provider_of(spec.provider, prompts_for(screen))
    with screen.working("checking the hosts"):
        facts = provider.examine_site(workspace)
    if facts is not None:
        return _show_site(screen, spec, facts)
    with screen.working("checking the hosts"):
        report = examine_cluster(spec, workspace, provider, hosts=tuple(hosts or ()))
    screen.result(_report_dict(spec, report), *report_lines(screen, report))
    return 1 if report.errors else 0


def _show_site(screen: Screen, spec: ClusterSpec, facts: Sequence[SiteFact]) -> int:
    """Show the facts about a cluster that other people operate. Return the exit code."""
    problems = [fact for fact in facts if fact.is_problem]
    failures = [
        Failure("not-ready", f"{fact.fact}: {fact.value}", phase="examine", about="site")
        for fact in problems
    ]
    rows = [[fact.fact, _state(fact), fact.value, fact.learned] for fact in facts]
    screen.result(
        {
            "ok": not problems,
            "failures": [asdict(failure) for failure in failures],
            "cluster": spec.name,
            "facts": [asdict(fact) for fact in facts],
        },
        *screen.table(["FACT", "STATE", "VALUE", "LEARNED BY"], rows),
    )
    return 1 if problems else 0


def _state(fact: SiteFact) -> str:
    if fact.is_problem:
        return "error"
    return "ok" if fact.is_known else "unknown"


def _report_dict(spec: ClusterSpec, report: DoctorReport) -> dict[str, Any]:
    return {
        "ok": not report.errors,
        "failures": [
            asdict(failure) for failure in findings_as_failures(report.errors, phase="examine")
        ],
        "cluster": spec.name,
        "hosts": {
            host: {
                **facts.system.model_dump(),
                "selinux": facts.selinux,
                "firewall": facts.firewall.model_dump(include={"name", "zone"}),
                "gpus": facts.gpus.model_dump(),
            }
            for host, facts in report.facts.items()
        },
        "findings": [asdict(finding) for finding in report.findings],
    }


def report_lines(screen: Screen, report: DoctorReport) -> list[str]:
    """Return the lines of a report: a line for each host, then the findings."""
    bad = {finding.host for finding in report.errors}
    warned = {finding.host for finding in report.findings} - bad
    rows = [
        [
            host,
            "error" if host in bad else "warning" if host in warned else "ok",
            facts.system.name,
            facts.system.cpus,
            formatting.size(facts.system.memory_mib << 20),
            _gpus(facts.gpus),
            facts.selinux,
            str(facts.firewall),
        ]
        for host, facts in report.facts.items()
    ]
    head = ["HOST", "STATE", "SYSTEM", "CPUS", "MEMORY", "GPUS", "SELINUX", "FIREWALL"]
    rows += [[host, "error", *"-" * (len(head) - 2)] for host in sorted(bad - set(report.facts))]
    lines = screen.table(head, rows) if report.facts else []
    if report.findings and lines:
        lines.append("")
    for finding in report.findings:
        lines += [
            f"{finding.host}: {finding.level}: {finding.what}",
            *_indented(f"why: {finding.why}"),
            *(_indented(f"fix: {finding.fix}") if finding.fix else []),
        ]
    return lines


def _gpus(gpus: GpuFacts) -> str:
    if gpus.shown:
        return f"{', '.join(gpus.shown)} (driver {gpus.driver})"
    return f"{gpus.cards} without driver" if gpus.cards else "-"
