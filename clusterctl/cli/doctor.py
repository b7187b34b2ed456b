"""doctor: the hosts are looked at, and what is wrong with them is said."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from clusterctl.cli.options import Options, spec_of_existing
from clusterctl.cli.output import Screen
from clusterctl.cli.prompts import AskBecomePass, read_only_prompts
from clusterctl.cluster.session import provider_of
from clusterctl.hosts.checks import DoctorReport, failures
from clusterctl.hosts.firewall import firewall_of
from clusterctl.hosts.probe import GpuFacts
from clusterctl.spec.base import shown_memory
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace


def doctor(
    screen: Screen,
    options: Options,
    hosts: Annotated[
        list[str] | None, typer.Argument(metavar="[HOST]...", help="Only these hosts.", show_default=False)
    ] = None,
    ask_become_pass: AskBecomePass = False,
) -> int:
    """Check the hosts and report problems.

    Checks SSH access, sudo, operating system, clock, names, disks, ports, firewall, locks, accounts and
    GPUs. Changes nothing. On-prem hosts can be checked before the first `up`. Exits 1 if a host cannot be
    part of the cluster.
    """
    spec = spec_of_existing(screen, options)
    report = examined(screen, spec, hosts or (), ask_become_pass=ask_become_pass)
    screen.result(report_dict(spec, report), *report_lines(screen, report))
    return 1 if report.errors else 0


def examined(
    screen: Screen,
    spec: ClusterSpec,
    hosts: list[str] | tuple[str, ...] = (),
    *,
    ask_become_pass: bool = False,
) -> DoctorReport:
    from clusterctl.cluster.verify import checkup

    provider = provider_of(spec.provider, read_only_prompts(ask_password=ask_become_pass))
    with screen.working("looking at the hosts"):
        return checkup(spec, Workspace.of(spec.name), provider, hosts=tuple(hosts))


def report_dict(spec: ClusterSpec, report: DoctorReport) -> dict[str, Any]:
    """The report as `-o json` shows it."""
    return {
        "ok": not report.errors,
        "failures": [asdict(failure) for failure in failures(report.errors, phase="examine")],
        "cluster": spec.name,
        "hosts": {
            host: {
                **facts.system.model_dump(),
                "selinux": facts.selinux,
                "firewall": firewall_of(facts).as_dict(),
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
            str(firewall_of(facts)),
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
