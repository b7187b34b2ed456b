"""The packages of the spec: they are part of the image of local nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.configure.inventory_file import image_variables
from clusterctl.providers.local.layout import ExistingMachines
from clusterctl.providers.local.provider import LocalProvider, image_keys
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.spec.software import Software
from clusterctl.state.workspace import Workspace
from tests.unit.local.states import a_state, play_helper

SETTINGS = LocalSettings(distribution="debian-13")


def spec() -> ClusterSpec:
    values = {"version": 1, "name": "d", "partitions": [{"name": "train", "nodes": 1}]}
    given = {"provider": SETTINGS, "users": [{"name": "a", "uid": 2000}]}
    return ClusterSpec.model_validate({**values, **given})


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path / "d")
    made.create()
    made.create_secrets()
    return made


def test_image_key_depends_on_the_packages_of_the_spec() -> None:
    """Clusters without packages of their own, or with the same packages, share an image."""
    usual = image_keys(SETTINGS)
    more = image_keys(SETTINGS, ("git", "tree"))
    assert image_keys(SETTINGS, ("tree", "git")) == more
    assert more[0] == usual[0]  # the base
    assert more[1] not in (usual[1], image_keys(SETTINGS, ("git",))[1])


def test_packages_of_the_spec_are_installed_in_the_image() -> None:
    chosen = spec().model_copy(update={"software": Software(packages=("git",))})
    variables = image_variables(chosen, distribution_of("debian-13"), Path("/w"), Path("/l"))
    assert variables["common_more"] == ["git"]


def plan(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, **known: Any) -> str:
    """Return the notes of a plan for a running cluster. known: fields of the helper's record."""
    state = a_state(distribution="debian-13", **known)
    known = ExistingMachines(state=state, nodes=frozenset({"d-ctl"}))
    play_helper(monkeypatch, known.model_dump(mode="json"))
    workspace.cluster_id()
    return str(LocalProvider(SETTINGS).plan(spec(), workspace).notes)


@pytest.mark.parametrize(("older", "noted"), [(False, False), (True, True)])
def test_changed_packages_do_not_make_the_image_of_nodes_older(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, *, older: bool, noted: bool
) -> None:
    """`up` installs packages that the spec gained, and keeps packages that it lost."""
    packages = ("git",)
    key = "1" * 16 if older else image_keys(SETTINGS, packages)[1]
    notes = plan(workspace, monkeypatch, packages=packages, image=key)
    assert ("older image" in notes) == noted
