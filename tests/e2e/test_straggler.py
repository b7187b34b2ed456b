"""The report names a node that is slowed down, and none if the nodes are equal.

This module runs alone: other tests would slow a node down.
"""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster

pytestmark = [pytest.mark.sweep, pytest.mark.alone]  # minutes

# Computing takes most of a step, and twenty epochs make twenty windows of steps.
_TRAIN = ("--hidden", "1024,1024", "--global-batch-size", "256", "--epochs", "20")
_BUSY = (
    "for i in 1 2 3 4 5 6; do setsid -f timeout 300 sh -c 'yes >/dev/null' >/dev/null 2>&1 "
    "</dev/null; done"
)
FAIR_RUNS = 20
FAIR = "no node is a straggler"


def verdict(cluster: Cluster) -> str:
    """Return the verdict of the report of another run."""
    job = cluster.json("submit", "train", "--nodes", "2", "--wait", "--", *_TRAIN)
    report = cluster.json("report", cluster.run_of(job["job_id"]))["report"]
    assert report["missing"] == []
    return "\n".join(report["verdict"])


def test_equal_nodes_have_no_straggler(cluster: Cluster) -> None:
    verdicts = [verdict(cluster) for _ in range(FAIR_RUNS)]
    assert [text for text in verdicts if FAIR not in text] == []


def test_slowed_node_is_named_as_straggler(cluster: Cluster) -> None:
    slow = f"{cluster.name}-train-2"
    cores = int(cluster("ssh", slow, "--admin", "nproc").stdout)
    for _ in range(cores):
        cluster("ssh", slow, "--admin", _BUSY)
    assert f"{slow} is a straggler" in verdict(cluster)
