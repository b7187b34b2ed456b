"""Tests of job scripts without a scheduler, run with bash and with stand-ins for mpirun and ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.scheduler.base import JobRequest
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import planned_inventory
from clusterctl.util.assets import payload_hash
from tests.support.messages import condition
from tests.support.played.batch import place_payload, play

SPEC = ClusterSpec.model_validate(
    {
        "version": 1,
        "name": "d",
        "partitions": [
            {"name": "train", "nodes": 2, "max_time": "1h"},
            {"name": "big", "nodes": 4},
        ],
        "users": [{"name": "ada", "uid": 10000}],
        "scheduler": "none",
    }
)


def train(**fields: Any) -> JobSpec:
    return JobSpec(name="train", bundled="train", **fields)


def faults(spec: ClusterSpec, job: JobSpec) -> list[UsageError]:
    return [*site_of(planned_inventory(spec)).faults(Request.read(job))]


def text(job: JobSpec) -> str:
    return site_of(planned_inventory(SPEC)).render(Request.read(job))


def user_job(folder: Path, name: str, content: str, **fields: Any) -> JobSpec:
    (folder / name).write_text(content)
    return JobSpec(name="j", script=folder / name, **fields)


def run(folder: Path, job: JobSpec) -> subprocess.CompletedProcess[str]:
    """Run the script in ``folder``. mpirun's stand-in runs the command as a single rank."""
    tools = folder / "tools"
    tools.mkdir()
    play(tools / "mpirun", f'while [[ $1 != {sys.executable} ]]; do shift; done\n"$@"')
    play(tools / "ssh", "exit 255")
    place_payload(folder / "payload", folder)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    script = text(job).replace("/opt/clusterctl/env/bin/python", sys.executable)
    script = script.replace(
        f"$HOME/clusterctl/store/archives/{payload_hash()}", str(folder / "payload")
    )
    argv = ["bash", "-c", script]
    return subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_mpirun_job_script_passes_shellcheck() -> None:
    for job in (train(nodes=2), train(nodes=2, tasks_per_node=3, cpus=2, env={"A": "it's"})):
        subprocess.run(["shellcheck", "-"], input=text(job), text=True, check=True)


def test_ranks_are_started_with_the_rendered_hostfile(tmp_path: Path) -> None:
    job = user_job(tmp_path, "rank.sh", "true", nodes=2, tasks_per_node=3, cpus=2)
    assert run(tmp_path, job).returncode == 0
    assert (tmp_path / "job.hosts").read_text() == "d-train-1 slots=3\nd-train-2 slots=3\n"
    said = text(train(nodes=2, tasks_per_node=3, cpus=2, env={"A": "1"}))
    mpirun = "mpirun -np 6 --hostfile job.hosts --map-by ppr:3:node:PE=2 \\\n    -x PATH "
    assert mpirun in said
    assert "/task.py --of=mpirun --per-node=3 " in said
    assert " -x A " in said
    assert "OMP_NUM_THREADS:-2" in said
    fewer = text(train(nodes=2, tasks_per_node=3, ranks=4))
    assert mpirun.replace("6", "4").replace("ppr:3:node:PE=2", "slot") in fewer


def test_ranks_meet_on_the_first_node(tmp_path: Path) -> None:
    shows = "import os; print(*(os.environ[n] for n in ('MASTER_ADDR', 'RANK', 'WORLD_SIZE')))"
    assert run(tmp_path, user_job(tmp_path, "show.py", shows)).stdout == "d-train-1 0 1\n"
    agents = text(
        user_job(tmp_path, "show.py", shows, nodes=2, tasks_per_node=3, launcher="torchrun")
    )
    assert "mpirun -np 2 --hostfile job.hosts " in agents
    # All ranks of a node would share the core of their agent.
    assert " --map-by ppr:1:node --bind-to none " in agents
    assert " -x MASTER_ADDR -x MASTER_PORT " in agents
    assert " --nnodes=2 --nproc-per-node=3 " in agents


def test_mpirun_in_a_user_script_uses_the_nodes_of_the_job(tmp_path: Path) -> None:
    both = 'cat "$OMPI_MCA_orte_default_hostfile"; cmp "$PRTE_MCA_prte_default_hostfile" job.hosts'
    job = user_job(tmp_path, "own.sh", both, nodes=2)
    assert run(tmp_path, job).stdout == "d-train-1 slots=1\nd-train-2 slots=1\n"


def test_program_without_mpirun_has_the_hosts_variables(tmp_path: Path) -> None:
    play(tmp_path / "task-prolog", "echo 'export NCCL_SOCKET_IFNAME==eno1'\necho 'export B=$x y'")
    job = user_job(tmp_path, "one.sh", 'echo "$NCCL_SOCKET_IFNAME $B"', env={"B": "mine"})
    assert run(tmp_path, job).stdout == "=eno1 mine\n"


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ({"qos": "urgent"}, "--qos"),
        ({"account": "lab"}, "--account"),
        ({"constraint": "a"}, "--constraint"),
        ({"array": "1-3"}, "--array"),
        ({"requeue": True}, "--requeue"),
        ({"chain": 60}, "--set chain="),
        ({"signal": "USR1@60"}, "--signal"),
        ({"mem": "1GiB"}, "--mem"),
        ({"gpus": 1}, "--gpus"),
        ({"launcher": "srun"}, "--launcher srun"),
        ({"qos": "urgent", "array": "1-3"}, "--qos, --array"),
    ],
)
def test_slurm_options_without_slurm_are_refused(words, flag) -> None:
    (fault,) = faults(SPEC, train(**words))
    assert (condition(fault), flag in fault.what) == ("unsupported/slurm", True)


def test_lines_for_slurm_are_refused(tmp_path: Path) -> None:
    job = user_job(tmp_path, "s.sh", "#!/bin/bash\n#SBATCH --nodes=2\ntrue\n")
    (fault,) = faults(SPEC, job)
    assert (condition(fault), "#SBATCH --nodes=2" in fault.why) == ("unsupported/slurm", True)


def taken(spec: ClusterSpec, job: JobSpec) -> JobRequest:
    return site_of(planned_inventory(spec)).request(
        JobRequest("", job.name, "", ""), Request.read(job)
    )


def test_nodes_and_time_are_those_of_the_partition() -> None:
    got = taken(SPEC, train(nodes=2))
    assert (got.partition, got.nodes, got.limit_s) == ("train", ("d-train-1", "d-train-2"), 3600)
    assert taken(SPEC, train(partition="big", nodes=3)).nodes == ("d-big-1", "d-big-2", "d-big-3")
    assert taken(SPEC, train(partition="big")).limit_s == 0
    assert taken(SPEC, train(time="10m")).limit_s == 600
    for code, job in (
        ("job-unfit/time", train(time="2h")),
        ("job-unfit/nodes", train(nodes=3)),
        ("not-found/partition", train(partition="x")),
    ):
        assert [condition(fault) for fault in faults(SPEC, job)] == [code]


def gpu(tmp_path: Path, rank: int, size: int, *devices: str, **more: str) -> str:
    """Return a rank's CUDA_VISIBLE_DEVICES on a node with these devices."""
    (tmp_path / "gpus").write_text("".join(f"{device}\n" for device in devices))
    place_payload(tmp_path / "payload", tmp_path)
    base = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env = {
        **base,
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        **more,
    }
    task = [sys.executable, "-IS", str(tmp_path / "payload/payload/node/task.py")]
    argv = [*task, "--of=mpirun", "sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-unset}"]
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_ranks_on_a_node_get_a_mig_device_each_or_all_gpus(tmp_path: Path) -> None:
    parts = ("MIG-a", "MIG-b")
    assert [gpu(tmp_path, rank, 3, *parts) for rank in range(3)] == ["MIG-a", "MIG-b", "MIG-a"]
    assert gpu(tmp_path, 0, 1, *parts) == "unset"  # a rank alone has all of them
    assert gpu(tmp_path, 1, 2, *parts, CUDA_VISIBLE_DEVICES="") == ""  # the job's own choice stays
    assert gpu(tmp_path, 1, 2, "GPU-a", "GPU-b") == "unset"  # cuda:LOCAL_RANK, as with Slurm
