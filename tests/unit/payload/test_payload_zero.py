"""ZeRO: who owns what, and training with it on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from payload.comm.base import Solo
from payload.device.base import Array, CpuDevice
from payload.models import mlp
from payload.nn.linear import Linear
from payload.nn.module import LayerContext, Parameter, Segment, Sequential, Tape, Unit
from payload.optim.adamw import AdamW
from payload.optim.precision import PRECISIONS
from payload.parallel.buffers import make_layout
from payload.parallel.mesh import EngineOptions, alone
from payload.parallel.zero import FlatStorage
from tests.support.doubles.layers import batch_of, engine_of
from tests.support.doubles.strict import Strict

_CONTEXT = LayerContext(CpuDevice())


class _Borrower:
    """Uses what another layer has."""

    def __init__(self, *parameters: Parameter) -> None:
        self.parameters = parameters

    def forward(self, x: Array, tape: Tape) -> Array:  # noqa: ARG002
        return x

    def backward(self, dy: Array, tape: Tape) -> Array:  # noqa: ARG002
        return dy


def _units() -> list[Unit]:
    """Of 6, 0 and 8 numbers, and one that uses the last 2 of these."""
    first = Linear(_CONTEXT, "a", 2, 3, bias=False)
    second = Linear(_CONTEXT, "b", 3, 2)
    borrower = _Borrower(second.parameters[1])
    return [Unit("a", first), Unit("none", Sequential()), Unit("b", second), Unit("c", borrower)]


def _named(segments: Sequence[Segment]) -> list[tuple[str, int, int, int]]:
    return [(s.parameter.name, s.start, s.stop, s.offset) for s in segments]


def test_buckets_fill_from_the_last_unit_and_are_padded() -> None:
    layout = make_layout(_units(), min_size=8, parts=4)
    assert [(bucket.start, bucket.stop) for bucket in layout.buckets] == [(0, 8), (8, 16)]
    assert [[g.number for g in layout.completes[unit]] for unit in ("a", "none", "b", "c")] == [
        [0],
        [],
        [1],
        [],
    ]
    assert [[g.number for g in layout.uses[unit]] for unit in ("a", "none", "b", "c")] == [
        [0],
        [],
        [1],
        [1],
    ]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_are_of_one_size_and_cover_every_number_once(parts: int) -> None:
    layouts = [make_layout(_units(), min_size=1, parts=parts, rank=rank) for rank in range(parts)]
    owned = [
        (s.parameter.name, s.offset, s.stop - s.start)
        for layout in layouts
        for s in layout.segments()
    ]
    for name, size in (("a.weight", 6), ("b.weight", 6), ("b.bias", 2)):
        numbers = [
            n
            for owner, offset, count in owned
            if owner == name
            for n in range(offset, offset + count)
        ]
        assert sorted(numbers) == list(range(size))
    assert {layout.owned_size for layout in layouts} == {layouts[0].size // parts}


def test_segments_of_a_part_name_tensors_and_positions() -> None:
    segments = make_layout(_units(), min_size=8, parts=2, rank=1).segments()
    assert _named(segments) == [("a.weight", 0, 3, 3), ("b.weight", 3, 5, 4), ("b.bias", 5, 7, 0)]


def test_layout_begins_with_parameters_that_stages_share() -> None:
    units = _units()
    shared = Unit("tied", units[2].layer)
    for others in (units, units[2:], [units[0], units[3]]):
        layout = make_layout(others, min_size=1 << 20, parts=3, rank=1, tied=shared)
        assert _named(layout.segments())[0] == ("b.weight", 0, 3, 3)
        assert [bucket.number for bucket in layout.completes["tied"]] == [0]
        assert layout.buckets[0].stop == 9


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_optimizer_takes_the_same_steps_on_the_host(precision: str, zero: int) -> None:
    device = Strict()
    formats = PRECISIONS[precision]
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, 4))
    batch = batch_of(device, x, rng.integers(0, 3, 6), formats.compute)

    def train(*, offload: bool) -> tuple[list[float], Array]:
        units = mlp.build(LayerContext(device), inputs=4, classes=3, hidden=(5,))
        engine = engine_of(
            device, alone(), units, AdamW, precision=formats, zero=zero, offload=offload
        )
        losses = [engine.step([batch], targets=6, iteration=i, lr=0.01).loss for i in range(4)]
        arrays = (engine.storage.master_weights, *engine.optimizer.state.values())
        assert [isinstance(array, np.ndarray) for array in arrays] == [offload] * 3
        assert not isinstance(engine.storage.weights, np.ndarray)
        values = engine.storage.optimizer_device.to_host(engine.storage.master_weights).copy()
        return losses, values

    losses, values = train(offload=True)
    expected, expected_values = train(offload=False)
    assert losses == expected
    assert (values == expected_values).all()
    assert losses[-1] < losses[0]


class _Second(Solo):
    """The second of two ranks, of which the first has begun with other weights."""

    rank = 1
    size = 2

    def broadcast(self, array: Array, root: int = 0) -> None:
        assert root == 0
        array[...] = 7


def test_ranks_start_from_rank_0s_weights() -> None:
    assert (
        FlatStorage(CpuDevice(), _units(), _Second(), EngineOptions(seed=1)).master_weights == 7
    ).all()


def test_offload_on_a_cpu_has_no_effect() -> None:
    storage = FlatStorage(CpuDevice(), _units(), alone().dp, EngineOptions(seed=0, offload=True))
    assert storage.weights is storage.master_weights
    assert storage.grads is storage.grad_buffer
