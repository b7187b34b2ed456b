"""The whole tensors of a model, one after the other on rank 0, wherever their parts are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from payload.device.base import Array
from payload.nn.form import Shape
from payload.nn.module import Parameter, Unit, state_of, torch_shapes
from payload.parallel.engine import Engine


@dataclass(frozen=True, slots=True)
class _Piece:
    """Numbers ``[start, stop)`` of a tensor-parallel part, flattened, that a rank gives."""

    rank: int
    part: int
    start: int
    stop: int


class WholeTensors:
    """A model's parameters and layers' state as PyTorch has them, in float32, by sorted name: the same on any
    layout of ranks."""

    def __init__(self, engine: Engine, units: Sequence[Unit]) -> None:
        """All ranks call it together. ``units``: the whole model; the engine has this rank's stage."""
        self._engine, self._world = engine, engine.mesh.world
        self._parameters = {p.name: p for unit in units for p in unit.layer.parameters}
        self.shapes: dict[str, Shape] = dict(sorted(torch_shapes(units).items()))
        self._mine: dict[str, list[tuple[_Piece, Array]]] = {}
        for name, piece, array in self._held():
            self._mine.setdefault(name, []).append((piece, array))
        pieces = {name: [piece for piece, _ in held] for name, held in self._mine.items()}
        self._pieces: dict[str, list[_Piece]] = {}
        for theirs in self._world.allgather(pieces):
            for name, some in theirs.items():
                self._pieces.setdefault(name, []).extend(some)

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        """All ranks iterate together, to the end; rank 0 is given the tensors, others empty arrays."""
        for name, shape in self.shapes.items():
            if self._world.rank == 0:
                yield name, np.ascontiguousarray(self._joined(name).astype("float32").reshape(shape))
            else:
                for _, array in self._mine.get(name, ()):
                    self._world.isend(self._on_device(array), 0).wait()
                yield name, np.empty(0, "float32")

    def _held(self) -> Iterator[tuple[str, _Piece, Array]]:
        """What this rank gives: of what several have alike, one does."""
        engine, mesh, storage = self._engine, self._engine.mesh, self._engine.storage
        rank = self._world.rank
        if storage.sharded or mesh.dp.rank == 0:
            for segment in storage.segments:
                parameter = segment.parameter
                if engine.counts(parameter):
                    part = 0 if parameter.axis is None else mesh.tp.rank
                    stop = segment.offset + segment.stop - segment.start
                    array = storage.master_weights[segment.start : segment.stop]
                    yield parameter.name, _Piece(rank, part, segment.offset, stop), array
        if mesh.dp.rank == mesh.tp.rank == 0:
            for name, array in state_of([unit.layer for unit in engine.units]).items():
                yield name, _Piece(rank, 0, 0, array.size), array.reshape(-1)

    def _joined(self, name: str) -> Array:
        """Of all ranks' pieces, as PyTorch has it."""
        parameter = self._parameters.get(name)
        size = parameter.size if parameter else math.prod(self.shapes[name])
        parts: dict[int, Array] = {}
        mine = iter(self._mine.get(name, ()))
        for piece in self._pieces[name]:
            array = self._host(next(mine)[1]) if piece.rank == 0 else self._received(parameter, piece)
            part = parts.setdefault(piece.part, np.empty(size, array.dtype))
            part[piece.start : piece.stop] = array
        if parameter is None:
            return parts[0]
        shaped = [part.reshape(parameter.shape) for _, part in sorted(parts.items())]
        whole = shaped[0] if parameter.axis is None else np.concatenate(shaped, axis=parameter.axis)
        return parameter.form.to_torch(whole[: parameter.rows])

    def _received(self, parameter: Parameter | None, piece: _Piece) -> Array:
        dtype = self._engine.storage.master_weights.dtype if parameter else "float64"  # as state is
        array: Array = self._engine.device.xp.empty(piece.stop - piece.start, dtype)
        self._world.recv(array, piece.rank)
        return self._engine.device.to_host(array)

    def _host(self, array: Array) -> Array:
        """One that is maybe offloaded already."""
        return array if isinstance(array, np.ndarray) else self._engine.device.to_host(array)

    def _on_device(self, array: Array) -> Array:
        return self._engine.device.asarray(array) if isinstance(array, np.ndarray) else array
