"""Bring files of a job's folder here, each checked against its hash; none that is here is fetched again.

The data is read once on either side: both hash it while it travels. Nothing the cluster says is trusted to be
a sane path.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from clusterctl.errors import CollectError, printable
from clusterctl.state.ledger import OUR_RECORDS, Skipped
from clusterctl.transport.base import BULK, Transport, lines, remote_argv
from clusterctl.transport.get import distrusting, inside, reading, wanted_line
from clusterctl.transport.remote_content import SAME, UNREADABLE, Incoming
from clusterctl.transport.tree import shown_size

_ROUNDS = 4  # a file that changed while it was read is read again
_SPARE_BYTES = 16 << 20
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
NODES = b"nodes"  # holds, by host, files whose name another host has used for something else
_MAX_THREADS = 8
Holder = tuple[str, Transport]
REMOTE_PROGRAM = "clusterctl.runs.remote_files"

# Written by us into a run's folder; a job's own file or folder of that name gets another one.
RESERVED = frozenset(name.encode() for name in OUR_RECORDS)
FROM_JOB = b".from-job"
MAX_FILE = 64 << 30  # bytes: what is larger stays on the cluster unless it is asked for

_MOST_ROWS = 250_000  # the cluster itself stops at 100,000
_MOST_HOLES = 16 << 30  # bytes of a job's files, which cost no disk but the time to hash them
_MOST_SKIPPED = 1000  # that are named one by one
_LONGEST = 2048  # bytes of a path: it must fit below any folder here


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file: ``path`` in the job's folder, ``local`` in the run's; ``size`` in bytes.

    ``space`` is what it takes on a disk: of a sparse file much less.
    """

    path: bytes
    local: bytes
    size: int
    space: int

    @property
    def shown(self) -> str:
        """The path, fit for a terminal."""
        return shown_path(self.path)


@dataclass(frozen=True, slots=True)
class Manifest:
    """``files`` by their path on the cluster, and what is left there; ``folders`` are the empty ones, here.

    ``sha256`` has the hash of each that has arrived, in hex, by its ``local`` path.
    """

    files: Mapping[bytes, RemoteFile]
    skipped: tuple[Skipped, ...]
    sha256: Mapping[bytes, str] = field(default_factory=dict)
    folders: tuple[bytes, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def fetch_tree(
    transport: Transport, folder: str, tree: Path, *, still_changing: bool, max_file: int = MAX_FILE
) -> Manifest:
    """Make ``tree`` hold exactly the files and empty folders of the remote one; returns what it holds.

    With ``still_changing`` (the job runs), files that can't be caught in a consistent state are skipped.
    Files of more than ``max_file`` bytes always are.

    Raises:
        CollectError: files keep changing or vanish although the job has ended; or the disk is too small.
        TransportError: the cluster can't be reached. What has arrived is kept.
    """
    tree.mkdir(parents=True, exist_ok=True)
    fresh = not any(tree.iterdir())
    here: dict[RemoteFile, str] = {}
    for _ in range(_ROUNDS):
        manifest = read_manifest(transport, folder, max_file=max_file)
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
    places = _Places(tree)
    for empty in manifest.folders:
        places.folder(places.of(empty))
    if not fresh or len(files) < len(here):
        keep = {*(file.local for file in files.values()), *manifest.folders}
        _remove_others(tree, {tree / os.fsdecode(local) for local in keep})
    hashes = {file.local: here[file] for file in files.values()}
    return Manifest(files, manifest.skipped + skipped, hashes, manifest.folders)


def sha256_of(path: bytes | Path) -> str:
    """The sha256 of a file, in hex."""
    with open(path, "rb") as file:  # noqa: PTH123  # a path may be bytes
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_here(tree: Path, file: RemoteFile) -> str:
    """The hash of what an unfinished collect left in this file's place; "" if it can't be the file."""
    path = tree / os.fsdecode(file.local)
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return sha256_of(path) if stat.S_ISREG(status.st_mode) and status.st_size == file.size else ""


def _refuse_small_disk(tree: Path, missing: Sequence[RemoteFile]) -> None:
    needed = sum(file.space for file in missing) + _SPARE_BYTES
    free = shutil.disk_usage(tree).free
    if needed > free:
        largest = max(missing, key=lambda file: file.space)
        raise CollectError(
            f"the run needs {needed >> 20} MiB, and {free >> 20} MiB are free",
            where=str(tree.parent),
            why=f"the largest file is {largest.shown}: {shown_size(largest.space)}",
            fix="make room, name another folder with --out, or leave large files there with --max-file",
        )


def _fetch(
    transport: Transport, folder: str, files: Sequence[RemoteFile], tree: Path
) -> Mapping[RemoteFile, str]:
    """Fetch files; returns the hashes of those that are here now as they are on the cluster."""
    arrived = {}
    hashes = {file: sha256 for file in files if (sha256 := _hash_here(tree, file))}
    much = sum(file.space for file in files if file not in hashes) > BULK
    with (
        transport.converse(remote_argv(REMOTE_PROGRAM, "send", folder), bulk=much) as talk,
        distrusting(CollectError, fix="collect again; what has arrived is kept"),
    ):
        talk.send(_request(files, hashes))
        source, places = reading(talk), _Places(tree)
        for file in files:
            coming = source.announced(file.size, known=file in hashes)
            if coming == SAME:
                arrived[file] = hashes[file]
            elif coming != UNREADABLE and (sha256 := _receive(source, file, places)):
                arrived[file] = sha256
        source.end()
    return arrived


def _request(files: Iterable[RemoteFile], hashes: Mapping[RemoteFile, str]) -> bytes:
    lines = (
        wanted_line(base64.b64encode(file.path).decode(), 0, file.size, hashes.get(file, ""))
        for file in files
    )
    return b"".join([*lines, b"\n"])


def _receive(source: Incoming, file: RemoteFile, places: _Places) -> str:
    """Write one file to its place; returns its hash, or "" and leaves nothing if it is not what was sent.

    Only whole files stay, unless we are killed; the next time, what is here counts by its hash alone.
    """
    place = places.of(file.local)
    fd = places.create(place)
    try:
        sha = source.rest(fd, 0, file.size)
        whole = source.arrives_whole(sha)
    except BaseException:
        os.unlink(place)  # noqa: PTH108  # paths are bytes
        raise
    finally:
        os.close(fd)
    if not whole:
        os.unlink(place)  # noqa: PTH108
        return ""
    return str(sha.hexdigest())


class _Places:
    """Where files go below a tree, with real folders on the way, whatever lay there before."""

    def __init__(self, tree: Path) -> None:
        self._tree = os.fsencode(tree)
        self._made: set[bytes] = {self._tree}

    def of(self, local: bytes) -> bytes:
        return os.path.join(self._tree, local)  # noqa: PTH118

    def create(self, place: bytes) -> int:
        """A new file, open for writing. What was in its place is gone."""
        self.folder(os.path.dirname(place))  # noqa: PTH120
        try:
            return os.open(place, _NEW, 0o666)
        except FileExistsError:
            if stat.S_ISDIR(os.lstat(place).st_mode):
                shutil.rmtree(place)
            else:
                os.unlink(place)  # noqa: PTH108
            return os.open(place, _NEW, 0o666)

    def folder(self, folder: bytes) -> None:
        """Have a folder, and those above it."""
        if folder in self._made:
            return
        self.folder(os.path.dirname(folder))  # noqa: PTH120
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
            elif path not in keep and not any(path.iterdir()):
                path.rmdir()


def fetch_from(
    holders: Sequence[Holder], folder: str, work: Path, *, still_changing: bool, max_file: int = MAX_FILE
) -> Manifest:
    """Make ``work/tree`` hold what the job's folder holds on all of these hosts.

    The first host's files keep their places. Those of the others do too, unless another host has a different
    file of that name: then they go to ``nodes/HOST/``.

    Raises:
        CollectError, TransportError: see ``fetch_tree``. What has arrived is kept.
    """
    tree = work / "tree"
    if len(holders) == 1:
        return fetch_tree(holders[0][1], folder, tree, still_changing=still_changing, max_file=max_file)

    def fetch(holder: Holder) -> Manifest:
        host, transport = holder
        place = work / "nodes" / host
        return fetch_tree(transport, folder, place, still_changing=still_changing, max_file=max_file)

    (work / "nodes").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=_MAX_THREADS) as pool:
        found = dict(zip((host for host, _ in holders), pool.map(fetch, holders), strict=True))
    return _as_one(found, work / "nodes", tree)


def _as_one(found: Mapping[str, Manifest], nodes: Path, tree: Path) -> Manifest:
    """Move the files of each host's tree into one."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    places = _Names()
    files: dict[bytes, RemoteFile] = {}
    hashes: dict[bytes, str] = {}
    skipped: dict[tuple[str, str], Skipped] = {}
    for host, manifest in found.items():
        for file in manifest.files.values():
            sha256 = manifest.sha256[file.local]
            if hashes.get(file.local) == sha256:
                continue
            local = places.take(file.local, host)
            target = tree / os.fsdecode(local)
            target.parent.mkdir(parents=True, exist_ok=True)
            (nodes / host / os.fsdecode(file.local)).replace(target)
            files[local], hashes[local] = replace(file, local=local), sha256
        skipped |= {(one.path, one.reason): one for one in manifest.skipped}
    folders = {folder for manifest in found.values() for folder in manifest.folders}
    empty = tuple(sorted(folder for folder in folders if places.may_be_folder(folder)))
    for folder in empty:
        (tree / os.fsdecode(folder)).mkdir(parents=True, exist_ok=True)
    return Manifest(files, tuple(skipped.values()), hashes, empty)


class _Names:
    """Names in the tree that are taken, by a file or as a folder."""

    def __init__(self) -> None:
        self._files: set[bytes] = set()
        self._folders: set[bytes] = set()

    def take(self, local: bytes, host: str) -> bytes:
        """The file's own place, or one below its host's name."""
        name, folder = local, host.encode()
        while self._is_taken(name):
            name, folder = b"/".join([NODES, folder, local]), folder + b"_"
        self._files.add(name)
        self._folders |= set(_parents(name))
        return name

    def may_be_folder(self, name: bytes) -> bool:
        """Whether no file lies there, or above."""
        return not self._files & {name, *_parents(name)}

    def _is_taken(self, name: bytes) -> bool:
        return name in self._files or name in self._folders or bool(self._files & set(_parents(name)))


def _parents(name: bytes) -> list[bytes]:
    parts = name.split(b"/")
    return [b"/".join(parts[:i]) for i in range(1, len(parts))]


def read_manifest(transport: Transport, folder: str, *, max_file: int = MAX_FILE) -> Manifest:
    """Ask the cluster what is in a job's folder. Files of more than ``max_file`` bytes are left there.

    Raises:
        CollectError: the answer can't be a folder's content.
        TransportError: the cluster can't be reached.
    """
    with closing(transport.stream(remote_argv(REMOTE_PROGRAM, "list", folder))) as stream:
        too_long = _untrusted(folder, "", "a line of it is too long")
        return parse_manifest(lines(stream, too_long), folder, max_file=max_file)


def parse_manifest(rows: Iterable[bytes], folder: str, *, max_file: int = MAX_FILE) -> Manifest:
    """The manifest in the program's answer.

    Raises:
        CollectError: the answer can't be a folder's content.
    """
    listed = _Listed(folder, max_file)
    for number, row in enumerate(rows):
        try:
            if number > _MOST_ROWS:
                raise ValueError("it does not end")
            listed.add(json.loads(row))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError) as exc:
            raise _untrusted(folder, row.decode(errors="replace"), str(exc)) from exc
    return listed.manifest()


@dataclass(slots=True)
class _Listed:
    """What the cluster has told so far."""

    folder: str
    max_file: int
    files: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # path -> size and space
    folders: set[bytes] = field(default_factory=set)
    skipped: list[Skipped] = field(default_factory=list)
    holes: int = _MOST_HOLES  # that may come yet
    unnamed: int = 0

    def add(self, row: dict[str, object]) -> None:
        """Take one line; raises ValueError, KeyError and their like if it can't be one."""
        if row == {}:  # a sign of life
            return
        path = base64.b64decode(str(row["path"]), validate=True)
        if "skip" in row:
            self.skip(path, printable(str(row["skip"])))
            return
        inside(path)
        if path in self.files or path in self.folders:
            raise ValueError("it can't be so")
        if len(path) > _LONGEST:
            self.skip(path, f"its path is longer than {_LONGEST:,} bytes")
        elif "folder" in row:
            self.folders.add(path)
        else:
            self.add_file(path, int(str(row["size"])), int(str(row["space"])))

    def add_file(self, path: bytes, size: int, space: int) -> None:
        if size < 0 or space < 0:
            raise ValueError("it can't be so")
        holes = max(0, size - space)
        too_much = ""
        if size > self.max_file:
            too_much = f"{shown_size(size)}, more than {shown_size(self.max_file)}"
        elif holes > self.holes:
            too_much = f"{shown_size(holes)} of holes, with those before more than {shown_size(_MOST_HOLES)}"
        if too_much:
            command = shlex.join(["clusterctl", "get", f"{self.folder}/{shown_path(path)}"])
            self.skip(path, f"{too_much}: `{command}`")
        else:
            self.holes -= holes
            self.files[path] = size, size - holes

    def skip(self, path: bytes, reason: str) -> None:
        """What is left there. A job may leave any number of things."""
        if len(self.skipped) < _MOST_SKIPPED:
            self.skipped.append(Skipped(path=shown_path(path), reason=reason))
        else:
            self.unnamed += 1

    def manifest(self) -> Manifest:
        """All of it, each with its place here; raises CollectError if that can't be."""
        tops = {path.partition(b"/")[0] for path in (*self.files, *self.folders)}
        files = {path: RemoteFile(path, _local(path, tops), *sizes) for path, sizes in self.files.items()}
        folders = tuple(_local(path, tops) for path in sorted(self.folders))
        _refuse_contradictions([file.local for file in files.values()], folders, self.folder)
        if self.unnamed:
            self.skipped.append(Skipped(path=".", reason=f"{self.unnamed:,} more files, which are not named"))
        return Manifest(files, tuple(self.skipped), folders=folders)


def shown_path(path: bytes) -> str:
    """A path fit for a terminal and for JSON."""
    return printable(path.decode(errors="surrogateescape"))


def _local(path: bytes, tops: Set[bytes]) -> bytes:
    """Where a file goes below the run's folder; ``tops`` are the first parts of all paths."""
    top, slash, rest = path.partition(b"/")
    if top in RESERVED:
        top += FROM_JOB
        while top in tops:  # the job has such a one of its own
            top += FROM_JOB
    return top + slash + rest


def _refuse_contradictions(files: Iterable[bytes], folders: Iterable[bytes], folder: str) -> None:
    """No two files in one place, and none that is also a folder."""
    places: set[bytes] = set()
    for place in files:
        if place in places:
            raise _untrusted(folder, "", "two files would have one name")
        places.add(place)
    for place in (*places, *folders):
        parent = place if place not in places else os.path.dirname(place)  # noqa: PTH120  # names are bytes
        while parent:
            if parent in places:
                raise _untrusted(folder, shown_path(parent), "it is both a file and a folder")
            parent = os.path.dirname(parent)  # noqa: PTH120


def _untrusted(folder: str, what: str, why: str) -> CollectError:
    return CollectError(
        "the list of the job's files makes no sense, and nothing of it was fetched",
        where=folder,
        why=printable(f"{why}: {what[:200]}"),
        fix="look at the folder with `clusterctl ssh`",
    )
