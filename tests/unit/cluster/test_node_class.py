"""What the hosts of a class share is keyed by all that goes in, and by nothing secret of a cluster's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from ruamel.yaml import YAML

from clusterctl.cluster import converge, node_class
from clusterctl.cluster.context import ClusterContext, Outcome
from clusterctl.cluster.converge import _read, inputs_of
from clusterctl.cluster.node_class import can_renew, class_inputs, node_files, own_marks
from clusterctl.configure import inventory_file
from clusterctl.configure.events import Recap
from clusterctl.configure.inventory_file import class_inventory_text, class_variables
from clusterctl.errors import ConfigureError
from clusterctl.hosts.gpus import Driver
from clusterctl.hosts.probe import HostReport
from clusterctl.hosts.roles import probe_requests
from clusterctl.providers.base import Provisioned
from clusterctl.providers.local.node_class import class_key
from clusterctl.providers.node_class import NodeFiles
from clusterctl.scheduler.base import NodeInfo, Nodes
from clusterctl.spec import distributions
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import remote_argv
from clusterctl.transport.connections import Connections
from clusterctl.util.assets import asset, tree_hash
from tests.support.inventories import host_of, inventory_of

TWELVE, THIRTEEN = (distributions.distribution_of(f"debian-{number}") for number in (12, 13))
CTL, ONE, TWO = "demo-ctl", "demo-train-1", "demo-train-2"
SHARES = {"partition": "train", "cpus": 1, "memory_mib": 1000}
INVENTORY = inventory_of(
    cluster="demo",
    hosts=(
        host_of(CTL, CONTROLLER, address="10.9.0.2"),
        host_of(ONE, address="10.9.0.3", **SHARES),
        host_of(TWO, address="10.9.0.4", **SHARES),
    ),
    network="10.9.0.0/24",
    slurm="24.11",
)
FILES = (
    "class.yml",
    "configure.yml",
    "ansible.cfg",
    "library/service_current.py",
    "roles/health/files/health.py",
    "roles/health/tasks/configure.yml",
    "roles/job_env/defaults/main.yml",
    "roles/openmpi/templates/openmpi-mca-params.conf.j2",
    "roles/slurmd/files/tmpfiles.conf",
    "roles/slurmd/tasks/configure.yml",
    "roles/users/tasks/configure.yml",
)


def spec_of(**more: Any) -> ClusterSpec:
    users = [{"name": "ada", "uid": 2001}]
    partitions = [{"name": "train", "nodes": 2}]
    document = {"version": 1, "name": "demo", "provider": {"type": "local"}, "partitions": partitions}
    return ClusterSpec.model_validate({**document, "users": users, **more})


def key_of(
    spec: ClusterSpec | None = None,
    distribution: distributions.Distribution = TWELVE,
    shared: str = "/shared",
    image: str = "0" * 16,
    group: str = COMPUTE,
) -> str:
    return class_key(image, class_inputs(class_variables(spec or spec_of(), distribution, shared, group)))


def test_twenty_changed_inputs_make_twenty_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = tmp_path / "ansible"
    shutil.copytree(asset("ansible"), roles)
    monkeypatch.setattr(node_class, "ansible_hash", lambda: tree_hash(roles))
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
        keys.append(key_of())
    assert len(set(keys)) == len(keys) == 9 + len(FILES) >= 20


@pytest.mark.parametrize(
    "more",
    [
        {"name": "other"},
        {"users": [{"name": "ada", "uid": 2002}]},
        {"users": [{"name": "ada", "uid": 2001, "accounts": ["x"]}]},
        {"slurm": {"qos": [{"name": "fast"}]}},
        {"slurm": {"qos": [{"name": "fast", "max_time": "1h"}]}},
    ],
)
def test_what_a_controllers_accounting_holds_makes_another_key(more: dict[str, Any]) -> None:
    assert key_of(spec_of(**more), group=CONTROLLER) != key_of(group=CONTROLLER)


def test_what_stands_in_slurms_files_makes_no_other_controller() -> None:
    other = spec_of(
        provider={"type": "local", "subnet": "10.1.2.0/24"},
        partitions=[{"name": "a", "nodes": 3, "cpus": 2}],
        slurm={"extra": ["KillWait=10"]},
        monitoring={"health": {"disk_free": "1GiB"}},
    )
    assert key_of(other, group=CONTROLLER) == key_of(group=CONTROLLER) != key_of()


# What these roles have of a cluster or of a node: in files of its own, or of nodes with cards alone.
OWN = {
    *("health_config_src", "munge_key_src", "slurmd_digests_src", "job_env_gpus_src"),
    *("slurmdbd_config_src", "slurmctld_config_src"),
    *("job_env_gpu_wheelhouse", "job_env_gpu_requirements", "job_env_constrains_gpus"),
    *("job_env_task_prolog", "job_env_network", "common_hosts"),
}


@pytest.mark.parametrize("group", [COMPUTE, CONTROLLER])
def test_every_variable_of_its_roles_is_known_to_a_class(workspace: Workspace, group: str) -> None:
    """A new one would be missed: it belongs into the class, or into the files of each host."""
    plays = YAML(typ="safe").load(asset("ansible") / "class.yml")
    tasks = [task for play in plays if group in play["hosts"].split(":") for task in play["tasks"]]
    imported = [task.get("ansible.builtin.import_role") for task in tasks]
    roles = {one["name"] for one in imported if one}
    assert roles | {"munge"} == set(inventory_file.CLASS_ROLES[group])
    given = inventory_file.role_variables(spec_of(), INVENTORY, workspace)
    theirs = {name for name in given if name.startswith(tuple(f"{role}_" for role in roles))}
    assert theirs - class_variables(spec_of(), TWELVE, "/shared", group).keys() <= OWN


def test_what_two_groups_both_have_is_the_same_in_both() -> None:
    """One run of Ansible configures a host of each."""
    compute, controller = (class_variables(spec_of(), TWELVE, "/shared", g) for g in (COMPUTE, CONTROLLER))
    both = compute.keys() & controller.keys()
    assert {name: compute[name] for name in both} == {name: controller[name] for name in both} != {}


def test_another_cluster_of_the_same_kind_has_the_same_class() -> None:
    """Its name, addresses, number and sizes of nodes, keys and accounts in Slurm's accounting are its own."""
    other = spec_of(
        name="other",
        provider={"type": "local", "subnet": "10.1.2.0/24"},
        partitions=[{"name": "a", "nodes": 3, "cpus": 2}, {"name": "b", "nodes": 1}],
        users=[{"name": "ada", "uid": 2001, "accounts": ["x"]}],
        monitoring={"health": {"disk_free": "1GiB"}},
    )
    assert key_of(other) == key_of()


@pytest.mark.parametrize("group", [COMPUTE, CONTROLLER])
def test_what_a_class_is_made_of_holds_no_secret_and_no_host_of_a_cluster(
    workspace: Workspace, group: str
) -> None:
    place = {"cluster": "", "cluster_id": "", "provider": "", "network": "", "shared": ""}
    image = Host(name="image", address="127.0.0.1", roles=(group,), host_key="k")
    alone = Inventory(hosts=(image,), baked=False, **place)
    variables = class_variables(spec_of(), TWELVE, "/shared", group)
    text = class_inventory_text(alone, Path("ssh_config"), variables, Path("rendered"))
    key = workspace.public_key.read_text().split()[1]
    assert not [word for word in (key, str(workspace.munge_key), "demo-ctl", "10.9.0") if word in text]


def own_files(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> NodeFiles:
    inputs_of(spec, inventory, workspace, {}).write(workspace)
    return node_files(spec, inventory, workspace)


def test_each_node_has_its_own_files(workspace: Workspace) -> None:
    spec, inventory = spec_of(), INVENTORY
    files = own_files(spec, inventory, workspace)
    assert list(files) == [CTL, ONE, TWO]
    assert files[CTL]["/etc/munge/munge.key"] == files[ONE]["/etc/munge/munge.key"]
    assert f"({inventory.controller.address})".encode() in files[CTL]["/etc/slurm/slurm.conf"].data
    assert files[CTL]["/etc/slurm/slurmdbd.conf"].mark.endswith(" 600 64030:64030")
    assert not files[ONE].keys() & {path for path in files[CTL] if path.startswith("/etc/slurm/")}
    same = [path for path in files[ONE] if files[ONE][path] == files[TWO][path]]
    slurmd = (
        "/etc/systemd/system/slurmd.service.d/clusterctl.conf"  # of shares; else with a digest of its size
    )
    assert same == ["/etc/hosts", "/etc/munge/munge.key", "/etc/openmpi/openmpi-mca-params.conf", slurmd]
    assert files[ONE]["/etc/munge/munge.key"].mark.endswith(" 400 64031:64031")
    assert b"10.9.0.0/24" in files[ONE]["/etc/openmpi/openmpi-mca-params.conf"].data
    assert json.loads(files[TWO]["/opt/clusterctl/health.json"].data)["node"] == TWO


def test_without_pmix_nodes_have_the_prolog_that_ansible_would_write(workspace: Workspace) -> None:
    spec, inventory = spec_of(), INVENTORY.model_copy(update={"pmix": False})
    files = own_files(spec, inventory, workspace)
    prolog = files[ONE]["/opt/clusterctl/task-prolog"]
    assert prolog.mark.endswith(" 755 0:0")
    assert subprocess.run(["bash", "-n"], input=prolog.data, check=False).returncode == 0
    (line,) = (line for line in prolog.data.decode().splitlines() if "echo" in line)
    assert "export PMIX_NAMESPACE=" in line
    assert "/opt/clusterctl/task-prolog" in probe_requests(spec, inventory, workspace)[ONE].files


# Of a class: a file and an account.
SHARED = {"file /opt/clusterctl/health": "a1 755 0:0", "user ada": "2001:2001"}


class Silent:
    """Connections to hosts on which every command does well; ``ran``: the hosts of all commands."""

    def __init__(self, ran: list[str], host: str = "") -> None:
        self.ran, self.host = ran, host

    def to(self, host: str, user: str = "") -> Silent:  # noqa: ARG002
        return Silent(self.ran, host)

    def run(self, *_: object, **__: object) -> None:
        self.ran.append(self.host)


class Played(Nodes):
    """Ansible and the probe of hosts: what each was asked, and what hosts show."""

    def __init__(self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec, self.inventory, self.workspace = spec_of(), INVENTORY, workspace
        self.limits: list[tuple[str, ...]] = []
        self.before: dict[str, Mapping[str, str]] = {}  # what hosts show at first; none: they are new
        self.shown: dict[str, Mapping[str, str]] = {}
        monkeypatch.setattr(ClusterContext, "probe", self.probe)
        monkeypatch.setattr(converge.ansible, "run", self.run)
        self.renewed: list[str] = []
        monkeypatch.setattr(converge, "renew", lambda *asked: self.renewed.append(asked[2].host))
        monkeypatch.setattr(converge, "_START_SLURMD", ())
        self.started: list[str] = []
        self.reconfigured = 0
        monkeypatch.setattr(ClusterContext, "scheduler", lambda *_, **__: self)
        monkeypatch.setattr(converge, "fetch_gpu_wheels", lambda *_, **__: ())
        spec, inventory = self.spec, self.inventory
        self.files = own_files(spec, inventory, workspace)
        self.show(inventory)

    def reconfigure(self) -> None:
        self.reconfigured += 1

    def nodes(self) -> tuple[NodeInfo, ...]:
        return ()

    def show(self, inventory: Inventory) -> None:
        """Have all nodes show what they are to have as nodes of that inventory."""
        self.inventory = inventory
        files = own_files(self.spec, inventory, self.workspace)
        self.shown |= {host: own_marks(its) | SHARED for host, its in files.items()}
        self.shown[CTL] = {**self.shown[CTL], "accounting all": "as the layer has it"}

    def probe(self, _: object, hosts: Collection[str]) -> dict[str, HostReport]:
        return {host: HostReport(None, self.shown.get(host, {"file /x": "there"})) for host in hosts}

    def run(self, verb: str, *_: object, hosts: tuple[str, ...], **__: object) -> Recap:
        assert verb == "configure"
        self.limits.append(hosts)
        return Recap({}, 0, {})

    def converge(
        self, *, again: bool = False, classed: tuple[str, ...] = (ONE, TWO), cards: str = ""
    ) -> Outcome[converge.Converged]:
        made = Provisioned(self.inventory, made=(CTL, ONE, TWO), classed=classed)
        reports = {
            host.name: HostReport(None, self.before.get(host.name, {})) for host in self.inventory.hosts
        }
        reports |= {cards: HostReport(None, {}, driver=Driver(1), cards=1)} if cards else {}
        if self.before:
            made = replace(made, made=tuple(host for host in classed if host not in self.before))
        session = ClusterContext.of(self.spec, workspace=self.workspace)
        session.connections = cast(Connections, Silent(self.started))
        return converge.converge(session, made, reports, limit=None, again=again)


@pytest.fixture
def played(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(workspace, monkeypatch)


def test_nodes_of_a_class_need_no_ansible(played: Played) -> None:
    played.converge()
    assert played.limits == [(CTL,)]
    assert set(_read(played.workspace).marks) == {CTL, ONE, TWO}
    assert _read(played.workspace).marks[ONE] == played.shown[ONE]


def test_nodes_without_control_groups_are_told_of(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converge, "without_cgroups", lambda _, reports: (f"{len(reports)} without",))
    assert played.converge().notes == ("3 without",)


def test_nor_does_a_controller_of_one(played: Played) -> None:
    played.converge(classed=(CTL, ONE, TWO))
    assert played.limits == []
    assert _read(played.workspace).marks == played.shown


def _changed(key: str) -> Callable[[dict[str, str]], None]:
    return lambda marks: marks.update({key: "another"})


def _gone(key: str) -> Callable[[dict[str, str]], None]:
    return lambda marks: marks.update({key: "missing"})


@pytest.mark.parametrize(
    "change",
    [
        _changed("file /etc/munge/munge.key"),
        _gone("file /opt/clusterctl/health"),
        _changed("file /opt/clusterctl/health.json"),
        _gone("file /etc/tmpfiles.d/clusterctl-slurmd.conf"),
        _changed("block /etc/hosts"),
        _gone("user ada"),
        _changed("unit slurmd"),
        _changed("unit munge"),
        lambda marks: marks.update({"package slurmd": "not installed"}),
        lambda marks: marks.pop("file /etc/munge/munge.key"),
    ],
)
def test_one_that_shows_something_else_is_configured_alone(
    played: Played, change: Callable[[dict[str, str]], None]
) -> None:
    marks = dict(played.shown[TWO])
    change(marks)
    played.shown[TWO] = marks
    played.converge()
    assert played.limits == [(CTL,), (TWO,)]


@pytest.mark.parametrize(
    "change",
    [
        _changed("file /etc/slurm/slurm.conf"),
        _changed("file /etc/slurm/slurmdbd.conf"),
        _gone("file /opt/clusterctl/prolog-slurmctld"),
        _changed("unit mariadb"),
        _changed("unit slurmctld"),
        _gone("home ada"),
        _gone("key ada"),
        _gone("path /shared/home/.clusterctl-a1b2c3"),
        lambda marks: marks.update({"accounting all": "no answer"}),
        _gone("accounting all"),
    ],
)
def test_a_controller_that_shows_something_else_is_configured_alone(
    played: Played, change: Callable[[dict[str, str]], None]
) -> None:
    marks = dict(played.shown[CTL])
    change(marks)
    played.shown[CTL] = marks
    played.converge(classed=(CTL, ONE, TWO))
    assert played.limits == [(CTL,)]


def test_reconfigure_and_nodes_without_a_class_are_ansibles(played: Played) -> None:
    played.converge(again=True)
    played.converge(classed=())
    assert played.limits == [(CTL, ONE, TWO), (CTL, ONE, TWO)]
    played.converge(classed=(TWO,))
    assert played.limits[2] == (CTL, ONE)


def test_a_node_with_a_card_is_ansibles(played: Played) -> None:
    """It gets CuPy, and a health check that expects the card."""
    played.converge(cards=TWO)
    assert played.limits == [(CTL, TWO)]


THREE = host_of("demo-train-3", address="10.9.0.5", **SHARES)


@pytest.fixture
def growing(played: Played) -> Played:
    """A cluster that is configured and gets a node more."""
    played.converge()
    played.limits.clear()
    played.started.clear()
    played.before = dict(played.shown)
    played.show(INVENTORY.model_copy(update={"hosts": (*INVENTORY.hosts, THREE)}))
    return played


def test_a_node_more_needs_no_ansible(growing: Played) -> None:
    """Those that were there get newer files of their own, and all daemons read their configuration, once."""
    growing.converge(classed=(THREE.name,))
    assert growing.limits == []
    assert sorted(growing.renewed) == [CTL, ONE, TWO]
    assert growing.reconfigured == 1
    assert growing.started == [THREE.name]
    assert _read(growing.workspace).marks == growing.shown


@pytest.mark.parametrize("release", ["23.11", "26.05"])
def test_a_slurmctld_that_is_older_or_another_is_ansibles(growing: Played, release: str) -> None:
    growing.show(growing.inventory.model_copy(update={"slurm": release}))
    growing.converge(classed=(THREE.name,))
    assert growing.limits == [(CTL,)]
    assert sorted(growing.renewed) == [ONE, TWO]


@pytest.mark.parametrize(
    "change", [{"users": []}, {"users": [{"name": "ada", "uid": 2001, "accounts": ["x"]}]}]
)
def test_so_is_a_controller_that_gets_more_than_nodes(growing: Played, change: dict[str, Any]) -> None:
    growing.spec = spec_of(**change)
    growing.show(growing.inventory)
    growing.converge(classed=(THREE.name,))
    assert CTL in growing.limits[0]
    assert CTL not in growing.renewed


@pytest.mark.parametrize("path", ["/etc/munge/munge.key", "/etc/slurm/slurmdbd.conf"])
def test_no_secret_is_written_anew(growing: Played, path: str) -> None:
    assert can_renew(growing.files[CTL], growing.before[CTL])
    assert not can_renew(growing.files[CTL], {**growing.before[CTL], f"file {path}": "an older one"})


def test_one_that_drifted_meanwhile_is_configured(growing: Played) -> None:
    growing.before[TWO] = {**growing.before[TWO], "file /opt/clusterctl/health": "changed"}
    growing.converge(classed=(THREE.name,))
    assert growing.limits == [(TWO,)]
    assert growing.renewed == [CTL, ONE]


def test_one_that_does_not_show_its_newer_files_is_configured(growing: Played) -> None:
    growing.shown[ONE] = growing.before[ONE]
    growing.converge(classed=(THREE.name,))
    assert growing.limits == [(ONE,)]


def test_another_class_is_ansibles_on_all(growing: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_class, "ansible_hash", lambda: "another")
    growing.converge(classed=(THREE.name,))
    assert growing.limits[0] == (CTL, ONE, TWO)
    assert not growing.renewed


def test_after_an_up_that_did_not_end_nothing_is_known_of_what_they_share(growing: Played) -> None:
    def fail(*_: object, **__: object) -> Recap:
        raise ConfigureError("tasks failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converge, "renew", fail)
        with pytest.raises(ConfigureError):
            growing.converge(classed=(THREE.name,))
    growing.converge(classed=())
    assert growing.limits == [(CTL, ONE, TWO, THREE.name)]
    assert not growing.renewed


def test_files_of_a_node_are_replaced_whole_and_others_lines_stay(tmp_path: Path) -> None:
    hosts, conf = tmp_path / "hosts", tmp_path / "conf"
    hosts.write_text("1 mine\n# BEGIN\nold\n# END\n2 mine\n")
    asked = {str(conf): ["text", 0o640, None], str(hosts): ["new\n", 0o644, ["# BEGIN", "# END"]]}
    argv = remote_argv("clusterctl.hosts.remote_own_files", json.dumps(asked))
    for _ in range(2):
        subprocess.run([sys.executable, *argv[1:]], check=True)
        assert hosts.read_text() == "1 mine\n# BEGIN\nnew\n# END\n2 mine\n"
        assert (conf.read_text(), conf.stat().st_mode & 0o777) == ("text", 0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "hosts"]
