"""init, validate, schema: the verbs of the spec file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from clusterctl.cli.options import Options, verb
from clusterctl.cli.show import Screen
from clusterctl.cli.which import spec_of

DEFAULT_FILE = Path("cluster.yaml")


def init(
    screen: Screen,
    options: Options,
    provider: Annotated[
        str, typer.Option(help="Where the cluster will live: local, onprem or gcp.")
    ] = "local",
    from_inventory: Annotated[
        Path | None,
        typer.Option(
            "--from-inventory",
            metavar="PATH",
            help="With --provider onprem: an Ansible inventory of your machines to make the spec of.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented cluster.yaml."""
    from clusterctl.errors import UsageError
    from clusterctl.spec.starter import init_text

    path = options.file or DEFAULT_FILE
    text = init_text(provider)
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

    if provider != "onprem":
        raise UsageError("an inventory is of machines of your own", fix="say --provider onprem with it")
    found = spec_of_inventory(source)
    return found.text, found.notes


def validate(
    screen: Screen,
    options: Options,
    live: Annotated[bool, typer.Option("--live", help="Look at the hosts, too, as `doctor` does.")] = False,
) -> int:
    """Check a spec: every problem at once, each with its place."""
    from clusterctl.cli.doctor import as_dict, examined
    from clusterctl.cli.doctor import text as doctor_text
    from clusterctl.errors import UsageError
    from clusterctl.packages.wheels import content
    from clusterctl.spec import gcp_images, machines

    spec = spec_of(screen, options)
    nodes = sum(partition.nodes for partition in spec.partitions)
    lines = [f"valid: cluster {spec.name!r}, provider {spec.provider.type}, {nodes} node{'s'[: nodes != 1]}"]
    found: dict[str, Any] = {"cluster": spec.name, "provider": spec.provider.type, "nodes": nodes}
    if spec.provider.type == "gcp":
        types = {partition: machines.of(spec, partition) for partition in spec.partitions}
        lines.append(f"  the controller: {machines.of_controller(spec).name}")
        lines += (
            f"  {partition.name}: {partition.nodes} x {machine.name}"
            + (f" with {machine.gpu}" if machine.gpu else "")
            for partition, machine in types.items()
        )
        found["machine_types"] = {partition.name: machine.name for partition, machine in types.items()}
        if refused := gcp_images.refusal(spec):
            screen.note(f"note: `up` refuses this: {refused.what}; {refused.fix}")
    if (asked := spec.software.python.requirements) is not None:
        try:
            content((asked,))
        except UsageError as exc:
            screen.note(f"note: `up` refuses this: {exc.what}: {exc.why}")
    if not live:
        screen.result(found, *lines)
        return 0
    report = examined(screen, spec)
    screen.result({**found, **as_dict(spec, report)}, *lines, "", *doctor_text(screen, report))
    return 1 if report.errors else 0


def schema(
    screen: Screen,
    options: Options,
    job: Annotated[bool, typer.Option("--job", help="Of job files, which `submit` takes.")] = False,
) -> None:
    """Print the JSON Schema of the spec, for editors."""
    from clusterctl.spec.schema import job_schema, json_schema

    del options
    found = job_schema() if job else json_schema()
    screen.document({"schema": found}, json.dumps(found, indent=2))


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    for function in (init, validate, schema):
        app.command()(verb(function))
