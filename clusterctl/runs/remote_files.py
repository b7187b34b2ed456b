"""Lists jobs' folders and sends their files. Runs on the cluster: standard library only, Python
3.9.

    main(NAME...)

NAMEs are the job's metrics, and files that clusterctl itself writes to a job's folder. Each line of
stdin is a JSON array [FOLDER, CHECKPOINTS, MOST, FILES, SINCE_NS]. FILES is the folder in FOLDER with
the files of the job's program, "" if they are in FOLDER itself. A file that was changed (ctime) after
SINCE_NS, in nanoseconds by this host's clock, is listed with the PAYLOAD ``CHANGED``. This program
lists FOLDER, and then sends the requested files in the format of transport/remote_content.py. It never
follows links, but lists their targets. Files that stay on the cluster are listed with a reason, their
size and their number:

- submitted data that source.json shows as unchanged: files that are not text, and large ones. A job
  may write anything to source.json, but this affects only the job's own folder;
- checkpoints. With CHECKPOINTS "latest": all but the latest, and the latest too if it exceeds MOST
  bytes. With "none": all checkpoints. With "all" or "everything": no checkpoint;
- a folder with too many files, unless CHECKPOINTS is "everything". Files NAME and tasks' logs are
  sent.

Checkpoints are folders with names that begin with ``checkpoint`` or ``ckpt``, files with such names
in the format of a framework, and ``*.ckpt`` files. If such a folder has numbered entries, each is a
checkpoint: ``checkpoints/iteration-00000010/``, ``checkpoints/epoch=3-step=100.ckpt``. Checkpoints
with names that differ only in the numbers form a family.
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
    CHANGED,
    LEFT,
    hash_of,
    line_of,
    line_of_status,
    send_requested_files,
)
from clusterctl.transport.remote_copies import stops_down
from clusterctl.transport.remote_open import FileOpener, KeepAlive, read_json

FOLDER = re.compile(rb"(checkpoint|ckpt)", re.IGNORECASE)
FILE = re.compile(
    rb".*\.ckpt([-.].*)?|(checkpoint|ckpt).*\.(pt|pth|pt2|bin|safetensors|npz|npy|h5|keras|msgpack|pkl|tar|index|meta"
    rb"|data-[0-9]+-of-[0-9]+)",
    re.IGNORECASE | re.DOTALL,
)
# checkpoint-500, iteration-00000010, epoch=3-step=100, global_step100, ckpt_5
NUMBERED = re.compile(
    rb"(?<![a-z])(checkpoints?|ckpt|epoch|global_?step|step|iteration|iter)([-_=.]?)([0-9]+)",
    re.IGNORECASE,
)
# checkpoints/500/. In a folder without the s, plain numbers may be ranks.
PLURAL = re.compile(rb"(checkpoints|ckpts)", re.IGNORECASE)
BARE = re.compile(rb"[0-9]{1,18}")
# A metric such as val_loss=0.25 does not distinguish families.
METRIC = re.compile(rb"=-?[0-9]+\.[0-9]+(e-?[0-9]+)?")
UNFINISHED = re.compile(rb"tmp[-_.].*|.*\.(incomplete|tmp|part|partial)|.*[-.]tmp[-.].*", re.DOTALL)
# Longer numbers in names are ignored, because comparing them could be slow.
DIGITS = 18
# Levels of checkpoint folders, such as checkpoints/RUN/step_5/.
NESTED = 2

# Reasons why a checkpoint stays on the cluster.
NOT_WANTED = "a checkpoint"
OLDER = "an older checkpoint"
UNFINISHED_ONE = "an unfinished checkpoint"
TOO_LARGE = "a too large checkpoint"
# Limits for measuring a folder: entries, and levels of subfolders.
MOST_MEASURED = 10_000_000
DEEPEST_MEASURED = 1000

# job.py makes a link of this name to the metrics. It leads nowhere if the program writes no
# metrics.
METRICS = b"metrics.jsonl"
TASK = re.compile(rb"task-[0-9]+")
TASKS_LOG = re.compile(rb"(stdout|stderr)-[0-9]+\.log")
# Submitted text above this size in bytes is data. Larger files than the second one are fetched again,
# because hashing them would be slow.
MOST_CODE = 1 << 20
LARGEST = 10 << 30
# Git takes a file for binary if it has a zero byte this near its start (FIRST_FEW_BYTES).
FIRST_BYTES = 8000
EVERYTHING = "everything"
MOST_ENTRIES = 1_000_000
# Maximum number of bytes of all names in a listing.
MOST_BYTES = 128 << 20
MOST_OURS = 10_000
DEEPEST = 100  # folders
MOST_JSON = 8 << 20
UNCHANGED = "unchanged since it was submitted"
# How the tasks of the job ended: ENDS_FILE of remote_logs.py, and the file that becomes it. They are
# not sent, because the run's record has their content.
ENDS = (b"job.ends", b".job.ends.")
GONE = "the job's folder no longer exists"
KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

# The files that were submitted with a job: size and sha256, or 0 and a link's target, by path.
SubmittedFiles = dict[bytes, tuple[int, str]]


class FilesSize(NamedTuple):
    """Some files' total size in bytes, their number, and the time of the last write to a file.

    stops_down: whether `down` refuses to delete them if there is no copy.
    """

    bytes: int = 0
    files: int = 0
    mtime_ns: int = 0
    stops_down: bool = False


class Number(NamedTuple):
    """The numbers in a checkpoint's name, and its family: the name without these numbers."""

    family: bytes
    numbers: tuple[int, ...]


def number_of(path: bytes, *, is_folder: bool) -> Number | None:
    """Return the family of a checkpoint and the numbers in its name; None if the name has no
    number.
    """
    folder, name = os.path.split(path)
    if is_folder and BARE.fullmatch(name) and PLURAL.match(os.path.basename(folder)):
        return Number(b"", (int(name),))
    numbers = tuple(int(match[3]) for match in NUMBERED.finditer(name) if len(match[3]) <= DIGITS)
    return Number(METRIC.sub(b"=#", NUMBERED.sub(rb"\1\2#", name)), numbers) if numbers else None


def measure(opener: FileOpener, path: bytes, beat: KeepAlive) -> FilesSize:
    """Return the size of a file, or of all files below a folder. Links and special files are left
    out.

    An unreadable file or folder is a file of size 0, which stops `down`. At most about
    ``MOST_MEASURED`` files are read.
    """
    folder, _, name = path.rpartition(b"/")
    try:
        status = os.stat(name or b".", dir_fd=opener.enter(folder), follow_symlinks=False)
    except OSError:
        return FilesSize(0, 1, stops_down=True)
    if stat.S_ISREG(status.st_mode):
        stops = stops_down(path, status.st_mode, status.st_size)
        return FilesSize(status.st_size, 1, status.st_mtime_ns, stops)
    if not stat.S_ISDIR(status.st_mode):
        return FilesSize(mtime_ns=status.st_mtime_ns)
    size = 0
    files = 0
    newest = 0
    visited = 0
    stops = False
    folders = [path]
    while folders and visited < MOST_MEASURED:
        path = folders.pop()
        try:
            with os.scandir(opener.enter(path)) as entries:
                for entry in entries:
                    beat()
                    visited += 1
                    inner = os.path.join(path, os.fsencode(entry.name))
                    if entry.is_dir(follow_symlinks=False):
                        if path.count(b"/") < DEEPEST_MEASURED:
                            folders.append(inner)
                        else:
                            stops = True
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        size = size + status.st_size
                        files = files + 1
                        newest = max(newest, status.st_mtime_ns)
                        stops = stops or stops_down(inner, status.st_mode, status.st_size)
        except OSError:
            files += 1
            stops = True
    return FilesSize(size, files, newest, stops or bool(folders))


class CheckpointChoice:
    """Chooses the checkpoints of a job's folder that stay on the cluster.

    choice: the checkpoints to send: "all", "none", or "latest" (of each family, see ``Number``).
    most: the limit for the latest checkpoint in bytes.
    """

    def __init__(self, opener: FileOpener, choice: str, most: int, beat: KeepAlive) -> None:
        self.opener = opener
        self.choice = choice
        self.most = most
        self.beat = beat
        # Folders that contain several checkpoints, and folders that are (part of) a chosen
        # checkpoint.
        self.collections: set[bytes] = set()
        self.chosen: set[bytes] = set()

    def staying(
        self, folder: bytes, names: Iterable[tuple[bytes, bool]]
    ) -> dict[bytes, tuple[str, FilesSize]]:
        """Return path -> (reason, size) of checkpoints in a folder that stay on the cluster.

        Must be called for a folder before its subfolders. names: (path, whether it is a folder).
        """
        if self.choice == "all":
            return {}
        if folder in self.chosen:
            self.chosen.update(path for path, is_folder in names if is_folder)
            return {}
        stay: dict[bytes, tuple[str, FilesSize]] = {}
        families: dict[bytes, list[tuple[tuple[int, ...], bytes, FilesSize]]] = {}
        for path, is_folder in names:
            name = os.path.basename(path)
            if not self.is_checkpoint(name, is_folder=is_folder) and folder not in self.collections:
                continue
            number = number_of(path, is_folder=is_folder)
            unfinished = UNFINISHED.fullmatch(name) is not None
            if self.choice == "none" or unfinished:
                size = measure(self.opener, path, self.beat)
                stay[path] = (UNFINISHED_ONE if unfinished else NOT_WANTED, size)
            elif number is None and is_folder and self.holds_several(path):
                self.collections.add(path)
            else:
                family, order = (path, ()) if number is None else number
                families.setdefault(family, []).append(
                    (order, path, measure(self.opener, path, self.beat))
                )
        for family_members in families.values():
            stay.update(self.not_latest(family_members))
        return stay

    def is_checkpoint(self, name: bytes, *, is_folder: bool) -> bool:
        # Transformers writes a checkpoint to tmp-checkpoint-500, and renames the folder when it is
        # complete.
        final = name[4:] if name.lower().startswith(b"tmp-") else name
        return (FOLDER.match if is_folder else FILE.fullmatch)(final) is not None

    def holds_several(self, path: bytes, depth: int = 1) -> bool:
        """Return whether a folder contains numbered checkpoints, directly or in a subfolder."""
        subfolders = []
        try:
            with os.scandir(self.opener.enter(path)) as entries:
                for entry in entries:
                    self.beat()
                    inner = os.path.join(path, os.fsencode(entry.name))
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if number_of(inner, is_folder=is_folder):
                        return True
                    if is_folder and depth < NESTED:
                        subfolders.append(inner)
        except OSError:
            return False
        return any(self.holds_several(subfolder, depth + 1) for subfolder in subfolders)

    def not_latest(
        self, members: list[tuple[tuple[int, ...], bytes, FilesSize]]
    ) -> Iterator[tuple[bytes, tuple[str, FilesSize]]]:
        """Yield (path, (reason, size)) for all but the latest checkpoint, and for the latest if too
        large.
        """
        latest = max(
            members, key=lambda item: (item[2].files > 0, item[0], item[2].mtime_ns, item[1])
        )
        self.chosen.add(latest[1])
        for member in members:
            _, path, size = member
            if member is not latest:
                yield path, (OLDER if size.files else UNFINISHED_ONE, size)
            elif size.bytes > self.most:
                yield path, (TOO_LARGE, size)


def read_submitted(folder: bytes, below: bytes) -> SubmittedFiles:
    """Return path -> (size, sha256) as listed in source.json; {} if the job has overwritten it.

    below: the start of all paths, such as b"files/".
    """
    try:
        source = read_json(folder, b"source.json", MOST_JSON)
        files = {
            os.fsencode(row["path"]): (int(row["size"]), str(row["sha256"]))
            for row in source["files"]
        }
        files.update({os.fsencode(row["path"]): (0, str(row["target"])) for row in source["links"]})
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return {}
    return {below + path: facts for path, facts in files.items()}


class RunFolderListing:
    """Prints a job's folder: files to send, and files to leave.

    ours: clusterctl's files and the job's metrics, always printed. files: the folder of the job's
        program.
    """

    def __init__(
        self,
        top: bytes,
        ours: Collection[bytes],
        *,
        checkpoints: str = "latest",
        most: int = sys.maxsize,
        entries: int = MOST_ENTRIES,
        files: bytes = b"",
        since_ns: int = sys.maxsize,
    ) -> None:
        self.since_ns = since_ns
        self.top = top
        self.ours = ours
        self.program = files + b"/" if files else b""
        self.submitted = read_submitted(top, self.program)
        self.user = os.geteuid()
        everything = checkpoints == EVERYTHING
        self.most = entries
        # Entries and bytes of names that the listing may still have.
        self.entries, self.bytes = (
            (sys.maxsize, sys.maxsize) if everything else (entries, MOST_BYTES)
        )
        self.beat = KeepAlive(sys.stdout.buffer, ALIVE_LINE + b"\n")
        self.opener = FileOpener(top)
        self.checkpoints = CheckpointChoice(
            self.opener, "all" if everything else checkpoints, most, self.beat
        )
        # The paths in the order of the lines that were written.
        self.listed: list[bytes] = []

    def write_line(self, path: bytes, line: str) -> None:
        self.listed.append(path)
        sys.stdout.write(line)

    def list_skipped(self, path: bytes, reason: str, size: FilesSize | None = None) -> None:
        size = size or measure(self.opener, path, self.beat)
        self.write_line(
            path,
            line_of(
                LEFT,
                path or b".",
                reason,
                mode=int(size.stops_down),
                size=size.bytes,
                space=size.files,
            ),
        )

    def folder(self, below: bytes, depth: int = 0) -> None:
        try:
            if depth > DEEPEST:
                raise OSError(errno.ELOOP, f"in more than {DEEPEST} folders")
            status, files, folders = self.names(below)
        except FileNotFoundError:
            # A running job may have removed the folder since its parent was read.
            if not below:
                self.list_skipped(below, GONE, FilesSize())
            return
        except OSError as exc:
            self.list_skipped(below, exc.strerror or str(exc))
            return
        if below:
            self.write_line(below, line_of_status(below, status))
        both = [*((path, False) for path in files), *((path, True) for path in folders)]
        stay = self.checkpoints.staying(below, both)
        # Only the target of a link to a checkpoint is listed.
        stay = {
            path: left
            for path, left in stay.items()
            if not os.path.islink(os.path.join(self.top, path))
        }
        for path, (reason, size) in stay.items():
            self.list_skipped(path, reason, size)
        for path, is_folder in both:
            if path in stay:
                continue
            if is_folder:
                self.folder(path, depth + 1)
            else:
                self.file(path)

    def names(self, below: bytes) -> tuple[os.stat_result, list[bytes], list[bytes]]:
        """Return (a folder's stat, the paths of its files, the paths of its subfolders). Raises
        OSError.

        If a folder has too many files: OSError; in the job's and the program's folder, only
            ``ours``.
        """
        is_top = below in (b"", self.program[:-1])
        children: list[tuple[bool, bytes, bool]] = []
        size = 0
        full = False
        fd = self.opener.enter(below)
        status = os.fstat(fd)
        with os.scandir(fd) as entries:
            for entry in entries:
                self.beat()
                name = os.fsencode(entry.name)
                if not below and name.startswith(ENDS):
                    continue
                size += len(below) + len(name)
                is_from_job = not is_top or not self.is_ours(name)
                full = full or len(children) >= self.entries or size > self.bytes
                if full and not is_top:
                    break
                if not full or (not is_from_job and len(children) < self.entries + MOST_OURS):
                    children.append((is_from_job, name, entry.is_dir(follow_symlinks=False)))
        if full:
            self.entries -= self.most // 10
            reason = f"more than {self.most:,} files, or {MOST_BYTES >> 20} MiB of names"
            if not is_top:
                raise OSError(errno.EFBIG, reason)
            self.list_skipped(below, reason)
            children = [child for child in children if not child[0]]
        else:
            self.entries -= len(children)
            self.bytes -= size
        children.sort()
        paths = [
            (below + b"/" + name if below else name, is_folder) for _, name, is_folder in children
        ]
        folders = [path for path, is_folder in paths if is_folder]
        return status, [path for path, is_folder in paths if not is_folder], folders

    def is_ours(self, name: bytes) -> bool:
        return name in self.ours or TASKS_LOG.fullmatch(name) is not None

    def file(self, path: bytes) -> None:
        self.beat()
        full = os.path.join(self.top, path)
        if path.startswith(self.program) and is_link_of_a_task(path[len(self.program) :], full):
            return
        try:
            status = os.lstat(full)
            for is_kind, kind in KINDS:
                if is_kind(status.st_mode):
                    if not stat.S_ISLNK(status.st_mode):
                        self.list_skipped(path, kind)
                    elif self.submitted.get(path) == (0, os.fsdecode(target := os.readlink(full))):
                        self.list_skipped(path, UNCHANGED)
                    elif (
                        os.path.basename(path) != METRICS
                        or b"../" not in target
                        or os.path.exists(full)
                    ):
                        self.write_line(path, line_of_status(path, status, target))
                    return
            if path not in self.submitted and self.can_be_read(status):
                self.write_file(path, status)
                return
            fd = self.opener.open(path)
        except FileNotFoundError:
            return
        except OSError as exc:
            self.list_skipped(path, exc.strerror or str(exc))
            return
        try:
            status = os.fstat(fd)
            size, sha256 = self.submitted.get(path, (0, ""))
            is_data = size == status.st_size <= LARGEST and not is_code(fd, size)
            if is_data and hash_of(fd, size, self.beat).hexdigest() == sha256:
                self.list_skipped(path, UNCHANGED)
            else:
                self.write_file(path, status)
        finally:
            os.close(fd)

    def write_file(self, path: bytes, status: os.stat_result) -> None:
        is_changed = status.st_ctime_ns > self.since_ns
        self.write_line(path, line_of_status(path, status, payload=CHANGED if is_changed else ""))

    def can_be_read(self, status: os.stat_result) -> bool:
        """Return whether a file's owner and mode tell that it can be opened later."""
        is_readable = status.st_uid == self.user and status.st_mode & stat.S_IRUSR
        return bool(is_readable and stat.S_ISREG(status.st_mode))


def is_code(fd: int, size: int) -> bool:
    """Return whether a file is text of a size such as programs and their settings have."""
    return size <= MOST_CODE and b"\0" not in os.pread(fd, FIRST_BYTES, 0)


def is_link_of_a_task(path: bytes, full: bytes) -> bool:
    """Return whether a path in the program's folder is a link of an array task to a submitted
    file.
    """
    task, _, rest = path.partition(b"/")
    try:
        return bool(TASK.fullmatch(task)) and os.readlink(full) == b"../" * path.count(b"/") + rest
    except OSError:
        return False


def main(*names: str) -> None:
    ours = frozenset(map(os.fsencode, names))
    while line := sys.stdin.buffer.readline():
        folder, checkpoints, most, files, since_ns = json.loads(line)
        serve(
            RunFolderListing(
                os.fsencode(folder),
                ours,
                checkpoints=checkpoints,
                most=most,
                files=os.fsencode(files),
                since_ns=since_ns,
            )
        )


def serve(listing: RunFolderListing) -> None:
    # The job itself replaced its folder by a link, which leads to other files.
    if os.path.islink(listing.top):
        listing.list_skipped(b"", "a symbolic link in place of the job's folder", FilesSize())
    else:
        listing.folder(b"")
    sys.stdout.write("\n")
    sys.stdout.flush()
    send_requested_files(listing.opener, listing.listed)
    listing.opener.close()
