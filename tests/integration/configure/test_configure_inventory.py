"""The inventory has all variables that Ansible needs, whatever the user's paths look like."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_mitogen.transport_config import PlayContextSpec

from clusterctl.configure.inventory_file import (
    cluster_variables,
    install_mark,
    inventory_text,
    own_machine_variables,
    role_variables,
    write_inventory,
)
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.software import Software
from clusterctl.state.inventory import Inventory, SharedFolder
from clusterctl.state.workspace import Workspace, draw_key_pair
from clusterctl.transport.openssh import ssh_config_text
from clusterctl.util.assets import data_folder
from clusterctl.util.typed_json import from_json
from tests.integration.configure.conftest import ADAS_KEY
from tests.support.forks import ansible

GCP = {"type": "gcp", "project": "my-project", "zone": "us-central1-a"}
AT_GOOGLE = {
    "version": 1,
    "name": "demo",
    "provider": GCP,
    "partitions": [{"name": "train", "nodes": 2}],
}


def write_cluster(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> None:
    """Write the inventory of a cluster, as `up` does."""
    write_inventory(inventory, workspace, cluster_variables(spec, inventory, workspace))


def listed(workspace: Workspace, tmp_path: Path) -> dict[str, Any]:
    """Return the inventory as `ansible-inventory` prints it."""
    done = ansible("ansible-inventory", ["-i", workspace.ansible_inventory, "--list"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def refusal(workspace: Workspace, tmp_path: Path) -> str:
    """Return what Ansible says of an inventory that is not as roles want their arguments, or ""."""
    argv = [
        "-i",
        workspace.ansible_inventory,
        "-c",
        "local",
        data_folder("ansible") / "validate.yml",
    ]
    done = ansible("ansible-playbook", argv, cwd=tmp_path)
    return f"exit {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


@pytest.fixture
def seen(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, tmp_path: Path
) -> dict[str, Any]:
    write_cluster(spec, inventory, workspace)
    return listed(workspace, tmp_path)


@pytest.mark.parametrize("name", ["on", "null", "007", "1e5", "0x1f", "a-1"])
def test_host_may_have_any_name(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, name: str
) -> None:
    """Ansible's YAML must not read a name as a number or a truth value."""
    hosts = [inventory.hosts[0], replace(inventory.hosts[1], name=name)]
    write_cluster(spec, replace(inventory, hosts=tuple(hosts)), workspace)
    text = workspace.ansible_inventory.read_text().replace("!unsafe", "")
    read = yaml.safe_load(text)["all"]["children"]
    assert read["compute"]["hosts"] == {name: {"clusterctl_partition": "train"}}


def test_ansible_does_not_read_a_path_as_a_template(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, tmp_path: Path
) -> None:
    write_cluster(spec, inventory, workspace)
    argv = [
        "-i",
        workspace.ansible_inventory,
        "demo-ctl",
        "-c",
        "local",
        "-m",
        "ansible.builtin.debug",
    ]
    done = ansible("ansible", [*argv, "-a", "var=munge_key_src"], cwd=tmp_path)
    said = json.loads(done.stdout.split("=>", 1)[1])
    assert said["munge_key_src"] == str(workspace.munge_key)


def test_inventory_keeps_lists_unchanged(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace
) -> None:
    variables = cluster_variables(spec, inventory, workspace)
    text = inventory_text(inventory, workspace, variables).replace("!unsafe", "")
    read = yaml.safe_load(text)["all"]["vars"]
    lists = {
        name: it
        for name, it in role_variables(spec, inventory, workspace).items()
        if isinstance(it, list)
    }
    assert len(lists["users_accounts"]) == len(spec.users)
    assert {name: read.get(name) for name in lists} == lists


def test_control_path_differs_between_clusters(seen: dict[str, Any], inventory: Inventory) -> None:
    """Ansible's default path contains only the name of the host, which another cluster may have,
    too.
    """
    path = seen["_meta"]["hostvars"]["demo-ctl"]["ansible_control_path"] % {"directory": "/d"}
    assert path == f"/d/{inventory.cluster_id}-%C"


def test_ansible_notices_a_silent_host_as_early_as_ssh(
    seen: dict[str, Any], inventory: Inventory, tmp_path: Path
) -> None:
    """mitogen has longer times of its own, and its options of ssh override those of ssh_config."""
    config = ssh_config_text(inventory, Workspace(tmp_path), tmp_path)
    times = dict(re.findall(r"ServerAlive(Interval|CountMax) (\d+)", config))
    for name, option in (("interval", "Interval"), ("count", "CountMax")):
        variable = f"mitogen_ssh_keepalive_{name}"
        assert hasattr(PlayContextSpec, variable)
        for host in inventory.names:
            assert seen["_meta"]["hostvars"][host][variable] == int(times[option])


def test_inventory_has_users_and_accounts(seen: dict[str, Any]) -> None:
    variables = seen["_meta"]["hostvars"]["demo-train-1"]
    listed = f"{ADAS_KEY} managed by clusterctl for demo"
    keys = ["ssh-ed25519 AAAA clusterctl", {"__ansible_unsafe": listed}]
    assert variables["users_accounts"] == [
        {"name": "ada", "uid": 10001, "ssh_authorized_keys": keys}
    ]
    assert listed.endswith(variables["users_key_mark"])
    assert variables["slurmctld_accounting_accounts"] == [
        {"name": name, "limits": {}} for name in ("clusterctl", "default", "physics")
    ]
    assert variables["slurmctld_accounting_users"] == [
        {
            "name": "ada",
            "accounts": ["physics", "default", "clusterctl"],
            "limits": {"physics": {}, "default": {}},
        },
    ]
    assert variables["slurmctld_accounting_qos"] == [
        {"name": "high", "priority": 5, "limits": {"MaxWall": "2"}},
        {"name": "low", "priority": 0, "limits": {}},
    ]


def test_roles_get_valid_arguments_and_reject_invalid_ones(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, tmp_path: Path
) -> None:
    write_cluster(spec, inventory, workspace)
    assert refusal(workspace, tmp_path) == ""
    text = workspace.ansible_inventory.read_text().replace("    compute:\n", "    workers:\n")
    workspace.ansible_inventory.write_text(text)
    assert "group controller" in refusal(workspace, tmp_path)


def test_host_may_have_every_role(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, tmp_path: Path
) -> None:
    roles = [("controller", "compute", "login"), ("compute",), ("login",)]
    hosts = [replace(host, roles=r) for host, r in zip(inventory.hosts, roles, strict=True)]
    write_cluster(spec, replace(inventory, hosts=tuple(hosts)), workspace)
    assert refusal(workspace, tmp_path) == ""
    argv = [
        "-i",
        workspace.ansible_inventory,
        "--list-hosts",
        data_folder("ansible") / "configure.yml",
    ]
    said = ansible("ansible-playbook", argv, cwd=tmp_path)
    assert "WARNING" not in said.stdout + said.stderr
    every = ["demo-ctl", "demo-train-1", "demo-train-2"]
    computing = ["demo-ctl", "demo-train-1"]
    plays = {}
    for play in said.stdout.split("play #")[1:]:
        name = re.search(r"\): (.*?)\s+TAGS", play)
        assert name
        plays[name[1]] = sorted(re.findall(r"^ {6}(\S+)$", play, re.MULTILINE))
    assert {name: hosts for name, hosts in plays.items() if hosts} == {
        "Configure names and limits": every,
        "Start the database, and configure folders": every,
        "Configure the accounts": every,
        "Configure Slurm's authentication": every,
        "Configure the software and environment of jobs": every,
        "Configure Slurm's controller": ["demo-ctl"],
        "Configure the check of what a host needs": every,
        "Configure Slurm's nodes": computing,
        "Configure the login hosts": ["demo-train-2"],
        "Record which files the roles want": every,
    }


def test_controller_with_exported_folder_is_released_last(
    inventory: Inventory, workspace: Workspace, tmp_path: Path
) -> None:
    argv = [
        "-i",
        workspace.ansible_inventory,
        "--list-hosts",
        data_folder("ansible") / "remove.yml",
    ]
    for kind, counts in (("existing", ["3", "0"]), ("nfs", ["2", "1"])):
        folder = SharedFolder(kind=kind, server="demo-ctl", path="/shared")
        write_inventory(replace(inventory, shared_folder=folder), workspace, {})
        said = ansible("ansible-playbook", argv, cwd=tmp_path).stdout
        assert re.findall(r"hosts \((\d)\)", said) == counts


def test_inventory_has_no_secret(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace
) -> None:
    workspace.munge_key.write_bytes(b"SECRET" * 20)
    workspace.public_key.unlink(missing_ok=True)
    draw_key_pair(workspace.key)
    write_cluster(spec, inventory, workspace)
    written = workspace.ansible_inventory.read_text()
    # The first lines of the private key have the public half, too.
    for secret in ("SECRET", *workspace.key.read_text().splitlines()[-3:]):
        assert secret not in written
    assert workspace.ansible_inventory.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("auto_down", "after_s"), [("8h", 8 * 3600), (None, 0)])
def test_auto_down_variables_are_set_even_if_it_is_off(
    inventory: Inventory, workspace: Workspace, tmp_path: Path, auto_down: str | None, after_s: int
) -> None:
    users = [{"name": "ada", "uid": 10001}]
    spec = ClusterSpec.model_validate(
        {**AT_GOOGLE, "provider": GCP | {"auto_down": auto_down}, "users": users}
    )
    write_cluster(spec, inventory, workspace)
    of = listed(workspace, tmp_path)["_meta"]["hostvars"]["demo-ctl"]
    assert of["auto_down_after_s"] == after_s
    assert of["auto_down_cluster"] == {
        "project": "my-project",
        "zone": "us-central1-a",
        "cluster": "demo",
        "cluster_id": "abc123",
        "controller": "demo-ctl",
        "hosts": ["demo-train-1", "demo-train-2"],
    }
    assert refusal(workspace, tmp_path) == ""


def test_host_variables_reach_their_roles(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, tmp_path: Path
) -> None:
    variables = {"NCCL_SOCKET_IFNAME": "={interface}", "NCCL_DEBUG": "WARN"}
    controller, first, second = inventory.hosts
    first = replace(first, job_environment=variables, local_ssds=2)
    shared = SharedFolder(kind="nfs", server="10.1.2.10", path="/shared")
    made = replace(
        inventory, hosts=(controller, first, second), shared_folder=shared, bucket="my-data"
    )
    write_cluster(spec, made, workspace)
    of = listed(workspace, tmp_path)["_meta"]["hostvars"]
    assert of[first.name]["job_env_variables"] == {
        "NCCL_SOCKET_IFNAME": {"__ansible_unsafe": "={interface}"},
        "NCCL_DEBUG": "WARN",
    }
    assert of[first.name]["scratch_disks"] == 2
    assert "job_env_variables" not in of[second.name]
    assert "scratch_disks" not in of[second.name]
    for host in of.values():
        assert host["bucket_name"] == "my-data"
        assert (host["shared_storage_kind"], host["shared_storage_server"]) == ("nfs", "10.1.2.10")
        assert (host["shared_storage_export"], host["shared_storage_network"]) == (
            "/shared",
            "10.1.2.0/24",
        )
    assert refusal(workspace, tmp_path) == ""


def test_packages_added_to_spec_are_installed_on_ready_hosts(
    inventory: Inventory,
) -> None:
    choices = (
        *(
            Software(),
            Software.model_validate({"slurm": {"from": "openhpc"}}),
            Software(apptainer=True),
        ),
        *(Software(packages=("git",)), Software(packages=("git", "tree"))),
    )
    assert len({install_mark(inventory, one) for one in choices}) == len(choices)


@pytest.mark.parametrize(("kind", "homes_are"), [("nfs", "exported"), ("filestore", "mounted")])
def test_gcp_host_has_firewall_and_no_kept_files(
    inventory: Inventory, kind: str, homes_are: str
) -> None:
    spec = ClusterSpec.model_validate(AT_GOOGLE)
    shared = from_json(SharedFolder, {"kind": kind, "server": "10.0.0.2", "path": "/shared"})
    values = own_machine_variables(spec, replace(inventory, shared_folder=shared))
    assert values["clusterctl_guarded"] is True
    assert values["firewall_addresses"] == [host.address for host in inventory.hosts]
    assert (values["firewall_exports"], values["selinux_homes_are"]) == (kind == "nfs", homes_are)
    assert "clusterctl_keeps" not in values
    assert not [name for name in values if name.startswith("time_")]


def test_local_node_has_neither_firewall_nor_kept_files(
    spec: ClusterSpec, inventory: Inventory
) -> None:
    assert own_machine_variables(spec, inventory) == {}
