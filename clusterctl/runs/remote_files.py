"""Lists jobs' folders and sends files of them. Runs on the cluster: standard library only, Python 3.9.

    main(NAME...)

stdin brings a JSON array a line, [FOLDER, CHECKPOINTS, MOST]. Each folder is listed, and what is wanted of it
sent, as transport/remote_content.py says.

It lists files with the folders above them, folders that are empty, and what is left where it is, with the
reason, its size, and how many files it is. What source.json says was sent with the job, is large and is still
the same, is left. Where there is an outputs.json, so is what its patterns do not take, but for the NAMEs and
the logs of an array's tasks; else checkpoints are: all but the latest of at most MOST bytes (CHECKPOINTS is
latest), or all (none). If CHECKPOINTS is everything, nothing is left for these reasons, nor for there being
too much. Both files are the job's to write: they say only what of its own folder comes home. Links are never
followed.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import re
import stat
import sys
from collections.abc import Collection
from re import Pattern
from typing import Optional

from clusterctl.runs.remote_checkpoints import Checkpoints, Size, measure
from clusterctl.transport.remote_content import (
    ALIVE_LINE,
    LEFT,
    Beat,
    hash_of,
    line_of,
    line_of_status,
    send_wanted,
)
from clusterctl.transport.remote_open import Opener, read_json

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
UNWANTED = "not among the outputs"
KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

# What the job was given: path -> size and sha256, or 0 and a link's target.
Given = dict[bytes, tuple[int, str]]
MOST, LONGEST = 1000, 4096  # patterns, and characters of one
ANY_DEPTH = None  # the part `**`
Part = Optional["Pattern[str]"]
ESCAPED = re.compile(r"\\(.)")
NEGATED = re.compile(r"\[\^")


def alive() -> None:
    sys.stdout.write(ALIVE_LINE)
    sys.stdout.flush()


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
        self.globs: Globs | None = None  # what outputs.json says is brought home
        everything = checkpoints == EVERYTHING
        if not everything:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                self.globs = Globs(
                    [str(glob) for glob in read_json(top, b"outputs.json", 1 << 18)["patterns"]]
                )
        self.most = entries
        # That are left.
        self.entries, self.bytes = (sys.maxsize, sys.maxsize) if everything else (entries, MOST_BYTES)
        self.beat = Beat(alive)
        self.opener = Opener(top)
        all_wanted = everything or self.globs is not None
        self.checkpoints = Checkpoints(self.opener, "all" if all_wanted else checkpoints, most, self.beat)
        self.told: list[bytes] = []  # the path of each line
        # The folders around, that are listed once something in them is.
        self.untold: dict[bytes, str] = {}

    def write_line(self, path: bytes, line: str) -> None:
        self.told.append(path)
        sys.stdout.write(line)

    def tell_found(self, path: bytes, status: os.stat_result) -> None:
        """Tell of a file or folder, after the folders above it."""
        for folder, line in self.untold.items():
            self.write_line(folder, line)
        self.untold.clear()
        self.write_line(path, line_of_status(path, status))

    def tell_left(self, path: bytes, reason: str, size: Size | None = None) -> None:
        size = size or measure(self.opener, path, self.beat)
        self.write_line(path, line_of(LEFT, path or b".", reason, size=size.bytes, space=size.files))

    def folder(self, below: bytes, depth: int = 0) -> bool | None:
        """List a folder, its files first. Returns whether anything of it was told; None if it holds nothing.

        Where it holds only what is not wanted, that is left to the caller to tell, once for all of it.
        """
        try:
            if depth > DEEPEST:
                raise OSError(errno.ELOOP, f"in more than {DEEPEST} folders")
            status, files, folders = self.names(below)
        except OSError as exc:
            self.tell_left(below, exc.strerror or str(exc))
            return True
        if below and not files and not folders:
            if self.globs is not None and not self.is_output(self.globs, below, is_folder=True):
                return None
            self.tell_found(below, status)
            return True
        if below:
            self.untold[below] = line_of_status(below, status)
        both = [*((path, False) for path in files), *((path, True) for path in folders)]
        stay = self.checkpoints.left(below, both)
        for path, (reason, size) in stay.items():
            self.tell_left(path, reason, size)
        found: list[tuple[bytes, bool | None]] = [(path, True) for path in stay]
        found += [(path, self.file(path)) for path in files if path not in stay]
        found += [(path, self.folder(path, depth + 1)) for path in folders if path not in stay]
        told = any(wanted for _, wanted in found)
        unwanted = [path for path, wanted in found if wanted is False]
        self.untold.pop(below, None)
        if told or not below:
            for path in unwanted:
                self.tell_left(path, UNWANTED)
        return told or (False if unwanted else None)

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

    def file(self, path: bytes) -> bool | None:
        """Whether a file was told; None if nothing needs to be told of it."""
        self.beat()
        full = os.path.join(self.top, path)
        if is_link_of_a_task(path, full):
            return None
        if self.globs is not None and not self.is_output(self.globs, path):
            return None if path in self.given else False
        self.tell_file(path, full)
        return True

    def is_ours(self, name: bytes) -> bool:
        return name in self.ours or TASKS_LOG.fullmatch(name) is not None

    def is_output(self, globs: Globs, path: bytes, *, is_folder: bool = False) -> bool:
        """Whether it is wanted by its path in the job's folder, or in that of a task of an array."""
        top, _, rest = path.partition(b"/")
        names = [path, rest] if rest and TASK.fullmatch(top) else [path]
        ours = any(self.is_ours(name.partition(b"/")[0]) for name in names)
        return ours or any(globs.take(name, is_folder=is_folder) for name in names)

    def tell_file(self, path: bytes, full: bytes) -> None:
        try:
            status = os.lstat(full)
            for is_kind, kind in KINDS:
                if is_kind(status.st_mode):
                    link = stat.S_ISLNK(status.st_mode) and (0, os.fsdecode(os.readlink(full)))
                    self.tell_left(path, UNCHANGED if link and self.given.get(path) == link else kind)
                    return
            if path not in self.given and self.can_be_read(status):
                self.tell_found(path, status)
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
                self.tell_found(path, status)
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
    send_wanted(lambda index: listing.opener.open(listing.told[index]))
    listing.opener.close()


class Globs:
    """Patterns as in a .gitignore file, of which the last that matches counts; raises ValueError if too many.

    A job can write patterns and names alike, so matching takes time in proportion to their lengths, whatever
    they are: a pattern's parts between slashes are matched with a path's parts, each by `fnmatch`, whose
    expressions never go back over what they have matched.
    """

    def __init__(self, patterns: list[str]) -> None:
        if len(patterns) > MOST or any(len(pattern) > LONGEST for pattern in patterns):
            raise ValueError("too many patterns, or too long ones")
        self.globs = [glob for glob in map(Glob, patterns) if glob.parts]

    def take(self, path: bytes, *, is_folder: bool = False) -> bool:
        """Whether the last pattern that matches the path, or a folder above it, is not a negated one."""
        names = os.fsdecode(path).split("/")
        for glob in reversed(self.globs):
            if glob.matches(names, is_folder=is_folder):
                return glob.takes
        return False


class Glob:
    """One pattern; with no ``parts`` it matches nothing."""

    def __init__(self, pattern: str) -> None:
        pattern = without_end(pattern)
        self.takes = not pattern.startswith("!")
        self.parts: list[Part] = []
        self.folders_only = pattern.endswith("/")
        if pattern.startswith("#"):
            return
        pattern = pattern if self.takes else pattern[1:]
        names = [name for name in pattern.split("/") if name]
        if not names:
            return
        if "/" not in pattern.rstrip("/"):
            names.insert(0, "**")
        if names[-1] == "**" and len(names) > 1 and not self.folders_only:
            names.append("*")  # what lies below, not the folder itself
        try:
            self.parts = [ANY_DEPTH if name == "**" else re.compile(expression(name)) for name in names]
        except re.error:
            self.parts = []

    def matches(self, names: list[str], *, is_folder: bool) -> bool:
        """Whether it matches the path with these names, or a folder above it."""
        places = self.reachable({0}) - {len(self.parts)}
        for number, name in enumerate(names, 1):
            here = {at for at in places if self.parts[at] is ANY_DEPTH}
            for at in places:
                part = self.parts[at]
                if part is not None and part.match(name):
                    here.add(at + 1)
            places = self.reachable(here)
            if len(self.parts) in places:
                if number < len(names) or is_folder or not self.folders_only:
                    return True
                places.discard(len(self.parts))
        return False

    def reachable(self, places: set[int]) -> set[int]:
        """The same, and behind each `**` among them, which may stand for nothing."""
        for at, part in enumerate(self.parts):
            if at in places and part is ANY_DEPTH:
                places.add(at + 1)
        return places


def without_end(pattern: str) -> str:
    """A pattern without the blanks at its end, but for one that is escaped."""
    bare = pattern.rstrip()
    escapes = len(bare) - len(bare.rstrip("\\"))
    return bare + " " if escapes % 2 and len(bare) < len(pattern) else bare


def expression(name: str) -> str:
    """One part of a pattern as fnmatch's expression; an escaped character stands for itself."""
    literal = ESCAPED.sub(lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], name)
    return fnmatch.translate(NEGATED.sub("[!", literal))
