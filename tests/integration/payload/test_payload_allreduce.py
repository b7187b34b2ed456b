"""allreduce: the speed of sums, which are checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from payload.cli.arguments import parse
from payload.cli.config import AllreduceConfig
from payload.commands.allreduce import sizes
from payload.errors import UsageError
from tests.integration.payload.conftest import Runner
from tests.support.messages import refused
from tests.support.payload import assert_one_error, records


def test_allreduce_sums_every_size_by_every_transport(mpirun: Runner, tmp_path: Path) -> None:
    comms = ("mpi", "ring", "hierarchical", "naive")
    arguments = ("--min", "8KiB", "--max", "20000", "--iterations", "1", "--dtype", "bfloat16")
    answer = mpirun(3, "allreduce", "--comm", ",".join(comms), *arguments, "--out", str(tmp_path))
    *lines, last = answer.stdout.splitlines()
    answer_json = json.loads(last)
    assert answer_json["ok"]
    assert answer_json["world_size"] == 3
    assert [place["rank"] for place in answer_json["ranks"]] == [0, 1, 2]
    cases = [(nbytes, comm) for nbytes in (8192, 20_000) for comm in comms]
    assert [(one["bytes"], one["comm"]) for one in answer_json["results"]] == cases
    for one in answer_json["results"]:
        seconds = one["ms"] / 1e3
        assert one["ok"]
        assert one["algorithm_gb_per_s"] == pytest.approx(
            one["bytes"] / seconds / 1e9, rel=0.02, abs=1e-4
        )
        assert one["bus_gb_per_s"] == pytest.approx(
            one["algorithm_gb_per_s"] * 4 / 3, rel=0.02, abs=2e-4
        )
        assert one["bytes_sent"] > one["bytes"] / 2
    assert len(lines) == len(cases)
    assert all(line.endswith("right") for line in lines)
    written = records(tmp_path, file="allreduce.jsonl")
    assert [
        {k: v for k, v in one.items() if k not in ("kind", "time")} for one in written
    ] == answer_json["results"]


def test_allreduce_rounds_tiny_sizes_up_and_measures_each_once(
    mpirun: Runner, tmp_path: Path
) -> None:
    """A float has 4 bytes. A small sum is too fast to time, so each iteration has 256 in a row."""
    flags = ("--min", "1", "--max", "20", "--iterations", "2", "--out", str(tmp_path))
    answer = mpirun(2, "allreduce", *flags)  # asks for 1, 4, 16 and 20 bytes
    assert answer.returncode == 0, answer.stderr
    results = json.loads(answer.stdout.splitlines()[-1])["results"]
    assert [(one["bytes"], one["iterations"]) for one in results] == [
        (4, 512),
        (16, 512),
        (20, 512),
    ]


def test_wrong_sum_is_found(program: Runner, tmp_path: Path) -> None:
    answer = program(2, "liar.py", "sum", "allreduce", str(tmp_path), rc=1)
    answer_json = json.loads(answer.stdout.splitlines()[-1])
    assert not answer_json["ok"]
    wrong = [one for one in answer_json["results"] if not one["ok"]]
    assert [(one["bytes"], one["wrong"]) for one in wrong] == [(1 << 20, [0, 1])]


@pytest.mark.parametrize("wanted", [("--cuda-aware",), ("--comm", "nccl")])
def test_gpu_transport_without_a_gpu_is_refused(mpirun: Runner, wanted: tuple[str, ...]) -> None:
    answer = mpirun(2, "allreduce", *wanted, "--device", "cpu", rc=2)
    assert_one_error(answer.stderr, "no-gpu", wanted[-1])


def test_sizes_grow_fourfold_to_the_largest() -> None:
    assert sizes(4096, 4096) == [4096]
    assert sizes(1, 20) == [1, 4, 16, 20]
    config = parse(["allreduce"])
    assert isinstance(config, AllreduceConfig)
    assert sizes(config.min, config.max)[-2:] == [64 << 20, 256 << 20]


def test_smallest_size_above_the_largest_is_refused() -> None:
    with refused("min-above-max", UsageError, "--min"):
        parse(["allreduce", "--min", "2MiB", "--max", "1MiB"])
