"""The shell scripts of SlurmClient, run by real shells with played Slurm commands."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from clusterctl.errors import (
    SlurmError,
)
from clusterctl.scheduler import admin
from clusterctl.scheduler.admin import SlurmNodes
from clusterctl.scheduler.slurm import parse as slurm_parse
from clusterctl.scheduler.slurm.client import SlurmAwayError, SlurmClient
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused as rejected
from tests.support.played.cluster import PlayedCluster
from tests.support.scripted import captured
from tests.unit.scheduler.test_client import CAPTURES, SQUEUE


def test_slurm_variables_of_the_account_do_not_override_the_script(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\nenv >environment; echo 7\n")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho is UP\n")
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("NOT_SBATCH_X", "kept")
    slurm = SlurmClient(LocalTransport())
    assert slurm.sbatch(str(tmp_path), "job.sbatch") == "7"
    for name in ("SBATCH_TIMELIMIT", "SBATCH_MEM_PER_CPU", "SBATCH_WAIT4SWITCH"):
        monkeypatch.setenv(name, "1\nSBATCH_X=2")
    assert slurm.sbatch(str(tmp_path), "job.sbatch") == "7"
    lines = (tmp_path / "environment").read_text().splitlines()
    assert [line for line in lines if line.startswith("SBATCH_")] == []
    assert "NOT_SBATCH_X=kept" in lines


PRIMARY = "Slurmctld(primary) at c1 is"


BACKUP = "Slurmctld(backup) at c2 is"


@pytest.mark.parametrize(
    ("listens", "ping", "is_away"),
    [
        (True, f"{PRIMARY} DOWN", False),
        (False, f"{PRIMARY} DOWN", True),
        (False, f"{PRIMARY} DOWN\n{BACKUP} DOWN", True),
        (False, f"{PRIMARY} UP\n{BACKUP} DOWN", False),
        (False, f"{PRIMARY} DOWN\n{BACKUP} UP", False),
    ],
)
def test_sbatch_pings_slurmctld_unless_it_listens_on_this_host(
    cluster: PlayedCluster, listens: bool, ping: str, is_away: bool
) -> None:
    """Without a slurmctld, sbatch would wait long. A single slurmctld that is up takes the job."""
    grep = (
        f'case "$*" in *:1AA1*) exit {int(not listens)} ;; esac; exec {shutil.which("grep")} "$@"'
    )
    for name, text in {"grep": grep, "scontrol": f"echo '{ping}'", "sbatch": "echo 7"}.items():
        (cluster.root / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (cluster.root / "bin" / name).chmod(0o755)
    slurm = SlurmClient(LocalTransport())
    with rejected("slurm-away", SlurmAwayError) if is_away else nullcontext():
        assert slurm.sbatch(str(cluster.root), "job.sbatch") == "7"


@pytest.mark.parametrize("fails", ["", "sinfo", "squeue"])
def test_nodes_and_jobs_are_queried_in_one_command(
    cluster: PlayedCluster, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    sinfo = captured(CAPTURES / "sinfo.txt", slurm_parse.SINFO.fields)
    for command, capture in (("sinfo", sinfo), ("squeue", SQUEUE)):
        (cluster.root / f"{command}.txt").write_bytes(capture)
        answer = f"""for last; do :; done; sed "s/\x1f/${{last##*:}}/g" {command}.txt"""
        text = "echo out of order >&2; exit 4" if command == fails else answer
        (cluster.root / "bin" / command).write_text(f"#!/bin/sh\necho {command} >>asked\n{text}\n")
    monkeypatch.chdir(cluster.root)
    slurm = SlurmClient(LocalTransport())
    runs = []
    run = slurm.transport.run
    monkeypatch.setattr(
        slurm.transport, "run", lambda argv, **more: (runs.append(argv), run(argv, **more))[1]
    )
    if fails:
        with rejected("slurm-refused/command", SlurmError, f"{fails}") as caught:
            slurm.nodes_and_jobs()
        assert caught.value.why == "out of order"
    else:
        nodes, jobs = slurm.nodes_and_jobs()
        assert nodes
        assert jobs
    assert len(runs) == 1
    asked = (cluster.root / "asked").read_text().split()
    assert asked == (["sinfo"] if fails == "sinfo" else ["sinfo", "squeue"])
    if not fails:
        assert (nodes, jobs) == (slurm.nodes(), slurm.all_jobs())


def test_refused_reconfigure_has_the_cause_from_slurmctld_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Daemons would keep the previous configuration. Earlier lines of the log are not the cause."""
    log = tmp_path / "slurmctld.log"
    log.write_text("[2026-11-25T02:00:00.000] error: an older one\n")
    programs = {
        "sudo": 'shift; exec "$@"',
        "pgrep": "exit 1",
        "scontrol": f"cat {CAPTURES / 'reconfigure-refused.log'} >>{log}; exit 1",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    here = admin._RECONFIGURE.replace("/var/log/slurm", str(tmp_path))
    monkeypatch.setattr(admin, "_RECONFIGURE", here)
    with rejected("slurm-refused/configuration", SlurmError) as caught:
        SlurmNodes(LocalTransport()).reconfigure()
    first, *_, last = caught.value.why.split("; ")
    assert "sched/nonsense" in first
    assert last.startswith("fatal: ")
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 0\n")
    SlurmNodes(LocalTransport()).reconfigure()
