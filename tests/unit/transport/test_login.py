"""Tests of the login of an attached cluster and of the ssh_config files that are written for it."""

from __future__ import annotations

import os
import subprocess
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
def test_a_destination_of_ssh_is_taken_unchanged(login: str) -> None:
    assert checked_login(login) == login
    assert PATTERNS["destination"].matches(login)


@pytest.mark.parametrize(
    "login",
    [
        *("", "-oProxyCommand=x", "u@-x", "-u@x", "a b", "u@h:22", "ssh://u@h/folder"),
        *("$(id)@h", "u;id@h", "it's@h", "u\\@h", "h;id", "h\\x"),
    ],
)
def test_any_other_text_is_refused(login: str) -> None:
    with refused("login-form", UsageError):
        checked_login(login)


def test_this_machine_needs_no_ssh(me: str) -> None:
    names = [HERE, "localhost", os.uname().nodename, f"{me}@localhost"]
    assert {checked_login(name) for name in names} == {HERE}
    assert checked_login("somebody-else@localhost") == "somebody-else@localhost"
    assert checked_login("ssh://localhost:2222") == "ssh://localhost:2222"


def settings(config: Path, login: str) -> dict[str, str]:
    ran = subprocess.run(
        ["ssh", "-G", "-F", config, "--", login], capture_output=True, text=True, check=True
    )
    return dict(line.split(" ", 1) for line in ran.stdout.splitlines() if " " in line)


def test_the_users_settings_apply_and_ours_fill_the_gaps(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text(
        "Host campus\n"
        "    HostName 10.9.8.7\n"
        "    User stud\n"
        "    ProxyJump gate\n"
        "    ServerAliveInterval 5\n"
        "    RemoteCommand tmux\n"
        "    LocalForward 8888 localhost:8888\n"
        "    LogLevel QUIET\n"
    )
    own.chmod(0o600)
    workspace = Workspace(tmp_path)
    write_login_files("campus", workspace, str(own))
    assert login_of(workspace.ssh_config) == "campus"
    found = settings(workspace.ssh_config, "campus")
    expected = {"hostname": "10.9.8.7", "user": "stud", "proxyjump": "gate", "batchmode": "no"}
    assert expected.items() <= found.items()
    assert (found["serveraliveinterval"], found["connecttimeout"]) == ("5", "60")
    assert "remotecommand" not in found
    quiet = settings(workspace.background_config, "campus")
    assert (quiet["hostname"], quiet["batchmode"], quiet["loglevel"]) == ("10.9.8.7", "yes", "INFO")
    assert "localforward" not in quiet


def test_the_same_login_again_replaces_no_file(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_login_files("campus", workspace)
    before = workspace.ssh_config.stat()
    write_login_files("campus", workspace)
    assert workspace.ssh_config.stat().st_ino == before.st_ino
    assert login_of(tmp_path / "elsewhere" / "ssh_config") is None
