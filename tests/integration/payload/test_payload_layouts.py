"""Every layout trains as one rank does: the same losses, from the same seeds, for any split of the
work.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

from payload.device import choose
from payload.device.base import Device
from payload.parallel.mesh import alone as on_one_rank
from tests.integration.payload.conftest import Runner
from tests.integration.payload.programs.layouts import (
    CORE,
    FUSED,
    MODELS,
    NCCL,
    Case,
    fuse_all,
    train,
)
from tests.support.doubles.strict import Strict

Reference = Callable[[str, int], dict[str, Any]]
# iterations: batches of all sizes, each of them four times
SHORT = 3
LONG = 12
TOLERANCES = {"losses": 1e-5, "norms": 1e-4, "evaluation": 1e-5}


@pytest.fixture(scope="module")
def reference(real_device: Device) -> Reference:
    """What one rank makes of a model, its batches uncut."""

    @cache
    def of(model: str, iterations: int) -> dict[str, Any]:
        return train(Case(model), on_one_rank(), real_device, iterations)

    return of


def _compare(
    answer: subprocess.CompletedProcess[str],
    cases: list[Case],
    reference: Reference,
    iterations: int,
    tolerances: Mapping[str, float] = TOLERANCES,
) -> None:
    found = json.loads(answer.stdout)
    assert list(found) == [str(case) for case in cases]
    wrong = {}
    for case in cases:
        actual = found[str(case)]
        expected = reference(case.model, iterations)
        for figure, tolerance in tolerances.items():
            if actual[figure] != pytest.approx(expected[figure], rel=tolerance):
                wrong[str(case), figure] = (actual[figure], expected[figure])
    assert not wrong


def test_layouts_follow_one_rank(program: Runner, reference: Reference) -> None:
    answer = program(4, "layouts.py", "core", str(SHORT), seconds=180)
    _compare(answer, CORE[4], reference, SHORT)


def test_layouts_over_the_double_of_cupy(program: Runner, reference: Reference) -> None:
    answer = program(2, "layouts.py", "core", str(SHORT), "double")
    _compare(answer, CORE[2], reference, SHORT)


@pytest.mark.platform("stand-in", "cuda")
def test_layouts_over_nccl_follow_one_rank(program: Runner, reference: Reference) -> None:
    answer = program(2, "layouts.py", "nccl", str(SHORT), "double")
    _compare(answer, NCCL, reference, SHORT)


@pytest.mark.platform("stand-in", "cuda")
@pytest.mark.parametrize("kind", ["real", "double"])
def test_fused_layouts_follow_one_rank(program: Runner, real_device: Device, kind: str) -> None:
    """On a machine with one GPU, both ranks share it. A sum of other parts rounds in bfloat16."""
    device: Device = Strict()
    if kind == "real":
        if real_device.gpu is None:
            pytest.skip("there is no GPU")
        pytest.importorskip("cudnn")
        pytest.importorskip("nvmath")
        device = choose("gpu", 0)
    fuse_all(device)

    @cache
    def one_rank(model: str, iterations: int) -> dict[str, Any]:
        return train(Case(model, precision="bf16"), on_one_rank(), device, iterations)

    words = ["double"] if kind == "double" else []
    answer = program(2, "layouts.py", "fused", str(SHORT), *words, seconds=180)
    _compare(answer, FUSED, one_rank, SHORT, {"losses": 5e-3, "norms": 0.05})


@pytest.mark.parametrize("model", MODELS)
def test_reference_is_clipped_now_and_then_and_moves(reference: Reference, model: str) -> None:
    found = reference(model, LONG)
    losses = found["losses"]
    norms = found["norms"]
    assert max(losses) > 1.2 * min(losses)
    assert min(norms) < MODELS[model].clip < max(norms)
