"""The cluster of a command without a spec file in the current folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.spec.names import DEFAULT_CLUSTER
from clusterctl.state.chosen import ChosenCluster


@pytest.mark.parametrize("name", ["cluster.yml", "Cluster.yaml"])
def test_workspace_beside_a_spec_with_a_similar_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        ChosenCluster().workspace()
    assert (caught.value.code, caught.value.where) == ("spec-misnamed", str(tmp_path / name))


def test_workspace_in_an_unreadable_folder_is_that_of_the_built_in_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", ".")

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        patch.setattr(Path, "iterdir", refuse)
        workspace = ChosenCluster().workspace()
    assert workspace.root.name == DEFAULT_CLUSTER
