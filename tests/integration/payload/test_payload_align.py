"""Metrics and telemetry of a run, lined up by time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.payload.conftest import Runner
from tests.support.payload import assert_one_error


def write(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def sample(time: float, cpu: float, **more: Any) -> dict[str, Any]:
    return {"kind": "sample", "time": time, "cpu_percent": cpu, "gpus": [], **more}


def gpus(*readings: tuple[float | None, float | None]) -> list[dict[str, float | None]]:
    return [{"util": util, "power_w": power} for util, power in readings]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two iterations, from 10 to 12 and to 12.5; a node with GPUs, whose job ran again, and one
    without.
    """
    write(
        tmp_path / "metrics.jsonl",
        {"kind": "run", "time": 9.0},
        {"kind": "iteration", "time": 12.0, "seconds": 2.0, "step": 1},
        {"kind": "iteration", "time": 12.5, "seconds": 0.5, "step": 2},
        {"kind": "result", "time": 13.0},
    )
    write(
        tmp_path / "telemetry" / "a.jsonl",
        {"kind": "host", "time": 5.0},
        sample(9.0, 99.0, gpus=gpus((99, 99), (99, 99))),
        sample(
            11.0, 40.0, gpus=gpus((50, 100), (70, 200)), net_rx_bytes_per_s={"a": 10.0, "b": 5.0}
        ),
        sample(11.5, 80.0, gpus=gpus((90, 300), (None, None))),
        {"kind": "host", "time": 11.9, "gpus": [{"index": 0, "name": "a GPU"}]},
        sample(20.0, 10.0, gpus=gpus((0, 50), (0, 50))),
    )
    write(
        tmp_path / "telemetry" / "b.jsonl",
        {"kind": "host", "time": 5.0},
        sample(15.0, 20.0, memory_used_mib=512),
    )
    return tmp_path


def test_iteration_gets_the_samples_of_its_time(alone: Runner, run: Path) -> None:
    answer = alone("align", "--folder", str(run))
    first, second = (json.loads(line) for line in (run / "aligned.jsonl").read_text().splitlines())
    # On a: 1 s of the second sample, half a second of the third, a tenth after it ran again.
    a = first["hosts"]["a"]
    assert (first["step"], first["start"], first["end"]) == (1, 10.0, 12.0)
    assert a["cpu_percent"] == pytest.approx((40 * 1 + 80 * 0.5 + 10 * 0.1) / 1.6, abs=1e-3)
    assert a["gpu_util"] == pytest.approx((60 * 1 + 90 * 0.5 + 0 * 0.1) / 1.6, abs=1e-3)
    assert a["power_w"] == pytest.approx((300 * 1 + 300 * 0.5 + 100 * 0.1) / 1.6, abs=1e-3)
    assert a["net_rx_bytes_per_s"] == 15.0
    assert first["hosts"]["b"] == {"cpu_percent": 20.0, "memory_used_mib": 512.0}
    assert first["cpu_percent"] == pytest.approx((a["cpu_percent"] + 20) / 2, abs=1e-3)
    assert (second["cpu_percent"], second["gpu_util"], second["power_w"]) == (15.0, 0.0, 100.0)

    whole = json.loads(answer.stdout)
    assert (whole["iterations"], whole["seconds"]) == (2, 2.5)
    assert whole["power_w"] == pytest.approx((300 * 1 + 300 * 0.5 + 100 * 0.6) / 2.1, abs=1e-3)


def test_gpus_counters_are_preferred_to_nvmls_snapshots(alone: Runner, run: Path) -> None:
    readings = [{**gpu, "active_percent": 25.0} for gpu in gpus((90, 1), (100, 1))]
    lines = [{"kind": "host", "time": 5.0}, sample(15.0, 20.0, gpus=readings)]
    write(run / "telemetry" / "a.jsonl", *lines)
    alone("align", "--folder", str(run))
    aligned = [json.loads(line) for line in (run / "aligned.jsonl").read_text().splitlines()]
    assert [each["gpu_util"] for each in aligned] == [25, 25]


def test_align_skips_a_truncated_last_line(alone: Runner, run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "itera')
    alone("align", "--folder", str(run))
    (run / "metrics.jsonl").write_text("{broken\n{}\n")
    answer = alone("align", "--folder", str(run), rc=2)
    assert_one_error(answer.stderr, "not-json", "metrics.jsonl:1")


def test_align_without_telemetry_is_refused_in_one_line(alone: Runner, tmp_path: Path) -> None:
    assert_one_error(
        alone("align", "--folder", str(tmp_path), rc=2).stderr, "no-telemetry", str(tmp_path)
    )
