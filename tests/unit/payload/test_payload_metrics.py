"""What a run says of itself: its speed, its communication, its timeline."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.cli.config import MeasurementSettings, RunSettings, TrainConfig
from payload.comm.base import CompletedOperation, Solo
from payload.device.base import Array, CpuDevice, Device, Mark
from payload.parallel.engine import Evaluation, StepResult
from payload.training.metrics import MetricsWriter, SampleWork
from payload.training.peak import _by_sheet, find_peak
from payload.training.timing import CommTime, CommTimes, TimedCommunicator
from payload.training.trace import OFF, Timeline
from tests.support.doubles.strict import Ranges, Strict
from tests.support.payload import records


def test_skipped_iteration_has_no_norm(tmp_path: Path) -> None:
    metrics = MetricsWriter(
        TrainConfig(run=RunSettings(out=tmp_path)),
        CpuDevice(),
        Solo(),
        SampleWork(1.0),
        CommTimes(CpuDevice()),
    )
    metrics.begin()
    metrics.iteration(
        4, 1, StepResult(2.5, math.inf, 8, skipped=True, skips=2, loss_scale=64.0), lr=1, samples=8
    )
    metrics.close()
    (record,) = records(tmp_path)
    assert (record["grad_norm"], record["loss_scale"], record["skipped"]) == (None, 64, 2)


def test_evaluation_has_the_computing_times_since_the_last(tmp_path: Path) -> None:
    metrics = MetricsWriter(
        TrainConfig(run=RunSettings(out=tmp_path)),
        CpuDevice(),
        Solo(),
        SampleWork(1.0),
        CommTimes(CpuDevice()),
    )
    for step in range(1, 41):
        metrics.begin()
        metrics.iteration(step, 1, StepResult(2.5, 1.0, 8), lr=1, samples=8)
        if step in (10, 40):
            metrics.evaluation(step, 1, Evaluation(loss=2.5, accuracy=0.5), seconds=0.5)
    metrics.close()
    evaluations = [each for each in records(tmp_path) if each["kind"] == "evaluation"]
    assert [each["windows"] for each in evaluations] == [1, 3]


def test_resumed_run_tells_the_time_of_the_records_that_it_removes(tmp_path: Path) -> None:
    """It resumes after iteration 2 of 4, and computes two of them again."""
    lines: list[dict[str, Any]] = [
        {"kind": "iteration", "time": 100.0 + step, "step": step, "seconds": 0.75, "data_ms": 250.0}
        for step in (1, 2, 3, 4)
    ]
    lines.append({"kind": "checkpoint", "time": 105.0, "step": 4, "stall_s": 0.5})
    lines.append({"kind": "evaluation", "time": 107.0, "step": 4, "seconds": 1.5, "save_s": 0.25})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    config = TrainConfig(
        run=RunSettings(out=tmp_path), measuring=MeasurementSettings(peak_tflops=1.0)
    )
    metrics = MetricsWriter(
        config, CpuDevice(), Solo(), SampleWork(1.0), CommTimes(CpuDevice()), done=2
    )
    metrics.introduce({})
    metrics.close()
    *kept, run = records(tmp_path)
    assert [record["step"] for record in kept] == [1, 2]
    assert run["lost"] == {
        "iterations": 2,
        "step": 4,
        "begin": 102.25,
        "end": 107.0,
        "seconds": 1.5,
        "data_s": 0.5,
        "stall_s": 0.75,
        "evaluation_s": 1.5,
    }


class Ticking(CpuDevice):
    """Each look at its clock is a second later than the last."""

    seconds = 0

    def mark(self) -> Mark:
        self.seconds += 1
        return self.seconds


class Slow(CompletedOperation):
    """Done when asked for the second time."""

    asked = 0

    def test(self) -> bool:
        self.asked += 1
        return self.asked > 1


class Later(Solo):
    def iallreduce(self, array: Array) -> Slow:  # noqa: ARG002
        return Slow()


def test_communication_is_exposed_only_inside_calls() -> None:
    device = Ticking()
    times = CommTimes(device)
    timeline = Timeline(device, iterations=1)
    comm = TimedCommunicator(Later(), times, timeline, "dp")
    timeline.next()
    timeline.next()
    assert comm.sum([1.0]) == [1.0]
    assert times.take() == CommTime(1, 1, 0)
    pending = comm.iallreduce(np.ones(4))  # from 3 to 4
    device.seconds = 10  # computing
    assert not pending.test()  # from 11 to 12
    device.seconds = 20
    assert pending.test()  # from 21 to 22
    assert pending.test()
    pending.wait()
    assert times.take() == CommTime(22 - 3, 3, 0)
    assert times.take() == CommTime(0, 0, 0)


def test_comm_time_counts_overlapping_calls_once() -> None:
    device = Ticking()
    times = CommTimes(device)
    comm = TimedCommunicator(Later(), times, OFF, "dp")
    first = comm.iallreduce(np.ones(4))  # from 1 to 2
    second = comm.iallreduce(np.ones(4))  # from 3 to 4
    device.seconds = 10
    second.wait()  # from 11 to 12
    first.wait()  # from 13 to 14
    device.seconds = 20
    comm.barrier()  # from 21 to 22
    assert times.take() == CommTime((14 - 1) + 1, 5, 0)


def test_timeline_shows_start_and_end_of_an_operation(tmp_path: Path) -> None:
    timeline = Timeline(CpuDevice(), iterations=1)
    comm = TimedCommunicator(Later(), CommTimes(CpuDevice()), timeline, "dp")
    for _ in range(3):  # of which the second is recorded
        timeline.next()
        with timeline.span("unit", "backward"):
            pending = comm.iallreduce(np.ones(4))
        pending.wait()
    timeline.write(tmp_path / "trace.json", Solo())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["ph"], e["name"]) for e in events[1:]] == [
        ("b", "allreduce"),
        ("X", "start allreduce"),
        ("X", "unit"),
        ("X", "wait for allreduce"),
        ("e", "allreduce"),
    ]
    begin = events[1]
    end = events[5]
    assert (begin["cat"], begin["args"]) == (end["cat"], {"bytes": 32})
    assert begin["id2"] == end["id2"] == {"local": 1}  # as another rank's may be
    assert OFF.span("unit", "backward") is OFF.span("another", "forward")


def test_timeline_and_comm_times_work_on_any_device(device: Device, tmp_path: Path) -> None:
    times = CommTimes(device)
    timeline = Timeline(device, iterations=1)
    comm = TimedCommunicator(Solo(), times, timeline, "dp")
    for _ in range(2):
        timeline.next()
        with timeline.span("unit", "backward"):
            pending = comm.iallreduce(device.xp.ones(4))
        pending.wait()
    if isinstance(device, Strict):
        assert Ranges.names == [
            "backward unit",
            "dp start allreduce",
            "end",
            "end",
            "dp wait for allreduce",
            "end",
        ]
    spent = times.take()
    assert 0 < spent.exposed_s <= spent.total_s
    timeline.write(tmp_path / "trace.json", Solo())
    assert '"name": "unit", "cat": "backward"' in (tmp_path / "trace.json").read_text()


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "float32", 51.2),
        ("NVIDIA A100-SXM4-80GB", "float16", 312.0),
        ("Tesla V100-SXM2-16GB", "float16", 125.0),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla T4", "float32", 8.1),
        ("NVIDIA L40S", "float16", 362.0),
        ("NVIDIA GeForce RTX 4070", "float32", 29.1),
        ("NVIDIA GeForce RTX 4070 SUPER", "float32", None),
        ("NVIDIA GeForce RTX 4070 Ti", "float16", 80.2),
        ("NVIDIA A10G", "float16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
    ],
)
def test_peak_of_a_gpu_is_looked_up(name: str, dtype: str, tflops: float | None) -> None:
    peak = _by_sheet(name, dtype.replace("tf32", "float32"), tf32=dtype == "tf32")
    assert peak.tflops == tflops
    assert ("--peak-tflops" in peak.source) is (tflops is None)


def test_peak_of_a_cpu_is_the_fastest_product_in_200_ms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hurried(CpuDevice):
        """A product takes 2 ms, the 60th one of them 1 ms, and the 200th, which comes too late, 0.1
        ms.
        """

        products = 0
        now = 0.0

        def matmul(self, *_: object, **__: object) -> Array:
            self.products += 1
            self.now += {60: 1e-3, 200: 1e-4}.get(self.products, 2e-3)
            return np.empty(0)

    device = Hurried()
    monkeypatch.setattr("payload.training.peak.time.perf_counter", lambda: device.now)
    peak = find_peak(device, Solo(), "float16", None)
    assert peak.tflops == pytest.approx(2 * 512**3 / 1e-3 / 1e12, abs=1e-4)
    assert "512^3 in float32" in peak.source
