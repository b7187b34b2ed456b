"""Random numbers that are counted, not drawn one after another (after Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", SC 2011): each is a hash of what it is for.

So a number does not depend on the layout, on the order of work, or on whether NumPy or CuPy computes it.
"""

from __future__ import annotations

import hashlib

from payload.device.base import Array, Device
from payload.nn.module import Draw


def sample_keys(draw: Draw, stream: str) -> Array:
    """For a layer, by its unique name: (B, 2) uint32, a key for each sample of the micro-batch."""
    words = hashlib.blake2b(f"{draw.seed} {draw.iteration} {stream}".encode(), digest_size=8).digest()
    low, high = int.from_bytes(words[:4], "little"), int.from_bytes(words[4:], "little")
    keys = draw.samples[:, None].repeat(2, axis=1)
    keys[:, 0] += low
    keys[:, 1] ^= high
    return _mix(keys)


def part_keys(device: Device, keys: Array, start: int, count: int) -> Array:
    """For parts ``start`` to ``start + count`` of each sample, such as attention heads:
    (B, 2) → (B, count, 2)."""
    parts = device.xp.arange(start + 1, start + count + 1, dtype="uint32")
    parts *= 0x9E3779B9  # 2³² divided by the golden ratio: neighbours get distant values
    return _mix(keys[:, None, :] ^ parts[:, None])


def kept(keys: Array, index: Array, rate: float) -> Array:
    """Whether dropout keeps the elements of these places in their sample, or part of one.

    Args:
        keys: (..., 2) uint32
        index: uint32, below 2³²; its shape follows on that of the keys.
        rate: the share that is not kept.

    Returns:
        bool of shape (..., \\*index.shape)
    """
    return drawn(keys, index) >= round(rate * 2**32)


def drawn(keys: Array, index: Array) -> Array:
    """32 random bits for each of these places: (..., 2), any shape → (..., \\*index.shape), all uint32."""
    low, high = (keys[..., i].reshape(*keys.shape[:-1], *(1,) * index.ndim) for i in (0, 1))
    bits = index * 0x9E3779B9 + low
    bits ^= bits >> 15
    bits *= 0x2C1B3C6D
    bits ^= high
    return _mix(bits)


def _mix(bits: Array) -> Array:
    """MurmurHash3's last step, in place: every bit in changes half of those out."""
    bits ^= bits >> 16
    bits *= 0x85EBCA6B
    bits ^= bits >> 13
    bits *= 0xC2B2AE35
    bits ^= bits >> 16
    return bits
