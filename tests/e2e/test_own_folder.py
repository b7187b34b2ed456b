"""A user's project folder on a real cluster, with any name and any files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.hostile import HOSTILE_NAMES

TRAIN = """\
import os, sys
from pathlib import Path
from mpi4py import MPI
import utils
found = sorted(p for p in os.listdir(b".") if not p.startswith(b"__pyc"))
every = MPI.COMM_WORLD.gather((utils.rate(), Path("link").read_text(), len(found)), 0)
if MPI.COMM_WORLD.rank == 0:
    print(every, flush=True)
    Path("results/out.txt").write_text("made")
    Path("conf/a.txt").write_text("changed")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "my project; $(x)"
    (folder / "conf").mkdir(parents=True)
    (folder / "results").mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "utils.py").write_text("def rate():\n    return open('conf/a.txt').read()\n")
    (folder / "conf" / "a.txt").write_text("0.1")
    (folder / "link").symlink_to("conf/a.txt")
    (folder / "large").write_bytes(os.urandom(2 << 20))
    for name in HOSTILE_NAMES:
        (folder / os.fsdecode(name)).write_bytes(name)
    return folder


def test_project_folder_trains_on_two_nodes_and_is_sent_once(
    cluster: Cluster, project: Path
) -> None:
    done = cluster.json("submit", project / "train.py", "--nodes", "2", "--wait")
    run = cluster.run_of(done["job_id"])
    names = len(HOSTILE_NAMES) + len("conf large link results train.py utils.py".split())
    one = ("0.1", "0.1", names)
    assert (run / "stdout.log").read_text() == f"{[one, one]}\n"
    assert (run / "results" / "out.txt").read_text() == "made"
    assert (run / "conf" / "a.txt").read_text() == "changed"
    assert not (run / "large").exists()  # it is here, unchanged
    source = done["source"]
    assert source["sent_bytes"] == source["bytes"] > 2 << 20
    record, listed = (json.loads((run / name).read_text()) for name in ("run.json", "source.json"))
    assert record["source"] == source["hash"] == listed["hash"]
    # Two folders and a link; conf/a.txt.
    assert source["files"] == len(listed["files"]) == names - 3 + 1
    for name in HOSTILE_NAMES:
        assert (run / os.fsdecode(name)).read_bytes() == name

    (project / "conf" / "a.txt").write_text("0.2")
    again = cluster.json(
        "submit", project / "train.py", "--exclude", "large", "--nodes", "2", "--wait"
    )
    assert again["source"]["sent_bytes"] == len("0.2")
    assert "'0.2'" in cluster("logs", again["job_id"]).stdout


def test_array_task_finds_files_beside_its_script(cluster: Cluster, project: Path) -> None:
    (project / "task.sh").write_text('cat conf/a.txt; echo "$SLURM_ARRAY_TASK_ID" >mine.txt\n')
    done = cluster.json("submit", project / "task.sh", "--array", "1-2", "--wait")
    run = cluster.run_of(done["job_id"])
    for task in ("1", "2"):
        assert (run / f"stdout-{task}.log").read_text() == "0.1"
        assert (run / f"task-{task}" / "mine.txt").read_text() == f"{task}\n"
        assert not (run / f"task-{task}" / "conf").exists()
    skipped = json.loads((run / "run.json").read_text())["skipped"]
    (reason,) = {one["reason"] for one in skipped}
    assert reason.startswith("unchanged ")
