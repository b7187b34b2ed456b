"""A cluster of sixteen nodes. Clusters of one name: test_convergence.py; partitions: test_gpus.py."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from tests.support.cluster import raised

pytestmark = pytest.mark.platform("real", "debian-12")

LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")
SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions: [{{name: many, nodes: 16}}]
"""


@pytest.mark.sweep
def test_sixteen_nodes(tmp_path_factory: pytest.TempPathFactory) -> None:
    name = f"s{secrets.token_hex(3)}"
    home, cwd = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("cwd")
    before = int(LIMIT.read_text())
    with raised(name, SPEC.format(name=name), home, cwd) as many:
        assert len(many.raised["probed"]) == 16
        notes = " ".join(many.raised["notes"])
        assert "oversubscribed" in notes
        assert int(LIMIT.read_text()) >= 8192
        done = many.json("submit", "probe", "--nodes", "16", "--wait")
        answer = json.loads((many.run_of(done["job_id"]) / "stdout.log").read_text())
        assert answer["world_size"] == 16
        assert len(set(answer["hosts"])) == 16
    if not list(
        Path("/var/lib/clusterctl").glob("*/cluster.json")
    ):  # a cluster beside ours keeps them raised
        assert int(LIMIT.read_text()) == before
