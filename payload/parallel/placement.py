"""Which units of a model lie on which stage of a pipeline, and which parameters lie on more than one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from payload.comm.base import Communicator
from payload.device import Array, Device
from payload.errors import UsageError
from payload.nn.base import Sequential, Unit
from payload.nn.parameter import Parameter, Segment

_BLOCK = 1 << 20
"""Numbers that stages exchange at once: the other stages' need a place of their own for so long."""

_MEMORY_WEIGHT = 1e-3
"""Work decides; parameters decide between splits of about the same work."""


def split(units: Sequence[Unit], stages: int) -> list[Sequence[Unit]]:
    """Runs of consecutive units, at least one each, of which the most laborious is as light as can be.

    Raises:
        UsageError: there are fewer units than stages.
    """
    if stages > len(units):
        raise UsageError(f"--pp {stages}: the model can only be cut into {len(units)} stages; ask for fewer")
    until = list(accumulate(_costs(units), initial=0.0))  # until[n]: of the first n units
    # best[n]: of the first n units cut into runs, the heaviest run, and where the runs begin
    best = [(math.inf, [0]), *((cost, [0]) for cost in until[1:])]
    for _ in range(1, stages):
        best = [
            min(
                ((max(best[cut][0], until[end] - until[cut]), [*best[cut][1], cut]) for cut in range(end)),
                default=(math.inf, [0]),
            )
            for end in range(len(until))
        ]
    _, cuts = best[-1]
    return [units[start:end] for start, end in pairwise([*cuts, len(units)])]


def _costs(units: Sequence[Unit]) -> list[float]:
    sizes = [sum(parameter.size for parameter in unit.layer.parameters) for unit in units]
    flops, size = sum(unit.flops for unit in units) or 1, sum(sizes) or 1
    return [unit.flops / flops + _MEMORY_WEIGHT * own / size for unit, own in zip(units, sizes, strict=True)]


class Ties:
    """Parameters that units on several stages use, such as GPT's embedding, which is its head as well.

    Each of those stages has a copy. All copies start alike, and get the sum of the gradients of all.
    """

    def __init__(self, stages: Sequence[Sequence[Unit]], pp: Communicator, device: Device) -> None:
        """``stages``: all of them, on every rank."""
        self._pp, self._device = pp, device
        users: dict[int, list[int]] = {}
        for stage, units in enumerate(stages):
            for parameter in _distinct(units):
                users.setdefault(id(parameter), []).append(stage)
        tied = [p for p in _distinct(stages[pp.rank]) if len(users[id(p)]) > 1]
        tied.sort(key=lambda parameter: parameter.name)
        self._users = {id(parameter): users[id(parameter)] for parameter in tied}
        holder = Sequential()  # of no layers: it has only parameters that others use
        holder.parameters = tied
        self.unit = Unit("tied", holder) if tied else None
        """Those of this stage, as a unit that comes before its others: so they lie at the same place on all
        stages, and are reduced last, since a unit's gradients are complete when all later ones' are."""

    def counts(self, parameter: Parameter) -> bool:
        """Whether this stage is the one to count and to save it: the first of those that have it."""
        return self._users.get(id(parameter), [self._pp.rank])[0] == self._pp.rank

    def sum(self, grads: Array, segments: Sequence[Segment]) -> None:
        """Replace gradients of tied parameters, which are sums over data-parallel ranks already, by their
        sums over stages: with the same rounding on all.

        Ranks at the same place on their stages own the same pieces of tied parameters.
        """
        for segment in segments:
            stages = self._users.get(id(segment.parameter), [])
            for start in range(segment.start, segment.stop, _BLOCK) if stages else ():
                self._sum(grads[start : min(start + _BLOCK, segment.stop)], stages)

    def _sum(self, mine: Array, stages: Sequence[int]) -> None:
        sent = [self._pp.isend(mine, stage) for stage in stages if stage != self._pp.rank]
        parts = []
        for stage in stages:
            parts.append(mine)
            if stage != self._pp.rank:
                parts[-1] = self._device.xp.empty_like(mine)
                self._pp.recv(parts[-1], stage)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        for pending in sent:
            pending.wait()
        mine[...] = total


def _distinct(units: Sequence[Unit]) -> list[Parameter]:
    return list({id(p): p for unit in units for p in unit.layer.parameters}.values())
