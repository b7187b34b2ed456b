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
def test_of_several_parts_a_rank_names_its_own_to_cuda(visible: str, own: str) -> None:
    assert python("-c", _SHOW, CUDA_VISIBLE_DEVICES=visible).stdout.strip() == own
