"""A complete checkpoint, read piece by piece: whatever layout wrote it, and whatever layout asks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from payload.checkpoint.files import DATA, Manifest, contents
from payload.checkpoint.pieces import Piece
from payload.device import Array
from payload.errors import UsageError


class Reader:
    """The pieces of a checkpoint. Files are mapped: only what is asked for is read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._pieces: dict[str, list[tuple[Piece, NDArray[Any]]]] = {}
        for name in (facts.name for facts in manifest.files if facts.name != DATA):
            for piece, numbers in contents(folder / name):
                self._pieces.setdefault(piece.tensor, []).append((piece, numbers))

    def holds(self, piece: Piece, array: Array) -> bool:
        """Whether it has numbers for just this."""
        return any(
            (stored, numbers.dtype) == (piece, array.dtype)
            for stored, numbers in self._pieces.get(piece.tensor, [])
        )

    def tensors(self, *kinds: str) -> dict[str, NDArray[Any]]:
        """All tensors of some kinds, whole, by name."""
        found = {}
        for (piece, numbers), *_ in self._pieces.values():
            if piece.kind in kinds:
                whole = Piece(piece.kind, piece.name, piece.shape, 0, math.prod(piece.shape))
                found[piece.name] = self.read(whole, numbers.dtype).reshape(piece.shape)
        return found

    def read(self, wanted: Piece, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The numbers of a piece, flat.

        Raises:
            UsageError: the checkpoint does not have it, or as other numbers.
        """
        stored = self._pieces.get(wanted.tensor, [])
        if not stored:
            raise UsageError(
                f"--resume: {self._folder} holds no {wanted.tensor}: it is of another model or optimizer"
            )
        piece, numbers = stored[0]
        if (piece.shape, numbers.dtype) != (wanted.shape, dtype):
            raise UsageError(
                f"--resume: {self._folder} holds {wanted.tensor} as {numbers.dtype} {piece.shape}, "
                f"and this run has {dtype} {wanted.shape}"
            )
        if (piece.axis, piece.parts) == (wanted.axis, wanted.parts):
            return self._interval(wanted.tensor, wanted.part, wanted.start, wanted.stop)
        size = int(np.prod(piece.part_shape))
        parts = [
            self._interval(wanted.tensor, part, 0, size).reshape(piece.part_shape)
            for part in range(piece.parts)
        ]
        whole = np.concatenate(parts, axis=piece.axis) if piece.axis is not None else parts[0]
        if wanted.axis is not None:
            whole = np.split(whole, wanted.parts, axis=wanted.axis)[wanted.part]
        return whole.reshape(-1)[wanted.start : wanted.stop]

    def _interval(self, tensor: str, part: int, start: int, stop: int) -> NDArray[Any]:
        """Of one part, as it was cut when it was saved."""
        stored = [(piece, numbers) for piece, numbers in self._pieces[tensor] if piece.part == part]
        out: NDArray[Any] = np.empty(stop - start, self._pieces[tensor][0][1].dtype)
        filled = start
        for piece, numbers in sorted(stored, key=lambda held: held[0].start):
            last = min(stop, piece.stop)
            if piece.start <= filled < last:
                out[filled - start : last - start] = numbers[filled - piece.start : last - piece.start]
                filled = last
        if filled < stop:
            raise UsageError(
                f"--resume: {self._folder} lacks numbers of {tensor}, from {filled} of part {part}"
            )
        return out
