"""ssh reads the user's settings and clusterctl's defaults from the ssh_config of a login."""

from __future__ import annotations

import subprocess
from pathlib import Path

from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import login_of, write_login_files


def settings(config: Path, login: str) -> dict[str, str]:
    ran = subprocess.run(
        ["ssh", "-G", "-F", config, "--", login], capture_output=True, text=True, check=True
    )
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
    assert (found["serveraliveinterval"], found["connecttimeout"]) == ("5", "60")
    assert "remotecommand" not in found
    quiet = settings(workspace.background_config, "campus")
    assert (quiet["hostname"], quiet["batchmode"], quiet["loglevel"]) == ("10.9.8.7", "yes", "INFO")
    assert "localforward" not in quiet
