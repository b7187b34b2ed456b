"""An interrupted removal leaves no node, cluster or image that counts as existing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl.providers.local import image, layout, system
from clusterctl.providers.local.helper import look
from tests.support.hostile import deep_folder, nest
from tests.unit.local.states import a_state


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Interrupt each removal of a folder after its first file."""

    def delete(folder: Path) -> None:
        next(path for path in sorted(folder.rglob("*")) if path.is_file()).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(system, "delete", delete)
    return monkeypatch


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_node_with_interrupted_removal_is_not_listed(
    tmp_path: Path, ended: pytest.MonkeyPatch
) -> None:
    """Otherwise, a node with a part of its files would be started after a killed `down`."""
    node = tmp_path / "n"
    for name in ("a", "b"):
        write(node / "upper" / name)
    with pytest.raises(KeyboardInterrupt):
        system.erase(node)
    assert not node.exists()
    ended.undo()
    write(node / "upper" / "new")
    system.erase(node)
    assert list(tmp_path.iterdir()) == []


def test_cluster_with_interrupted_removal_is_not_listed(
    tmp_path: Path, ended: pytest.MonkeyPatch
) -> None:
    ended.setattr(layout, "STATE", tmp_path)
    write(tmp_path / "abcdef" / "cluster.json", a_state("abcdef").model_dump_json())
    write(tmp_path / "abcdef" / "a")
    assert [state.id for state in image.states()] == ["abcdef"]
    with pytest.raises(KeyboardInterrupt):
        system.erase(tmp_path / "abcdef")
    assert image.states() == ()
    ended.undo()
    system.erase_doomed(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_removal_is_residue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "STATE", tmp_path)
    folder = write(tmp_path / ".removed-abcdef" / "a").parent
    assert look({"id": "abcdef"})["residue"] == [f"folder {folder}"]


def test_image_with_interrupted_removal_is_not_used(
    tmp_path: Path, ended: pytest.MonkeyPatch
) -> None:
    for name in ("STATE", "CACHE"):
        ended.setattr(layout, name, tmp_path)
    folder = image.image_dir("0123456789abcdef")
    write(folder / "image.json", json.dumps({"base": "b", "made": 0}))
    write(folder / "a")
    with pytest.raises(KeyboardInterrupt):
        image.prune()
    assert not folder.exists()


def test_folders_nested_deeper_than_a_path_can_be_are_removed() -> None:
    """A job left so many nested folders that their path is longer than PATH_MAX."""
    with deep_folder() as top:
        nest(top / "n" / "job")
        system.erase(top / "n")
        assert list(top.iterdir()) == []
