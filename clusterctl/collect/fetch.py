"""Bring files of a job's folder here, each checked against its hash; none that is here is fetched again."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from clusterctl.collect.manifest import REMOTE_PROGRAM, Manifest, RemoteFile, read_manifest
from clusterctl.errors import CollectError
from clusterctl.records import Skipped
from clusterctl.transport.base import Transport

_ROUNDS = 4  # a file that changed while it was read is read again
_HEADER = struct.Struct(">q")
_UNREADABLE = -1
_BATCH_BYTES = 64 << 10  # of argument text; Linux takes 128 KiB in one
_CHUNK = 1 << 20
_SPARE_BYTES = 16 << 20


def fetch_tree(transport: Transport, folder: str, tree: Path, *, still_changing: bool) -> Manifest:
    """Make ``tree`` hold exactly the files of the remote folder; returns what it holds.

    With ``still_changing`` (the job runs), files that can't be caught in a consistent state are skipped.

    Raises:
        CollectError: files keep changing or vanish although the job has ended; or the disk is too small.
        TransportError: the cluster can't be reached. What has arrived is kept.
    """
    tree.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(transport, folder)
    here = {file for file in manifest.files.values() if _is_here(tree, file)}
    for attempt in range(_ROUNDS):
        if attempt:
            manifest = read_manifest(transport, folder)
        missing = [file for file in manifest.files.values() if file not in here]
        _refuse_small_disk(tree, missing)
        for batch in _batches(missing):
            here |= _fetch(transport, folder, batch, tree)
        if here.issuperset(missing):
            break
    restless = [file for file in manifest.files.values() if file not in here]
    if restless and not still_changing:
        raise CollectError(
            f"{len(restless)} files keep changing while they are read, such as {restless[0].shown}",
            where=f"{folder} on the cluster",
            why="something still writes there although the job has ended",
            fix="end what writes there (clusterctl ssh), then collect again; what has arrived is kept",
        )
    skipped = tuple(Skipped(path=file.shown, reason="it changed while it was read") for file in restless)
    files = {path: file for path, file in manifest.files.items() if file in here}
    _remove_others(tree, {local_path(tree, file) for file in files.values()})
    return Manifest(files, manifest.skipped + skipped)


def local_path(tree: Path, file: RemoteFile) -> Path:
    """Where a file lies below ``tree``; names that are not UTF-8 stay what they are."""
    return tree / os.fsdecode(file.local)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_here(tree: Path, file: RemoteFile) -> bool:
    path = local_path(tree, file)
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == file.size and sha256_of(path) == file.sha256


def _refuse_small_disk(tree: Path, missing: Sequence[RemoteFile]) -> None:
    needed = sum(file.size for file in missing) + _SPARE_BYTES
    free = shutil.disk_usage(tree).free
    if needed > free:
        raise CollectError(
            f"the run needs {needed >> 20} MiB, and {free >> 20} MiB are free",
            where=str(tree.parent),
            fix="make room, or name another folder with --out",
        )


def _batches(files: Sequence[RemoteFile]) -> Iterator[list[RemoteFile]]:
    batch: list[RemoteFile] = []
    size = 0
    for file in files:
        batch.append(file)
        size += len(file.path) * 2 + 32
        if size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _fetch(transport: Transport, folder: str, files: Sequence[RemoteFile], tree: Path) -> set[RemoteFile]:
    """Fetch files; returns those that arrived as the manifest says."""
    arrived = set()
    wanted = json.dumps([[base64.b64encode(file.path).decode(), file.size] for file in files])
    with closing(transport.stream(["python3", "-c", REMOTE_PROGRAM, "send", folder, wanted])) as stream:
        source = _Source(stream)
        for file in files:
            size = _HEADER.unpack(source.exactly(_HEADER.size))[0]
            if size not in {_UNREADABLE, file.size}:
                raise _other_than_said(folder)
            if size == file.size and _receive(source, file, tree):
                arrived.add(file)
        if source.more():
            raise _other_than_said(folder)
    return arrived


def _receive(source: _Source, file: RemoteFile, tree: Path) -> bool:
    """Write one file under a name of its own, and give it its place if its hash is right."""
    arriving = tree.parent / "arriving"
    sha = hashlib.sha256()
    with arriving.open("wb") as out:
        for data in source.pieces(file.size):
            sha.update(data)
            out.write(data)
    if sha.hexdigest() != file.sha256:
        arriving.unlink()
        return False
    place = local_path(tree, file)
    _make_room(tree, place)
    arriving.replace(place)
    return True


def _make_room(tree: Path, place: Path) -> None:
    """Real folders down to ``place``, and nothing in its place but a file that may be replaced."""
    for folder in reversed(place.relative_to(tree).parents[:-1]):
        here = tree / folder
        if here.is_symlink() or (here.exists() and not here.is_dir()):
            here.unlink()
        here.mkdir(exist_ok=True)
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)


def _remove_others(tree: Path, keep: set[Path]) -> None:
    """Remove what an earlier, unfinished collect left and what is gone on the cluster by now."""
    for folder, subfolders, names in os.walk(tree, topdown=False):
        for path in (Path(folder, name) for name in names):
            if path not in keep:
                path.unlink()
        for path in (Path(folder, name) for name in subfolders):
            if path.is_symlink():
                path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()


class _Source:
    """A stream of bytes, read in the amounts that were announced."""

    def __init__(self, stream: Iterator[bytes]) -> None:
        self._stream = stream
        self._buffer = b""

    def exactly(self, size: int) -> bytes:
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[bytes]:
        while size:
            if not self._buffer:
                self._buffer = next(self._stream, b"")
                if not self._buffer:
                    raise CollectError(
                        "the cluster sent less than it said",
                        fix="collect again; what has arrived is kept",
                    )
            piece, self._buffer = self._buffer[:size], self._buffer[size:]
            size -= len(piece)
            yield piece

    def more(self) -> bool:
        """Whether anything is left; reads to the end of the stream."""
        return bool(self._buffer) or next(self._stream, b"") != b""


def _other_than_said(folder: str) -> CollectError:
    return CollectError("the cluster sent other data than it said", where=folder, fix="collect again")
