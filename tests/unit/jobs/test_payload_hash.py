"""The hash that names the payload on the nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.util.assets import tree_files, tree_hash


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "payload"
    (root / "sub").mkdir(parents=True)
    (root / "a.py").write_text("one")
    (root / "sub" / "b.py").write_text("two")
    return root


def test_tree_hash_ignores_the_path_caches_and_empty_folders(tree, tmp_path):
    before = tree_hash(tree)
    assert len(before) == 16
    (tree / "sub" / "__pycache__").mkdir()
    (tree / "sub" / "__pycache__" / "b.pyc").write_text("x")
    (tree / ".gitkeep").touch()
    (tree / "empty").mkdir()
    elsewhere = tree.rename(tmp_path / "elsewhere")
    assert tree_hash(elsewhere) == before
    assert [path.name for path in tree_files(elsewhere)] == ["a.py", "b.py"]


def test_tree_hash_changes_with_names_and_contents(tree):
    seen = {tree_hash(tree)}
    (tree / "a.py").write_text("One")
    seen.add(tree_hash(tree))
    (tree / "a.py").rename(tree / "c.py")
    seen.add(tree_hash(tree))
    (tree / "c.py").write_text("")
    (tree / "One").touch()
    seen.add(tree_hash(tree))
    assert len(seen) == 4
