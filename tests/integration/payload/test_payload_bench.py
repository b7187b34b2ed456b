"""bench: sides of one job that take turns, and what they tell together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.cli.arguments import parse
from payload.cli.config import BenchConfig
from payload.comm.base import Solo
from payload.commands.bench import BenchCase, SilentCommunicator, sides_of
from payload.errors import UsageError
from tests.integration.payload.conftest import Runner
from tests.support.messages import refused
from tests.support.payload import records


def config(*flags: str) -> BenchConfig:
    parsed = parse(["bench", *flags])
    assert isinstance(parsed, BenchConfig)
    return parsed


def test_sides_take_turns_and_are_compared(mpirun: Runner, tmp_path: Path) -> None:
    flags = ("--hidden", "16", "--global-batch-size", "24", "--peak-tflops", "0.5", "--warmup", "1")
    answer = mpirun(3, "bench", *flags, "--turn", "2", "--rounds", "3", "--out", str(tmp_path))
    *table, last = answer.stdout.splitlines()
    sides: list[dict[str, Any]] = json.loads(last)["sides"]
    assert [(s["side"], s["ranks"], s["global_batch_size"], s["iterations"]) for s in sides] == [
        ("all", 3, 24, 6),
        ("all, silent", 3, 24, 6),
        ("strong 2", 2, 24, 6),
        ("weak 2", 2, 16, 6),
        ("strong 1", 1, 24, 6),
        ("weak 1", 1, 8, 6),
    ]
    flops = 3 * 2 * (64 * 16 + 16 * 10)
    for side in sides:
        assert side["samples_per_s"] == pytest.approx(
            side["global_batch_size"] * 1e3 / side["iteration_ms"]
        )
        assert side["mfu"] == pytest.approx(
            flops * side["samples_per_s"] / (side["ranks"] * 0.5e12)
        )
        assert side["tokens_per_s"] is None
        assert 0 <= side["comm_exposed_ms"] <= side["comm_total_ms"]
    whole, silent, strong2, weak2, strong1, weak1 = sides
    assert whole["silence_saves_ms"] == pytest.approx(
        whole["iteration_ms"] - silent["iteration_ms"]
    )
    assert strong1["strong_efficiency"] == weak1["weak_efficiency"] == 1
    assert strong1["comm_exposed_ms"] == 0
    for many, one, kind in (
        (whole, strong1, "strong"),
        (strong2, strong1, "strong"),
        (weak2, weak1, "weak"),
    ):
        efficiency = many["samples_per_s"] / one["samples_per_s"] / many["ranks"]
        assert many[f"{kind}_efficiency"] == pytest.approx(efficiency)
    assert [line.split("  ")[0] for line in table[1:7]] == [side["side"] for side in sides]
    assert table[7].startswith("without the sums")
    written = records(tmp_path, file="bench.jsonl")
    assert [one["side"] for one in written] == [side["side"] for side in sides]


def test_sides_of_a_bench_halve_the_number_of_ranks() -> None:
    assert [side.ranks for side in sides_of(config(), 8)] == [8, 8, 4, 4, 2, 2, 1, 1]
    assert sides_of(config(), 1) == [BenchCase("all", 1, 64)]
    assert [side.name for side in sides_of(config("--ranks", "3,8"), 8)][2:] == [
        "strong 3",
        "weak 3",
    ]
    assert [side.ranks for side in sides_of(config("--tp", "2"), 8)] == [8, 8, 4, 4, 2, 2]
    with refused("ranks-not-divisible", UsageError, "--ranks 3", "which is 2"):
        sides_of(config("--tp", "2", "--ranks", "3"), 8)
    with refused("too-few-ranks", UsageError, "--ranks 9", "8 ranks"):
        sides_of(config("--ranks", "9"), 8)


class Third(Solo):
    """The second rank of three, as far as arrays of its own go."""

    rank = 1
    size = 3


def test_silent_communicator_moves_nothing_between_ranks() -> None:
    comm = SilentCommunicator(Third())
    array = np.arange(6.0)
    comm.allreduce(array)
    comm.iallreduce(array).wait()
    assert array.tolist() == [0, 1, 2, 3, 4, 5]
    out = np.empty(2)
    comm.ireduce_scatter(array, out).wait()
    assert out.tolist() == [2, 3]
    comm.iallgather_into(np.array([7.0, 8.0]), array).wait()
    assert array.tolist() == [0, 1, 7, 8, 4, 5]


def gpu_sides(program: Runner, out: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    answer = program(3, "bench_gpus.py", str(out), *words)
    *table, _ = answer.stdout.splitlines()
    return records(out, file="bench.jsonl"), "\n".join(table)


def test_bench_tells_what_the_gpus_of_each_side_did(program: Runner, tmp_path: Path) -> None:
    """A GPU that two ranks share counts once: 24 samples in 0.6 s, at 200 W on all ranks."""
    sides, table = gpu_sides(program, tmp_path, "2")
    figures = {
        side["side"]: (
            side["gpu_idle_percent"],
            side["gpu_bandwidth_percent"],
            side["samples_per_joule"],
        )
        for side in sides
    }
    on_all = (30, 50, 0.2)
    on_one = (20, 50, 0.4)
    assert figures == {
        "all": pytest.approx(on_all),
        "all, silent": pytest.approx(on_all),
        "strong 1": pytest.approx(on_one),
        "weak 1": pytest.approx((20, 50, 8 / 60)),
    }
    assert all("gpu_tensor_percent" not in side for side in sides)
    assert "tensor" not in table
    # Half of 4,917 GB/s.
    assert "2458" in table.splitlines()[-1]


def test_energy_of_a_gpu_with_other_programs_is_left_out(program: Runner, tmp_path: Path) -> None:
    sides, table = gpu_sides(program, tmp_path, "2", "77")
    assert [side["gpu_idle_percent"] for side in sides] == pytest.approx([30, 30, 20, 20])
    assert not any("samples_per_joule" in side for side in sides)
    assert "samples/J" not in table


def test_bench_with_turns_too_short_for_the_gpus_tells_the_length(
    program: Runner, tmp_path: Path
) -> None:
    sides, table = gpu_sides(program, tmp_path, "1")
    assert not any(name.startswith("gpu_") for side in sides for name in side)
    assert "--turn" in table.splitlines()[-1]
