"""Ctrl-C while machines are asked that do not answer: it ends at once, and so does what was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ASKS = """
import sys
from pathlib import Path
from clusterctl.providers.onprem.login import Login
from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.workspace import Workspace
from clusterctl.util.process import on_each
hosts = ["a", "b"]
login = Login({host: OnpremHost(user="rocky") for host in hosts}, Workspace(Path(sys.argv[1])))
on_each(hosts, lambda host: login.run(host, ["true"]))
"""
SSH = '#!/bin/sh\necho $$ >> "$STARTED"\nexec sleep 600\n'


def test_it_ends_at_once_and_so_does_ssh(tmp_path: Path) -> None:
    started, ssh = tmp_path / "started", tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    asking = subprocess.Popen(
        ["/usr/bin/env", "--default-signal=INT", sys.executable, "-c", ASKS, tmp_path],
        env={**os.environ, "PATH": path, "STARTED": str(started)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not started.exists() or len(started.read_text().split()) < len("ab"):
            assert asking.poll() is None
            time.sleep(0.05)
        asking.send_signal(signal.SIGINT)  # to it alone, as `kill` does; a terminal tells ssh, too
        _, said = asking.communicate(timeout=60)  # the played ssh takes ten minutes
    finally:
        asking.kill()
    assert "KeyboardInterrupt" in said
    for pid in started.read_text().split():
        while Path("/proc", pid).exists():
            time.sleep(0.05)
