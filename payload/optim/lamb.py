"""LAMB: Adam steps scaled for each parameter (You et al., "Large Batch Optimization for Deep
Learning: Training BERT in 76 minutes", 2020, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from payload.comm.base import Communicator
from payload.device.base import Array, Device, Kernel
from payload.nn.module import Parameter, Segment
from payload.optim.adamw import MOMENTS, Moments, update_moments
from payload.optim.base import runs


class LAMB:
    """For a parameter x with Adam's direction r = m̂ / (√v̂ + ε) + decay·x, the step is
    lr·‖x‖/‖r‖·r.

    ‖x‖/‖r‖ is replaced by 1 if a norm is 0, and for parameters without decay, as in the authors'
    program.
    """

    def __init__(
        self,
        device: Device,
        weights: Array,
        segments: Sequence[Segment],
        parameters: Sequence[Parameter],
        groups: Sequence[Communicator] = (),
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        """Allocate the optimizer's state.

        Args:
            segments: positions of the parameters in this rank's ``weights``.
            parameters: all parameters of this rank and the ranks in ``groups``, in the same order
                on each.
            groups: communicators over which norms are computed: of ranks that own other pieces, and
                of tensor-parallel ranks. Not of data-parallel ranks that all own the same pieces.
        """
        self._device = device
        self._moments = Moments(device, weights, beta1, beta2, eps)
        self._runs = runs(segments, weight_decay)
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._pieces = [
            (slice(p.start, p.stop), indices[id(p.parameter)], p.parameter) for p in segments
        ]
        self._count = len(parameters)
        self._groups = groups
        self.updates = 0
        self.state = self._moments.state

    def step(self, weights: Array, grads: Array, *, lr: float, scale: float = 1.0) -> None:
        self.updates += 1
        scalars = self._moments.scalars(1.0, scale, self.updates)
        mean = self.state["mean"]
        square = self.state["square"]
        for run, decay in self._runs:
            self._device.apply(
                _DIRECTION,
                {**scalars, "decay": decay},
                weights[run],
                grads[run],
                mean[run],
                square[run],
            )
        ratios = self._ratios(weights, grads)
        for run, index, _ in self._pieces:
            grads[run] *= (lr * ratios[index]).astype(grads.dtype)
        for run, _ in self._runs:
            weights[run] -= grads[run]

    def _ratios(self, weights: Array, directions: Array) -> Array:
        """Return ‖x‖/‖r‖ of each whole parameter, with the pieces on all ranks. directions: r,
        flat.

        Copies of a parameter on several tensor-parallel ranks enlarge both norms equally, not the
        ratio.
        """
        xp = self._device.xp
        squares = xp.zeros((2, self._count))
        for run, index, parameter in self._pieces:
            if parameter.decay:
                for row, flat in enumerate((weights[run], directions[run])):
                    squares[row, index] += flat @ flat
        sums = squares.ravel().tolist()
        for group in self._groups:
            sums = group.sum(sums)
        norms = xp.sqrt(xp.asarray(sums).reshape(squares.shape))
        is_valid = (norms > 0).all(axis=0)
        return xp.where(is_valid, norms[0] / xp.where(is_valid, norms[1], 1), 1)


def _direct(
    value: Array,
    grad: Array,
    mean: Array,
    square: Array,
    *,
    rate: float,
    decay: float,
    eps: float,
    **moments: float,
) -> None:
    update_moments(grad, mean, square, **moments)
    np.sqrt(square, out=grad)
    grad += eps
    np.divide(mean, grad, out=grad)
    grad *= rate
    if decay:
        grad += value * decay


_DIRECTION = Kernel(
    "lamb",
    ("rate", "decay", "scale", "beta1", "beta2", "eps"),
    reads=("value",),
    writes=("grad", "mean", "square"),
    host=_direct,
    code=MOMENTS + "grad = rate * mean / (sqrt(square) + eps) + decay * value;",
)
