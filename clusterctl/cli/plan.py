"""plan, doctor: what `up` would do and what it costs; what is wrong with hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

from clusterctl.cli.options import Words, argument, option
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import AskBecomePass, sudo_password
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.phases import provider_of
from clusterctl.cluster.plan import Plan, preview
from clusterctl.cluster.verify import checkup
from clusterctl.cluster.verify import preflight as check_ahead
from clusterctl.errors import ClusterctlError, Notice, NotUpError, UsageError, excluded
from clusterctl.hosts.checks import DoctorReport, failures
from clusterctl.hosts.probe import GpuFacts
from clusterctl.providers.base import HostChange, HostPlan, Prompts, Provider
from clusterctl.scheduler.slurm_parse import fold_nodes
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import shown_memory
from clusterctl.state.chosen_spec import spec_of, spec_of_existing
from clusterctl.state.workspace import Workspace

_ARCHIVE: Final = ".tar.gz"
CHANGES: Final = 3  # the exit code of --check
HOURS_A_DAY: Final = 24
CURRENCY: Final = "USD"


def plan(
    screen: Screen,
    check: Annotated[bool, option("Exit 3 if `up` would change anything.")] = False,
    diff: Annotated[bool, option("Show the lines that would change in files of on-prem hosts.")] = False,
    preflight: Annotated[
        bool, option("Name all that would keep `up` from its end. Exits 1 if anything.")
    ] = False,
    ask_become_pass: AskBecomePass = False,
) -> int:
    """Show what `up` would change, and what it costs.

    Also names the jobs that would end. Changes nothing. Compares the spec with the applied spec and with the
    live hosts.
    """
    spec = spec_of(screen.chosen())
    if not preflight:
        return show_plan(screen, spec, check=check, diff=diff, ask_become_pass=ask_become_pass)
    if check or diff:
        raise excluded("--preflight", "--check" if check else "--diff")
    provider = _provider(spec, ask_become_pass=ask_become_pass)
    with screen.working("looking"):
        report = check_ahead(spec, Workspace.of(spec.name), provider)
    lines = report_lines(screen, report)
    if not report.findings:
        lines += [*([""] if lines else []), "nothing stands in the way of `clusterctl up`"]
    screen.result({**_report_dict(spec, report), "provider": spec.provider.type}, *lines)
    return 1 if report.errors else 0


def show_plan(
    screen: Screen,
    spec: ClusterSpec,
    *,
    check: bool = False,
    diff: bool = False,
    ask_become_pass: bool = False,
) -> int:
    with screen.working("looking"):
        prompts = Prompts(password=sudo_password(ask=ask_become_pass))
        found = preview(ClusterContext.of(spec, prompts=prompts))
    lines = text(screen, spec, found)
    for task in found.tasks:
        if diff and task.diff:
            lines += ["", str(task), *task.diff.splitlines()]
    screen.result(as_dict(spec, found), *lines)
    return CHANGES if check and not found.is_empty else 0


def text(screen: Screen, spec: ClusterSpec, found: Plan) -> list[str]:
    """The plan as people read it: its parts, each below an empty line."""
    return [line for part in _parts(screen, spec, found) for line in ("", *part)][1:]


def as_dict(spec: ClusterSpec, found: Plan) -> dict[str, Any]:
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
        "tasks": [{"host": one.host, "task": one.task, "diff": one.diff} for one in found.tasks],
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


def doctor(
    screen: Screen,
    hosts: Annotated[
        Words,
        argument("Only these hosts; with --bundle also the file.", metavar="[HOST]...", show_default=False),
    ] = None,
    bundle: Annotated[bool, option("Write facts and logs into FILE.tar.gz for a report.")] = False,
    ask_become_pass: AskBecomePass = False,
) -> int:
    """Check the hosts and report problems.

    Checks SSH access, sudo, operating system, clock, names, disks, ports, firewall, locks, accounts and
    GPUs. Changes nothing. On-prem hosts can be checked before the first `up`. Exits 1 if a host cannot be
    part of the cluster. --bundle collects what is found, the logs and records of the cluster and what its
    hosts say in one archive without secrets, also where hosts do not answer.
    """
    spec = spec_of_existing(screen.chosen())
    provider = _provider(spec, ask_become_pass=ask_become_pass)
    if bundle:
        return _write_bundle(screen, spec, provider, hosts or ())
    report = _examined(screen, spec, provider, hosts or ())
    screen.result(_report_dict(spec, report), *report_lines(screen, report))
    return 1 if report.errors else 0


def examine(screen: Screen, spec: ClusterSpec, before: Sequence[str], answer: Mapping[str, Any]) -> int:
    """Look at the hosts of a spec, and show what is found; the exit code.

    before: lines to show first.
    answer: what the answer has besides.
    """
    report = _examined(screen, spec, provider_of(spec.provider), ())
    screen.result({**answer, **_report_dict(spec, report)}, *before, "", *report_lines(screen, report))
    return 1 if report.errors else 0


def _write_bundle(screen: Screen, spec: ClusterSpec, provider: Provider, words: Sequence[str]) -> int:
    """Make the archive, of which a word that ends like one is the name, and say what is in it."""
    files = [word for word in words if word.endswith(_ARCHIVE)]
    if len(files) > 1:
        raise UsageError(
            "--bundle writes one file", code="options-exclusive", fix=f"keep one of {', '.join(files)}"
        )
    default = f"{spec.name}-doctor-{time.strftime('%Y%m%dT%H%M%S')}{_ARCHIVE}"
    hosts = [word for word in words if word not in files]
    file = Path(*(files or [default]))
    if file.exists():
        raise UsageError(f"{file} exists", code="file-exists", fix="name another file, or remove it")

    # Only this needs to know what to leave out of an archive.
    from clusterctl.cluster.doctor_bundle import create

    workspace = Workspace.of(spec.name)
    with screen.working("collecting"):
        try:
            found = _report_dict(spec, _found(screen, spec, provider, hosts))
        except ClusterctlError as exc:
            found = {"ok": False, "error": exc.cause}
        source = screen.chosen().spec_file
        made = create(spec, workspace, found, file, source=source)
    about = {"bundle": str(made.file.absolute()), "files": made.files, "missing": made.missing}
    screen.result(
        {"ok": True, "failures": [], "cluster": spec.name, **about},
        f"wrote {made.file}: {len(made.files)} files, {made.file.stat().st_size >> 10} KiB",
        *(f"not to be had: {one}" for one in made.missing),
        "passwords, tokens and keys are redacted; names, addresses and paths are in it: see its README.txt",
        f"look through it (`tar -xzf {made.file}`), then attach it to your report",
    )
    return 0


def _provider(spec: ClusterSpec, *, ask_become_pass: bool) -> Provider:
    return provider_of(spec.provider, Prompts(password=sudo_password(ask=ask_become_pass)))


def _found(screen: Screen, spec: ClusterSpec, provider: Provider, hosts: Sequence[str]) -> DoctorReport:
    """Look at hosts; before the first `up`, for what stands in its way."""
    try:
        return _examined(screen, spec, provider, hosts)
    except NotUpError:
        return check_ahead(spec, Workspace.of(spec.name), provider)


def _examined(screen: Screen, spec: ClusterSpec, provider: Provider, hosts: Sequence[str]) -> DoctorReport:
    with screen.working("looking at the hosts"):
        return checkup(spec, Workspace.of(spec.name), provider, hosts=tuple(hosts))


def _report_dict(spec: ClusterSpec, report: DoctorReport) -> dict[str, Any]:
    return {
        "ok": not report.errors,
        "failures": [asdict(failure) for failure in failures(report.errors, phase="examine")],
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
    """The report as people read it: a line a host, then what is wrong."""
    bad = {finding.host for finding in report.errors}
    warned = {finding.host for finding in report.findings} - bad
    rows = [
        [
            host,
            "error" if host in bad else "warning" if host in warned else "ok",
            facts.system.name,
            facts.system.cpus,
            shown_memory(facts.system.memory_mib),
            _gpus(facts.gpus),
            facts.selinux,
            str(facts.firewall),
        ]
        for host, facts in report.facts.items()
    ]
    head = ["HOST", "STATE", "SYSTEM", "CPUS", "MEMORY", "GPUS", "SELINUX", "FIREWALL"]
    rows += [[host, "error", *"-" * (len(head) - 2)] for host in sorted(bad - set(report.facts))]
    lines = screen.table(head, rows) if report.facts else []
    lines += [""] * bool(report.findings and lines)
    for f in report.findings:
        lines += [
            f"{f.host}: {f.level}: {f.what}",
            f"  why: {f.why}",
            *([f"  fix: {f.fix}"] if f.fix else []),
        ]
    return lines


def _gpus(gpus: GpuFacts) -> str:
    if gpus.shown:
        return f"{', '.join(gpus.shown)} (driver {gpus.driver})"
    return f"{gpus.cards} without driver" if gpus.cards else "-"
