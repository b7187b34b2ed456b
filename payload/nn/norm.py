"""Layer norm (Ba et al., arXiv:1607.06450) and batch norm (Ioffe and Szegedy, arXiv:1502.03167)."""

from __future__ import annotations

from collections.abc import Sequence

from payload.device.base import Array, acc_dtype, bits
from payload.device.fused import Fused
from payload.nn.module import Init, LayerContext, Parameter, Tape, ones, zeros

_MOMENTUM = 0.1
"""Weight of the newest micro-batch in the running averages."""
_EPSILON = 1e-5


class LayerNorm:
    """y = (x - mean) / √(variance + eps) · weight + bias over the last axis, in float32 or
    wider.
    """

    def __init__(self, context: LayerContext, name: str, width: int, *, eps: float = 1e-5) -> None:
        self._device = context.device
        self._eps = eps
        self.weight = Parameter(context, f"{name}.weight", (width,), ones)
        self.bias = Parameter(context, f"{name}.bias", (width,), zeros)
        self.parameters = [self.weight, self.bias]

    def forward(self, x: Array, tape: Tape) -> Array:
        xp = self._device.xp
        kind = acc_dtype(x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        if fused := self._device.fused_for(x):
            normalised, mean, inverse = fused.layer_norm(
                rows, self.weight.value, self.bias.value, eps=self._eps
            )
            tape.push(rows, mean, inverse)
            return normalised.reshape(x.shape)
        y: Array = xp.empty(rows.shape, kind)
        mean, inverse = xp.empty((2, len(rows), 1), kind)
        weight = self.weight.value.astype(kind, copy=False)
        bias = self.bias.value.astype(kind, copy=False)
        matmul = self._device.matmul
        # A product with this vector is faster than mean().
        share = xp.full(x.shape[-1], 1 / x.shape[-1], kind)

        def normalise(x: Array, y: Array, mean: Array, inverse: Array) -> None:
            x = x.astype(kind, copy=False)
            mean[:, 0] = matmul(x, share)
            xp.subtract(x, mean, out=y)
            inverse[:, 0] = 1 / xp.sqrt(matmul(y * y, share) + self._eps)
            y *= inverse
            y *= weight
            y += bias

        self._device.blocked(normalise, rows, y, mean, inverse)
        tape.push(rows, mean, inverse)
        return y.reshape(x.shape).astype(x.dtype, copy=False)

    def backward(self, dy: Array, tape: Tape) -> Array:
        x, mean, inverse = tape.pop()
        if fused := self._device.fused_for(dy):
            return self._backward_fused(fused, dy, x, mean, inverse)
        xp = self._device.xp
        kind = mean.dtype
        dx: Array = xp.empty(x.shape, kind)
        dweight = xp.zeros(x.shape[1], kind)
        dbias = xp.zeros(x.shape[1], kind)
        weight = self.weight.value.astype(kind, copy=False)
        share = weight / x.shape[1]
        matmul = self._device.matmul

        def differentiate(x: Array, dy: Array, dx: Array, mean: Array, inverse: Array) -> None:
            dy = dy.astype(kind, copy=False)
            unit = x - mean
            unit *= inverse
            # Until dx is known, its memory holds dy · unit.
            xp.multiply(dy, unit, out=dx)
            ones = xp.ones(len(x), kind)
            dweight[...] += matmul(ones, dx)
            dbias[...] += matmul(ones, dy)
            # Subtract from dy · weight its mean, and unit times the mean of their product.
            unit *= matmul(dx, share)[:, None]
            xp.multiply(dy, weight, out=dx)
            dx -= unit
            dx -= matmul(dy, share)[:, None]
            dx *= inverse

        self._device.blocked(differentiate, x, dy.reshape(x.shape), dx, mean, inverse)
        self.weight.add(dweight)
        self.bias.add(dbias)
        return dx.reshape(dy.shape).astype(dy.dtype, copy=False)

    def _backward_fused(
        self, fused: Fused, dy: Array, x: Array, mean: Array, inverse: Array
    ) -> Array:
        dx, dweight, dbias = fused.layer_norm_gradients(
            dy.reshape(x.shape), x, self.weight.value, mean, inverse
        )
        self.weight.add(dweight)
        self.bias.add(dbias)
        return dx.reshape(dy.shape)


class BatchNorm:
    """y = (x - mean) / √(variance + ε) · weight + bias for each channel (last axis), then ReLU if
    requested.

    Mean and variance are those of all data-parallel ranks' micro-batches together, so the number of
    ranks does not change the result. An evaluation uses running averages instead.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        channels: int,
        *,
        relu: bool = False,
        weight: Init = ones,
    ) -> None:
        self._device = context.device
        self._relu = relu
        self._comm = context.dp
        # Whether ranks exchange statistics during a pass.
        self.communicates = context.dp.size > 1
        self.weight = Parameter(context, f"{name}.weight", (channels,), weight)
        self.bias = Parameter(context, f"{name}.bias", (channels,), zeros)
        self.parameters = [self.weight, self.bias]
        self._running_mean: Array = context.device.xp.zeros(channels)
        self._running_variance: Array = context.device.xp.ones(channels)
        self.state = {
            f"{name}.running_mean": self._running_mean,
            f"{name}.running_var": self._running_variance,
        }

    def forward(self, x: Array, tape: Tape) -> Array:
        fused = self._device.fused_for(x)
        if fused and tape.training and self._is_one_operation(fused, x):
            return self._forward_fused(fused, x, tape)
        xp = self._device.xp
        if tape.training:
            count, mean, variance = self._moments(x)
            if not tape.recompute:
                self._track(count, mean, variance)
        else:
            count = xp.ones(1)
            mean = self._running_mean
            variance = self._running_variance
        inverse = 1 / xp.sqrt(variance + _EPSILON)
        dtype = acc_dtype(x.dtype)
        weight, bias = self._float64_parameters()
        slope = (weight * inverse).astype(dtype)
        offset = (bias - mean * weight * inverse).astype(dtype)
        if fused:
            y = fused.scale_and_shift(x, slope, offset, relu=self._relu)
        else:
            y = self._scale_and_shift(x, slope, offset)
        tape.push(x, y if self._relu else None, count, mean, inverse)
        return y

    def _scale_and_shift(self, x: Array, slope: Array, offset: Array) -> Array:
        xp = self._device.xp
        dtype = slope.dtype
        y: Array = xp.empty(x.shape, x.dtype)

        def normalise(x: Array, y: Array) -> None:
            z = xp.multiply(x.astype(dtype, copy=False), slope, out=y if y.dtype == dtype else None)
            z += offset
            if self._relu:
                z_bits = bits(z)
                z_bits *= ~(z <= 0)
            if z is not y:
                y[...] = z

        self._device.blocked(normalise, _rows(x), _rows(y))
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        fused = self._device.fused_for(dy)
        if fused and self._is_one_operation(fused, dy):
            return self._backward_fused(fused, dy, tape)
        x, y, count, mean, inverse = tape.pop()
        # Σ dz, and Σ dz · (x - mean) of each channel, with dz the gradient before ReLU.
        totals: Array = self._device.xp.empty((2, len(mean)))
        if fused:
            totals[0], totals[1] = fused.normalised_sums(dy, x, y, mean)
        else:
            dy = self._write_sums(dy, x, y, mean, totals)
        totals[1] *= inverse
        self.bias.add(totals[0])
        self.weight.add(totals[1])
        self._comm.allreduce(totals)
        weight, _ = self._float64_parameters()
        by_dz = weight * inverse
        by_x = -by_dz * inverse * totals[1] / count
        offset = -by_dz * totals[0] / count - mean * by_x
        dtype = acc_dtype(dy.dtype)
        vectors = [vector.astype(dtype) for vector in (by_dz, by_x, offset)]
        if fused:
            return fused.normalised_gradient(dy, x, y, *vectors)
        # dz is this layer's own array after ReLU, and otherwise its caller's.
        dx = self._device.xp.empty(x.shape, dy.dtype) if y is None else dy
        self._combine(dy, x, dx, vectors)
        return dx

    def _write_sums(
        self, dy: Array, x: Array, y: Array | None, mean: Array, totals: Array
    ) -> Array:
        """Write Σ dz and Σ dz · (x - mean) of each channel to ``totals``. Return dz."""
        xp = self._device.xp
        dtype = acc_dtype(dy.dtype)
        centre = mean.astype(dtype)
        dz: Array = dy if y is None else xp.empty(dy.shape, dy.dtype)
        totals[...] = 0

        def add_up(x: Array, dy: Array, dz: Array, *y: Array) -> None:
            if y:
                xp.multiply(bits(dy), y[0] != 0, out=bits(dz))
            dz = dz.astype(dtype, copy=False)
            totals[0] += _sum(dz)
            centred = x - centre
            centred *= dz
            totals[1] += _sum(centred)

        self._device.blocked(add_up, *map(_rows, (x, dy, dz, *([] if y is None else [y]))))
        return dz

    def _combine(self, dz: Array, x: Array, dx: Array, vectors: Sequence[Array]) -> None:
        """Write dz · by_dz + x · by_x + offset to dx, which may be dz. vectors: these three."""
        by_dz, by_x, offset = vectors
        xp = self._device.xp
        dtype = by_dz.dtype

        def combine(x: Array, dz: Array, dx: Array) -> None:
            shift = x.astype(dtype, copy=False) * by_x
            shift += offset
            if dx.dtype == dtype:
                xp.multiply(dz, by_dz, out=dx)
                dx += shift
            else:
                shift += dz.astype(dtype) * by_dz
                dx[...] = shift

        self._device.blocked(combine, _rows(x), _rows(dz), _rows(dx))

    def _is_one_operation(self, fused: Fused, x: Array) -> bool:
        # cuDNN's own batch norm does not sum statistics over ranks.
        return self._comm.size == 1 and fused.suits_batch_norm(x)

    def _forward_fused(self, fused: Fused, x: Array, tape: Tape) -> Array:
        running = (self._running_mean, self._running_variance)
        y, mean, inverse, tracked = fused.batch_norm(
            x,
            self.weight.value,
            self.bias.value,
            running,
            eps=_EPSILON,
            momentum=_MOMENTUM,
            relu=self._relu,
        )
        if not tape.recompute:
            for array, newest in zip(running, tracked, strict=True):
                array[...] = newest
        tape.push(x, y if self._relu else None, mean, inverse)
        return y

    def _backward_fused(self, fused: Fused, dy: Array, tape: Tape) -> Array:
        x, y, mean, inverse = tape.pop()
        dz = dy if y is None else fused.relu_gradient(dy, y)
        dx, dweight, dbias = fused.batch_norm_gradients(dz, x, self.weight.value, mean, inverse)
        self.weight.add(dweight)
        self.bias.add(dbias)
        return dx

    def _float64_parameters(self) -> tuple[Array, Array]:
        return self.weight.value.astype("float64"), self.bias.value.astype("float64")

    def _moments(self, x: Array) -> tuple[Array, Array, Array]:
        """Return (number of rows, means, variances) over all ranks: three arrays (channels,) in
        float64.
        """
        xp = self._device.xp
        rows = _rows(x)
        # Σ 1, Σ x and Σ x² of each channel.
        totals: Array = xp.zeros((3, rows.shape[1]))
        dtype = acc_dtype(rows.dtype)

        def add_up(x: Array) -> None:
            # Subtracting a row keeps float32 accurate if the mean is large.
            x = x.astype(dtype, copy=False) - origin
            totals[1] += _sum(x)
            x *= x
            totals[2] += _sum(x)

        if count := len(rows):
            origin = rows[0].astype(dtype)
            if fused := self._device.fused_for(x):
                totals[1], totals[2] = fused.channel_sums(x, origin)
            else:
                self._device.blocked(add_up, rows)
            shift = origin.astype("float64")
            totals[2] += shift * (2 * totals[1] + count * shift)
            totals[1] += count * shift
            totals[0] = count
        self._comm.allreduce(totals)
        total = xp.maximum(totals[0], 1)
        mean = totals[1] / total
        return total, mean, xp.maximum(totals[2] / total - mean * mean, 0)

    def _track(self, count: Array, mean: Array, variance: Array) -> None:
        """Update the running averages of the mean and of the unbiased variance."""
        self._running_mean += _MOMENTUM * (mean - self._running_mean)
        unbiased = variance * (count / self._device.xp.maximum(count - 1, 1))
        self._running_variance += _MOMENTUM * (unbiased - self._running_variance)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


_LANES = 32


def _sum(rows: Array) -> Array:
    """Return the sum (channels,) of all rows, in two steps, which is faster and more accurate."""
    channels = rows.shape[1]
    even = len(rows) // _LANES * _LANES
    lanes = rows[:even].reshape(-1, _LANES * channels).sum(axis=0)
    total: Array = lanes.reshape(_LANES, channels).sum(axis=0)
    if even < len(rows):
        total += rows[even:].sum(axis=0)
    return total
