"""ssh reads the user's settings and clusterctl's defaults from the ssh_config of a login."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import connect_options, login_of, write_login_files


def settings(config: Path, login: str, *options: str) -> dict[str, str]:
    words = ["ssh", "-G", "-F", config, *options, "--", login]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in ran.stdout.splitlines() if " " in line)


def test_login_config_keeps_the_users_settings_and_adds_defaults(tmp_path: Path) -> None:
    user_config = tmp_path / "own"
    user_config.write_text(
        "Host campus\n"
        "    HostName 10.9.8.7\n"
        "    User stud\n"
        "    ProxyJump gate\n"
        "    ServerAliveInterval 5\n"
        "    RemoteCommand tmux\n"
        "    LocalForward 8888 localhost:8888\n"
        "    LogLevel QUIET\n"
    )
    user_config.chmod(0o600)
    workspace = Workspace(tmp_path)
    write_login_files("campus", workspace, str(user_config))
    assert login_of(workspace.ssh_config) == "campus"
    found = settings(workspace.ssh_config, "campus")
    expected = {"hostname": "10.9.8.7", "user": "stud", "proxyjump": "gate", "batchmode": "no"}
    assert expected.items() <= found.items()
    assert (found["serveraliveinterval"], found["connecttimeout"]) == ("5", "61")
    assert "remotecommand" not in found
    quiet = settings(workspace.background_config, "campus")
    assert (quiet["hostname"], quiet["batchmode"], quiet["loglevel"]) == ("10.9.8.7", "yes", "INFO")
    assert "localforward" not in quiet


@pytest.mark.parametrize(
    ("entry", "connect_s"),
    [
        ("", "15"),
        ("ProxyJump none", "15"),
        ("ConnectTimeout 60", "60"),
        ("ProxyJump gate", "61"),
        ("ProxyCommand nc %h %p", "61"),
    ],
    ids=["plain", "no-jump", "users-time", "jump", "command"],
)
def test_only_a_login_behind_a_proxy_gets_a_minute_to_connect(
    tmp_path: Path, entry: str, connect_s: str
) -> None:
    """A jump host may wait for the user's second factor."""
    user_config = tmp_path / "own"
    user_config.write_text(f"Host campus\n    {entry}\n")
    user_config.chmod(0o600)
    workspace = Workspace(tmp_path)
    write_login_files("campus", workspace, str(user_config))
    found = settings(workspace.ssh_config, "campus")
    options = connect_options(found)
    assert settings(workspace.ssh_config, "campus", *options)["connecttimeout"] == connect_s
