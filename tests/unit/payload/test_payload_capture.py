"""Micro-batches as CUDA graphs: the same numbers as without graphs, to the last bit.

Here on a double of streams, graphs and pools; with a GPU and the libraries also on the real ones.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from payload.comm.base import CompletedOperation, Pending, Solo
from payload.data.loader import IterationBatches, IterationSamples
from payload.device import choose, fuse
from payload.device.base import Array, CpuDevice, Device
from payload.errors import UsageError
from payload.models import resnet
from payload.nn.linear import Linear
from payload.nn.module import LayerContext, Parameter, Sequential, Tape, Unit
from payload.optim.adamw import AdamW
from payload.optim.precision import PRECISIONS, LossScale
from payload.parallel.engine import Engine, stages_of
from payload.parallel.mesh import Mesh, alone
from payload.parallel.pipeline import MicroBatch
from payload.training.loop import Trainer
from tests.support.doubles.capture import Capturing, Graph, MemoryPool, Stream
from tests.support.doubles.layers import batch_of, cut, engine_of
from tests.unit.payload.test_payload_fused import MODELS

pytestmark = pytest.mark.platform("stand-in", "cuda")


@pytest.fixture(params=["real", "strict"])
def make_device(request: pytest.FixtureRequest, real_device: Device) -> Iterator[Any]:
    """Yield a function that makes a GPU which records graphs: the real one, and the double."""
    if request.param == "strict":
        yield Capturing
        return
    if real_device.gpu is None:
        pytest.skip("there is no GPU")
    pytest.importorskip("cudnn")
    pytest.importorskip("nvmath")

    def real() -> Device:
        device = choose("gpu", 0)
        fuse(device, deterministic=True)
        return device

    yield real


class Run:
    """A model in training, and the samples that it trains on."""

    def __init__(
        self,
        device: Device,
        name: str,
        *,
        capture: bool,
        precision: str = "bf16",
        loss_scale: LossScale | None = None,
        options: dict[str, Any] | None = None,
        mesh: Mesh | None = None,
        units: Sequence[Unit] = (),
        **sizes: Any,
    ) -> None:
        module, usual, (x, targets), _ = MODELS[name]
        compute = PRECISIONS[precision].compute
        self.engine: Engine = engine_of(
            device,
            mesh or alone(),
            units or module.build(LayerContext(device), **{**usual, **sizes}),
            AdamW,
            precision=PRECISIONS[precision],
            loss_scale=loss_scale,
            seed=3,
            capture=capture,
            **(options or {}),
        )
        self._batch = batch_of(device, x if x.dtype.kind == "i" else x.astype(compute), targets)
        self.done = 0

    def step(self, *, samples: int = 8, pieces: int = 2) -> tuple[float, float, float]:
        """Train on so many samples, from another place in each iteration."""
        self.done += 1
        order = self.engine.device.asarray((np.arange(samples) + 3 * self.done) % 8)
        whole = self._batch
        batch = MicroBatch(whole.inputs[order], whole.targets[order], whole.samples[order])
        targets = batch.targets.size
        found = self.engine.step(cut(batch, pieces), targets=targets, iteration=self.done, lr=1e-3)
        return found.loss, found.grad_norm, found.loss_scale

    def evaluate(self) -> float:
        return self.engine.evaluate(cut(self._batch, 2)).loss

    def arrays(self) -> list[Array]:
        """Weights, the optimizer's state, and running statistics."""
        engine = self.engine
        states = [getattr(unit.layer, "state", {}) for unit in engine.units]
        every = [engine.storage.master_weights, *engine.optimizer.state.values()]
        return every + [array for state in states for array in state.values()]

    def host(self) -> list[Array]:
        return [np.array(self.engine.device.to_host(array)) for array in self.arrays()]


def _compare(
    make_device: Callable[[], Device],
    act: Callable[[Run], Any],
    *,
    graphs: int,
    name: str = "mlp",
    **settings: Any,
) -> Any:
    """Do the same with and without graphs. Return what ``act`` returned."""
    results = []
    for capture in (False, True):
        run = Run(make_device(), name, capture=capture, **settings)
        results.append((act(run), run.host()))
        if run.engine.captured:
            assert (run.engine.take_capture_failure(), run.engine.captured.graphs) == ("", graphs)
    (plain, arrays), (captured, others) = results
    # Norms may be NaN.
    np.testing.assert_array_equal(plain, captured)
    for one, other in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(one, other)
    return captured


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn", "vit", "bert"])
def test_captured_model_equals_itself_uncaptured(name: str, make_device: Any) -> None:
    """Micro-batches, shorter last batches, and evaluations between, with moving statistics."""

    def act(run: Run) -> list[Any]:
        lengths = (8, 8, 4, 8, 8, 4, 8, 4)
        return [(*run.step(samples=samples), run.evaluate()) for samples in lengths]

    # Of each size, one that writes gradients and one that adds to them.
    losses = _compare(make_device, act, graphs=4, name=name)
    assert losses[-2][0] < losses[0][0]


def test_captured_dropout_draws_new_numbers_in_each_iteration(make_device: Any) -> None:
    _compare(
        make_device, lambda run: [run.step() for _ in range(5)], graphs=2, name="bert", dropout=0.3
    )


def test_loss_scale_may_change_between_launches(make_device: Any) -> None:
    scale = LossScale(2.0**30, dynamic=True, interval=2)

    def act(run: Run) -> list[Any]:
        run.engine.loss_scale = LossScale(scale.value, dynamic=True, interval=2)
        return [run.step() for _ in range(40)]

    steps = _compare(make_device, act, graphs=2, precision="fp16")
    scales = [one[2] for one in steps]
    # It fell with each overflow, then rose again.
    assert min(scales) < scales[0]
    assert min(scales) < scales[-1]


def test_recomputed_passes_are_captured(make_device: Any) -> None:
    _compare(
        make_device,
        lambda run: [run.step() for _ in range(4)],
        graphs=2,
        name="cnn",
        options={"recompute": True},
    )


def test_resumed_run_captures_anew(make_device: Any) -> None:
    whole = Run(make_device(), "cnn", capture=True)
    expected = [whole.step() for _ in range(6)]
    first = Run(make_device(), "cnn", capture=True)
    found = [first.step() for _ in range(3)]
    second = Run(make_device(), "cnn", capture=True)
    for array, saved in zip(second.arrays(), first.host(), strict=True):
        array[...] = second.engine.device.asarray(saved)
    second.engine.storage.publish()
    second.engine.optimizer.updates = first.engine.optimizer.updates
    second.done = first.done
    assert [*found, *(second.step() for _ in range(3))] == expected
    for one, other in zip(whole.host(), second.host(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_only_the_first_shapes_are_captured(make_device: Any) -> None:
    """Of each size, one graph that writes gradients and one that adds to them."""

    def act(run: Run) -> list[Any]:
        return [run.step(samples=samples) for samples in (2, 4, 6, 8, 10, 7) * 3]

    _compare(make_device, act, graphs=8)


def test_micro_batch_without_samples_runs_uncaptured(make_device: Any) -> None:
    _compare(make_device, lambda run: [run.step(samples=1, pieces=2) for _ in range(3)], graphs=1)


class _Looking(Linear):
    """A layer whose computation depends on the numbers."""

    def forward(self, x: Array, tape: Tape) -> Array:
        y = super().forward(x, tape)
        if float(y.sum()) > 0:
            y *= 2
        return y


def test_model_that_cannot_be_captured_trains_without_graphs(make_device: Any) -> None:
    results = []
    for capture in (False, True):
        device = make_device()
        context = LayerContext(device)
        units = [Unit("a", Sequential(_Looking(context, "a", 12, 8), Linear(context, "b", 8, 4)))]
        run = Run(device, "mlp", capture=capture, units=units)
        results.append(([run.step() for _ in range(4)], run.host()))
        failure = run.engine.take_capture_failure()
        assert ("captur" in failure) == capture
        assert run.engine.take_capture_failure() == ""
    assert results[0][0] == results[1][0]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_training_tells_once_why_nothing_is_captured() -> None:
    device = Capturing()
    units = [Unit("a", _Looking(LayerContext(device), "a", 12, 4))]
    engine = Run(device, "mlp", capture=True, units=units).engine
    lines: list[str] = []
    unused: Any = None
    metrics: Any = SimpleNamespace(print_line=lines.append, iteration=lambda *_, **__: None)
    schedule: Any = SimpleNamespace(at=lambda _: 1e-3)
    trainer = Trainer(engine, unused, unused, schedule, metrics, unused)
    x, targets = MODELS["mlp"][2]
    batch = batch_of(device, x.astype(PRECISIONS["bf16"].compute), targets)
    for iteration in range(1, 5):
        slot = IterationSamples(iteration, 1, ends_epoch=False, indices=np.arange(8))
        trainer.step(iteration, IterationBatches(slot, [batch], 8), ())
    assert len(lines) == 1
    assert "--capture" in lines[0]
    assert "RuntimeError" in lines[0]


def test_graph_for_which_memory_is_short_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's pool then frees memory that the graph needs."""
    monkeypatch.setattr(MemoryPool, "lost", 512)
    before = Graph.launches
    device = Capturing()
    run = Run(device, "mlp", capture=True)
    plain = Run(Capturing(), "mlp", capture=False)
    assert [run.step() for _ in range(3)] == [plain.step() for _ in range(3)]
    assert "MemoryError" in run.engine.take_capture_failure()
    assert Graph.launches == before
    # What the attempt took was given back.
    gc.collect()
    assert not device._recorders


def test_memory_of_graphs_is_counted() -> None:
    device = Capturing()
    run = Run(device, "mlp", capture=True)
    for _ in range(3):
        run.step()
    assert sum(recorder.nbytes for recorder in device._recorders) > 0
    assert device.xp.get_default_memory_pool().total_bytes() == 0
    gc.collect()
    del run
    gc.collect()
    assert not device._recorders


class _Two(Solo):
    """The first of two ranks with the same samples."""

    size = 2

    def iallreduce(self, array: Array) -> Pending:
        array *= 2
        return CompletedOperation()


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_summed_over_ranks_after_a_launch(overlap: bool, make_device: Any) -> None:
    _compare(
        make_device,
        lambda run: [run.step() for _ in range(4)],
        graphs=2,
        mesh=replace(alone(), dp=_Two()),
        options={"overlap": overlap, "bucket_bytes": 1},
    )


def test_batch_norm_over_ranks_is_not_captured() -> None:
    context = LayerContext(CpuDevice(), dp=_Two())
    units = resnet.build(context, classes=4, side=16, depth=18, width=8)
    stages_of(units, tp=1, pp=1, recompute=True)
    with pytest.raises(UsageError) as caught:
        stages_of(units, tp=1, pp=1, recompute=False, capture=True)
    assert caught.value.code == "bad-settings"
    assert "batch norm" in str(caught.value)


def _captured(act: Callable[[Any], Any], *, non_blocking: bool = True) -> Graph:
    device = Capturing()
    x = device.xp.ones(4, "float32")
    with Stream(non_blocking=non_blocking) as stream:
        stream.begin_capture()
        try:
            act((device, x))
        finally:
            graph = stream.end_capture()
    return graph


@pytest.mark.parametrize(
    "act",
    [
        lambda given: float(given[1].sum()),
        lambda given: given[1].get(),
        lambda given: given[0].xp.flatnonzero(given[1]),
        lambda given: given[1] @ given[1],
        lambda given: given[0].xp.tensordot(given[1], given[1], 1),
        lambda given: given[0].matmul(given[1][None], given[1][:, None]),
        lambda given: given[0].xp.asarray(np.ones(3)),
        lambda given: given[1].set(np.ones(4, "float32")),
        lambda given: given[0].xp.get_default_memory_pool().free_all_blocks(),
    ],
)
def test_double_refuses_while_capturing(act: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)captur"):
        _captured(act)


def test_double_captures_no_blocking_stream() -> None:
    with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureImplicit"):
        Stream().begin_capture()


def test_double_refuses_graphs_whose_memory_others_got() -> None:
    graph = _captured(lambda given: (given[1] + 1) * 2)
    with pytest.raises(AssertionError, match="given to others"):
        graph.launch()


def test_double_runs_captured_work_only_at_launch() -> None:
    device = Capturing()
    x = device.xp.ones(4, "float32")
    factor = [3.0]

    def work() -> Any:
        nonlocal x
        x *= factor[0]
        return x + 1

    captured = device.recorder().capture(work)
    assert x.get().tolist() == [1] * 4
    # Numbers of the host are those of the capture.
    factor[0] = 5.0
    captured.launch()
    captured.launch()
    assert x.get().tolist() == [9] * 4
    assert captured.result.get().tolist() == [10] * 4


def test_parameters_that_get_no_gradient_are_zero_after_a_launch() -> None:
    device = Capturing()

    def units(context: LayerContext) -> list[Unit]:
        unused = Sequential(Linear(context, "a", 12, 4))
        unused.parameters = [
            *unused.parameters,
            Parameter(context, "unused", (3,), lambda _, shape: np.ones(shape)),
        ]
        return [Unit("a", unused)]

    run = Run(device, "mlp", capture=True, units=units(LayerContext(device)))
    for _ in range(2):
        run.step()
    run.engine.storage.grads[...] = 7
    run.step()
    segment = next(s for s in run.engine.storage.segments if s.parameter.name == "unused")
    grads = device.to_host(run.engine.storage.grads)
    assert grads[segment.start : segment.stop].tolist() == [0] * 3
