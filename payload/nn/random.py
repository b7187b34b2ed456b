"""Counter-based random numbers (after Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011).

Each number is a hash of seed, iteration, sample, purpose and position. It depends neither on the
layout of ranks nor on the order of computation, and is the same in NumPy and CuPy.
"""

from __future__ import annotations

import numpy as np

from payload.device.base import Array, Device, Kernel
from payload.nn.module import RandomState


def sample_keys(draw: RandomState, stream: str) -> Array:
    """Return a random key for each sample: (B, 2) uint32. stream: name of the layer that uses the
    key.
    """
    low, high = draw.words(stream)
    keys = draw.samples[:, None].repeat(2, axis=1)
    keys[:, 0] += low
    keys[:, 1] ^= high
    return _mix(keys)


def part_keys(device: Device, keys: Array, start: int, count: int) -> Array:
    """Derive keys for parts of samples, such as heads: (B, 2) → (B, count, 2). start: first part's
    number.
    """
    parts = device.xp.arange(start + 1, start + count + 1, dtype="uint32")
    # 2³² divided by the golden ratio: neighbouring parts get distant values.
    parts *= 0x9E3779B9
    return _mix(keys[:, None, :] ^ parts[:, None])


def keep_mask(keys: Array, index: Array, rate: float) -> Array:
    """Return for each element whether dropout keeps it: booleans of shape (..., *index.shape).

    keys: (..., 2) uint32. index: uint32 positions of the elements in a sample or part. rate: share
        to drop.
    """
    return random_bits(keys, index) >= round(rate * 2**32)


def draw_kept(device: Device, keys: Array, index: Array, rate: float, out: Array) -> None:
    """Write ``keep_mask`` to ``out`` in a single pass: 1 or 0 of any dtype. out: (N, M), in C order.

    keys: (N, 2). index: (M,).
    """
    limit = {"limit": round(rate * 2**32)}
    device.apply(_KEPT, limit, keys[:, :1], keys[:, 1:], index[None], out)


def random_bits(keys: Array, index: Array) -> Array:
    """Return 32 random bits for each position: keys (..., 2) and index → (..., *index.shape), all
    uint32.
    """
    low, high = (keys[..., i].reshape(*keys.shape[:-1], *(1,) * index.ndim) for i in (0, 1))
    bits = index * 0x9E3779B9 + low
    bits ^= bits >> 15
    bits *= 0x2C1B3C6D
    bits ^= high
    return _mix(bits)


def _mix(bits: Array) -> Array:
    """Apply MurmurHash3's final step in place: changing an input bit flips about half of the output
    bits.
    """
    bits ^= bits >> 16
    bits *= 0x85EBCA6B
    bits ^= bits >> 13
    bits *= 0xC2B2AE35
    bits ^= bits >> 16
    return bits


def _keep(low: Array, high: Array, place: Array, kept: Array, *, limit: int) -> None:
    kept[...] = random_bits(np.concatenate([low, high], axis=1), place[0]) >= limit


_KEPT = Kernel(
    "kept",
    ("limit",),
    reads=("low", "high", "place"),
    writes=("kept",),
    host=_keep,
    code="""
    unsigned int bits = place * 0x9E3779B9u + low;
    bits ^= bits >> 15;
    bits *= 0x2C1B3C6Du;
    bits ^= high;
    bits ^= bits >> 16;
    bits *= 0x85EBCA6Bu;
    bits ^= bits >> 13;
    bits *= 0xC2B2AE35u;
    bits ^= bits >> 16;
    kept = T(bits >= limit);
    """,
    types={"limit": "uint32", "low": "uint32", "high": "uint32", "place": "uint32"},
)
