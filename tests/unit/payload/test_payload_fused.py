"""Layers and models by cuDNN and cuBLASLt: the same as NumPy computes, as far as 16 bits allow.

Here on doubles of both libraries; with a GPU and the libraries also on the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from payload.comm.base import Solo
from payload.device import choose, fuse, graphs
from payload.device.base import Array, CpuDevice, Device
from payload.errors import PayloadError, RankError
from payload.models import bert, cnn, gpt, mlp, resnet, vit
from payload.nn.activation import GELU
from payload.nn.attention import Attention
from payload.nn.conv import Conv2d
from payload.nn.embedding import Embedding, TiedHead
from payload.nn.linear import Linear
from payload.nn.module import Layer, LayerContext, Recompute, Sequential, Tape, Unit, normal
from payload.nn.norm import BatchNorm, LayerNorm
from payload.optim.adamw import AdamW
from payload.optim.precision import PRECISIONS, Precision, loss_scale
from payload.parallel.mesh import alone
from tests.support.doubles import cublaslt, cudnn
from tests.support.doubles.layers import batch_of, cut, draw, engine_of, stored
from tests.support.doubles.strict import Strict

pytestmark = pytest.mark.platform("stand-in", "cuda")

_HALVES = {"bf16": (ml_dtypes.bfloat16, 2e-2), "fp16": (np.float16, 3e-3)}


@pytest.fixture(params=["real", "strict"])
def fused(request: pytest.FixtureRequest, real_device: Device) -> Iterator[Any]:
    """Yield a GPU with fused kernels: the real one, and the doubles."""
    if request.param == "strict":
        yield Strict.fused()
        return
    if real_device.gpu is None:
        pytest.skip("there is no GPU")
    pytest.importorskip("cudnn")
    pytest.importorskip("nvmath")
    device = choose("gpu", 0)
    fuse(device, deterministic=True)
    yield device


@dataclass(frozen=True)
class Case:
    """A layer, the shape of its input, and the operations that cuDNN computes."""

    make: Callable[[LayerContext], Layer]
    shape: tuple[int, ...]
    operations: set[str]


def _conv(inputs: int, outputs: int, kernel: int, stride: int, **options: Any) -> Case:
    operations = {"convolution", "convolution_input_gradient", "convolution_weight_gradient"}
    if options.get("first"):
        operations.remove("convolution_input_gradient")
    return Case(
        lambda c: Conv2d(
            c, "c", inputs, outputs, kernel, stride=stride, padding=kernel // 2, **options
        ),
        (3, 9, 8, inputs),
        operations,
    )


def _attention(*, causal: bool, width: int = 16, length: int = 6, dropout: float = 0) -> Case:
    return Case(
        lambda c: Attention(c, "a", width, 2, causal=causal, init=normal(0.3), dropout=dropout),
        (3, length, width),
        {"attention", "attention_gradients"},
    )


class _Two(Solo):
    """The first of two ranks with the same samples."""

    size = 2

    def allreduce(self, array: Array) -> None:
        array *= 2


_BATCH_NORM = {"batch_norm", "batch_norm_gradients"}
_BATCH_NORM_IN_PARTS = {
    "channel_sums",
    "scale_and_shift",
    "normalised_sums",
    "normalised_gradient",
}
CASES = {
    "linear": Case(lambda c: Linear(c, "l", 24, 16), (5, 3, 24), set()),
    "linear of odd sizes": Case(lambda c: Linear(c, "l", 7, 5), (9, 7), set()),
    "linear of q, k and v": Case(lambda c: Linear(c, "l", 8, 48, parts=3), (4, 8), set()),
    "linear without bias": Case(lambda c: Linear(c, "l", 8, 3, bias=False), (4, 8), set()),
    "convolution": _conv(8, 16, 3, 1),
    "convolution with stride": _conv(5, 7, 3, 2),
    "convolution 1x1": _conv(8, 4, 1, 1),
    "convolution 1x1 to one channel": _conv(8, 1, 1, 2),
    "convolution of one channel": _conv(1, 8, 5, 1),
    "first convolution": _conv(3, 8, 7, 2, first=True),
    "layer norm": Case(
        lambda c: LayerNorm(c, "n", 24, eps=1e-6),
        (5, 3, 24),
        {"layer_norm", "layer_norm_gradients"},
    ),
    "batch norm": Case(lambda c: BatchNorm(c, "n", 8), (4, 3, 5, 8), _BATCH_NORM),
    "batch norm with relu": Case(
        lambda c: BatchNorm(c, "n", 16, relu=True), (4, 3, 3, 16), {*_BATCH_NORM, "relu_gradient"}
    ),
    "batch norm of 6 channels": Case(
        lambda c: BatchNorm(c, "n", 6), (4, 3, 3, 6), _BATCH_NORM_IN_PARTS
    ),
    "batch norm with relu over ranks": Case(
        lambda c: BatchNorm(replace(c, dp=_Two()), "n", 8, relu=True),
        (4, 3, 5, 8),
        _BATCH_NORM_IN_PARTS,
    ),
    "attention": _attention(causal=False),
    "causal attention": _attention(causal=True, width=64, length=17),
    "attention with dropout": _attention(causal=False, dropout=0.3),
    "causal attention with dropout": _attention(causal=True, length=9, dropout=0.5),
    "attention of 4 numbers per head": Case(
        lambda c: Attention(c, "a", 8, 2, causal=True, init=normal(0.3)), (3, 6, 8), set()
    ),
    "gelu": Case(GELU, (5, 6), {"gelu", "gelu_gradient"}),
    "exact gelu": Case(lambda c: GELU(c, exact=True), (2, 5, 6), {"gelu", "gelu_gradient"}),
    "odd offsets": Case(
        lambda c: Sequential(Linear(c, "a", 5, 3), Linear(c, "b", 3, 8), LayerNorm(c, "n", 8)),
        (4, 5),
        {"layer_norm", "layer_norm_gradients"},
    ),
}


def _passes(case: Case, device: Device, kind: Any, dtype: Any) -> list[Array]:
    """Return y, dx and the parameters' gradients of two micro-batches, computed in ``kind``.

    Inputs and weights are numbers of the 16-bit format ``dtype`` in any case.
    """
    layer = case.make(LayerContext(device))
    precision = Precision(np.dtype(kind), np.dtype("float32"))
    storage = engine_storage(layer, device, precision, dtype)
    rng = np.random.default_rng(7)
    x = rng.standard_normal(case.shape).astype(dtype)
    results: list[Array] = []
    for _ in range(2):
        tape = Tape(draw=draw(len(x), device))
        y = layer.forward(device.asarray(x.astype(kind)), tape)
        dy = np.random.default_rng(8).standard_normal(y.shape).astype(dtype)
        host = device.to_host(device.xp.ascontiguousarray(y)).astype("float32")
        dx = layer.backward(device.asarray(dy.astype(kind)), tape)
        results = [host, device.to_host(device.xp.ascontiguousarray(dx)).astype("float32")]
    state = [np.array(device.to_host(one)) for one in getattr(layer, "state", {}).values()]
    return [*results, device.to_host(storage.grads).copy(), *state]


def engine_storage(layer: Layer, device: Device, precision: Precision, dtype: Any) -> Any:
    """Return the layer's flat buffers, with weights that the 16-bit format ``dtype`` has."""
    storage = stored([Unit("u", layer)], device, precision=precision)
    rng = np.random.default_rng(6)
    host = device.to_host(storage.master_weights).copy()
    host += 0.3 * rng.standard_normal(host.shape).astype("float32")
    storage.master_weights[...] = device.asarray(host.astype(dtype).astype("float32"))
    storage.publish()
    storage.begin()
    return storage


def _assert_near(found: Array, expected: Array, tolerance: float) -> None:
    norm = np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) <= tolerance * max(norm, 1e-3)


@pytest.mark.parametrize("half", _HALVES)
@pytest.mark.parametrize("name", CASES)
def test_fused_layer_is_numpys(name: str, half: str, fused: Any) -> None:
    dtype, tolerance = _HALVES[half]
    found = _passes(CASES[name], fused, dtype, dtype)
    expected = _passes(CASES[name], CpuDevice(), np.float32, dtype)
    assert [one.shape for one in found] == [one.shape for one in expected]
    for one, other in zip(found, expected, strict=True):
        _assert_near(one, other, tolerance)
    assert _operations(fused) == CASES[name].operations


def _operations(device: Any) -> set[str]:
    """Return the names of the operations for which there are plans, and forget the plans."""
    plans = device.fused_for(device.xp.ones(1, "float16")).graphs.plans
    names = {key.build.__name__.strip("_") for key in plans}
    plans.clear()
    return names


def _tokens(count: int, length: int) -> tuple[Array, Array]:
    tokens = np.random.default_rng(1).integers(0, 32, (count, length + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def _images(side: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((8, side, side, 3)).astype("float32"), rng.integers(0, 4, 8)


_ATTENTION = {"attention", "attention_gradients", "layer_norm", "layer_norm_gradients"}
_GELU = {"gelu", "gelu_gradient"}
_CONVOLUTION = {"convolution", "convolution_input_gradient", "convolution_weight_gradient"}
_SIZES = {"layers": 2, "heads": 2, "width": 16}
MODELS: dict[str, tuple[ModuleType, dict[str, Any], tuple[Array, Array], set[str]]] = {
    "mlp": (
        mlp,
        {"inputs": 12, "classes": 4},
        (_images(2)[0].reshape(8, 12), _images(2)[1]),
        set(),
    ),
    "gpt": (gpt, {"vocabulary": 32, "length": 6, **_SIZES}, _tokens(8, 6), _ATTENTION | _GELU),
    "bert": (
        bert,
        {"vocabulary": 32, "length": 6, "dropout": 0.0, **_SIZES},
        _tokens(8, 6),
        _ATTENTION | _GELU,
    ),
    "vit": (vit, {"side": 8, "patch": 4, "classes": 4, **_SIZES}, _images(8), _ATTENTION | _GELU),
    "cnn": (
        cnn,
        {"side": 8, "channels": 3, "classes": 4, "widths": (8, 8)},
        _images(8),
        {*_CONVOLUTION, *_BATCH_NORM, "relu_gradient"},
    ),
    **{
        f"resnet{depth}": (
            resnet,
            {"side": 16, "classes": 4, "depth": depth, "width": 8},
            _images(16),
            {*_CONVOLUTION, *_BATCH_NORM, "relu_gradient", "add_relu"},
        )
        for depth in (18, 50)
    },
}


def _losses(name: str, device: Device, precision: str, steps: int = 5, **options: Any) -> Any:
    """Train for a few steps. Return their losses."""
    module, sizes, (x, targets), _ = MODELS[name]
    engine = engine_of(
        device,
        alone(),
        module.build(LayerContext(device), **sizes),
        AdamW,
        precision=PRECISIONS[precision],
        loss_scale=loss_scale(precision, None),
        seed=3,
        **options,
    )
    kind = None if x.dtype.kind == "i" else PRECISIONS[precision].compute
    batch = batch_of(device, x if kind is None else x.astype(kind), targets)
    return [
        engine.step([batch], targets=targets.size, iteration=step, lr=1e-3).loss
        for step in range(1, steps + 1)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_fused_model_learns_like_numpys(name: str, fused: Any) -> None:
    found = _losses(name, fused, "bf16")
    np.testing.assert_allclose(found, _losses(name, CpuDevice(), "fp32"), rtol=2e-2)
    assert found[-1] < found[0]
    assert _operations(fused) == MODELS[name][3]


def test_fused_model_equals_itself_if_it_recomputes(fused: Any) -> None:
    assert _losses("resnet18", fused, "bf16") == _losses("resnet18", fused, "bf16", recompute=True)
    assert _losses("gpt", fused, "fp16") == _losses("gpt", fused, "fp16", recompute=True)


def test_recomputed_batch_norm_counts_a_batch_once(fused: Any) -> None:
    states = []
    for wrap in (Sequential, Recompute):
        norm = BatchNorm(LayerContext(fused), "n", 8)
        layer = wrap(norm)
        engine_storage(
            layer, fused, Precision(np.dtype("float16"), np.dtype("float32")), np.float16
        )
        x = fused.asarray(np.random.default_rng(1).standard_normal((4, 3, 3, 8)).astype("float16"))
        tape = Tape()
        layer.backward(layer.forward(x, tape), tape)
        states.append([np.array(fused.to_host(one)) for one in norm.state.values()])
    np.testing.assert_array_equal(states[0], states[1])


def test_gradients_of_micro_batches_add_up(fused: Any) -> None:
    """Weight gradients are added in float32, also by cuBLASLt."""
    module, sizes, (x, targets), _ = MODELS["gpt"]
    norms = []
    for pieces in (1, 4):
        engine = engine_of(
            fused, alone(), module.build(LayerContext(fused), **sizes), precision=PRECISIONS["bf16"]
        )
        batches = cut(batch_of(fused, x, targets), pieces)
        norms.append(engine.step(batches, targets=targets.size, iteration=1, lr=0.1).grad_norm)
    np.testing.assert_allclose(*norms, rtol=1e-2)


def test_evaluated_batch_norm_is_numpys(fused: Any) -> None:
    """By running averages."""
    x = np.random.default_rng(1).standard_normal((4, 3, 3, 8)).astype(np.float16)
    results = []
    for device, kind in ((fused, np.float16), (CpuDevice(), np.float32)):
        norm = BatchNorm(LayerContext(device), "n", 8, relu=True)
        engine_storage(norm, device, Precision(np.dtype(kind), np.dtype("float32")), np.float16)
        for array in norm.state.values():
            array[...] = device.asarray(np.linspace(0.5, 2, 8))
        y = norm.forward(device.asarray(x.astype(kind)), Tape(training=False))
        results.append(np.array(device.to_host(y)).astype("float32"))
    _assert_near(results[0], results[1], 3e-3)
    assert _operations(fused) == {"scale_and_shift"}


def test_layers_in_32_bits_are_not_fused() -> None:
    device = Strict.fused()
    _losses("gpt", device, "fp32", steps=1)
    assert _operations(device) == set()


def test_tied_head_adds_its_bias_in_the_product(fused: Any) -> None:
    results = []
    for device, kind in ((fused, np.float16), (CpuDevice(), np.float32)):
        embedding = Embedding(LayerContext(device), "e", 100, 16)
        head = TiedHead(LayerContext(device), "h", embedding, bias=True)
        precision = Precision(np.dtype(kind), np.dtype("float32"))
        engine_storage(Sequential(embedding, head), device, precision, np.float16)
        x = np.random.default_rng(2).standard_normal((3, 16)).astype(np.float16).astype(kind)
        y = head.forward(device.asarray(x), Tape())
        results.append(np.array(device.to_host(y))[:, :100].astype("float32"))
    _assert_near(results[0], results[1], 3e-3)


def test_libraries_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each raises errors of its own."""
    bindings = ModuleType("nvmath.bindings")
    bindings.cublasLt = cublaslt  # type: ignore[attr-defined]
    for name, module in (("cudnn", cudnn), ("nvmath", bindings), ("nvmath.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    device = Strict()
    fuse(device, deterministic=True)
    assert device.fused_for(device.xp.ones(1, "float16"))

    def unloaded() -> int:
        raise cublaslt.cuBLASLtError("NOT_INITIALIZED")

    monkeypatch.setattr(cublaslt, "create", unloaded)
    with pytest.raises(PayloadError) as caught:
        fuse(Strict(), deterministic=True)
    assert caught.value.code == "kernels-missing"
    assert "NOT_INITIALIZED" in str(caught.value)


def _unheard_of(_: Any, graph: Any, x: Any) -> Any:
    raise cudnn.cudnnGraphNotSupportedError("no engine for this\nand more")


def test_operation_without_a_plan_is_named() -> None:
    with pytest.raises(RankError) as caught:
        graphs.plan(
            cudnn,  # type: ignore[arg-type]
            graphs.PlanKey(_unheard_of, (), (graphs.ArrayLayout((2, 3), (3, 1), "float16"),), ()),
            deterministic=False,
            place={"device_property": object()},
        )
    assert caught.value.code == "kernels-unsupported"
    assert "no plan for unheard_of of float16 (2, 3): no engine for this;" in str(caught.value)


@pytest.mark.parametrize(
    ("device", "code"), [(CpuDevice(), "no-gpu"), (Strict(), "kernels-missing")], ids=["cpu", "gpu"]
)
def test_fused_kernels_need_a_gpu_and_the_libraries(
    device: Device, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(PayloadError) as caught:
        fuse(device, deterministic=False)
    assert (caught.value.code, caught.value.exit_code) == (code, 2)


def test_only_deterministic_algorithms_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    chosen: list[bool] = []
    backward = cudnn.pygraph.sdpa_backward

    def watched(graph: Any, *tensors: Any, **options: Any) -> Any:
        chosen.append(options["use_deterministic_algorithm"])
        return backward(graph, *tensors, **options)

    monkeypatch.setattr(
        cudnn.pygraph, "deselect_numeric_notes", lambda _, notes: noted.append(notes)
    )
    monkeypatch.setattr(cudnn.pygraph, "sdpa_backward", watched)
    for deterministic in (False, True):
        _losses("gpt", Strict.fused(deterministic=deterministic), "bf16", steps=1)
        assert chosen == [deterministic]
        assert bool(noted) == deterministic
        chosen.clear()


def test_shape_is_planned_once() -> None:
    device = Strict.fused()
    _losses("vit", device, "bf16", steps=1)
    before = cudnn.pygraph.made
    _losses("vit", device, "bf16", steps=2)
    assert cudnn.pygraph.made == before


def test_input_that_is_not_aligned_is_copied(fused: Any) -> None:
    x = fused.asarray(np.arange(-8, 9).astype(np.float16))[1:].reshape(4, 4)
    layer = GELU(LayerContext(fused))
    found = fused.to_host(layer.forward(x, Tape())).astype("float32")
    expected = GELU(LayerContext(CpuDevice())).forward(
        np.arange(-7, 9, dtype="float32").reshape(4, 4), Tape()
    )
    np.testing.assert_allclose(found, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "missing", [{"BIAS", "BGRADA"}, {"DEFAULT", "BIAS", "BGRADA"}], ids=["epilogues", "products"]
)
def test_product_without_an_algorithm_is_computed_by_cupy(
    missing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which combinations of types and epilogues there are depends on the GPU."""
    epilogues = {cublaslt.Epilogue[name] for name in missing}
    monkeypatch.setattr(cublaslt, "unsupported", epilogues)
    found = _passes(CASES["linear"], Strict.fused(), np.float16, np.float16)
    expected = _passes(CASES["linear"], CpuDevice(), np.float32, np.float16)
    for one, other in zip(found, expected, strict=True):
        _assert_near(one, other, 3e-3)
