"""Test of the program on a node that `code` connects to."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from clusterctl.jobs import ssh_entry
from tests.support.processes import eventually

# Starts a process of job 7 and a process of job 8, which was submitted in a terminal of the editor.
SSHD = """\
#!/bin/sh
mark=$(sed -n 's/^SetEnv \\(CLUSTERCTL_ENTRY=[^ ]*\\).*/\\1/p' "$4")
for job in 7 8; do
    env "$mark" "SLURM_JOB_ID=$job" sh -c 'sleep 1000 </dev/null >/dev/null 2>&1 & echo $!'
done
"""


def test_end_of_a_connection_kills_no_other_job(tmp_path: Path) -> None:
    for name, text in (("sshd", SSHD), ("scontrol", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    argv = ["sh", "-c", ssh_entry._SSHD, "sshd", "1", "key"]
    ended = subprocess.run(argv, input=b"h", env=environment, capture_output=True, check=True)
    ours, others = (Path("/proc") / pid for pid in ended.stdout.decode().split())
    try:
        eventually(lambda: not running(ours))
        assert running(others)
    finally:
        os.kill(int(others.name), signal.SIGKILL)


def running(process: Path) -> bool:
    return (
        process.exists()
        and process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
    )
