"""The linear layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from payload.device import Array
from payload.nn.base import Context
from payload.nn.parameter import Init, Parameter, normal, zeros
from payload.nn.tape import Tape


class Linear:
    """y = x W + b, over the last axis of x."""

    def __init__(
        self,
        context: Context,
        name: str,
        inputs: int,
        outputs: int,
        *,
        init: Init | None = None,
        bias: bool = True,
    ) -> None:
        """First weights are He's, for a ReLU to follow, unless ``init`` says other."""
        self._device = context.device
        self.weight = Parameter(
            context, f"{name}.weight", (inputs, outputs), init or normal(math.sqrt(2 / inputs))
        )
        self.bias = Parameter(context, f"{name}.bias", (outputs,), zeros) if bias else None

    @property
    def parameters(self) -> Sequence[Parameter]:
        return [self.weight, self.bias] if self.bias else [self.weight]

    def forward(self, x: Array, tape: Tape) -> Array:
        """(..., inputs) → (..., outputs)"""
        tape.push(x)
        y = self._device.matmul(x, self.weight.value)
        if self.bias:
            y += self.bias.value
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        """(..., outputs) → (..., inputs)"""
        (x,) = tape.pop()
        rows = dy.reshape(-1, dy.shape[-1])
        self.weight.add_product(x.reshape(-1, x.shape[-1]), rows)
        if self.bias:
            self.bias.add(rows.sum(axis=0))
        return self._device.matmul(dy, self.weight.value.T)
