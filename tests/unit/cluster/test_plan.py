"""A plan changes nothing: the provider works on a copy of the workspace."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cluster import converge
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.plan import Plan, preview
from clusterctl.errors import Notice, SlurmError, UsageError
from clusterctl.hosts.probe import HostReport
from clusterctl.providers.base import DEFAULTS, HostChange, HostOptions, HostPlan
from clusterctl.spec.distributions import distribution_of, releases
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.software import SlurmSource
from clusterctl.state.inventory import CONTROLLER, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import condition
from tests.support.messages import refused as rejected
from tests.unit.cluster.specs import spec_of

SPEC = spec_of(users=[{"name": "a", "uid": 2000}])


@dataclass
class Stub:
    """A provider with a scripted plan, which writes into the workspace that it gets."""

    hosts: tuple[HostChange, ...] = (HostChange("d-ctl", "make", "the controller"),)
    distribution: str = "debian-12"
    given: list[Workspace] = field(default_factory=list)
    seen: dict[str, bytes] = field(default_factory=dict)

    def check(self, spec: ClusterSpec) -> None:
        assert spec.name == "d"

    known_shared = None

    def plan(
        self, spec: ClusterSpec, workspace: Workspace, options: HostOptions = DEFAULTS
    ) -> HostPlan:
        del spec, options
        self.given.append(workspace)
        assert workspace.public_key.read_text().startswith("ssh-ed25519 ")
        self.seen = {
            str(path.relative_to(workspace.root)): path.read_bytes()
            for path in workspace.root.rglob("*")
            if path.is_file()
        }
        (workspace.root / "id").write_text(workspace.cluster_id())
        (workspace.root / "terraform").mkdir(exist_ok=True)
        (workspace.root / "terraform" / "plan").write_text("a plan")
        return HostPlan(
            self.hosts, notes=("worth knowing",), distribution=distribution_of(self.distribution)
        )

    def alive(self, cluster_id: str) -> bool:
        del cluster_id
        return False


def look(workspace: Workspace, stub: Stub, spec: ClusterSpec = SPEC) -> Plan:
    return preview(ClusterContext.of(spec, workspace=workspace, provider=stub))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_plan_of_a_new_cluster_leaves_no_files(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "home" / "d")
    stub = Stub()
    found = look(workspace, stub)
    assert not found.is_empty
    assert found.summary == "hosts: 1 created"
    assert found.notes == ("worth knowing",)
    assert list(tmp_path.iterdir()) == []
    assert not stub.given[0].root.exists()


def test_provider_plans_in_a_copy_without_secrets(workspace: Workspace, tmp_path: Path) -> None:
    stub = Stub()
    workspace.cluster_id()
    (workspace.root / "terraform" / ".terraform").mkdir(parents=True)
    (workspace.root / "terraform" / ".terraform" / "plugin").write_text("large")
    (workspace.root / "terraform" / "terraform.tfstate").write_text("{}")
    (workspace.logs / "long.log").write_text("long")
    before = content(tmp_path)
    look(workspace, stub)
    assert content(tmp_path) == before
    assert stub.given[0].root != workspace.root
    assert not stub.given[0].root.exists()
    assert stub.seen.keys() == {
        "id",
        "id_ed25519.pub",
        "terraform/.terraform/plugin",
        "terraform/terraform.tfstate",
    }
    assert stub.seen["id"] == (workspace.root / "id").read_bytes()


def test_plan_leaves_out_what_is_no_file(workspace: Workspace) -> None:
    """Such as a socket of ssh, which an earlier version left in the state folder."""
    stub = Stub()
    workspace.cluster_id()
    (workspace.root / "connections").mkdir()
    os.mkfifo(workspace.root / "connections" / "pipe")
    (workspace.root / "dangling").symlink_to("nowhere")
    os.mknod(workspace.root / "connections" / "ssh", stat.S_IFSOCK | 0o600)
    look(workspace, stub)
    assert stub.seen.keys() == {"id", "id_ed25519.pub"}


def test_plan_refuses_another_provider(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.inventory.write_text(inventory_of(provider="gcp").text)
    with rejected("exists/cluster", UsageError):
        look(workspace, Stub())


@pytest.mark.parametrize(
    ("distribution", "settings", "found"),
    [
        ("rocky-9", {}, ["slurm-vulnerable"]),
        ("almalinux-9.6", {}, ["slurm-vulnerable"]),
        ("rocky-9", {"software": {"slurm": {"from": "openhpc"}}}, []),
        ("rocky-9", {"scheduler": "none"}, []),
        ("rocky-10", {}, []),
        ("debian-13", {}, []),
    ],
)
def test_slurm_with_known_vulnerabilities_gives_a_note(
    tmp_path: Path, distribution: str, settings: dict[str, Any], found: list[str]
) -> None:
    provider = {"type": "onprem", "controller": "a", "hosts": {"a": "10.0.0.1"}}
    spec = spec_of({"name": "train", "hosts": "a"}, provider=provider, **settings)
    for cluster, expected in ((spec, found), (SPEC, [])):  # local nodes can't have another Slurm
        plan = look(Workspace(tmp_path / "d"), Stub(distribution=distribution), cluster)
        assert [condition(note) for note in plan.notes if isinstance(note, Notice)] == expected


def test_vulnerabilities_are_those_of_the_table_in_the_manual() -> None:
    """The warnings name only vulnerabilities that docs/distributions.md lists."""
    table = (Path(__file__).parents[3] / "docs/distributions.md").read_text()
    warnings = {
        release.release: release.slurm_flaws for release in releases() if release.slurm_flaws
    }
    assert warnings.keys() == {"rocky-9"}
    named = re.findall(r"CVE-\d{4}-\d+", warnings["rocky-9"])
    assert len(named) == 6
    assert all(name in table for name in named)


def test_cluster_that_is_up_keeps_the_source_of_slurm(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.inventory.write_text(inventory_of().text)
    workspace.spec.write_text(dump_spec(SPEC))
    changed = SPEC.software.model_copy(
        update={"slurm": SlurmSource.model_validate({"from": "openhpc"})}
    )
    with rejected("exists/cluster", UsageError, "software.slurm"):
        look(workspace, Stub(), SPEC.model_copy(update={"software": changed}))


def test_cluster_that_is_up_keeps_its_scheduler(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.inventory.write_text(inventory_of().text)
    with rejected("exists/cluster", UsageError, "scheduler"):
        look(workspace, Stub(), SPEC.model_copy(update={"scheduler": "none"}))


def test_cluster_that_is_up_keeps_its_storage(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.inventory.write_text(inventory_of().text)
    storage = SPEC.storage.model_copy(update={"name": "data"})
    named = SPEC.model_copy(update={"storage": storage})
    for applied, wanted in ((SPEC, named), (named, SPEC)):
        workspace.spec.write_text(dump_spec(applied))
        with rejected("exists/cluster", UsageError, "storage.name"):
            look(workspace, Stub(), wanted)


def test_mirror_of_slurm_may_move_while_the_cluster_is_up(tmp_path: Path) -> None:
    def spec_of(url: str) -> ClusterSpec:
        source = SlurmSource.model_validate({"from": url, "key": f"{url}/key"})
        return SPEC.model_copy(
            update={"software": SPEC.software.model_copy(update={"slurm": source})}
        )

    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.inventory.write_text(inventory_of().text)
    workspace.spec.write_text(dump_spec(spec_of("http://old.example.org/slurm")))
    plan = look(workspace, Stub(), spec_of("http://new.example.org/slurm"))
    assert {setting.key for setting in plan.settings} == {
        "software.slurm.from",
        "software.slurm.key",
    }
    with rejected("exists/cluster", UsageError, "software.slurm"):
        look(workspace, Stub(), SPEC)


def test_plan_tells_what_stays_although_the_spec_no_longer_has_it(tmp_path: Path) -> None:
    """Only changes from which an action follows are settings."""

    def spec_with(users: str, packages: str) -> ClusterSpec:
        return spec_of(
            {"name": "train", "nodes": 1},
            users=[
                {"name": name, "uid": 2000 + number} for number, name in enumerate(users.split())
            ],
            software={"packages": packages.split()},
        )

    def settings_and_stays(before: ClusterSpec, after: ClusterSpec) -> tuple[list[str], int]:
        workspace.spec.write_text(dump_spec(before))
        plan = look(workspace, Stub(), after)
        return [str(each) for each in plan.settings], len(plan.stays)

    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.inventory.write_text(inventory_of().text)
    old = spec_with("hpc bob", "nodejs git")
    assert settings_and_stays(old, old) == ([], 0)
    settings, stays = settings_and_stays(old, spec_with("hpc bob", "git"))
    assert (settings, stays) == ([], 1)
    settings, stays = settings_and_stays(old, spec_with("hpc bob", "git zsh"))
    assert stays == 1
    assert [("zsh" in line, "git" in line, "nodejs" in line) for line in settings] == [
        (True, False, False)
    ]
    settings, stays = settings_and_stays(old, spec_with("hpc", "nodejs git"))
    assert stays == 1
    assert [line.split(":")[0] for line in settings] == ["users"]
    assert ("bob" in settings[0], "hpc" in settings[0]) == (True, False)
    settings, stays = settings_and_stays(old, spec_with("ada", ""))
    assert stays == 4
    assert [word in settings[0] for word in ("ada added", "hpc, bob")] == [True, True]
    assert len([line for line in settings if line.startswith("users.hpc")]) == 0


def test_hosts_without_a_finished_up_need_configuration(tmp_path: Path) -> None:
    found = look(Workspace(tmp_path / "d"), Stub((HostChange("d-ctl", "keep", "the controller"),)))
    assert [drift.host for drift in found.drift] == ["d-ctl"]
    assert found.drift[0].what is converge.UNFINISHED
    assert not found.is_empty


def test_plan_of_a_controller_with_another_address_has_no_drift(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.create_secrets()
    write_atomic(workspace.inventory, inventory_of().text)
    write_atomic(workspace.spec, dump_spec(SPEC))
    found = look(
        workspace, Stub((HostChange("d-ctl", "make", ""), HostChange("d-t-1", "keep", "")))
    )
    assert found.drift == ()


class Silent:
    """A scheduler that is not installed yet."""

    def nodes(self) -> tuple[()]:
        raise SlurmError("sinfo failed")


class HalfMade(ClusterContext):
    """Own machines that answer, without slurmd, after an `up` that was killed."""

    def probe(self, _: Inventory, hosts: Collection[str], **__: object) -> dict[str, HostReport]:
        return {host: HostReport(None, {}) for host in hosts}

    def scheduler(self, *_: object, **__: object) -> Any:
        return Silent()


@pytest.mark.parametrize("configured", [False, True], ids=["first-up", "later-up"])
def test_plan_of_a_half_made_cluster_lists_no_tasks(tmp_path: Path, configured: bool) -> None:
    """Ansible's check mode needs the nodes' hardware, which slurmd tells."""
    provider = {"type": "onprem", "controller": "d-ctl", "hosts": {"d-ctl": None, "d-t-1": None}}
    spec = ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "d",
            "provider": {**provider, "shared": {"kind": "none"}},
            "partitions": [{"name": "t", "hosts": "d-t-1"}],
            "users": [{"name": "a", "uid": 2000}],
        }
    )
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.create_secrets()
    hosts = (host_of("d-ctl", CONTROLLER), host_of("d-t-1", partition="t"))
    write_atomic(workspace.inventory, inventory_of(hosts=hosts, provider="onprem").text)
    write_atomic(workspace.spec, dump_spec(spec))
    workspace.note_configuration("inputs" if configured else "")
    assert workspace.is_configured == configured
    stub = Stub(tuple(HostChange(host.name, "keep", "") for host in hosts))
    found = preview(HalfMade.of(spec, workspace=workspace, provider=stub))
    assert found.tasks == ()
    assert any("tasks" in note for note in found.notes)
