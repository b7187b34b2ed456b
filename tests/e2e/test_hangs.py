"""A hang of a real job is reported with the stack of each rank, and healthy jobs are not ended."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.processes import eventually

pytestmark = pytest.mark.sweep  # minutes

HANGS = """\
import fcntl, multiprocessing, os, signal, sys, time
from mpi4py import MPI
world, kind = MPI.COMM_WORLD, sys.argv[1]
for step in range(4):
    print(step, flush=True)
    time.sleep(0.5)
    world.barrier()
lock = open("lock", "a")
if world.rank == 0:
    os.mkfifo("pipe")
    fcntl.flock(lock, fcntl.LOCK_EX)
world.barrier()
if kind == "deadlock":
    world.recv(source=1 - world.rank)  # deadlock
elif world.rank == 0:
    world.barrier()  # other
elif kind == "freeze":
    os.kill(os.getpid(), signal.SIGSTOP)  # freeze
elif kind == "message":
    world.recv(source=0)  # message
elif kind == "lock":
    fcntl.flock(lock, fcntl.LOCK_EX)  # lock
elif kind == "pipe":
    open("pipe").read()  # pipe
elif kind == "loader":
    queue = multiprocessing.Queue()
    multiprocessing.Process(target=time.sleep, args=(1000,), daemon=True).start()
    queue.get()  # loader
"""
HANGS_IN_C = """\
#include <fcntl.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int rank, number;
__attribute__((noinline)) void other_rank(void) { MPI_Barrier(MPI_COMM_WORLD); }
__attribute__((noinline)) void freeze(void) { raise(SIGSTOP); }
__attribute__((noinline)) void loader(void) { sleep(1000); }
__attribute__((noinline)) void message(void) {
    MPI_Recv(&number, 1, MPI_INT, 1 - rank, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}
__attribute__((noinline)) void pipe_of_no_writer(void) { number = open("pipe", O_RDONLY); }
int main(int count, char **words) {
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int step = 0; step < 4; step++) {
        printf("%d\\n", step);
        fflush(stdout);
        usleep(500000);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (rank == 0 && strcmp(words[1], "deadlock")) other_rank();
    if (!strcmp(words[1], "freeze")) freeze();
    if (!strcmp(words[1], "loader")) loader();
    if (!strcmp(words[1], "message") || !strcmp(words[1], "deadlock")) message();
    if (!strcmp(words[1], "pipe_of_no_writer")) pipe_of_no_writer();
    MPI_Finalize();
    return number;
}
"""


def hang_of(cluster: Cluster, program: Path, word: str, places: Sequence[str]) -> str:
    """Run a job until a hang with these stacks is shown, cancel it, and return the stacks of its
    ranks.
    """
    job_id = cluster.json("submit", program, "--nodes", "2", "--hang", "warn@3", "--", word)[
        "job_id"
    ]

    def summary() -> str:
        (job,) = cluster.json("jobs", job_id)["jobs"]
        where = job["hang"]["summary"] if job["hang"] else ""
        return where if all(place in where for place in places) else ""

    # A pause of the whole machine is also called a hang.
    where = eventually(summary, 150)
    cluster("cancel", job_id)
    return where


@pytest.mark.parametrize("kind", ["freeze", "message", "deadlock", "loader", "lock", "pipe"])
def test_hang_in_python_is_named_with_its_lines(cluster: Cluster, kind: str) -> None:
    program = cluster.runner.cwd / "hangs.py"
    program.write_text(HANGS)
    lines = [
        number for number, line in enumerate(HANGS.splitlines(), 1) if line.endswith(f"# {kind}")
    ]
    other = HANGS.splitlines().index("    world.barrier()  # other") + 1
    lines += [other] if kind != "deadlock" else []
    where = hang_of(cluster, program, kind, [f"hangs.py:{line}: " for line in lines])
    assert (f"hangs.py:{other}: " in where) is (kind != "deadlock")


@pytest.mark.skipif(not shutil.which("mpicc"), reason="there is no compiler for MPI")
@pytest.mark.parametrize("kind", ["freeze", "message", "deadlock", "loader", "pipe_of_no_writer"])
def test_hang_in_c_is_named_with_its_functions(cluster: Cluster, kind: str) -> None:
    folder = cluster.runner.cwd / "c"
    folder.mkdir(exist_ok=True)
    (folder / "hangs.c").write_text(HANGS_IN_C)
    subprocess.run(["mpicc", "-O2", "-o", folder / "hangs", folder / "hangs.c"], check=True)
    script = folder / "run.sh"
    script.write_text(
        '#!/bin/bash\n[ -e pipe ] || mkfifo pipe\nexec srun --mpi=pmix ./hangs "$1"\n'
    )
    where = hang_of(cluster, script, kind, [f"hangs:{'message' if kind == 'deadlock' else kind}"])
    assert ("hangs:other_rank" in where) is (kind != "deadlock")


# Each kind works in silence for much longer than the shortest silence.
HEALTHY = """\
import os, subprocess, sys, time
from mpi4py import MPI
world, kind, LONG = MPI.COMM_WORLD, sys.argv[1], 40
SPIN = "import time\\nend = time.time() + 40\\nwhile time.time() < end: sum(range(10000))"
# The program in another process group, without the rank's environment, is not a part of the rank.
PULSES = "for i in $(seq 20); do kill -STOP $0; sleep 2; kill -CONT $0; sleep 1; done"
def work(seconds):
    end = time.time() + seconds
    while time.time() < end:
        sum(range(10000))
for step in range(8):
    work(0.2)
    world.barrier()
    print(step, flush=True)
if kind == "silence":
    for step in range(LONG):
        work(1)
        world.barrier()
elif kind == "naps":
    for _ in range(LONG // 8):
        time.sleep(8)
        work(1)
elif kind == "sleep":
    time.sleep(LONG)
elif world.rank == 1:
    if kind == "evaluation":
        work(LONG)
    elif kind == "compilation":
        subprocess.run([sys.executable, "-c", SPIN])
    elif kind == "checkpoint":
        end = time.time() + LONG
        with open("checkpoint", "wb") as file:
            while time.time() < end:
                file.write(os.urandom(1 << 18))
                os.fsync(file.fileno())
                file.seek(0)
    elif kind == "pulses":
        subprocess.Popen(["env", "-i", "setsid", "bash", "-c", PULSES, str(os.getpid())])
        work(LONG)
    elif kind == "loading":
        for _ in range(LONG // 4):
            time.sleep(3)
            work(1)
    elif kind == "commands":
        subprocess.run(["bash", "-c", "for i in $(seq 40); do sleep 1; done"])
world.barrier()
print("done", flush=True)
"""
HAS_PAUSES = {"naps", "sleep", "loading", "commands"}


@pytest.mark.parametrize(
    "kind",
    ["silence", "evaluation", "compilation", "checkpoint", "pulses", *sorted(HAS_PAUSES)],
)
def test_healthy_job_is_not_ended(cluster: Cluster, kind: str) -> None:
    program = cluster.runner.cwd / "healthy.py"
    program.write_text(HEALTHY)
    words = ("submit", program, "--nodes", "2", "--hang", "end@10", "--wait", "--", kind)
    job_id = cluster.json(*words)["job_id"]
    lines = (cluster.run_of(job_id) / "job.events").read_text().splitlines()
    actions = {event["action"] for event in map(json.loads, lines) if event["event"] == "hang"}
    assert actions <= ({"warn"} if kind in HAS_PAUSES else set())
