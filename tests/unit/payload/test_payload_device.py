"""Which device a rank takes, by what its environment says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SHOW = """\
import os
from payload.device import choose
choose("auto", 3)
print(os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.mark.parametrize(
    ("visible", "own"),
    [("MIG-a,MIG-b", "MIG-b"), ("MIG-a", "MIG-a"), ("GPU-a,GPU-b", "GPU-a,GPU-b"), ("0,1", "0,1")],
)
def test_of_several_parts_a_rank_names_its_own_to_cuda(visible: str, own: str) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run([sys.executable, "-c", _SHOW], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == own
