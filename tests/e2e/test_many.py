"""Many nodes, a cluster made and removed many times, and what clusters set in this machine's kernel.

They run alone: all clusters here share the kernel.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.local.image import states
from clusterctl.providers.local.machine import booted_with_systemd
from tests.support.autogroup import SETTING
from tests.support.cluster import raised
from tests.support.nested import as_root

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


def test_the_whole_life_again_and_again(tmp_path: Path) -> None:
    name = f"r{secrets.token_hex(3)}"
    runs = set()
    for _ in range(5):
        with raised(name, SPEC.format(name=name, nodes=2), tmp_path / "home", tmp_path) as cluster:
            done = cluster.json("submit", "train", "--nodes", "2", "--wait", "--", "--epochs", "3")
            run = cluster.run_of(done["job_id"])
            assert json.loads((run / "run.json").read_text())["state"] == "COMPLETED"
            runs.add(run)
    assert len(runs) == 5, "a later cluster's run took the place of an earlier one"


@pytest.mark.parametrize("nodes", [32, 64])
def test_many_nodes_work_together(tmp_path: Path, nodes: int) -> None:
    """Many more than this machine has cores: they log in, are configured, prove themselves, and run a job."""
    name = f"m{secrets.token_hex(3)}"
    with raised(name, SPEC.format(name=name, nodes=nodes), tmp_path / "home", tmp_path) as cluster:
        assert len(cluster.raised["probed"]) == nodes
        done = cluster.json("submit", "probe", "--nodes", str(nodes), "--wait")
        answer = json.loads((cluster.run_of(done["job_id"]) / "stdout.log").read_text())
        assert len(set(answer["hosts"])) == nodes


def write(value: str) -> None:
    subprocess.run([*as_root(), "tee", SETTING], input=value, text=True, check=True, capture_output=True)


@pytest.fixture
def autogroup() -> Iterator[None]:
    """As most kernels begin; the tests themselves run without (tests/support/autogroup.py)."""
    if not SETTING.exists():  # not in every kernel
        yield
        return
    before = SETTING.read_text()
    write("1")
    yield
    write(before)


def test_sessions_share_no_cpus_while_it_is_up(autogroup: None, tmp_path: Path) -> None:
    name = f"k{secrets.token_hex(3)}"
    others = states()
    with raised(name, SPEC.format(name=name, nodes=1), tmp_path / "home", tmp_path) as cluster:
        said = any("kernel.sched_autogroup_enabled from 1 to 0" in note for note in cluster.raised["notes"])
        assert said == (SETTING.exists() and not booted_with_systemd())
        assert not SETTING.exists() or int(SETTING.read_text()) == (0 if said else 1)
    if not others:  # the last one puts it back
        assert not SETTING.exists() or int(SETTING.read_text()) == 1
