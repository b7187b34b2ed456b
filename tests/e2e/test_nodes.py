"""Nodes drained and resumed by hand, with running jobs on them."""

from __future__ import annotations

import json

import pytest

from tests.e2e.faults import cause
from tests.support.cluster import Cluster
from tests.support.messages import codes


def state(cluster: Cluster, node: str) -> str:
    (found,) = (one for one in cluster.json("status")["nodes"] if one["name"] == node)
    return str(found["state"])


def test_drained_node_ends_its_job_starts_none_and_resumes(cluster: Cluster) -> None:
    one, two = (f"{cluster.name}-train-{i}" for i in (1, 2))
    script = cluster.runner.cwd / "at-work.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --exclusive\nuntil test -e ~/enough; do sleep 0.2; done\n"
    )
    job = cluster.json("submit", script, "--", "x")["job_id"]
    cluster.ssh(
        f"{cluster.name}-ctl", f"until squeue -h -j {job} -t R | grep -q .; do sleep 0.2; done"
    )
    node = cluster.json("jobs", job)["jobs"][0]["nodes"][0]
    drain = ("node", "drain", node, "--reason", "noisy fan")
    (drained,) = cluster.json(*drain)["nodes"]
    assert (drained["jobs"], drained["reason"]) == ([job], "noisy fan")
    assert job in cluster(*drain, "--wait", "--timeout", "0:01", rc=6).stderr
    cluster.ssh(f"{cluster.name}-ctl", f"sudo -u {cluster.user} touch ~{cluster.user}/enough")
    (drained,) = cluster.json(*drain, "--wait")["nodes"]
    assert drained["jobs"] == []
    probe = cluster.json("submit", "probe", "--nodes", "1", "--wait")["job_id"]
    assert cluster.json("jobs", probe)["jobs"][0]["nodes"] == [two if node == one else one]
    up = cluster.json("up")  # a person's choice
    assert up["not_probed"] == [node]
    waiting = cluster.runner.start(
        "-f", cluster.spec, "-o", "json", "submit", "probe", "--nodes", "2", "--wait"
    )
    output = ""
    assert waiting.stderr is not None
    while "out of service" not in output:
        line = waiting.stderr.readline()
        assert line, output
        output += line
    assert "clusterctl status" in output
    cluster.json("node", "resume", node)
    assert json.loads(waiting.communicate(timeout=120)[0])["state"] == "COMPLETED"
    cluster.json("node", "resume", node)  # in service already
    assert cluster.json("up")["not_probed"] == []


@pytest.mark.story
def test_job_of_a_dead_node_starts_again_on_another(cluster: Cluster) -> None:
    """Slurm alone would need two minutes, and give another reason."""
    script = cluster.runner.cwd / "lost-node.sh"
    script.write_text('#!/bin/bash\n[ -n "$SLURM_RESTART_COUNT" ] || sleep 600\n')
    job = cluster.json("submit", script, "--requeue")["job_id"]
    cluster.ssh(
        f"{cluster.name}-ctl", f"until squeue -h -j {job} -t R | grep -q .; do sleep 0.2; done"
    )
    node = cluster.json("jobs", job)["jobs"][0]["nodes"][0]
    # The controller has the number 001.
    machine = f"c{(cluster.workspace / 'id').read_text().strip()}-{int(node[-1]) + 1:03}"
    cause("die", machine)
    cluster("logs", job, "--follow")
    (ended,) = cluster.json("jobs", job)["jobs"]
    assert ended["state"] == "COMPLETED"
    assert ended["nodes"] != [node]
    (lost,) = (one for one in cluster.json("status")["nodes"] if one["name"] == node)
    assert lost["reason"].startswith("clusterctl watcher: ")
    cause("stop", machine)
    assert cluster.json("up")["not_probed"] == []


def test_node_verbs_refuse_unknown_and_managed_nodes(cluster: Cluster) -> None:
    node = f"{cluster.name}-train-1"
    other = f"{cluster.name}-train-9"
    for argv, code in (
        (("node", "drain", other, "--reason", "x"), "not-found/name"),
        (("node", "drain", node, "--reason", " "), "option-invalid/reason"),
        (("node", "add", node), "unsupported/nodes"),
        (("node", "remove", node), "unsupported/nodes"),
        (("up", "--limit", node), "unsupported/nodes"),
    ):
        assert codes(cluster("-o", "json", *argv, rc=2)) == [code]
