"""benchmarks/gpu.py on CPUs: each of its parts runs, and both sides learn alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]


def test_gpu_benchmark_tests_itself_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": ""}
    program = _ROOT / "benchmarks" / "gpu.py"
    done = subprocess.run(
        [sys.executable, program, "--out", tmp_path],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert "mean nothing" in done.stdout
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert (result["meaningless"], result["failed"], result["left_out"]) == (True, {}, [])
    models = {"resnet50", "gpt", "bert-128", "bert-512", "vit"}
    assert set(result["parts"]) == {*models, "products", "checkpoint"}
    for name in models:
        figures = result["parts"][name]
        assert set(figures["sides"]) == {"payload plain", "PyTorch eager"}
        assert figures["failed"] == {}
        # A share of the loss. Each CPU and BLAS rounds sums in an order of its own, in steps of
        # 1.2e-7 in float32; a layer that computes something else differs by far more.
        assert figures["largest_loss_difference"] < 1e-5
        for side in figures["sides"].values():
            assert side["per_s"] > 0
            assert side["losses"][-1] < side["losses"][0]
    assert set(result["parts"]["products"]["tflops"]) == {"PyTorch", "payload plain"}
    checkpoint = result["parts"]["checkpoint"]
    assert checkpoint["bytes"] > 0
    assert len(checkpoint["stalls_s"]) == len(checkpoint["delays_s"]) == 2


def test_gpu_benchmark_leaves_out_what_is_too_late(tmp_path: Path) -> None:
    command = [sys.executable, _ROOT / "benchmarks" / "gpu.py", "--out", tmp_path, "--budget", "-1"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "gpt"], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    assert "left out, for lack of time: gpt" in done.stdout
