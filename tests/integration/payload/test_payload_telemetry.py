"""The sampler of a node as a process beside a job."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from payload.commands.telemetry import _host
from payload.node.nvml import GpuSensor
from payload.node.sensors import MemorySensor
from tests.integration.payload.conftest import Runner
from tests.support.payload import assert_one_error
from tests.support.processes import eventually, suspend


def test_telemetry_with_an_uncreatable_folder_is_one_line(alone: Runner) -> None:
    answer = alone("telemetry", "--out", "/proc/nowhere", rc=2)
    assert_one_error(answer.stderr, "file-unwritable", "/proc/nowhere")


_HOST = socket.gethostname().split(".")[0]


def _watch(
    out: Path, stop: signal.Signals, *, ignored: bool = False, suspended: int = 0
) -> tuple[int, list[dict[str, Any]], str]:
    """Run telemetry until two samples are on file, stop it; exit code, records, stderr.

    ignored: start it with SIGINT ignored, and send SIGINT before ``stop``.
    suspended: how often it is stopped and continued meanwhile.
    """
    file = out / f"{_HOST}.jsonl"
    had = file.read_text().count('"sample"') if file.exists() else 0
    words = ["-m", "payload", "telemetry", "--out", str(out), "--interval", "0.1"]
    process = subprocess.Popen(
        ["env", f"--{'ignore' if ignored else 'default'}-signal=INT", sys.executable, *words],
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: file.exists() and file.read_text().count('"sample"') >= had + 2)
        suspend(process.pid, suspended, 0.12)
        before = file.read_text().count('"sample"')
        if ignored:
            process.send_signal(signal.SIGINT)
        if ignored or suspended:
            eventually(lambda: file.read_text().count('"sample"') >= before + 2)
        process.send_signal(stop)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    # With the host's record, and a last sample at the end.
    assert len(records) >= 1 + before + 1
    return process.returncode, records, stderr


def test_telemetry_of_a_restarted_job_appends_to_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first, _ = _watch(tmp_path, signal.SIGTERM)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    _, both, _ = _watch(tmp_path, signal.SIGTERM)
    assert both[: len(first)] == first
    assert both[len(first)]["kind"] == "host"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    _, anew, _ = _watch(tmp_path, signal.SIGTERM)
    assert first[0] not in anew


def test_telemetry_in_a_job_ignores_sigint(tmp_path: Path) -> None:
    assert _watch(tmp_path, signal.SIGTERM, ignored=True)[0] == 0


def test_telemetry_that_was_suspended_continues(tmp_path: Path) -> None:
    assert _watch(tmp_path, signal.SIGTERM, suspended=10)[0] == 0


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_telemetry_samples_the_node_until_stopped(tmp_path: Path, stop: signal.Signals) -> None:
    code, (first, *samples), stderr = _watch(tmp_path / "telemetry", stop)
    assert (code, stderr) == (0, "")
    assert (first["kind"], first["host"]) == ("host", _HOST)
    assert set(first["cpus"]) >= os.sched_getaffinity(0)
    assert first["memory_total_mib"] > 0
    assert set(first["versions"]) >= {"python", "kernel", "mpi"}
    for package in ("numpy", "mpi4py"):
        assert first["versions"][package] == version(package)
    assert first["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert all(line["kind"] == "sample" and "errors" not in line for line in samples)
    for line in samples:
        assert 0 <= line["cpu_percent"] <= 100
        assert 0 < line["memory_used_mib"] <= first["memory_total_mib"]
        assert "lo" not in line["net_rx_bytes_per_s"]
        assert line["net_rx_bytes_per_s"].keys() == line["net_tx_bytes_per_s"].keys()


def test_container_has_the_memory_that_slurm_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n"
        '[ "$*" = "show node t-1" ] && echo "NodeName=t-1" && echo " RealMemory=700 A=1"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    machine = MemorySensor().total_mib()
    samples = []
    for name in ("t-1", "t-2"):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        samples += [
            _host(MemorySensor(), GpuSensor(), is_container=is_container)
            for is_container in (True, False)
        ]
    assert [one["memory_total_mib"] for one in samples] == [700, machine, machine, machine]
