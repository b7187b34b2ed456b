"""A hang of a real job is reported with the place of each rank, and silent work is not if it has a
heartbeat.
"""

from __future__ import annotations

import json

from tests.support.cluster import Cluster
from tests.support.processes import eventually

# Each rank waits for a message of the other.
HANGS = """\
import time
from mpi4py import MPI
world = MPI.COMM_WORLD
for step in range(4):
    print(step, flush=True)
    time.sleep(0.5)
    world.barrier()
world.recv(source=1 - world.rank)
"""


def test_hang_in_python_is_named_with_its_line(cluster: Cluster) -> None:
    program = cluster.runner.cwd / "hangs.py"
    program.write_text(HANGS)
    words = (program, "--nodes", "2", "--hang", "warn@3")
    job_id = cluster.json("submit", *words)["job_id"]
    place = f"hangs.py:{len(HANGS.splitlines())}: "

    def is_found() -> bool:
        # A pause of the whole machine is also called a hang.
        hang = cluster.job(job_id)["hang"]
        return bool(hang) and place in hang["summary"]

    eventually(is_found, 150)
    cluster("cancel", job_id)


SILENT = """\
import os, time
from mpi4py import MPI
for step in range(8):
    print(step, flush=True)
    time.sleep(0.3)
for second in range(30):
    time.sleep(1)
    if MPI.COMM_WORLD.rank == 0:
        open(os.environ["CLUSTERCTL_HEARTBEAT"], "w").close()
print("done", flush=True)
"""


def test_silent_work_with_a_heartbeat_does_not_hang(cluster: Cluster) -> None:
    program = cluster.runner.cwd / "silent.py"
    program.write_text(SILENT)
    job_id = cluster.json("submit", program, "--nodes", "2", "--hang", "end@10", "--wait")["job_id"]
    lines = (cluster.run_of(job_id) / "job.events").read_text().splitlines()
    assert not [event for event in map(json.loads, lines) if event["event"] == "hang"]
