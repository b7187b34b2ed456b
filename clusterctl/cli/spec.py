"""init, validate, schema: the verbs of the spec file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli.options import AskBecomePass, Options, read_only_prompts, spec_of
from clusterctl.cli.output import Screen

if TYPE_CHECKING:
    from clusterctl.hosts.checks import DoctorReport
    from clusterctl.hosts.probe import GpuFacts
    from clusterctl.spec.models import ClusterSpec


DEFAULT_FILE = Path("cluster.yaml")


def init(
    screen: Screen,
    options: Options,
    provider: Annotated[str, typer.Option(help="Provider of the cluster: local, onprem or gcp.")] = "local",
    from_inventory: Annotated[
        Path | None,
        typer.Option(
            "--from-inventory",
            metavar="PATH",
            help="With --provider onprem: write the spec from this Ansible inventory.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented cluster.yaml."""
    from clusterctl.errors import UsageError
    from clusterctl.spec.load import starter_spec

    path = options.file or DEFAULT_FILE
    text = starter_spec(provider)
    notes: list[str] = []
    if from_inventory is not None:
        text, notes = _imported(provider, from_inventory)
    try:
        with path.open("w" if force else "x") as file:
            file.write(text)
    except FileExistsError as exc:
        raise UsageError(f"{path} exists already", fix="say --force to overwrite it") from exc
    except OSError as exc:
        raise UsageError(
            f"{path} can't be written", why=exc.strerror or str(exc), fix="name another file with -f"
        ) from exc
    for line in notes:
        screen.note(f"note: {line}")
    answer = {"file": str(path), "notes": notes}
    screen.result(answer, f"wrote {path}; change it, then run `clusterctl up`")


def _imported(provider: str, source: Path) -> tuple[str, list[str]]:
    """The spec of an Ansible inventory, and what did not come along."""
    from clusterctl.configure.imported import spec_of_inventory
    from clusterctl.errors import UsageError
    from clusterctl.spec.models import PROVIDERS

    if not PROVIDERS[provider].user_owned:
        raise UsageError("an inventory is of machines of your own", fix="say --provider onprem with it")
    found = spec_of_inventory(source)
    return found.text, found.notes


def validate(
    screen: Screen,
    options: Options,
    live: Annotated[bool, typer.Option("--live", help="Also check the hosts, as `doctor` does.")] = False,
) -> int:
    """Validate a spec: all errors are reported, each with its line."""
    from clusterctl.errors import UsageError
    from clusterctl.packages.wheelhouse import content_hash
    from clusterctl.spec import gcp

    spec = spec_of(screen, options)
    nodes = sum(partition.nodes for partition in spec.partitions)
    lines = [f"valid: cluster {spec.name!r}, provider {spec.provider.type}, {nodes} node{'s'[: nodes != 1]}"]
    found: dict[str, Any] = {"cluster": spec.name, "provider": spec.provider.type, "nodes": nodes}
    if spec.provider.is_cloud:
        types = {partition: gcp.machine_of(spec, partition) for partition in spec.partitions}
        lines.append(f"  the controller: {gcp.controller_machine(spec).name}")
        lines += (
            f"  {partition.name}: {partition.nodes} x {machine.name}"
            + (f" with {machine.gpu}" if machine.gpu else "")
            for partition, machine in types.items()
        )
        found["machine_types"] = {partition.name: machine.name for partition, machine in types.items()}
        if refused := gcp.refusal(spec):
            screen.note(f"note: `up` refuses this: {refused.what}; {refused.fix}")
    if (asked := spec.software.python.requirements) is not None:
        try:
            content_hash((asked,))
        except UsageError as exc:
            screen.note(f"note: `up` refuses this: {exc.cause}")
    if not live:
        screen.result(found, *lines)
        return 0
    report = examined(screen, spec)
    screen.result({**found, **report_dict(spec, report)}, *lines, "", *report_lines(screen, report))
    return 1 if report.errors else 0


def schema(
    screen: Screen,
    options: Options,
    job: Annotated[bool, typer.Option("--job", help="Print the schema of job files instead.")] = False,
) -> None:
    """Print the JSON Schema of the spec, for editors."""
    from clusterctl.spec.job import job_schema
    from clusterctl.spec.load import json_schema

    del options
    found = job_schema() if job else json_schema()
    screen.document({"schema": found}, json.dumps(found, indent=2))


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
    spec = spec_of(screen, options)
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
    """What a look at the hosts finds."""
    from clusterctl.cluster.diagnosis import checkup
    from clusterctl.cluster.session import provider_of
    from clusterctl.state.workspace import Workspace

    provider = provider_of(spec.provider, read_only_prompts(ask_password=ask_become_pass))
    with screen.working("looking at the hosts"):
        return checkup(spec, Workspace.of(spec.name), provider, hosts=tuple(hosts))


def report_dict(spec: ClusterSpec, report: DoctorReport) -> dict[str, Any]:
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


def report_lines(screen: Screen, report: DoctorReport) -> list[str]:
    """The report as people read it: a line a host, then what is wrong."""
    from clusterctl.hosts.firewall import firewall_of
    from clusterctl.spec.units import GIB_MIB

    bad = {finding.host for finding in report.errors}
    warned = {finding.host for finding in report.findings} - bad
    rows = [
        [
            host,
            "error" if host in bad else "warning" if host in warned else "ok",
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
    rows += [[host, "error", *"-" * (len(head) - 2)] for host in sorted(bad - set(report.facts))]
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
