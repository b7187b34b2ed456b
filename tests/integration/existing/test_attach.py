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

from clusterctl.errors import SlurmError, TransferError, UnreachableError, UsageError
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.standalone_python import RELEASE as STANDALONE
from clusterctl.packages.wheelhouse import new_wheelhouse
from clusterctl.providers.attached import AttachRequest
from clusterctl.providers.existing.attach import (
    Attachment,
    _inventory,
    _probed,
    attach,
    name_of,
)
from clusterctl.providers.existing.facts import examine_site
from clusterctl.providers.existing.probe import Probed
from clusterctl.providers.existing.prove import Unproven
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
from tests.unit.existing.test_prove import PLACED, SITE

PROVEN = Path(__file__).parents[2] / "unit/existing/captures/proof-22.05-pmix.txt"
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
    ("launcher", "pmix"), [(Launcher.MPIRUN, False), (Launcher.SRUN, True), (None, True)]
)
def test_attach_without_a_new_proof_keeps_the_launcher(
    launcher: Launcher | None, pmix: bool
) -> None:
    settings = ExistingSettings(
        type="existing", login="campus", folder="/home/ada/ours", launcher=launcher
    )
    partitions = (Partition(name="short", nodes=2),)
    spec = ClusterSpec(version=1, name="campus", provider=settings, partitions=partitions)
    probed = Probed(replace(SITE, mpi_types=("pmix",)), "", "short", ())
    assert _inventory(spec, probed, PLACED, Unproven("pending", "Resources")).pmix is pmix


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


def attached(**more: object) -> Attachment:
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
    assert [attempt.partition for attempt in result.probed.refused] == ["a/b"]
    assert (settings_of(spec).account, inventory.account) == (None, "proj/0")
    assert inventory.slurm_path.endswith("slurm+bin")


def test_attach_again_keeps_what_a_job_has_proven(commands: Commands, ready: Path) -> None:
    commands("short", "gpuq", proof=PROVEN)
    first = attached()
    assert first.proof is not None
    proven = job_inventory(first.workspace)
    assert (proven.python, proven.glibc_minor, proven.pmix) == (RELEASE, 36, True)
    # The queue is closed now.
    commands("short", "gpuq")
    again = attach(AttachRequest(HERE))
    assert (again.proof, again.placed.python, again.placed.built) == (None, sys.executable, False)
    assert job_inventory(again.workspace) == proven
    settings = settings_of(again.spec)
    assert (settings.modules, settings.launcher) == (("openmpi/4.1.4",), Launcher.SRUN)
    profile = Path(again.placed.folder) / "job-profile.sh"
    assert "openmpi/4.1.4" in profile.read_text()


def test_earlier_proof_is_shown_while_the_queue_is_full(
    commands: Commands, ready: Path, tmp_path: Path
) -> None:
    """`doctor` reads the launcher from the record of the cluster, not from the spec in the folder."""
    commands("short", proof=PROVEN)
    first = attached()
    proven = [fact for fact in first.placed_facts if fact.fact in {"MPI", "compute nodes"}]
    assert len(proven) == 2
    (pending := tmp_path / "pending").write_text("pending\tResources\tN/A\n")
    commands("short", proof=pending)
    again = attached()
    assert again.unproven is not None
    shown = examine_site(again.workspace)
    assert [fact for fact in shown if fact.fact in {"MPI", "compute nodes"}] == proven
    # Another module has not been proven.
    other = attached(modules=["openmpi/5.0"])
    assert [fact.learned for fact in examine_site(other.workspace) if fact.fact == "MPI"] == [
        "no job has run the proof"
    ]


def test_attach_again_keeps_the_module_added_by_the_proof(
    commands: Commands, ready: Path, tmp_path: Path
) -> None:
    proven = tmp_path / "proven"
    proven.write_text(
        PROVEN.read_text().replace("works\topenmpi/4.1.4", "works\tpython/3.13 openmpi/4.1.4")
    )
    commands("short", proof=proven)
    first = attached(modules=["python/3.13"])
    # The queue is closed now.
    commands("short")
    for result in (first, attached()):
        settings = settings_of(result.spec)
        assert settings.modules == ("python/3.13", "openmpi/4.1.4")
        assert "openmpi/4.1.4" in (Path(result.placed.folder) / "job-profile.sh").read_text()
    assert settings_of(attached(modules=["python/3.12"]).spec).modules == ("python/3.12",)


def test_attach_again_keeps_what_it_has_found_until_it_is_withdrawn(
    commands: Commands, ready: Path
) -> None:
    commands("short", "gpuq", accounts=2, accepted="*--account=proj1*")
    attached()
    commands("short", "gpuq", accounts=2, accepted="*--account=proj0*--partition=gpuq*")
    with refused("no-partition-accepts", SlurmError, "--account '' --partition ''"):
        attached()
    again = attached(account="", partition="")
    assert (again.probed.account, again.probed.partition) == ("proj0", "gpuq")
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
    assert (again.probed.account, again.probed.partition) == ("", "short")
    assert (settings.modules, settings.qos, settings.folder) == ((), None, first.placed.folder)


def test_partition_and_routed_replace_each_other(commands: Commands, ready: Path) -> None:
    commands("short", "gpuq")
    attached(partition="gpuq")
    routed = attached(spec=spec_of("short", routed=True))
    assert (routed.probed.is_routed, settings_of(routed.spec).routed) == (True, True)
    assert attached().probed.is_routed
    named = attached(spec=spec_of("gpuq", "short"))
    assert (named.probed.is_routed, named.probed.partition) == (False, "gpuq")
    attached(spec=spec_of("short", routed=True))
    again = attached(partition="")
    assert (again.probed.is_routed, again.probed.partition) == (False, "short")


def spec_of(*partitions: str, **settings: object) -> ClusterSpec:
    provider = ExistingSettings.model_validate({"type": "existing", "login": HERE, **settings})
    named = tuple(Partition(name=name, nodes=2) for name in partitions)
    return ClusterSpec(version=1, name="campus", provider=provider, partitions=named)


def test_attach_again_keeps_choices_of_the_spec(commands: Commands, ready: Path) -> None:
    calls = commands("short", "gpuq", proof=PROVEN)
    first = attached(spec=spec_of("gpuq", "short", folder="~/mine", launcher="mpirun", qos="long"))
    # The job has proven another launcher.
    assert settings_of(first.spec).launcher is Launcher.MPIRUN
    calls.unlink()
    for again in (attached(), attached(spec=spec_of("gpuq")), attached(spec=first.spec)):
        settings = settings_of(again.spec)
        assert (settings.launcher, settings.qos) == (Launcher.MPIRUN, "long")
        assert (settings.folder, again.probed.partition) == (first.placed.folder, "gpuq")
        assert settings.python == sys.executable
    assert "--qos=long" in calls.read_text()


@pytest.mark.parametrize(
    ("code", "choice"),
    [("folder-differs", {"folder": "~/other"}), ("no-python", {"python": "/no/python"})],
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
    assert attached(folder="~/mine").placed.folder == str(home / "mine")


@pytest.fixture
def failed(commands: Commands, state: Path) -> Workspace:
    """The workspace of a cluster whose first `attach` found too little room in ~/clusterctl."""
    commands("short")
    stat = state.parent / "slurm+bin/stat"
    stat.write_text("#!/bin/sh\necho 1 1 1 1\n")
    stat.chmod(0o755)
    with refused("no-room", TransferError):
        attached()
    stat.unlink()
    return Workspace.of("campus")


def test_folder_of_a_failed_attach_is_removed_by_the_next(
    failed: Workspace, build: Build, home: Path
) -> None:
    assert [path.name for path in home.iterdir()] == ["clusterctl"]
    build(home / "deep/other")
    attached(folder="~/deep/other")
    assert [path.name for path in home.iterdir()] == ["deep"]


def test_folder_of_a_failed_attach_is_used_by_the_next(failed: Workspace, home: Path) -> None:
    assert attached(folder=str(home / "clusterctl")).placed.folder == str(home / "clusterctl")


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
    with refused("folder-not-made", TransferError):
        attached(folder="$NOWHERE_SET/ours")
    build(home / "other")
    assert attached(folder="~/other").placed.folder == str(home / "other")


def test_login_of_two_clusters_needs_a_name(
    commands: Commands, state: Path, build: Build, home: Path
) -> None:
    commands("short")
    for name in ("campus", "other"):
        build(home / name)
        attached(name=name, folder=f"~/{name}")
    with refused("which-cluster", UsageError, "campus, other"):
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
    # The queue was closed.
    assert facts["MPI"].is_problem
    # Jobs would be refused.
    commands("short", accounts=2, accepted="*--account=proj1*")
    with refused("no-partition-accepts", SlurmError):
        examine_site(first.workspace)


@pytest.mark.parametrize("left", [("short", "gpuq"), ("short",)], ids=["refuses", "is-gone"])
def test_doctor_names_a_default_partition_that_takes_no_job(
    commands: Commands, ready: Path, left: tuple[str, ...]
) -> None:
    commands("gpuq", "short")
    first = attached()
    assert first.probed.partition == "gpuq"
    commands(*left, accepted="*--partition=short*")
    facts = {fact.fact: fact for fact in examine_site(first.workspace)}
    assert facts["default partition"].is_problem
    assert "partition short" in facts


def test_doctor_names_an_environment_that_lost_files(commands: Commands, ready: Path) -> None:
    commands("short")
    first = attached()
    env = Path(first.placed.folder) / "env"
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

    def probed(request: AttachRequest, workspace: Workspace, chosen: Mapping[str, Any]) -> Probed:
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
    cluster_id = first.placed.cluster_id
    write_login_files("ada@old.invalid", workspace)
    with refused("name-taken", UsageError, "--name campus"):
        attached()
    site = workspace.root / "site.json"
    record = json.loads(site.read_text())
    for field in ("cluster_name", "account", "home"):
        site.write_text(json.dumps(record | {field: "other"}))
        with refused("name-taken", UsageError, "other"):
            attached(name="campus")
    assert login_of(workspace.ssh_config) == "ada@old.invalid"
    site.write_text(json.dumps(record))
    again = attached(name="campus")
    assert (again.workspace, again.placed.cluster_id) == (workspace, cluster_id)
    assert login_of(workspace.ssh_config) == settings_of(again.spec).login == HERE
    assert [path.name for path in ready.iterdir() if path.is_dir()] == ["campus"]


# The nodes lack the login node's Python.
OTHER_NODES = """\
hosts c1
node c1 seen yes
node c1 arch x86_64
node c1 glibc 2.36
node c1 version bash: .../env/bin/python: No such file or directory
"""


@pytest.mark.parametrize("found", ["", "node c1 python /usr/bin/python3 3.6.8\n"])
def test_nodes_without_a_python_for_jobs_get_one(
    commands: Commands,
    state: Path,
    build: Build,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    found: str,
) -> None:
    lines = [line.split(" ", 3) for line in (OTHER_NODES + found).splitlines()]
    proof = state.parent / "proof"
    proof.write_text("".join("\t".join(words) + "\n" for words in lines))
    commands("short", proof=proof)
    downloads = standalone_list(state.parent, small_python())
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", downloads)
    monkeypatch.setenv("UV_CACHE_DIR", str(state.parent / "uv"))
    with new_wheelhouse(job_lock(), NodePlatform(STANDALONE, 28)) as folder:
        a_wheel(folder, "first", "1.0")
    result = attach(AttachRequest(HERE))
    assert (result.placed.has_own_python, result.placed.node.python) == (True, STANDALONE)
    # A Python that the user has chosen is not replaced.
    build(home / "again")
    if found:
        with refused("no-python", UsageError):
            attached(name="again", folder="~/again")
    else:
        assert attached(name="again", folder="~/again").answer.obstacle
