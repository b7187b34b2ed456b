"""Operations of layers that cuDNN and cuBLASLt compute in one pass, on 16-bit arrays of a GPU.

Layers ask ``Device.fused_for`` for these. Without them, and for other arrays, a layer computes the
same with NumPy's or CuPy's functions, which is the reference that tests compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from payload.device.base import FLOAT32, Array
from payload.device.cublaslt import LtProducts
from payload.device.graphs import CudnnGraphs

_CHANNELS = 8
"""cuDNN's batch norm needs a multiple of this many channels, and its attention of numbers per head:
16 bytes.
"""
_HEAD = 128
"""Maximum numbers per head for which cuDNN has a backward pass on all GPUs with attention."""


class Fused:
    """The operations, on CuPy's current stream.

    graphs: cuDNN. products: cuBLASLt. xp: cupy.
    """

    def __init__(self, graphs: CudnnGraphs, products: LtProducts, xp: ModuleType) -> None:
        self.graphs = graphs
        self._xp = xp
        self.products = products

    def suits_batch_norm(self, x: Array) -> bool:
        return x.shape[-1] % _CHANNELS == 0

    def suits_attention(self, q: Array) -> bool:
        """Return whether attention has a plan for queries (B, heads, T, numbers)."""
        return q.shape[-1] % _CHANNELS == 0 and q.shape[-1] <= _HEAD and q.shape[-2] > 1

    def convolve(self, x: Array, weight: Array, *, stride: int, padding: int, shape: Any) -> Array:
        """Correlate images x (B, H, W, C) with weight (K, kernel, kernel, C). shape: that of y."""
        y: Array = self._xp.empty(shape, x.dtype)
        inputs = (_images(self._packed(x)), _images(weight))
        self.graphs.run(_convolution, inputs, [_images(y)], stride=stride, padding=padding)
        return y

    def convolve_input_gradient(
        self, dy: Array, weight: Array, *, stride: int, padding: int, shape: Any
    ) -> Array:
        """Return the gradient of ``convolve`` with respect to x. shape: that of x."""
        dx: Array = self._xp.empty(shape, dy.dtype)
        inputs = (_images(self._packed(dy)), _images(weight))
        self.graphs.run(
            _convolution_input_gradient, inputs, [_images(dx)], stride=stride, padding=padding
        )
        return dx

    def convolve_weight_gradient(
        self, x: Array, dy: Array, *, stride: int, padding: int, shape: Any
    ) -> Array:
        """Return the gradient of ``convolve`` with respect to the weight, in 16 bits. shape: that
        of the weight.
        """
        dw: Array = self._xp.empty(shape, x.dtype)
        inputs = (_images(self._packed(x)), _images(self._packed(dy)))
        self.graphs.run(
            _convolution_weight_gradient, inputs, [_images(dw)], stride=stride, padding=padding
        )
        return dw

    def batch_norm(
        self,
        x: Array,
        weight: Array,
        bias: Array,
        running: Sequence[Array],
        *,
        eps: float,
        momentum: float,
        relu: bool,
    ) -> tuple[Array, Array, Array, list[Array]]:
        """Normalise images (B, H, W, C) by their own statistics, then apply ReLU if requested.

        running: running mean and variance. Return y, the mean and 1/√(variance + eps) of each
        channel, and the new running mean and variance: all but y (C,) in float32.
        """
        y: Array = self._xp.empty(x.shape, x.dtype)
        vectors = [self._vector(one) for one in (weight, bias, *running)]
        results = [self._xp.empty(x.shape[-1], FLOAT32) for _ in range(4)]
        self.graphs.run(
            _batch_norm,
            (_images(self._packed(x)), *map(_channels, vectors)),
            (_images(y), *map(_channels, results)),
            scalars=(eps, momentum),
            relu=relu,
        )
        mean, inverse, *new = results
        return y, mean, inverse, new

    def batch_norm_gradients(
        self, dy: Array, x: Array, weight: Array, mean: Array, inverse: Array
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of ``batch_norm`` without ReLU with respect to x, weight, bias."""
        dx: Array = self._xp.empty(x.shape, x.dtype)
        results = [self._xp.empty(x.shape[-1], FLOAT32) for _ in range(2)]
        vectors = (self._vector(weight), mean, inverse)
        self.graphs.run(
            _batch_norm_gradients,
            (_images(self._packed(dy)), _images(self._packed(x)), *map(_channels, vectors)),
            (_images(dx), *map(_channels, results)),
        )
        return dx, results[0], results[1]

    def channel_sums(self, x: Array, origin: Array) -> Sequence[Array]:
        """Return Σ (x - origin) and Σ (x - origin)² of each channel (C,) in float32."""
        return self._sums(_channel_sums, (x,), origin)

    def scale_and_shift(self, x: Array, slope: Array, offset: Array, *, relu: bool) -> Array:
        """Return x · slope + offset for each channel, after ReLU if requested."""
        return self._per_channel(_scale_and_shift, (x,), (slope, offset), relu=relu)

    def normalised_sums(self, dy: Array, x: Array, y: Array | None, mean: Array) -> Sequence[Array]:
        """Return Σ dz and Σ dz · (x - mean) of each channel (C,), with dz = dy, but 0 where ReLU's
        result y is.
        """
        return self._sums(_normalised_sums, (dy, x, *([] if y is None else [y])), mean)

    def normalised_gradient(self, dy: Array, x: Array, y: Array | None, *vectors: Array) -> Array:
        """Return dz · a + x · b + c for each channel. vectors: a, b, c. dz: see above."""
        arrays = (dy, x, *([] if y is None else [y]))
        return self._per_channel(_normalised_gradient, arrays, vectors)

    def _sums(self, build: Any, arrays: Sequence[Array], origin: Array) -> Sequence[Array]:
        sums = [self._xp.empty(arrays[0].shape[-1], FLOAT32) for _ in range(2)]
        inputs = (_channels(self._vector(origin)), *map(_images, map(self._packed, arrays)))
        self.graphs.run(build, inputs, [_channels(one) for one in sums])
        return sums

    def _per_channel(
        self, build: Any, arrays: Sequence[Array], vectors: Sequence[Array], **parameters: Any
    ) -> Array:
        result: Array = self._xp.empty(arrays[0].shape, arrays[0].dtype)
        inputs = (
            *map(_channels, map(self._vector, vectors)),
            *map(_images, map(self._packed, arrays)),
        )
        self.graphs.run(build, inputs, [_images(result)], **parameters)
        return result

    def layer_norm(
        self, x: Array, weight: Array, bias: Array, *, eps: float
    ) -> tuple[Array, Array, Array]:
        """Normalise rows x (N, C). Return y, and the mean and 1/√(variance + eps) of each row."""
        y: Array = self._xp.empty(x.shape, x.dtype)
        mean, inverse = (self._xp.empty(len(x), FLOAT32) for _ in range(2))
        vectors = (self._vector(weight), self._vector(bias))
        self.graphs.run(
            _layer_norm,
            (_rows(self._packed(x)), *map(_channels, vectors)),
            (_rows(y), _each_row(mean), _each_row(inverse)),
            scalars=(eps,),
        )
        return y, mean, inverse

    def layer_norm_gradients(
        self, dy: Array, x: Array, weight: Array, mean: Array, inverse: Array
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of ``layer_norm`` with respect to x, weight and bias."""
        dx: Array = self._xp.empty(x.shape, x.dtype)
        results = [self._xp.empty(x.shape[-1], FLOAT32) for _ in range(2)]
        self.graphs.run(
            _layer_norm_gradients,
            (
                _rows(self._packed(dy)),
                _rows(self._packed(x)),
                _channels(self._vector(weight)),
                _each_row(mean),
                _each_row(inverse),
            ),
            (_rows(dx), *map(_channels, results)),
        )
        return dx, results[0], results[1]

    def attend(
        self,
        inputs: Sequence[Array],
        results: Sequence[Array],
        *,
        causal: bool,
        scale: float,
        rate: float,
    ) -> None:
        """Write softmax(scale · q kᵀ) v to ``o``, and log Σ exp(scores) to ``log_sums``.

        inputs: q, k, v, and with dropout its mask. results: o, log_sums. q, k, v, o: (B, heads, T,
        numbers), with adjacent numbers. mask: (B, heads, T, T), 1 for probabilities that stay, 0
        for the share ``rate``. log_sums: (B, heads, T, 1) in float32.
        """
        scalars = (1 / (1 - rate),) if rate else ()
        self.graphs.run(_attention, inputs, results, scalars=scalars, causal=causal, scale=scale)

    def attend_gradients(
        self,
        inputs: Sequence[Array],
        gradients: Sequence[Array],
        *,
        causal: bool,
        scale: float,
        rate: float,
    ) -> None:
        """Write the gradients of ``attend``. inputs: q, k, v, o, do, log_sums, and with dropout its
        mask. gradients: dq, dk, dv.
        """
        self.graphs.run(
            _attention_gradients,
            inputs,
            gradients,
            scalars=(1 / (1 - rate), 1 - rate) if rate else (),
            causal=causal,
            scale=scale,
            deterministic=self.graphs.deterministic,
        )

    def gelu(self, x: Array, *, exact: bool) -> Array:
        return self._pointwise(_gelu, x, exact=exact)

    def gelu_gradient(self, dy: Array, x: Array, *, exact: bool) -> Array:
        return self._pointwise(_gelu_gradient, dy, x, exact=exact)

    def add_relu(self, x: Array, y: Array) -> Array:
        """Return max(x + y, 0)."""
        return self._pointwise(_add_relu, x, y)

    def relu_gradient(self, dy: Array, y: Array) -> Array:
        """Return dy where ReLU's result y is positive, otherwise 0."""
        return self._pointwise(_relu_gradient, dy, y)

    def _pointwise(self, build: Any, *arrays: Array, **parameters: Any) -> Array:
        result: Array = self._xp.empty(arrays[0].shape, arrays[0].dtype)
        views = [one.reshape(1, -1, one.shape[-1]) for one in map(self._packed, arrays)]
        out = result.reshape(views[0].shape)
        self.graphs.run(build, views, [out], **parameters)
        return result

    def _packed(self, array: Array) -> Array:
        return array if array.flags.c_contiguous else self._xp.ascontiguousarray(array)

    def _vector(self, parameter: Array) -> Array:
        return parameter.astype(FLOAT32, copy=False)


def _images(x: Array) -> Array:
    """View (B, H, W, C) as (B, C, H, W)."""
    return x.transpose(0, 3, 1, 2)


def _rows(x: Array) -> Array:
    return x.reshape(*x.shape, 1, 1)


def _channels(vector: Array) -> Array:
    return vector.reshape(1, -1, 1, 1)


def _each_row(vector: Array) -> Array:
    return vector.reshape(-1, 1, 1, 1)


def _geometry(stride: int, padding: int) -> dict[str, list[int]]:
    return {"padding": [padding] * 2, "stride": [stride] * 2, "dilation": [1, 1]}


def _convolution(_: Any, graph: Any, x: Any, weight: Any, *, stride: int, padding: int) -> Any:
    return [graph.conv_fprop(image=x, weight=weight, **_geometry(stride, padding))]


def _convolution_input_gradient(
    _: Any, graph: Any, dy: Any, weight: Any, *, stride: int, padding: int
) -> Any:
    return [graph.conv_dgrad(loss=dy, filter=weight, **_geometry(stride, padding))]


def _convolution_weight_gradient(
    _: Any, graph: Any, x: Any, dy: Any, *, stride: int, padding: int
) -> Any:
    return [graph.conv_wgrad(image=x, loss=dy, **_geometry(stride, padding))]


def _batch_norm(  # noqa: PLR0917 - cuDNN's tensors
    _: Any,
    graph: Any,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_variance: Any,
    eps: Any,
    momentum: Any,
    *,
    relu: bool,
) -> Any:
    y, *statistics = graph.batchnorm(
        input=x,
        scale=weight,
        bias=bias,
        in_running_mean=running_mean,
        in_running_var=running_variance,
        epsilon=eps,
        momentum=momentum,
    )
    return [graph.relu(y) if relu else y, *statistics]


def _batch_norm_gradients(  # noqa: PLR0917 - cuDNN's tensors
    _: Any, graph: Any, dy: Any, x: Any, weight: Any, mean: Any, inverse: Any
) -> Any:
    return graph.batchnorm_backward(grad=dy, input=x, scale=weight, mean=mean, inv_variance=inverse)


def _channel_sums(cudnn: Any, graph: Any, origin: Any, x: Any) -> Any:
    shifted = graph.sub(x, origin)
    return [_sum(cudnn, graph, one) for one in (shifted, graph.mul(shifted, shifted))]


def _scale_and_shift(_: Any, graph: Any, slope: Any, offset: Any, x: Any, *, relu: bool) -> Any:
    y = graph.add(graph.mul(x, slope), offset)
    return [graph.relu(y) if relu else y]


def _normalised_sums(cudnn: Any, graph: Any, mean: Any, dy: Any, x: Any, *y: Any) -> Any:
    dz = _before_relu(graph, dy, *y)
    return [_sum(cudnn, graph, one) for one in (dz, graph.mul(dz, graph.sub(x, mean)))]


def _normalised_gradient(  # noqa: PLR0917 - cuDNN's tensors
    _: Any, graph: Any, a: Any, b: Any, c: Any, dy: Any, x: Any, *y: Any
) -> Any:
    dz = _before_relu(graph, dy, *y)
    return [graph.add(graph.add(graph.mul(dz, a), graph.mul(x, b)), c)]


def _before_relu(graph: Any, dy: Any, *y: Any) -> Any:
    return graph.relu_backward(loss=dy, input=y[0]) if y else dy


def _sum(cudnn: Any, graph: Any, x: Any) -> Any:
    return graph.reduction(x, mode=cudnn.reduction_mode.ADD)


def _layer_norm(cudnn: Any, graph: Any, x: Any, weight: Any, bias: Any, eps: Any) -> Any:  # noqa: PLR0917
    return graph.layernorm(
        norm_forward_phase=cudnn.norm_forward_phase.TRAINING,
        input=x,
        scale=weight,
        bias=bias,
        epsilon=eps,
    )


def _layer_norm_gradients(  # noqa: PLR0917 - cuDNN's tensors
    _: Any, graph: Any, dy: Any, x: Any, weight: Any, mean: Any, inverse: Any
) -> Any:
    return graph.layernorm_backward(grad=dy, input=x, scale=weight, mean=mean, inv_variance=inverse)


def _attention(
    _: Any, graph: Any, q: Any, k: Any, v: Any, *dropout: Any, causal: bool, scale: float
) -> Any:
    options = {"dropout": dropout} if dropout else {}
    return graph.sdpa(
        q=q, k=k, v=v, attn_scale=scale, use_causal_mask=causal, generate_stats=True, **options
    )


def _attention_gradients(  # noqa: PLR0917 - cuDNN's tensors
    _: Any,
    graph: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    do: Any,
    log_sums: Any,
    *dropout: Any,
    causal: bool,
    scale: float,
    deterministic: bool,
) -> Any:
    return graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=o,
        dO=do,
        stats=log_sums,
        attn_scale=scale,
        use_causal_mask=causal,
        use_deterministic_algorithm=deterministic,
        **({"dropout": dropout} if dropout else {}),
    )


def _gelu(_: Any, graph: Any, x: Any, *, exact: bool) -> Any:
    return [graph.gelu(x) if exact else graph.gelu_approx_tanh(x)]


def _gelu_gradient(_: Any, graph: Any, dy: Any, x: Any, *, exact: bool) -> Any:
    differentiate = graph.gelu_backward if exact else graph.gelu_approx_tanh_backward
    return [differentiate(loss=dy, input=x)]


def _add_relu(_: Any, graph: Any, x: Any, y: Any) -> Any:
    return [graph.relu(graph.add(x, y))]


def _relu_gradient(_: Any, graph: Any, dy: Any, y: Any) -> Any:
    return [graph.relu_backward(loss=dy, input=y)]
