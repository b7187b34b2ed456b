"""Options of `submit` on real nodes: variables, containers, job files, outputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.messages import codes
from tests.support.processes import eventually

pytestmark = pytest.mark.platform("stand-in", "containers")

APPTAINER = Path(__file__).parents[1] / "support" / "played" / "apptainer"
RANKS = """\
#!/usr/bin/env python3
#SBATCH --export=NONE
import os
from mpi4py import MPI

w = MPI.COMM_WORLD
seen = w.gather((w.rank, os.environ.get("LR"), os.environ.get("APPTAINER_CONTAINER")), 0)
if w.rank == 0:
    print(seen, flush=True)
    os.makedirs("results", exist_ok=True)
    for name in ("results/a.csv", "core", "best.pt"):
        open(name, "w").close()
"""
SPAWN = """\
import sys
from mpi4py import MPI

parent = MPI.Comm.Get_parent()
if parent == MPI.COMM_NULL:
    parent = MPI.COMM_WORLD.Spawn(sys.executable, [__file__], maxprocs=1)
seen = parent.Merge().allgather(MPI.Get_processor_name())
if MPI.Comm.Get_parent() == MPI.COMM_NULL:
    print(MPI.COMM_WORLD.size, *sorted(seen))
"""
SWEEP = """\
job: ranks.py
nodes: 2
env: {LR: 1e-3}
outputs: [results/**]
variants:
  srun: {}
  mpirun: {launcher: mpirun, env: {LR: "a 'b' $c"}}
"""


@pytest.fixture(scope="module")
def project(cluster: Cluster) -> Path:
    folder = cluster.runner.cwd / "words"
    folder.mkdir()
    (folder / "ranks.py").write_text(RANKS)
    (folder / "spawn.py").write_text(SPAWN)
    (folder / "sweep.yaml").write_text(SWEEP)
    (folder / "my image.sif").write_bytes(b"image")
    return folder


def on_nodes(cluster: Cluster, command: str) -> None:
    for number in (1, 2):
        cluster.ssh(f"{cluster.name}-train-{number}", command)


@pytest.fixture
def apptainer(cluster: Cluster) -> Iterator[None]:
    """The stand-in for Apptainer on both nodes."""
    lines = APPTAINER.read_text()
    place = "/usr/local/bin/apptainer"
    on_nodes(
        cluster,
        f"sudo tee {place} >/dev/null <<'END_OF_IT'\n{lines}END_OF_IT\nsudo chmod 755 {place}",
    )
    yield
    on_nodes(cluster, f"sudo rm {place}")


def test_job_file_variants_set_variables_and_collect_outputs(
    cluster: Cluster, project: Path
) -> None:
    jobs = cluster.json("submit", project / "sweep.yaml", "--wait")["jobs"]
    assert [(job["name"], job["state"]) for job in jobs] == [
        ("ranks-srun", "COMPLETED"),
        ("ranks-mpirun", "COMPLETED"),
    ]
    for job, value in zip(jobs, ("1e-3", "a 'b' $c"), strict=True):
        run = cluster.run_of(job["job_id"])
        assert (run / "stdout.log").read_text() == f"{[(0, value, None), (1, value, None)]}\n"
        assert (run / "results" / "a.csv").is_file()
        assert (run / "ranks.py").is_file()
        assert not (run / "core").exists()
        assert not (run / "best.pt").exists()
        assert not (run / "telemetry.log").exists()


def test_node_without_apptainer_is_named(cluster: Cluster, project: Path) -> None:
    words = (
        "submit",
        project / "ranks.py",
        "--nodes",
        "2",
        "--container",
        project / "my image.sif",
        "--wait",
    )
    assert codes(cluster("-o", "json", *words, rc=2)) == ["unsupported/container"]
    # `submit` looks at the first node only, so the job reaches the second one.
    first = f"{cluster.name}-train-1"
    place = "/usr/local/bin/apptainer"
    cluster.ssh(first, f"sudo ln -s /bin/true {place}")
    try:
        answer = cluster.json(*words, rc=4)
    finally:
        cluster.ssh(first, f"sudo rm {place}")
    (failure,) = answer["failures"]
    assert failure["host"] == f"{cluster.name}-train-2"
    assert answer["diagnosis"]["code"] == "image-unfit"


def test_container_image_sent_with_the_job_runs_ranks(
    cluster: Cluster, project: Path, apptainer: None
) -> None:
    flags = ["--nodes", "2", "--env", "LR=0.5"]
    done = cluster.json(
        "submit", project / "ranks.py", *flags, "--container", project / "my image.sif", "--wait"
    )
    log = (cluster.run_of(done["job_id"]) / "stdout.log").read_text()
    assert log.count("'0.5', '/") == 2
    assert log.count("/clusterctl/store/") == 2


def test_spawned_ranks_use_the_tasks_that_ranks_leaves_free(
    cluster: Cluster, project: Path
) -> None:
    flags = ["--nodes", "2", "--launcher", "mpirun", "--set", "ranks=1"]
    done = cluster.json("submit", project / "spawn.py", *flags, "--wait")
    log = (cluster.run_of(done["job_id"]) / "stdout.log").read_text()
    assert log.split() == ["1", f"{cluster.name}-train-1", f"{cluster.name}-train-2"]


def test_submit_with_slurmctld_stopped_fails_and_leaves_nothing(
    cluster: Cluster, project: Path
) -> None:
    controller = f"{cluster.name}-ctl"
    before = cluster.ssh(controller, "ls clusterctl/jobs", user=cluster.user)
    cluster.ssh(controller, "sudo systemctl stop slurmctld")
    try:
        ran = cluster("-o", "json", "submit", project / "ranks.py", rc=1)
    finally:
        cluster.ssh(controller, "sudo systemctl start slurmctld")
    # By these words it is known that nothing was sent.
    assert "(connect failure)" in ran.stderr
    assert codes(ran) == ["unreachable"]
    assert "clusterctl up" in ran.json["failures"][0]["fix"]
    assert cluster.ssh(controller, "ls clusterctl/jobs", user=cluster.user) == before
    eventually(lambda: cluster.json("status")["ready"])
    assert " is UP" in cluster.ssh(controller, "scontrol ping", user=cluster.user), (
        "SlurmClient.is_there"
    )
