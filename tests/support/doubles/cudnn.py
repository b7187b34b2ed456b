"""A double of nvidia-cudnn-frontend on addresses in host memory, which refuses what cuDNN refuses.

Names of methods and arguments are those of `cudnn.pygraph` 1.32.0 (`_pygraph.py`, `_CAPTURED_OPS`
and `_POINTWISE_TENSOR_ARGS`, read from its wheel). What has no plan was tried with cuDNN 9.28 for an
H200, on `driver.c` of tests/support/nvidia: tests/integration/payload/test_payload_cudnn.py tries
all graphs of the payload again, where cuDNN is installed.
"""

# ruff: noqa: A002, PLR0917 - the library's names and arguments
from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from payload.device.base import Array
from payload.nn.activation import erf


class cudnnGraphNotSupportedError(RuntimeError):  # noqa: N801 - cuDNN's name
    """No engine computes this graph."""


class Names:
    """An enumeration: each of its names is a value."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, name)


data_type = Names("FLOAT", "HALF", "BFLOAT16")
heur_mode = Names("A", "B", "FALLBACK")
numerical_note = Names("NONDETERMINISTIC", "TENSOR_CORE")
norm_forward_phase = Names("INFERENCE", "TRAINING")
reduction_mode = Names("ADD", "MAX")
_DTYPES: dict[str, Any] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BFLOAT16": ml_dtypes.bfloat16,
}
_HANDLE = 4711
_streams: dict[int, int] = {}


def backend_version() -> int:
    return 92800


def create_handle() -> int:
    _streams[_HANDLE] = 0
    return _HANDLE


def set_stream(handle: int, stream: int) -> None:
    assert handle == _HANDLE
    _streams[handle] = stream


class Tensor:
    """graph_types.Tensor: setters return the tensor."""

    def __init__(
        self, dim: Sequence[int], stride: Sequence[int], data_type: str, *, by_value: bool = False
    ) -> None:
        self.dim = tuple(dim)
        self.stride = tuple(stride)
        self.data_type = data_type
        self.by_value = by_value
        self.is_virtual = False

    def set_output(self, value: bool) -> Tensor:
        self.is_virtual = not value
        return self

    def set_data_type(self, data_type: str) -> Tensor:
        self.data_type = data_type
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = tuple(dim)
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = tuple(stride)
        return self

    def memory(self, address: int) -> Array:
        """Return the numbers at an address, as this tensor lays them out."""
        dtype = np.dtype(_DTYPES[self.data_type])
        span = 1 + sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))
        memory = (ctypes.c_byte * (span * dtype.itemsize)).from_address(address)
        strides = [step * dtype.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(np.frombuffer(memory, dtype), self.dim, strides)


def _refuse(unless: bool, reason: str) -> None:
    if not unless:
        raise cudnnGraphNotSupportedError(reason)


Values = Mapping[Tensor, Array]


class pygraph:  # noqa: N801 - cuDNN's name
    """One graph: its operations compute when it is executed."""

    made = 0

    def __init__(
        self,
        *,
        intermediate_data_type: str,
        compute_data_type: str,
        handle: int | None = None,
        device_property: object = None,
    ) -> None:
        assert (intermediate_data_type, compute_data_type) == ("FLOAT", "FLOAT")
        assert (handle == _HANDLE) != (device_property is not None)
        self._inputs: list[Tensor] = []
        self._operations: list[Callable[[dict[Tensor, Array]], None]] = []
        self._checks: list[Callable[[], None]] = []
        self._outputs: list[Tensor] = []
        self._stage = 0
        pygraph.made += 1

    def tensor(
        self,
        dim: list[int],
        stride: list[int],
        data_type: str,
        is_pass_by_value: bool = False,
    ) -> Tensor:
        assert self._stage == 0
        assert len(dim) == len(stride) <= 5
        assert all(n > 0 for n in (*dim, *stride)), "an empty tensor, or a stride below 1"
        made = Tensor(dim, stride, data_type, by_value=is_pass_by_value)
        self._inputs.append(made)
        return made

    def _add(
        self,
        compute: Callable[..., Sequence[Array]],
        inputs: Sequence[Tensor],
        shapes: Sequence[Sequence[int]],
        check: Callable[..., None] = lambda *_: None,
    ) -> list[Tensor]:
        """Add an operation. shapes: those of its outputs. check: refuses what cuDNN has no plan
        for, when all outputs are described.
        """
        made = [Tensor(shape, (), "") for shape in shapes]
        for one in made:
            one.is_virtual = True

        def run(values: dict[Tensor, Array]) -> None:
            results = compute(*(values[one] for one in inputs))
            values.update(zip(made, results, strict=True))

        def described() -> None:
            for one, shape in zip(made, shapes, strict=True):
                assert one.dim == tuple(shape), f"an output of {shape} described as {one.dim}"
            check(*made)

        self._operations.append(run)
        self._checks.append(described)
        self._outputs += made
        return made

    def conv_fprop(
        self, image: Tensor, weight: Tensor, padding: Any, stride: Any, dilation: Any
    ) -> Tensor:
        _expect_images(image)
        geometry = _geometry(padding, stride, dilation)
        assert image.dim[1] == weight.dim[1]
        shape = (image.dim[0], weight.dim[0], *_sides(image, weight, *geometry))

        def compute(x: Array, w: Array) -> list[Array]:
            y = np.zeros(shape, np.float32)
            for i, j, window in _windows(_padded(x, geometry[1]), w.shape, shape, geometry[0]):
                y += np.einsum("bchw,kc->bkhw", window, w[:, :, i, j])
            return [y]

        return self._add(compute, (image, weight), [shape])[0]

    def conv_dgrad(
        self, loss: Tensor, filter: Tensor, padding: Any, stride: Any, dilation: Any
    ) -> Tensor:
        _expect_images(loss)
        geometry = _geometry(padding, stride, dilation)
        assert loss.dim[1] == filter.dim[0]
        (made,) = self._add(lambda dy, w: [dx(dy, w)], (loss, filter), [(0,)])

        # The shape of dx does not follow from dy: the caller sets it.
        def dx(dy: Array, w: Array) -> Array:
            pad = geometry[1]
            batch, channels, height, width = made.dim
            whole = np.zeros((batch, channels, height + 2 * pad, width + 2 * pad), np.float32)
            for i, j, window in _windows(whole, w.shape, dy.shape, geometry[0]):
                np.add(window, np.einsum("bkhw,kc->bchw", dy, w[:, :, i, j]), out=window)
            return whole[:, :, pad : pad + height, pad : pad + width]

        def described() -> None:
            assert made.dim[1] == filter.dim[1]
            assert _sides(made, filter, *geometry) == loss.dim[2:]

        self._checks[-1] = described
        return made

    def conv_wgrad(
        self, image: Tensor, loss: Tensor, padding: Any, stride: Any, dilation: Any
    ) -> Tensor:
        _expect_images(image, loss)
        geometry = _geometry(padding, stride, dilation)
        (made,) = self._add(lambda x, dy: [dw(x, dy)], (image, loss), [(0,)])

        def dw(x: Array, dy: Array) -> Array:
            w = np.zeros(made.dim, np.float32)
            for i, j, window in _windows(_padded(x, geometry[1]), w.shape, dy.shape, geometry[0]):
                w[:, :, i, j] = np.einsum("bkhw,bchw->kc", dy, window)
            return w

        def described() -> None:
            assert made.dim[:2] == (loss.dim[1], image.dim[1])
            assert _sides(image, made, *geometry) == loss.dim[2:]
            # With results in float32 and 3 channels, cuDNN had no plan.
            _refuse(made.data_type == image.data_type, "No valid engine configs for ConvBwdFilter")

        self._checks[-1] = described
        return made

    def batchnorm(
        self,
        input: Tensor,
        scale: Tensor,
        bias: Tensor,
        in_running_mean: Tensor,
        in_running_var: Tensor,
        epsilon: Tensor,
        momentum: Tensor,
    ) -> list[Tensor]:
        vectors = (scale, bias, in_running_mean, in_running_var)
        _expect_images(input)
        _expect_channels(input, *vectors)
        assert epsilon.by_value
        assert momentum.by_value
        _refuse(input.dim[1] % 8 == 0, "No valid engine configs for BNFwd")

        def compute(x: Array, *rest: Array) -> list[Array]:
            w, b, mean, variance, eps, share = rest
            count = x.size / x.shape[1]
            own_mean = x.mean(axis=(0, 2, 3), keepdims=True)
            own_variance = x.var(axis=(0, 2, 3), keepdims=True)
            inverse = 1 / np.sqrt(own_variance + eps)
            unbiased = own_variance * (count / max(count - 1, 1))
            return [
                (x - own_mean) * inverse * w + b,
                own_mean,
                inverse,
                mean + share * (own_mean - mean),
                variance + share * (unbiased - variance),
            ]

        shapes = [input.dim, *[scale.dim] * 4]
        return self._add(compute, (input, *vectors, epsilon, momentum), shapes, _in_float32)

    def batchnorm_backward(
        self, grad: Tensor, input: Tensor, scale: Tensor, mean: Tensor, inv_variance: Tensor
    ) -> list[Tensor]:
        _expect_images(grad, input)
        _expect_channels(input, scale, mean, inv_variance)
        _refuse(input.dim[1] % 8 == 0, "No valid engine configs for BNBwd")

        def compute(dy: Array, x: Array, w: Array, mean: Array, inverse: Array) -> list[Array]:
            return _norm_gradients(dy, x, w, mean, inverse, over=(0, 2, 3), sums=(0, 2, 3))

        inputs = (grad, input, scale, mean, inv_variance)
        return self._add(compute, inputs, [input.dim, scale.dim, scale.dim], _in_float32)

    def layernorm(
        self, norm_forward_phase: str, input: Tensor, scale: Tensor, bias: Tensor, epsilon: Tensor
    ) -> list[Tensor]:
        assert norm_forward_phase == "TRAINING"
        assert epsilon.by_value
        _expect_channels(input, scale, bias)
        assert input.dim[2:] == (1, 1)

        def compute(x: Array, w: Array, b: Array, eps: Array) -> list[Array]:
            mean = x.mean(axis=1, keepdims=True)
            inverse = 1 / np.sqrt(x.var(axis=1, keepdims=True) + eps)
            return [(x - mean) * inverse * w + b, mean, inverse]

        statistics = (input.dim[0], 1, 1, 1)
        inputs = (input, scale, bias, epsilon)
        return self._add(compute, inputs, [input.dim, statistics, statistics], _in_float32)

    def layernorm_backward(
        self, grad: Tensor, input: Tensor, scale: Tensor, mean: Tensor, inv_variance: Tensor
    ) -> list[Tensor]:
        _expect_channels(input, scale)
        assert grad.dim == input.dim
        assert mean.dim == inv_variance.dim == (input.dim[0], 1, 1, 1)
        # A scale in 16 bits with gradients in float32 has no plan.
        _refuse(scale.data_type == "FLOAT", "No valid engine configs for LayerNormBwd")

        def compute(dy: Array, x: Array, w: Array, mean: Array, inverse: Array) -> list[Array]:
            return _norm_gradients(dy, x, w, mean, inverse, over=(1,), sums=(0,))

        inputs = (grad, input, scale, mean, inv_variance)
        return self._add(compute, inputs, [input.dim, scale.dim, scale.dim], _in_float32)

    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_scale: float,
        use_causal_mask: bool,
        generate_stats: bool,
        dropout: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """dropout: a mask, and by what to multiply the probabilities that it keeps."""
        _expect_heads(q, k, v)
        _expect_dropout(q, dropout, scalars=1)
        assert generate_stats

        def compute(q: Array, k: Array, v: Array, *dropout: Array) -> list[Array]:
            probs, log_sums = _probabilities(q, k, attn_scale, causal=use_causal_mask)
            return [math.prod(dropout, start=probs) @ v, log_sums]

        return self._add(compute, (q, k, v, *dropout), [q.dim, (*q.dim[:3], 1)], _in_float32)

    def sdpa_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dO: Tensor,  # noqa: N803 - cuDNN's name
        stats: Tensor,
        attn_scale: float,
        use_causal_mask: bool,
        use_deterministic_algorithm: bool,
        dropout: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """dropout: as of `sdpa`, then the inverse of its factor, by which cuDNN multiplies Σ o · dO
        and then the gradient of the scores by the factor (`SDPABackwardNodeBase` of
        `scaled_dot_product_flash_attention.h`).
        """
        _expect_heads(q, k, v, o, dO)
        _expect_dropout(q, dropout, scalars=2)
        assert (stats.data_type, stats.dim) == ("FLOAT", (*q.dim[:3], 1))
        _refuse(q.dim[2] > 1, "s_q = s_kv = 1 is not supported.")
        assert use_deterministic_algorithm in (True, False)

        def compute(*arrays: Array) -> list[Array]:
            q, k, v, o, do, stats, *dropout = arrays
            mask, factor, inverse = dropout or (1.0, 1.0, 1.0)
            probs, log_sums = _probabilities(q, k, attn_scale, causal=use_causal_mask)
            np.testing.assert_allclose(stats, log_sums, rtol=1e-4, atol=1e-4)
            dprobs = do @ v.swapaxes(-1, -2) * mask
            sums = (o * do).sum(axis=-1, keepdims=True) * inverse
            dscores = probs * (dprobs - sums) * (factor * attn_scale)
            turned = dscores.swapaxes(-1, -2)
            dropped = probs * mask * factor
            return [dscores @ k, turned @ q, dropped.swapaxes(-1, -2) @ do]

        return self._add(compute, (q, k, v, o, dO, stats, *dropout), [q.dim] * 3)

    def reduction(self, input: Tensor, mode: str) -> Tensor:
        """A sum over the axes that are 1 in the output's shape, which the caller sets."""
        assert mode == "ADD"
        (made,) = self._add(lambda x: [total(x)], (input,), [(0,)])

        def total(x: Array) -> Array:
            axes = tuple(i for i, n in enumerate(made.dim) if n == 1)
            summed: Array = x.sum(axis=axes, keepdims=True)
            return summed

        def described() -> None:
            pairs = zip(made.dim, input.dim, strict=True)
            assert all(n in (1, whole) for n, whole in pairs)
            assert made.data_type == "FLOAT"

        self._checks[-1] = described
        return made

    def relu(self, input: Tensor) -> Tensor:
        return self._pointwise(lambda x: np.maximum(x, 0), input)

    def relu_backward(self, loss: Tensor, input: Tensor) -> Tensor:
        return self._pointwise(lambda dy, x: dy * (x > 0), loss, input)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._pointwise(np.add, a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        return self._pointwise(np.subtract, a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return self._pointwise(np.multiply, a, b)

    def gelu(self, input: Tensor) -> Tensor:
        return self._pointwise(lambda x: x * _cdf(x), input)

    def gelu_backward(self, loss: Tensor, input: Tensor) -> Tensor:
        def slope(x: Array) -> Any:
            return _cdf(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)

        return self._pointwise(lambda dy, x: dy * slope(x), loss, input)

    def gelu_approx_tanh(self, input: Tensor) -> Tensor:
        return self._pointwise(lambda x: x * _tanh_cdf(x)[0], input)

    def gelu_approx_tanh_backward(self, loss: Tensor, input: Tensor) -> Tensor:
        def slope(x: Array) -> Any:
            cdf, inner = _tanh_cdf(x)
            return cdf + 2 * x * cdf * (1 - cdf) * inner

        return self._pointwise(lambda dy, x: dy * slope(x), loss, input)

    def _pointwise(self, compute: Callable[..., Any], *inputs: Tensor) -> Tensor:
        # Tensors are repeated along axes of length 1.
        shape = np.broadcast_shapes(*(one.dim for one in inputs))
        assert shape == inputs[0].dim
        return self._add(lambda *arrays: [compute(*arrays)], inputs, [shape])[0]

    def validate(self) -> None:
        self._advance(0)
        for one in self._outputs:
            if not one.is_virtual:
                assert one.data_type, "an output without a data type"
                assert len(one.stride) == len(one.dim), "an output without strides"
        for check in self._checks:
            check()

    def build_operation_graph(self) -> None:
        self._advance(1)

    def create_execution_plans(self, heuristics: list[str]) -> None:
        assert heuristics == ["A", "FALLBACK"]
        self._advance(2)

    def deselect_workspace_greater_than(self, limit: int) -> None:
        assert self._stage == 3
        assert limit > 0

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        assert self._stage == 3
        assert notes == ["NONDETERMINISTIC"]

    def check_support(self) -> None:
        self._advance(3)

    def build_plans(self) -> None:
        self._advance(4)

    def get_workspace_size(self) -> int:
        assert self._stage == 5
        return 64

    def _advance(self, stage: int) -> None:
        assert self._stage == stage, "the steps from validate to build_plans in another order"
        self._stage += 1

    def execute(self, tensor_dict: Mapping[Tensor, int], workspace: int, *, handle: int) -> None:
        assert self._stage == 5
        assert workspace
        assert _streams[handle], "the handle has no stream"
        outputs = [one for one in self._outputs if not one.is_virtual]
        assert set(tensor_dict) == {*self._inputs, *outputs}, "not the tensors of the graph"
        for one, address in tensor_dict.items():
            assert one.by_value or address % 16 == 0, "an address that is not aligned"
        values = {one: one.memory(tensor_dict[one]).astype(np.float32) for one in self._inputs}
        for run in self._operations:
            run(values)
        for one in outputs:
            one.memory(tensor_dict[one])[...] = values[one]


def _geometry(padding: Any, stride: Any, dilation: Any) -> tuple[int, int]:
    assert dilation == [1, 1]
    assert padding[0] == padding[1]
    assert stride[0] == stride[1]
    return stride[0], padding[0]


def _sides(image: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[int, ...]:
    pairs = zip(image.dim[2:], weight.dim[2:], strict=True)
    return tuple((size + 2 * padding - kernel) // stride + 1 for size, kernel in pairs)


def _padded(x: Array, padding: int) -> Array:
    return np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))


def _windows(image: Array, weight: Any, result: Any, stride: int) -> Any:
    """Yield (row, column, view) of each position in the kernel: what it multiplies."""
    high, wide = result[2:]
    for i in range(weight[2]):
        for j in range(weight[3]):
            down = slice(i, i + (high - 1) * stride + 1, stride)
            right = slice(j, j + (wide - 1) * stride + 1, stride)
            yield i, j, image[:, :, down, right]


def _expect_images(*tensors: Tensor) -> None:
    """Channels last in memory: for other layouts cuDNN would pick slower engines."""
    for one in tensors:
        _, channels, height, width = one.dim
        packed = (channels * height * width, 1, channels * width, channels)
        pairs = zip(one.dim, one.stride, packed, strict=True)
        assert all(step == given or n == 1 for n, given, step in pairs), one.stride


def _expect_channels(x: Tensor, *vectors: Tensor) -> None:
    for one in vectors:
        assert (one.dim, one.data_type) == ((1, x.dim[1], 1, 1), "FLOAT")


def _expect_heads(*tensors: Tensor) -> None:
    for one in tensors:
        assert one.dim == tensors[0].dim
        assert one.stride[3] == 1
        assert one.data_type in ("HALF", "BFLOAT16")
        _refuse(one.dim[3] % 8 == 0, "hidden_dim should be multiple of 8")
        _refuse(one.dim[3] <= 256, "hidden_dim should be at most 256")


def _expect_dropout(q: Tensor, dropout: Sequence[Tensor], *, scalars: int) -> None:
    if dropout:
        mask, *numbers = dropout
        assert mask.dim == (*q.dim[:3], q.dim[2])
        assert [one.by_value for one in numbers] == [True] * scalars


def _in_float32(_: Tensor, *statistics: Tensor) -> None:
    assert {one.data_type for one in statistics} <= {"FLOAT"}


def _norm_gradients(
    dy: Array, x: Array, w: Array, mean: Array, inverse: Array, *, over: Any, sums: Any
) -> list[Array]:
    unit = (x - mean) * inverse
    dunit = dy * w
    dx = dunit - dunit.mean(axis=over, keepdims=True)
    dx -= unit * (dunit * unit).mean(axis=over, keepdims=True)
    totals = [one.sum(axis=sums, keepdims=True) for one in (dy * unit, dy)]
    return [dx * inverse, *totals]


def _probabilities(q: Array, k: Array, scale: float, *, causal: bool) -> tuple[Array, Array]:
    scores = q @ k.swapaxes(-1, -2) * scale
    if causal:
        scores = np.where(np.triu(np.ones(scores.shape[-2:], bool), 1), -np.inf, scores)
    top = scores.max(axis=-1, keepdims=True)
    log_sums = np.log(np.exp(scores - top).sum(axis=-1, keepdims=True)) + top
    return np.exp(scores - log_sums), log_sums


def _cdf(x: Array) -> Any:
    return (1 + erf(x * math.sqrt(0.5))) / 2


def _tanh_cdf(x: Array) -> Any:
    a = math.sqrt(2 / math.pi)
    cdf = (1 + np.tanh(a * (x + 0.044715 * x**3))) / 2
    return cdf, a * (1 + 3 * 0.044715 * x * x)
