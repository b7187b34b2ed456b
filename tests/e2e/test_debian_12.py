"""Local nodes of Debian 12: its Slurm 22.05 and Open MPI 4.

The modules of ON_DEBIAN_12 in scripts/run_tests.py run on it as well, in `make test-all`.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from tests.support.cluster import raised

SPEC = """\
version: 1
name: {name}
provider: {{type: local, distribution: debian-12}}
partitions:
  - {{name: train, nodes: 2}}
"""


@pytest.mark.sweep
@pytest.mark.platform("real", "debian-12")
def test_it_comes_up_proven_and_stays_so(tmp_path: Path) -> None:
    name = f"t{secrets.token_hex(3)}"
    with raised(name, SPEC.format(name=name), tmp_path / "home", tmp_path) as older:
        assert older.raised["probed"] == [f"{name}-train-1", f"{name}-train-2"]
        assert older.ssh(f"{name}-ctl", "sinfo --version").startswith("slurm-wlm 22.05")
        run = older.run_of(older.json("submit", "probe", "--nodes", "2", "--wait")["job_id"])
        (told,) = json.loads((run / "sacct.json").read_text())["jobs"]
        assert told["state"]["current"] == "COMPLETED"  # 24.11 says a list
        older("plan", "--check")
