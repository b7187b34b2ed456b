"""Many nodes on this machine, and the kernel settings that they need.

This module runs alone: all clusters here share the kernel.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from tests.support.cluster import raised

# Minutes.
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.alone,
    pytest.mark.platform("real", "debian-13"),
]

LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")
SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions: [{{name: many, nodes: {nodes}}}]
"""


def test_up_of_sixteen_nodes_runs_a_job(tmp_path: Path) -> None:
    name = f"s{secrets.token_hex(3)}"
    before = int(LIMIT.read_text())
    with raised(name, SPEC.format(name=name, nodes=16), tmp_path / "home", tmp_path) as many:
        assert len(many.raised["probed"]) == 16
        assert "oversubscribed" in " ".join(many.raised["notes"])
        assert int(LIMIT.read_text()) >= 8192
        # Each node is as Ansible configures it for itself.
        (note,) = (
            phase["note"]
            for phase in many.json("up", "--reconfigure")["phases"]
            if phase["phase"] == "converge"
        )
        assert "on 17 hosts, 0 changed" in note
    # A cluster beside ours keeps the limits raised.
    if not list(Path("/var/lib/clusterctl").glob("*/cluster.json")):
        assert int(LIMIT.read_text()) == before


def test_up_of_sixty_four_nodes_runs_a_job(tmp_path: Path) -> None:
    """Many more nodes than this machine has cores are configured and verified, and run a job."""
    name = f"m{secrets.token_hex(3)}"
    with raised(name, SPEC.format(name=name, nodes=64), tmp_path / "home", tmp_path) as cluster:
        assert len(cluster.raised["probed"]) == 64
        done = cluster.json("submit", "probe", "--nodes", "64", "--wait")
        answer = json.loads((cluster.run_of(done["job_id"]) / "stdout.log").read_text())
        assert len(set(answer["hosts"])) == answer["world_size"] == 64
