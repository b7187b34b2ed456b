"""Gathering of a model's whole tensors on rank 0, tensor by tensor."""

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
    rank: int
    # Index of the tensor-parallel part of the tensor.
    part: int
    # Elements of the flattened part.
    start: int
    stop: int


class WholeTensors:
    """A model's parameters and layer state as in PyTorch: whole tensors in float32, in order of
    name.

    The tensors are the same for any layout of ranks.
    """

    def __init__(self, engine: Engine, units: Sequence[Unit]) -> None:
        """Find the ranks that hold each tensor. All ranks must call this together. units: the whole
        model.
        """
        self._engine = engine
        self._world = engine.mesh.world
        self._parameters = {p.name: p for unit in units for p in unit.layer.parameters}
        self.shapes: dict[str, Shape] = dict(sorted(torch_shapes(units).items()))
        self._own_pieces: dict[str, list[tuple[_Piece, Array]]] = {}
        for name, piece, array in self._find_own_pieces():
            self._own_pieces.setdefault(name, []).append((piece, array))
        pieces = {name: [piece for piece, _ in held] for name, held in self._own_pieces.items()}
        self._pieces: dict[str, list[_Piece]] = {}
        for pieces_of_rank in self._world.allgather(pieces):
            for name, rank_pieces in pieces_of_rank.items():
                self._pieces.setdefault(name, []).extend(rank_pieces)

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, tensor). On ranks other than 0, tensors are empty, but the rank must
        iterate, too.
        """
        for name, shape in self.shapes.items():
            if self._world.rank == 0:
                yield (
                    name,
                    np.ascontiguousarray(self._joined(name).astype("float32").reshape(shape)),
                )
            else:
                for _, array in self._own_pieces.get(name, ()):
                    self._world.isend(self._on_device(array), 0).wait()
                yield name, np.empty(0, "float32")

    def _find_own_pieces(self) -> Iterator[tuple[str, _Piece, Array]]:
        """Yield (tensor's name, piece, numbers) for pieces of which this rank holds the first
        copy.
        """
        engine = self._engine
        mesh = self._engine.mesh
        storage = self._engine.storage
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
        parameter = self._parameters.get(name)
        size = parameter.size if parameter else math.prod(self.shapes[name])
        parts: dict[int, Array] = {}
        own_pieces = iter(self._own_pieces.get(name, ()))
        for piece in self._pieces[name]:
            array = (
                self._on_host(next(own_pieces)[1])
                if piece.rank == 0
                else self._receive(parameter, piece)
            )
            part = parts.setdefault(piece.part, np.empty(size, array.dtype))
            part[piece.start : piece.stop] = array
        if parameter is None:
            return parts[0]
        shaped = [part.reshape(parameter.shape) for _, part in sorted(parts.items())]
        whole = shaped[0] if parameter.axis is None else np.concatenate(shaped, axis=parameter.axis)
        return parameter.form.to_torch(whole[: parameter.rows])

    def _receive(self, parameter: Parameter | None, piece: _Piece) -> Array:
        # The state of layers, unlike their parameters, is float64.
        dtype = self._engine.storage.master_weights.dtype if parameter else "float64"
        array: Array = self._engine.device.xp.empty(piece.stop - piece.start, dtype)
        self._world.recv(array, piece.rank)
        return self._engine.device.to_host(array)

    def _on_host(self, array: Array) -> Array:
        return array if isinstance(array, np.ndarray) else self._engine.device.to_host(array)

    def _on_device(self, array: Array) -> Array:
        return self._engine.device.asarray(array) if isinstance(array, np.ndarray) else array
