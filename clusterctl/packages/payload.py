"""The payload as a tar for the nodes to unpack: the same bytes for the same sources."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from clusterctl.state.workspace import write_atomic
from clusterctl.util.assets import asset, payload_hash, tree_files

COMPLETE = ".complete"  # last in the tar: where it lies, everything before it does


def pack_payload(folder: Path) -> Path:
    """The tar of the payload in ``folder``; members are `HASH/payload/...` and, last, `HASH/.complete`."""
    root, version = asset("payload"), payload_hash()
    files = {f"payload/{path.relative_to(root).as_posix()}": path.read_bytes() for path in tree_files(root)}
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, data in {**files, COMPLETE: b""}.items():
            member = tarfile.TarInfo(f"{version}/{name}")
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
    path = folder / "payload.tar"
    write_atomic(path, raw.getvalue())
    return path
