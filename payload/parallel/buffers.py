"""Where each parameter lies in the flat buffers of a stage, and which shard of it this rank owns.

Consecutive units form a bucket, which is summed, gathered and freed as one. A bucket is padded to a multiple
of the number of owners and cut evenly among them:

    whole    | bucket 0: rank 0 | rank 1 | bucket 1: rank 0 | rank 1 |   all parameters, in the order of units
    owned    | bucket 0 | bucket 1 |                                     by rank 0: a shard of every bucket
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import DTypeLike

from payload.device.base import Array, Device
from payload.nn.module import Parameter, Segment, Unit


@dataclass(frozen=True, slots=True)
class Bucket:
    """Units that are treated as one. A parameter that units share lies with the first of them."""

    number: int
    start: int  # in the whole flat array
    stop: int  # with padding
    segments: tuple[Segment, ...]  # in the whole flat array

    @property
    def size(self) -> int:
        return self.stop - self.start

    def views(self, whole: Array) -> Iterator[tuple[Parameter, Array]]:
        """Each parameter, and its place in an array of this bucket alone, in its shape."""
        for segment in self.segments:
            view = whole[segment.start - self.start : segment.stop - self.start]
            yield segment.parameter, view.reshape(segment.parameter.shape)


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Of one stage's units."""

    buckets: Sequence[Bucket]
    uses: Mapping[str, Sequence[Bucket]]  # by unit: those that hold its parameters
    completes: Mapping[str, Sequence[Bucket]]  # by unit: whose gradients are whole after its backward pass
    parts: int  # how many ranks own a part each
    rank: int  # among them

    @property
    def size(self) -> int:
        """Of the whole flat array."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def owned_size(self) -> int:
        return self.size // self.parts

    def owned(self, bucket: Bucket) -> slice:
        """This rank's part of a bucket, in the flat array of what it owns."""
        return slice(bucket.start // self.parts, bucket.stop // self.parts)

    def part(self, bucket: Bucket) -> slice:
        """This rank's part of a bucket, in an array of that bucket alone."""
        size = bucket.size // self.parts
        return slice(self.rank * size, (self.rank + 1) * size)

    def segments(self) -> list[Segment]:
        """What this rank owns."""
        found = []
        for bucket in self.buckets:
            part = self.part(bucket)
            shift = self.owned(bucket).start - bucket.start - part.start
            for segment in bucket.segments:
                start = max(segment.start, bucket.start + part.start)
                stop = min(segment.stop, bucket.start + part.stop)
                if start < stop:
                    offset = start - segment.start
                    found.append(Segment(segment.parameter, start + shift, stop + shift, offset))
        return found


def make_layout(
    units: Sequence[Unit], *, least: int = 0, parts: int = 1, rank: int = 0, tied: Unit | None = None
) -> BufferLayout:
    """Group units from the last to the first, as their gradients appear.

    Args:
        least: numbers in a bucket, but the first, which may have fewer.
        tied: a unit that comes before the others, in a bucket of its own: so what stages of a pipeline share
            lies at the same place on all of them.
    """
    everything = [tied, *units] if tied else list(units)
    own = _own(everything)
    runs = _runs({unit.name: sum(p.size for p in own[unit.name]) for unit in units}, least)
    buckets: list[Bucket] = []
    where: dict[int, Bucket] = {}
    completes: dict[str, list[Bucket]] = {unit.name: [] for unit in everything}
    for names in [[tied.name], *runs] if tied else runs:
        start = buckets[-1].stop if buckets else 0
        bucket = _bucket(len(buckets), start, [p for name in names for p in own[name]], parts)
        if bucket.size:
            buckets.append(bucket)
            completes[names[0]].append(bucket)
            where |= {id(segment.parameter): bucket for segment in bucket.segments}
    uses = {
        unit.name: list({where[id(p)].number: where[id(p)] for p in unit.layer.parameters}.values())
        for unit in everything
    }
    return BufferLayout(buckets, uses, completes, parts, rank)


def _own(units: Sequence[Unit]) -> dict[str, list[Parameter]]:
    """By unit: its parameters, but those of a unit before it."""
    own: dict[str, list[Parameter]] = {}
    seen: set[int] = set()
    for unit in units:
        own[unit.name] = [p for p in unit.layer.parameters if id(p) not in seen]
        seen |= {id(p) for p in own[unit.name]}
    return own


def _runs(sizes: dict[str, int], least: int) -> list[list[str]]:
    """Names in runs that come to at least ``least`` together, filled from the last."""
    runs: list[list[str]] = []
    filled = least
    for name in reversed(sizes):
        if filled >= least:
            runs.append([])
            filled = 0
        runs[-1].append(name)
        filled += sizes[name]
    return [run[::-1] for run in reversed(runs)]


def _bucket(number: int, start: int, parameters: Sequence[Parameter], parts: int) -> Bucket:
    segments = []
    stop = start
    for parameter in parameters:
        segments.append(Segment(parameter, stop, stop + parameter.size))
        stop += parameter.size
    return Bucket(number, start, stop + (start - stop) % parts, tuple(segments))


_SLACK = 16
"""A sixteenth more is made than asked for, so that what is a little larger fits, too."""


class Pool:
    """Flat arrays of one dtype, which are kept: a page of fresh memory costs more than its reuse."""

    def __init__(self, device: Device, dtype: DTypeLike) -> None:
        self._device, self._dtype = device, dtype
        self._free: list[Array] = []
        self.nbytes = 0  # of all arrays that were made

    def take(self, size: int) -> Array:
        """An array with any content: a view of one that may be larger, but not by far."""
        fitting = [n for n, array in enumerate(self._free) if size <= len(array) <= 2 * size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda n: len(self._free[n])))[:size]
        array: Array = self._device.xp.empty(size + size // _SLACK, self._dtype)
        self.nbytes += array.nbytes
        return array[:size]

    def give(self, array: Array) -> None:
        """Take it back."""
        whole: Any = array.base
        self._free.append(whole)
