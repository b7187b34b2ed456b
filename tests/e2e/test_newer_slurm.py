"""Local nodes of Debian 13 with Slurm 26.05 of Debian testing, which has no plugin for PMIx."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, raised
from tests.support.messages import condition

pytestmark = [pytest.mark.sweep, pytest.mark.platform("real", "slurm-26.05")]
SPEC = """\
version: 1
name: {name}
provider: {{type: local, distribution: debian-13}}
partitions:
  - {{name: train, nodes: 2}}
monitoring: {{interval: 1s}}
slurm: {{version: "26.05", qos: [{{name: urgent, priority: 100}}]}}
"""
RANKS = """\
#!/bin/bash
{launch} python3 -c '
from mpi4py import MPI
print("a world of", MPI.COMM_WORLD.allreduce(1))'
"""


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    name = f"t{secrets.token_hex(3)}"
    home = tmp_path_factory.mktemp("newer home")
    cwd = tmp_path_factory.mktemp("newer cwd")
    with raised(name, SPEC.format(name=name), home, cwd) as one:
        yield one


def test_up_with_a_newer_slurm_is_verified_and_idempotent(newer: Cluster) -> None:
    controller = f"{newer.name}-ctl"
    assert newer.raised["probed"] == [f"{newer.name}-train-1", f"{newer.name}-train-2"]  # by mpirun
    assert any("by mpirun instead" in note for note in newer.raised["notes"])
    versions = "scontrol show config; sacctmgr --version; scontrol show node -o"
    output = newer.ssh(controller, versions)
    assert output.count(" Version=26.05.") == 2  # of the daemons of the nodes
    assert "SLURM_VERSION           = 26.05." in output
    assert (
        "urgent|100"
        in newer.ssh(controller, "sacctmgr -nP show qos format=name,priority").splitlines()
    )
    newer("plan", "--check")


def test_training_on_two_nodes_is_collected(newer: Cluster) -> None:
    job = newer.json("submit", "train", "--nodes", "2", "--wait", "--", "--epochs", "2")["job_id"]
    assert json.loads((newer.run_of(job) / "environment.json").read_text())["slurm"].startswith(
        "26.05"
    )


def test_srun_without_pmix_starts_no_separate_ranks(newer: Cluster) -> None:
    script = newer.runner.cwd / "ranks.sh"
    script.write_text(RANKS.format(launch="srun --mpi=pmix"))
    (failure,) = newer.json("submit", script, "--nodes", "2", rc=2)["failures"]
    assert condition(failure) == "job-unfit/pmix"
    script.write_text(RANKS.format(launch="srun"))
    newer("submit", script, "--nodes", "2", "--wait", rc=4)
    shown = newer("logs")
    assert "a world of" not in shown.stdout
    assert 'use "mpirun"' in " ".join(shown.stderr.split())
