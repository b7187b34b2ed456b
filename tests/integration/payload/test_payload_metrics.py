"""What a run says of itself: its speed, its communication, its timeline."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.payload.conftest import Runner
from tests.support.manual import ROOT
from tests.support.payload import records


@pytest.fixture(scope="module")
def out(mpirun: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    flags = ("--profile", "--profile-iterations", "3", "--tensorboard", "--peak-tflops", "0.5")
    mpirun(2, "train", "--epochs", "1", "--hidden", "16", *flags, "--out", str(folder))
    return folder


def test_iteration_records_have_their_speed(out: Path) -> None:
    run, result = records(out, "run", "result")
    assert run["peak_tflops"] == [0.5, 0.5]
    assert run["peak_source"] == "--peak-tflops"
    assert run["flops_per_sample"] == 3 * 2 * (64 * 16 + 16 * 10)
    assert (run["data"]["name"], list(run["data"]["sha256"])) == ("digits", ["digits.npz"])
    iterations = records(out, "iteration")
    assert len(iterations) == 23
    for one, size in zip(iterations, [64] * 22 + [30], strict=True):
        assert one["samples_per_s"] == pytest.approx(size / one["seconds"])
        assert one["tokens_per_s"] is None
        assert one["mfu"] == pytest.approx(run["flops_per_sample"] * one["samples_per_s"] / 1e12)
        assert 0 < one["comm_exposed_ms"] <= one["comm_total_ms"] < 1e3 * one["seconds"]
        assert 0 < one["data_ms"] < 1e3 * one["seconds"] - one["comm_exposed_ms"]
        # Half of the gradients to the other rank, and half of the sums; a little for losses and
        # norms.
        assert 0 <= one["comm_sent_bytes"] - 4 * (64 * 16 + 16 + 16 * 10 + 10) < 200
        assert one["memory_bytes"] == one["host_memory_bytes"] > 1 << 20
    (evaluation,) = records(out, "evaluation")
    assert evaluation["windows"] == sum(evaluation["slowest"]) == 3  # of 10, 10 and 3 iterations
    mean = (
        sum(1e3 * one["seconds"] - one["data_ms"] - one["comm_exposed_ms"] for one in iterations)
        / 23
    )
    rank_0, rank_1 = evaluation["compute_ms"]
    assert 0.3 * mean < rank_0 < 3 * mean  # the mean of windows, of which the last is shorter
    assert rank_1 > 0
    assert len(result["peak_memory_bytes"]) == 2
    assert result["energy_j"] is None  # no GPU


def keys_of(value: Any) -> set[str]:
    """The keys of a JSON value at any depth."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    return {*value}.union(*map(keys_of, value.values())) if isinstance(value, dict) else set()


@pytest.mark.parametrize("kind", ["run", "iteration", "evaluation", "result"])
def test_records_have_the_fields_that_their_page_names(out: Path, kind: str) -> None:
    page = (ROOT / "docs" / "payload.md").read_text()
    (row,) = re.findall(rf"^\| `{kind}` \| (.*)$", page, re.MULTILINE)
    (record,) = records(out, kind)[:1]
    of_text = {"bits_per_byte", "perplexity"}
    assert {*re.findall(r"`(\w+)`", row)} - keys_of(record) - of_text == set()


GRADIENTS = 4 * (64 * 16 + 16 + 16 * 10 + 10)  # bytes, as many as of weights


@pytest.mark.parametrize(
    ("layout", "nbytes"),
    [
        ("--zero 2", (2 * GRADIENTS + GRADIENTS) / 2),  # two micro-batches on each of two ranks
        ("--pp 2", 4 * 16 * 16 * 4),  # four micro-batches of 16 samples between two layers
    ],
)
def test_layout_sends_the_bytes_that_its_page_states(
    mpirun: Runner, tmp_path: Path, layout: str, nbytes: float
) -> None:
    size = "--hidden 16 --iterations 2 --global-batch-size 64 --micro-batch-size 16".split()
    mpirun(2, "train", *size, *layout.split(), "--out", str(tmp_path))
    sent = [record["comm_sent_bytes"] for record in records(tmp_path, "iteration")]
    assert all(0 <= one - nbytes < 300 for one in sent), sent


@pytest.mark.parametrize(
    ("compressor", "nbytes"),
    [
        ("topk", 8 * 13),  # a hundredth of 1210 numbers, and their places
        ("int8", 6 * (256 + 4)),  # blocks, as many on either rank, and their scales
        # Two factors a matrix, and biases.
        ("powersgd", 4 * (4 * (64 + 16) + 4 * (16 + 10) + 16 + 10)),
    ],
)
def test_sent_bytes_of_a_compressor_count_once(
    mpirun: Runner, tmp_path: Path, compressor: str, nbytes: int
) -> None:
    flags = (
        "--iterations",
        "2",
        "--hidden",
        "16",
        "--compress",
        compressor,
        "--out",
        str(tmp_path),
    )
    mpirun(2, "train", *flags)
    assert [record["comm_sent_bytes"] for record in records(tmp_path, "iteration")] == [
        nbytes,
        nbytes,
    ]


@pytest.mark.usefixtures("tensorboard_alone")
def test_tensorboard_has_the_same_figures(out: Path) -> None:
    (file,) = (out / "tensorboard").iterdir()
    points = {
        (value.tag, event.step): value.simple_value
        for event in events_in(file.read_bytes())
        for value in event.summary.value
    }
    wanted = {
        (f"{group}/{name}", record["step"]): np.float32(record[name])
        for kind, group, names in (
            (
                "iteration",
                "training",
                ("loss", "lr", "grad_norm", "samples_per_s", "mfu", "comm_exposed_ms"),
            ),
            ("evaluation", "evaluation", ("loss", "accuracy")),
        )
        for record in records(out, kind)
        for name in names
    }
    assert {key: points.get(key) for key in wanted} == wanted
    assert not any("tokens_per_s" in tag for tag, _ in points)


def events_in(data: bytes) -> Iterator[Any]:
    """The records of a TFRecord file: length, its checksum, the record, its checksum."""
    from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415  (PyTorch comes with it: 2 s)

    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_timeline_shows_what_each_rank_did(out: Path) -> None:
    trace = json.loads((out / "trace.json").read_text())
    names = {
        event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"
    }
    assert [names[rank].split(" on ")[0] for rank in (0, 1)] == ["rank 0", "rank 1"]
    for rank in (0, 1):
        spans = [e for e in trace["traceEvents"] if e["pid"] == rank and e["ph"] == "X"]
        spans.sort(key=lambda span: span["ts"])
        one = [
            ("data", "batch"),
            ("forward", "linear0"),
            ("forward", "linear1"),
            ("backward", "linear1"),
            ("backward", "linear0"),
            ("dp", "allreduce"),
            ("world", "sum"),
            ("optimizer", "step"),
            ("checkpoint", "save"),
        ]
        assert [(span["cat"], span["name"]) for span in spans] == one * 3
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(spans))
        assert {span["args"]["micro_batch"] for span in spans if span["cat"] == "forward"} == {0}


def test_timeline_without_events_is_noted(alone: Runner, tmp_path: Path) -> None:
    for iterations, noted in (("1", True), ("2", False)):
        answer = alone("train", "--profile", "--iterations", iterations, "--out", str(tmp_path))
        assert ("--profile: trace.json will" in answer.stdout) is noted
