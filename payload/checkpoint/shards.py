"""The contents of a checkpoint: shards of tensors, each with its position in the tensor.

Positions let a run load the shards even if its ranks are arranged differently from those of the
saving run. On disk, a rank's shards are a file of flat tensors (see ``saved_model.safetensors``). A
manifest has the files' sizes and checksums.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from payload.data.loader import local_slice
from payload.device.base import Array
from payload.errors import PayloadError, UsageError
from payload.nn.module import Segment, state_of
from payload.node.heartbeat import beat
from payload.parallel.engine import Engine
from payload.saved_model.safetensors import FilePlan, plan, read


@dataclass(frozen=True, slots=True)
class Shard:
    """The position of some numbers in a tensor: ``[start, stop)`` in part number ``part``,
    flattened.

    kind: ``weight``, ``optimizer.NAME``, ``state`` (of a layer), or ``rankN`` (state of rank N
        alone).
    shape: shape of the whole tensor, with padding.
    axis: the axis that is split into ``parts`` parts. None: the tensor is not split.
    rows: size of the first axis without padding. None: there is no padding.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    axis: int | None = None
    part: int = 0
    parts: int = 1
    rows: int | None = None

    @property
    def tensor(self) -> str:
        """A name of the tensor, which is the same in all shards of the tensor."""
        return f"{self.kind}/{self.name}"

    @property
    def real_shape(self) -> tuple[int, ...]:
        return self.shape if self.rows is None else (self.rows, *self.shape[1:])

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(n // self.parts if i == self.axis else n for i, n in enumerate(self.shape))


NONE = slice(0, 0)

HeldShard = tuple[Shard, Array]
"""A shard, and a flat, writable view of its numbers on this rank."""


def held_shards(engine: Engine) -> list[HeldShard]:
    """Return shards of all arrays on this rank, to be filled from a checkpoint, except
    ``own_state``.
    """
    return [(shard, array) for shard, array, _ in _all(engine)]


def saved_shards(engine: Engine) -> list[HeldShard]:
    """Return the shards that this rank saves. If several ranks have the same array, each saves a
    part.
    """
    cut = [
        (
            replace(shard, start=shard.start + share.start, stop=shard.start + share.stop),
            array[share],
        )
        for shard, array, share in _all(engine)
        if share.stop > share.start
    ]
    return [*cut, *own_state(engine)]


def own_state(engine: Engine) -> list[HeldShard]:
    """Return shards of state that only this rank has: the error feedback of gradient
    compression.
    """
    kind = f"rank{engine.mesh.world.rank}"
    return [
        (_whole(kind, name, array), array.reshape(-1)) for name, array in engine.own_state.items()
    ]


def scalars(engine: Engine) -> dict[str, int | float]:
    """Return by name the engine's state outside arrays, such as the loss scale. Equal on all
    ranks.
    """
    scale = {f"loss_scale.{name}": value for name, value in engine.loss_scale.state.items()}
    return {"updates": engine.optimizer.updates, **scale}


def set_scalars(engine: Engine, saved: Mapping[str, int | float]) -> None:
    """Restore the state that ``scalars`` returned."""
    engine.optimizer.updates = int(saved["updates"])
    scale = {name.removeprefix("loss_scale."): value for name, value in saved.items()}
    engine.loss_scale.restore(scale)


def _all(engine: Engine) -> Iterator[tuple[Shard, Array, slice]]:
    """For each array on this rank, yield its shard, the flat array, and the slice that this rank
    saves.
    """
    storage = engine.storage
    mesh = engine.mesh
    values = storage.master_weights
    kinds = {"weight": values} | {
        f"optimizer.{name}": array for name, array in engine.optimizer.state.items()
    }
    share = (
        slice(0, len(values))
        if storage.sharded
        else local_slice(len(values), mesh.dp.rank, mesh.dp.size)
    )

    for kind, array in kinds.items():
        if array.shape == values.shape:
            for segment in storage.segments:
                whole = array[segment.start : segment.stop]
                saved = _common(segment, share) if engine.counts(segment.parameter) else NONE
                yield _shard_of(kind, segment), whole, saved
        # The array is the same on all ranks, such as a count.
        else:
            yield _whole(kind, "", array), array.reshape(-1), slice(0, array.size)
    is_first = mesh.dp.rank == mesh.tp.rank == 0
    for name, array in state_of([unit.layer for unit in engine.units]).items():
        yield (
            _whole("state", name, array),
            array.reshape(-1),
            slice(0, array.size) if is_first else NONE,
        )


def _shard_of(kind: str, segment: Segment) -> Shard:
    parameter = segment.parameter
    tp = parameter.context.tp
    part, parts = (0, 1) if parameter.axis is None else (tp.rank, tp.size)
    stop = segment.offset + segment.stop - segment.start
    rows = parameter.rows if parameter.rows != parameter.full_shape[0] else None
    position = (parameter.axis, part, parts, rows)
    return Shard(kind, parameter.name, parameter.full_shape, segment.offset, stop, *position)


def _whole(kind: str, name: str, array: Array) -> Shard:
    return Shard(kind, name, tuple(array.shape), 0, array.size)


def _common(segment: Segment, share: slice) -> slice:
    # The overlap, counted from the start of the segment.
    start = max(segment.start, share.start)
    stop = max(start, min(segment.stop, share.stop))
    return slice(start - segment.start, stop - segment.start)


VERSION = 4
MANIFEST = "manifest.json"
DATA = "data.json"
"""File with ``Dataset.data_state``."""

_BLANK = "00000000"  # placeholder of the checksum
_CHUNK = 1 << 22


class BrokenError(PayloadError):
    """A checkpoint is damaged. The message does not contain the checkpoint's path."""


def rank_file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def plan_shards(held: Sequence[HeldShard]) -> tuple[FilePlan, list[int]]:
    """Return the layout of a file with these shards, and the byte offset of each shard's numbers in
    it.
    """
    names = [f"{shard.tensor}[{shard.start}:{shard.stop}]" for shard, _ in held]
    tensors = {
        name: ((array.size,), np.dtype(array.dtype))
        for name, (_, array) in zip(names, held, strict=True)
    }
    shards = {name: asdict(shard) for name, (shard, _) in zip(names, held, strict=True)}
    layout = plan(tensors, shards=json.dumps(shards))
    return layout, [layout.offsets[name] for name in names]


def contents(path: Path) -> list[tuple[Shard, NDArray[Any]]]:
    """Return the shards in a file, each with its memory-mapped numbers."""
    tensors, metadata = read(path)
    shards: list[tuple[Shard, NDArray[Any]]] = []
    for key, fields in json.loads(metadata["shards"]).items():
        shards.append((Shard(**{**fields, "shape": tuple(fields["shape"])}), tensors[key]))
    return shards


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The name, size and checksum of a file in a checkpoint."""

    name: str
    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The description of a checkpoint: its progress, settings and files."""

    iteration: int
    # dp, tp, pp, zero, and the settings on which ``own_state`` depends.
    layout: Mapping[str, float]
    # Settings that a resumed run must not change, by flag name.
    identity: Mapping[str, Any]
    scalars: Mapping[str, int | float]
    config: Mapping[str, Any]
    files: Sequence[FileFacts]
    # Fields of ``saved_model.record.ModelRecord``.
    model: Mapping[str, Any] = field(default_factory=dict)
    # If False, the evaluation that is due after the iteration is not complete.
    evaluated: bool = True

    def encode(self) -> str:
        """Return the manifest as JSON text that contains its own checksum."""
        fields = {"format": VERSION, "crc32": _BLANK, **asdict(self)}
        text = json.dumps(fields, indent=1, allow_nan=False) + "\n"
        return text.replace(f'"{_BLANK}"', f'"{zlib.crc32(text.encode()):08x}"', 1)


def read_manifest(folder: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint. Raises BrokenError if it is missing or damaged."""
    try:
        text = (folder / MANIFEST).read_bytes().decode()
        fields = json.loads(text)
        version = fields.pop("format")
        crc32 = fields.pop("crc32")
        blank = text.replace(f'"{crc32}"', f'"{_BLANK}"', 1)
        if f"{zlib.crc32(blank.encode()):08x}" != crc32:
            raise BrokenError(f"{MANIFEST} is damaged")
        if version != VERSION:
            raise BrokenError(
                f"it has format {version}, but this payload reads {VERSION}: use the version "
                "that wrote it"
            )
        fields["files"] = [FileFacts(**facts) for facts in fields["files"]]
        return CheckpointManifest(**fields)
    except FileNotFoundError as exc:
        raise BrokenError(f"{MANIFEST} is missing") from exc
    except OSError as exc:
        raise BrokenError(f"{MANIFEST} cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise BrokenError(f"{MANIFEST} is damaged") from exc


def read_data(folder: Path) -> Mapping[str, Any]:
    """Return the state of a checkpoint's data set. Raises BrokenError if its file is missing or
    damaged.
    """
    try:
        data_state: Mapping[str, Any] = json.loads((folder / DATA).read_bytes())
    except OSError as exc:
        raise BrokenError(f"{DATA} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise BrokenError(f"{DATA} is damaged") from exc
    return data_state


def verify(folder: Path, facts: FileFacts) -> None:
    """Raise BrokenError if the file's size or checksum in ``folder`` differs from ``facts``."""
    path = folder / facts.name
    try:
        size = path.stat().st_size
        crc32 = 0
        if size != facts.size:
            raise BrokenError(f"{facts.name} has {size} bytes, not {facts.size}")
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                beat()
                crc32 = zlib.crc32(chunk, crc32)
    except OSError as exc:
        raise BrokenError(f"{facts.name} cannot be read: {exc.strerror}") from exc
    if crc32 != facts.crc32:
        raise BrokenError(f"{facts.name} is damaged")


class CheckpointReader:
    """Reads a checkpoint for any layout of ranks. Files are memory-mapped: only requested parts are
    read.
    """

    def __init__(self, folder: Path, manifest: CheckpointManifest) -> None:
        self._folder = folder
        self._shards: dict[str, list[tuple[Shard, NDArray[Any]]]] = {}
        for name in (facts.name for facts in manifest.files if facts.name != DATA):
            for shard, numbers in contents(folder / name):
                self._shards.setdefault(shard.tensor, []).append((shard, numbers))

    def holds(self, shard: Shard, array: Array) -> bool:
        """Return whether the checkpoint has exactly this shard, with the dtype of ``array``."""
        return any(
            (stored, numbers.dtype) == (shard, array.dtype)
            for stored, numbers in self._shards.get(shard.tensor, [])
        )

    def whole(self, kind: str, name: str) -> NDArray[Any]:
        """Return a whole tensor. kind, name: see ``Shard``. Raises UsageError if the tensor is
        missing.
        """
        stored = self._shards.get(f"{kind}/{name}")
        if not stored:
            raise UsageError(
                f"{self._folder} does not contain the tensor {kind}/{name}",
                code="checkpoint-without-entry",
            )
        shard, numbers = stored[0]
        size = math.prod(shard.shape)
        whole_shard = replace(shard, start=0, stop=size, axis=None, part=0, parts=1)
        return self.read(whole_shard, numbers.dtype).reshape(shard.shape)

    def read(self, target: Shard, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the numbers of the shard ``target`` as a flat array, joined from shards in the
        checkpoint.

        Raises UsageError if the checkpoint does not have the tensor with the shard's shape and this
        dtype.
        """
        stored = self._shards.get(target.tensor, [])
        if not stored:
            raise UsageError(
                f"--resume: {self._folder} does not contain {target.tensor}: "
                "pass the model and the optimizer of the run that saved it",
                code="checkpoint-other-model",
            )
        stored_shard, numbers = stored[0]
        if (stored_shard.real_shape, numbers.dtype) != (target.real_shape, dtype):
            raise UsageError(
                f"--resume: {target.tensor} in {self._folder} is {numbers.dtype} of shape "
                f"{stored_shard.shape}, but in this run it is {dtype} of shape {target.shape}",
                code="checkpoint-other-shape",
            )
        stored_layout = (stored_shard.axis, stored_shard.parts, stored_shard.shape)
        if stored_layout == (target.axis, target.parts, target.shape):
            return self._interval(target.tensor, target.part, target.start, target.stop)
        size = int(np.prod(stored_shard.part_shape))
        parts = [
            self._interval(target.tensor, part, 0, size).reshape(stored_shard.part_shape)
            for part in range(stored_shard.parts)
        ]
        whole = (
            np.concatenate(parts, axis=stored_shard.axis)
            if stored_shard.axis is not None
            else parts[0]
        )
        # With another number of tensor-parallel ranks, the padding differs.
        if stored_shard.shape != target.shape:
            padded = np.zeros(target.shape, whole.dtype)
            padded[: target.real_shape[0]] = whole[: target.real_shape[0]]
            whole = padded
        if target.axis is not None:
            whole = np.split(whole, target.parts, axis=target.axis)[target.part]
        return whole.reshape(-1)[target.start : target.stop]

    def _interval(self, tensor: str, part: int, start: int, stop: int) -> NDArray[Any]:
        """Return numbers ``[start, stop)`` of the tensor's part with this index, joined from saved
        shards.
        """
        stored = [(shard, numbers) for shard, numbers in self._shards[tensor] if shard.part == part]
        result: NDArray[Any] = np.empty(stop - start, self._shards[tensor][0][1].dtype)
        filled = start
        beat()
        for shard, numbers in sorted(stored, key=lambda each: each[0].start):
            last = min(stop, shard.stop)
            if shard.start <= filled < last:
                result[filled - start : last - start] = numbers[
                    filled - shard.start : last - shard.start
                ]
                filled = last
        if filled < stop:
            raise UsageError(
                f"--resume: {self._folder} is incomplete: part {part} of {tensor} ends after "
                f"number {filled}",
                code="checkpoint-incomplete",
            )
        return result
