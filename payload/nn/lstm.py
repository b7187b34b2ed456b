"""LSTM layer (Hochreiter and Schmidhuber 1997, with Gers' forget gate).

Shapes: B samples, T steps, H hidden units. The gates have the order of cuDNN and PyTorch: input,
forget, cell, output. Every tensor-parallel rank computes the whole layer.
"""

from __future__ import annotations

from types import ModuleType

from payload.device.base import Array, acc_dtype
from payload.nn.form import matrix
from payload.nn.module import LayerContext, Parameter, Tape, uniform, zeros


class LSTM:
    """LSTM layer. From h = c = 0 on, each step sets c to f c + i g, and h, the output, to o
    tanh(c).

    The gates i, f, g, o are the parts of x Wx + h Wh + b, after a sigmoid (g: after tanh). Gates
    and c are in float32 or wider. PyTorch has a second bias, for cuDNN. This layer does not train
    the second bias, which is 0 unless loaded from a PyTorch model.
    """

    def __init__(
        self, context: LayerContext, name: str, inputs: int, hidden: int, *, number: int = 0
    ) -> None:
        """Create the layer with weights uniform in ±1/√hidden. number: index in
        ``torch.nn.LSTM``.
        """
        self._device = context.device
        self._hidden = hidden
        init = uniform(hidden**-0.5)
        of_x = matrix(inputs, 4 * hidden)
        of_h = matrix(hidden, 4 * hidden)
        self.weight_x = Parameter(
            context, f"{name}.weight_ih_l{number}", (inputs, 4 * hidden), init, form=of_x
        )
        self.weight_h = Parameter(
            context, f"{name}.weight_hh_l{number}", (hidden, 4 * hidden), init, form=of_h
        )
        self.bias = Parameter(context, f"{name}.bias_ih_l{number}", (4 * hidden,), zeros)
        self.parameters = [self.weight_x, self.weight_h, self.bias]
        self._bias_h: Array = context.device.xp.zeros(4 * hidden)
        self.state = {f"{name}.bias_hh_l{number}": self._bias_h}

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, T, inputs) to h of all steps (B, T, H)."""
        xp = self._device.xp
        matmul = self._device.matmul
        kind = acc_dtype(x.dtype)
        size = self._hidden
        x = xp.ascontiguousarray(x.swapaxes(0, 1))  # (T, B, inputs)
        steps, count = x.shape[:2]
        gates = matmul(x.reshape(steps * count, x.shape[2]), self.weight_x.value, dtype=kind)
        gates += self.bias.value + self._bias_h.astype(kind)
        gates = gates.reshape(steps, count, 4 * size)
        # Index 0 is the initial state.
        cells = xp.zeros((steps + 1, count, size), kind)
        hidden = xp.zeros((steps + 1, count, size), x.dtype)
        for step in range(steps):
            gates[step] += matmul(hidden[step], self.weight_h.value, dtype=kind)
            i, f, g, o = _activate(xp, gates[step], size)
            xp.multiply(f, cells[step], out=cells[step + 1])
            cells[step + 1] += i * g
            hidden[step + 1] = o * xp.tanh(cells[step + 1])
        tape.push(x, gates, cells, hidden)
        return xp.ascontiguousarray(hidden[1:].swapaxes(0, 1))

    def backward(self, dy: Array, tape: Tape) -> Array:
        x, gates, cells, hidden = tape.pop()
        xp = self._device.xp
        matmul = self._device.matmul
        size = self._hidden
        steps, count = x.shape[:2]
        # Gradients with respect to the gates before their activation.
        dgates = xp.empty((steps, count, 4 * size), x.dtype)
        dh = xp.zeros((count, size), gates.dtype)
        dc = xp.zeros((count, size), gates.dtype)
        for step in range(steps - 1, -1, -1):
            i, f, g, o = _parts(gates[step], size)
            di, df, dg, do = _parts(dgates[step], size)
            dh += dy[:, step]
            squashed = xp.tanh(cells[step + 1])
            do[...] = dh * squashed * o * (1 - o)
            dc += dh * o * (1 - squashed * squashed)
            di[...] = dc * g * i * (1 - i)
            df[...] = dc * cells[step] * f * (1 - f)
            dg[...] = dc * i * (1 - g * g)
            dc *= f
            dh = matmul(dgates[step], self.weight_h.value.T, dtype=gates.dtype)
        rows = dgates.reshape(-1, 4 * size)
        self.weight_x.add_product(x.reshape(len(rows), x.shape[2]), rows)
        self.weight_h.add_product(hidden[:-1].reshape(len(rows), size), rows)
        self.bias.add(rows.sum(axis=0, dtype=self.bias.grad.dtype))
        return xp.ascontiguousarray(
            matmul(rows, self.weight_x.value.T).reshape(x.shape).swapaxes(0, 1)
        )


def _parts(gates: Array, size: int) -> list[Array]:
    return [gates[:, start : start + size] for start in range(0, 4 * size, size)]


def _activate(xp: ModuleType, gates: Array, size: int) -> list[Array]:
    """Apply tanh, or sigmoid(x) = (1 + tanh(x / 2)) / 2, to the gates in place. Return views of the
    gates.
    """
    parts = _parts(gates, size)
    sigmoids = gates[:, : 2 * size], parts[3]
    for gate in sigmoids:
        gate *= 0.5  # noqa: PLW2901  in place
    xp.tanh(gates, out=gates)
    for gate in sigmoids:
        gate += 1  # noqa: PLW2901  in place
        gate *= 0.5  # noqa: PLW2901  in place
    return parts
