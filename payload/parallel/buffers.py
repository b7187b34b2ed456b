"""Layout of the parameters in a stage's flat buffers, and the shard of each buffer that this rank
owns.

Consecutive units (groups of layers) form a bucket. Ranks sum its gradients, and gather and free its
weights, as a whole. It is padded so that it can be divided equally between its owners, the
data-parallel ranks:

    whole    | bucket 0: rank 0 | rank 1 | bucket 1: rank 0 | rank 1 |   all parameters, in the order of units
    owned    | bucket 0 | bucket 1 |                                     of rank 0: a shard of every bucket
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
    """Parameters of consecutive units (layer groups). A shared parameter is in its first unit's
    bucket.
    """

    number: int
    # Position in the flat array of all parameters; ``stop`` includes padding.
    start: int
    stop: int
    # Parameters, with their positions in the flat array of all parameters.
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start

    def views(self, whole: Array) -> Iterator[tuple[Parameter, Array]]:
        """Yield each parameter with its view of ``whole``, an array that contains only this
        bucket.
        """
        for segment in self.segments:
            view = whole[segment.start - self.start : segment.stop - self.start]
            yield segment.parameter, view.reshape(segment.parameter.shape)


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Buckets of a pipeline stage's units, and this rank's part of each bucket."""

    buckets: Sequence[Bucket]
    # By unit: the buckets that hold its parameters.
    uses: Mapping[str, Sequence[Bucket]]
    # By unit: the buckets with complete gradients after the unit's backward pass.
    completes: Mapping[str, Sequence[Bucket]]
    # Number of ranks that own a part of every bucket.
    parts: int
    # Index of this rank among the owners.
    rank: int

    @property
    def size(self) -> int:
        """Size of the flat array of all parameters, with padding."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def owned_size(self) -> int:
        return self.size // self.parts

    def owned(self, bucket: Bucket) -> slice:
        """Return the position of this rank's part of a bucket in the flat array that this rank
        owns.
        """
        return slice(bucket.start // self.parts, bucket.stop // self.parts)

    def part(self, bucket: Bucket) -> slice:
        """Return the position of this rank's part of a bucket in an array that contains only that
        bucket.
        """
        size = bucket.size // self.parts
        return slice(self.rank * size, (self.rank + 1) * size)

    def segments(self) -> list[Segment]:
        """Return the pieces of parameters that this rank owns, at their positions in its flat
        array.
        """
        owned_segments = []
        for bucket in self.buckets:
            part = self.part(bucket)
            shift = self.owned(bucket).start - bucket.start - part.start
            for segment in bucket.segments:
                start = max(segment.start, bucket.start + part.start)
                stop = min(segment.stop, bucket.start + part.stop)
                if start < stop:
                    offset = start - segment.start
                    owned_segments.append(
                        Segment(segment.parameter, start + shift, stop + shift, offset)
                    )
        return owned_segments


def make_layout(
    units: Sequence[Unit],
    *,
    min_size: int = 0,
    parts: int = 1,
    rank: int = 0,
    tied: Unit | None = None,
) -> BufferLayout:
    """Put units (groups of layers) into buckets, from last to first, as a backward pass completes
    gradients.

    Args:
        min_size: minimum number of elements of a bucket. The first bucket may be smaller.
        parts: number of ranks that each own a part of every bucket.
        tied: a unit with the parameters that other pipeline stages have, too. It gets the first
            bucket for itself, so that it has the same position on all stages.
    """
    all_units = [tied, *units] if tied else list(units)
    first_uses = _first_uses(all_units)
    runs = _runs(
        {unit.name: sum(p.size for p in first_uses[unit.name]) for unit in units}, min_size
    )
    buckets: list[Bucket] = []
    bucket_of: dict[int, Bucket] = {}
    completes: dict[str, list[Bucket]] = {unit.name: [] for unit in all_units}
    for names in [[tied.name], *runs] if tied else runs:
        start = buckets[-1].stop if buckets else 0
        bucket = _bucket(
            len(buckets), start, [p for name in names for p in first_uses[name]], parts
        )
        if bucket.size:
            buckets.append(bucket)
            completes[names[0]].append(bucket)
            bucket_of |= {id(segment.parameter): bucket for segment in bucket.segments}
    uses = {
        unit.name: list(
            {bucket_of[id(p)].number: bucket_of[id(p)] for p in unit.layer.parameters}.values()
        )
        for unit in all_units
    }
    return BufferLayout(buckets, uses, completes, parts, rank)


def _first_uses(units: Sequence[Unit]) -> dict[str, list[Parameter]]:
    """Return the parameters of each unit by the unit's name, without those that an earlier unit
    also uses.
    """
    first_uses: dict[str, list[Parameter]] = {}
    seen: set[int] = set()
    for unit in units:
        first_uses[unit.name] = [p for p in unit.layer.parameters if id(p) not in seen]
        seen |= {id(p) for p in first_uses[unit.name]}
    return first_uses


def _runs(sizes: dict[str, int], min_size: int) -> list[list[str]]:
    """Group consecutive names, from the last on. A group ends when its sizes add up to
    ``min_size``.
    """
    runs: list[list[str]] = []
    filled = min_size
    for name in reversed(sizes):
        if filled >= min_size:
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
"""Arrays are allocated a sixteenth larger than requested, so that slightly larger requests fit too.
"""


class Pool:
    """Reusable flat arrays of the same dtype. Reusing memory is cheaper than touching new pages."""

    def __init__(self, device: Device, dtype: DTypeLike) -> None:
        self._device = device
        self._dtype = dtype
        self._free: list[Array] = []
        # Bytes of all arrays ever allocated.
        self.nbytes = 0

    def take(self, size: int) -> Array:
        """Return an uninitialized array, possibly as a view of an array that is up to twice as
        large.
        """
        fitting = [n for n, array in enumerate(self._free) if size <= len(array) <= 2 * size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda n: len(self._free[n])))[:size]
        array: Array = self._device.xp.empty(size + size // _SLACK, self._dtype)
        self.nbytes += array.nbytes
        return array[:size]

    def put_back(self, array: Array) -> None:
        """Give an array back to the pool, for reuse."""
        whole: Any = array.base
        self._free.append(whole)
