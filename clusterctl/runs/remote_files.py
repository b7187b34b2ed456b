"""Lists jobs' folders and sends files of them. Runs on the cluster: standard library only, Python 3.9.

    main(NAME...)

stdin brings a JSON array a line, [FOLDER, CHECKPOINTS, MOST]. Each folder is listed, and what is wanted of it
sent, as transport/remote_content.py says.

It lists files after the folders above them, and what is left where it is, with the reason, its size, and how
many files it is. What source.json says was sent with the job, is large and is still the same, is left. So are
checkpoints: all but the latest of at most MOST bytes (CHECKPOINTS is latest), all (none), or no one (all). If
CHECKPOINTS is everything, nothing is left for there being too much either; else the NAMEs and the logs of an
array's tasks are listed even then. A job may write what it likes to source.json: it says only what of its own
folder comes home. Links are never followed.

Checkpoints are folders whose names begin with ``checkpoint`` or ``ckpt``, files of such names in the format
of a framework, and ``*.ckpt`` files. Where such a folder has numbered entries, each of its entries is one:
``checkpoints/iteration-00000010/``, ``checkpoints/epoch=3-step=100.ckpt``. A family has the same names but
for the numbers.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from clusterctl.transport.remote_content import (
    ALIVE_LINE,
    LEFT,
    hash_of,
    line_of,
    line_of_status,
    send_wanted,
)
from clusterctl.transport.remote_open import Beat, Opener, read_json

FOLDER = re.compile(rb"(checkpoint|ckpt)", re.IGNORECASE)
FILE = re.compile(
    rb".*\.ckpt([-.].*)?|(checkpoint|ckpt).*\.(pt|pth|pt2|bin|safetensors|npz|npy|h5|keras|msgpack|pkl|tar|index|meta"
    rb"|data-[0-9]+-of-[0-9]+)",
    re.IGNORECASE | re.DOTALL,
)
# checkpoint-500, iteration-00000010, epoch=3-step=100, global_step100, ckpt_5
NUMBERED = re.compile(
    rb"(?<![a-z])(checkpoints?|ckpt|epoch|global_?step|step|iteration|iter)([-_=.]?)([0-9]+)", re.IGNORECASE
)
# checkpoints/500/; without the s, numbers alone may be ranks.
PLURAL, BARE = re.compile(rb"(checkpoints|ckpts)", re.IGNORECASE), re.compile(rb"[0-9]{1,18}")
METRIC = re.compile(rb"=-?[0-9]+\.[0-9]+(e-?[0-9]+)?")  # val_loss=0.25, which tells no family from another
UNFINISHED = re.compile(rb"tmp[-_.].*|.*\.(incomplete|tmp|part|partial)|.*[-.]tmp[-.].*", re.DOTALL)
DIGITS = 18  # of a number at most: a name could make comparing slow
NESTED = 2  # folders of checkpoints in each other, such as checkpoints/RUN/step_5/

# Why one stays on the cluster.
NOT_WANTED, OLDER = "a checkpoint", "an older checkpoint"
UNFINISHED_ONE, TOO_LARGE = "an unfinished checkpoint", "a too large checkpoint"
MOST_MEASURED = 10_000_000  # entries of one folder that are counted
DEEPEST_MEASURED = 1000  # folders that are counted

TASK = re.compile(rb"task-[0-9]+")
TASKS_LOG = re.compile(rb"(stdout|stderr)-[0-9]+\.log")
LARGE, LARGEST = 1 << 20, 10 << 30  # bytes: what was sent with a job is looked at again between these
EVERYTHING = "everything"
MOST_ENTRIES = 1_000_000
MOST_BYTES = 128 << 20  # of names
MOST_OURS = 10_000
DEEPEST = 100  # folders
MOST_JSON = 8 << 20
UNCHANGED = "unchanged since it was submitted"
KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

# What the job was given: path -> size and sha256, or 0 and a link's target.
Given = dict[bytes, tuple[int, str]]


class Size(NamedTuple):
    """How many bytes files have, how many they are, and when the last of them was written."""

    bytes: int = 0
    files: int = 0
    mtime_ns: int = 0


class Number(NamedTuple):
    """What the name of a numbered checkpoint says: its family, and its numbers in it."""

    family: bytes
    numbers: tuple[int, ...]


def number_of(path: bytes, *, is_folder: bool) -> Number | None:
    """The number of a checkpoint by its name; None if it has none."""
    folder, name = os.path.split(path)
    if is_folder and BARE.fullmatch(name) and PLURAL.match(os.path.basename(folder)):
        return Number(b"", (int(name),))
    found = tuple(int(one[3]) for one in NUMBERED.finditer(name) if len(one[3]) <= DIGITS)
    return Number(METRIC.sub(b"=#", NUMBERED.sub(rb"\1\2#", name)), found) if found else None


def measure(opener: Opener, path: bytes, beat: Beat) -> Size:
    """The size of a file, or of all files below a folder; links and the like hold nothing.

    What can't be read counts as one file of no known size. At most ``MOST_MEASURED`` entries are counted.
    """
    folder, _, name = path.rpartition(b"/")
    try:
        status = os.stat(name or b".", dir_fd=opener.enter(folder), follow_symlinks=False)
    except OSError:
        return Size(0, 1)
    if stat.S_ISREG(status.st_mode):
        return Size(status.st_size, 1, status.st_mtime_ns)
    if not stat.S_ISDIR(status.st_mode):
        return Size(mtime_ns=status.st_mtime_ns)
    size, files, newest, seen, below = 0, 0, 0, 0, [path]
    while below and seen < MOST_MEASURED:
        path = below.pop()
        try:
            with os.scandir(opener.enter(path)) as entries:
                for entry in entries:
                    beat()
                    seen += 1
                    if entry.is_dir(follow_symlinks=False) and path.count(b"/") < DEEPEST_MEASURED:
                        below.append(os.path.join(path, os.fsencode(entry.name)))
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        size, files = size + status.st_size, files + 1
                        newest = max(newest, status.st_mtime_ns)
        except OSError:
            files += 1
    return Size(size, files, newest)


class Checkpoints:
    """Chooses among the checkpoints of a job's folder.

    ``wanted`` is all, latest or none; a latest one of more than ``most`` bytes is not chosen. Folders are to
    be looked at from the top down.
    """

    def __init__(self, opener: Opener, wanted: str, most: int, beat: Beat) -> None:
        self.opener, self.wanted, self.most, self.beat = opener, wanted, most, beat
        self.several: set[bytes] = set()  # folders that hold several checkpoints
        self.whole: set[bytes] = set()  # that are one, or part of one

    def left(self, folder: bytes, names: Iterable[tuple[bytes, bool]]) -> dict[bytes, tuple[str, Size]]:
        """Which of the folder's entries stay on the cluster, why, and how large each is.

        ``names`` are their paths, and whether each is a folder.
        """
        if self.wanted == "all":
            return {}
        if folder in self.whole:
            self.whole.update(path for path, is_folder in names if is_folder)
            return {}
        stay: dict[bytes, tuple[str, Size]] = {}
        families: dict[bytes, list[tuple[tuple[int, ...], bytes, Size]]] = {}
        for path, is_folder in names:
            name = os.path.basename(path)
            if not self.is_checkpoint(name, is_folder=is_folder) and folder not in self.several:
                continue
            number = number_of(path, is_folder=is_folder)
            unfinished = UNFINISHED.fullmatch(name) is not None
            if self.wanted == "none" or unfinished:
                size = measure(self.opener, path, self.beat)
                stay[path] = (UNFINISHED_ONE if unfinished else NOT_WANTED, size)
            elif number is None and is_folder and self.holds_several(path):
                self.several.add(path)
            else:
                family, order = (path, ()) if number is None else number
                families.setdefault(family, []).append((order, path, measure(self.opener, path, self.beat)))
        for family_members in families.values():
            stay.update(self.not_latest(family_members))
        return stay

    def is_checkpoint(self, name: bytes, *, is_folder: bool) -> bool:
        final = name[4:] if name.lower().startswith(b"tmp-") else name  # transformers' tmp-checkpoint-500
        return (FOLDER.match if is_folder else FILE.fullmatch)(final) is not None

    def holds_several(self, path: bytes, depth: int = 1) -> bool:
        """Whether it is a folder of numbered checkpoints, or has such a folder."""
        below = []
        try:
            with os.scandir(self.opener.enter(path)) as entries:
                for entry in entries:
                    self.beat()
                    inner = os.path.join(path, os.fsencode(entry.name))
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if number_of(inner, is_folder=is_folder):
                        return True
                    below += [inner] if is_folder and depth < NESTED else []
        except OSError:
            return False
        return any(self.holds_several(one, depth + 1) for one in below)

    def not_latest(
        self, members: list[tuple[tuple[int, ...], bytes, Size]]
    ) -> Iterator[tuple[bytes, tuple[str, Size]]]:
        """All but the latest, and that too if it is too large. One without files was only begun."""
        latest = max(members, key=lambda one: (one[2].files > 0, one[0], one[2].mtime_ns, one[1]))
        self.whole.add(latest[1])
        for one in members:
            _, path, size = one
            if one is not latest:
                yield path, (OLDER if size.files else UNFINISHED_ONE, size)
            elif size.bytes > self.most:
                yield path, (TOO_LARGE, size)


def read_given(folder: bytes) -> Given:
    try:
        source = read_json(folder, b"source.json", MOST_JSON)
        given = {os.fsencode(one["path"]): (int(one["size"]), str(one["sha256"])) for one in source["files"]}
        given.update({os.fsencode(one["path"]): (0, str(one["target"])) for one in source["links"]})
    except (OSError, ValueError, TypeError, KeyError, OverflowError):  # a job may write what it likes
        return {}
    return given


class Listing:
    """Tells what of a job's folder is to be fetched, and what is left; ``ours`` are always fetched."""

    def __init__(
        self,
        top: bytes,
        ours: Collection[bytes],
        *,
        checkpoints: str = "latest",
        most: int = sys.maxsize,
        entries: int = MOST_ENTRIES,
    ) -> None:
        self.top, self.ours = top, ours
        self.given = read_given(top)
        self.user = os.geteuid()
        everything = checkpoints == EVERYTHING
        self.most = entries
        # That are left.
        self.entries, self.bytes = (sys.maxsize, sys.maxsize) if everything else (entries, MOST_BYTES)
        self.beat = Beat(sys.stdout.buffer, ALIVE_LINE + b"\n")
        self.opener = Opener(top)
        self.checkpoints = Checkpoints(self.opener, "all" if everything else checkpoints, most, self.beat)
        self.told: list[bytes] = []  # the path of each line

    def write_line(self, path: bytes, line: str) -> None:
        self.told.append(path)
        sys.stdout.write(line)

    def tell_left(self, path: bytes, reason: str, size: Size | None = None) -> None:
        size = size or measure(self.opener, path, self.beat)
        self.write_line(path, line_of(LEFT, path or b".", reason, size=size.bytes, space=size.files))

    def folder(self, below: bytes, depth: int = 0) -> None:
        """List a folder: itself, the files in it, then the folders in it."""
        try:
            if depth > DEEPEST:
                raise OSError(errno.ELOOP, f"in more than {DEEPEST} folders")
            status, files, folders = self.names(below)
        except OSError as exc:
            self.tell_left(below, exc.strerror or str(exc))
            return
        if below:
            self.write_line(below, line_of_status(below, status))
        both = [*((path, False) for path in files), *((path, True) for path in folders)]
        stay = self.checkpoints.left(below, both)
        for path, (reason, size) in stay.items():
            self.tell_left(path, reason, size)
        for path, is_folder in both:
            if path in stay:
                continue
            if is_folder:
                self.folder(path, depth + 1)
            else:
                self.file(path)

    def names(self, below: bytes) -> tuple[os.stat_result, list[bytes], list[bytes]]:
        """A folder's status and the paths of files and of folders in it; raises OSError.

        Where the top folder holds too many, only those of our own names.
        """
        found: list[tuple[bool, bytes, bool]] = []
        size, full = 0, False
        fd = self.opener.enter(below)
        status = os.fstat(fd)
        with os.scandir(fd) as entries:
            for entry in entries:
                self.beat()
                name = os.fsencode(entry.name)
                size += len(below) + len(name)
                theirs = bool(below) or not self.is_ours(name)
                full = full or len(found) >= self.entries or size > self.bytes
                if full and below:
                    break
                if not full or (not theirs and len(found) < self.entries + MOST_OURS):
                    found.append((theirs, name, entry.is_dir(follow_symlinks=False)))
        if full:
            self.entries -= self.most // 10
            reason = f"more than {self.most:,} files, or {MOST_BYTES >> 20} MiB of names"
            if below:
                raise OSError(errno.EFBIG, reason)
            self.tell_left(b"", reason)
            found = [one for one in found if not one[0]]
        else:
            self.entries -= len(found)
            self.bytes -= size
        found.sort()
        paths = [(below + b"/" + name if below else name, is_folder) for _, name, is_folder in found]
        folders = [path for path, is_folder in paths if is_folder]
        return status, [path for path, is_folder in paths if not is_folder], folders

    def is_ours(self, name: bytes) -> bool:
        return name in self.ours or TASKS_LOG.fullmatch(name) is not None

    def file(self, path: bytes) -> None:
        self.beat()
        full = os.path.join(self.top, path)
        if is_link_of_a_task(path, full):
            return
        try:
            status = os.lstat(full)
            for is_kind, kind in KINDS:
                if is_kind(status.st_mode):
                    link = stat.S_ISLNK(status.st_mode) and (0, os.fsdecode(os.readlink(full)))
                    self.tell_left(path, UNCHANGED if link and self.given.get(path) == link else kind)
                    return
            if path not in self.given and self.can_be_read(status):
                self.write_line(path, line_of_status(path, status))
                return
            fd = self.opener.open(path)
        except OSError as exc:
            self.tell_left(path, exc.strerror or str(exc))
            return
        try:
            status = os.fstat(fd)
            size, sha256 = self.given.get(path, (0, ""))
            known = LARGE < size <= LARGEST and size == status.st_size
            if known and hash_of(fd, size, self.beat).hexdigest() == sha256:
                self.tell_left(path, UNCHANGED)
            else:
                self.write_line(path, line_of_status(path, status))
        finally:
            os.close(fd)

    def can_be_read(self, status: os.stat_result) -> bool:
        """Whether a file is certain to be opened later; of others that is found out by opening them."""
        mine = status.st_uid == self.user and status.st_mode & stat.S_IRUSR
        return bool(mine and stat.S_ISREG(status.st_mode))


def is_link_of_a_task(path: bytes, full: bytes) -> bool:
    """Whether it is one of the links by which a task of an array sees what the job was given."""
    folder, name = os.path.split(path)
    try:
        return bool(TASK.fullmatch(folder)) and os.readlink(full) == b"../" + name
    except OSError:
        return False


def main(*names: str) -> None:
    ours = frozenset(map(os.fsencode, names))
    while line := sys.stdin.buffer.readline():
        folder, checkpoints, most = json.loads(line)
        serve(os.fsencode(folder), ours, checkpoints, most)


def serve(top: bytes, ours: Collection[bytes], checkpoints: str, most: int) -> None:
    listing = Listing(top, ours, checkpoints=checkpoints, most=most)
    if os.path.islink(top):  # by the job itself: it leads to what is no run of it
        listing.tell_left(b"", "a symbolic link in place of the job's folder", Size())
    else:
        listing.folder(b"")
    sys.stdout.write("\n")
    sys.stdout.flush()
    send_wanted(listing.opener, listing.told)
    listing.opener.close()
