"""A hang of a real job is reported with the place of each rank, and silent work is not if it has a
heartbeat.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, local_spec, raised
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
int rank;
volatile int number;
__attribute__((noinline)) void other_rank(void) { MPI_Barrier(MPI_COMM_WORLD); }
__attribute__((noinline)) void freeze(void) { raise(SIGSTOP); }
__attribute__((noinline)) void loader(void) { sleep(1000); }
__attribute__((noinline)) void message(void) {
    MPI_Recv((int *)&number, 1, MPI_INT, 1 - rank, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}
__attribute__((noinline)) void spin(void) { for (;;) number++; }
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
    if (!strcmp(words[1], "spin")) spin();
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


@pytest.fixture(scope="module")
def cluster_with_gdb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    name = f"e{secrets.token_hex(3)}"
    folders = (tmp_path_factory.mktemp(f"gdb {kind}") for kind in ("home", "cwd"))
    with raised(name, f"{local_spec(name)}software: {{packages: [gdb]}}\n", *folders) as one:
        yield one


@pytest.mark.parametrize(
    "kind", ["freeze", "message", "deadlock", "loader", "spin", "pipe_of_no_writer"]
)
def test_hang_in_c_is_named_with_its_functions(cluster_with_gdb: Cluster, kind: str) -> None:
    cluster = cluster_with_gdb
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
