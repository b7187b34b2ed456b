"""The commands init, validate and schema, which write and check spec files."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from clusterctl.cli.options import argument, option
from clusterctl.cli.output import Screen
from clusterctl.errors import UsageError, excluded
from clusterctl.packages.named_files import reject_named_by_spec
from clusterctl.packages.project_files import content_hash
from clusterctl.spec.base import PATTERNS, either
from clusterctl.spec.job_file import job_schema
from clusterctl.spec.load import json_schema, starter_spec
from clusterctl.spec.models import DEFAULT_PROVIDER, PROVIDERS
from clusterctl.spec.names import LocalValue, is_cluster_name
from clusterctl.spec.units import shown
from clusterctl.state.chosen_spec import spec_of
from clusterctl.util.assets import data_folder
from clusterctl.util.numbers import counted

DEFAULT_FILE = Path("cluster.yaml")


def init(
    screen: Screen,
    provider: Annotated[
        str, option(f"The hosts' provider: {either(PROVIDERS)}.")
    ] = DEFAULT_PROVIDER.type,
    name: Annotated[str | None, option("The cluster's name.", metavar="NAME")] = None,
    examples: Annotated[
        bool, option("Write the example programs into ./examples instead.")
    ] = False,
    agent: Annotated[
        bool, option("Write the skill for agents into ./.agents/skills/clusterctl instead.")
    ] = False,
    force: Annotated[bool, option("Overwrite existing files.")] = False,
) -> None:
    """Write a commented cluster.yaml."""
    if examples and agent:
        raise excluded("--examples", "--agent")
    if examples or agent:
        for flag_name, value in (("--name", name), ("-f", screen.file)):
            if value is not None:
                raise excluded("--examples" if examples else "--agent", flag_name)
        write = _write_examples if examples else _write_skill
        write(screen, force=force)
        return
    path = screen.file or DEFAULT_FILE
    text = starter_spec(provider)
    if name is not None:
        text = _renamed(text, name)
    with _new(path), path.open("w" if force else "x") as file:
        file.write(text)
    verb = PROVIDERS[provider].first_verb
    screen.result({"file": str(path)}, f"wrote {path}; edit it, then run `clusterctl {verb}`")


def _renamed(text: str, name: str) -> str:
    """Return the text of a spec with another name of the cluster, also in its comments."""
    if not is_cluster_name(name):
        raise UsageError(
            f"--name {shown(name)} can't be the name of a cluster",
            about="cluster-name",
            fix=f"give {PATTERNS['label'].asks_for}",
        )
    return re.sub(r"(?<=^name: ).*|\bdemo(?=-ctl|-train)", name, text, flags=re.MULTILINE)


def _write_examples(screen: Screen, *, force: bool) -> None:
    folder = Path("examples")
    unwanted = shutil.ignore_patterns("__pycache__")
    with _new(folder):
        shutil.copytree(data_folder("examples"), folder, dirs_exist_ok=force, ignore=unwanted)
    answer = {"folder": str(folder), "files": sorted(path.name for path in folder.iterdir())}
    screen.result(answer, f"wrote {folder}/; {folder}/README.md explains how to run each example")


def _write_skill(screen: Screen, *, force: bool) -> None:
    """Write the skill to where agents look for skills. Claude Code reads only its own folder, which
    gets a link.
    """
    folder = Path(".agents", "skills", "clusterctl")
    link = Path(".claude", "skills", "clusterctl")
    linked = Path("..", "..", folder)
    if os.path.lexists(link) and not (link.is_symlink() and link.readlink() == linked):
        raise UsageError(
            f"{link} already exists, and is not a link to {folder}",
            code="exists",
            about="file",
            fix=f"move it away, or make it a link to {linked}, then run the command again",
        )
    with _new(folder):
        shutil.copytree(data_folder("skills") / "clusterctl", folder, dirs_exist_ok=force)
    with _new(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(linked)
    answer = {"folder": str(folder), "files": sorted(path.name for path in folder.iterdir())}
    screen.result(answer, f"wrote {folder}/, and {link} as a link to it")


@contextmanager
def _new(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as exc:
        fix = "pass --force to overwrite it"
        raise UsageError(f"{path} already exists", code="exists", about="file", fix=fix) from exc
    except OSError as exc:
        raise UsageError(
            f"{path} can't be written",
            code="file-unwritable",
            why=exc.strerror or str(exc),
            fix="correct its permissions, or work in another folder",
        ) from exc


def validate(
    screen: Screen,
    spec_file: Annotated[
        Path | None,
        argument(
            "The spec. Default: that of -f, or ./cluster.yaml.",
            metavar="[FILE]",
            local=LocalValue.PATH,
        ),
    ] = None,
) -> None:
    """Validate a spec, and report all errors with their lines."""
    if spec_file is not None and (screen.file or screen.cluster is not None):
        raise excluded("FILE", "-f or --cluster")
    chosen = screen.chosen() if spec_file is None else replace(screen.chosen(), file=spec_file)
    spec = spec_of(chosen)
    nodes = sum(partition.nodes for partition in spec.partitions)
    kind = spec.provider.type
    lines = [f"valid: cluster {spec.name!r}, provider {kind}, {counted(nodes, 'node')}"]
    answer: dict[str, Any] = {"cluster": spec.name, "provider": spec.provider.type, "nodes": nodes}
    if machines := spec.provider.rented_machines(spec):
        counts = {partition.name: partition.nodes for partition in spec.partitions}
        lines.append(f"  the controller: {machines.controller.name}")
        lines += (
            f"  {partition}: {counts[partition]} x {machine.name}"
            + (f" with {machine.gpus}" if machine.gpus else "")
            for partition, machine in machines.partitions.items()
        )
        answer["machine_types"] = {
            partition: machine.name for partition, machine in machines.partitions.items()
        }
    if rejection := spec.provider.rejection(spec):
        screen.note(f"note: `up` would reject this spec: {rejection.what}; {rejection.fix}")
    if (requirements := spec.software.python.requirements) is not None:
        reject_named_by_spec(requirements)
        try:
            content_hash((requirements,))
        except UsageError as exc:
            screen.note(f"note: `up` would reject this spec: {exc.cause}")
    screen.result(answer, *lines)


def schema(
    screen: Screen, job: Annotated[bool, option("Print the schema of job files.")] = False
) -> None:
    """Print the JSON Schema of the spec, for editors."""
    document = job_schema() if job else json_schema()
    screen.document({"schema": document}, json.dumps(document, indent=2))
