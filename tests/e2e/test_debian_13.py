"""Local nodes of Debian 13: its Slurm 24.11, Open MPI 5 and Python 3.13.

The modules of ON_DEBIAN_13 in scripts/run_tests.py run on it, too, in `make test-all`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, raised, records

# Alone, for it makes an image of its own, whose processes other tests would take for what theirs left.
pytestmark = [pytest.mark.alone, pytest.mark.platform("real", "debian-13")]
SPEC = """\
version: 1
name: {name}
provider: {{type: local, distribution: debian-13}}
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
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    name = f"t{secrets.token_hex(3)}"
    home, cwd = tmp_path_factory.mktemp("newer home"), tmp_path_factory.mktemp("newer cwd")
    with raised(name, SPEC.format(name=name), home, cwd) as one:
        yield one


def test_it_comes_up_proven_and_stays_so(newer: Cluster) -> None:
    assert newer.raised["ready"]
    assert newer.raised["probed"] == [f"{newer.name}-train-1", f"{newer.name}-train-2"]
    assert newer.ssh(f"{newer.name}-ctl", "sinfo --version").startswith("slurm-wlm 24.11")
    newer("plan", "--check")


def test_two_nodes_train_and_the_run_comes_home(newer: Cluster) -> None:
    job = newer.json("submit", "train", "--nodes", "2", "--wait", "--", "--epochs", "8")["job_id"]
    run = newer.run_of(job)
    (result,) = (record for record in records(run / "metrics.jsonl") if record["kind"] == "result")
    assert result["accuracy"] >= 0.95
    assert len(set(result["param_hashes"])) == 1
    (told,) = json.loads((run / "sacct.json").read_text())["jobs"]
    assert told["state"]["current"] == ["COMPLETED"]
    assert json.loads((run / "environment.json").read_text())["slurm"].startswith("24.11")


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_ranks_reach_each_other_by_each_launcher(newer: Cluster, launcher: str) -> None:
    script = newer.runner.cwd / "sum.py"
    script.write_text(SUM)
    job = newer.json("submit", script, "--nodes", "2", "--launcher", launcher, "--wait")["job_id"]
    said = newer("logs", job).stdout
    assert said.count("sum 3 Open MPI v5.") == 2


def test_how_a_job_ended_is_understood(newer: Cluster) -> None:
    """24.11's squeue says it as `3:0`; 22.05's as wait(2) does."""
    script = newer.runner.cwd / "ends.sh"
    script.write_text("#!/bin/bash\nexit 3\n")
    job = newer.json("submit", script, "--nodes", "1", "--wait", rc=4)["job_id"]
    (shown,) = newer.json("jobs", job)["jobs"]
    assert (shown["state"], shown["exit"]) == ("FAILED", "3")
    assert "does not understand" not in newer("jobs", job).stdout


def test_its_nodes_do_not_become_debian_12(newer: Cluster) -> None:
    newer.spec.write_text(SPEC.format(name=newer.name).replace("debian-13", "debian-12"))
    (failure,) = newer.json("up", rc=2)["failures"]
    assert "run Debian 13, and the spec asks for Debian 12" in failure["cause"]
    newer.spec.write_text(SPEC.format(name=newer.name).replace(", distribution: debian-13", ""))
    newer("plan", "--check")  # they stay what they are
