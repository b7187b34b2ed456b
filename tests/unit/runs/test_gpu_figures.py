"""What reports and scalings show of GPUs: means over all GPUs of a job, and of no others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.runs.find import Row
from clusterctl.runs.report import report_of
from clusterctl.runs.scaling import scaling_of
from clusterctl.runs.series import gpu_energy_j, summarize
from clusterctl.runs.telemetry import node_use
from clusterctl.state.attempts import AttemptRecord
from tests.unit.runs.made import TIME, made_run

Gpus = list[dict[str, Any]]


def write_samples(folder: Path, node: str, *samples: Mapping[str, Any]) -> None:
    """Write telemetry with a sample per second."""
    (folder / "telemetry").mkdir(exist_ok=True)
    lines = [
        {"kind": "sample", "time": TIME + second, **each} for second, each in enumerate(samples, 1)
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "telemetry" / f"{node}.jsonl").write_text(text)


def use_of(folder: Path, **gpus: Sequence[Gpus]) -> dict[str, float]:
    """Return the use of nodes with these GPUs in each sample."""
    for node, listed in gpus.items():
        write_samples(folder, node, *({"gpus": each, "cpu_percent": 10} for each in listed))
    return node_use(folder, [*gpus])


def counted(active: float, tensor: float | None = None, **more: Any) -> dict[str, Any]:
    """A GPU with counters; NVML's own snapshot differs from them."""
    return {
        "util": 100,
        "active_percent": active,
        **({} if tensor is None else {"tensor_percent": tensor}),
        **more,
    }


def test_use_is_the_mean_of_all_gpus_of_all_nodes(tmp_path: Path) -> None:
    """One GPU on n1, and three on n2, for two and for one second."""
    traffic = {"bandwidth_percent": 50.0, "bandwidth_bytes_per_s": 2e12}
    three = [counted(50, 10, **traffic) for _ in range(3)]
    one = [counted(90, 30, **traffic)]
    use = use_of(tmp_path, n1=[one, one], n2=[three])
    assert use == {
        "cpu_percent": 10,
        "gpu_percent": pytest.approx((2 * 90 + 3 * 50) / 5),
        "gpu_tensor_percent": pytest.approx((2 * 30 + 3 * 10) / 5),
        "gpu_bandwidth_percent": pytest.approx(50),
        "gpu_bandwidth_gb_per_s": pytest.approx(2000),
    }


def test_means_over_time_before_the_span_do_not_count(tmp_path: Path) -> None:
    """A counter's value at 2 s is that of the time since 1 s, a snapshot that of the moment."""
    shown = [{"active_percent": 10 * second, "util": second} for second in (1, 2, 3, 4, 5)]
    write_samples(
        tmp_path,
        "n1",
        *({"gpus": [gpu], "cpu_percent": 10 * at} for at, gpu in enumerate(shown, 1)),
    )
    span = TIME + 1.5, TIME + 4.0
    assert node_use(tmp_path, ["n1"], span) == {"gpu_percent": 35, "cpu_percent": 35}
    snapshots = [{"util": gpu["util"]} for gpu in shown]
    write_samples(tmp_path, "n1", *({"gpus": [gpu]} for gpu in snapshots))
    assert node_use(tmp_path, ["n1"], span) == {"gpu_percent": 3}
    write_samples(tmp_path, "n1", *({"gpus": [gpu]} for gpu in (*snapshots[:2], *shown[2:])))
    assert node_use(tmp_path, ["n1"], span) == {"gpu_percent": (2 + 30 + 40) / 3}


def test_use_without_counters_is_that_of_nvmls_snapshots(tmp_path: Path) -> None:
    use = use_of(tmp_path, n1=[[{"util": 40}], [{"util": 60}]])
    assert use == {"cpu_percent": 10, "gpu_percent": 50}


@pytest.mark.parametrize(
    ("n1", "n2"),
    [
        ([[counted(80, 40), counted(80)]], [[counted(80, 40)]]),
        ([[counted(80, 40)]], [[counted(80)]]),
    ],
    ids=["of-a-node", "of-all-nodes"],
)
def test_figure_that_only_some_gpus_have_is_left_out(
    tmp_path: Path, n1: Sequence[Gpus], n2: Sequence[Gpus]
) -> None:
    assert use_of(tmp_path, n1=n1, n2=n2) == {"cpu_percent": 10, "gpu_percent": 80}


def test_nodes_without_gpus_take_nothing_from_the_others(tmp_path: Path) -> None:
    assert use_of(tmp_path, n1=[[counted(80, 40)]], n2=[[]])["gpu_tensor_percent"] == 40


@pytest.mark.parametrize(("given", "is_own"), [(2, True), (1, False), (None, True)])
def test_gpus_that_may_be_those_of_other_jobs_do_not_count(
    tmp_path: Path, given: int | None, is_own: bool
) -> None:
    """Where jobs see all GPUs of a node, nothing tells which of them are theirs."""
    job_gpus = {} if given is None else {"job_gpus": given}
    samples = [
        {
            "gpus": [counted(80, 40, index=index, energy_mj=1000 * second) for index in (0, 1)],
            "cpu_percent": 10,
            **job_gpus,
        }
        for second in (1, 5)
    ]
    write_samples(tmp_path, "n1", *samples)
    use = node_use(tmp_path, ["n1"])
    attempts = [AttemptRecord(start_time=TIME, end_time=TIME + 9, nodes=("n1",))]
    assert ("gpu_percent" in use, use["cpu_percent"]) == (is_own, 10)
    assert gpu_energy_j(tmp_path, attempts) == (8 if is_own else None)


def test_report_has_charts_of_tensor_cores_and_memory_bandwidth(tmp_path: Path) -> None:
    run = made_run(tmp_path, nodes=["n1"], start_time=TIME)
    traffic = {"bandwidth_percent": 50.0, "bandwidth_bytes_per_s": 2e12}
    write_samples(run.directory, "n1", *({"gpus": [counted(80, 40, **traffic)]} for _ in range(3)))
    report = report_of([Row(run)])
    charts = {chart.title for section in report.sections for chart in section.charts}
    assert {"GPU", "GPU tensor cores", "GPU memory bandwidth"} <= charts
    # The same curve again.
    assert "GPU memory traffic" not in charts


def test_scaling_of_bench_has_the_figures_of_all_ranks_that_bench_measured(tmp_path: Path) -> None:
    """Telemetry has the mean over all that bench compares, and its start."""
    rows = []
    for nodes in (1, 2):
        names = [f"n{number}" for number in range(nodes)]
        task = {"id": str(nodes), "state": "COMPLETED", "exit_code": 0, "nodes": names}
        scaling = {"nodes": [1, 2], "repeats": 1}
        run = made_run(tmp_path, nodes, name="bench", nodes=names, tasks=[task], scaling=scaling)
        for name in names:
            write_samples(run.directory, name, {"gpus": [counted(30, 5)]})
        sides = [
            {"side": "all", "samples_per_s": 100.0 * nodes, "iteration_ms": 10.0}
            | {"gpu_active_percent": 90.0, "gpu_idle_percent": 10.0, "gpu_tensor_percent": 45.0}
            | {"samples_per_joule": 0.5},
            {"side": "strong 1", "gpu_idle_percent": 70.0, "samples_per_joule": 3.0},
        ]
        text = "".join(f"{json.dumps({'kind': 'bench', **side})}\n" for side in sides)
        (run.directory / "bench.jsonl").write_text(text)
        rows.append(Row(run.model_copy(update={"metrics": summarize(run.directory).metrics})))
    figures = scaling_of(rows).curves[0].sizes[1].figures
    expected = {
        "gpu_percent": 90,
        "gpu_idle_percent": 10,
        "gpu_tensor_percent": 45,
        "samples_per_joule": 0.5,
    }
    assert {name: figures[name].mean for name in expected} == pytest.approx(expected)
