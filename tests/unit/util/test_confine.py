"""What a command of an agent may do, apart from the commands."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.util.confine import (
    VARIABLE,
    Asked,
    Confinement,
    LimitError,
    check,
    reject_opened,
    reject_read,
    reject_written,
)
from tests.support.messages import refused


@pytest.fixture(autouse=True)
def confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Confinement:
    confined = Confinement(
        (str(tmp_path),),
        node_hours=8,
        nodes=4,
        time_s=7200,
        verbs_off=("down",),
        file="config.yaml",
    )
    monkeypatch.setenv(VARIABLE, confined.environ[VARIABLE])
    return confined


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        (Asked(verb="down"), {"name": "verbs_off", "value": ["down"], "asked": "down"}),
        (Asked(nodes=5), {"name": "nodes", "value": 4, "used": 0, "asked": 5}),
        (Asked(nodes=None), {"name": "nodes", "value": 4, "used": 0, "asked": None}),
        (Asked(time_s=9000), {"name": "time", "value": 7200, "used": 0, "asked": 9000}),
        (Asked(time_s=None), {"name": "time", "value": 7200, "used": 0, "asked": None}),
        (
            Asked(node_hours=2.0, used=6.5),
            {"name": "node_hours", "value": 8, "used": 6.5, "asked": 2.0},
        ),
        (
            Asked(node_hours=None, used=1.0),
            {"name": "node_hours", "value": 8, "used": 1.0, "asked": None},
        ),
        (Asked(paths=("ok", "/etc/passwd")), {"name": "folders", "asked": "/etc/passwd"}),
    ],
)
def test_check_names_the_limit_and_who_may_change_it(
    confined: Confinement, asked: Asked, limit: dict[str, Any]
) -> None:
    with refused("agent-limit", LimitError) as caught:
        check(confined, asked)
    assert caught.value.answer["limit"].items() >= limit.items()
    assert f"`agent.{limit['name']}` in config.yaml" in caught.value.fix


@pytest.mark.parametrize(
    "asked",
    [
        Asked(),
        Asked(verb="up", nodes=4, time_s=7200, node_hours=8.0),
        # Whoever has used up a limit may still look, and stop jobs.
        Asked(verb="cancel", used=99.0),
    ],
)
def test_check_lets_a_call_within_all_limits_go(confined: Confinement, asked: Asked) -> None:
    check(confined, asked)


def test_check_without_a_limit_takes_what_is_unknown() -> None:
    check(Confinement(("/p",)), Asked(nodes=None, time_s=None, node_hours=None))


def test_file_that_was_opened_through_a_changed_link_is_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An agent may change it after the path was checked."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "data").write_text("secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "data").write_text("mine")
    path = tmp_path / "folder" / "data"
    with path.open() as file:
        reject_opened(file.fileno(), path)
    (tmp_path / "folder").rename(tmp_path / "before")
    (tmp_path / "folder").symlink_to(outside)
    with path.open() as file, refused("agent-limit", LimitError):
        reject_opened(file.fileno(), path)


def test_file_that_clusterctl_has_made_may_be_sent(
    confined: Confinement, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path_factory.mktemp("cache") / "a.whl"
    wheel.touch()
    made = replace(confined, made=(f"{wheel.parent}/",))
    monkeypatch.setenv(VARIABLE, made.environ[VARIABLE])
    with wheel.open() as file:
        reject_opened(file.fileno(), wheel)


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
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """A pipe in the project would keep a thread of the server for ever."""
    os.mkfifo(tmp_path / "pipe")
    make(tmp_path / "path")
    with refused("agent-limit"):
        reject_read("path")
    with refused("agent-limit"):
        reject_written("path")


@pytest.mark.parametrize("path", ["a" * 300, "a/" * 3000, "\0", "loop", "~nobody/x"])
def test_path_that_the_system_refuses_is_an_error_of_the_agent(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with refused("agent-limit"):
        reject_read(path)


@pytest.mark.parametrize("name", [".envrc", ".ENVRC", ".v\u017fcode", "a/.Git/hooks/x"])
def test_name_that_programs_obey_is_refused_in_each_case(name: str) -> None:
    """File systems that ignore case compare names by Unicode's case folding."""
    with refused("agent-limit"):
        reject_written(".", [name])


@pytest.mark.parametrize("path", ["", "new", "file", "file/below", "folder", "folder/new"])
def test_file_folder_and_free_path_of_the_project_may_be_used(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    reject_read(path)
    reject_written(path, ["result.txt"])
