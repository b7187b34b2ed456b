"""The paths that a command of an agent may use, apart from the commands that use them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.util.confine import Confinement
from tests.support.messages import refused


@pytest.fixture
def confined(tmp_path: Path) -> Confinement:
    return Confinement((str(tmp_path),))


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to("pipe"),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/proc/self/root/etc/hostname"),
    ],
)
def test_path_whose_reading_may_never_end_is_refused(
    confined: Confinement, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """A pipe in the project would keep a thread of the server for ever."""
    os.mkfifo(tmp_path / "pipe")
    make(tmp_path / "path")
    with refused("agent-path"):
        confined.reject_read("path")
    with refused("agent-path"):
        confined.reject_written("path")


@pytest.mark.parametrize("path", ["a" * 300, "a/" * 3000, "\0", "loop", "~nobody/x"])
def test_path_that_the_system_refuses_is_an_error_of_the_agent(
    confined: Confinement, tmp_path: Path, path: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with refused("agent-path"):
        confined.reject_read(path)


@pytest.mark.parametrize("name", [".envrc", ".ENVRC", ".v\u017fcode", "a/.Git/hooks/x"])
def test_name_that_programs_obey_is_refused_in_each_case(confined: Confinement, name: str) -> None:
    """File systems that ignore case compare names by Unicode's case folding."""
    with refused("agent-path"):
        confined.reject_written(".", [name])


@pytest.mark.parametrize("path", ["", "new", "file", "file/below", "folder", "folder/new"])
def test_file_folder_and_free_path_of_the_project_may_be_used(
    confined: Confinement, tmp_path: Path, path: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    confined.reject_read(path)
    confined.reject_written(path, ["result.txt"])
