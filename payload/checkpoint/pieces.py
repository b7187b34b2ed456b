"""What a checkpoint holds: pieces of tensors, each with its place in the whole, for any layout to load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from payload.data.order import shard
from payload.device import Array
from payload.nn.base import state_of
from payload.nn.parameter import Segment
from payload.parallel.engine import Engine


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers ``[start, stop)`` of one part of a tensor, flattened. Parts lie along one axis of it."""

    kind: str  # weight, optimizer.NAME, state (of a layer), or rankN for what is that rank's own
    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    axis: int | None = None  # None: there is one part, the whole
    part: int = 0
    parts: int = 1

    @property
    def tensor(self) -> str:
        """The same for all pieces of one tensor."""
        return f"{self.kind}/{self.name}"

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(n // self.parts if i == self.axis else n for i, n in enumerate(self.shape))


NONE = slice(0, 0)

Held = tuple[Piece, Array]
"""A piece, and this rank's array of its numbers, flat: a view, through which it can be read and written."""


def held(engine: Engine) -> list[Held]:
    """All that this rank needs to go on, but its ``own_state``."""
    return [(piece, array) for piece, array, _ in _all(engine)]


def share(engine: Engine) -> list[Held]:
    """What this rank saves of it: of what several ranks hold alike, each saves another piece."""
    cut = [
        (replace(piece, start=piece.start + mine.start, stop=piece.start + mine.stop), array[mine])
        for piece, array, mine in _all(engine)
        if mine.stop > mine.start
    ]
    return [*cut, *own_state(engine)]


def own_state(engine: Engine) -> list[Held]:
    """What belongs to this rank alone, and means nothing in another layout: it saves all of that."""
    kind = f"rank{engine.mesh.world.rank}"
    return [(_whole(kind, name, array), array.reshape(-1)) for name, array in engine.own_state.items()]


def scalars(engine: Engine) -> dict[str, int | float]:
    """What is no array, the same on all ranks."""
    scale = {f"loss_scale.{name}": value for name, value in engine.loss_scale.state.items()}
    return {"updates": engine.optimizer.updates, **scale}


def set_scalars(engine: Engine, saved: Mapping[str, int | float]) -> None:
    """Go on from them."""
    engine.optimizer.updates = int(saved["updates"])
    scale = {name.removeprefix("loss_scale."): value for name, value in saved.items()}
    engine.loss_scale.restore(scale)


def _all(engine: Engine) -> Iterator[tuple[Piece, Array, slice]]:
    """What this rank holds, and which slice of each is its share to save."""
    storage, mesh = engine.storage, engine.mesh
    values = storage.values
    kinds = {"weight": values} | {
        f"optimizer.{name}": array for name, array in engine.optimizer.state.items()
    }
    mine = slice(0, len(values)) if storage.shared else shard(len(values), mesh.dp.rank, mesh.dp.size)

    def saves(segment: Segment) -> bool:
        """Of those that all tensor-parallel ranks hold alike, or more than one stage, one rank does."""
        parted = segment.parameter.axis is not None
        return (parted or mesh.tp.rank == 0) and engine.ties.counts(segment.parameter)

    for kind, array in kinds.items():
        if array.shape == values.shape:
            for segment in storage.segments:
                whole = array[segment.start : segment.stop]
                yield _piece(kind, segment), whole, _common(segment, mine) if saves(segment) else NONE
        else:  # the same on all ranks, such as a count
            yield _whole(kind, "", array), array.reshape(-1), slice(0, array.size)
    first = mesh.dp.rank == mesh.tp.rank == 0
    for name, array in state_of([unit.layer for unit in engine.units]).items():
        yield _whole("state", name, array), array.reshape(-1), slice(0, array.size) if first else NONE


def _piece(kind: str, segment: Segment) -> Piece:
    parameter = segment.parameter
    tp = parameter.context.tp
    place = (None, 0, 1) if parameter.axis is None else (parameter.axis, tp.rank, tp.size)
    stop = segment.offset + segment.stop - segment.start
    return Piece(kind, parameter.name, parameter.full_shape, segment.offset, stop, *place)


def _whole(kind: str, name: str, array: Array) -> Piece:
    return Piece(kind, name, tuple(array.shape), 0, array.size)


def _common(segment: Segment, mine: slice) -> slice:
    """What of a segment lies in this rank's share of the flat array."""
    start = max(segment.start, mine.start)
    stop = max(start, min(segment.stop, mine.stop))
    return slice(start - segment.start, stop - segment.start)
