"""init, validate, schema: the verbs of the spec file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from clusterctl.cli.options import Options
from clusterctl.cli.output import Screen
from clusterctl.configure.imported import spec_of_inventory
from clusterctl.errors import UsageError
from clusterctl.packages.wheelhouse import content_hash
from clusterctl.spec import gcp
from clusterctl.spec.base import either
from clusterctl.spec.job_file import job_schema
from clusterctl.spec.load import json_schema, starter_spec
from clusterctl.spec.models import DEFAULT_PROVIDER, PROVIDERS
from clusterctl.state.chosen_spec import spec_of
from clusterctl.util.assets import asset

DEFAULT_FILE = Path("cluster.yaml")


def init(
    screen: Screen,
    options: Options,
    provider: Annotated[
        str, typer.Option(help=f"Provider of the cluster: {either(PROVIDERS)}.")
    ] = DEFAULT_PROVIDER.type,
    from_inventory: Annotated[
        Path | None,
        typer.Option(
            "--from-inventory",
            metavar="PATH",
            help="With --provider onprem: write the spec from this Ansible inventory.",
        ),
    ] = None,
    examples: Annotated[
        bool,
        typer.Option("--examples", help="Write the example programs into ./examples instead."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write a commented cluster.yaml."""
    if examples:
        _write_examples(screen, force=force)
        return
    path = options.file or DEFAULT_FILE
    text = starter_spec(provider)
    notes: list[str] = []
    if from_inventory is not None:
        text, notes = _imported(provider, from_inventory)
    try:
        with path.open("w" if force else "x") as file:
            file.write(text)
    except FileExistsError as exc:
        raise UsageError(
            f"{path} exists already", code="file-exists", fix="say --force to overwrite it"
        ) from exc
    except OSError as exc:
        raise UsageError(
            f"{path} can't be written",
            code="file-unwritable",
            why=exc.strerror or str(exc),
            fix="name another file with -f",
        ) from exc
    for line in notes:
        screen.note(f"note: {line}")
    answer = {"file": str(path), "notes": notes}
    screen.result(answer, f"wrote {path}; change it, then run `clusterctl up`")


def _write_examples(screen: Screen, *, force: bool) -> None:
    """Copy the examples that the installation has into ./examples."""
    folder = Path("examples")
    try:
        shutil.copytree(
            asset("examples"), folder, dirs_exist_ok=force, ignore=shutil.ignore_patterns("__pycache__")
        )
    except FileExistsError as exc:
        raise UsageError(
            f"{folder} exists already", code="file-exists", fix="say --force to overwrite its files"
        ) from exc
    except (OSError, shutil.Error) as exc:
        raise UsageError(
            f"{folder} can't be written",
            code="file-unwritable",
            why=str(exc),
            fix="see to the folder's rights",
        ) from exc
    answer = {"folder": str(folder), "files": sorted(path.name for path in folder.iterdir())}
    screen.result(answer, f"wrote {folder}/; {folder}/README.md says how to run each of them")


def _imported(provider: str, source: Path) -> tuple[str, list[str]]:
    """The spec of an Ansible inventory, and what did not come along."""
    if not PROVIDERS[provider].user_owned:
        raise UsageError(
            "an inventory is of machines of your own",
            code="option-needs-option",
            fix="say --provider onprem with it",
        )
    return spec_of_inventory(source)


def validate(
    screen: Screen,
    options: Options,
    live: Annotated[bool, typer.Option("--live", help="Also check the hosts, as `doctor` does.")] = False,
) -> int:
    """Validate a spec: all errors are reported, each with its line."""
    spec = spec_of(options.chosen(screen))
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
    from clusterctl.cli.doctor import examined, report_dict, report_lines

    report = examined(screen, spec)
    screen.result({**found, **report_dict(spec, report)}, *lines, "", *report_lines(screen, report))
    return 1 if report.errors else 0


def schema(
    screen: Screen,
    options: Options,
    job: Annotated[bool, typer.Option("--job", help="Print the schema of job files instead.")] = False,
) -> None:
    """Print the JSON Schema of the spec, for editors."""
    del options
    found = job_schema() if job else json_schema()
    screen.document({"schema": found}, json.dumps(found, indent=2))
