"""`down` removes very deep folders with the program rm."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from tests.support.hostile import deep_folder, nest


def test_remove_tree_removes_very_deep_folders(util: Callable[[str], ModuleType]) -> None:
    """The folders are deeper than Python's recursion limit and the maximum path length."""
    with deep_folder() as top:
        (top / "shared" / "a").mkdir(parents=True)
        (top / "shared" / "a" / "file").touch()
        nest(top / "shared" / "job")
        assert util("snapshot_paths").remove_tree(str(top / "shared")) == []
        assert list(top.iterdir()) == []
