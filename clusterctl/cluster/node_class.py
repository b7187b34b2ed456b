"""The class of a group of hosts: what they have in common, configured once; and each host's own files.

A class is keyed by a hash of all that goes in. Addresses, sizes and secrets are in files of each host. A host
that does not show what it was given is configured by Ansible.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache, partial
from operator import or_
from pathlib import Path
from typing import Any, Final

import jinja2

from clusterctl.cluster.context import ClusterContext
from clusterctl.configure import inventory_file
from clusterctl.hosts.probe import Checksums, ProbeRequest
from clusterctl.hosts.roles import can_share, probe_requests, system_accounts
from clusterctl.providers.node_class import NodeFile, NodeFiles
from clusterctl.scheduler.slurm_conf import takes_nodes_by_reconfigure
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Inventory, distribution_ahead
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport, remote_argv
from clusterctl.util.assets import ansible_hash, asset, digest, table


def has_classes(cluster: ClusterContext) -> bool:
    """Return whether new hosts of the cluster can share what is configured."""
    return cluster.provider.known_shared is not None and can_share(cluster.spec)


def class_inputs(variables: Mapping[str, Any]) -> str:
    """A digest of all that decides what a class has, besides the image under it."""
    return digest(ansible_hash(), json.dumps(variables, sort_keys=True, default=str))


def class_ahead(cluster: ClusterContext) -> str:
    """Return the inputs of the class that new nodes would be of; "" if they would be of none."""
    distribution = distribution_ahead(cluster.spec, cluster.workspace)
    if distribution is None or not has_classes(cluster):
        return ""
    shared = str(cluster.provider.known_shared)
    return class_inputs(inventory_file.class_variables(cluster.spec, distribution, shared))


_OWN: Final = "own_file"  # the tag of tasks that write what differs by host, or by cluster


def node_files(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> NodeFiles:
    """Return the files that hosts of a class have for themselves, as the roles' tasks would write them.

    The files that these copy from ``workspace.rendered`` are there already.
    """
    variables = inventory_file.role_variables(spec, inventory, workspace)
    return {
        host: {
            path: file
            for role, task in _own_tasks()
            for path, file in _written(role, task, {**variables, "inventory_hostname": host}, request)
        }
        for host, request in probe_requests(spec, inventory, workspace).items()
    }


@cache
def _own_tasks() -> tuple[tuple[Path, Mapping[str, Any]], ...]:
    """The tasks that write what differs by host, each with the folder of its role."""
    files = sorted((asset("ansible") / "roles").glob("*/tasks/*.yml"))
    tasks = ((path, task) for path in files if _OWN in path.read_text() for task in table(path, list[Any]))
    return tuple((path.parents[1], task) for path, task in tasks if task.get("tags") == _OWN)


def _written(
    role: Path, task: Mapping[str, Any], given: Mapping[str, Any], request: ProbeRequest
) -> Iterator[tuple[str, NodeFile]]:
    """The files that a task writes on a host, of those that the host is to have."""
    defaults = table(role / "defaults/main.yml", dict[str, Any])
    ((module, arguments),) = ((key, value) for key, value in task.items() if key.startswith("ansible."))
    owner = {"root": 0, **system_accounts()}[arguments.get("owner", "root")]
    for item in task.get("loop", [""]):
        variables = {**defaults, **given, **task.get("vars", {}), "item": item}
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
                yield path, NodeFile(Path(_value(arguments["src"], variables)).read_bytes(), mode, owner)
                continue
            yield path, NodeFile(_value(text, variables).encode(), mode, owner)


class _Context(jinja2.runtime.Context):
    """Variables as Ansible resolves them: the value of a default may be a template of its own."""

    def resolve_or_missing(self, key: str) -> Any:
        value = super().resolve_or_missing(key)
        return _value(value, self.get_all()) if isinstance(value, str) and "{{" in value else value


class _Environment(jinja2.Environment):
    context_class = _Context


_ANSIBLE: Final = _Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
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
    """Evaluate a template; an expression alone keeps the type of its value."""
    alone = re.fullmatch(r"{{((?:(?!}}).)*)}}", text)
    return _expression(alone[1].strip())(**variables) if alone else _template(text).render(**variables)


def own_marks(files: Mapping[str, NodeFile]) -> Checksums:
    """What the probe of a node shows of the files that it has for itself."""
    return {_key(path, file): file.mark for path, file in files.items()}


def _key(path: str, file: NodeFile) -> str:
    return f"{'block' if file.edges else 'file'} {path}"


def can_renew(files: Mapping[str, NodeFile], seen: Checksums) -> bool:
    """Whether a host as it was seen lacks nothing but newer files of its own, none of them secret."""
    marks = own_marks(files)
    secrets = [f"file {path}" for path, file in files.items() if not file.mode & 0o077]
    return marks.keys() <= seen.keys() and all(seen[key] == marks[key] for key in secrets)


def renew(files: Mapping[str, NodeFile], seen: Checksums, transport: Transport) -> None:
    """Write on a host those of its own files that it shows otherwise, and restart units that read them."""
    stale = {path: files[path] for path in files if seen[_key(path, files[path])] != files[path].mark}
    if stale:
        asked = {path: (file.data.decode(), file.mode, file.edges) for path, file in stale.items()}
        transport.run(("sudo", "-n", *remote_argv("clusterctl.hosts.remote_own_files", json.dumps(asked))))


def shared_inputs(cluster: ClusterContext, inventory: Inventory) -> Mapping[str, str]:
    """Group -> the digest of all that decides what its hosts have, but for the files of their own.

    None where those are not all that differs; no controller's where it has to start its slurmctld anew.
    """
    spec = cluster.spec
    # Hosts that are not baked also have a firewall, or a mount.
    if not has_classes(cluster) or not inventory.baked:
        return {}
    found = {COMPUTE: inventory_file.class_variables(spec, inventory.distribution, inventory.shared)}
    if takes_nodes_by_reconfigure(inventory):
        alone = {"host": inventory.controller.model_dump(mode="json"), "slurm": inventory.slurm}
        given = inventory_file.role_variables(spec, inventory, cluster.workspace)
        in_files = ("common_hosts", "openmpi_yield_when_idle")
        found[CONTROLLER] = alone | {key: given[key] for key in given if key not in in_files}
    return {group: class_inputs(variables) for group, variables in found.items()}
