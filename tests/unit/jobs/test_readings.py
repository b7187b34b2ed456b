"""What running jobs do, by pieces of the files in their folders."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from clusterctl.jobs.readings import (
    NO_TELEMETRY_S,
    GpuUse,
    MetricsTail,
    MetricValue,
    Progress,
    Readings,
)
from clusterctl.scheduler.base import JobInfo, JobState

NODES = ("n1", "n2")
JOB = JobInfo(
    number=7,
    name="train",
    user="hpc",
    state=JobState.RUNNING,
    reason="",
    nodes=NODES,
    start_time=100,
    end_time=500,
)


def text(*records: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def sample(**fields: Any) -> bytes:
    return text({"kind": "sample", "time": 1.0, **fields})


def added(*files: tuple[str, bytes], now: float = 0.0) -> Readings:
    """Return readings of whole files, which the controller has."""
    readings = Readings()
    for file, data in files:
        readings.add("ctl", file, 0, data, now)
    return readings


def test_ranks_of_all_nodes_are_in_order_with_their_gpus() -> None:
    gpu = {"index": 1, "util": 95, "mem_used_mib": 10, "mem_total_mib": 80, "power_w": 310.5}
    first = sample(ranks={"1": {"cpu_percent": 50.0, "memory_mib": 3, "gpus": [1]}}, gpus=[gpu])
    second = sample(ranks={"0": {"cpu_percent": 99.5, "memory_mib": 4}})
    readings = added(("telemetry/n1", first), ("telemetry/n2", second))
    ranks = readings.use(JOB, 1.0).ranks
    assert [(rank.rank, rank.node, rank.cpu_percent, rank.memory_mib) for rank in ranks] == [
        (0, "n2", 99.5, 4.0),
        (1, "n1", 50.0, 3.0),
    ]
    assert [rank.gpus for rank in ranks] == [(), (GpuUse(1, 95.0, 10.0, 80.0, 310.5, None),)]


def test_last_sample_counts_and_a_cut_line_does_not() -> None:
    readings = added(("telemetry/n1", sample(cpu_percent=1.0) + sample(cpu_percent=2.0)[:-9]))
    assert readings.use(JOB, 0.0).nodes[0].cpu_percent == 1.0
    at = readings.sent["ctl"]["telemetry/n1"]
    readings.add("ctl", "telemetry/n1", at, sample(cpu_percent=2.0)[-9:], 1.0)
    assert readings.use(JOB, 1.0).nodes[0].cpu_percent == 2.0


def test_line_after_a_gap_is_not_joined_to_the_piece_before() -> None:
    readings = added(("stdout", b"one\ntwo"))
    readings.add("ctl", "stdout", 5000, b"of a line\nlast\n", 1.0)
    assert readings.use(JOB, 1.0).log == ("one", "of a line", "last")


def test_node_that_is_silent_for_long_has_no_values() -> None:
    readings = added(("telemetry/n1", sample(cpu_percent=50.0)))
    assert [use.node for use in readings.use(JOB, NO_TELEMETRY_S).nodes] == ["n1"]
    late = readings.use(JOB, NO_TELEMETRY_S + 1)
    assert (late.nodes, late.silent) == ((), NODES)
    just_started = replace(JOB, start_time=100, end_time=110)
    assert readings.use(just_started, NO_TELEMETRY_S + 1).silent == ()


def test_memory_of_a_node_comes_from_the_record_about_its_host() -> None:
    host = text({"kind": "host", "memory_total_mib": 64000})
    readings = added(("host/n1", host), ("telemetry/n1", sample(memory_used_mib=100)))
    (node,) = readings.use(JOB, 0.0).nodes
    assert (node.memory_mib, node.memory_total_mib) == (100.0, 64000.0)


def test_traffic_is_the_sum_of_all_interfaces() -> None:
    links = {"eth0": 10.0, "ib0": 5.5, "odd": "x", "worse": None}
    readings = added(("telemetry/n1", sample(net_rx_bytes_per_s=links)))
    (node,) = readings.use(JOB, 0.0).nodes
    assert (node.rx_bytes_per_s, node.tx_bytes_per_s) == (15.5, None)
    huge = {"a": 1.7e308, "b": 1.7e308}
    (node,) = added(("telemetry/n1", sample(net_rx_bytes_per_s=huge))).use(JOB, 0.0).nodes
    assert node.rx_bytes_per_s is None


def test_file_that_begins_anew_replaces_the_earlier_values() -> None:
    readings = added(("metrics", text({"step": 900, "loss": 0.1})))
    readings.add("ctl", "metrics", 0, text({"step": 1, "loss": 2.0}), 1.0)
    assert readings.use(JOB, 1.0).progress == Progress(
        MetricValue("step", 1.0), MetricValue("loss", 2.0), None, (2.0,)
    )


def test_hang_is_shown_until_the_next_progress() -> None:
    hang = {"event": "hang", "time": 100.0, "seconds": 60, "summary": "rank 0 waits"}
    start = {"event": "start", "time": 1.0}
    readings = added(("events", text(start, hang)))
    found = readings.use(JOB, 0.0).hang
    assert found is not None
    assert found.summary == "rank 0 waits"
    at = readings.sent["ctl"]["events"]
    readings.add("ctl", "events", at, text({"event": "progress", "time": 130.0}), 1.0)
    assert readings.use(JOB, 1.0).hang is None


@pytest.mark.parametrize(
    "data",
    [
        b"[1]\n",
        b"{\n",
        b'{"kind": "sample", "gpus": 3, "ranks": [1], "net_rx_bytes_per_s": 7}\n',
        b'{"kind": "sample", "gpus": [1, {"index": "x"}], "ranks": {"x": 1, "2": 3}}\n',
        b'{"kind": "sample", "cpu_percent": 1e999, "memory_used_mib": true}\n',
        b'{"kind": "sample", "cpu_percent": 1e300}\n',
        b'{"kind": "sample", "cpu_percent": -5}\n',
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_telemetry_that_a_job_has_forged_has_no_values(data: bytes) -> None:
    use = added(("telemetry/n1", data)).use(JOB, 0.0)
    assert use.ranks == ()
    assert all((node.cpu_percent, node.gpus) == (None, ()) for node in use.nodes)


def test_telemetry_of_other_hosts_than_those_of_the_job_is_not_shown() -> None:
    readings = added(("telemetry/n9", sample()), ("telemetry/../x", sample()))
    assert readings.use(JOB, 0.0).nodes == ()


def test_control_characters_of_logs_are_not_passed_on() -> None:
    readings = added(("stderr", b"a\x1b[31mred\x1b[0m\x07\n\n50 %\r99 %\n"))
    assert readings.use(JOB, 0.0).log == (r"ared\x07", "99 %")


@pytest.mark.parametrize(
    ("lines", "progress"),
    [
        (
            [{"step": 3, "loss": 0.5, "samples_per_s": 100.0}],
            Progress(
                MetricValue("step", 3),
                MetricValue("loss", 0.5),
                MetricValue("samples_per_s", 100),
                (0.5,),
            ),
        ),
        # The loss of training comes before that of an evaluation, and kinds that are no steps count not.
        (
            [
                {"epoch": 1, "eval/loss": 0.9, "train/loss": 0.7},
                {"kind": "evaluation", "step": 9, "loss": 5.0},
                {"kind": "run", "loss": 6.0},
            ],
            Progress(MetricValue("epoch", 1), MetricValue("train/loss", 0.7), None, (0.7,)),
        ),
        ([{"_step": 2, "reward": 3.0}], Progress(MetricValue("step", 2))),
        ([{"loss": float("nan"), "tokens_per_s": "many"}], Progress()),
        ([{"kind": {"a": 1}, "step": 1}], Progress(MetricValue("step", 1))),
    ],
)
def test_progress_is_read_from_lines_of_metrics(
    lines: list[dict[str, Any]], progress: Progress
) -> None:
    metrics = MetricsTail()
    for line in lines:
        metrics.add(line)
    assert metrics.progress() == progress
