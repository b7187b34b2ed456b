"""The machine that clusterctl runs on: what is run here, what is missing, what is its own installation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clusterctl.errors import TransportError, UnreachableError
from clusterctl.providers.onprem import login, remote_account
from clusterctl.providers.onprem.login import Login, check_this_machine, connect, is_installation
from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.workspace import Workspace

CONFIG = """\
Host desk
    HostName localhost
    User clusterctl
    IdentityFile "/nowhere/key"
    UserKnownHostsFile "/nowhere/known_hosts"
"""


def test_its_owner_is_here_and_goes_no_way(played: Path) -> None:
    machines = {"desk": OnpremHost(address="localhost", become="none"), "far": OnpremHost(become="none")}
    (played / "far").write_text("free")
    access = Login(machines, Workspace(played))
    asked = ("sh", "-c", "echo ${PLAYED_HOST:-here}; cat")
    assert access.root("desk", asked, b"data") == "here\ndata"
    assert access.root("far", asked, b"data") == "far\ndata"


def test_an_installation_where_jobs_have_their_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "prefix", "/opt/clusterctl/venv")
    refused = check_this_machine("desk")
    assert refused is not None
    assert refused.code == "own-place"


def test_a_machine_without_an_sshd_program_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_this_machine("desk") is None
    monkeypatch.setattr(login, "_PLACES", "/nowhere")
    refused = check_this_machine("desk")
    assert refused is not None
    assert refused.code == "no-sshd"
    assert "openssh-server" in refused.failures[0].fix
    monkeypatch.setattr(remote_account, "find_sshd", lambda: None)
    with pytest.raises(remote_account.RefusedError) as caught:
        remote_account.make_gate("/nowhere")
    assert caught.value.answer["code"] == "no-sshd"


def test_without_a_gate_it_is_not_ours_which_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "ssh_config"
    config.write_text(CONFIG)
    monkeypatch.setattr(login, "GATE", tmp_path / "sshd")
    with pytest.raises(TransportError) as caught:
        connect("desk", config)
    assert not isinstance(caught.value, UnreachableError)
    (tmp_path / "sshd").touch()
    assert connect("desk", config).host == "desk"


def test_clusterctl_itself_is_nothing_that_a_cluster_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/opt/pipx/venvs/clusterctl")
    package = Path(login.__file__).parents[2]
    own = ["/opt/pipx/venvs/clusterctl", str(package), f"{package}-1.0.dist-info"]
    assert [path for path in own if not is_installation(path)] == []
    left = [
        "/opt/clusterctl",
        "/var/lib/clusterctl-ledger",
        "/etc/hosts: lines of ours",
        "the account clusterctl",
    ]
    assert [path for path in left if is_installation(path)] == []
