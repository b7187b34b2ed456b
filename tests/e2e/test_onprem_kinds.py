"""Own machines of other distributions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterctl.spec.distributions import distribution_of
from tests.e2e.own import raised
from tests.support.cluster import Cluster, records
from tests.support.lab import Kind, lab
from tests.support.verbs import Clusterctl

pytestmark = pytest.mark.timeout(1800)
NODES = ["node2", "node3"]
PYTHON = "/opt/clusterctl/env/bin/python --version"


def trained(cluster: Cluster, nodes: Sequence[str] = NODES) -> Path:
    """Return the collected run of a training on these nodes."""
    done = cluster.json(
        "submit", "train", "--nodes", str(len(nodes)), "--wait", "--", "--epochs", "1"
    )
    assert done["state"] == "COMPLETED"
    run = cluster.run_of(done["job_id"])
    (start,) = (record for record in records(run / "metrics.jsonl") if record["kind"] == "run")
    assert [rank["host"] for rank in start["ranks"]] == list(nodes)
    return run


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("ubuntu-24.04", marks=pytest.mark.platform("stand-in", "ubuntu-24.04")),
        pytest.param("el-10", marks=pytest.mark.platform("stand-in", "rocky-10")),
    ],
)
def test_cluster_of_another_distribution_runs_a_job(
    no_residue: None, cluster_name: str, clusterctl: Clusterctl, tmp_path: Path, kind: Kind
) -> None:
    release = kind.replace("el-", "rocky-")
    with (
        lab(kind, 3, internet=not kind.startswith("el"), shared="/shared") as machines,
        raised(
            machines, cluster_name, machines.spec(cluster_name), clusterctl.home, tmp_path
        ) as cluster,
    ):
        assert (
            f"clusterctl_release: {release}\n" in (cluster.workspace / "inventory.yml").read_text()
        )
        trained(cluster)
        python = distribution_of(release).python_version
        assert all(f"Python {python}" in cluster.ssh(node, PYTHON) for node in NODES)
