"""Many nodes, a cluster made and removed many times, and what clusters set in this machine's kernel.

They run alone: all clusters here share the kernel.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import raised

pytestmark = [pytest.mark.sweep, pytest.mark.alone, pytest.mark.platform("real", "debian-13")]  # minutes

LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")
SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions: [{{name: many, nodes: {nodes}}}]
"""
DRIFTS = (
    "sudo systemctl stop slurmd",
    "sudo systemctl disable --now munge",
    "sudo chmod 644 /etc/munge/munge.key",
    "echo '# more' | sudo tee -a /opt/clusterctl/health",
    "sudo rm /opt/clusterctl/health.json",
    "sudo rm /etc/tmpfiles.d/clusterctl-slurmd.conf",
    "sudo sed -i '/-ctl$/d' /etc/hosts",
    "echo 'btl = self' | sudo tee -a /etc/openmpi/openmpi-mca-params.conf",
    "echo '# more' | sudo tee -a /etc/systemd/system/slurmd.service.d/clusterctl.conf",
    "sudo rm -r /opt/clusterctl/payload/*",
)


def note_of(up: dict[str, Any]) -> str:
    """What the table of phases says of `converge`."""
    return next(str(phase["note"]) for phase in up["phases"] if phase["phase"] == "converge")


def test_sixteen_nodes(tmp_path: Path) -> None:
    name = f"s{secrets.token_hex(3)}"
    before = int(LIMIT.read_text())
    with raised(name, SPEC.format(name=name, nodes=16), tmp_path / "home", tmp_path) as many:
        assert len(many.raised["probed"]) == 16
        notes = " ".join(many.raised["notes"])
        assert "oversubscribed" in notes
        assert int(LIMIT.read_text()) >= 8192
        done = many.json("submit", "probe", "--nodes", "16", "--wait")
        answer = json.loads((many.run_of(done["job_id"]) / "stdout.log").read_text())
        assert answer["world_size"] == 16
        assert len(set(answer["hosts"])) == 16
        again = many.json("up", "--reconfigure")  # as each node is when Ansible configures it for itself
        assert "on 17 hosts, 0 changed" in note_of(again)
        seventh = f"{name}-many-7"
        many.ssh(seventh, "\n".join(("set -e", *DRIFTS)))
        mended = many.json("up")
        assert {one["host"] for one in mended["repaired"]} == {seventh}
        assert len(mended["repaired"]) >= len(DRIFTS), mended["repaired"]
        assert "on 1 hosts" in note_of(mended)
        assert many.json("up")["repaired"] == []
    if not list(
        Path("/var/lib/clusterctl").glob("*/cluster.json")
    ):  # a cluster beside ours keeps them raised
        assert int(LIMIT.read_text()) == before


@pytest.mark.parametrize("nodes", [32, 64])
def test_many_nodes_work_together(tmp_path: Path, nodes: int) -> None:
    """Many more than this machine has cores: they log in, are configured, prove themselves, and run a job."""
    name = f"m{secrets.token_hex(3)}"
    with raised(name, SPEC.format(name=name, nodes=nodes), tmp_path / "home", tmp_path) as cluster:
        assert len(cluster.raised["probed"]) == nodes
        done = cluster.json("submit", "probe", "--nodes", str(nodes), "--wait")
        answer = json.loads((cluster.run_of(done["job_id"]) / "stdout.log").read_text())
        assert len(set(answer["hosts"])) == nodes
