"""Records a node's telemetry: a line about the host, then a sample per interval, until SIGTERM or
SIGINT.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from payload.cli.config import TelemetryConfig
from payload.cli.jsonl import JsonLines
from payload.node import host
from payload.node.nvml import GpuSensor
from payload.node.rank_use import RankUsage
from payload.node.sensors import (
    CpuSensor,
    DiskSensor,
    MemorySensor,
    NetworkSensor,
    Sensor,
    SensorError,
    own_group,
)


def run(config: TelemetryConfig) -> int:
    """Sample this node until a signal arrives, and return the exit code."""
    # In a job, SIGINT may be a signal for the program, and is ignored.
    stop = {n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN}
    # Another thread waits for blocked signals, so no handler interrupts a half-written line.
    # sigtimedwait of Python may return a signal that was never sent, if this process is suspended
    # meanwhile.
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    stopped = threading.Event()

    def wait_for_stop() -> None:
        signal.sigwait(stop)
        stopped.set()

    if stop:
        threading.Thread(target=wait_for_stop, daemon=True).start()
    group = own_group()
    memory = MemorySensor(group=group)
    gpus = GpuSensor()
    # Read after the GPUs.
    ranks = RankUsage(lambda: gpus.users, limit_mib=None if memory.is_of_job else _limit_mib())
    sensors: Sequence[Sensor] = (
        CpuSensor(host.node_cores(), group=group),
        memory,
        NetworkSensor(),
        DiskSensor(),
        gpus,
        ranks,
    )
    # A requeued job appends to its file.
    is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    with JsonLines(
        config.out / f"{host.hostname()}.jsonl", keep=(lambda _: True) if is_requeued else None
    ) as file:
        file.write("host", **_host(memory, gpus, is_container=group is not None))
        # Read the counters, from which the next sample computes rates.
        sample(sensors)
        due = time.monotonic()
        while not stopped.is_set():
            due = max(due + config.interval, time.monotonic())
            stopped.wait(max(0.0, due - time.monotonic()))
            file.write("sample", **sample(sensors))
    return 0


def sample(sensors: Sequence[Sensor]) -> dict[str, Any]:
    """Read all sensors, and return the readings by name. Messages of failed sensors are under
    ``errors``.
    """
    fields: dict[str, Any] = {}
    errors: list[str] = []
    for sensor in sensors:
        try:
            fields |= sensor.read()
        except SensorError as exc:
            errors.append(str(exc))
    return {**fields, "errors": errors} if errors else fields


def _host(memory: MemorySensor, gpus: GpuSensor, *, is_container: bool) -> dict[str, Any]:
    try:
        total_mib = (_memory_in_slurm() if is_container else None) or memory.total_mib()
    except SensorError:
        total_mib = None
    return {
        "host": host.hostname(),
        "versions": host.versions("numpy", "mpi4py", "cupy-cuda12x") | _mpi_version(),
        "cpu_model": host.cpu_model(),
        "cpus": host.node_cores(),
        "memory_total_mib": total_mib,
        "gpus": gpus.describe(),
        "machine_id": host.read("/etc/machine-id"),
        "boot_id": host.read("/proc/sys/kernel/random/boot_id"),
    }


def _limit_mib() -> int | None:
    """Return the job's memory on each node in MiB, if it asked for some (`--mem`)."""
    asked = os.environ.get("SLURM_MEM_PER_NODE", "")
    return int(asked) if asked.isdecimal() and int(asked) else None


def _memory_in_slurm() -> int | None:
    """Return the memory of this node in MiB that Slurm gives to jobs, or None without Slurm."""
    match = re.search(r"\bRealMemory=(\d+)", _output("scontrol", "show", "node", host.hostname()))
    return int(match[1]) if match else None


def _mpi_version() -> dict[str, str]:
    """Return the version of Open MPI, if installed, without starting MPI."""
    version = _output("ompi_info", "--version").partition("\n")[0].strip()
    return {"mpi": version} if version else {}


def _output(*command: str) -> str:
    """Return the output of a command, or "" if it fails or is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
