"""Finds the files of a host that exist nowhere else. Runs there as root: standard library only, Python 3.9.

    main(REQUEST)

REQUEST is a JSON object: ``shared`` is the folder that hosts share (``at``: it lies there, of a cluster that
is down); ``look_at_shared`` says whether it is looked at here, ``local`` whether what users have on this
host's own disks is; ``host`` is its name; ``skeleton`` is the folder that new homes are made from, if not
/etc/skel; ``ours`` are the names of files that clusterctl puts into jobs' folders; ``left_out`` are folders
to pass over. stdin begins with what exists elsewhere: eight bytes with the number of ``digest``s, and these,
sorted.

The answer is a JSON object a line: {"top", "path", "owner", "files", "bytes", "on_disk", "age_s"} for the
files below one path (``on_disk``: bytes, without the holes of sparse files), {"unread", "why"} for what can't
be looked at, {} as a sign of life, and {"end": true}. Paths are base64. Of very many paths the largest are
told, and one line with the path "" for the others.

With ``top``, one of those that were told, it lists and sends that one's files, ``most`` of them at once, as
transport/remote_content.py says. Links are never followed, and what holds no data does not count.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import json
import os
import pwd
import re
import stat
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any

from clusterctl.transport.remote_content import BLOCK, HEADER, Beat, line_of_status, send_wanted
from clusterctl.transport.remote_open import FOLDER, Opener, open_file

DIGEST = 8  # bytes
DEEPEST = 100  # folders
MOST_TOLD = 200
MOST_UNREAD = 20
HOMES = b"home"
JOBS = b"clusterctl/jobs/"
FIRST_UID, NOBODY = 1000, 65534
# Below a home: what clusterctl keeps there, caches, and what shells and ssh note by themselves.
NOT_IN_HOMES = frozenset(
    b"clusterctl/store clusterctl/environments clusterctl/mpirun "
    b".cache .nv .cupy .triton .apptainer/cache .vscode-server .ansible .ssh "
    b".bash_history .python_history .lesshst .viminfo .wget-hsts .sudo_as_admin_successful".split()
)
CACHE = b"__pycache__"
PARTIAL = re.compile(rb"\.clusterctl-[0-9a-f]{32}\.part")
INCOMPLETE = re.compile(JOBS + rb"\.[^/]*\.incomplete")  # a job's folder in the making
SKELETON, MOST_SKELETON = "/etc/skel", 1 << 16
# Folders of / in which users have no files, and what programs leave in folders for temporary files.
OF_THE_SYSTEM = frozenset(
    b"bin boot dev etc lib lib32 lib64 libx32 lost+found opt proc root run sbin snap sys usr var".split()
)
TEMPORARY = frozenset([b"/tmp", b"/var/tmp"])
OF_PROGRAMS = re.compile(
    rb"(ompi\.|s?pmix[-._]|prte(run|d)?\.|openmpi-sessions|tmux-|pip-|pymp-|torchelastic_|torchinductor_|"
    rb"nvidia-mps|matplotlib-|systemd-private-|dbus-|snap-private|\.X|\.ICE|hsperfdata_|krb5cc_)[^/]*|"
    rb"ssh-[A-Za-z0-9]{10,12}"
)
NETWORK = frozenset(b"nfs nfs4 cifs smb3 9p ceph lustre beegfs gpfs autofs".split())


def digest(host: bytes, path: bytes, size: int, mtime_ns: int) -> int:
    """A number for a file as it is now; ``host`` is "" where all hosts see it. Times count in seconds."""
    text = b"%s\0%s\0%d\0%d" % (host, path, size, mtime_ns // 1_000_000_000)
    return int.from_bytes(hashlib.blake2b(text, digest_size=DIGEST).digest(), "little")


def encoded(path: bytes) -> str:
    return base64.b64encode(path).decode("ascii")


def answer(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def read_known() -> array[int]:
    """What stdin begins with."""
    stdin = sys.stdin.buffer
    (count,) = HEADER.unpack(stdin.read(HEADER.size))
    known = array("Q")
    known.frombytes(stdin.read(count * DIGEST))
    return known


class Top:
    """A folder with files; what is ``not_here`` below doesn't count, nor do daemons' temporary files.

    Hosts have it as ``known_as``; a home is made from ``skeleton``.
    """

    def __init__(
        self,
        path: bytes,
        *,
        host: bytes = b"",
        not_here: Collection[bytes] = (),
        known_as: bytes = b"",
        skeleton: bytes = os.fsencode(SKELETON),
    ) -> None:
        self.path, self.host, self.not_here, self.known_as = path, host, not_here, known_as or path
        self.skeleton = skeleton
        self.is_temporary = path in TEMPORARY

    def skips(self, path: bytes, ours: Collection[bytes]) -> bool:
        """Whether nothing counts that lies there."""
        name = path.rpartition(b"/")[2]
        return (
            name == CACHE
            or PARTIAL.fullmatch(name) is not None
            or INCOMPLETE.fullmatch(path) is not None
            or path in self.not_here
            or (self.is_temporary and OF_PROGRAMS.fullmatch(path) is not None)
            or (path.startswith(JOBS) and path.count(b"/") == JOBS.count(b"/") + 1 and name in ours)
        )

    def counts(self, path: bytes, status: os.stat_result) -> bool:
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return False
        if self.is_temporary and (status.st_uid < FIRST_UID or status.st_uid == NOBODY):
            return False
        return not (path.startswith(b".") and b"/" not in path and self.is_as_created(path, status))

    def is_as_created(self, name: bytes, status: os.stat_result) -> bool:
        """Whether it is one of the files that each new home gets."""
        try:
            with open(os.path.join(self.skeleton, name), "rb") as file:
                created = file.read(MOST_SKELETON)
            if len(created) != status.st_size:
                return False
            with os.fdopen(open_file(self.path, name, any_owner=True), "rb") as file:
                return file.read(MOST_SKELETON) == created
        except OSError:
            return False

    def group(self, path: bytes) -> bytes:
        """The path that a file is told under."""
        parts = path.split(b"/")
        return b"/".join(parts[: 4 if path.startswith(JOBS) else 1])


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def folders_in(path: bytes) -> list[bytes]:
    try:
        with os.scandir(path) as entries:
            return sorted(os.fsencode(one.name) for one in entries if one.is_dir(follow_symlinks=False))
    except OSError:
        return []


def tops_of(asked: dict[str, Any]) -> Iterator[Top]:
    """The folders with files of users: on what hosts share, and on this host's disks."""
    shared, host = os.fsencode(asked["shared"]), os.fsencode(asked["host"])
    skeleton = os.fsencode(asked.get("skeleton") or SKELETON)
    if asked["look_at_shared"]:
        at = os.fsencode(asked.get("at") or asked["shared"])
        homes = folders_in(os.path.join(at, HOMES))
        for name in homes:
            if not name.startswith(b".clusterctl-"):
                home = os.path.join(HOMES, name)
                known_as = os.path.join(shared, home)
                where = os.path.join(at, home)
                yield Top(where, not_here=NOT_IN_HOMES, known_as=known_as, skeleton=skeleton)
        not_here = {b"lost+found", *(os.path.join(HOMES, name) for name in homes)}
        yield Top(at, not_here=not_here, known_as=shared)
    if not asked["local"]:
        return
    for name in folders_in(b"/"):
        path = b"/" + name
        if name == HOMES:
            for user in folders_in(path):
                yield Top(os.path.join(path, user), host=host, not_here=NOT_IN_HOMES)
        elif name not in OF_THE_SYSTEM and path != shared:
            yield Top(path, host=host, not_here={b"lost+found"})
    yield Top(b"/var/tmp", host=host)


def network_mounts() -> set[bytes]:
    """Where the file systems of other machines are mounted."""
    with open("/proc/self/mountinfo", "rb") as file:
        lines = [line.split() for line in file]
    return {line[4] for line in lines if line[line.index(b"-") + 1].partition(b".")[0] in {*NETWORK, b"fuse"}}


class Walk:
    """Goes through the files that exist nowhere else; ``unread`` is what it can't look at, and why."""

    def __init__(
        self, known: array[int], ours: Collection[bytes], left_out: Collection[bytes], beat: Beat
    ) -> None:
        self.known, self.ours, self.beat = known, ours, beat
        self.elsewhere = network_mounts() | {*left_out}
        self.unread: list[tuple[bytes, str]] = []

    def files(self, top: Top) -> Iterator[tuple[bytes, os.stat_result]]:
        """Their paths below the top, in any order, all of a folder together."""
        if top.path in self.elsewhere and top.host:
            return
        try:
            fd = os.open(top.path, FOLDER)
        except OSError as exc:
            self.fail(top.path, exc)
            return
        yield from self.below(top, fd, b"", 0)

    def below(self, top: Top, fd: int, above: bytes, depth: int) -> Iterator[tuple[bytes, os.stat_result]]:
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    self.beat()
                    name = os.fsencode(entry.name)
                    path = above + b"/" + name if above else name
                    if top.skips(path, self.ours):
                        continue
                    full = os.path.join(top.path, path)
                    try:
                        status = entry.stat(follow_symlinks=False)
                        if not stat.S_ISDIR(status.st_mode):
                            if top.counts(path, status) and not self.is_elsewhere(top, path, status):
                                yield path, status
                        elif full not in self.elsewhere:
                            if depth == DEEPEST:
                                raise OSError(0, f"in more than {DEEPEST} folders")
                            yield from self.below(top, os.open(name, FOLDER, dir_fd=fd), path, depth + 1)
                    except FileNotFoundError:
                        continue
                    except OSError as exc:
                        self.fail(full, exc)
        except OSError as exc:
            self.fail(os.path.join(top.path, above), exc)
        finally:
            os.close(fd)

    def is_elsewhere(self, top: Top, path: bytes, status: os.stat_result) -> bool:
        full = os.path.join(top.known_as, path)
        number = digest(top.host, full, status.st_size, status.st_mtime_ns)
        at = bisect_left(self.known, number)
        return at < len(self.known) and self.known[at] == number

    def fail(self, path: bytes, exc: OSError) -> None:
        if len(self.unread) < MOST_UNREAD:
            self.unread.append((path, exc.strerror or str(exc)))


class Group:
    """The files that are told under one path."""

    def __init__(self, top: bytes, path: bytes) -> None:
        self.top, self.path = top, path
        self.files = self.bytes = self.on_disk = self.newest = 0
        self.owners: set[int] = set()

    def add(self, files: int, size: int, on_disk: int, newest: int, owners: Collection[int]) -> None:
        self.files, self.bytes, self.newest = self.files + files, self.bytes + size, max(self.newest, newest)
        self.on_disk += min(size, on_disk)
        if len(self.owners) < MOST_TOLD:
            self.owners.update(owners)

    def told(self, name_of: Callable[[int], str]) -> dict[str, Any]:
        return {
            "top": encoded(self.top),
            "path": encoded(self.path),
            "owner": name_of(next(iter(self.owners))) if len(self.owners) == 1 else "several users",
            "files": self.files,
            "bytes": self.bytes,
            "on_disk": self.on_disk,
            "age_s": max(0, int(time.time() - self.newest / 1e9)),
        }


def groups_of(walk: Walk, tops: Iterator[Top]) -> Iterator[Group]:
    for top in tops:
        group = None
        for path, status in walk.files(top):
            name = top.group(path)
            if group is None or group.path != name:
                if group is not None:
                    yield group
                group = Group(top.known_as, name)
            group.add(1, status.st_size, status.st_blocks * BLOCK, status.st_mtime_ns, [status.st_uid])
        if group is not None:
            yield group


def answers(
    walk: Walk, tops: Iterator[Top], name_of: Callable[[int], str] = name_of
) -> Iterator[dict[str, Any]]:
    """Tell of the files, all below one path together: the largest, and the sum of the others."""
    largest: list[tuple[int, int, Group]] = []
    others = Group(b"", b"")
    for number, group in enumerate(groups_of(walk, tops)):
        heapq.heappush(largest, (group.bytes, number, group))
        if len(largest) > MOST_TOLD:
            small = heapq.heappop(largest)[2]
            others.add(small.files, small.bytes, small.on_disk, small.newest, small.owners)
    for _, _, group in sorted(largest, reverse=True):
        yield group.told(name_of)
    if others.files:
        yield others.told(name_of)
    yield from ({"unread": encoded(path), "why": why} for path, why in walk.unread)
    yield {"end": True}


def send_top(walk: Walk, top: Top, most: int) -> None:
    """List its files, with the folders above them, and send those that are asked for."""
    told: list[bytes] = []
    around: list[bytes] = []

    def write(path: bytes, status: os.stat_result) -> None:
        told.append(path)
        sys.stdout.write(line_of_status(path, status))

    for path, status in islice(walk.files(top), most):
        parts = path.split(b"/")
        parents = [b"/".join(parts[:end]) for end in range(1, len(parts))]
        for parent in parents:
            if parent not in around:
                write(parent, os.stat(os.path.join(top.path, parent), follow_symlinks=False))
        around = parents
        write(path, status)
    sys.stdout.write("\n")
    sys.stdout.flush()
    opener = Opener(top.path, any_owner=True)
    send_wanted(lambda index: opener.open(told[index]))


def main(request: str) -> None:
    asked: dict[str, Any] = json.loads(request)
    ours = frozenset(os.fsencode(name) for name in asked["ours"])
    walk = Walk(read_known(), ours, [*map(os.fsencode, asked["left_out"])], Beat(answer))
    tops = tops_of(asked)
    if "top" not in asked:
        for told in answers(walk, tops):
            answer(**told)
        return
    for top in tops:
        if top.path == base64.b64decode(asked["top"]):
            send_top(walk, top, asked["most"])
            return
    sys.stdout.write("\n")
    sys.stdout.flush()
