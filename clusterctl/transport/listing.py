"""What the cluster says that it has. Nothing of it is trusted to be a sane path."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass

from clusterctl.errors import TransferError, printable
from clusterctl.transport.tree import Kind

_MAX_NAME = 255  # bytes; Linux file systems take no longer one
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Remote:
    """One thing on the cluster. ``index`` is its place in the cluster's list, ``size`` is in bytes.

    ``space`` is what it takes on a disk, less where it has holes.
    """

    index: int
    path: str
    kind: Kind
    mode: int
    mtime_ns: int
    size: int
    space: int
    target: str


def parse_listing(lines: Iterable[bytes]) -> tuple[tuple[Remote, ...], tuple[str, ...]]:
    """What can be fetched, folders before what is in them; and the paths of what is of no kind that travels.

    Raises:
        TransferError: it can't be so.
    """
    found: dict[str, Remote] = {}
    others: list[str] = []
    for index, line in enumerate(lines):
        try:
            kind, name, mode, mtime_ns, size, space, target = json.loads(line)
            path = os.fsdecode(inside(base64.b64decode(name)))
            if kind == OTHER:
                others.append(path)
                continue
            text = os.fsdecode(base64.b64decode(target))
            sizes = int(size), min(int(size), int(space))
            remote = Remote(index, path, Kind(kind), int(mode) & 0o777, int(mtime_ns), *sizes, text)
        except (ValueError, TypeError, RecursionError) as exc:
            raise _untrusted(line, str(exc)) from exc
        parent = path.rpartition("/")[0]
        if path in found or remote.size < 0 or (parent and _kind(found, parent) is not Kind.FOLDER):
            raise _untrusted(line, "it can't be so")
        found[path] = remote
    return tuple(found.values()), tuple(others)


def _kind(found: dict[str, Remote], path: str) -> Kind | None:
    return found[path].kind if path in found else None


def inside(path: bytes) -> bytes:
    """A path that the cluster names, as it is.

    Raises:
        ValueError: it leads out of the folder that it is relative to, or is none.
    """
    parts = path.split(b"/")
    if b"\0" in path or any(part in {b"", b".", b".."} or len(part) > _MAX_NAME for part in parts):
        raise ValueError("it is not a path inside a folder")
    return path


def _untrusted(line: bytes, why: str) -> TransferError:
    return TransferError(
        "the cluster's list of files makes no sense, and nothing of it was fetched",
        why=printable(f"{why}: {line[:200].decode(errors='replace')}"),
        fix="look there with `clusterctl ssh`; two of what you name may be called alike",
    )
