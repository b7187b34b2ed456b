"""Bring files of a job's folder here, each checked against its hash; none that is here is fetched again.

The data is read once on either side: both hash it while it travels.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from clusterctl.collect.manifest import REMOTE_PROGRAM, Manifest, RemoteFile, read_manifest
from clusterctl.errors import CollectError
from clusterctl.records import Skipped
from clusterctl.transfer.incoming import Incoming
from clusterctl.transport.base import BULK, Transport

_ROUNDS = 4  # a file that changed while it was read is read again
_HEADER = struct.Struct(">q")
_UNREADABLE, _SAME = -1, -2
_TRAILER_BYTES = 33
_HELD_STILL = b"\1"
_SPARE_BYTES = 16 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def fetch_tree(transport: Transport, folder: str, tree: Path, *, still_changing: bool) -> Manifest:
    """Make ``tree`` hold exactly the files of the remote folder; returns what it holds.

    With ``still_changing`` (the job runs), files that can't be caught in a consistent state are skipped.

    Raises:
        CollectError: files keep changing or vanish although the job has ended; or the disk is too small.
        TransportError: the cluster can't be reached. What has arrived is kept.
    """
    tree.mkdir(parents=True, exist_ok=True)
    fresh = not any(tree.iterdir())
    here: dict[RemoteFile, str] = {}
    for _ in range(_ROUNDS):
        manifest = read_manifest(transport, folder)
        missing = [file for file in manifest.files.values() if file not in here]
        if missing:
            _refuse_small_disk(tree, missing)
            here |= _fetch(transport, folder, missing, tree)
        if here.keys() >= set(missing):
            break
    restless = [file for file in manifest.files.values() if file not in here]
    if restless and not still_changing:
        raise CollectError(
            f"{len(restless)} files keep changing while they are read, such as {restless[0].shown}",
            where=f"{folder} on the cluster",
            why="something still writes there although the job has ended",
            fix="end what writes there (`clusterctl ssh`), then collect again; what has arrived is kept",
        )
    skipped = tuple(Skipped(path=file.shown, reason="it changed while it was read") for file in restless)
    files = {path: file for path, file in manifest.files.items() if file in here}
    if not fresh or len(files) < len(here):
        _remove_others(tree, {local_path(tree, file) for file in files.values()})
    return Manifest(files, manifest.skipped + skipped, {file.local: here[file] for file in files.values()})


def local_path(tree: Path, file: RemoteFile) -> Path:
    """Where a file lies below ``tree``; names that are not UTF-8 stay what they are."""
    return tree / os.fsdecode(file.local)


def sha256_of(path: bytes | Path) -> str:
    """The sha256 of a file, in hex."""
    with open(path, "rb") as file:  # noqa: PTH123  # a path may be bytes
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_here(tree: Path, file: RemoteFile) -> str:
    """The hash of what an unfinished collect left in this file's place; "" if it can't be the file."""
    path = local_path(tree, file)
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return sha256_of(path) if stat.S_ISREG(status.st_mode) and status.st_size == file.size else ""


def _refuse_small_disk(tree: Path, missing: Sequence[RemoteFile]) -> None:
    needed = sum(file.size for file in missing) + _SPARE_BYTES
    free = shutil.disk_usage(tree).free
    if needed > free:
        raise CollectError(
            f"the run needs {needed >> 20} MiB, and {free >> 20} MiB are free",
            where=str(tree.parent),
            fix="make room, or name another folder with --out",
        )


def _fetch(
    transport: Transport, folder: str, files: Sequence[RemoteFile], tree: Path
) -> Mapping[RemoteFile, str]:
    """Fetch files; returns the hashes of those that are here now as they are on the cluster."""
    arrived = {}
    hashes = {file: sha256 for file in files if (sha256 := _hash_here(tree, file))}
    much = sum(file.size for file in files if file not in hashes) > BULK
    with transport.converse(["python3", "-c", REMOTE_PROGRAM, "send", folder], bulk=much) as talk:
        talk.send(_request(files, hashes))
        source, places = Incoming(talk, _too_little), _Places(tree)
        for file in files:
            size = _HEADER.unpack(source.exactly(_HEADER.size))[0]
            if size == _SAME and file in hashes:
                arrived[file] = hashes[file]
            elif size == file.size:
                if sha256 := _receive(source, file, places):
                    arrived[file] = sha256
            elif size != _UNREADABLE:
                raise _other_than_said(folder)
        if source.more():
            raise _other_than_said(folder)
        talk.finish()
    return arrived


def _request(files: Iterable[RemoteFile], hashes: Mapping[RemoteFile, str]) -> bytes:
    lines = (
        json.dumps([base64.b64encode(file.path).decode(), file.size, hashes.get(file, "")]) for file in files
    )
    return ("\n".join(lines) + "\n\n").encode()


def _receive(source: Incoming, file: RemoteFile, places: _Places) -> str:
    """Write one file to its place; returns its hash, or "" and leaves nothing if it is not what was sent.

    Only whole files stay, unless we are killed; the next time, what is here counts by its hash alone.
    """
    sha, place = hashlib.sha256(), places.of(file)
    fd = places.create(place)
    try:
        for data in source.pieces(file.size):
            sha.update(data)
            _write_all(fd, data)
        trailer = source.exactly(_TRAILER_BYTES)
    except BaseException:
        os.unlink(place)  # noqa: PTH108  # paths are bytes
        raise
    finally:
        os.close(fd)
    if trailer != _HELD_STILL + sha.digest():
        os.unlink(place)  # noqa: PTH108
        return ""
    return sha.hexdigest()


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


class _Places:
    """Where files go below a tree, with real folders on the way, whatever lay there before."""

    def __init__(self, tree: Path) -> None:
        self._tree = os.fsencode(tree)
        self._made: set[bytes] = {self._tree}

    def of(self, file: RemoteFile) -> bytes:
        return os.path.join(self._tree, file.local)  # noqa: PTH118

    def create(self, place: bytes) -> int:
        """A new file, open for writing. What was in its place is gone."""
        self._folder(os.path.dirname(place))  # noqa: PTH120
        try:
            return os.open(place, _NEW, 0o666)
        except FileExistsError:
            if stat.S_ISDIR(os.lstat(place).st_mode):
                shutil.rmtree(place)
            else:
                os.unlink(place)  # noqa: PTH108
            return os.open(place, _NEW, 0o666)

    def _folder(self, folder: bytes) -> None:
        if folder in self._made:
            return
        self._folder(os.path.dirname(folder))  # noqa: PTH120
        try:
            os.mkdir(folder)  # noqa: PTH102
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                os.unlink(folder)  # noqa: PTH108
                os.mkdir(folder)  # noqa: PTH102
        self._made.add(folder)


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


def _too_little() -> CollectError:
    return CollectError("the cluster sent less than it said", fix="collect again; what has arrived is kept")


def _other_than_said(folder: str) -> CollectError:
    return CollectError("the cluster sent other data than it said", where=folder, fix="collect again")
