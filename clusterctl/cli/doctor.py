"""doctor: what is wrong with the hosts, why, and how to mend it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli.options import Options, verb
from clusterctl.cli.own_machines import AskBecomePass, looking_hands
from clusterctl.cli.show import Screen
from clusterctl.cli.which import spec_of

if TYPE_CHECKING:
    from clusterctl.hosts.checks import DoctorReport
    from clusterctl.hosts.report import GpuFacts
    from clusterctl.spec import ClusterSpec


def doctor(
    screen: Screen,
    options: Options,
    hosts: Annotated[
        list[str] | None, typer.Argument(metavar="[HOST]...", help="Only these hosts.", show_default=False)
    ] = None,
    ask_become_pass: AskBecomePass = False,
) -> int:
    """Look for what is wrong with the hosts.

    Whether they are reached, sudo, system, clock, names, disks, ports, firewalls, locks, accounts and GPUs.
    It changes nothing. Machines of your own are looked at before the first `up`, too. Exit 1 if something
    keeps a host out of the cluster.
    """
    spec = spec_of(screen, options)
    report = examined(screen, spec, hosts or (), ask_become_pass=ask_become_pass)
    screen.result(as_dict(spec, report), *text(screen, report))
    return 1 if report.errors else 0


def examined(
    screen: Screen,
    spec: ClusterSpec,
    hosts: list[str] | tuple[str, ...] = (),
    *,
    ask_become_pass: bool = False,
) -> DoctorReport:
    """What a look at the hosts finds."""
    from clusterctl.cluster import lifecycle
    from clusterctl.cluster.checkup import checkup
    from clusterctl.state.workspace import Workspace

    provider = lifecycle.provider_of(spec.provider, looking_hands(ask_password=ask_become_pass))
    with screen.working("looking at the hosts"):
        return checkup(spec, Workspace.of(spec.name), provider, hosts=tuple(hosts))


def as_dict(spec: ClusterSpec, report: DoctorReport) -> dict[str, Any]:
    """The report as `-o json` shows it."""
    from clusterctl.hosts.checks import failures
    from clusterctl.hosts.firewall import firewall_of

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


def text(screen: Screen, report: DoctorReport) -> list[str]:
    """The report as people read it: a line a host, then what is wrong."""
    from clusterctl.hosts.firewall import firewall_of
    from clusterctl.spec.units import GIB_MIB

    bad = {finding.host for finding in report.errors}
    noted = {finding.host for finding in report.findings} - bad
    rows = [
        [
            host,
            "sick" if host in bad else "noted" if host in noted else "well",
            facts.system.name,
            facts.system.cpus,
            f"{facts.system.memory_mib / GIB_MIB:.0f} GiB",
            _gpus(facts.gpus),
            facts.selinux,
            str(firewall_of(facts)),
        ]
        for host, facts in report.facts.items()
    ]
    head = ["HOST", "STATE", "SYSTEM", "CPUS", "MEMORY", "GPUS", "SELINUX", "FIREWALL"]
    rows += [[host, "sick", *"-" * (len(head) - 2)] for host in sorted(bad - set(report.facts))]
    lines = screen.table(head, rows)
    lines += [""] * bool(report.findings)
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


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(verb(doctor))
