"""gemm: products and their sums, checked by formula on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.payload.conftest import Runner
from tests.support.payload import records


def test_gemm_multiplies_on_every_rank_with_right_sums(mpirun: Runner, tmp_path: Path) -> None:
    kinds = ("bfloat16", "float16", "float32", "float64")
    arguments = ("--sizes", "64,33x700x17", "--dtypes", ",".join(kinds), "--iterations", "3")
    answer = mpirun(3, "gemm", *arguments, "--comm", "ring", "--out", str(tmp_path))
    *lines, last = answer.stdout.splitlines()
    answer_json = json.loads(last)
    assert answer_json["ok"]
    assert [place["rank"] for place in answer_json["ranks"]] == [0, 1, 2]
    assert [(r["m"], r["k"], r["n"], r["dtype"]) for r in answer_json["results"]] == [
        (*size, kind) for size in ((64, 64, 64), (33, 700, 17)) for kind in kinds
    ]
    for result in answer_json["results"]:
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
    assert [
        {k: v for k, v in one.items() if k not in ("kind", "time")} for one in written
    ] == answer_json["results"]


def test_wrong_sum_is_found_on_the_rank_that_has_it(program: Runner, tmp_path: Path) -> None:
    answer = program(2, "liar.py", "sum", "gemm", str(tmp_path))
    *lines, last = answer.stdout.splitlines()
    assert json.loads(last)["ok"] is False
    assert json.loads(last)["results"][0]["wrong_rows"] == [0, 1]
    assert lines[0].endswith("WRONG in 1 rows")
