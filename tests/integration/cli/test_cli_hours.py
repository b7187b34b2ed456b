"""`usage` of clusters that are up and of those that were taken down."""

from __future__ import annotations

import time

import pytest

from clusterctl.runs.saved_usage import ClusterUsage, save_usage
from clusterctl.scheduler.slurm.usage import AllocatedTime
from clusterctl.state.workspace import Workspace
from tests.support.messages import condition
from tests.support.played.cluster import finished

HOUR = 3600


@pytest.fixture
def removed(played_session) -> None:
    """Cluster lab-2, which was taken down, had a job of an hour."""
    start = time.time() - 2 * HOUR
    held = AllocatedTime(
        job="aaaaaa/1",
        user="bob",
        account="",
        partition="a",
        start=start,
        end=start + HOUR,
        nodes=1,
    )
    save_usage("aaaaaa", ClusterUsage(cluster="lab-2", source="accounting", held=(held,)))


def test_usage_of_a_removed_cluster_is_answered(removed, answer) -> None:
    found = answer("usage", "--cluster", "lab-2")
    assert [(row["user"], row["node_hours"]) for row in found["usage"]] == [("bob", 1)]
    (failure,) = answer("usage", "--cluster", "lab-3", rc=2)["failures"]
    assert condition(failure) == "not-up"


def test_usage_of_all_clusters_names_those_that_do_not_answer(
    removed, answer, played_session, cluster, tmp_path
) -> None:
    finished(played_session, cluster, tmp_path, "true")
    found = answer("usage", "--cluster", "all", "--by", "cluster")
    assert {row["cluster"]: row["jobs"] for row in found["usage"]} == {"demo": 1, "lab-2": 1}
    assert found["unanswered"] == []
    with cluster.state() as state:
        state["accounting_away"] = True
    Workspace.of("demo").configured.write_text("inputs")
    found = answer("usage", "--cluster", "all", "--by", "cluster")
    assert [row["cluster"] for row in found["usage"]] == ["lab-2"]
    (silent,) = found["unanswered"]
    assert (silent["cluster"], silent["code"]) == ("demo", "accounting-away")
    # Without clusters that are up, the removed ones are all.
    Workspace.of("demo").inventory.unlink()
    assert answer("usage", "--cluster", "all")["sum"]["jobs"] == 1
