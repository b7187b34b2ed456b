"""The files specific to a host, which are all that a new host from a template lacks.

A template has the configuration of its group, without names, addresses, sizes and secrets. Ansible runs
only on new hosts on which a probe does not find the expected files.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from operator import or_
from pathlib import Path
from typing import Any, Final

import jinja2

from clusterctl.configure import inventory_file
from clusterctl.hosts.probe import Checksums, HostReport, ProbeRequest
from clusterctl.hosts.roles import (
    key_marks,
    probe_requests,
    system_accounts,
)
from clusterctl.providers.templates import NodeFile, NodeFiles
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport, remote_argv
from clusterctl.util.assets import data_folder, read_table

# The tag of Ansible tasks that write files specific to a host or cluster.
_OWN: Final = "own_file"


def node_files(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, reports: Mapping[str, HostReport]
) -> NodeFiles:
    """Return host -> path -> host-specific file, with the content that Ansible's tasks would write.

    Files that tasks copy from ``workspace.rendered`` must exist already.
    reports: host -> facts. Hosts without facts have the distribution's Open MPI.
    """
    variables = inventory_file.role_variables(spec, inventory, workspace)
    files = {}
    for host, request in probe_requests(spec, inventory, workspace).items():
        params = Path(variables["openmpi_params_file"])
        if host in reports and reports[host].openmpi:
            params = Path(reports[host].openmpi, params.name)
        values = {**variables, "inventory_hostname": host, "openmpi_params_file": str(params)}
        of_mpi = (str(params.with_name(name)) for name in request.openmpi)
        with_mpi = replace(request, files=(*request.files, *of_mpi))
        files[host] = {
            path: file
            for role, task in _own_tasks()
            for path, file in _files_of_task(role, task, values, with_mpi)
        }
    return files


@cache
def _own_tasks() -> tuple[tuple[Path, Mapping[str, Any]], ...]:
    """Return pairs of an Ansible role's folder and its task that writes host-specific files."""
    files = sorted((data_folder("ansible") / "roles").glob("*/tasks/*.yml"))
    tasks = (
        (path, task)
        for path in files
        if _OWN in path.read_text()
        for task in read_table(path, list[Any])
    )
    return tuple((path.parents[1], task) for path, task in tasks if task.get("tags") == _OWN)


def _files_of_task(
    role: Path, task: Mapping[str, Any], values: Mapping[str, Any], request: ProbeRequest
) -> Iterator[tuple[str, NodeFile]]:
    """Yield (path, file) for each file of an Ansible task whose path ``request`` lists."""
    defaults = read_table(role / "defaults/main.yml", dict[str, Any])
    ((module, arguments),) = (
        (key, value) for key, value in task.items() if key.startswith("ansible.")
    )
    owner = {"root": 0, **system_accounts()}[arguments.get("owner", "root")]
    for item in task.get("loop", [""]):
        variables = {**defaults, **values, **task.get("vars", {}), "item": item}
        path = _value(arguments.get("dest") or arguments["path"], variables)
        mode = int(arguments["mode"], 8)
        if path in request.blocks:
            text = _value(arguments["block"], variables)
            yield path, NodeFile(text.encode(), mode, owner, request.blocks[path])
        elif path in request.files:
            if module.endswith("template"):
                text = (role / "templates" / arguments["src"]).read_text()
            elif "content" in arguments:
                text = arguments["content"]
            else:
                yield (
                    path,
                    NodeFile(Path(_value(arguments["src"], variables)).read_bytes(), mode, owner),
                )
                continue
            yield path, NodeFile(_value(text, variables).encode(), mode, owner)


class _Context(jinja2.runtime.Context):
    """Looks up template variables as Ansible does: a value that is itself a template is evaluated
    first.
    """

    def resolve_or_missing(self, key: str) -> Any:
        value = super().resolve_or_missing(key)
        return _value(value, self.get_all()) if isinstance(value, str) and "{{" in value else value


class _Environment(jinja2.Environment):
    context_class = _Context


_ANSIBLE: Final = _Environment(
    undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
)
_ANSIBLE.filters |= {
    "combine": or_,
    "quote": shlex.quote,
    "from_json": json.loads,
    "to_nice_json": partial(json.dumps, indent=4, sort_keys=True),
}
_ANSIBLE.globals |= {
    "ansible_managed": "Ansible managed",
    "lookup": lambda _, path: Path(path).read_text(),
}
_expression = cache(partial(_ANSIBLE.compile_expression, undefined_to_none=False))
_template = cache(_ANSIBLE.from_string)


def _value(text: str, variables: Mapping[str, Any]) -> Any:
    """Evaluate a template. Return text, but for a single ``{{ expression }}`` its value."""
    match = re.fullmatch(r"{{((?:(?!}}).)*)}}", text)
    return (
        _expression(match[1].strip())(**variables) if match else _template(text).render(**variables)
    )


def expected_marks(files: Mapping[str, NodeFile]) -> Checksums:
    """Return the checksums that a probe finds on a host that has ``files`` (path -> file)."""
    return {_key(path, file): file.mark for path, file in files.items()}


def marks_from_template(
    spec: ClusterSpec, inventory: Inventory, files: NodeFiles
) -> dict[str, Checksums]:
    """Return host -> the checksums that a probe finds on a new host that needs no Ansible.

    The controller needs Ansible unless the homes have exactly the spec's keys of people.
    """
    keys = {inventory.controller.name: key_marks(spec)}
    return {host: {**expected_marks(own), **keys.get(host, {})} for host, own in files.items()}


def _key(path: str, file: NodeFile) -> str:
    return f"{'block' if file.edges else 'file'} {path}"


def can_renew(files: Mapping[str, NodeFile], checksums: Checksums) -> bool:
    """Return whether ``renew`` can update a host: all files are probed, no secret file differs.

    files: path -> wanted file. checksums: the checksums that a probe of the host found.
    """
    marks = expected_marks(files)
    secrets = [f"file {path}" for path, file in files.items() if not file.mode & 0o077]
    return marks.keys() <= checksums.keys() and all(checksums[key] == marks[key] for key in secrets)


def renew(files: Mapping[str, NodeFile], checksums: Checksums, transport: Transport) -> None:
    """Rewrite the ``files`` with another checksum on the host, and restart the units that read
    them.
    """
    stale = {
        path: files[path]
        for path in files
        if checksums[_key(path, files[path])] != files[path].mark
    }
    if stale:
        contents = {
            path: (file.data.decode(), file.mode, file.edges) for path, file in stale.items()
        }
        transport.run(
            ("sudo", "-n", *remote_argv("clusterctl.hosts.remote_own_files", json.dumps(contents)))
        )
