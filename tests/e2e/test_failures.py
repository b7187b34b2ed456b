"""Jobs that fail as only Slurm and MPI can show it. More: tests/unit/scheduler/test_diagnosis.py and
test_hints.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

# One rank, the last, fails while the others wait for it in MPI.
RANKS = """\
import os, signal
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == world.size - 1:
    {line}
world.Barrier()
"""


@dataclass(frozen=True)
class Planted:
    """A job that fails: a Python program's line, or a shell script (which has newlines); the
    code of the diagnosis, or the name of a hint.
    """

    name: str
    line: str
    code: str
    flags: tuple[str, ...] = ()

    def write(self, folder: Path) -> Path:
        place = folder / self.name
        (place / "kept").mkdir(parents=True)
        (place / "kept" / "data.csv").touch()
        path = place / ("job.sh" if "\n" in self.line else "job.py")
        path.write_text(RANKS.format(line=self.line) if "--nodes" in self.flags else self.line)
        return path


# With each launcher, on two nodes.
SPREAD = (
    ("raise", "raise KeyError('a bug')", "python-exception"),
    ("exit", "os._exit(3)", "exit-code"),
    ("kill", "os.kill(os.getpid(), signal.SIGKILL)", "killed"),
)
ALONE = (
    Planted(
        "here", "#!/bin/bash\ncat kept/data.csv\n", "file-stayed-at-home", ("--exclude", "kept")
    ),
    Planted("slots", "#!/bin/bash\nmpirun -np 64 true\n", "mpi-slots"),
)
PLANTED = (
    *ALONE,
    *(
        Planted(f"{launcher}-{name}", line, code, ("--nodes", "2", "--launcher", launcher))
        for launcher in ("srun", "mpirun")
        for name, line, code in SPREAD
    ),
)


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> dict[str, str]:
    """The ids of all planted jobs by their names."""
    folder = cluster.runner.cwd / "failures"
    return {
        planted.name: cluster.json("submit", planted.write(folder), *planted.flags)["job_id"]
        for planted in PLANTED
    }


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_failed_job_names_the_end_and_the_first_rank(
    cluster: Cluster, jobs: dict[str, str], planted: Planted
) -> None:
    ran = cluster.quoting("logs", jobs[planted.name], "--follow")
    assert ran.returncode == 4, str(ran)
    if planted.line.startswith("raise "):
        assert (ran.stdout + ran.stderr).count("Traceback") == 1, str(ran)
    shown = cluster.quoting("-o", "json", "jobs", jobs[planted.name])
    (job,) = json.loads(shown.stdout)["jobs"]
    # Not CANCELLED or TIMEOUT: no rank is waited for.
    assert job["state"] == job["diagnosis"]["state"] == "FAILED", job
    hints = {hint["name"] for hint in job["diagnosis"]["hints"]}
    assert planted.code in {job["diagnosis"]["code"], *hints}, job
    if "--nodes" in planted.flags:
        found = job["diagnosis"]["rank"], job["diagnosis"]["host"]
        assert found == (1, f"{cluster.name}-train-2"), job


GRID = """\
import sys
case = sys.argv[-1]
print("case", case)
if case in ("1", "3"):
    raise ValueError("no data")
sys.exit(4 if case == "2" else 0)
"""


@pytest.mark.parametrize("flags", [(), ("--pack",)], ids=["array", "pack"])
def test_one_command_tells_the_cause_of_each_task(
    cluster: Cluster, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (tmp_path / "grid.py").write_text(GRID)
    submitted = cluster.json("submit", tmp_path / "grid.py", "--sweep", "case=0..3", *flags)
    job_id = submitted["job_id"]
    assert cluster.quoting("wait", job_id).returncode == 4
    shown = json.loads(cluster.quoting("-o", "json", "jobs", job_id).stdout)
    told = {task["job_id"]: task for task in shown["packed" if flags else "jobs"]}
    tasks = [told[f"{job_id}_{number}"] for number in range(4)]
    assert [task["options"]["case"] for task in tasks] == ["0", "1", "2", "3"]
    ends = [task["diagnosis"] or {"cause": "", "exit_code": 0} for task in tasks]
    assert [end["exit_code"] for end in ends] == [0, 1, 4, 1]
    assert ["ValueError: no data" in end["cause"] for end in ends] == [False, True, False, True]
    assert f"as {job_id}_1" in cluster.quoting("jobs", job_id).stdout
    (run,) = cluster.json("collect", job_id)["runs"]
    record = json.loads((Path(run["dir"]) / "run.json").read_text())
    found = {task["id"]: task["diagnosis"] for task in record["packed" if flags else "tasks"]}
    assert found == {task["job_id"]: task["diagnosis"] for task in tasks}
