"""GPUs on a real cluster whose nodes have a stand-in for nvidia-smi: allocations, unhealthy nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, local_spec, raised
from tests.support.messages import codes, condition
from tests.support.nvidia import machines
from tests.support.nvidia.machines import becomes, put
from tests.support.processes import eventually

pytestmark = pytest.mark.platform("stand-in", "nvidia-smi")

# A card cut into two parts.
_CUT = {**machines.h100_node(parts=2)["gpus"][7], "index": 0}
_SHOW = """\
import os
from mpi4py import MPI
print(f"{MPI.COMM_WORLD.rank} {os.environ['CUDA_VISIBLE_DEVICES']}\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def gpus(cluster_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose nodes have two T4 and an H100 in two parts."""
    folder = tmp_path_factory.mktemp("gpus")
    cards = {f"{cluster_name}-train-1": _two_t4(), f"{cluster_name}-parts-1": {"gpus": [_CUT]}}
    text = _spec(cluster_name) + "software: {cupy: false}\n"
    with raised(cluster_name, text, folder / "home", folder, cards) as cluster:
        yield cluster


def _spec(name: str) -> str:
    partitions = (
        "{name: train, nodes: 1, max_time: 1h}, {name: parts, nodes: 1, cpus: 2, memory: 1GiB}"
    )
    return local_spec(name, partitions, monitoring="{interval: 1s, health: {interval: 5s}}")


def _two_t4(**differs: Any) -> machines.Machine:
    return {"gpus": [machines.gpu(0, "Tesla T4", **differs), machines.gpu(1, "Tesla T4")]}


def _node(cluster: Cluster) -> str:
    return f"{cluster.name}-train-1"


def _becomes(cluster: Cluster, machine: machines.Machine) -> None:
    becomes(partial(cluster.ssh, _node(cluster)), machine)


def _log(cluster: Cluster, text: str) -> None:
    put(partial(cluster.ssh, _node(cluster)), "/etc/kernel.log", text)


def _wait(cluster: Cluster, until: Callable[[str], bool]) -> str:
    """Return Slurm's state and reason of the node, as soon as the condition holds."""
    deadline = time.monotonic() + 60
    while True:
        output = cluster.ssh(
            f"{cluster.name}-ctl", f"sinfo --noheader --Node --nodes={_node(cluster)} -o '%T %E'"
        )
        if until(output) or time.monotonic() > deadline:
            return output
        time.sleep(0.3)


def _srun(cluster: Cluster, *options: str, command: str) -> str:
    words = " ".join(options)
    return cluster.ssh(f"{cluster.name}-ctl", f"srun {words} {command}", user=cluster.user)


def test_slurm_knows_the_gpus(gpus: Cluster) -> None:
    output = gpus.ssh(f"{gpus.name}-ctl", "scontrol -o show node")
    parts, train = output.splitlines()
    assert "Gres=gpu:1g.10gb:2" in parts
    assert "Gres=gpu:t4:2" in train


def test_partition_has_the_limits_of_the_spec_and_runs_a_job(gpus: Cluster) -> None:
    shown = gpus.ssh(f"{gpus.name}-ctl", "sinfo -h -o '%R %D %l %m' | sort")
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()}
    assert rows["train"][:2] == ["1", "1:00:00"]
    assert rows["parts"] == ["1", "infinite", "1024"]
    done = gpus.json("submit", "probe", "--partition", "parts", "--wait")
    answer = json.loads((gpus.run_of(done["job_id"]) / "stdout.log").read_text())
    assert answer["hosts"] == [f"{gpus.name}-parts-1"]


# The first attempt leaves a closed connection at its port. In the second, no job listens before
# both have a port, and then both listen.
_MEETS = """\
import os, socket, sys, time
from pathlib import Path
meeting = Path.home() / "meeting"
meeting.mkdir(exist_ok=True)
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
def reach(stage):
    (meeting / f"{os.environ['SLURM_JOB_ID']}-{stage}").touch()
    while len(list(meeting.glob(f"*-{stage}"))) < 2:
        time.sleep(0.1)
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    server = socket.create_server(address)
    client = socket.create_connection(address)
    server.accept()[0].close()
    client.recv(1)
    reach("left")
    sys.exit(7)
reach("started")
server = socket.create_server(address)
reach("listens")
print("listened on", address[1], flush=True)
"""


def test_jobs_that_restart_together_on_a_node_have_different_ports(gpus: Cluster) -> None:
    (path := gpus.runner.cwd / "meets.py").write_text(_MEETS)
    jobs = [gpus.json("submit", path, "-p", "parts", "--requeue")["job_id"] for _ in range(2)]
    try:
        shown = [gpus("logs", job, "--follow").stdout for job in jobs]
        ports = [
            line for text in shown for line in text.splitlines() if line.startswith("listened on ")
        ]
        assert len(set(ports)) == len(ports) == len(jobs)
    finally:
        gpus("cancel", *jobs, rc=None)
        gpus.ssh(f"{gpus.name}-ctl", "rm -rf meeting", user=gpus.user)


def test_job_that_its_partition_can_not_run_is_refused(gpus: Cluster) -> None:
    memory = gpus("-o", "json", "submit", "probe", "-p", "parts", "--mem", "4GiB", rc=2)
    time = gpus("-o", "json", "submit", "probe", "-p", "train", "--time", "2h", rc=2)
    assert (codes(memory), codes(time)) == (["job-unfit/node-size"], ["job-unfit/time"])


@pytest.mark.parametrize(("gres", "indices"), [("t4:1", "0"), ("t4:2", "0,1"), ("1", "0")])
def test_job_sees_its_gpus_alone(gpus: Cluster, gres: str, indices: str) -> None:
    assert (
        _srun(gpus, f"--gres=gpu:{gres}", command="printenv CUDA_VISIBLE_DEVICES").strip()
        == indices
    )


def test_job_gets_the_uuid_of_its_mig_part(gpus: Cluster) -> None:
    first, second = (part["uuid"] for part in _CUT["parts"])
    others = _srun(
        gpus, "--partition=parts", "--gres=gpu:1", command="printenv CUDA_VISIBLE_DEVICES"
    )
    assert others.strip() == first
    both = "--partition=parts --gres=gpu:1g.10gb:2"
    assert _srun(gpus, both, command="printenv CUDA_VISIBLE_DEVICES").strip() == f"{first},{second}"


def test_ranks_that_share_a_node_in_parts_have_one_part_each(gpus: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(_SHOW)
    words = ("--partition", "parts", "--nodes", "1", "--tasks-per-node", "2", "--gpus", "2")
    answer = gpus.json("submit", script, *words, "--wait")
    output = (gpus.run_of(answer["job_id"]) / "stdout.log").read_text().splitlines()
    assert sorted(output) == [f"{rank} {part['uuid']}" for rank, part in enumerate(_CUT["parts"])]


def test_unhealthy_node_is_drained_with_a_reason_and_resumed(gpus: Cluster) -> None:
    _becomes(gpus, _two_t4(temperature=97))
    output = _wait(gpus, lambda output: "drain" in output)
    assert "clusterctl health: GPU 0: 97 C" in output
    (failure,) = gpus.json("up", "--yes", rc=1)["failures"]
    assert condition(failure) == "host-unfit/gpu-unhealthy"
    assert "GPU 0: 97 C" in failure["cause"]
    _becomes(gpus, _two_t4())
    assert _wait(gpus, lambda output: output.startswith("idle ")).startswith("idle none")


def test_slurmd_starts_after_a_boot_without_device_files(gpus: Cluster) -> None:
    """Nothing has opened the cards yet, as after a boot without nvidia-persistenced."""
    command = "sudo sh -c 'rm /dev/nvidia?; systemctl restart slurmd; systemctl is-active slurmd'"
    assert gpus.ssh(_node(gpus), command) == "active\n"
    assert gpus.ssh(_node(gpus), "ls /dev/nvidia?").split() == ["/dev/nvidia0", "/dev/nvidia1"]
    assert _wait(gpus, lambda said: said.startswith("idle ")).startswith("idle none")


def test_mig_devices_that_a_boot_has_removed_are_named(gpus: Cluster) -> None:
    node = f"{gpus.name}-parts-1"
    sh = partial(gpus.ssh, node)
    sh("sudo mv /dev/nvidia-caps /dev/away")
    found = eventually(
        lambda: [
            found
            for found in gpus("-o", "json", "doctor", node, rc=None).json["findings"]
            if condition(found) == "gpu-devices"
        ]
    )
    assert "/dev/nvidia-caps/nvidia-cap" in found[0]["why"]
    reason = f"sinfo -h -N -n {node} -o '%T %E'"
    eventually(lambda: "of gres.conf is missing" in gpus.ssh(f"{gpus.name}-ctl", reason))
    sh("sudo mv /dev/away /dev/nvidia-caps")
    eventually(lambda: gpus.ssh(f"{gpus.name}-ctl", reason).startswith("idle none"))


def _sleeper(cluster: Cluster, *options: str) -> str:
    """Start a job, wait until it runs, and return its number."""
    words = ("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap='sleep 600'")
    job = cluster.ssh(f"{cluster.name}-ctl", " ".join(words), user=cluster.user).strip()
    while _job(cluster, job) != "RUNNING 0":
        time.sleep(0.2)
    return job


def _job(cluster: Cluster, job: str) -> str:
    """Return the state of a job, and how often it was restarted."""
    told = r"grep -oP '(JobState|Restarts)=\K\w+' | xargs"
    return cluster.ssh(f"{cluster.name}-ctl", f"scontrol -o show job {job} | {told}").strip()


def test_up_configures_a_new_gpu_beside_a_running_job(gpus: Cluster) -> None:
    """It also sees immediately that the node is healthy again."""
    _log(gpus, machines.xid(79) + "\n")
    assert "XID 79" in _wait(gpus, lambda output: "drain" in output)
    started = "systemctl show slurmd --property=ExecMainStartTimestampMonotonic"
    other = f"{gpus.name}-parts-1"
    elsewhere = _sleeper(gpus, "--partition=parts", "--gpus=1")
    before = gpus.ssh(other, started)
    gpus.ssh(_node(gpus), "sudo ln -sf /dev/null /dev/nvidia2")
    _becomes(gpus, {"gpus": [*_two_t4()["gpus"], machines.gpu(2, "Tesla T4")]})
    output = f"{_node(gpus)}: gres: gpu:t4:3 (was gpu:t4:2); cards: 3 (was 2)"
    plan = gpus("plan").stdout
    assert output in plan.replace("\n", " ")
    assert "all hosts" not in plan
    _log(gpus, "")
    up = gpus("-o", "json", "up", "--yes")
    assert f"repaired: {output}: configured" in up.stderr
    assert _node(gpus) in up.json["probed"]
    known = gpus.ssh(f"{gpus.name}-ctl", f"scontrol -o show node {_node(gpus)}")
    assert "Gres=gpu:t4:3" in known
    assert _srun(gpus, "--gpus=3", command="printenv CUDA_VISIBLE_DEVICES").strip() == "0,1,2"
    assert (_job(gpus, elsewhere), gpus.ssh(other, started)) == ("RUNNING 0", before)
    gpus.ssh(f"{gpus.name}-ctl", f"scancel {elsewhere}", user=gpus.user)
