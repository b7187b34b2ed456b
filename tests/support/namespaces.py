"""Sockets in another network namespace, while this process stays in its own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_OWN = Path("/proc/thread-self/ns/net")


@contextmanager
def inside(namespace: Path) -> Iterator[None]:
    """Sockets that this thread makes in the body belong to that namespace, also afterwards. Needs root."""
    with _OWN.open() as own, namespace.open() as other:
        _enter(other.fileno())
        try:
            yield
        finally:
            _enter(own.fileno())


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")
