"""Finds the checkpoints in a job's folder, and the latest of each family.

Runs on the cluster: standard library only, Python 3.9.

Checkpoints are folders whose names begin with ``checkpoint`` or ``ckpt``, files of such names in the format
of a framework, and ``*.ckpt`` files. Where such a folder has numbered entries, each of its entries is one:
``checkpoints/iteration-00000010/``, ``checkpoints/epoch=3-step=100.ckpt``. A family has the same names but
for the numbers.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from clusterctl.transport.remote_open import Opener

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
DEEPEST = 1000  # folders that are counted


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


def measure(opener: Opener, path: bytes, beat: Callable[[], object] = lambda: None) -> Size:
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
                    if entry.is_dir(follow_symlinks=False) and path.count(b"/") < DEEPEST:
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

    def __init__(self, opener: Opener, wanted: str, most: int, beat: Callable[[], object]) -> None:
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
