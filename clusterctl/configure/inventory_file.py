"""`inventory.yml`: hosts, groups and every role variable, so that plain `ansible-playbook -i` works on it."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import TaggedScalar

from clusterctl.hosts.roles import cluster_roles
from clusterctl.packages.bundle import PAYLOAD, payload_tar
from clusterctl.spec.common import ADMIN_USER, Software
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.hosts import is_this_machine
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import COMPUTE, CONTROLLER, LOGIN, MPI_SSH, MPI_SSH_FOLDER, Host, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.assets import asset, digest, gpu_lock, install_inputs, job_lock, payload_hash

GPUS_FILE = "gpus.json"  # of the rendered ones: what each node's driver shows
HEALTH_FILE = "health.json"  # likewise: what each node must have
SLURMD_FILE = "slurmd.json"  # likewise: a digest of what its slurmd is started with
BUNDLE_FOLDER = "/var/lib/clusterctl-bundle"  # on an air-gapped host, while it is installed
PYTHON = "/usr/bin/python3"  # the platform's: it alone has the package manager's bindings

_AS_IN_AN_IMAGE = Software()

Variables = dict[str, Any]


def write_ansible_inventory(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> None:
    """Write the Ansible inventory, and the payload that it names. Only paths stand in it, no secrets."""
    write_atomic(workspace.rendered / PAYLOAD, payload_tar())
    write_atomic(workspace.ansible_inventory, inventory_text(spec, inventory, workspace))


def inventory_text(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> str:
    """The Ansible inventory."""
    variables = {
        "clusterctl_baked": inventory.baked,
        "clusterctl_scheduler": inventory.scheduler,
        "clusterctl_install_mark": install_mark(inventory, spec.software),
        **role_variables(spec, inventory, workspace),
    }
    return _text(inventory, workspace, variables)


def write_restore_inventory(inventory: Inventory, workspace: Workspace) -> None:
    """Write the Ansible inventory of hosts that are released: what `restore.yml` reads, without a spec."""
    cluster = {"shared_storage_cluster_id": inventory.cluster_id}
    variables = {**cluster, "clusterctl_keeps": inventory.traits.user_owned}
    write_atomic(workspace.ansible_inventory, _text(inventory, workspace, variables))


def _text(inventory: Inventory, workspace: Workspace, variables: Variables) -> str:
    hosts = {host.name: _host_variables(host) for host in inventory.hosts}
    document = {
        "all": {
            "vars": {
                **connection_variables(workspace.ssh_config),
                # By itself Ansible would share a connection with another cluster's host of the same name.
                "ansible_control_path": f"%(directory)s/{inventory.cluster_id}-%%C",
                **variables,
            },
            "children": {
                group: {"hosts": {h.name: hosts[h.name] for h in inventory.hosts if group in h.roles}}
                for group in (CONTROLLER, COMPUTE, LOGIN)
            },
        }
    }
    head = (
        f"# Written by clusterctl; use it with: ansible-playbook -i THIS_FILE {asset('ansible')}/site.yml\n"
    )
    return head + to_yaml(document)


def install_mark(inventory: Inventory | None = None, software: Software = _AS_IN_AN_IMAGE) -> str:
    """Names the file by which a host tells that all is installed; without an inventory, that of an image."""
    more: dict[str, bool] = {}
    if inventory is not None:
        kind, scheduler = inventory.shared_folder.kind, inventory.scheduler
        more = {
            kind: kind != "existing",
            f"scheduler: {scheduler}": scheduler != Inventory.model_fields["scheduler"].default,
            "bucket": bool(inventory.bucket),
            "scratch": any(host.local_ssds for host in inventory.hosts),
        }
    more |= {
        "openhpc": software.slurm == "openhpc",
        "apptainer": software.apptainer,
        software.nvidia.model_dump_json(): software.nvidia.installs,
    }
    return digest(*install_inputs(), *(text for text, counts in more.items() if counts))


def connection_variables(ssh_config: Path) -> Variables:
    """How Ansible reaches hosts: by their names in an ssh_config, which says the rest."""
    return {
        "ansible_ssh_common_args": literal(f"-F {shlex.quote(str(ssh_config))}"),
        "ansible_python_interpreter": PYTHON,
        "mitogen_ssh_compression": False,
    }


def role_variables(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> Variables:
    """The variables of every role, each under the prefix of its role."""
    runs, rendered = cluster_roles(spec, inventory), literal(str(workspace.rendered))
    return {
        "common_hosts": [{"name": host.name, "address": host.address} for host in inventory.hosts],
        "shared_storage_path": inventory.shared,
        "shared_storage_cluster_id": inventory.cluster_id,
        **_shared_folder(inventory),
        "users_home_root": f"{inventory.shared}/home",
        "users_accounts": _accounts(spec, workspace),
        **(_slurm(spec, inventory, workspace) if "slurmctld" in runs else {}),
        **(_mpi_ssh(inventory) if "mpi_ssh" in runs else {}),
        "health_config_src": literal(str(workspace.rendered / HEALTH_FILE)),
        **distribution_variables(inventory.distribution),
        **_repositories(spec),
        "openmpi_network": inventory.network,
        "openmpi_yield_when_idle": inventory.oversubscribed,
        "job_env_payload_src": literal(str(workspace.rendered / PAYLOAD)),
        "job_env_payload_hash": payload_hash(),
        "job_env_task_prolog": inventory.has_job_environment,
        "job_env_network": inventory.network,
        "job_env_constrains_gpus": inventory.constrains_devices,
        "job_env_gpus_src": literal(str(workspace.rendered / GPUS_FILE)),
        "job_env_gpu_wheelhouse": literal(str(workspace.gpu_wheels)),
        "job_env_gpu_requirements": literal(str(gpu_lock())),
        **({"bucket_name": inventory.bucket} if inventory.bucket else {}),
        **_auto_down(spec, inventory),
        **own_machine_variables(spec, inventory),
        **({"apptainer_wanted": True, "apptainer_fetched": rendered} if "apptainer" in runs else {}),
        **(_nvidia(spec) if "cuda" in runs else {}),
        **({} if inventory.baked else job_packages(workspace.wheels, job_lock())),
        **({"packages_bundle": BUNDLE_FOLDER} if workspace.bundle.exists() else {}),
    }


def _slurm(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> Variables:
    """What only the roles of Slurm read."""
    return {
        "munge_key_src": literal(str(workspace.munge_key)),
        "slurmdbd_config_src": literal(str(workspace.rendered / "slurmdbd.conf")),
        "slurmctld_cluster": spec.name,
        "slurmctld_config_src": literal(str(workspace.rendered)),
        **_accounting(spec),
        "slurmd_conf_server": inventory.controller.name,
        "slurmd_digests_src": literal(str(workspace.rendered / SLURMD_FILE)),
        "login_config_src": literal(str(workspace.rendered)),
    }


def _mpi_ssh(inventory: Inventory) -> Variables:
    """What job users need to start ranks on the other hosts."""
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


def literal(text: str) -> str | TaggedScalar:
    """A string that Ansible must not read as a template, whatever braces the user's path has."""
    return TaggedScalar(text, style="'", tag="!unsafe") if "{" in text else text


def to_yaml(document: Variables) -> str:
    """The document as YAML."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096
    stream = io.StringIO()
    yaml.dump(document, stream)
    return stream.getvalue()


def _host_variables(host: Host) -> Variables:
    variables: Variables = {}
    if host.partition:
        variables["clusterctl_partition"] = host.partition
    if host.job_environment:
        variables["job_env_variables"] = {n: literal(value) for n, value in host.job_environment.items()}
    if host.local_ssds:
        variables["scratch_disks"] = host.local_ssds
    return variables


def _shared_folder(inventory: Inventory) -> Variables:
    folder = inventory.shared_folder
    values = {"kind": folder.kind, "server": folder.server, "export": folder.path}
    own = {"network": inventory.network} if folder.kind == "nfs" else {}
    named = {f"shared_storage_{key}": value for key, value in {**values, **own}.items() if value is not None}
    return {**named, "users_homes_node_local": folder.kind == "none"}


def job_packages(wheels: Path, lock: Path) -> Variables:
    """What the environment of jobs is installed from: a folder of wheels, and their hashes."""
    return {"job_env_wheelhouse": literal(str(wheels)), "job_env_requirements": literal(str(lock))}


def distribution_variables(distribution: Distribution) -> Variables:
    """Paths that differ between distributions; names of packages are in the roles."""
    return {
        "clusterctl_release": distribution.release,
        "mariadb_config_file": distribution.mariadb_conf,
        "mariadb_socket": distribution.mariadb_socket,
        "openmpi_params_file": distribution.openmpi_conf,
        "openmpi_module": distribution.mpi_module or "",
        "job_env_python": distribution.python,
    }


def _repositories(spec: ClusterSpec) -> Variables:
    """Where packages come from, as far as the spec says it."""
    mirrors = spec.software.mirrors.model_dump(exclude_none=True)
    chosen = {"repositories_openhpc": True} if spec.software.slurm == "openhpc" else {}
    return {**chosen, **({"repositories_mirrors": mirrors} if mirrors else {})}


def _nvidia(spec: ClusterSpec) -> Variables:
    """What hosts with NVIDIA's cards get."""
    asked = spec.software.nvidia.model_dump(exclude_none=True)
    return {"cuda_wanted": True, **{f"cuda_{key}": value for key, value in asked.items()}}


def _auto_down(spec: ClusterSpec, inventory: Inventory) -> Variables:
    """What of Google's an idle cluster may take away by itself; said also where it is not to, to end that."""
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


def _accounts(spec: ClusterSpec, workspace: Workspace) -> list[Variables]:
    key = workspace.public_key.read_text().strip()
    return [{"name": u.name, "uid": u.uid, "ssh_authorized_keys": [key]} for u in spec.users]


def _accounting(spec: ClusterSpec) -> Variables:
    users: list[Variables] = [{"name": u.name, "accounts": list(u.accounts)} for u in spec.users]
    users.append({"name": ADMIN_USER, "accounts": [ADMIN_USER], "admin": True})
    return {
        "slurmctld_accounting_accounts": sorted({name for user in users for name in user["accounts"]}),
        "slurmctld_accounting_users": users,
        "slurmctld_accounting_qos": [
            {"name": q.name, "priority": q.priority}
            | ({"max_time_s": q.max_time} if q.max_time is not None else {})
            for q in spec.slurm.qos
        ],
    }


def own_machine_variables(spec: ClusterSpec, inventory: Inventory) -> dict[str, Any]:
    """The variables of the roles time, tuning, firewall and selinux, where the provider has use for them."""
    if spec.provider.shares_kernel:
        return {}
    if not spec.provider.user_owned:
        return _guarded(inventory)
    return {
        "clusterctl_keeps": True,  # they are given back as they were: what they are is noted first
        "job_env_looks_at_fabric": True,
        "time_controller": inventory.controller.address,
        "time_network": inventory.network,
        "firewall_serves_time": True,
        **_guarded(inventory),
    }


def _guarded(inventory: Inventory) -> dict[str, Any]:
    """What SELinux and a firewall that are in force there must know of the cluster."""
    kind = inventory.shared_folder.kind
    homes_are = {"nfs": "exported", "none": "node-local"}.get(kind, "mounted")
    return {
        "clusterctl_guarded": True,
        # What a machine says to itself, no firewall keeps from it.
        "firewall_addresses": [h.address for h in inventory.hosts if not is_this_machine(h.address)],
        "firewall_exports": kind == "nfs",
        "selinux_homes": f"{inventory.shared}/home",
        "selinux_homes_are": homes_are,
    }
