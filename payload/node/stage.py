"""Copies files to the disks of a job's nodes before its program starts.

job.py calls ``stage`` on each node. The target becomes a link to a copy in the folder
``STORE`` beside it. The name of a copy is a hash of the list of its files: paths, sizes,
times. So a later job with the same files finds its copy, and two jobs at once copy once. If a disk
has no room, copies that no job uses are removed, the oldest first; if there is still no room, the
target leads to the source. Each node may also get a share of a folder's files; without room, it
gets links to them. Locks tell which copies and targets are in use; a lock lasts until this process
ends. Uses only the standard library of Python 3.8 or newer.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

# Of each user.
STORE = f".clusterctl-staged-{os.getuid()}"
PART = ".part"
LOCK = ".lock"
# The files are read at the same time, because a file system over the network answers slowly.
THREADS = 16
# A disk is full when this part of it is free.
SPARE = 0.02
WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
PROGRESS_S = 10.0
# A range of numbers in the name of a file, such as {000..127}.
RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")


class StageError(Exception):
    """Files can't be staged, and the program can't run without them. The text is for the user."""


class StageEntry(NamedTuple):
    """A file, a folder or a link below the source. path: below the source, "" for itself."""

    path: str
    status: os.stat_result

    @property
    def line(self) -> str:
        """The text from which the hash of a copy is made."""
        is_folder = stat.S_ISDIR(self.status.st_mode)
        facts = () if is_folder else (self.status.st_size, self.status.st_mtime_ns)
        return f"{self.path}\0{self.status.st_mode:o}\0{facts}"


class StageShare(NamedTuple):
    """The files of a folder that a node gets: those whose place in the list of all is ``node``
    modulo ``nodes``. pattern: of their names, such as a*.tar or a-{00..31}.tar.
    """

    pattern: str
    node: int
    nodes: int


class FilesToStage(NamedTuple):
    """The files to stage. source: a file or a folder. key: the name of the copy. share: the part of
    the folder. None: all. as_links: whether the copy is a folder of links.
    """

    source: str
    entries: Sequence[StageEntry]
    key: str
    share: StageShare | None = None
    as_links: bool = False

    @classmethod
    def of(
        cls, source: str, share: StageShare | None = None, *, as_links: bool = False
    ) -> FilesToStage:
        """List the files. Raises the errors of ``entries_of`` and ``entries_of_share``."""
        entries = list(entries_of_share(source, share) if share else entries_of(source))
        lines = [os.path.realpath(source), *(entry.line for entry in entries)]
        text = "\n".join(lines).encode(errors="surrogateescape")
        key = hashlib.sha256(text).hexdigest()[:32]
        return cls(source, entries, f"{key}-links" if as_links else key, share, as_links)

    def listed_again(self) -> FilesToStage:
        return FilesToStage.of(self.source, self.share, as_links=self.as_links)

    @property
    def regular(self) -> Sequence[StageEntry]:
        return [entry for entry in self.entries if stat.S_ISREG(entry.status.st_mode)]

    @property
    def bytes(self) -> int:
        return 0 if self.as_links else sum(entry.status.st_size for entry in self.regular)


class StageResult(NamedTuple):
    """How files were staged. copied: this job has copied them. reason: why the target leads to the
    source; "" if it leads to a copy. locks: open files, whose locks keep the copy and the target.
    """

    source: str
    target: str
    files: int
    bytes: int
    seconds: float
    copied: bool
    reason: str
    locks: Sequence[int]

    def __str__(self) -> str:
        if self.reason:
            return f"{self.target} leads to {self.source} itself: {self.reason}"
        how = f"copied in {self.seconds:.1f} s" if self.copied else "copied by an earlier job"
        return (
            f"{self.target} has {self.files:,} {'file' if self.files == 1 else 'files'} "
            f"({in_units(self.bytes)}) of {self.source}, {how}"
        )


def stage(
    source: str,
    target: str,
    report: Callable[[str], None],
    place: tuple[int, int] | None = None,
) -> StageResult:
    """Make the files of ``source`` available as ``target``, and return how.

    source, target: paths, which may begin with ~ or contain $VARIABLES of the node. report: called
        with a text about the progress every ``PROGRESS_S`` seconds. place: the number of this node
        among so many nodes, each of which gets its share of the files. ``source`` is then a folder,
        or a folder and a pattern of names.

    Raises:
        StageError: the source can't be read, the target can't be made, or another job uses the
            target for other files.
    """
    begin = time.monotonic()
    source, target = expanded(source), expanded(target)
    share = None
    if place is not None:
        source, share = share_of(source, *place)
    reject_within(source, target)
    store = os.path.join(os.path.dirname(target), STORE)
    try:
        files = FilesToStage.of(source, share)
    except OSError as exc:
        raise StageError(f"{exc.filename or source}: {exc.strerror}") from exc
    key = files.key
    room = files.bytes
    where = f"{source}/{share.pattern}" if share else source
    copied = False
    reason = ""
    locks = []
    try:
        make_store(store)
        lock, copied = hold_copy(files, store, report)
        locks.append(lock)
        path = os.path.join(store, files.key)
    except OSError as exc:
        what = exc.strerror or str(exc)
        reason = f"{exc.filename}: {what}" if exc.filename and exc.errno == errno.EACCES else what
        path = source
    try:
        if reason and share:
            # The source has the files of all nodes.
            make_store(store)
            files = FilesToStage.of(source, share, as_links=True)
            locks.append(hold_copy(files, store, report)[0])
            path = os.path.join(store, files.key)
        lock, leads = hold_target(target, path, key, store)
    except (OSError, StageError) as exc:
        for lock in locks:
            os.close(lock)
        if isinstance(exc, StageError):
            raise
        raise StageError(f"{target}: {exc.strerror or exc}") from exc
    locks.append(lock)
    if not reason and leads != path:
        reason = "another job that uses it found no room for a copy"
    seconds = time.monotonic() - begin
    count = len(files.regular)
    return StageResult(where, target, count, room, seconds, copied, reason, locks)


def reject_within(source: str, target: str) -> None:
    """Raise StageError if one of the paths is the other or is in the other, also by links."""
    folder = os.path.realpath(os.path.dirname(target))
    places = (os.path.realpath(source), os.path.join(folder, os.path.basename(target)))
    if os.path.commonpath(places) in places or source == target:
        raise StageError(f"{target} and {source} are the same, or one is in the other")


def make_store(store: str) -> None:
    """Create the folder of the copies. OSError: that failed, or others could change it."""
    os.makedirs(store, mode=0o700, exist_ok=True)
    if not is_own(store):
        raise OSError(errno.EPERM, f"{store} belongs to another user")


def is_own(folder: str) -> bool:
    """Return whether only this user can change a folder."""
    with suppress(OSError):
        status = os.lstat(folder)
        is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
        return is_private and status.st_uid == os.getuid()
    return False


def expanded(path: str) -> str:
    """Return a path with the values of ~ and $VARIABLES. StageError: a variable has no value."""
    text = os.path.expandvars(os.path.expanduser(path))
    if "$" in text or not text.startswith("/"):
        raise StageError(f"{path} has a variable that is not set, or is not an absolute path")
    return os.path.normpath(text)


def share_of(source: str, node: int, nodes: int) -> tuple[str, StageShare]:
    """Return the folder of a source and this node's share. A source that is a folder has no pattern:
    all of its files are shared out.
    """
    if os.path.isdir(source):
        return source, StageShare("*", node, nodes)
    folder, pattern = os.path.split(source)
    return folder, StageShare(pattern, node, nodes)


def entries_of_share(source: str, share: StageShare) -> Iterator[StageEntry]:
    """Yield a folder and its files that are of a share, by their names. A link counts as the file to
    which it leads.

    StageError: there are fewer files than nodes. OSError: a file of a range is missing, or the folder
    can't be read.
    """
    if RANGE.search(share.pattern):
        names = names_in(share.pattern)
    else:
        found = fnmatch.filter(sorted(os.listdir(source)), share.pattern)
        names = [name for name in found if os.path.isfile(os.path.join(source, name))]
    if len(names) < share.nodes:
        raise StageError(
            f"{source}/{share.pattern} has fewer files ({len(names)}) than the job has nodes "
            f"({share.nodes})"
        )
    yield StageEntry("", os.stat(source))
    for name in names[share.node :: share.nodes]:
        yield StageEntry(name, os.stat(os.path.join(source, name)))


def names_in(pattern: str) -> list[str]:
    """Return the names of a pattern with ranges such as {000..127}."""
    match = RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    numbers = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
    rests = names_in(pattern[match.end() :])
    return [pattern[: match.start()] + number + rest for number in numbers for rest in rests]


def entries_of(source: str) -> Iterator[StageEntry]:
    """Yield the files, folders and links of a folder, or the file itself, in order.

    StageError: it is neither. OSError: it can't be read.
    """
    status = os.stat(source)
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        raise StageError(f"{source} is neither a file nor a folder")
    yield StageEntry("", status)
    if stat.S_ISDIR(status.st_mode):
        yield from _entries_below(source, "")


def _entries_below(source: str, folder: str) -> Iterator[StageEntry]:
    with os.scandir(os.path.join(source, folder)) as found:
        children = sorted(found, key=lambda child: child.name)
    for child in children:
        path = os.path.join(folder, child.name)
        status = child.stat(follow_symlinks=False)
        mode = status.st_mode
        if stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode):
            yield StageEntry(path, status)
        if stat.S_ISDIR(mode):
            yield from _entries_below(source, path)


def hold_copy(files: FilesToStage, store: str, report: Callable[[str], None]) -> tuple[int, bool]:
    """Keep the copy of these files, made if it is missing. Return its lock, and whether it was
    made.

    Raises OSError: there is no room, or a file can't be copied.
    """
    path = os.path.join(store, files.key)
    copied = False
    while True:
        lock = os.open(path + LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Jobs that use the copy share the lock. A job that is making it holds the lock alone.
            fcntl.flock(lock, fcntl.LOCK_SH)
            if not os.path.lexists(path):
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.lexists(path):
                    with suppress(OSError):
                        remove(path + PART)
                    make_room(store, files.bytes)
                    copy(files, path, report)
                    copied = True
                fcntl.flock(lock, fcntl.LOCK_SH)
            # Between two locks, another job may have removed the copy to make room.
            if os.path.lexists(path) and is_file(lock, path + LOCK):
                os.utime(path, follow_symlinks=False)
                return lock, copied
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def is_file(lock: int, path: str) -> bool:
    """Return whether an open file is still the file at this path."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(lock), os.stat(path))
    return False


def make_room(store: str, size: int) -> None:
    """Remove copies that no job uses until there is room, the oldest first. OSError: there is not
    enough room.
    """
    paths = [os.path.join(store, name) for name in os.listdir(store) if not name.endswith(LOCK)]
    for path in sorted(paths, key=_last_use):
        if has_room(store, size):
            return
        remove_unused(path)
    if not has_room(store, size):
        raise OSError(errno.ENOSPC, f"{os.path.dirname(store)} has no room for {in_units(size)}")


def _last_use(path: str) -> float:
    with suppress(OSError):
        return os.lstat(path).st_mtime
    return 0.0


def has_room(store: str, size: int) -> bool:
    room = os.statvfs(store)
    return not size or size <= room.f_frsize * (room.f_bavail - SPARE * room.f_blocks)


def remove_unused(path: str) -> None:
    """Remove a copy, unless a job uses it."""
    lock_path = (path[: -len(PART)] if path.endswith(PART) else path) + LOCK
    with suppress(OSError):
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
            os.unlink(lock_path)
        finally:
            os.close(lock)


def remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        # Copies are read-only.
        for folder, _, _ in os.walk(path):
            os.chmod(folder, stat.S_IRWXU)
        shutil.rmtree(path)
    else:
        os.unlink(path)


def copy(files: FilesToStage, path: str, report: Callable[[str], None]) -> None:
    """Copy files to a new ``path``. OSError: that failed, and nothing is left."""
    part = path + PART
    try:
        _copy_all(files, part, report)
        if files.listed_again().key != files.key:
            raise OSError(errno.EAGAIN, "its files have changed while they were copied")
        os.rename(part, path)
    except BaseException:
        with suppress(OSError):
            remove(part)
        raise


def _copy_all(files: FilesToStage, part: str, report: Callable[[str], None]) -> None:
    pairs = []
    folders = []
    for entry in files.entries:
        target = os.path.join(part, entry.path) if entry.path else part
        origin = os.path.join(files.source, entry.path) if entry.path else files.source
        if stat.S_ISDIR(entry.status.st_mode):
            os.mkdir(target, 0o700)
            folders.append((target, entry.status.st_mode))
        elif files.as_links:
            os.symlink(origin, target)
        elif stat.S_ISLNK(entry.status.st_mode):
            os.symlink(link_of(files.source, entry.path), target)
        else:
            pairs.append((origin, target))
    done = 0
    last = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        for size in pool.map(lambda pair: _copy_file(*pair), pairs):
            done += size
            if time.monotonic() - last > PROGRESS_S:
                last = time.monotonic()
                report(f"{in_units(done)} of {in_units(files.bytes)}")
    # The copy is read-only, because later jobs also use it.
    for folder, mode in reversed(folders):
        os.chmod(folder, (stat.S_IMODE(mode) | stat.S_IRUSR | stat.S_IXUSR) & ~WRITE)


def _copy_file(origin: str, target: str) -> int:
    shutil.copyfile(origin, target)
    shutil.copystat(origin, target)
    status = os.stat(target)
    os.chmod(target, stat.S_IMODE(status.st_mode) & ~WRITE)
    return status.st_size


def link_of(source: str, path: str) -> str:
    """Return the target for the copy of a link. A link that leads out of the source becomes
    absolute.
    """
    to = os.readlink(os.path.join(source, path))
    inside = os.path.normpath(os.path.join(os.path.dirname(path), to))
    is_outside = inside == os.pardir or inside.startswith(os.pardir + os.sep)
    if os.path.isabs(to) or not is_outside:
        return to
    return os.path.normpath(os.path.join(os.path.realpath(source), inside))


def hold_target(target: str, path: str, key: str, store: str) -> tuple[int, str]:
    """Make ``target`` a link to ``path``. Return a lock that keeps it, and where it leads, which is
    elsewhere if another job with the same files uses it.

    Raises:
        StageError: another job uses the target for other files, or it is not such a link.
        OSError: it can't be made.
    """
    name = hashlib.sha256(target.encode(errors="surrogateescape")).hexdigest()[:32]
    folder = store if is_own(store) else os.path.dirname(target)
    while True:
        lock = os.open(os.path.join(folder, f"target-{name}{LOCK}"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # The lock's file has the key, and where the link leads.
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _lead(target, path, made=_kept_in(lock)[1])
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{key}\n{path}".encode(errors="surrogateescape"), 0)
            fcntl.flock(lock, fcntl.LOCK_SH)
            used, leads = _kept_in(lock)
            if used != key:
                raise StageError(
                    f"{target} is in use by another job for other files: stage them to another path"
                )
            # Between two locks, another job may have led it elsewhere.
            if os.path.islink(target) and os.readlink(target) == leads:
                return lock, leads
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _kept_in(lock: int) -> tuple[str, str]:
    """Return the key and the path in the file of a target's lock, or "" for each."""
    text = os.pread(lock, 1 << 14, 0).decode(errors="surrogateescape")
    key, _, path = text.partition("\n")
    return key, path


def _lead(target: str, path: str, made: str) -> None:
    """Make ``target`` a link to ``path``. made: where the link leads that staging has made earlier.

    Raises:
        StageError: the target is a file or a link of the user.
        OSError: it can't be made.
    """
    if os.path.lexists(target) and not (os.path.islink(target) and os.readlink(target) == made):
        raise StageError(f"{target} exists, and was not made by --set stage=: use another path")
    new = f"{target}.{os.getpid()}.new"
    os.symlink(path, new)
    os.replace(new, target)


def in_units(size: int) -> str:
    """Return a number of bytes as text."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << bits:
            return f"{size / (1 << bits):.1f} {unit}"
    return f"{size} B"
