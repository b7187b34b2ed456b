"""Local nodes of Debian 12: its Slurm 22.05, Open MPI 4 and Python 3.11.

The modules of ON_DEBIAN_12 in scripts/run_tests.py run on it, too, in `make test-all`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, raised, records

pytestmark = pytest.mark.platform("real", "debian-12")
SPEC = """\
version: 1
name: {name}
provider: {{type: local, distribution: debian-12}}
partitions:
  - {{name: train, nodes: 2}}
monitoring: {{interval: 1s}}
"""
SUM = """\
from mpi4py import MPI
world = MPI.COMM_WORLD
print("sum", world.allreduce(world.rank + 1), MPI.Get_library_version())
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    name = f"t{secrets.token_hex(3)}"
    home, cwd = tmp_path_factory.mktemp("older home"), tmp_path_factory.mktemp("older cwd")
    with raised(name, SPEC.format(name=name), home, cwd) as one:
        yield one


def test_it_comes_up_proven_and_stays_so(older: Cluster) -> None:
    assert older.raised["ready"]
    assert older.raised["probed"] == [f"{older.name}-train-1", f"{older.name}-train-2"]
    assert older.ssh(f"{older.name}-ctl", "sinfo --version").startswith("slurm-wlm 22.05")
    older("plan", "--check")


def test_two_nodes_train_and_the_run_comes_home(older: Cluster) -> None:
    job = older.json("submit", "train", "--nodes", "2", "--wait", "--", "--epochs", "8")["job_id"]
    run = older.run_of(job)
    (result,) = (record for record in records(run / "metrics.jsonl") if record["kind"] == "result")
    assert result["accuracy"] >= 0.95
    assert len(set(result["param_hashes"])) == 1
    (told,) = json.loads((run / "sacct.json").read_text())["jobs"]
    assert told["state"]["current"] == "COMPLETED"  # 24.11 says a list
    assert json.loads((run / "environment.json").read_text())["slurm"].startswith("22.05")


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_ranks_reach_each_other_by_each_launcher(older: Cluster, launcher: str) -> None:
    script = older.runner.cwd / "sum.py"
    script.write_text(SUM)
    job = older.json("submit", script, "--nodes", "2", "--launcher", launcher, "--wait")["job_id"]
    said = older("logs", job).stdout
    assert said.count("sum 3 Open MPI v4.") == 2


def test_how_a_job_ended_is_understood(older: Cluster) -> None:
    """22.05's squeue says it as wait(2) does; 24.11's as `3:0`."""
    script = older.runner.cwd / "ends.sh"
    script.write_text("#!/bin/bash\nexit 3\n")
    job = older.json("submit", script, "--nodes", "1", "--wait", rc=4)["job_id"]
    (shown,) = older.json("jobs", job)["jobs"]
    assert (shown["state"], shown["exit"]) == ("FAILED", "3")
    assert "does not understand" not in older("jobs", job).stdout


def test_its_nodes_do_not_become_debian_13(older: Cluster) -> None:
    older.spec.write_text(SPEC.format(name=older.name).replace("debian-12", "debian-13"))
    (failure,) = older.json("up", rc=2)["failures"]
    assert "run Debian 12, and the spec asks for Debian 13" in failure["cause"]
    older.spec.write_text(SPEC.format(name=older.name).replace(", distribution: debian-12", ""))
    older("plan", "--check")  # they stay what they are
