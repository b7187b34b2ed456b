"""The GPUs that the script on hosts reports, with a double of nvidia-smi."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from clusterctl.hosts.gpus import Driver, Gpu, gpu_type
from clusterctl.hosts.probe import NODE_ARGV, NodeFacts, read_node
from tests.support.nvidia import machines
from tests.unit.scheduler.test_slurm_config import lines, make_spec, on_metal

_SLURMD = (
    "NodeName=n CPUs=32 Boards=1 SocketsPerBoard=2 CoresPerSocket=8 ThreadsPerCore=2 "
    "RealMemory=1031000\n"
)


def facts_of(folder: Path, machine: machines.Machine) -> NodeFacts:
    """Return the facts about a host of that kind."""
    facts, _ = read_node(output_of(folder, machine))
    assert facts is not None
    return facts


def driver_of(folder: Path, *cards: machines.Machine) -> Driver:
    """Return the driver of a host with these cards."""
    return read_node(output_of(folder, {"gpus": list(cards)}))[1]


def output_of(folder: Path, machine: machines.Machine) -> str:
    """Return the output of the script on a host of that kind."""
    environment = machines.install(folder, machine, cpus=machines.lscpu())
    (folder / "slurmd").write_text(f"#!/bin/sh\necho '{_SLURMD}'\n")
    (folder / "slurmd").chmod(0o755)
    (folder / "mig-minors").write_text(machines.mig_minors())
    script = NODE_ARGV[-1].replace("/proc/driver/nvidia-caps", str(folder))
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=False
    ).stdout


def gres_of(facts: NodeFacts) -> tuple[str, list[dict[str, str]]]:
    """Return the node's ``Gres=``, and its lines in gres.conf."""
    files = on_metal(make_spec({"name": "train", "nodes": 1}), facts)
    return lines(files["slurm.conf"], "NodeName")[0]["Gres"], lines(files["gres.conf"], "NodeName")


@pytest.mark.parametrize(
    ("machine", "kind"),
    [(machines.t4(), "t4"), (machines.rtx_4070(), "rtx-4070")],
    ids=["t4", "rtx-4070"],
)
def test_gres_of_a_single_gpu(tmp_path: Path, machine: machines.Machine, kind: str) -> None:
    facts = facts_of(tmp_path, machine)
    assert facts.gpus == (Gpu(kind, 0, 0),)
    gres, rows = gres_of(facts)
    assert gres == f"gpu:{kind}:1"
    (row,) = rows
    assert row | {"NodeName": ""} == {
        "NodeName": "",
        "Name": "gpu",
        "Type": kind,
        "File": "/dev/nvidia0",
    }


def test_gres_of_gpus_on_two_sockets_has_cores_links_and_files(tmp_path: Path) -> None:
    gres, rows = gres_of(facts_of(tmp_path, machines.h100_node()))
    assert gres == "gpu:h100:8"
    assert [row["File"] for row in rows] == [f"/dev/nvidia{index ^ 1}" for index in range(8)]
    assert {row["Cores"] for row in rows[:4]} == {"0-3"}
    assert {row["Cores"] for row in rows[4:]} == {"4-7"}
    assert rows[2]["Links"] == "18,18,-1,18,18,18,18,18"


def test_gres_of_a_gpu_in_mig_mode_lists_its_devices(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, machines.h100_node(parts=2))
    gres, rows = gres_of(facts)
    assert gres == "gpu:1g.10gb:4,gpu:h100:6"
    parts = [row for row in rows if row["Type"] == "1g.10gb"]
    minors = dict(line.split() for line in machines.mig_minors().splitlines())
    instance = minors["gpu7/gi7/access"]
    compute = minors["gpu7/gi7/ci0/access"]
    assert parts[0]["MultipleFiles"] == (
        f"/dev/nvidia7,/dev/nvidia-caps/nvidia-cap{instance},/dev/nvidia-caps/nvidia-cap{compute}"
    )
    assert len({row["MultipleFiles"] for row in parts}) == 4
    assert all("File" not in row and "Links" not in row for row in parts)
    assert next(gpu.uuid for gpu in facts.gpus if gpu.caps).startswith("MIG-")


def test_gpu_in_mig_mode_without_devices_is_no_gres(tmp_path: Path) -> None:
    assert facts_of(tmp_path, machines.h100_node(mig_mode="Enabled")).gpus == ()


def test_driver_fault_is_quoted_from_nvidia_smi(tmp_path: Path) -> None:
    driver = read_node(output_of(tmp_path, machines.no_driver()))[1]
    assert (driver.cards, driver.gpus) == (0, ())
    assert "couldn't communicate with the NVIDIA driver" in driver.fault
    assert driver_of(tmp_path, *machines.t4()["gpus"]).fault == ""


def test_uuids_are_given_to_cuda_if_slurm_orders_gpus_differently(tmp_path: Path) -> None:
    """A real Slurm counts by type, as in `Gres=`, including MIG parts, and not by device files."""
    card, cut = (machines.h100_node(parts=2)["gpus"][index] for index in (0, 7))
    whole = card["uuid"]
    parts = [part["uuid"] for part in cut["parts"]]
    assert driver_of(tmp_path, card, {**cut, "index": 1}).uuids == (*parts, whole)
    assert driver_of(tmp_path, {**cut, "index": 0}).uuids == tuple(parts)
    t4 = machines.gpu(0, "Tesla T4")
    a100 = machines.gpu(1, "NVIDIA A100-SXM4-80GB")
    assert driver_of(tmp_path, t4, a100).uuids == (a100["uuid"], t4["uuid"])
    # Slurm does not allocate a card in MIG mode without parts, but CUDA counts it.
    assert driver_of(tmp_path, {**t4, "mig_mode": "Enabled"}, machines.gpu(1, "Tesla T4")).uuids
    assert driver_of(tmp_path, a100 | {"index": 0}, t4 | {"index": 1, "minor": 0}).uuids == ()
    assert driver_of(tmp_path, *machines.h100_node()["gpus"]).uuids == ()


def test_task_prolog_is_set_if_slurm_orders_gpus_differently(tmp_path: Path) -> None:
    for machine, is_set in ((machines.h100_node(parts=2), True), (machines.t4(), False)):
        files = on_metal(make_spec({"name": "train", "nodes": 1}), facts_of(tmp_path, machine))
        assert ("TaskProlog=/opt/clusterctl/task-prolog" in files["slurm.conf"]) is is_set


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA", "gpu"),
    ],
)
def test_short_names_of_gpus(name: str, expected: str) -> None:
    assert gpu_type(name) == expected
