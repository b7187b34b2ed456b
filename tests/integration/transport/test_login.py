"""The ssh_config of a login, as ssh reads it."""

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
