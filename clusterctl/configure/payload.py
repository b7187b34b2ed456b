"""The training program as one tar, the same bytes for the same sources, for the nodes to unpack."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from clusterctl.assets import asset
from clusterctl.journal import digest
from clusterctl.workspace import write_atomic

COMPLETE = ".complete"  # last in the tar: where it lies, everything before it does


def payload_hash(source: Path | None = None) -> str:
    """Hash of the payload's files; names its folder on the nodes."""
    return digest(*(part for name, data in _files(source) for part in (name, data)))


def pack_payload(folder: Path, source: Path | None = None) -> Path:
    """The tar of the payload in ``folder``; members are `HASH/payload/...` and, last, `HASH/.complete`."""
    version = payload_hash(source)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz", compresslevel=1) as tar:
        for name, data in (*_files(source), (COMPLETE, b"")):
            member = tarfile.TarInfo(f"{version}/{name}")
            member.size = len(data)
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(data))
    path = folder / "payload.tar.gz"
    write_atomic(path, raw.getvalue())
    return path


def _files(source: Path | None) -> Iterator[tuple[str, bytes]]:
    root = source or asset("payload")
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(Path("payload") / path.relative_to(root)), path.read_bytes()
