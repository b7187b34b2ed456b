"""A training with PyTorch as a job, for clusters of several kinds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.support.cluster import Cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def train_on_nodes(cluster: Cluster, nodes: Sequence[str], launcher: str) -> str:
    """Run examples/torch_ddp.py on two nodes and check its results. Return the lock of the job's
    packages.
    """
    file = EXAMPLES / "requirements-torch.txt"
    argv = ("--requirements", file, "--nodes", "2", "--launcher", launcher, "--wait")
    words = ("submit", EXAMPLES / "torch_ddp.py", *argv, "--", "--epochs", "15")
    # Where PyTorch's index can't be reached, gigabytes may be downloaded, and sent to the nodes.
    job = cluster("-o", "json", *words, timeout_s=800).json
    run = cluster.run_of(job["job_id"])
    output = (run / "stdout.log").read_text()
    for rank, node in enumerate(nodes):
        assert f"rank {rank} of 2 on {node}: cpu, gloo" in output
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("epoch")]
    assert len(losses) == 15
    assert losses[-1] < losses[0] / 10
    assert "2 ranks agree" in output
    assert (run / "model.pt").stat().st_size > 1000
    lock = str(json.loads((run / "environment.json").read_text())["client"]["requirements"])
    assert "\ntorch==" in lock
    return lock
