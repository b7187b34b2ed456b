"""Input for Ansible: `inventory.yml`.

It has hosts, groups and all role variables, so it also works with `ansible-playbook -i`.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from clusterctl.hosts.probe import HostReport
from clusterctl.hosts.roles import cluster_roles, host_roles, spec_variables
from clusterctl.packages.os_packages import PLAIN
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.hosts import is_this_machine
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import ADMIN_USER, MPI_SSH, MPI_SSH_FOLDER, PROOF_ACCOUNT
from clusterctl.spec.scheduler import DEFAULT
from clusterctl.spec.software import Software
from clusterctl.state.inventory import (
    COMPUTE,
    CONTROLLER,
    KEEPALIVE,
    LOGIN,
    Host,
    Inventory,
)
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import Connect
from clusterctl.transport.openssh import NO_FORWARDING
from clusterctl.util.assets import (
    data_folder,
    digest,
    gpu_lock,
    install_inputs,
    job_lock,
)
from clusterctl.util.process import parallel_map

# Rendered file: node -> the GPUs that its driver shows.
GPUS_FILE = "gpus.json"
# Rendered files that roles copy: /etc/hosts of all hosts, Open MPI's parameters, and the folder with
# the files of each host.
HOSTS_FILE = "etc_hosts"
OPENMPI_FILE = "openmpi-mca-params.conf"
OF_HOSTS = "hosts"
# The cluster in the accounting database of a controller's template. Before slurmdbd first starts on
# a controller, ansible/files/name_cluster.sh replaces it. No spec can have this name.
TEMPLATE_CLUSTER = "any_cluster"
# Only the distribution's own Python has the bindings of the package manager.
PYTHON = "/usr/bin/python3"

_OF_EACH: Final = ("common", "health", "job_env", "munge", "openmpi", "users")
# Group of hosts -> its roles in class.yml.
CLASS_ROLES: Final = {
    COMPUTE: ("slurmd", *_OF_EACH),
    CONTROLLER: ("mariadb", "slurmctld", "slurmdbd", *_OF_EACH),
}

Variables = dict[str, Any]


def write_inventory(inventory: Inventory, workspace: Workspace, variables: Variables) -> None:
    """Write the Ansible inventory of these hosts. It names the files of secrets, but contains no
    secret.
    """
    write_atomic(workspace.ansible_inventory, inventory_text(inventory, workspace, variables))


def cluster_variables(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> Variables:
    """Return the Ansible variables for configuring a cluster: those of all its roles, and the
    playbooks' own.
    """
    return {
        "clusterctl_baked": inventory.baked,
        "clusterctl_scheduler": inventory.scheduler,
        "clusterctl_install_mark": install_mark(inventory, spec.software),
        **role_variables(spec, inventory, workspace),
    }


def image_variables(
    spec: ClusterSpec, distribution: Distribution, wheels: Path, lock: Path
) -> Variables:
    """Return the Ansible variables for running `install.yml` on a host that becomes a disk
    image.
    """
    return {
        "clusterctl_install_mark": install_mark(),
        "clusterctl_image": True,
        **_distribution(distribution),
        **_job_packages(wheels, lock),
        **spec_variables(spec, ("common",)),
    }


def class_variables(
    spec: ClusterSpec, distribution: Distribution, shared: str, group: str = COMPUTE
) -> Variables:
    """Return the Ansible variables for the configuration that hosts of a group share, even across
    clusters.

    shared: path of the shared folder. Addresses, secrets and names of the cluster and its nodes are
    not included, because they are in host-specific files. Variables of both groups (controller,
    compute) have the same value in both.
    """
    of_controller = {"slurmctld_cluster": TEMPLATE_CLUSTER, **_accounting(spec)}
    return {
        "clusterctl_scheduler": spec.scheduler,
        "users_home_root": f"{shared}/home",
        "users_homes_node_local": False,
        # Home folders are on the shared folder.
        "users_makes_homes": False,
        "users_key_mark": "",
        "users_accounts": [
            {"name": u.name, "uid": u.uid, "ssh_authorized_keys": []} for u in spec.users
        ],
        **(of_controller if group == CONTROLLER else {}),
        **_distribution(distribution),
        **spec_variables(spec, CLASS_ROLES[group]),
    }


def class_sources(rendered: Path) -> Variables:
    """Return the Ansible variables with the files in ``rendered`` that a controller's template
    needs.
    """
    return {
        "slurmdbd_config_src": _literal(str(rendered / "slurmdbd.conf")),
        "slurmctld_config_src": _literal(str(rendered)),
    }


def machine_image_variables(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, of_class: Variables
) -> Variables:
    """Return the Ansible variables for `image.yml`, which prepares a machine to be an image.

    The machine is installed like a node of this cluster, so nodes from this image need no
    installation. of_class: see ``class_variables``.
    """
    of_cluster = ("job_env_gpus_src", "openmpi_params_src", "slurmd_unit_src", "health_config_src")
    variables = cluster_variables(spec, inventory, workspace)
    return {
        **{name: value for name, value in variables.items() if name not in of_cluster},
        "image_home": f"/home/{ADMIN_USER}",
        "clusterctl_image": True,
        **of_class,
    }


def inventory_text(inventory: Inventory, workspace: Workspace, variables: Variables) -> str:
    """Return the Ansible inventory of these hosts, which are reached by the workspace's
    ssh_config.
    """
    hosts = {host.name: _host_variables(host) for host in inventory.hosts}
    groups: dict[str, Collection[str]] = {
        role: [host.name for host in inventory.hosts if role in host.roles]
        for role in (CONTROLLER, COMPUTE, LOGIN)
    }
    children: dict[str, Variables] = {
        group: {"hosts": {name: hosts[name] for name in names}} for group, names in groups.items()
    }
    for group, names in _groups(inventory, hosts, variables).items():
        children[f"clusterctl_{group}"] = {"hosts": {name: {} for name in names}}
    connection = {
        # The ssh_config has the hosts' addresses, users and keys.
        "ansible_ssh_common_args": _literal(
            shlex.join(("-F", str(workspace.ssh_config), *NO_FORWARDING))
        ),
        "ansible_python_interpreter": PYTHON,
        # Otherwise Ansible alone needs setfacl on the hosts for tasks of job users.
        "ansible_pipelining": True,
        "mitogen_ssh_compression": False,
        # mitogen passes its own 30 seconds and 10 questions to ssh, which override the ssh_config.
        **{f"mitogen_ssh_keepalive_{key}": value for key, value in KEEPALIVE.items()},
        # By default, Ansible would share a connection with a host of the same name in another
        # cluster.
        "ansible_control_path": f"%(directory)s/{inventory.cluster_id}-%%C",
    }
    document = {"all": {"vars": {**connection, **variables}, "children": children}}
    playbook = data_folder("ansible") / "site.yml"
    head = f"# Written by clusterctl; use it with: ansible-playbook -i THIS_FILE {playbook}\n"
    return head + yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=2**16
    )


class _Literal(str):
    """Text that Ansible must not read as a template."""

    __slots__ = ()


class _Dumper(yaml.CSafeDumper):
    # Repeat equal values instead of using aliases.
    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


_Dumper.add_representer(
    _Literal, lambda dumper, text: dumper.represent_scalar("!unsafe", str(text), style="'")
)


def _groups(
    inventory: Inventory, hosts: Mapping[str, Variables], variables: Variables
) -> dict[str, Collection[str]]:
    exports = inventory.shared_folder.kind == "nfs"
    conditions = {
        "own": variables.get("clusterctl_keeps"),
        "guarded": variables.get("clusterctl_guarded"),
        "baked": variables.get("clusterctl_baked"),
        "bucket": "bucket_name" in variables,
        "auto_down": "auto_down_cluster" in variables,
        "scheduler_slurm": variables.get("clusterctl_scheduler") == "slurm",
        "scheduler_none": variables.get("clusterctl_scheduler") == "none",
    }
    return {
        "exports": [host.name for host in inventory.hosts if exports and host.is_controller],
        **{name: hosts if holds else () for name, holds in conditions.items()},
    }


def install_mark(inventory: Inventory | None = None, software: Software = PLAIN) -> str:
    """Hash the inputs of an installation (default: of an image), to name the file that marks it as
    done.
    """
    inputs: dict[str, bool] = {}
    if inventory is not None:
        kind = inventory.shared_folder.kind
        scheduler = inventory.scheduler
        inputs = {
            kind: inventory.shared_folder.kind != "existing",
            f"scheduler: {scheduler}": scheduler != DEFAULT,
            "bucket": bool(inventory.bucket),
            "scratch": any(host.local_ssds for host in inventory.hosts),
        }
    inputs |= dict.fromkeys(sorted(f"package {name}" for name in software.packages), True)
    inputs |= {
        software.slurm.origin: software.slurm != PLAIN.slurm,
        "apptainer": software.apptainer,
        software.nvidia.model_dump_json(): software.nvidia.installs,
    }
    return digest(*install_inputs(), *(text for text, counts in inputs.items() if counts))


def role_variables(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> Variables:
    """Return the variables of all Ansible roles. A variable's name begins with the name of its
    role.
    """
    runs = cluster_roles(spec, inventory)
    rendered = _literal(str(workspace.rendered))
    key = workspace.read_admin_key()
    return {
        "common_hosts_src": _literal(str(workspace.rendered / HOSTS_FILE)),
        "shared_storage_path": inventory.shared,
        "shared_storage_cluster_id": inventory.cluster_id,
        **_shared_folder(inventory),
        "users_home_root": f"{inventory.shared}/home",
        "users_key_mark": spec.key_mark,
        "users_accounts": [
            {
                "name": u.name,
                "uid": u.uid,
                "ssh_authorized_keys": [key, *map(_literal, spec.key_lines(u))],
            }
            for u in spec.users
        ],
        **(_slurm(spec, workspace) if "slurmctld" in runs else {}),
        **(_mpi_ssh(inventory) if "mpi_ssh" in runs else {}),
        "health_config_src": _literal(str(workspace.rendered / OF_HOSTS)),
        **_distribution(inventory.distribution),
        **_repositories(spec, inventory.distribution),
        "openmpi_params_src": _literal(str(workspace.rendered / OPENMPI_FILE)),
        "openmpi_fabric": spec.provider.may_have_fabric,
        "job_env_network": inventory.network,
        "job_env_gpus_src": _literal(str(workspace.rendered / GPUS_FILE)),
        "job_env_gpu_wheelhouse": _literal(str(workspace.gpu_wheels)),
        "job_env_gpu_requirements": _literal(str(gpu_lock())),
        **({"bucket_name": inventory.bucket} if inventory.bucket else {}),
        **_auto_down(spec, inventory),
        **own_machine_variables(spec, inventory),
        **({"apptainer_fetched": rendered} if "apptainer" in runs else {}),
        **{
            name: _literal(v) if isinstance(v, str) else v
            for name, v in spec_variables(spec, runs).items()
        },
        **({} if inventory.baked else _job_packages(workspace.wheels, job_lock())),
    }


def _slurm(spec: ClusterSpec, workspace: Workspace) -> Variables:
    return {
        "munge_key_src": _literal(str(workspace.munge_key)),
        "slurmdbd_config_src": _literal(str(workspace.rendered / "slurmdbd.conf")),
        "slurmctld_cluster": spec.name,
        "slurmctld_config_src": _literal(str(workspace.rendered)),
        **_accounting(spec),
        "slurmd_unit_src": _literal(str(workspace.rendered / OF_HOSTS)),
        "login_config_src": _literal(str(workspace.rendered)),
    }


def _mpi_ssh(inventory: Inventory) -> Variables:
    return {
        "openmpi_ssh": MPI_SSH,
        "firewall_slurm": False,
        "mpi_ssh_folder": MPI_SSH_FOLDER,
        "firewall_more_ports": sorted({f"{host.port}/tcp" for host in inventory.hosts}),
        "mpi_ssh_hosts": [
            {"name": host.name, "address": host.address, "port": host.port, "key": host.host_key}
            for host in inventory.hosts
        ],
    }


def _literal(text: str) -> str:
    """Return a string that Ansible does not evaluate as a template, even if a path contains
    braces.
    """
    return _Literal(text) if "{" in text else text


def _host_variables(host: Host) -> Variables:
    variables = {
        "clusterctl_partition": host.partition,
        "job_env_variables": {n: _literal(value) for n, value in host.job_environment.items()},
        "scratch_disks": host.local_ssds,
    }
    return {name: value for name, value in variables.items() if value}


def _shared_folder(inventory: Inventory) -> Variables:
    folder = inventory.shared_folder
    variables = {
        "shared_storage_kind": folder.kind,
        "shared_storage_server": folder.server,
        "shared_storage_export": folder.path,
        "shared_storage_disk": folder.disk,
        "shared_storage_network": inventory.network if folder.kind == "nfs" else None,
        "users_homes_node_local": folder.kind == "none",
    }
    return {name: value for name, value in variables.items() if value is not None}


def _job_packages(wheels: Path, lock: Path) -> Variables:
    return {
        "job_env_wheelhouse": _literal(str(wheels)),
        "job_env_requirements": _literal(str(lock)),
    }


def _distribution(distribution: Distribution) -> Variables:
    return {
        "clusterctl_release": distribution.release,
        "mariadb_config_file": distribution.mariadb_conf,
        "mariadb_socket": distribution.mariadb_socket,
        "openmpi_params_file": distribution.openmpi_conf,
        "openmpi_module": distribution.mpi_module or "",
        "job_env_python": distribution.python,
        **({"cuda_oldest": distribution.oldest_cuda} if distribution.oldest_cuda else {}),
    }


def _repositories(spec: ClusterSpec, distribution: Distribution) -> Variables:
    mirrors = spec.software.mirrors
    slurm = spec.software.slurm
    variables = {
        "repositories_openhpc": slurm.origin == "openhpc",
        "repositories_slurm": slurm.repository.model_dump() if slurm.repository else {},
        "repositories_mirrors": mirrors.model_dump(exclude_none=True, exclude={"bundle"}),
        "packages_bundle": mirrors.bundled(distribution.release),
    }
    return {name: value for name, value in variables.items() if value}


def _auto_down(spec: ClusterSpec, inventory: Inventory) -> Variables:
    """Return the variables with which the role auto_down turns its timer on or off. {} outside
    clouds.
    """
    if not spec.provider.is_cloud:
        return {}
    return {
        "auto_down_after_s": spec.provider.idle_timeout_s or 0,
        "auto_down_cluster": {
            **spec.provider.location,
            "cluster": spec.name,
            "cluster_id": inventory.cluster_id,
            "controller": inventory.controller.name,
            "hosts": [host.name for host in inventory.compute],
        },
    }


def _accounting(spec: ClusterSpec) -> Variables:
    # The first user also runs the verification job.
    users: list[Variables] = [
        {
            "name": u.name,
            "accounts": [*u.accounts, *([PROOF_ACCOUNT] if u == spec.job_user else ())],
            "limits": dict.fromkeys(u.accounts, u.limits),
        }
        for u in spec.users
    ]
    limits = {account.name: account.limits for account in spec.slurm.accounts}
    names = {*limits, *(name for user in users for name in user["accounts"])}
    return {
        "slurmctld_accounting_accounts": [
            {"name": name, "limits": limits.get(name, {})} for name in sorted(names)
        ],
        "slurmctld_accounting_users": users,
        "slurmctld_accounting_qos": [
            {"name": q.name, "priority": q.priority, "limits": q.limits} for q in spec.slurm.qos
        ],
    }


def own_machine_variables(spec: ClusterSpec, inventory: Inventory) -> Variables:
    """Return the Ansible variables of the roles time, tuning, firewall and selinux. {} for local
    clusters.
    """
    if spec.provider.shares_kernel:
        return {}
    kind = inventory.shared_folder.kind
    guarded = {
        # An active firewall and SELinux must allow the cluster's traffic. Traffic of a machine to
        # itself is always allowed.
        "clusterctl_guarded": True,
        "firewall_addresses": [
            h.address for h in inventory.hosts if not is_this_machine(h.address)
        ],
        "firewall_exports": kind == "nfs",
        "selinux_homes": f"{inventory.shared}/home",
        "selinux_homes_are": {"nfs": "exported", "none": "node-local"}.get(kind, "mounted"),
    }
    if not spec.provider.adopts_hosts:
        return guarded
    return {
        # The owner's files are kept on the machines, because `down` moves them back.
        "clusterctl_keeps": True,
        "clusterctl_roles": host_roles(spec, inventory),
        "time_controller": inventory.controller.address,
        "time_network": inventory.network,
        "firewall_serves_time": True,
        **guarded,
    }


# Prints a line for each mark file of a finished installation that exists.
_FIND_MARKS: Final = 'for mark; do [ ! -e "$mark" ] || echo there; done'


def hosts_to_install(
    inventory: Inventory, software: Software, reports: Mapping[str, HostReport], to: Connect
) -> tuple[Host, ...]:
    """Return the hosts on which packages are missing. Nodes with GPUs also need ``software`` for
    GPUs.
    """
    mark = install_mark(inventory, software)
    nodes = inventory.compute if software.nvidia.installs else ()
    with_cards = {host.name for host in nodes if reports[host.name].cards}

    def lacks(host: Host) -> bool:
        argv = [
            "sh",
            "-c",
            _FIND_MARKS,
            "sh",
            *_marks(host, mark, with_cards=host.name in with_cards),
        ]
        return not to(host.name).run(argv).stdout

    lacking = parallel_map(inventory.hosts, lacks)
    return tuple(host for host, needed in zip(inventory.hosts, lacking, strict=True) if needed)


def _marks(host: Host, mark: str, *, with_cards: bool) -> tuple[str, ...]:
    """Return paths of files that `install.yml` creates at its end. If any exists, all packages are
    there.
    """
    mark_file = f"/opt/clusterctl/installed-{mark}"
    roles = [role for role in (CONTROLLER, COMPUTE) if role in host.roles] or [LOGIN]
    role_mark = f"{mark_file}-{roles[0]}" if len(roles) == 1 else mark_file
    return (f"{role_mark}-cards",) if with_cards else (mark_file, role_mark)
