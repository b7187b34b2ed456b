"""Tests of the login of an attached cluster and of the ssh_config files that are written for it."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.spec.base import PATTERNS
from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import HERE, checked_login, login_of, write_login_files
from tests.support.messages import refused


@pytest.mark.parametrize(
    "login",
    [
        "campus",
        "stud@login.campus.edu",
        "stud@campus.edu@login",
        "ssh://stud@login-1:2222",
        "fe80::1",
        "ssh://[::1]:22",
        "campus+2",
        "CAMPUS\\ada@login",
        "ada+x@login",
    ],
)
def test_checked_login_keeps_a_destination_of_ssh(login: str) -> None:
    assert checked_login(login) == login
    assert PATTERNS["destination"].matches(login)


@pytest.mark.parametrize(
    "login",
    [
        *("", "-oProxyCommand=x", "u@-x", "-u@x", "a b", "u@h:22", "ssh://u@h/folder"),
        *("ssh://u@h:0", "ssh://u@h:65536"),
        *("$(id)@h", "u;id@h", "it's@h", "u\\@h", "h;id", "h\\x"),
    ],
)
def test_checked_login_refuses_text_that_ssh_can_not_take(login: str) -> None:
    with refused("option-invalid/login", UsageError):
        checked_login(login)


def test_checked_login_of_the_local_machine_is_local() -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    names = [HERE, "localhost", os.uname().nodename, f"{me}@localhost"]
    assert {checked_login(name) for name in names} == {HERE}
    assert checked_login("somebody-else@localhost") == "somebody-else@localhost"
    assert checked_login("ssh://localhost:2222") == "ssh://localhost:2222"


def test_write_login_config_twice_keeps_the_file(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_login_files("campus", workspace)
    before = workspace.ssh_config.stat()
    write_login_files("campus", workspace)
    assert workspace.ssh_config.stat().st_ino == before.st_ino
    assert login_of(tmp_path / "elsewhere" / "ssh_config") is None
