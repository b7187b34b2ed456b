"""The Slurm release of local nodes: it is part of their image, and existing nodes keep it."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from clusterctl.configure.inventory_file import image_variables
from clusterctl.errors import UsageError
from clusterctl.providers.local import layout
from clusterctl.providers.local.layout import ExistingMachines
from clusterctl.providers.local.provider import LocalProvider, image_keys
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.spec.software import Software
from clusterctl.state.inventory import CONTROLLER
from clusterctl.state.workspace import Workspace
from tests.support.inventories import host_of
from tests.support.messages import refused
from tests.unit.local.states import a_state, play_helper

SETTINGS = LocalSettings(distribution="debian-13")
CTL = host_of("d-ctl", CONTROLLER, address="10.9.8.2", distribution="debian-13")
NETWORK = IPv4Network("10.9.8.0/24")


def spec(version: str | None = None) -> ClusterSpec:
    values = {"version": 1, "name": "d", "partitions": [{"name": "train", "nodes": 1}]}
    given = {
        "provider": SETTINGS,
        "slurm": {"version": version},
        "users": [{"name": "a", "uid": 2000}],
    }
    return ClusterSpec.model_validate({**values, **given})


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path / "d")
    made.create()
    made.create_secrets()
    return made


def test_image_key_depends_on_the_slurm_release() -> None:
    usual = image_keys(SETTINGS)
    newer = image_keys(SETTINGS, "26.05")
    assert image_keys(SETTINGS, "24.11") == usual
    assert newer[0] == usual[0]  # the base
    assert newer[1] != usual[1]


def test_image_key_depends_on_the_packages_of_the_spec() -> None:
    """Clusters without packages of their own, or with the same packages, share an image."""
    usual = image_keys(SETTINGS)
    more = image_keys(SETTINGS, packages=("git", "tree"))
    assert image_keys(SETTINGS, packages=("tree", "git")) == more
    assert more[0] == usual[0]  # the base
    assert more[1] not in (usual[1], image_keys(SETTINGS, packages=("git",))[1])


def test_packages_of_the_spec_are_installed_in_the_image() -> None:
    chosen = spec(None).model_copy(update={"software": Software(packages=("git",))})
    variables = image_variables(chosen, distribution_of("debian-13"), Path("/w"), Path("/l"))
    assert variables["common_more"] == ["git"]


@pytest.mark.parametrize(("wanted", "suite"), [(None, None), ("24.11", None), ("26.05", "forky")])
def test_image_has_the_slurm_release_of_the_spec(wanted: str | None, suite: str | None) -> None:
    variables = image_variables(spec(wanted), distribution_of("debian-13"), Path("/w"), Path("/l"))
    source = {"release": wanted, "suite": suite, "mirror": SETTINGS.mirror}
    assert variables.get("clusterctl_newer_slurm") == (source if suite else None)


def plan(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, wanted: str | None, **known: Any
) -> str:
    """Return the notes of a plan for a running cluster. known: fields of the helper's record."""
    state = a_state(distribution="debian-13", **known)
    known = ExistingMachines(state=state, nodes={"d-ctl": None})
    play_helper(monkeypatch, known.model_dump(mode="json"))
    workspace.cluster_id()
    return str(LocalProvider(SETTINGS).plan(spec(wanted), workspace).notes)


@pytest.mark.parametrize(("runs", "wanted"), [("24.11", "26.05"), ("26.05", "24.11")])
def test_other_slurm_release_for_existing_nodes_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, runs: str, wanted: str
) -> None:
    keep = f'slurm: {{version: "{runs}"}}'
    values = (wanted, keep, "`clusterctl down`", "`clusterctl up`")
    with refused("fixed-while-up/slurm", UsageError, *values, where="slurm.version"):
        plan(workspace, monkeypatch, wanted, slurm=runs)


@pytest.mark.parametrize("wanted", [None, "26.05"])
def test_slurm_release_of_existing_nodes_is_kept(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, wanted: str | None
) -> None:
    notes = plan(workspace, monkeypatch, wanted, slurm="26.05")
    # That of 24.11 is no newer one of theirs.
    assert ("older image" in notes) == (wanted == "26.05")


@pytest.mark.parametrize(("older", "noted"), [(False, False), (True, True)])
def test_changed_packages_do_not_make_the_image_of_nodes_older(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, *, older: bool, noted: bool
) -> None:
    """`up` installs packages that the spec gained, and keeps packages that it lost."""
    packages = ("git",)
    key = "1" * 16 if older else image_keys(SETTINGS, "24.11", packages)[1]
    notes = plan(workspace, monkeypatch, None, slurm="24.11", packages=packages, image=key)
    assert ("older image" in notes) == noted


@pytest.mark.parametrize(("has", "expected"), [("24.11", ("", True)), ("26.05", ("26.05", False))])
def test_inventory_has_the_slurm_release_of_the_nodes(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, has: str, expected: tuple[str, bool]
) -> None:
    """Existing nodes keep their image, whatever the spec says."""
    nodes = tuple(
        layout.MadeNode(name=name, address="10.9.8.2", host_key="k", started=True, made=False)
        for name in ("d-ctl", "d-train-1")
    )
    made = layout.MadeCluster(subnet=NETWORK, distribution="debian-13", slurm=has, nodes=nodes)
    play_helper(monkeypatch, made.model_dump(mode="json"))
    found = LocalProvider(SETTINGS).apply(spec(), workspace).inventory
    assert (found.slurm, found.pmix) == expected
