"""The conditions of alarms on samples of telemetry, and when an alarm is due."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterctl.spec.alarms import ALARMS, alarm_options, alarm_rules
from payload.node.alarms import (
    CONDITIONS,
    AlarmRule,
    AlarmWatch,
    Judge,
    LineReader,
    Window,
    data,
    full_disk,
    full_disks,
    idle,
    memory,
    rules_of,
    throttled,
    used_quotas,
    window_s,
)


def gpu(index: int = 0, **fields: Any) -> dict[str, Any]:
    """A GPU that computes."""
    busy = {"util": 100, "mem_util": 40, "power_w": 600.0, "processes": 1, "slowed_by": []}
    return {"index": index, **busy, **fields}


def gpus(*states: dict[str, Any], least_w: float = 70.0, job_gpus: int = 1) -> Window:
    """A window with a sample for each state of the GPU 0 of n1."""
    samples = [{"gpus": [state], "job_gpus": job_gpus} for state in states]
    return Window({"n1": samples}, least_power={("n1", 0): least_w})


RESTING = gpu(mem_util=0, power_w=72.0, util=0)


@pytest.mark.parametrize(
    ("window", "is_idle"),
    [
        (gpus(*[gpu(processes=0)] * 3), True),
        (gpus(*[RESTING] * 3), True),
        # A program that waits in a loop on the GPU makes it busy, without work.
        (gpus(*[{**RESTING, "util": 100}] * 3), True),
        (gpus(RESTING, gpu(), RESTING), False),
        (gpus(gpu(processes=0), gpu(processes=1), gpu(processes=0)), False),
        # Kernels without memory traffic need power.
        (gpus(*[{**RESTING, "power_w": 300.0}] * 3), False),
        (gpus(*[{**RESTING, "mem_util": None}] * 3), False),
        (gpus(*[{**RESTING, "power_w": None}] * 3), False),
        (gpus(*[{**RESTING, "power_w": 0}] * 3), True),
        (gpus(*[{**RESTING, "processes": None}] * 3), True),
        # The job has two of the GPUs here, or none: others may be those of other jobs.
        (gpus(*[gpu(processes=0)] * 3, job_gpus=2), False),
        (gpus(*[gpu(processes=0)] * 3, job_gpus=0), False),
        (Window({"n1": [{"gpus": [gpu(processes=0)]}] * 3}), False),
        (Window({"n1": []}), False),
        (Window({"n1": [{"gpus": "x", "job_gpus": 1}, {"gpus": [3], "job_gpus": 1}]}), False),
    ],
)
def test_idle_gpu_has_no_process_or_neither_traffic_nor_power(
    window: Window, is_idle: bool
) -> None:
    assert bool(idle(window)) == is_idle


def test_idle_gpus_are_named_with_their_node() -> None:
    samples = [{"gpus": [gpu(0), gpu(1, processes=0)], "job_gpus": 2}] * 3
    assert [*idle(Window({"n2": samples}))] == ["GPU 1 of n2"]


@pytest.mark.parametrize(
    ("reasons", "count"),
    [
        ([["its temperature"]] * 3, 1),
        ([["its temperature"], [], ["its temperature"]], 0),
        ([None] * 3, 0),
        ([[]] * 3, 0),
    ],
)
def test_gpu_is_slowed_down_only_if_every_sample_tells_so(reasons: list[Any], count: int) -> None:
    window = gpus(*(gpu(slowed_by=reason) for reason in reasons))
    assert len(throttled(window)) == count


def used(*mib: int | None, limit: int | None = 4096, **more: Any) -> Window:
    samples = [{"job_used_mib": each, "job_limit_mib": limit, **more} for each in mib]
    return Window({"n1": samples})


@pytest.mark.parametrize(
    ("window", "is_near"),
    [
        (used(4000, 4010, 4090), True),
        (used(4000, 100, 4090), False),
        (used(3000, 3000, 3000), False),
        (used(4000, None, 4000), False),
        (used(4000, 4000, limit=None), False),
        (used(4000, 4000, limit=0), False),
    ],
)
def test_memory_near_its_limit_is_named(window: Window, is_near: bool) -> None:
    assert bool(memory(window)) == is_near


def test_rank_with_the_most_memory_is_named() -> None:
    ranks = {"0": {"memory_mib": 100}, "12": {"memory_mib": 3000}, "3": None}
    (text,) = memory(used(4000, 4000, ranks=ranks)).values()
    assert "rank 12" in text


def steps(*pairs: tuple[Any, Any], keys: tuple[str, str] = ("data_ms", "seconds")) -> Window:
    return Window({}, [dict(zip(keys, pair, strict=True)) for pair in pairs])


@pytest.mark.parametrize(
    ("window", "waits"),
    [
        (steps(*[(300, 0.35)] * 5), True),
        (steps(*[(0.3, 0.35)] * 5, keys=("data_time", "time")), True),
        (steps(*[(100, 0.35)] * 5), False),
        (steps(*[(300, 0.35)] * 4), False),
        (steps(*[(300, None)] * 9), False),
        (steps(*[("x", 0.35)] * 9), False),
        # A clock, not the time of a step.
        (steps(*[(0.3, 1.8e9)] * 9, keys=("data_time", "time")), False),
        # One long wait, such as that of the first step of an epoch, in many steps without.
        (steps((3000, 3.1), *[(1, 0.4)] * 20), False),
        (steps(*[(0, 0.0)] * 9), False),
    ],
)
def test_steps_that_wait_for_data_are_found(window: Window, waits: bool) -> None:
    assert bool(data(window)) == waits


def test_windows_are_long_enough_for_the_interval_of_telemetry() -> None:
    rule = AlarmRule("memory", "warn", 60)
    assert window_s(rule, 2) == 60
    assert window_s(rule, 60) == 240


QUOTA = """\
Disk quotas for user stud (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
   fs1:/home  97000  90000 100000  604800 120   0   0  0
   /dev/sdb1 97000*   90000   97500       0     950    1000    1000       0
   /dev/sdc1 10       0       0       0     5       0       0       0
   fs2:/proj 96000000000 0 100000000000   0 5 0 0 0
   fs3:/proj 99000000000 0 100000000000   0 5 0 0 0
quota: Cannot get quota
"""


def test_quotas_that_are_nearly_used_up_are_read_from_quota() -> None:
    assert [*used_quotas(QUOTA)] == [
        "fs1:/home KiB",
        "/dev/sdb1 KiB",
        "/dev/sdb1 files",
        "fs3:/proj KiB",
    ]
    assert "95 MiB of 98 MiB" in used_quotas(QUOTA)["fs1:/home KiB"]
    assert used_quotas("") == {}


@pytest.mark.parametrize(
    ("room", "subjects"),
    [
        ({"free": 5, "total": 100, "free_inodes": 0, "inodes": 0}, ["/data"]),
        ({"free": 6, "total": 100, "free_inodes": 6, "inodes": 100}, []),
        ({"free": 50, "total": 100, "free_inodes": 5, "inodes": 100}, ["/data inodes"]),
        # 30 TiB are free on a file system that is 96 % full.
        ({"free": 30 << 40, "total": 750 << 40, "free_inodes": 2e6, "inodes": 1e8}, []),
        (
            {"free": 1 << 40, "total": 750 << 40, "free_inodes": 1e6, "inodes": 1e8},
            ["/data", "/data inodes"],
        ),
        ({"free": None, "total": "x"}, []),
        ({}, []),
    ],
)
def test_full_file_system_is_named(room: dict[str, Any], subjects: list[str]) -> None:
    assert [*full_disk("/data", room)] == subjects


def test_full_temporary_files_are_named_with_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    samples = {
        "n1": {"tmp": {"free": 90, "total": 100}},
        "n2": {"tmp": {"free": 1, "total": 100}},
        "n3": {},
    }
    assert [*full_disks(samples).keys() - {str(tmp_path)}] == ["/tmp on n2"]


def judge_of(rule: AlarmRule) -> Judge:
    return Judge([rule], {rule.kind: window_s(rule, 2.0)})


def begun(judge: Judge, now: float, *subjects: str) -> list[str]:
    found = {"idle": {subject: f"{subject} is idle" for subject in subjects}}
    return [text for _, text, _ in judge.step(now, found)[0]]


def test_alarm_is_due_after_its_time_without_interruption() -> None:
    judge = judge_of(AlarmRule("idle", "warn", 600))
    assert begun(judge, 1000, "a") == []
    assert begun(judge, 1500, "a") == []
    assert begun(judge, 1530) == []
    assert begun(judge, 1540, "a") == []
    # The condition had held for the 60 s of the window when it was first seen.
    assert begun(judge, 2079, "a") == []
    assert begun(judge, 2080, "a") == ["a is idle"]


def test_alarm_is_raised_once_and_again_for_others() -> None:
    judge = judge_of(AlarmRule("idle", "warn", 60))
    assert begun(judge, 1000, "a") == ["a is idle"]
    assert begun(judge, 1002, "a") == []
    assert begun(judge, 1004, "a", "b") == ["a is idle; b is idle"]
    assert begun(judge, 1006, "a", "b") == []
    assert judge.step(1008, {"idle": {}}) == ([], [])
    assert judge.step(1065, {"idle": {}}) == ([], [])
    assert judge.step(1066, {"idle": {}}) == ([], [("idle", 60)])
    assert judge.step(1068, {"idle": {}}) == ([], [])


def test_alarm_near_its_limit_is_raised_once() -> None:
    (rule,) = rules_of("data=warn@1200")
    judge = judge_of(rule)
    reported = [
        judge.step(now, {"data": {"data": "waits"} if now < 1300 or now % 200 < 100 else {}})
        for now in range(0, 4000, 100)
    ]
    assert [len(begun) for begun, _ in reported if begun] == [1]
    assert not any(ended for _, ended in reported)


def telemetry(folder: Path, node: str = "n1", **fields: Any) -> None:
    with (folder / f"telemetry/{node}.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "sample", **fields}) + "\n")


def test_window_is_judged_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "telemetry").mkdir()
    (rule,) = rules_of("memory=warn@60")
    watch = AlarmWatch([rule], "files")
    telemetry(tmp_path, before=True)
    for now in range(1000, 1060, 2):
        watch.read(now)
        assert watch.window(rule, now).samples == {}
        telemetry(tmp_path, at=now)
    watch.read(1060)
    (samples,) = watch.window(rule, 1060).samples.values()
    assert samples[0] == {"kind": "sample", "at": 1000}
    # A node whose telemetry has ended is not judged any longer.
    assert watch.window(rule, 1200).samples == {}


def test_full_disk_is_named_after_its_time_and_not_at_the_first_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    judge = judge_of(AlarmRule("disk", "warn", 60))
    full = {"disk": {"/": "full"}}
    assert judge.step(1000, full) == ([], [])
    assert judge.step(1059, full) == ([], [])
    assert len(judge.step(1060, full)[0]) == 1


def test_lines_are_read_once_and_only_if_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    reader = LineReader()
    assert reader.gained(str(path), from_start=True) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step": 2}\n[3]\n{broken\n')
    assert reader.gained(str(path)) == [{"step": 2}]
    path.write_text('{"step": 9}\n')
    assert reader.gained(str(path)) == [{"step": 9}]
    assert reader.gained(str(tmp_path / "missing")) == []


def test_both_sides_have_the_same_alarms() -> None:
    (text,) = alarm_options(())
    assert text.startswith("--alarms=")
    rules = rules_of(text.removeprefix("--alarms="))
    assert {rule.kind: rule.seconds for rule in rules} == dict(ALARMS)
    assert {rule.kind for rule in rules} == set(CONDITIONS)
    assert {rule.action for rule in rules} == {"warn"}


def test_last_option_of_an_alarm_counts() -> None:
    options = ("idle=off", "idle=end@1h", "data=off")
    rules = alarm_rules(options)
    assert rules["idle"] == ("end", 3600)
    assert "data" not in rules
    assert alarm_options([f"{kind}=off" for kind in ALARMS]) == []
