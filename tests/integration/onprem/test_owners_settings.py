"""Settings of the owner's ssh configuration that would break a program."""

from __future__ import annotations

import getpass
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from clusterctl.configure.inventory_file import inventory_text
from clusterctl.providers.onprem.login import Login
from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.workspace import Workspace
from clusterctl.transport.master import end_all_connections
from clusterctl.transport.openssh import write_ssh_files
from tests.integration.onprem.conftest import one_machine
from tests.integration.transport.conftest import running_sshd

# The port is in use.
OWNERS = """\
RequestTTY force
RemoteCommand echo theirs
PermitLocalCommand yes
LocalCommand echo theirs
LocalForward 127.0.0.1:{port} localhost:1
ExitOnForwardFailure yes
ForwardX11 yes
ControlMaster yes
ControlPath /nowhere/%C
LogLevel DEBUG3
VisualHostKey yes
"""


def test_owners_settings_do_not_break_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.spec.hosts.is_this_machine", lambda _: False)
    monkeypatch.setenv("DISPLAY", ":99")
    workspace = Workspace(tmp_path / "a folder")
    workspace.create()
    config = workspace.access_config
    with running_sshd(tmp_path / "node") as node, socket.create_server(("127.0.0.1", 0)) as server:
        own = tmp_path / "own"
        own.write_text(OWNERS.format(port=server.getsockname()[1]))
        workspace.trusted_hosts.write_text(f"node {node.host_key}\n")
        machine = OnpremHost(
            address="127.0.0.1",
            port=node.port,
            user=getpass.getuser(),
            key=str(node.folder / "id"),
        )
        login = Login({"node": machine}, workspace)
        # ssh finds ~ without $HOME.
        config.write_text(config.read_text().replace("~/.ssh/config", str(own)))
        try:
            result = login._connections.to("node").run(
                ["sh", "-c", "cat; echo error >&2"], stdin=b"data"
            )
        finally:
            end_all_connections(config)
        # As Ansible logs in.
        cluster = one_machine(machine, node.host_key)
        write_ssh_files(cluster, workspace)
        config = workspace.ssh_config
        config.write_text(config.read_text().replace("~/.ssh/config", str(own)))
        inventory = yaml.safe_load(inventory_text(cluster, workspace, {}).replace("!unsafe", ""))
        options = shlex.split(inventory["all"]["vars"]["ansible_ssh_common_args"])
        words = ["ssh", *options, "-o", "ControlPath=none", "node", "echo data"]
        alone = subprocess.run(words, capture_output=True, check=True)
    assert (result.stdout, result.stderr) == ("data", "error\n")
    assert (alone.stdout, alone.stderr) == (b"data\n", b"")
