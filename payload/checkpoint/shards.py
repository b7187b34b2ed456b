"""What a checkpoint holds: shards of tensors, each with its place in the whole, for any layout to load.

On disk they are files of flat tensors (see ``saved_model.safetensors``). A manifest vouches for the files.
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
from payload.parallel.engine import Engine
from payload.saved_model.safetensors import FilePlan, plan, read


@dataclass(frozen=True, slots=True)
class Shard:
    """Numbers ``[start, stop)`` of one part of a tensor, flattened. Parts lie along one axis of it."""

    kind: str  # weight, optimizer.NAME, state (of a layer), or rankN for what is that rank's own
    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    axis: int | None = None  # None: there is one part, the whole
    part: int = 0
    parts: int = 1
    rows: int | None = None  # of the first axis that are no padding; None: all

    @property
    def tensor(self) -> str:
        """The same for all shards of one tensor."""
        return f"{self.kind}/{self.name}"

    @property
    def real_shape(self) -> tuple[int, ...]:
        """Without padding."""
        return self.shape if self.rows is None else (self.rows, *self.shape[1:])

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(n // self.parts if i == self.axis else n for i, n in enumerate(self.shape))


NONE = slice(0, 0)

HeldShard = tuple[Shard, Array]
"""A shard, and this rank's array of its numbers, flat: a view, through which it can be read and written."""


def held_shards(engine: Engine) -> list[HeldShard]:
    """All that this rank needs to go on, but its ``own_state``."""
    return [(shard, array) for shard, array, _ in _all(engine)]


def saved_shards(engine: Engine) -> list[HeldShard]:
    """What this rank saves of it: of what several ranks hold alike, each saves another shard."""
    cut = [
        (replace(shard, start=shard.start + mine.start, stop=shard.start + mine.stop), array[mine])
        for shard, array, mine in _all(engine)
        if mine.stop > mine.start
    ]
    return [*cut, *own_state(engine)]


def own_state(engine: Engine) -> list[HeldShard]:
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


def _all(engine: Engine) -> Iterator[tuple[Shard, Array, slice]]:
    """What this rank holds, and which slice of each is its share to save."""
    storage, mesh = engine.storage, engine.mesh
    values = storage.master_weights
    kinds = {"weight": values} | {
        f"optimizer.{name}": array for name, array in engine.optimizer.state.items()
    }
    mine = slice(0, len(values)) if storage.sharded else local_slice(len(values), mesh.dp.rank, mesh.dp.size)

    for kind, array in kinds.items():
        if array.shape == values.shape:
            for segment in storage.segments:
                whole = array[segment.start : segment.stop]
                saved = _common(segment, mine) if engine.counts(segment.parameter) else NONE
                yield _shard_of(kind, segment), whole, saved
        else:  # the same on all ranks, such as a count
            yield _whole(kind, "", array), array.reshape(-1), slice(0, array.size)
    first = mesh.dp.rank == mesh.tp.rank == 0
    for name, array in state_of([unit.layer for unit in engine.units]).items():
        yield _whole("state", name, array), array.reshape(-1), slice(0, array.size) if first else NONE


def _shard_of(kind: str, segment: Segment) -> Shard:
    parameter = segment.parameter
    tp = parameter.context.tp
    part, parts = (0, 1) if parameter.axis is None else (tp.rank, tp.size)
    stop = segment.offset + segment.stop - segment.start
    rows = parameter.rows if parameter.rows != parameter.full_shape[0] else None
    place = (parameter.axis, part, parts, rows)
    return Shard(kind, parameter.name, parameter.full_shape, segment.offset, stop, *place)


def _whole(kind: str, name: str, array: Array) -> Shard:
    return Shard(kind, name, tuple(array.shape), 0, array.size)


def _common(segment: Segment, mine: slice) -> slice:
    """What of a segment lies in this rank's share of the flat array."""
    start = max(segment.start, mine.start)
    stop = max(start, min(segment.stop, mine.stop))
    return slice(start - segment.start, stop - segment.start)


VERSION = 4
MANIFEST = "manifest.json"
DATA = "data.json"
"""What was learned of the training data, such as a tokenizer, by which other data is read."""

_BLANK = "00000000"  # stands for the manifest's checksum where that is taken
_CHUNK = 1 << 22


class BrokenError(PayloadError):
    """A checkpoint is not whole: what is wrong, without its folder."""


def rank_file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def plan_shards(held: Sequence[HeldShard]) -> tuple[FilePlan, list[int]]:
    """Lay out a rank's file; where the numbers of each of these shards lie."""
    names = [f"{shard.tensor}[{shard.start}:{shard.stop}]" for shard, _ in held]
    tensors = {
        name: ((array.size,), np.dtype(array.dtype)) for name, (_, array) in zip(names, held, strict=True)
    }
    shards = {name: asdict(shard) for name, (shard, _) in zip(names, held, strict=True)}
    layout = plan(tensors, shards=json.dumps(shards))
    return layout, [layout.offsets[name] for name in names]


def contents(path: Path) -> list[tuple[Shard, NDArray[Any]]]:
    """The shards in a file; their numbers are read when they are used."""
    tensors, metadata = read(path)
    found: list[tuple[Shard, NDArray[Any]]] = []
    for key, fields in json.loads(metadata["shards"]).items():
        found.append((Shard(**{**fields, "shape": tuple(fields["shape"])}), tensors[key]))
    return found


@dataclass(frozen=True, slots=True)
class FileFacts:
    """By which a file is known to be whole."""

    name: str
    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is."""

    iteration: int  # done
    layout: Mapping[str, float]  # dp, tp, pp, zero, and what else ranks' own state depends on
    identity: Mapping[str, Any]  # settings with which it can be gone on with, by the names of their flags
    scalars: Mapping[str, int | float]  # state that is no array
    config: Mapping[str, Any]  # all settings, for people
    files: Sequence[FileFacts]
    model: Mapping[str, Any] = field(default_factory=dict)  # as of ``saved_model.folder.ModelRecord.fields``

    def encode(self) -> str:
        """As text with a checksum of itself in it."""
        fields = {"format": VERSION, "crc32": _BLANK, **asdict(self)}
        text = json.dumps(fields, indent=1, allow_nan=False) + "\n"
        return text.replace(f'"{_BLANK}"', f'"{zlib.crc32(text.encode()):08x}"', 1)


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        BrokenError: it is not there, or not as it was written.
    """
    try:
        text = (folder / MANIFEST).read_bytes().decode()
        fields = json.loads(text)
        version, crc32 = fields.pop("format"), fields.pop("crc32")
        blank = text.replace(f'"{crc32}"', f'"{_BLANK}"', 1)
        if f"{zlib.crc32(blank.encode()):08x}" != crc32:
            raise BrokenError(f"{MANIFEST} is not as it was written")
        if version != VERSION:
            raise BrokenError(
                f"it is of format {version}, and this program reads {VERSION}: use the one that wrote it"
            )
        fields["files"] = [FileFacts(**facts) for facts in fields["files"]]
        return Manifest(**fields)
    except FileNotFoundError as exc:
        raise BrokenError(f"it has no {MANIFEST}") from exc
    except OSError as exc:
        raise BrokenError(f"{MANIFEST} cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:  # no JSON, or other than was written
        raise BrokenError(f"{MANIFEST} is not as it was written") from exc


def read_data(folder: Path) -> Mapping[str, Any]:
    """What the run has learned of its data.

    Raises:
        BrokenError: it is not there, or not as it was written.
    """
    try:
        data_state: Mapping[str, Any] = json.loads((folder / DATA).read_bytes())
    except OSError as exc:
        raise BrokenError(f"{DATA} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise BrokenError(f"{DATA} is not as it was written") from exc
    return data_state


def verify(folder: Path, facts: FileFacts) -> None:
    """
    Raises:
        BrokenError: the file is not as it was written.
    """
    path = folder / facts.name
    try:
        size, crc32 = path.stat().st_size, 0
        if size != facts.size:
            raise BrokenError(f"{facts.name} has {size} bytes, not {facts.size}")
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                crc32 = zlib.crc32(chunk, crc32)
    except OSError as exc:
        raise BrokenError(f"{facts.name} cannot be read: {exc.strerror}") from exc
    if crc32 != facts.crc32:
        raise BrokenError(f"{facts.name} is not as it was written")


class Reader:
    """The shards of a checkpoint. Files are mapped: only what is asked for is read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._shards: dict[str, list[tuple[Shard, NDArray[Any]]]] = {}
        for name in (facts.name for facts in manifest.files if facts.name != DATA):
            for shard, numbers in contents(folder / name):
                self._shards.setdefault(shard.tensor, []).append((shard, numbers))

    def holds(self, shard: Shard, array: Array) -> bool:
        """Whether it has numbers for just this."""
        return any(
            (stored, numbers.dtype) == (shard, array.dtype)
            for stored, numbers in self._shards.get(shard.tensor, [])
        )

    def whole(self, kind: str, name: str) -> NDArray[Any]:
        """A whole tensor.

        Raises:
            UsageError: the checkpoint does not have it.
        """
        stored = self._shards.get(f"{kind}/{name}")
        if not stored:
            raise UsageError(f"{self._folder} holds no {kind}/{name}", code="checkpoint-without-entry")
        shard, numbers = stored[0]
        size = math.prod(shard.shape)
        wanted = replace(shard, start=0, stop=size, axis=None, part=0, parts=1)
        return self.read(wanted, numbers.dtype).reshape(shard.shape)

    def read(self, wanted: Shard, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The numbers of a shard, flat.

        Raises:
            UsageError: the checkpoint does not have it, or as other numbers.
        """
        stored = self._shards.get(wanted.tensor, [])
        if not stored:
            raise UsageError(
                f"--resume: {self._folder} holds no {wanted.tensor}: it is of another model or optimizer",
                code="checkpoint-other-model",
            )
        shard, numbers = stored[0]
        if (shard.real_shape, numbers.dtype) != (wanted.real_shape, dtype):
            raise UsageError(
                f"--resume: {self._folder} holds {wanted.tensor} as {numbers.dtype} {shard.shape}, "
                f"and this run has {dtype} {wanted.shape}",
                code="checkpoint-other-shape",
            )
        if (shard.axis, shard.parts, shard.shape) == (wanted.axis, wanted.parts, wanted.shape):
            return self._interval(wanted.tensor, wanted.part, wanted.start, wanted.stop)
        size = int(np.prod(shard.part_shape))
        parts = [
            self._interval(wanted.tensor, part, 0, size).reshape(shard.part_shape)
            for part in range(shard.parts)
        ]
        whole = np.concatenate(parts, axis=shard.axis) if shard.axis is not None else parts[0]
        if shard.shape != wanted.shape:  # other tensor-parallel ranks ask for other padding
            padded = np.zeros(wanted.shape, whole.dtype)
            padded[: wanted.real_shape[0]] = whole[: wanted.real_shape[0]]
            whole = padded
        if wanted.axis is not None:
            whole = np.split(whole, wanted.parts, axis=wanted.axis)[wanted.part]
        return whole.reshape(-1)[wanted.start : wanted.stop]

    def _interval(self, tensor: str, part: int, start: int, stop: int) -> NDArray[Any]:
        """Of one part, as it was cut when it was saved."""
        stored = [(shard, numbers) for shard, numbers in self._shards[tensor] if shard.part == part]
        out: NDArray[Any] = np.empty(stop - start, self._shards[tensor][0][1].dtype)
        filled = start
        for shard, numbers in sorted(stored, key=lambda each: each[0].start):
            last = min(stop, shard.stop)
            if shard.start <= filled < last:
                out[filled - start : last - start] = numbers[filled - shard.start : last - shard.start]
                filled = last
        if filled < stop:
            raise UsageError(
                f"--resume: {self._folder} lacks numbers of {tensor}, from {filled} of part {part}",
                code="checkpoint-incomplete",
            )
        return out
