"""Files that hosts of a class share, with the programs that read and renew them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from clusterctl.transport.base import remote_argv
from clusterctl.util.remote_wanted import read_wanted


def test_renew_replaces_files_and_keeps_lines_outside_blocks(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    conf = tmp_path / "conf"
    hosts.write_text("1 mine\n# BEGIN\nold\n# END\n2 mine\n")
    files = {str(conf): ["text", 0o640, None], str(hosts): ["new\n", 0o644, ["# BEGIN", "# END"]]}
    asked = {"files": files, "wanted": {"marks": {f"file {conf}": "a1"}}}
    record = tmp_path / "wanted.json"
    argv = remote_argv("clusterctl.hosts.remote_host_files", json.dumps(asked), str(record))
    for _ in range(2):
        subprocess.run([sys.executable, *argv[1:]], check=True)
        assert hosts.read_text() == "1 mine\n# BEGIN\nnew\n# END\n2 mine\n"
        assert (conf.read_text(), conf.stat().st_mode & 0o777) == ("text", 0o640)
    assert read_wanted(str(record)) == {"marks": {f"file {conf}": "a1"}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "hosts", "wanted.json"]
