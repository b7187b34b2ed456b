"""Nodes taken out of service by hand, and put back, with jobs at work on them."""

from __future__ import annotations

import json
import re

from tests.support.cluster import Cluster


def state(cluster: Cluster, node: str) -> str:
    (found,) = (one for one in cluster.json("status")["nodes"] if one["name"] == node)
    return str(found["state"])


def test_a_drained_node_lets_its_job_end_takes_no_other_and_comes_back(cluster: Cluster) -> None:
    one, two = (f"{cluster.name}-train-{i}" for i in (1, 2))
    script = cluster.runner.cwd / "at-work.sh"
    script.write_text("#!/bin/bash\n#SBATCH --exclusive\nuntil test -e ~/enough; do sleep 0.2; done\n")
    job = cluster.json("submit", script, "--", "x")["job_id"]
    cluster.ssh(f"{cluster.name}-ctl", f"until squeue -h -j {job} -t R | grep -q .; do sleep 0.2; done")
    node = cluster.json("jobs", job)["jobs"][0]["nodes"][0]
    (drained,) = cluster.json("node", "drain", node, "--reason", "a fan is loud")["nodes"]
    assert drained["jobs"] == [job]
    assert drained["reason"] == "a fan is loud"
    ran = cluster("node", "drain", node, "--reason", "a fan is loud", "--wait", "--timeout", "0:01", rc=6)
    assert job in ran.stderr
    cluster.ssh(f"{cluster.name}-ctl", f"sudo -u {cluster.user} touch ~{cluster.user}/enough")
    (drained,) = cluster.json("node", "drain", node, "--reason", "a fan is loud", "--wait")["nodes"]
    assert drained["jobs"] == []
    probe = cluster.json("submit", "probe", "--nodes", "1", "--wait")["job_id"]
    assert cluster.json("jobs", probe)["jobs"][0]["nodes"] == [two if node == one else one]
    up = cluster.json("up")  # a person's choice
    assert up["not_probed"] == [node]
    waiting = cluster.runner.start(
        "-f", cluster.spec, "-o", "json", "submit", "probe", "--nodes", "2", "--wait"
    )
    said = ""
    assert waiting.stderr is not None
    while "puts back" not in said:
        line = waiting.stderr.readline()
        assert line, said
        said += line
    assert re.search(rf"\n  {node}: drained by \w+: a fan is loud\n  `clusterctl node resume {node}` ", said)
    cluster.json("node", "resume", node)
    assert json.loads(waiting.communicate(timeout=120)[0])["state"] == "COMPLETED"
    cluster.json("node", "resume", node)  # in service already
    assert cluster.json("up")["not_probed"] == []


def test_nodes_that_are_not_there_or_not_ours_to_make_are_refused(cluster: Cluster) -> None:
    ran = cluster("node", "drain", f"{cluster.name}-train-9", "--reason", "x", rc=2)
    assert "no node" in ran.stderr
    ran = cluster("node", "drain", f"{cluster.name}-train-1", "--reason", " ", rc=2)
    assert "--reason is empty" in ran.stderr
    for verb in ("add", "remove"):
        ran = cluster("node", verb, f"{cluster.name}-train-1", rc=2)
        assert "change `nodes` of its partitions" in ran.stderr
    assert "nodes of a local cluster" in cluster("up", "--limit", f"{cluster.name}-train-1", rc=2).stderr
