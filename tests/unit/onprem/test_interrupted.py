"""Ctrl-C while machines are asked that do not answer: it ends at once, and so does what was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ASKS = """
from pathlib import Path
from clusterctl.providers.onprem.access import Access
from clusterctl.spec.hosts import OnpremHost
from clusterctl.util.parallel import on_each
hosts = ["a", "b"]
access = Access({host: OnpremHost(user="rocky") for host in hosts}, Path("config"), password=None)
on_each(hosts, lambda host: access.run(host, ["true"]))
"""
SSH = '#!/bin/sh\necho $$ >> "$STARTED"\nexec sleep 600\n'


def test_it_ends_at_once_and_so_does_ssh(tmp_path: Path) -> None:
    started, ssh = tmp_path / "started", tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    asking = subprocess.Popen(
        ["/usr/bin/env", "--default-signal=INT", sys.executable, "-c", ASKS],
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
