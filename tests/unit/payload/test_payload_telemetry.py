from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from payload.commands.telemetry import _host, sample
from payload.node import host
from payload.node.sensors import Cpu, Gpus, Memory, Network, SensorError, own_group
from tests.support.processes import eventually, suspend
from tests.unit.payload.conftest import Runner, assert_one_error

_HOST = socket.gethostname().split(".")[0]
_MIB = 1 << 20


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
        eventually(lambda: file.exists() and file.read_text().count('"sample"') >= had + 2, 30)
        suspend(process.pid, suspended, 0.12)
        before = file.read_text().count('"sample"')
        if ignored:
            process.send_signal(signal.SIGINT)
        if ignored or suspended:
            eventually(lambda: file.read_text().count('"sample"') >= before + 2, 30)
        process.send_signal(stop)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    # With the host's record, and a last sample at the end.
    assert len(records) >= 1 + before + 1
    return process.returncode, records, stderr


def test_a_job_that_runs_again_goes_on_with_its_file(
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


def test_telemetry_in_a_job_goes_on_after_sigint(tmp_path: Path) -> None:
    assert _watch(tmp_path, signal.SIGTERM, ignored=True)[0] == 0


def test_telemetry_that_was_suspended_continues(tmp_path: Path) -> None:
    assert _watch(tmp_path, signal.SIGTERM, suspended=10)[0] == 0


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_samples_this_node_until_told_to_stop(tmp_path: Path, stop: signal.Signals) -> None:
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


def test_packages_of_debian_have_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numpy.egg-info", "numpy-1.24.2.egg-info", "mpi4py-3.1.4-py3.11.egg-info"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = host.versions("numpy", "mpi4py")
    assert (found["numpy"], found["mpi4py"]) == ("1.24.2", "3.1.4")


def test_a_folder_that_cannot_be_made_is_one_line(alone: Runner) -> None:
    answer = alone("telemetry", "--out", "/proc/nowhere", rc=2)
    assert_one_error(answer.stderr, "file-unwritable", "/proc/nowhere")


def _cpu_lines(*busy_idle: tuple[int, int]) -> str:
    lines = [f"cpu{i} {busy} 0 0 {idle} 0 0 0 0 0 0" for i, (busy, idle) in enumerate(busy_idle)]
    return "\n".join(["cpu 999 0 0 999 0 0 0 0 0 0", *lines, "intr 1 2 3", "ctxt 4"])


def test_cpu_counts_only_the_cores_of_this_node(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("0.25 0.5 0.75 1/99 1234\n")
    (tmp_path / "stat").write_text(_cpu_lines((0, 0), (10, 10), (10, 10)))
    cpu = Cpu([1, 2], tmp_path)
    assert cpu.read() == {"load1": 0.25}
    (tmp_path / "stat").write_text(_cpu_lines((500, 0), (40, 80), (10, 10)))
    assert cpu.read()["cpu_percent"] == 30.0


def _container(cgroups: Path, **files: str) -> Path:
    """The control group of a container, mounted there."""
    cgroups.mkdir(parents=True)
    for name in ("cgroup.events", "cpu.stat"):
        (cgroups / name).write_text("")
    for name, text in files.items():
        (cgroups / name.replace("_", ".")).write_text(text)
    return cgroups


@pytest.mark.parametrize("below", [".", "unified"])
def test_only_a_container_has_a_control_group_of_its_own(tmp_path: Path, below: str) -> None:
    (tmp_path / "machine").mkdir()
    # As the root group of a machine has it.
    (tmp_path / "machine/cpu.stat").write_text("usage_usec 5\n")
    assert own_group(tmp_path / "machine") is None
    group = _container(tmp_path / "node" / below)
    assert own_group(tmp_path / "node") == group


def test_cpu_of_a_container_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/stat and the load are those of the machine, with other nodes."""
    (tmp_path / "loadavg").write_text("9 9 9 1/99 1234\n")
    (tmp_path / "stat").write_text(_cpu_lines((0, 0), (0, 0)))
    group = _container(tmp_path / "group", cpu_stat="usage_usec 1000000\nuser_usec 9\n")
    now = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    cpu = Cpu([0, 1], tmp_path, group)
    assert cpu.read() == {}
    for used, percent in ((1_500_000, 25.0), (9_500_000, 100.0), (9_500_000, 0.0)):
        now[0] += 10**9
        (group / "cpu.stat").write_text(f"usage_usec {used}\nuser_usec 9\n")
        assert cpu.read() == {"cpu_percent": percent}


def test_memory_of_a_container_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 1024 kB\n")
    for pid, text in (
        (1, "Name:\ta\nRssAnon:\t  2048 kB\nRssFile:\t 9999 kB\n"),
        (2, "Name:\tkthread\n"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / f"{pid}/status").write_text(text)
    (tmp_path / "3").mkdir()
    group = _container(tmp_path / "group")
    memory = Memory(tmp_path, tmp_path, group)
    assert memory.read() == {"memory_used_mib": 2}
    (group / "memory.current").write_text(f"{9 * _MIB}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {4 * _MIB}\n")
    assert memory.read() == {"memory_used_mib": 5}
    (group / "memory.stat").write_text("anon 1\n")
    with pytest.raises(SensorError):
        memory.read()


def test_a_container_has_the_memory_that_slurm_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n"
        '[ "$*" = "show node t-1" ] && echo "NodeName=t-1" && echo " RealMemory=700 A=1"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    machine = Memory().total_mib()
    told = []
    for name in ("t-1", "t-2"):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        told += [
            _host(Memory(), Gpus(), is_container=is_container) for is_container in (True, False)
        ]
    assert [one["memory_total_mib"] for one in told] == [700, machine, machine, machine]


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        (
            "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
            "system.slice/slurmstepd.scope/job_7/memory.current",
        ),
        ("5:memory:/slurm/uid_1/job_7/step_0", "memory/slurm/uid_1/job_7/memory.usage_in_bytes"),
    ],
)
def test_the_jobs_memory_is_found_in_its_control_group(
    tmp_path: Path, membership: str, file: str
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"9:cpuset:/x\n{membership}\n")
    (tmp_path / "meminfo").write_text(
        "MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0\n"
    )
    usage = tmp_path / "cgroup" / file
    usage.parent.mkdir(parents=True)
    usage.write_text(f"{7 * _MIB}\n")
    memory = Memory(tmp_path, tmp_path / "cgroup")
    assert memory.read() == {"memory_used_mib": 3, "job_memory_mib": 7}
    assert memory.total_mib() == 4


def _interfaces(received: int, sent: int) -> str:
    columns = f"{received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0"
    return f"Inter-| Receive\n face |bytes\n    lo: {columns}\n  eth0:{columns}\n"


def test_network_rates_leave_loopback_out(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/dev").write_text(_interfaces(0, 0))
    network = Network(tmp_path)
    assert network.read() == {}
    (tmp_path / "net/dev").write_text(_interfaces(4000, 1000))
    fields = network.read()
    received = fields["net_rx_bytes_per_s"]
    sent = fields["net_tx_bytes_per_s"]
    assert (received.keys(), sent.keys()) == ({"eth0"}, {"eth0"})
    assert received["eth0"] == pytest.approx(4 * sent["eth0"], rel=1e-3)
    assert sent["eth0"] > 0


class _Broken:
    def read(self) -> dict[str, Any]:
        raise SensorError("fan off")


class _Fine:
    def read(self) -> dict[str, Any]:
        return {"fine": 1}


def test_a_broken_source_leaves_the_others_going() -> None:
    assert sample([_Broken(), _Fine()]) == {"fine": 1, "errors": ["fan off"]}


@pytest.mark.parametrize("text", [None, "", "MemTotal: lots kB\n", "MemTotal: 1 kB\n"])
def test_a_source_without_sense_is_a_sensor_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    with pytest.raises(SensorError, match="meminfo"):
        Memory(tmp_path, tmp_path).read()
