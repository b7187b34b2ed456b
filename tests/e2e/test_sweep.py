"""Repeats that are too long for every day: `make test-all`."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from tests.support.cluster import raised

pytestmark = pytest.mark.sweep
SPEC = "version: 1\nname: {name}\nprovider: {{type: local}}\npartitions:\n  - {{name: train, nodes: 2}}\n"


def test_the_whole_life_again_and_again(tmp_path: Path) -> None:
    name = f"r{secrets.token_hex(3)}"
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    cwd.mkdir()
    runs = set()
    for _ in range(5):
        with raised(name, SPEC.format(name=name), home, cwd) as cluster:
            done = cluster.json("submit", "train", "--nodes", "2", "--wait", "--", "--epochs", "3")
            run = cluster.run_of(done["job_id"])
            assert json.loads((run / "run.json").read_text())["state"] == "COMPLETED"
            runs.add(run)
    assert len(runs) == 5, "a later cluster's run took the place of an earlier one"


@pytest.mark.parametrize("nodes", [32, 64])
def test_many_nodes_work_together(tmp_path: Path, nodes: int) -> None:
    """Many more than this machine has cores: they log in, are configured, prove themselves, and run a job."""
    name = f"m{secrets.token_hex(3)}"
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    cwd.mkdir()
    with raised(name, SPEC.format(name=name).replace("nodes: 2", f"nodes: {nodes}"), home, cwd) as cluster:
        assert len(cluster.raised["probed"]) == nodes
        done = cluster.json("submit", "probe", "--nodes", str(nodes), "--wait")
        answer = json.loads((cluster.run_of(done["job_id"]) / "stdout.log").read_text())
        assert len(set(answer["hosts"])) == nodes
