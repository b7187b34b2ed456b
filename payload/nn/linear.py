"""Linear layer, whole or split over tensor-parallel ranks."""

from __future__ import annotations

import math
from typing import Literal

from payload.device.base import Array
from payload.nn.form import TorchForm, matrix, reshaped
from payload.nn.module import Init, LayerContext, Parameter, Tape, normal, zeros


class Linear:
    """y = x W + b over the last axis of x.

    If W is split by columns, each tensor-parallel rank computes a part of y, and the ranks sum dx.
    If W is split by rows, each rank has a part of x, and the ranks sum y. A layer split by columns
    and then a layer split by rows need a single sum per pass (Shoeybi et al., "Megatron-LM", 2019).
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        inputs: int,
        outputs: int,
        *,
        init: Init | None = None,
        bias: bool = True,
        split: Literal["columns", "rows"] | None = None,
        parts: int = 1,
        form: TorchForm | None = None,
    ) -> None:
        """Create the layer.

        Args:
            init: initial weights. Default: He initialization, for a following ReLU.
            parts: number of tensors in the output, such as 3 for q, k and v. Each is split by
                columns. If more than 1, the parameters are named as in
                ``torch.nn.MultiheadAttention``.
            form: layout of the weights in PyTorch. Default: ``torch.nn.Linear``.
        """
        joint = "." if parts == 1 else "_"
        self._device = context.device
        self._tp = context.tp
        self._split = split
        shape = (outputs,) if parts == 1 else (parts, outputs // parts)
        columns = len(shape) if split == "columns" else None
        self.weight = Parameter(
            context,
            f"{name}{joint}weight",
            (inputs, *shape),
            init or normal(math.sqrt(2 / inputs)),
            axis=0 if split == "rows" else columns,
            form=form or matrix(inputs, outputs),
        )
        self.bias: Parameter | None = None
        if bias:
            axis = columns - 1 if columns else None
            self.bias = Parameter(
                context,
                f"{name}{joint}bias",
                shape,
                zeros,
                axis=axis,
                decay=False,
                form=reshaped(shape, (outputs,)),
            )
        self.parameters = [self.weight, self.bias] if self.bias else [self.weight]

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (..., inputs) to y (..., outputs): only this rank's part of x (rows) or of y
        (columns).
        """
        tape.push(x)
        rows = x.reshape(-1, x.shape[-1])
        bias = self.bias.value.ravel() if self.bias else None
        summed = self._split == "rows" and self._tp.size > 1
        y = self._device.linear(rows, self._matrix(), None if summed else bias)
        if summed:
            self._tp.allreduce(y)
            if bias is not None:
                y += bias
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def backward(self, dy: Array, tape: Tape) -> Array:
        (x,) = tape.pop()
        rows = dy.reshape(-1, dy.shape[-1])
        dx = self._device.matmul(rows, self._matrix().T)
        # The sum runs while the gradient of the weights is computed.
        summed = self._tp.iallreduce(dx) if self._split == "columns" else None
        self.weight.add_product(x.reshape(-1, x.shape[-1]), rows, self.bias)
        if summed:
            summed.wait()
        return dx.reshape(x.shape)

    def _matrix(self) -> Array:
        weight = self.weight.value
        return weight.reshape(len(weight), -1)
