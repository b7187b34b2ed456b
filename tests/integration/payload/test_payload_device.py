"""Which part of a GPU a rank takes, by what its environment says."""

from __future__ import annotations

import pytest

from tests.integration.payload.conftest import python

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
def test_rank_on_a_gpu_in_parts_selects_its_part(visible: str, own: str) -> None:
    assert python("-c", _SHOW, CUDA_VISIBLE_DEVICES=visible).stdout.strip() == own
