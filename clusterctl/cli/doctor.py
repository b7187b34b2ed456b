"""doctor: the hosts are looked at, and what is wrong with them is said."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from clusterctl.cli.options import Options
from clusterctl.cli.output import Screen
from clusterctl.cli.prompts import AskBecomePass, read_only_prompts
from clusterctl.cluster.doctor_bundle import create
from clusterctl.cluster.phases import provider_of
from clusterctl.cluster.verify import checkup, preflight
from clusterctl.errors import ClusterctlError, NotUpError, UsageError
from clusterctl.hosts.checks import DoctorReport, failures
from clusterctl.hosts.probe import GpuFacts
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import shown_memory
from clusterctl.state.chosen_spec import spec_of_existing
from clusterctl.state.workspace import Workspace

_SUFFIX: Final = ".tar.gz"


def doctor(
    screen: Screen,
    options: Options,
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST]...", help="Only these hosts; with --bundle also the file.", show_default=False
        ),
    ] = None,
    bundle: Annotated[
        bool,
        typer.Option("--bundle", help="Write facts and logs into FILE.tar.gz for a report."),
    ] = False,
    ask_become_pass: AskBecomePass = False,
) -> int:
    """Check the hosts and report problems.

    Checks SSH access, sudo, operating system, clock, names, disks, ports, firewall, locks, accounts and
    GPUs. Changes nothing. On-prem hosts can be checked before the first `up`. Exits 1 if a host cannot be
    part of the cluster. --bundle collects what is found, the logs and records of the cluster and what its
    hosts say in one archive without secrets, also where hosts do not answer.
    """
    spec = spec_of_existing(options.chosen(screen))
    if bundle:
        return write_bundle(screen, options, spec, hosts or (), ask_become_pass=ask_become_pass)
    report = examined(screen, spec, hosts or (), ask_become_pass=ask_become_pass)
    screen.result(report_dict(spec, report), *report_lines(screen, report))
    return 1 if report.errors else 0


def write_bundle(
    screen: Screen, options: Options, spec: ClusterSpec, words: Sequence[str], *, ask_become_pass: bool
) -> int:
    """Make the archive, of which a word that ends like one is the name, and say what is in it."""
    files = [word for word in words if word.endswith(_SUFFIX)]
    if len(files) > 1:
        raise UsageError(
            "--bundle writes one file", code="options-exclusive", fix=f"keep one of {', '.join(files)}"
        )
    default = f"{spec.name}-doctor-{time.strftime('%Y%m%dT%H%M%S')}{_SUFFIX}"
    hosts = [word for word in words if word not in files]

    def answer() -> dict[str, Any]:
        try:
            return report_dict(spec, examined(screen, spec, hosts, ask_become_pass=ask_become_pass))
        except NotUpError:  # then what stands in the way of `up`
            return report_dict(spec, preflight_of(spec, ask_become_pass=ask_become_pass))

    with screen.working("collecting"):
        source = options.chosen(screen).spec_file
        try:
            found = answer()
        except ClusterctlError as exc:
            found = {"ok": False, "error": exc.cause}
        made = create(spec, Workspace.of(spec.name), found, Path(*(files or [default])), source=source)
    about = {"bundle": str(made.file.absolute()), "files": made.files, "missing": made.missing}
    screen.result(
        {"ok": True, "failures": [], "cluster": spec.name, **about},
        f"wrote {made.file}: {len(made.files)} files, {made.file.stat().st_size >> 10} KiB",
        *(f"not to be had: {one}" for one in made.missing),
        "passwords, tokens and keys are redacted; names, addresses and paths are in it: see its README.txt",
        f"look through it (`tar -xzf {made.file}`), then attach it to your report",
    )
    return 0


def preflight_of(spec: ClusterSpec, *, ask_become_pass: bool = False) -> DoctorReport:
    """What stands in the way of `up`."""
    provider = provider_of(spec.provider, read_only_prompts(ask_password=ask_become_pass))
    return preflight(spec, Workspace.of(spec.name), provider)


def examined(
    screen: Screen,
    spec: ClusterSpec,
    hosts: list[str] | tuple[str, ...] = (),
    *,
    ask_become_pass: bool = False,
) -> DoctorReport:
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
