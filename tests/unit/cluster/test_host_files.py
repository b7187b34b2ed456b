"""Templates of node classes: their keys, the files of each node, and which hosts need Ansible."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.converge import (
    ClusterRecord,
    HostChooser,
    HostsToConfigure,
    WantedState,
    inputs_of,
)
from clusterctl.cluster.drift import matches
from clusterctl.cluster.host_files import (
    can_renew,
    expected_marks,
    marks_from_template,
    node_files,
)
from clusterctl.cluster.template_inputs import inputs_of_templates, template_hash
from clusterctl.configure import inventory_file
from clusterctl.configure.inventory_file import class_variables
from clusterctl.hosts.probe import Checksums, HostReport
from clusterctl.hosts.roles import key_marks, system_accounts
from clusterctl.providers.local.image import class_key
from clusterctl.providers.templates import NodeFiles
from clusterctl.spec import distributions
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.assets import ansible_hash, data_folder, tree_hash
from tests.support.inventories import host_of, inventory_of

TWELVE, THIRTEEN = (distributions.distribution_of(f"debian-{number}") for number in (12, 13))
CTL = "demo-ctl"
ONE = "demo-train-1"
TWO = "demo-train-2"
SHARES = {
    "partition": "train",
    "cpus": 1,
    "memory_mib": 1000,
    "distribution": "debian-13",
}
INVENTORY = inventory_of(
    cluster="demo",
    hosts=(
        host_of(CTL, CONTROLLER, address="10.9.0.2", distribution="debian-13"),
        host_of(ONE, address="10.9.0.3", **SHARES),
        host_of(TWO, address="10.9.0.4", **SHARES),
    ),
    network="10.9.0.0/24",
)
FILES = (
    "class.yml",
    "configure.yml",
    "ansible.cfg",
    "library/service_current.py",
    "roles/health/files/health.py",
    "roles/health/tasks/configure.yml",
    "roles/job_env/defaults/main.yml",
    "roles/openmpi/templates/job-profile.sh.j2",
    "roles/slurmd/files/tmpfiles.conf",
    "roles/slurmd/tasks/configure.yml",
    "roles/users/tasks/configure.yml",
)


def spec_of(**more: Any) -> ClusterSpec:
    users = [{"name": "ada", "uid": 2001}]
    partitions = [{"name": "train", "nodes": 2}]
    document = {
        "version": 1,
        "name": "demo",
        "provider": {"type": "local"},
        "partitions": partitions,
    }
    return ClusterSpec.model_validate({**document, "users": users, **more})


def key_of(
    spec: ClusterSpec | None = None,
    distribution: distributions.Distribution = TWELVE,
    shared: str = "/shared",
    image: str = "0" * 16,
    *,
    group: str = COMPUTE,
    roles: str = "",
) -> str:
    """Return the key of a template. roles: the hash of all roles. Default: of the real ones."""
    variables = class_variables(spec or spec_of(), distribution, shared, group)
    return class_key(image, template_hash(roles or ansible_hash(), variables))


def test_class_key_depends_on_each_of_twenty_inputs(tmp_path: Path) -> None:
    roles = tmp_path / "ansible"
    shutil.copytree(data_folder("ansible"), roles)
    keys = [
        key_of(),
        key_of(distribution=THIRTEEN),
        key_of(distribution=replace(TWELVE, python="/usr/bin/python3.12")),
        key_of(distribution=replace(TWELVE, openmpi_conf="/etc/other.conf")),
        key_of(shared="/else"),
        key_of(image="1" * 16),
        key_of(spec_of(users=[{"name": "ada", "uid": 2002}])),
        key_of(spec_of(users=[{"name": "bob", "uid": 2001}])),
        key_of(spec_of(users=[{"name": "ada", "uid": 2001}, {"name": "bob", "uid": 2002}])),
    ]
    for name in FILES:
        with (roles / name).open("a") as file:
            file.write("\n# changed\n")
        keys.append(key_of(roles=tree_hash(roles)))
    assert len(set(keys)) == len(keys) == 9 + len(FILES) >= 20


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAKEeQlcH+GwmzgE/RlWAKNrD2K+DSBNoCnvcOgaXFev"
WITH_KEY = spec_of(users=[{"name": "ada", "uid": 2001, "ssh_keys": [KEY]}])


@pytest.mark.parametrize("group", [COMPUTE, CONTROLLER])
def test_class_key_ignores_ssh_keys_of_users(group: str) -> None:
    """SSH keys are in homes, which are on shared storage."""
    assert key_of(WITH_KEY, group=group) == key_of(group=group)


@pytest.mark.parametrize(
    "more",
    [
        {"users": [{"name": "ada", "uid": 2002}]},
        {"users": [{"name": "ada", "uid": 2001, "accounts": ["x"]}]},
        {"slurm": {"qos": [{"name": "fast"}]}},
        {"slurm": {"qos": [{"name": "fast", "limits": {"MaxJobs": 4}}]}},
    ],
)
def test_key_changes_with_the_accounting_of_the_controller(more: dict[str, Any]) -> None:
    assert key_of(spec_of(**more), group=CONTROLLER) != key_of(group=CONTROLLER)


def test_key_of_the_controller_ignores_names_and_slurms_files() -> None:
    other = spec_of(
        name="other",
        provider={"type": "local", "subnet": "10.1.2.0/24"},
        partitions=[{"name": "a", "nodes": 3, "cpus": 2}],
        slurm={"extra": ["KillWait=10"]},
        monitoring={"health": {"disk_free": "1GiB"}},
    )
    assert key_of(other, group=CONTROLLER) == key_of(group=CONTROLLER) != key_of()


# What these roles have of a cluster or of a node: in files of its own, or of nodes with cards
# alone.
OWN = {
    *("health_config_src", "munge_key_src", "slurmd_unit_src", "job_env_gpus_src"),
    *("slurmdbd_config_src", "slurmctld_config_src"),
    *("job_env_gpu_wheelhouse", "job_env_gpu_requirements", "job_env_network"),
    *("common_hosts_src", "openmpi_params_src", "openmpi_fabric"),
}


@pytest.mark.parametrize("group", [COMPUTE, CONTROLLER])
def test_class_variables_have_every_variable_of_its_roles(workspace: Workspace, group: str) -> None:
    """A new variable must be added to the class, or to the files of each host."""
    plays = YAML(typ="safe").load(data_folder("ansible") / "class.yml")
    tasks = [task for play in plays if group in play["hosts"].split(":") for task in play["tasks"]]
    imported = [task.get("ansible.builtin.import_role") for task in tasks]
    roles = {one["name"] for one in imported if one}
    assert roles | {"munge"} == set(inventory_file.CLASS_ROLES[group])
    given = inventory_file.role_variables(spec_of(), INVENTORY, workspace)
    of_roles = {name for name in given if name.startswith(tuple(f"{role}_" for role in roles))}
    assert of_roles - class_variables(spec_of(), TWELVE, "/shared", group).keys() <= OWN


def test_variables_of_both_groups_are_equal() -> None:
    """The same run of Ansible configures a host of each group."""
    compute, controller = (
        class_variables(spec_of(), TWELVE, "/shared", g) for g in (COMPUTE, CONTROLLER)
    )
    both = compute.keys() & controller.keys()
    assert {name: compute[name] for name in both} == {name: controller[name] for name in both} != {}


def test_class_key_is_shared_by_clusters_of_the_same_kind() -> None:
    """The key ignores the cluster's name, addresses, number and sizes of nodes, keys and accounts."""
    other = spec_of(
        name="other",
        provider={"type": "local", "subnet": "10.1.2.0/24"},
        partitions=[{"name": "a", "nodes": 3, "cpus": 2}, {"name": "b", "nodes": 1}],
        users=[{"name": "ada", "uid": 2001, "accounts": ["x"]}],
        monitoring={"health": {"disk_free": "1GiB"}},
    )
    assert key_of(other) == key_of()


@pytest.mark.parametrize("group", [COMPUTE, CONTROLLER])
def test_class_inputs_have_no_secret_and_no_host(workspace: Workspace, group: str) -> None:
    text = str(class_variables(spec_of(), TWELVE, "/shared", group))
    key = workspace.public_key.read_text().split()[1]
    assert not [
        word for word in (key, str(workspace.munge_key), "demo-ctl", "10.9.0") if word in text
    ]


def files_of(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> NodeFiles:
    rendered = inputs_of(spec, inventory, workspace, {})
    return node_files(spec, inventory, workspace, rendered.files, {})


def test_host_files_are_those_of_the_roles(workspace: Workspace) -> None:
    """A host from a template has the same files, owners and modes as one that Ansible configures."""
    tasks = [
        task["ansible.builtin.copy"]
        for path in (data_folder("ansible") / "roles").glob("*/tasks/*.yml")
        for task in YAML(typ="safe").load(path)
        if "ansible.builtin.copy" in task
    ]
    of_roles = {
        task["dest"].replace("{{ item }}", "slurm.conf"): (task["mode"], task["owner"])
        for task in tasks
        if "owner" in task
    }
    names = {number: name for name, number in {"root": 0, **system_accounts()}.items()}
    files = {
        path: file
        for own in files_of(spec_of(), INVENTORY, workspace).values()
        for path, file in own.items()
    }
    whole = {path: file for path, file in files.items() if not file.edges and "openmpi" not in path}
    alike = {"gres.conf", "cgroup.conf", "topology.conf"}
    found = {
        path: (f"{file.mode:04o}", names[file.owner])
        for path, file in whole.items()
        if Path(path).name not in alike
    }
    assert {path: of_roles.get(path) for path in found} == found


def test_host_files_differ_for_each_node(workspace: Workspace) -> None:
    spec = spec_of()
    inventory = INVENTORY
    files = files_of(spec, inventory, workspace)
    assert list(files) == [CTL, ONE, TWO]
    assert files[CTL]["/etc/munge/munge.key"] == files[ONE]["/etc/munge/munge.key"]
    assert f"({inventory.controller.address})".encode() in files[CTL]["/etc/slurm/slurm.conf"].data
    assert files[CTL]["/etc/slurm/slurmdbd.conf"].mark.endswith(" 600 64030:64030")
    assert not files[ONE].keys() & {path for path in files[CTL] if path.startswith("/etc/slurm/")}
    same = [path for path in files[ONE] if files[ONE][path] == files[TWO][path]]
    # Of shares; else with a digest of its size.
    slurmd = "/etc/systemd/system/slurmd.service.d/clusterctl.conf"
    assert sorted(same) == [
        "/etc/hosts",
        "/etc/munge/munge.key",
        "/etc/openmpi/openmpi-mca-params.conf",
        slurmd,
    ]
    # Newer packages have Type=notify, and `slurmd -D` sends systemd no message.
    assert b"\nType=simple\n" in files[ONE][slurmd].data
    assert files[ONE]["/etc/munge/munge.key"].mark.endswith(" 400 64031:64031")
    assert b"10.9.0.0/24" in files[ONE]["/etc/openmpi/openmpi-mca-params.conf"].data
    assert b"osc = ^ucx\n" in files[ONE]["/etc/openmpi/openmpi-mca-params.conf"].data
    assert json.loads(files[TWO]["/opt/clusterctl/health.json"].data)["node"] == TWO


# A file and an account of a class.
SHARED = {"file /opt/clusterctl/health": "a1 755 0:0", "user ada": "2001:2001"}
THREE = host_of("demo-train-3", address="10.9.0.5", **SHARES)
GROWN = replace(INVENTORY, hosts=(*INVENTORY.hosts, THREE))
ALL = GROWN.names
OLD = INVENTORY.names
NEW = (THREE.name,)


class Cluster:
    """A cluster as its last `up` recorded it, and what `up` finds now."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.spec = spec_of()
        self.recorded = ClusterRecord()
        self.marks: dict[str, Checksums] = {}
        self.seen: dict[str, Checksums] = {}
        self.openmpi: dict[str, str] = {}

    def hosts(self, inventory: Inventory) -> HostChooser:
        rendered = inputs_of(self.spec, inventory, self.workspace, {})
        reports = {
            host: HostReport(None, self.seen.get(host, {}), openmpi=self.openmpi.get(host, ""))
            for host in inventory.names
        }
        files = node_files(self.spec, inventory, self.workspace, rendered.files, reports)
        groups = inputs_of_templates(
            ClusterContext.of(self.spec, workspace=self.workspace), inventory
        )
        wanted = WantedState(self.recorded, self.marks)
        return HostChooser(inventory, wanted, reports, rendered, groups, files)

    def choose(
        self, inventory: Inventory, from_template: Collection[str], *, again: bool = False
    ) -> HostsToConfigure:
        return self.hosts(inventory).choose(from_template, again=again)


@pytest.fixture
def cluster(workspace: Workspace) -> Cluster:
    return Cluster(workspace)


def test_controller_with_former_keys_in_homes_needs_ansible(cluster: Cluster) -> None:
    """The kept storage has the homes of an earlier cluster."""
    head = INVENTORY.controller.name
    expected = marks_from_template(WITH_KEY, INVENTORY, cluster.hosts(INVENTORY).files)
    assert matches(expected[head], expected[head])
    assert not matches(expected[head], expected[head] | key_marks(spec_of()))
    assert not [key for key in expected[ONE] if key.startswith("keys ")]


@pytest.fixture
def growing(cluster: Cluster) -> Cluster:
    """A configured cluster of two nodes, which is to have three."""
    now = cluster.hosts(INVENTORY)
    cluster.seen = {host: expected_marks(files) | SHARED for host, files in now.files.items()}
    cluster.marks = {**cluster.seen}
    cluster.recorded = ClusterRecord(inputs=now.rendered.inputs, groups=now.groups)
    return cluster


@pytest.mark.parametrize(
    ("from_template", "again", "ansible"),
    [
        ((ONE, TWO), False, (CTL,)),
        (OLD, False, ()),
        ((TWO,), False, (CTL, ONE)),
        ((), False, OLD),
        ((ONE, TWO), True, OLD),
    ],
)
def test_new_hosts_of_a_class_need_no_ansible(
    cluster: Cluster, from_template: tuple[str, ...], *, again: bool, ansible: tuple[str, ...]
) -> None:
    work = cluster.choose(INVENTORY, from_template, again=again)
    assert (work.ansible, work.from_template) == (ansible, () if again else from_template)
    assert (work.renewed, work.reconfigures, work.replaces_record) == ((), False, True)


def test_node_with_a_card_is_configured_by_ansible(cluster: Cluster) -> None:
    """A node with a GPU needs CuPy, and a health check that expects the GPU."""
    hosts = cluster.hosts(INVENTORY)
    gpus = json.dumps({TWO: {"cupy": True, "uuids": []}})
    rendered = replace(hosts.rendered, files={inventory_file.GPUS_FILE: gpus})
    assert replace(hosts, rendered=rendered).choose((ONE, TWO), again=False).ansible == (CTL, TWO)


def test_unchanged_cluster_needs_no_work(growing: Cluster) -> None:
    assert not growing.choose(INVENTORY, ())
    growing.seen[TWO] = {**growing.seen[TWO], "unit slurmd": "stopped"}
    assert growing.choose(INVENTORY, ()) == HostsToConfigure((TWO,))


def test_added_node_needs_no_ansible(growing: Cluster) -> None:
    """Existing hosts get new host-specific files, and Slurm is reconfigured once."""
    work = growing.choose(GROWN, NEW)
    assert work == HostsToConfigure(
        from_template=NEW, renewed=OLD, reconfigures=True, replaces_record=True
    )


def test_hosts_with_nvidias_open_mpi_are_renewed_at_its_prefix(cluster: Cluster) -> None:
    """The host's package database knows the prefix, and the other hosts have the distribution's
    Open MPI.
    """
    cluster.openmpi = {TWO: "/usr/mpi/gcc/openmpi-4.1.7rc1/etc"}
    now = cluster.hosts(INVENTORY)
    distribution = "/etc/openmpi/openmpi-mca-params.conf"
    nvidia = "/usr/mpi/gcc/openmpi-4.1.7rc1/etc/openmpi-mca-params.conf"
    of_mpi = {
        host: [path for path in files if "openmpi" in path] for host, files in now.files.items()
    }
    assert of_mpi == {CTL: [distribution], ONE: [distribution], TWO: [nvidia]}
    assert now.files[TWO][nvidia] == now.files[ONE][distribution]
    cluster.seen = {host: expected_marks(files) | SHARED for host, files in now.files.items()}
    cluster.marks = {**cluster.seen}
    cluster.recorded = ClusterRecord(inputs=now.rendered.inputs, groups=now.groups)
    assert cluster.choose(GROWN, NEW).renewed == OLD


def test_older_slurmctld_is_configured_by_ansible(
    growing: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.scheduler.slurm.conf._RECONFIGURES", "25.05")
    work = growing.choose(GROWN, NEW)
    assert (work.ansible, work.renewed) == ((CTL,), (ONE, TWO))


@pytest.mark.parametrize("users", [[], [{"name": "ada", "uid": 2001, "accounts": ["x"]}]])
def test_controller_that_gets_more_than_nodes_is_configured(
    growing: Cluster, users: list[Any]
) -> None:
    growing.spec = spec_of(users=users)
    work = growing.choose(GROWN, NEW)
    assert CTL in work.ansible
    assert CTL not in work.renewed


@pytest.mark.parametrize("path", ["/etc/munge/munge.key", "/etc/slurm/slurmdbd.conf"])
def test_can_renew_is_false_for_changed_secrets(growing: Cluster, path: str) -> None:
    files = growing.hosts(GROWN).files[CTL]
    seen = growing.seen[CTL]
    assert can_renew(files, seen)
    assert not can_renew(files, {**seen, f"file {path}": "an older one"})


def test_host_that_drifted_meanwhile_is_configured(growing: Cluster) -> None:
    growing.seen[TWO] = {**growing.seen[TWO], "file /opt/clusterctl/health": "changed"}
    work = growing.choose(GROWN, NEW)
    assert (work.ansible, work.renewed) == ((TWO,), (CTL, ONE))


def test_changed_class_is_configured_on_all_hosts(growing: Cluster) -> None:
    earlier = dict.fromkeys(growing.recorded.groups, "hash of the earlier roles")
    growing.recorded = growing.recorded.model_copy(update={"groups": earlier})
    work = growing.choose(GROWN, NEW)
    assert (work.ansible, work.renewed) == (OLD, ())


def test_unfinished_up_is_repeated_with_ansible_on_all_hosts(growing: Cluster) -> None:
    growing.recorded = growing.recorded.model_copy(update={"inputs": "", "groups": {}})
    assert growing.choose(GROWN, ()).ansible == ALL


@pytest.mark.parametrize(
    ("key", "mark"),
    [
        ("file /etc/munge/munge.key", "another"),
        ("block /etc/hosts", "another"),
        ("file /etc/tmpfiles.d/clusterctl-slurmd.conf", "missing"),
        ("user ada", "missing"),
        ("unit slurmd", "failed"),
        ("package slurmd", "not installed"),
        ("home ada", "missing"),
        ("path /shared/home/.clusterctl-a1b2c3", "missing"),
        ("accounting all", "no answer"),
    ],
)
def test_matches_is_false_for_a_different_mark(growing: Cluster, key: str, mark: str) -> None:
    expected = expected_marks(growing.hosts(INVENTORY).files[ONE])
    assert matches(expected, growing.seen[ONE] | {"accounting all": "of any kind"})
    assert not matches(expected, {**growing.seen[ONE], key: mark})
    assert not matches(expected, SHARED)


def test_limit_configures_only_the_named_hosts(growing: Cluster) -> None:
    work = growing.hosts(INVENTORY).choose_limited((TWO,))
    assert work == HostsToConfigure((CTL, TWO), (ONE,), reconfigures=True, replaces_record=True)
