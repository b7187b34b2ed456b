"""gemm: products and their sums, checked by formula on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from payload.cli.arguments import parse
from payload.cli.config import GemmConfig
from payload.cli.values import GemmSize
from payload.comm.base import Solo
from payload.commands.gemm import _Layer, gemm
from payload.device.base import Device
from tests.unit.payload.conftest import Runner, records


def test_every_rank_multiplies_and_the_sums_are_right(mpirun: Runner, tmp_path: Path) -> None:
    kinds = ("bfloat16", "float16", "float32", "float64")
    arguments = ("--sizes", "64,33x700x17", "--dtypes", ",".join(kinds), "--iterations", "3")
    answer = mpirun(3, "gemm", *arguments, "--comm", "ring", "--out", str(tmp_path))
    *lines, last = answer.stdout.splitlines()
    told = json.loads(last)
    assert told["ok"]
    assert [place["rank"] for place in told["ranks"]] == [0, 1, 2]
    assert [(r["m"], r["k"], r["n"], r["dtype"]) for r in told["results"]] == [
        (*size, kind) for size in ((64, 64, 64), (33, 700, 17)) for kind in kinds
    ]
    for result in told["results"]:
        assert result["ok"]
        assert result["wrong_rows"] == [0, 0, 0]
        assert len(result["gflops"]) == 3
        assert min(result["gflops"]) > 0
        assert result["sum_bytes"] == result["m"] * result["n"] * (
            8 if result["dtype"] == "float64" else 4
        )
    assert len(lines) == 8
    assert all(line.endswith("; right") for line in lines)
    written = records(tmp_path, file="gemm.jsonl")
    assert [{k: v for k, v in one.items() if k not in ("kind", "time")} for one in written] == told[
        "results"
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_products_are_right_on_any_device(device: Device, dtype: str, tmp_path: Path) -> None:
    size = GemmSize(33, 64, 17)
    config = GemmConfig(
        (size,), (dtype,), warmup=1, iterations=1, seed=0, device="auto", out=tmp_path
    )
    (record,) = gemm(config, device, Solo())
    assert (record["ok"], record["wrong_rows"]) == (True, [0])


def test_a_rounded_product_is_right_and_another_is_not(device: Device) -> None:
    comm = Solo()
    layer = _Layer.draw(device, comm, GemmSize(8, 4096, 33), "bfloat16", seed=0)
    exact = device.matmul(layer.a.astype("float32"), layer.b.astype("float32"))
    rounded = exact.astype(layer.a.dtype).astype("float32")
    assert int((rounded != exact).sum()) > 0
    assert layer.wrong_rows(device, comm, rounded, rounded) == 0
    assert layer.wrong_rows(device, comm, rounded, exact[::-1]) == 8


def test_a_wrong_sum_is_found_on_the_rank_that_has_it(program: Runner, tmp_path: Path) -> None:
    answer = program(2, "liar.py", "sum", "gemm", str(tmp_path))
    *lines, last = answer.stdout.splitlines()
    assert json.loads(last)["ok"] is False
    assert json.loads(last)["results"][0]["wrong_rows"] == [0, 1]
    assert lines[0].endswith("WRONG in 1 rows")


def test_sizes_and_dtypes() -> None:
    config = parse(["gemm", "--sizes", "8,2x3x4", "--dtypes", "float64,float16"])
    assert isinstance(config, GemmConfig)
    assert config.sizes == (GemmSize(8, 8, 8), GemmSize(2, 3, 4))
    assert config.dtypes == ("float64", "float16")
