"""What is free on nodes: what Slurm does not tell is never free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.scheduler.base import NodeInfo
from clusterctl.scheduler.request.capacity import Shape, capacity_of, shape_of
from clusterctl.scheduler.request.request import Request
from clusterctl.spec.job import JobSpec

IDLE = NodeInfo("n1", "idle", "", 8, 1000, "", ("p",))
MIXED = replace(IDLE, name="n2", shown="mixed", allocated_cpus=5, allocated_mib=900)
GPU = replace(MIXED, gres="gpu:h100:4(S:0-1)", gres_used="gpu:h100:3(IDX:0-2)")


def test_free_cpus_and_nodes_are_those_that_no_job_has() -> None:
    found = capacity_of([IDLE, MIXED], Shape())
    assert (found.nodes, found.free_nodes, found.cpus, found.free_cpus) == (2, 1, 16, 11)
    assert found.fitting == 2


@pytest.mark.parametrize(
    ("shape", "fitting"),
    [
        (Shape(cpus=3), 2),
        (Shape(cpus=4), 1),
        (Shape(cpus=1, memory_mib=100), 2),
        (Shape(cpus=1, memory_mib=101), 1),
        (Shape(cpus=1, gpus=1), 0),
        (None, None),
    ],
)
def test_room_is_the_scarcest_of_cpus_memory_and_gpus(
    shape: Shape | None, fitting: int | None
) -> None:
    assert capacity_of([IDLE, MIXED], shape).fitting == fitting


def test_node_without_free_memory_has_no_room_for_a_job_without_a_number() -> None:
    assert capacity_of([replace(MIXED, allocated_mib=1000)], Shape()).fitting == 0


def test_free_gpus_are_counted_by_type() -> None:
    mi = replace(GPU, name="n3", gres="gpu:mi300:2", gres_used="gpu:mi300:0(IDX:N/A)")
    found = capacity_of([GPU, mi], Shape(gpus=1, gpu_type="h100"))
    assert (found.gpus, found.free_gpus) == ({"h100": 4, "mi300": 2}, {"h100": 1, "mi300": 2})
    assert found.fitting == 1


@pytest.mark.parametrize(
    "node",
    [
        replace(IDLE, allocated_cpus=None),
        replace(IDLE, allocated_mib=None),
        replace(IDLE, cpus=0),
        replace(GPU, gres_used=""),
        replace(GPU, gres_used="gpu:0"),
    ],
    ids=["cpus", "memory", "damaged", "gpus", "type of GPUs"],
)
def test_unknown_use_is_never_free(node: NodeInfo) -> None:
    found = capacity_of([node], Shape())
    assert (found.unknown_nodes, found.free_nodes, found.free_cpus, found.fitting) == (1, 0, 0, 0)
    assert sum(found.free_gpus.values()) == 0


@pytest.mark.parametrize(
    "shown", "drained down* idle+drain idle+planned mixed+completing reserved allocated".split()
)
def test_node_that_is_kept_for_others_or_out_of_service_is_not_free(shown: str) -> None:
    found = capacity_of([replace(IDLE, shown=shown)], Shape())
    assert (found.unknown_nodes, found.free_nodes, found.free_cpus, found.fitting) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("lines", "flags", "expected"),
    [
        ([], {}, Shape()),
        (
            [],
            {"nodes": 2, "tasks_per_node": 3, "cpus": 2, "mem": 512, "gpus": 1},
            Shape(2, 6, 512, 1),
        ),
        (["--nodes=2", "--ntasks=8", "--mem=4G"], {}, Shape(2, 4, 4096)),
        (["--nodes=2", "--cpus-per-task=3"], {"cpus": 1}, Shape(2, 1)),
        (["--gres=gpu:h100:2"], {}, Shape(gpus=2, gpu_type="h100")),
        (["--gpus-per-node=2"], {}, Shape(gpus=2)),
        (["--ntasks=8"], {}, None),
        (["--nodes=1-4"], {}, None),
        (["--mem-per-cpu=1G"], {}, None),
        (["--exclusive"], {}, None),
        (["--gpus=4"], {}, None),
        ([], {"slurm": ("--exclusive",)}, None),
    ],
)
def test_shape_is_what_options_and_directives_ask_of_a_node(
    tmp_path: Path, lines: list[str], flags: dict[str, object], expected: Shape | None
) -> None:
    (script := tmp_path / "job.sh").write_text(
        "".join(f"{line}\n" for line in ["#!/bin/bash", *(f"#SBATCH {line}" for line in lines)])
    )
    job = JobSpec.model_validate({"name": "a", "script": script, **flags})
    assert shape_of(Request.read(job)) == expected
