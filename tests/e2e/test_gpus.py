"""GPUs on a real cluster whose nodes have a stand-in of nvidia-smi: what Slurm gives, and sick nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, raised
from tests.support.nvidia import machines

_SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions: [{{name: train, nodes: 2}}]
monitoring: {{interval: 1s, health: {{interval: 5s}}}}
"""


@pytest.fixture(scope="module")
def gpus(cluster_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose nodes got two T4 and an H100 in two parts after it was raised, and `up` again."""
    folder = tmp_path_factory.mktemp("gpus")
    with raised(cluster_name, _SPEC.format(name=cluster_name), folder / "home", folder) as cluster:
        _furnish(cluster, _node(cluster), _two_t4())
        _furnish(
            cluster,
            f"{cluster.name}-train-2",
            {"gpus": [{**machines.h100_node(parts=2)["gpus"][7], "index": 0}]},
        )
        cluster("up", "--yes")
        yield cluster


def _two_t4(**differs: Any) -> machines.Machine:
    return {"gpus": [machines.gpu(0, "Tesla T4", **differs), machines.gpu(1, "Tesla T4")]}


def _node(cluster: Cluster) -> str:
    return f"{cluster.name}-train-1"


def _put(cluster: Cluster, host: str, path: str, content: str) -> None:
    quoted, folder = content.replace("'", "'\\''"), Path(path).parent
    place = f"sudo mkdir -p {folder} && sudo tee {path} >/dev/null && sudo chmod 0755 {path}"
    cluster.ssh(host, f"printf %s '{quoted}' | ({place})")


def _furnish(cluster: Cluster, host: str, machine: machines.Machine) -> None:
    """Stand-ins of the driver's programs, and its device files."""
    _put(cluster, host, "/usr/local/bin/nvidia-smi", machines.PROGRAM.read_text())
    _put(cluster, host, "/usr/local/bin/dmesg", "#!/bin/sh\ncat /etc/kernel.log\n")
    _put(cluster, host, "/etc/kernel.log", "")
    _becomes(cluster, host, machine)
    minors = machines.mig_minors()
    _put(cluster, host, "/opt/driver/nvidia-caps/mig-minors", minors)
    devices = [f"nvidia{gpu['minor']}" for gpu in machine["gpus"]]
    devices += [f"nvidia-caps/nvidia-cap{line.split()[1]}" for line in minors.splitlines() if "gpu6" in line]
    make = f"for file in {' '.join(devices)}; do sudo ln -sf /dev/null /dev/$file; done"
    cluster.ssh(host, f"sudo mount --bind /opt/driver /proc/driver && sudo mkdir /dev/nvidia-caps && {make}")


def _becomes(cluster: Cluster, host: str, machine: machines.Machine) -> None:
    _put(cluster, host, "/etc/nvidia-stand-in.json", json.dumps(machine))


def _wait(cluster: Cluster, until: Callable[[str], bool]) -> str:
    """What Slurm says of the node's state and reason, once it is so."""
    deadline = time.monotonic() + 60
    while True:
        said = cluster.ssh(
            f"{cluster.name}-ctl", f"sinfo --noheader --Node --nodes={_node(cluster)} -o '%T %E'"
        )
        if until(said) or time.monotonic() > deadline:
            return said
        time.sleep(0.3)


def _srun(cluster: Cluster, *options: str, command: str) -> str:
    words = " ".join(options)
    return cluster.ssh(f"{cluster.name}-ctl", f"srun {words} {command}", user=cluster.user)


def test_slurm_knows_the_gpus(gpus: Cluster) -> None:
    said = gpus.ssh(f"{gpus.name}-ctl", "scontrol -o show node")
    first, second = said.splitlines()
    assert "Gres=gpu:t4:2" in first
    assert "Gres=gpu:1g.10gb:2" in second


@pytest.mark.parametrize(
    ("gres", "indices"), [("t4:1", "0"), ("t4:2", "0,1"), ("1g.10gb:1", "0"), ("1", "0")]
)
def test_a_job_sees_its_gpus_alone(gpus: Cluster, gres: str, indices: str) -> None:
    assert _srun(gpus, f"--gres=gpu:{gres}", command="printenv CUDA_VISIBLE_DEVICES").strip() == indices


def test_a_job_of_a_file_asks_for_gpus(gpus: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "mine.sh"
    script.write_text("#!/bin/bash\necho gpus=$CUDA_VISIBLE_DEVICES on $SLURMD_NODENAME\n")
    answer: dict[str, Any] = gpus.json("submit", script, "--nodes", "1", "--gpus", "1", "--wait")
    run = gpus.run_of(answer["job_id"])
    assert f"gpus=0 on {_node(gpus)}" in (run / "stdout.log").read_text()


def test_a_sick_node_is_drained_with_the_reason_and_comes_back(gpus: Cluster) -> None:
    _becomes(gpus, _node(gpus), _two_t4(temperature=97))
    said = _wait(gpus, lambda said: "drain" in said)
    assert "clusterctl health: GPU 0: 97 C, and 90 are allowed" in said
    up = gpus.json("up", "--yes")
    assert any("GPU 0: 97 C" in note for note in up["notes"])
    _becomes(gpus, _node(gpus), _two_t4())
    assert _wait(gpus, lambda said: said.startswith("idle ")).startswith("idle none")


def test_up_sees_at_once_that_a_node_is_well_again(gpus: Cluster) -> None:
    _put(gpus, _node(gpus), "/etc/kernel.log", machines.xid(79) + "\n")
    assert "XID 79" in _wait(gpus, lambda said: "drain" in said)
    _put(gpus, _node(gpus), "/etc/kernel.log", "")
    up = gpus.json("up", "--yes")
    assert _node(gpus) in up["probed"]
