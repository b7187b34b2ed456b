"""`attach` with this machine as the login node, and commands that answer as Slurm's."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import (
    SlurmError,
    TransferError,
    TransportError,
    UnreachableError,
    UsageError,
)
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.standalone_python import RELEASE as STANDALONE
from clusterctl.packages.wheelhouse import new_wheelhouse
from clusterctl.providers.attached import AttachedCluster, AttachRequest, MpiProof
from clusterctl.providers.existing.attach import _probed, attach, name_of, record_proof
from clusterctl.providers.existing.facts import OF_PROOF, examine_site
from clusterctl.providers.existing.probe import SiteProbe
from clusterctl.providers.existing.site_description import SiteDescription
from clusterctl.spec.common import Gpus, Partition
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import Launcher
from clusterctl.spec.providers.existing import ExistingSettings, settings_of
from clusterctl.state.inventory import applied_spec, job_inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import HERE, login_of, write_login_files
from clusterctl.util.assets import job_lock
from tests.integration.existing.conftest import Build, Commands
from tests.support.messages import refused
from tests.support.standalone import small_python, standalone_list
from tests.support.wheels import a_wheel

SITE = SiteDescription("24.11.5", "campus", "ada", "/home/ada", "/opt/slurm/bin")
RELEASE = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.parametrize(
    ("login", "name"),
    [
        ("ada@login1.campus.example", "login1"),
        ("ssh://ada@[fd00::1]:22", "head"),
        ("ada@fd00::1", "head"),
        ("ada@10.0.0.1", "head"),
    ],
)
def test_cluster_without_a_valid_name_has_that_of_its_login_node(login: str, name: str) -> None:
    site = replace(SITE, cluster_name="1", host="head.campus.example")
    assert name_of(site, AttachRequest(login)) == name


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"folder": "work"}, "bad-format"),
        ({"folder": "/scratch/a:b"}, "bad-format"),
        ({"folder": "~/clusterctl/.."}, "bad-format"),
        ({"account": "two words"}, "bad-format"),
        ({"qos": "-x"}, "bad-format"),
        ({"modules": ["openmpi", "a;b"]}, "bad-format"),
        ({"python": "python3.12"}, "bad-format"),
        ({"slurm": ("--constraint", "cpu")}, "not-an-sbatch-option"),
        ({"slurm": ("--output=x",)}, "option-of-clusterctl"),
    ],
)
def test_wrong_option_is_refused_before_the_login(wrong: dict[str, object], code: str) -> None:
    with refused(code, UsageError):
        attach(AttachRequest("nowhere.invalid", **wrong))  # type: ignore[arg-type]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: None) -> Path:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def ready(state: Path, build: Build, home: Path) -> Path:
    """The state of a user whose ~/clusterctl and ~/mine on the cluster have the environment."""
    for name in ("clusterctl", "mine"):
        build(home / name)
    return state


def attached(**more: object) -> AttachedCluster:
    return attach(AttachRequest(HERE, python=sys.executable, **more))  # type: ignore[arg-type]


def test_odd_names_of_a_site_are_accepted_or_left_out(commands: Commands, ready: Path) -> None:
    commands("Short.2", "a/b", accounts=1, accepted="*--account=proj/0*", gres="gpu:1g.5gb:7")
    sacctmgr = ready.parent / "slurm+bin/sacctmgr"
    sacctmgr.write_text(sacctmgr.read_text().replace("proj0", "proj/0"))
    result = attached()
    spec = applied_spec(result.workspace)
    inventory = job_inventory(result.workspace)
    assert [(p.name, p.gpus) for p in spec.partitions] == [
        ("Short.2", Gpus(type="gpu-1g-5gb", count=7))
    ]
    assert result.partitions == ("Short.2",)
    assert (settings_of(spec).account, inventory.account) == (None, "proj/0")
    assert inventory.slurm_path.endswith("slurm+bin")


def proven(first: AttachedCluster, **more: object) -> AttachedCluster:
    """Record that job 33 has proven the first launcher, or another state of it."""
    values = {"state": "proven", "job_id": "33", "hosts": ("c1", "c2"), "glibc": "2.31", **more}
    return record_proof(first, MpiProof(launcher=first.launchers[0], **values))  # type: ignore[arg-type]


def shown_of_proof(workspace: Workspace) -> Mapping[str, str]:
    """Return the facts that `doctor` shows of the job that proves MPI, and which job that is."""
    facts = examine_site(workspace)
    return {fact.fact: fact.learned for fact in facts if fact.fact in OF_PROOF}


def test_attach_again_keeps_what_a_job_has_proven(commands: Commands, ready: Path) -> None:
    commands("short", "gpuq")
    first = attach(AttachRequest(HERE, modules=("openmpi/4.1.4",)))
    assert first.launchers == (Launcher.SRUN, Launcher.MPIRUN)
    proven(first)
    record = job_inventory(first.workspace)
    assert (record.python, record.glibc_minor, record.pmix) == (RELEASE, 31, True)
    again = attach(AttachRequest(HERE))
    assert (again.launchers, again.waiting, again.site_python) == ((Launcher.SRUN,), "", "")
    assert job_inventory(again.workspace) == record
    settings = settings_of(again.spec)
    assert (settings.modules, settings.launcher) == (("openmpi/4.1.4",), Launcher.SRUN)
    assert "openmpi/4.1.4" in (Path(again.folder) / "job-profile.sh").read_text()


def test_earlier_proof_is_shown_while_the_queue_is_full(commands: Commands, ready: Path) -> None:
    """`doctor` reads it from the record of the cluster, not from the spec in the folder."""
    commands("short")
    by_job = "job 33 on c1, c2"
    proven(attached())
    again = attached()
    proven(again, state="pending", job_id="34")
    assert shown_of_proof(again.workspace) == {"MPI": by_job, "compute nodes": by_job}
    # The next `attach` reads the result of the job.
    assert attached().waiting == "34"
    # Another module has not been proven.
    other = attached(modules=["openmpi/5.0"])
    assert (other.waiting, shown_of_proof(other.workspace)) == ("", {})


def test_jobs_use_the_launcher_whose_job_waits(commands: Commands, ready: Path) -> None:
    """The launcher before has failed."""
    commands("short")
    first = attached()
    assert job_inventory(first.workspace).pmix
    waiting = record_proof(first, MpiProof("pending", Launcher.MPIRUN, "34", why="Resources"))
    assert not job_inventory(first.workspace).pmix
    assert [fact.is_known for fact in waiting.facts if fact.fact == "MPI"] == [False]
    again = attached()
    assert (again.launchers, again.waiting, again.has_launcher) == ((Launcher.MPIRUN,), "34", False)
    # After a failure, all launchers are tried again.
    record_proof(again, MpiProof("failed", Launcher.MPIRUN, "34", why="wrong"))
    assert (attached().launchers, attached().waiting) == (first.launchers, "")


def test_attach_again_keeps_what_it_has_found_until_it_is_withdrawn(
    commands: Commands, ready: Path
) -> None:
    commands("short", "gpuq", accounts=2, accepted="*--account=proj1*")
    attached()
    commands("short", "gpuq", accounts=2, accepted="*--account=proj0*--partition=gpuq*")
    with refused("slurm-refused/all-partitions", SlurmError, "--account '' --partition ''"):
        attached()
    again = attached(account="", partition="")
    assert (again.account, again.partitions[0]) == ("proj0", "gpuq")
    assert settings_of(again.spec).account == "proj0"


def test_empty_option_takes_a_choice_back(commands: Commands, ready: Path) -> None:
    """A choice of the user is never recorded as a result of the proof."""
    commands("short", "gpuq", accounts=1)
    chosen = {"account": "proj0", "qos": "long", "partition": "gpuq", "modules": ["mine"]}
    first = attached(folder="~/mine", **chosen)
    assert settings_of(first.spec).modules == ("mine",)
    again = attach(
        AttachRequest(HERE, folder="", account="", qos="", partition="", modules=(), python="")
    )
    settings = settings_of(again.spec)
    assert (again.account, again.partitions[0]) == ("", "short")
    assert (settings.modules, settings.qos, settings.folder) == ((), None, first.folder)


def test_partition_and_routed_replace_each_other(commands: Commands, ready: Path) -> None:
    commands("short", "gpuq")
    attached(partition="gpuq")
    routed = attached(spec=spec_of("short", routed=True))
    assert (job_inventory(routed.workspace).is_routed, settings_of(routed.spec).routed) == (
        True,
        True,
    )
    assert settings_of(attached().spec).routed
    named = attached(spec=spec_of("gpuq", "short"))
    assert (settings_of(named.spec).routed, named.partitions[0]) == (False, "gpuq")
    attached(spec=spec_of("short", routed=True))
    again = attached(partition="")
    assert (settings_of(again.spec).routed, again.partitions[0]) == (False, "short")


def spec_of(*partitions: str, **settings: object) -> ClusterSpec:
    provider = ExistingSettings.model_validate({"type": "existing", "login": HERE, **settings})
    named = tuple(Partition(name=name, nodes=2) for name in partitions)
    return ClusterSpec(version=1, name="campus", provider=provider, partitions=named)


def test_attach_again_keeps_choices_of_the_spec(commands: Commands, ready: Path) -> None:
    calls = commands("short", "gpuq")
    first = attached(spec=spec_of("gpuq", "short", folder="~/mine", launcher="mpirun", qos="long"))
    assert (first.launchers, first.has_launcher) == ((Launcher.MPIRUN,), True)
    calls.unlink()
    for again in (attached(), attached(spec=spec_of("gpuq")), attached(spec=first.spec)):
        settings = settings_of(again.spec)
        assert (settings.launcher, settings.qos) == (Launcher.MPIRUN, "long")
        assert (settings.folder, again.partitions[0]) == (first.folder, "gpuq")
        assert settings.python == sys.executable
    assert "--qos=long" in calls.read_text()


@pytest.mark.parametrize(
    ("code", "choice"),
    [("exists/folder", {"folder": "~/other"}), ("host-unfit/python", {"python": "/no/python"})],
)
def test_refused_choice_is_not_recorded(
    commands: Commands,
    state: Path,
    build: Build,
    home: Path,
    *,
    code: str,
    choice: dict[str, str],
) -> None:
    commands("short")
    build(home / "mine")
    workspace = attached(folder="~/mine").workspace
    files = (workspace.spec, workspace.inventory, workspace.root / "site.json")
    before = [path.read_bytes() for path in files]
    with refused(code, UsageError):
        attach(AttachRequest(HERE, **choice))  # type: ignore[arg-type]
    assert [path.read_bytes() for path in files] == before
    assert [path.name for path in home.iterdir()] == ["mine"]
    assert attached(folder="~/mine").folder == str(home / "mine")


@pytest.fixture
def failed(commands: Commands, state: Path) -> Workspace:
    """The workspace of a cluster whose first `attach` has only made ~/clusterctl."""
    commands("short")
    program = state.parent / "slurm+bin/sha256sum"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    with refused("packages-unmet/installation", TransportError):
        attached()
    program.unlink()
    return Workspace.of("campus")


def test_folder_of_a_failed_attach_is_removed_by_the_next(
    failed: Workspace, build: Build, home: Path
) -> None:
    assert [path.name for path in home.iterdir()] == ["clusterctl"]
    build(home / "deep/other")
    attached(folder="~/deep/other")
    assert [path.name for path in home.iterdir()] == ["deep"]


def test_folder_of_a_failed_attach_is_used_by_the_next(failed: Workspace, home: Path) -> None:
    assert attached(folder=str(home / "clusterctl")).folder == str(home / "clusterctl")


def test_attach_keeps_other_files_in_the_folder_of_a_failed_attach(
    failed: Workspace, build: Build, home: Path
) -> None:
    (home / "clusterctl/mine.txt").touch()
    build(home / "other")
    attached(folder="~/other")
    assert (home / "clusterctl/mine.txt").exists()


def test_folder_of_another_cluster_is_not_removed(
    failed: Workspace, build: Build, home: Path
) -> None:
    (home / "clusterctl/.clusterctl-cluster").write_text("b12345\n0\ncampus\n")
    build(home / "other")
    attached(folder="~/other")
    assert (home / "clusterctl/.clusterctl-cluster").exists()


def test_folder_of_an_unset_variable_is_forgotten(
    commands: Commands, state: Path, build: Build, home: Path
) -> None:
    commands("short")
    with refused("file-unwritable/remote-folder", TransferError):
        attached(folder="$NOWHERE_SET/ours")
    build(home / "other")
    assert attached(folder="~/other").folder == str(home / "other")


def test_login_of_two_clusters_needs_a_name(
    commands: Commands, state: Path, build: Build, home: Path
) -> None:
    commands("short")
    for name in ("campus", "other"):
        build(home / name)
        attached(name=name, folder=f"~/{name}")
    with refused("ambiguous/cluster", UsageError, "campus, other"):
        attached()
    assert attached(name="other").workspace.root.name == "other"


def test_doctor_asks_with_the_settings_of_jobs(commands: Commands, ready: Path) -> None:
    commands("short", accounts=2, accepted="*--account=proj0*")
    first = attached(qos="long")
    calls = commands("short", accounts=2, accepted="*--account=proj0*")
    calls.unlink()
    facts = {fact.fact: fact for fact in examine_site(first.workspace)}
    assert facts["account"].value == "proj0"
    assert all("--qos=long" in call for call in calls.read_text().splitlines())
    # Jobs would be refused.
    commands("short", accounts=2, accepted="*--account=proj1*")
    with refused("slurm-refused/all-partitions", SlurmError):
        examine_site(first.workspace)


@pytest.mark.parametrize("left", [("short", "gpuq"), ("short",)], ids=["refuses", "is-gone"])
def test_doctor_names_a_default_partition_that_takes_no_job(
    commands: Commands, ready: Path, left: tuple[str, ...]
) -> None:
    commands("gpuq", "short")
    first = attached()
    assert first.partitions[0] == "gpuq"
    commands(*left, accepted="*--partition=short*")
    facts = {fact.fact: fact for fact in examine_site(first.workspace)}
    assert facts["default partition"].is_problem
    assert "partition short" in facts


def test_doctor_names_an_environment_that_lost_files(commands: Commands, ready: Path) -> None:
    commands("short")
    first = attached()
    env = Path(first.folder) / "env"
    (module,) = env.glob("lib/python3*/site-packages/first.py")
    module.unlink()
    problems = [fact.fact for fact in examine_site(first.workspace) if fact.is_problem]
    assert f"damaged environments/{env.readlink().name}" in problems


def test_error_of_a_new_login_names_no_file_that_is_removed(state: Path) -> None:
    login = "ssh://ada@127.0.0.1:1"
    with refused("unreachable", UnreachableError, f"`ssh {login}`") as caught:
        attach(AttachRequest(login))
    assert not caught.value.where
    assert not [*state.glob(".attach-*")]


def test_attach_despite_a_foreign_folder_for_connections(
    commands: Commands, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection of the probe can't be moved to the workspace, and ends."""
    commands("short")
    taken = Workspace(ready / "campus").connections
    (taken / "foreign").mkdir(parents=True)
    first: list[Path] = []

    def probed(
        request: AttachRequest, workspace: Workspace, chosen: Mapping[str, Any]
    ) -> SiteProbe:
        first.append(workspace.connections)
        first[0].mkdir()
        return _probed(request, workspace, chosen)

    monkeypatch.setattr("clusterctl.providers.existing.attach._probed", probed)
    try:
        assert attached().workspace.root.is_dir()
    finally:
        shutil.rmtree(taken)
    assert not first[0].exists()


def test_new_login_is_accepted_for_the_same_account(commands: Commands, ready: Path) -> None:
    commands("short")
    first = attached()
    workspace = first.workspace
    cluster_id = first.workspace.cluster_id()
    write_login_files("ada@old.invalid", workspace)
    with refused("exists/cluster", UsageError, "--name campus"):
        attached()
    site = workspace.root / "site.json"
    record = json.loads(site.read_text())
    for field in ("cluster_name", "account", "home"):
        site.write_text(json.dumps(record | {field: "other"}))
        with refused("exists/cluster", UsageError, "other"):
            attached(name="campus")
    assert login_of(workspace.ssh_config) == "ada@old.invalid"
    site.write_text(json.dumps(record))
    again = attached(name="campus")
    assert (again.workspace, again.workspace.cluster_id()) == (workspace, cluster_id)
    assert login_of(workspace.ssh_config) == settings_of(again.spec).login == HERE
    assert [path.name for path in ready.iterdir() if path.is_dir()] == ["campus"]


def test_nodes_without_a_python_for_jobs_get_one(
    commands: Commands, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands("short")
    downloads = standalone_list(state.parent, small_python())
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", downloads)
    monkeypatch.setenv("UV_CACHE_DIR", str(state.parent / "uv"))
    with new_wheelhouse(job_lock(), NodePlatform(STANDALONE, 28)) as folder:
        a_wheel(folder, "first", "1.0")
    result = attach(AttachRequest(HERE, own_python=True))
    assert (result.site_python, job_inventory(result.workspace).python) == ("", STANDALONE)
    # A Python that the user has chosen is not replaced.
    assert attached().site_python == ""
