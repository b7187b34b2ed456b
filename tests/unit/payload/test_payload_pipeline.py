"""Where units are placed on a pipeline, and in which order micro-batches pass through it."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from payload.device.base import CpuDevice
from payload.errors import UsageError
from payload.models import mlp
from payload.nn.linear import Linear
from payload.nn.module import LayerContext, Sequential, Unit
from payload.parallel.pipeline import idle_share, one_forward_one_backward, split
from tests.support.messages import refused

_CONTEXT = LayerContext(CpuDevice())


def _units(flops: list[float]) -> list[Unit]:
    return [Unit(str(number), Sequential(), flops=each) for number, each in enumerate(flops)]


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_heaviest_stage_is_as_light_as_can_be(stages: int) -> None:
    rng = np.random.default_rng(stages)
    for _ in range(20):
        units = _units(list(rng.integers(0, 50, 8)))
        found = split(units, stages)
        assert [unit for stage in found for unit in stage] == units
        assert all(found)
        cuts = ([0, *inner, 8] for inner in combinations(range(1, 8), stages - 1))
        best = min(max(sum(u.flops for u in units[a:b]) for a, b in pairwise(cut)) for cut in cuts)
        assert max(sum(unit.flops for unit in stage) for stage in found) == best


def test_parameters_decide_where_work_does_not() -> None:
    sizes = (50, 2, 2, 2)
    units = [Unit(str(n), Linear(_CONTEXT, str(n), n, n)) for n in sizes]
    assert [len(stage) for stage in split(units, 2)] == [1, 3]


def test_pipeline_with_more_stages_than_units_is_refused() -> None:
    with refused("too-many-stages", UsageError, "--pp 4", "3 units"):
        split(mlp.build(_CONTEXT, inputs=2, classes=2, hidden=(2, 2)), 4)


@pytest.mark.parametrize(
    ("micro_batches", "later"), [(0, 2), (1, 0), (1, 3), (4, 0), (4, 2), (2, 5)]
)
def test_schedule_runs_each_micro_batch_forward_then_backward(
    micro_batches: int, later: int
) -> None:
    flying = 0
    most = 0
    for forward in one_forward_one_backward(micro_batches, later):
        flying += 1 if forward else -1
        most = max(most, flying)
        assert flying >= 0
    assert flying == 0
    assert most == min(micro_batches, later + 1)


def test_stage_waits_while_the_pipeline_fills_and_empties() -> None:
    assert idle_share(4, 1) == 0.75
    assert idle_share(4, 13) == pytest.approx(3 / 16)
