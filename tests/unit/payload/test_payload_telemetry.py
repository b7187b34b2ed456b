from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from payload.commands.telemetry import sample
from payload.node import host
from payload.node.processes import RankProcess
from payload.node.rank_use import RankUsage
from payload.node.sensors import (
    CpuSensor,
    DiskSensor,
    MemorySensor,
    NetworkSensor,
    SensorError,
    own_group,
)

_MIB = 1 << 20


def test_packages_of_debian_have_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numpy.egg-info", "numpy-1.24.2.egg-info", "mpi4py-3.1.4-py3.11.egg-info"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = host.versions("numpy", "mpi4py")
    assert (found["numpy"], found["mpi4py"]) == ("1.24.2", "3.1.4")


def _cpu_lines(*busy_idle: tuple[int, int]) -> str:
    lines = [f"cpu{i} {busy} 0 0 {idle} 0 0 0 0 0 0" for i, (busy, idle) in enumerate(busy_idle)]
    return "\n".join(["cpu 999 0 0 999 0 0 0 0 0 0", *lines, "intr 1 2 3", "ctxt 4"])


def test_cpu_counts_only_the_cores_of_this_node(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("0.25 0.5 0.75 1/99 1234\n")
    (tmp_path / "stat").write_text(_cpu_lines((0, 0), (10, 10), (10, 10)))
    cpu = CpuSensor([1, 2], tmp_path)
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
def test_control_group_is_read_in_containers_only(tmp_path: Path, below: str) -> None:
    (tmp_path / "machine").mkdir()
    # As the root group of a machine has it.
    (tmp_path / "machine/cpu.stat").write_text("usage_usec 5\n")
    assert own_group(tmp_path / "machine") is None
    group = _container(tmp_path / "node" / below)
    assert own_group(tmp_path / "node") == group


def test_cpu_of_a_container_is_read_from_its_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc/stat and the load are those of the machine, with other nodes."""
    (tmp_path / "loadavg").write_text("9 9 9 1/99 1234\n")
    (tmp_path / "stat").write_text(_cpu_lines((0, 0), (0, 0)))
    group = _container(tmp_path / "group", cpu_stat="usage_usec 1000000\nuser_usec 9\n")
    now = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    cpu = CpuSensor([0, 1], tmp_path, group)
    assert cpu.read() == {}
    for used, percent in ((1_500_000, 25.0), (9_500_000, 100.0), (9_500_000, 0.0)):
        now[0] += 10**9
        (group / "cpu.stat").write_text(f"usage_usec {used}\nuser_usec 9\n")
        assert cpu.read() == {"cpu_percent": percent}


def test_memory_of_a_container_is_read_from_its_control_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 1024 kB\n")
    for pid, text in (
        (1, "Name:\ta\nRssAnon:\t  1024 kB\nRssFile:\t 9999 kB\nRssShmem:\t 2048 kB\n"),
        (2, "Name:\tkthread\n"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / f"{pid}/status").write_text(text)
    (tmp_path / "1/smaps_rollup").write_text("55-7f ---p 0 00:00 0 [rollup]\nPss_Shmem:  1024 kB\n")
    (tmp_path / "3").mkdir()
    group = _container(tmp_path / "group")
    memory = MemorySensor(tmp_path, tmp_path, group)
    assert memory.read() == {"memory_used_mib": 2}
    (group / "memory.current").write_text(f"{9 * _MIB}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {4 * _MIB}\n")
    assert memory.read() == {"memory_used_mib": 5}
    (group / "memory.stat").write_text("anon 1\n")
    with pytest.raises(SensorError):
        memory.read()


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
def test_jobs_memory_is_found_in_its_control_group(
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
    memory = MemorySensor(tmp_path, tmp_path / "cgroup")
    assert memory.read() == {"memory_used_mib": 3, "job_memory_mib": 7}
    assert memory.total_mib() == 4


@pytest.mark.parametrize(
    ("limit", "fields"),
    [("8388608\n", {"job_used_mib": 5, "job_limit_mib": 8}), ("max\n", {}), (None, {})],
)
def test_memory_that_the_job_needs_is_read_with_its_limit(
    tmp_path: Path, limit: str | None, fields: dict[str, int]
) -> None:
    """Files in the cache are not needed: the kernel drops them when the group is full."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/job_7/step_0\n")
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 1024 kB\n")
    group = tmp_path / "cgroup/job_7"
    group.mkdir(parents=True)
    (group / "memory.current").write_text(f"{8 * _MIB}\n")
    (group / "memory.stat").write_text(f"anon {4 * _MIB}\nfile {3 * _MIB}\nshmem {_MIB}\n")
    if limit:
        (group / "memory.max").write_text(limit)
    read = MemorySensor(tmp_path, tmp_path / "cgroup").read()
    assert {
        name: read[name] for name in read if name.startswith(("job_used", "job_limit"))
    } == fields


# As the kernel 6.18 writes it for a group with a child, without rows that do not matter.
_STAT_OF_VERSION_1 = """\
cache 104857600
rss 4096
shmem 0
hierarchical_memory_limit {limit}
total_cache 104857600
total_rss 314572800
total_shmem 33554432
total_inactive_file 71303168
"""


@pytest.mark.parametrize(
    ("limit", "fields"),
    [(419430400, {"job_used_mib": 332, "job_limit_mib": 400}), (9223372036854771712, {})],
)
def test_memory_of_a_job_in_version_1_of_control_groups_has_a_limit(
    tmp_path: Path, limit: int, fields: dict[str, int]
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:memory:/slurm/uid_7/job_7/step_0\n0::/\n")
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 1024 kB\n")
    group = tmp_path / "cgroup/memory/slurm/uid_7/job_7"
    group.mkdir(parents=True)
    (group / "memory.usage_in_bytes").write_text(f"{400 * _MIB}\n")
    (group / "memory.stat").write_text(_STAT_OF_VERSION_1.format(limit=limit))
    read = MemorySensor(tmp_path, tmp_path / "cgroup").read()
    assert read == {"memory_used_mib": 3, "job_memory_mib": 400, **fields}


def _interfaces(received: int, sent: int) -> str:
    columns = f"{received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0"
    return f"Inter-| Receive\n face |bytes\n    lo: {columns}\n  eth0:{columns}\n"


def test_network_rates_leave_loopback_out(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/dev").write_text(_interfaces(0, 0))
    network = NetworkSensor(tmp_path)
    assert network.read() == {}
    (tmp_path / "net/dev").write_text(_interfaces(4000, 1000))
    fields = network.read()
    received = fields["net_rx_bytes_per_s"]
    sent = fields["net_tx_bytes_per_s"]
    assert (received.keys(), sent.keys()) == ({"eth0"}, {"eth0"})
    assert received["eth0"] == pytest.approx(4 * sent["eth0"], rel=1e-3)
    assert sent["eth0"] > 0


def _processes(proc: Path, **pids: tuple[int, int]) -> list[RankProcess]:
    """Processes in a /proc, by the ticks that they and their ended children have used."""
    for name, (own, children) in pids.items():
        folder = proc / name[1:]
        folder.mkdir(exist_ok=True)
        fields = ["S", *"0" * 10, str(own), "0", str(children), "0"]
        (folder / "stat").write_text(f"{name[1:]} (a ) b) {' '.join(fields)}")
        (folder / "status").write_text(f"VmRSS: 9 kB\nRssAnon: {2 * 1024} kB\n")
    return [RankProcess(int(name[1:]), 1, ("python",)) for name in pids]


def test_rank_has_the_use_of_all_its_processes(tmp_path: Path) -> None:
    running = {0: _processes(tmp_path, p1=(0, 0), p2=(10, 5)), 1: _processes(tmp_path, p3=(7, 0))}
    ranks = RankUsage(lambda: {2: [1], 3: [0], 9: [3]}, lambda: running, tmp_path)
    first = {"memory_mib": 4, "gpus": [1]}
    assert ranks.read() == {"ranks": {"0": first, "1": {"memory_mib": 2, "gpus": [0]}}}
    _processes(tmp_path, p1=(3000, 0), p2=(10, 3005), p3=(7, 0))
    shown = ranks.read()["ranks"]
    assert shown["0"]["cpu_percent"] > 0
    assert shown["1"]["cpu_percent"] == 0


def test_memory_of_a_job_without_a_control_group_is_that_of_its_ranks(tmp_path: Path) -> None:
    running = {0: _processes(tmp_path, p1=(0, 0), p2=(0, 0)), 1: _processes(tmp_path, p3=(0, 0))}
    read = RankUsage(dict, lambda: running, tmp_path, limit_mib=512).read()
    assert (read["job_used_mib"], read["job_limit_mib"]) == (6, 512)
    assert "job_used_mib" not in RankUsage(dict, lambda: running, tmp_path).read()


def test_process_that_has_ended_ends_no_telemetry(tmp_path: Path) -> None:
    ranks = RankUsage(dict, lambda: {0: [RankProcess(77, 1, ("gone",))]}, tmp_path)
    assert ranks.read() == {"ranks": {"0": {"memory_mib": 0}}}
    assert RankUsage(dict, dict, tmp_path).read() == {}


class _Broken:
    def read(self) -> dict[str, Any]:
        raise SensorError("fan off")


class _Fine:
    def read(self) -> dict[str, Any]:
        return {"fine": 1}


def test_broken_source_of_telemetry_stops_no_other() -> None:
    assert sample([_Broken(), _Fine()]) == {"fine": 1, "errors": ["fan off"]}


@pytest.mark.parametrize("text", [None, "", "MemTotal: lots kB\n", "MemTotal: 1 kB\n"])
def test_source_without_sense_is_a_sensor_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    with pytest.raises(SensorError, match="meminfo"):
        MemorySensor(tmp_path, tmp_path).read()


def test_room_for_temporary_files_is_read(tmp_path: Path) -> None:
    tmp = DiskSensor(str(tmp_path)).read()["tmp"]
    assert 0 < tmp["free"] <= tmp["total"]
    with pytest.raises(SensorError):
        DiskSensor(str(tmp_path / "none")).read()
