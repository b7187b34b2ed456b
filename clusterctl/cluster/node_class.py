"""What the hosts of a group have in common is configured once; what each has for itself is data.

Which compute nodes are equal, the spec decides; controllers are if their clusters have one name and the same
accounts. The class is keyed by a hash of all that goes in; files of each host have what differs: addresses,
sizes, secrets. A host that was made so is looked at like any other: where it does not show what it was given,
Ansible configures it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from operator import or_
from pathlib import Path
from typing import Any, Final

import jinja2

from clusterctl.cluster.context import ClusterContext
from clusterctl.configure import inventory_file
from clusterctl.hosts.probe import Checksums
from clusterctl.hosts.roles import probe_requests, system_accounts
from clusterctl.providers.base import Provisioned
from clusterctl.providers.node_class import NodeFile, NodeFiles
from clusterctl.scheduler.slurm_conf import TASK_PROLOG, takes_nodes_by_reconfigure
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory, distribution_ahead
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport, remote_argv
from clusterctl.util.assets import ansible_hash, asset, digest

_HOSTS: Final = "/etc/hosts"
_EDGES: Final = ("# BEGIN hosts of this cluster (clusterctl)\n", "# END hosts of this cluster (clusterctl)\n")
_MUNGE_KEY: Final = "/etc/munge/munge.key"
_SLURMD: Final = "/etc/systemd/system/slurmd.service.d/clusterctl.conf"
_HEALTH: Final = "/opt/clusterctl/health.json"
_SLURM: Final = ("slurm.conf", "gres.conf", "cgroup.conf", "topology.conf")  # a controller's
_SLURMDBD: Final = "/etc/slurm/slurmdbd.conf"


def has_classes(cluster: ClusterContext) -> bool:
    """Return whether new hosts of the cluster can share what is configured."""
    return cluster.provider.known_shared is not None and inventory_file.has_classes(cluster.spec)


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


def node_files(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, rendered: Mapping[str, str]
) -> NodeFiles:
    """Host -> the files that it has for itself; ``rendered`` are those made for all hosts."""
    variables = inventory_file.role_variables(spec, inventory, workspace)
    accounts = system_accounts()
    munge = NodeFile(workspace.munge_key.read_bytes(), 0o400, accounts["munge"])
    openmpi = NodeFile(_templated("openmpi/templates/openmpi-mca-params.conf.j2", variables))
    health = json.loads(rendered[inventory_file.HEALTH_FILE])
    digests = json.loads(rendered[inventory_file.SLURMD_FILE])
    slurmd = "slurmd/templates/clusterctl.conf.j2"
    prolog = "job_env/templates/task-prolog.sh.j2"
    of_tasks = {
        **variables,
        "job_env_root": "/opt/clusterctl",
        "job_env_fabric": {},
        "job_env_variables": {},
        "job_env_gpus": {"uuids": ()},
    }
    # Without PMIx the nodes have one, which says no more than that.
    of_all = {} if inventory.pmix else {TASK_PROLOG: NodeFile(_templated(prolog, of_tasks), 0o755)}
    slurm = {f"/etc/slurm/{name}": NodeFile(rendered[name].encode()) for name in _SLURM}
    slurm[_SLURMDBD] = NodeFile(rendered[Path(_SLURMDBD).name].encode(), 0o600, accounts["slurm"])
    of_compute = {
        host.name: {
            _SLURMD: NodeFile(_templated(slurmd, {**variables, "slurmd_config_digest": digests[host.name]})),
            _HEALTH: NodeFile((json.dumps(health[host.name], indent=4, sort_keys=True) + "\n").encode()),
        }
        for host in inventory.compute
    }
    return {
        host.name: {
            _MUNGE_KEY: munge,
            **of_all,
            inventory.distribution.openmpi_conf: openmpi,
            **of_compute.get(host.name, slurm),
            _HOSTS: NodeFile(_hosts_file(host, inventory).encode()),
        }
        for host in inventory.hosts
    }


def _hosts_file(host: Host, inventory: Inventory) -> str:
    lines = "".join(f"{one.address} {one.name}\n" for one in inventory.hosts)
    return f"127.0.0.1 localhost\n{host.address} {host.name}\n{_EDGES[0]}{lines}{_EDGES[1]}"


def _templated(template: str, variables: Mapping[str, Any]) -> bytes:
    """The text of a role's template, as Ansible writes it."""
    environment = jinja2.Environment(  # noqa: S701 - no HTML
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"combine": or_, "quote": shlex.quote}  # Ansible's
    source = (asset("ansible") / "roles" / template).read_text()
    return environment.from_string(source).render(ansible_managed="Ansible managed", **variables).encode()


def _hosts_block(files: Mapping[str, NodeFile]) -> str:
    return files[_HOSTS].data.decode().partition(_EDGES[0])[2].partition(_EDGES[1])[0]


def own_marks(files: Mapping[str, NodeFile]) -> Checksums:
    """What the probe of a node shows of the files that it has for itself."""
    block = NodeFile(_hosts_block(files).encode()).mark.partition(" ")[0]
    marks = {f"file {path}": file.mark for path, file in files.items() if path != _HOSTS}
    return {**marks, f"block {_HOSTS}": block}


def can_renew(files: Mapping[str, NodeFile], seen: Checksums) -> bool:
    """Whether a host as it was seen lacks nothing but newer files of its own, none of them secret."""
    marks = own_marks(files)
    secrets = [f"file {path}" for path, file in files.items() if not file.mode & 0o077]
    return all(seen.get(key) == marks[key] for key in secrets) and f"block {_HOSTS}" in seen


def renew(files: Mapping[str, NodeFile], seen: Checksums, transport: Transport) -> None:
    """Write on a host those of its own files that it shows otherwise, and restart slurmd if it reads one."""
    marks = own_marks(files)
    changed = {
        path: [file.data.decode(), file.mode]
        for path, file in files.items()
        if path != _HOSTS and seen.get(f"file {path}") != marks[f"file {path}"]
    }
    block = f"block {_HOSTS}"
    blocks = {} if seen[block] == marks[block] else {_HOSTS: [_EDGES[0], _hosts_block(files), _EDGES[1]]}
    if changed or blocks:
        asked = {"files": changed, "blocks": blocks, "units": {"slurmd": _SLURMD}}
        argv = remote_argv("clusterctl.cluster.remote_own_files", json.dumps(asked))
        transport.run(("sudo", "-n", *argv))


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


def marks_of_class(
    cluster: ClusterContext, provisioned: Provisioned, files: NodeFiles
) -> dict[str, Checksums]:
    """Host -> what its probe has to show: it has the files of its class, and these of its own.

    Where services are, and what stands in the accounting, can't be told from files.
    """
    spec, inventory = cluster.spec, provisioned.inventory
    requests = probe_requests(spec, inventory, cluster.workspace)
    homes = {user.name: f"{inventory.shared}/home/{user.name}" for user in spec.users}
    users = {f"user {u.name}": f"{u.uid}:{u.uid} {u.name} {homes[u.name]} /bin/bash" for u in spec.users}
    return {
        host.name: {
            **{f"file {path}": mark for path, mark in marks.items() if path in requests[host.name].files},
            **own_marks(files[host.name]),
            **users,
            **{f"package {name}": "installed" for name in requests[host.name].packages},
        }
        for host in inventory.hosts
        if host.name in files and (marks := provisioned.class_marks[host.roles[0]]) is not None
    }
