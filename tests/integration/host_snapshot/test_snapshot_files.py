"""`down` removes a folder of ours with the program rm."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from tests.support.hostile import deep_folder, nest


def test_a_folder_of_ours_goes_however_deep_it_is(util: Callable[[str], ModuleType]) -> None:
    """A job whose account is gone left folders deeper than Python's recursion and a path can be."""
    with deep_folder() as top:
        (top / "shared" / "a").mkdir(parents=True)
        (top / "shared" / "a" / "file").touch()
        nest(top / "shared" / "job")
        assert util("snapshot_paths").remove_tree(str(top / "shared")) == []
        assert list(top.iterdir()) == []
