"""Tests with Slurm's commands in a folder that PATH lacks, as on sites that add it in
/etc/profile.d.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.jobs import ssh_entry
from clusterctl.jobs.shell import Allocation, requested_nodes, shell_request
from clusterctl.scheduler.session import Session, connect_session
from clusterctl.spec.job_options import JobOptions
from clusterctl.state.inventory import CONTROLLER, PartitionFacts, job_inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import HERE, LOGIN_HOST, write_login_files
from clusterctl.transport.openssh import OpenSSH
from clusterctl.transport.ssh import Connections
from tests.support.inventories import host_of, inventory_of

COMMANDS = {
    "sinfo": "echo slurm 24.11.5",
    "salloc": 'until [ "$1" = sh ]; do shift; done; exec env SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 "$@"',
    "squeue": "echo n1",
    "scontrol": "echo n1",
    "srun": 'echo "srun $1"',
}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session with an attached cluster whose login node is this machine."""
    (folder := tmp_path / "slurm's bin").mkdir()
    for name, line in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    workspace = Workspace(tmp_path / "state/campus")
    workspace.create()
    write_login_files(HERE, workspace)
    recorded = inventory_of(
        hosts=(host_of(LOGIN_HOST, CONTROLLER),),
        job_user="hpc",
        partitions=(PartitionFacts("short", ("n1",)),),
        slurm_path=str(folder),
        is_foreign=True,
        root=str(workspace.root / "ours"),
    )
    workspace.inventory.write_text(recorded.text)
    with connect_session(job_inventory(workspace), workspace) as opened:
        yield opened


def test_queries_find_slurm(session: Session) -> None:
    assert session.scheduler.version() == "24.11.5"


def test_programs_may_use_the_python_of_jobs(session: Session) -> None:
    """That of the login node may be too old. Some commands, such as `collect --all`, need no
    session.
    """
    python = session.workspace.root / "ours/env/bin/python3.9"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho found\n")
    python.chmod(0o755)
    with Connections(session.workspace.ssh_config) as connections:
        assert connections.to(LOGIN_HOST).run(["python3.9"]).stdout == "found\n"
        assert connections.to(LOGIN_HOST).run(["sinfo"]).stdout == "slurm 24.11.5\n"


def test_shell_finds_slurm(session: Session) -> None:
    """The step starts over another connection than that of salloc."""
    ssh = OpenSSH(session.workspace.ssh_config)
    request = shell_request(JobOptions(), session.site)
    with requested_nodes(session, ssh, request) as lease:
        allocation = lease.allocation()
        assert isinstance(allocation, Allocation)
        argv = allocation.argv(["true"], "/jobs/shell-1", terminal=False)
        started = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert started.stdout == "srun --interactive\n"


def test_entry_finds_slurm(session: Session) -> None:
    workspace = session.workspace
    ssh_entry._write(
        session, ssh_entry.SshEntry("7", "campus-7", workspace.root / "config", "n1", "/jobs/7")
    )
    connect = ["sh", str(workspace.root / "entries/7/connect")]
    connected = subprocess.run(
        connect, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert connected.stdout.endswith("srun --quiet\n")
