"""Files that hosts of a class share, with the programs that read and renew them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from clusterctl.hosts.roles import probe_requests
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import remote_argv
from tests.unit.cluster.test_own_files import INVENTORY, ONE, own_files, spec_of


def test_nodes_without_pmix_get_the_prolog_of_ansible(workspace: Workspace) -> None:
    spec = spec_of()
    inventory = replace(INVENTORY, pmix=False)
    files = own_files(spec, inventory, workspace)
    prolog = files[ONE]["/opt/clusterctl/task-prolog"]
    assert prolog.mark.endswith(" 755 0:0")
    assert subprocess.run(["bash", "-n"], input=prolog.data, check=False).returncode == 0
    (line,) = (line for line in prolog.data.decode().splitlines() if "echo" in line)
    assert "export PMIX_NAMESPACE=" in line
    assert "/opt/clusterctl/task-prolog" in probe_requests(spec, inventory, workspace)[ONE].files


def test_renew_replaces_files_and_keeps_lines_outside_blocks(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    conf = tmp_path / "conf"
    hosts.write_text("1 mine\n# BEGIN\nold\n# END\n2 mine\n")
    asked = {str(conf): ["text", 0o640, None], str(hosts): ["new\n", 0o644, ["# BEGIN", "# END"]]}
    argv = remote_argv("clusterctl.hosts.remote_own_files", json.dumps(asked))
    for _ in range(2):
        subprocess.run([sys.executable, *argv[1:]], check=True)
        assert hosts.read_text() == "1 mine\n# BEGIN\nnew\n# END\n2 mine\n"
        assert (conf.read_text(), conf.stat().st_mode & 0o777) == ("text", 0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "hosts"]
