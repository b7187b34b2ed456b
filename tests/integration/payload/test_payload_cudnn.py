"""cuDNN itself has a plan for every graph of the payload's models, on an H200 that is not here.

Needs `pip install nvidia-cudnn-frontend nvidia-cudnn-cu12` (1.3 GB), which no other test needs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_DRIVER = _ROOT / "tests" / "support" / "nvidia" / "driver.c"
_OPERATIONS = {
    "convolution",
    "convolution_input_gradient",
    "convolution_weight_gradient",
    "batch_norm",
    "batch_norm_gradients",
    "channel_sums",
    "scale_and_shift",
    "normalised_sums",
    "normalised_gradient",
    "layer_norm",
    "layer_norm_gradients",
    "attention",
    "attention_gradients",
    "gelu",
    "gelu_gradient",
    "add_relu",
    "relu_gradient",
}


def _library_folder() -> Path:
    pytest.importorskip("cudnn", exc_type=ImportError)
    found = importlib.util.find_spec("nvidia.cudnn")
    if found is None or not found.submodule_search_locations:
        pytest.skip("nvidia-cudnn-cu12 is not installed")
    return Path(next(iter(found.submodule_search_locations))) / "lib"


def test_cudnn_has_a_plan_for_every_graph(tmp_path: Path) -> None:
    folder = _library_folder()
    for name in ("libcuda.so.1", "libcudart.so.12"):
        command = ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        subprocess.run([*command, "-o", tmp_path / name, _DRIVER], check=True)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{tmp_path}:{folder}",
        "CUDNN_FRONTEND_CUDART_LIB_NAME": "libcudart.so.12",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path]),
    }
    program = Path(__file__).parent / "programs" / "cudnn_plans.py"
    done = subprocess.run(
        [sys.executable, program, "bf16", "deterministic"],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    result = json.loads(done.stdout)
    assert result["refused"] == []
    assert set(result["planned"]) == _OPERATIONS
    assert result["workspace"] <= 1 << 30
