"""Program that finds files that exist only on the cluster, for Python 3.9. Runs on hosts as root.

On a cluster that other people run, it runs as the user, with `folder`.

    main(REQUEST)

REQUEST is a JSON object:
    shared: folder that all hosts share; look_at_shared: whether to search this folder
    local: whether to search this host's own disks; host: name of this host; root: the folder in
        place of / (only tests have another)
    folder: if not empty, only this folder is searched, clusterctl's on a cluster that other people
        run
    jobs: if not empty, only these folders of jobs are searched
    ours: names of the files that clusterctl puts into job folders; left_out: folders to skip

stdin begins with the files that also exist on the user's machine: eight bytes with the number of
``digest``s, the digests, sorted, and for each the time when the copy was made by this host's clock, in
nanoseconds; 0: unknown. A file that was changed later (ctime) is not the file that was copied, even if
its size and its time of modification are the same.

The answer is lines of JSON: {"top", "path", "owner", "files", "bytes", "on_disk", "age_s", "changed_ns"}
for the files below a path (``on_disk``: bytes, without the holes of sparse files; ``changed_ns``: the
newest ctime), {"unread", "why"} for a
path that can't be read, {} as a keep-alive, and {"end": true}. Paths are base64. If there are very
many paths, the largest are listed, and a line with the path "" sums up the rest.

On a host's own disks, a file counts wherever it is if an account of a person owns it, and in homes and
in folders that no system has, such as /data, whoever owns it.
Everything that a user may have written counts, except what ``SearchedFolder``, ``is_worthless`` and
``has_data`` leave out: `down` and `detach` delete that without asking, and `collect` says so
(``stops_down``).

If the request has ``top``, a folder of an earlier answer, the program lists and sends up to
``most`` files of that folder, as transport/remote_content.py describes. Links are never followed;
empty files are left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pwd
import re
import stat
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from clusterctl.spec.remote_folders import FOLDERS
from clusterctl.transport.remote_content import (
    ALIVE_LINE,
    BLOCK,
    HEADER,
    line_of_status,
    send_requested_files,
)
from clusterctl.transport.remote_open import FOLDER, FileOpener, KeepAlive, open_file
from clusterctl.util.file_servers import FILE_SERVERS

DIGEST = 8  # bytes
DEEPEST = 100  # folders
MOST_TOLD = 200
MOST_UNREAD = 20
HOMES = b"home"
JOBS_FOLDER = b"jobs"
JOBS = b"clusterctl/%s/" % JOBS_FOLDER
# The uids of people, in the words of systemd (UIDS-GIDS.md) and Debian (policy 9.2.2): from 1000, also
# those of systemd-homed up to 60513, but not those of containers, of system accounts (Debian's slurm
# has 64030), of services, and of nobody.
FIRST_UID = 1000
NOT_OF_PEOPLE = range(60514, 65536)
# The folder that `attach` creates has all of clusterctl's files, and this mark. Users may choose its
# place.
FOLDER_BELOW_HOME = b"clusterctl/"
MARK = b".clusterctl-cluster"
# Below a home: clusterctl's own files, caches, and files that shells and ssh write.
NOT_IN_HOMES = frozenset(
    (
        *(
            FOLDER_BELOW_HOME + one.name.encode()
            for one in FOLDERS
            if one.is_own and not one.has_user_files
        ),
        *b".cache .nv .cupy .triton .apptainer/cache .vscode-server .ansible .ssh "
        b".bash_history .python_history .lesshst .viminfo .wget-hsts .sudo_as_admin_successful".split(),
    )
)
NOT_IN_FOLDER = frozenset(
    FOLDER_BELOW_HOME + name
    for name in (
        *(one.name.encode() for one in FOLDERS if one.is_attached and not one.has_user_files),
        b"job-profile.sh",
        b".job-profile.new",
        MARK,
    )
)
CACHE = b"__pycache__"
# Copies of other files, beside the targets of `submit --set stage=` (payload/node/stage.py).
STAGED = re.compile(rb"\.clusterctl-staged-[0-9]+")
PARTIAL = re.compile(rb"\.clusterctl-[0-9a-f]{32}\.part(\.[0-9]+)?")
# The folder of a job whose submission has not finished.
INCOMPLETE = re.compile(JOBS + rb"\.[^/]*\.incomplete")
# Names of jobs' folders contain a hyphen, unlike those of sessions' folders and of claims.
# Files that `launch` writes in the folder of a `clusterctl shell`, which has shown the ranks'
# output.
OF_SESSION = re.compile(JOBS + rb"shell\.[^/-]+/(rank-logs|job\.hosts|heartbeat)")
# The claim of a `submit --first` with the id of the job that runs, and temporary files beside the
# claim.
CLAIM = re.compile(JOBS + rb"\.first\.[^/-]+")
SKELETON = b"/etc/skel"
MOST_SKELETON = 1 << 16
# Folders of / in which files of the system's own accounts are no user's. The file hierarchy standard
# has /srv and /mnt too, but no system puts files there.
OF_THE_SYSTEM = frozenset(
    b"bin boot etc lib lib32 lib64 libx32 opt root sbin snap tmp usr var".split()
)
# Folders of / that are no disk or no user's, and those of container engines (docker, podman,
# containerd), where the owners are the accounts of images.
NOT_ON_DISKS = frozenset(
    b"dev lost+found proc run sys var/lib/docker var/lib/containers var/lib/containerd".split()
)
# In these folders of /, names that programs give their files.
TEMPORARY = re.compile(rb"(?:var/)?tmp/(.*)", re.DOTALL)
OF_PROGRAMS = re.compile(
    rb"(ompi\.|s?pmix[-._]|prte(run|d)?\.|openmpi-sessions|tmux-|pip-|pymp-|torchelastic_|torchinductor_|"
    rb"nvidia-mps|matplotlib-|systemd-private-|dbus-|snap-private|\.X|\.ICE|hsperfdata_|krb5cc_)[^/]*|"
    rb"ssh-[A-Za-z0-9]{10,12}"
)
NETWORK = frozenset(kind.encode() for kind in (*FILE_SERVERS, "autofs", "fuse"))


def is_worthless(name: bytes) -> bool:
    """Return whether files and folders of this name never stop `down`, in whatever folder they are."""
    return (
        name == CACHE or STAGED.fullmatch(name) is not None or PARTIAL.fullmatch(name) is not None
    )


def has_data(mode: int, size: int) -> bool:
    """Return whether a file has data of its own, unlike links, pipes, sockets, devices and empty
    files.
    """
    return stat.S_ISREG(mode) and size > 0


def stops_down(path: bytes, mode: int, size: int) -> bool:
    """Return whether `down` and `detach` refuse to delete a file of a job if there is no copy of
    it. path: in the job's folder. mode: the file's type, as in ``st_mode``. size: in bytes.
    """
    return has_data(mode, size) and not any(map(is_worthless, path.split(b"/")))


def digest(host: bytes, path: bytes, size: int, mtime_ns: int) -> int:
    """Return a hash of a file's host, path, size and modification time. host: b"" for the shared
    folder.
    """
    text = b"%s\0%s\0%d\0%d" % (host, path, size, mtime_ns // 1_000_000_000)
    return int.from_bytes(hashlib.blake2b(text, digest_size=DIGEST).digest(), "little")


def encoded(path: bytes) -> str:
    return base64.b64encode(path).decode("ascii")


def answer(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class SearchedFolder:
    """A folder to search for files of users. host: name of the host, or b"" for the shared file
    system.

    not_here: paths below the folder that are skipped.
    is_disk: whether it is the root of the host's own disks: see ``OF_THE_SYSTEM``. Temporary files of
        programs are skipped there.
    jobs: names of folders of jobs in it. If there are any, only these are searched.
    attached: the paths below the folder, each with a slash, of folders that `attach` has created;
        "": the folder itself. ``CopySearch`` adds those that it finds.
    """

    def __init__(
        self,
        path: bytes,
        host: bytes = b"",
        not_here: Collection[bytes] = (),
        attached: Collection[bytes] = (),
        *,
        is_disk: bool = False,
        jobs: Collection[bytes] = (),
    ) -> None:
        self.path = path
        self.host = host
        self.not_here = not_here
        self.attached = {*attached}
        self.is_disk = is_disk
        self.jobs = jobs

    def skips(self, path: bytes, ours: Collection[bytes]) -> bool:
        """Return whether this path is skipped. ours: names of clusterctl's own files in job
        folders.
        """
        name = path.rpartition(b"/")[2]
        if path in self.not_here:
            return True
        if self.jobs and path != JOBS_FOLDER:
            above, _, rest = path.partition(b"/")
            if above != JOBS_FOLDER or rest.partition(b"/")[0] not in self.jobs:
                return True
        temporary = TEMPORARY.fullmatch(path) if self.is_disk else None
        if temporary is not None and OF_PROGRAMS.fullmatch(temporary[1]):
            return True
        folder = self.attached_folder(path)
        if folder is not None:
            path = FOLDER_BELOW_HOME + path[len(folder) :]
        return (
            is_worthless(name)
            or INCOMPLETE.fullmatch(path) is not None
            or OF_SESSION.fullmatch(path) is not None
            or CLAIM.fullmatch(path) is not None
            or (folder is not None and path in NOT_IN_FOLDER)
            or (path.startswith(JOBS) and path.count(b"/") == JOBS.count(b"/") + 1 and name in ours)
        )

    def attached_folder(self, path: bytes) -> bytes | None:
        """Return the entry of ``attached`` that has this path. None: it is in none of them."""
        return next((folder for folder in self.attached if path.startswith(folder)), None)

    def depth_of_group(self, path: bytes) -> int:
        """Return how many names of a path tell where it is: up to a job's folder, or what is directly in
        a home, in a folder such as /data or /opt, or in one such as /var/lib.
        """
        folder = self.attached_folder(path)
        if folder is not None:
            return folder.count(b"/") + 2
        if self.is_disk:
            return 3 if path.startswith((b"usr/", b"var/")) else 2
        return JOBS.count(b"/") + 1 if path.startswith(JOBS) else 1

    def counts(self, path: bytes, status: os.stat_result) -> bool:
        """Return whether a file is a user's, and has data."""
        if not has_data(status.st_mode, status.st_size):
            return False
        if self.is_disk:
            top, slash, _ = path.partition(b"/")
            return is_of_person(status.st_uid) or bool(slash and top not in OF_THE_SYSTEM)
        return not (path.startswith(b".") and b"/" not in path and self.is_as_created(path, status))

    def is_as_created(self, name: bytes, status: os.stat_result) -> bool:
        """Return whether file ``name`` equals the file in /etc/skel that is copied into every new
        home.
        """
        try:
            with open(os.path.join(SKELETON, name), "rb") as file:
                created = file.read(MOST_SKELETON)
            if len(created) != status.st_size:
                return False
            with os.fdopen(open_file(self.path, name, any_owner=True), "rb") as file:
                return file.read(MOST_SKELETON) == created
        except OSError:
            return False


def is_of_person(uid: int) -> bool:
    """Return whether an account is a person's, not one of the system."""
    return uid >= FIRST_UID and uid not in NOT_OF_PEOPLE


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def has_mark(fd: int) -> bool:
    """Return whether `attach` has created this open folder."""
    try:
        return stat.S_ISREG(os.stat(MARK, dir_fd=fd, follow_symlinks=False).st_mode)
    except OSError:
        return False


def folders_in(path: bytes) -> list[bytes]:
    try:
        with os.scandir(path) as entries:
            return sorted(
                os.fsencode(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def tops_of(request: dict[str, Any]) -> Iterator[SearchedFolder]:
    shared = os.fsencode(request["shared"])
    host = os.fsencode(request["host"])
    if request["jobs"]:
        names: dict[bytes, set[bytes]] = {}
        for job in map(os.fsencode, request["jobs"]):
            above, name = os.path.split(job)
            names.setdefault(os.path.dirname(above), set()).add(name)
        for folder, jobs in names.items():
            yield SearchedFolder(folder, attached={b""}, jobs=jobs)
        return
    if request["folder"]:
        yield SearchedFolder(os.fsencode(request["folder"]), attached={b""})
        return
    if request["look_at_shared"]:
        homes = [os.path.join(HOMES, name) for name in folders_in(os.path.join(shared, HOMES))]
        for home in homes:
            if not home.startswith(HOMES + b"/.clusterctl-"):
                yield SearchedFolder(os.path.join(shared, home), not_here=NOT_IN_HOMES)
        yield SearchedFolder(shared, not_here={b"lost+found", *homes})
    if not request["local"]:
        return
    root = os.fsencode(request["root"])
    homes = [os.path.join(HOMES, name) for name in folders_in(os.path.join(root, HOMES))]
    for home in homes:
        yield SearchedFolder(os.path.join(root, home), host, NOT_IN_HOMES)
    yield SearchedFolder(
        root, host, {*NOT_ON_DISKS, *homes, os.path.relpath(shared, root)}, is_disk=True
    )


def network_mounts() -> set[bytes]:
    with open("/proc/self/mountinfo", "rb") as file:
        lines = [line.split() for line in file]
    return {line[4] for line in lines if line[line.index(b"-") + 1].partition(b".")[0] in NETWORK}


class CopySearch:
    """Search for files of which the user's machine has no copy. ``unread``: unreadable paths with
    the reason.

    copied: ``digest``s of the files that also exist on the user's machine, sorted. times: when each
        was copied, in nanoseconds; 0: unknown.
    """

    def __init__(
        self,
        copied: array[int],
        times: array[int],
        ours: Collection[bytes],
        left_out: Collection[bytes],
        beat: KeepAlive,
    ) -> None:
        self.copied = copied
        self.times = times
        self.ours = ours
        self.beat = beat
        self.passed_over = network_mounts() | {*left_out}
        self.unread: list[tuple[bytes, str]] = []

    def files(self, top: SearchedFolder) -> Iterator[tuple[bytes, os.stat_result]]:
        """Yield path and status of each file below ``top`` that does not also exist on the user's
        machine.
        """
        if top.path in self.passed_over and top.host:
            return
        try:
            fd = os.open(top.path, FOLDER)
        except OSError as exc:
            self.fail(top.path, exc)
            return
        yield from self.below(top, fd, b"", 0)

    def below(
        self, top: SearchedFolder, fd: int, above: bytes, depth: int
    ) -> Iterator[tuple[bytes, os.stat_result]]:
        try:
            if has_mark(fd):
                top.attached.add(above + b"/" if above else b"")
            with os.scandir(fd) as entries:
                for entry in entries:
                    self.beat()
                    name = os.fsencode(entry.name)
                    path = above + b"/" + name if above else name
                    full = os.path.join(top.path, path)
                    try:
                        if not entry.is_dir(follow_symlinks=False):
                            status = entry.stat(follow_symlinks=False)
                            if (
                                top.counts(path, status)
                                and not top.skips(path, self.ours)
                                and not self.is_known(top, full, status)
                            ):
                                yield path, status
                        elif full not in self.passed_over and not top.skips(path, self.ours):
                            if depth == DEEPEST:
                                raise OSError(0, f"more than {DEEPEST} folders deep")
                            yield from self.below(
                                top, os.open(name, FOLDER, dir_fd=fd), path, depth + 1
                            )
                    except FileNotFoundError:
                        continue
                    except OSError as exc:
                        self.fail(full, exc)
        except OSError as exc:
            self.fail(os.path.join(top.path, above), exc)
        finally:
            os.close(fd)

    def is_known(self, top: SearchedFolder, full: bytes, status: os.stat_result) -> bool:
        number = digest(top.host, full, status.st_size, status.st_mtime_ns)
        index = bisect_left(self.copied, number)
        if index == len(self.copied) or self.copied[index] != number:
            return False
        return not self.times[index] or status.st_ctime_ns <= self.times[index]

    def fail(self, path: bytes, exc: OSError) -> None:
        if len(self.unread) < MOST_UNREAD:
            self.unread.append((path, exc.strerror or str(exc)))


class FileTotals:
    """Totals of a group of files: all files of a job, or below a file or folder in a searched
    folder.
    """

    def __init__(self) -> None:
        self.files = self.bytes = self.on_disk = self.newest_ns = self.changed_ns = 0
        self.owners: set[int] = set()

    def add_file(self, status: os.stat_result) -> None:
        totals = FileTotals()
        totals.files = 1
        totals.bytes = status.st_size
        totals.on_disk = min(status.st_size, status.st_blocks * BLOCK)
        totals.newest_ns = status.st_mtime_ns
        totals.changed_ns = status.st_ctime_ns
        totals.owners = {status.st_uid}
        self.add(totals)

    def add(self, other: FileTotals) -> None:
        self.files += other.files
        self.bytes += other.bytes
        self.on_disk += other.on_disk
        self.newest_ns = max(self.newest_ns, other.newest_ns)
        self.changed_ns = max(self.changed_ns, other.changed_ns)
        # Two owners suffice to report "several users".
        if len(self.owners) <= 1:
            self.owners |= other.owners

    def report(self, top: bytes, path: bytes) -> None:
        answer(
            top=encoded(top),
            path=encoded(path),
            owner=name_of(*self.owners) if len(self.owners) == 1 else "several users",
            files=self.files,
            bytes=self.bytes,
            on_disk=self.on_disk,
            age_s=max(0, int(time.time() - self.newest_ns / 1e9)),
            changed_ns=self.changed_ns,
        )


def keep_largest(
    groups: dict[tuple[bytes, bytes], FileTotals], rest: FileTotals, most: int
) -> None:
    """Remove all but the ``most`` largest groups, and add the removed groups to the sum ``rest``."""
    for key in sorted(groups, key=lambda key: -groups[key].bytes)[most:]:
        rest.add(groups.pop(key))


def report_files(walk: CopySearch, tops: Iterator[SearchedFolder]) -> None:
    """Print a line for each of the largest groups of files, and a line for the sum of the smaller
    groups.
    """
    groups: dict[tuple[bytes, bytes], FileTotals] = {}
    rest = FileTotals()
    most = MOST_TOLD
    for top in tops:
        # Each job that was asked for has a line.
        most = max(most, len(top.jobs))
        for path, status in walk.files(top):
            parts = path.split(b"/")
            key = top.path, b"/".join(parts[: top.depth_of_group(path)])
            groups.setdefault(key, FileTotals()).add_file(status)
            if len(groups) > 2 * most:
                keep_largest(groups, rest, most)
    keep_largest(groups, rest, most)
    for (top_path, path), group in groups.items():
        group.report(top_path, path)
    if rest.files:
        rest.report(b"", b"")
    for path, reason in walk.unread:
        answer(unread=encoded(path), why=reason)
    answer(end=True)


def send_top(walk: CopySearch, top: SearchedFolder, most: int) -> None:
    """List at most ``most`` files below ``top``, and their folders. Then send the requested
    files.
    """
    paths: list[bytes] = []
    parents: list[bytes] = []

    def write(path: bytes, status: os.stat_result) -> None:
        paths.append(path)
        sys.stdout.write(line_of_status(path, status))

    for path, status in islice(walk.files(top), most):
        parts = path.split(b"/")
        previous = parents
        parents = [b"/".join(parts[:end]) for end in range(1, len(parts))]
        for parent in parents:
            if parent not in previous:
                write(parent, os.stat(os.path.join(top.path, parent), follow_symlinks=False))
        write(path, status)
    sys.stdout.write("\n")
    sys.stdout.flush()
    send_requested_files(FileOpener(top.path, any_owner=True), paths)


def main(text: str) -> None:
    request: dict[str, Any] = json.loads(text)
    (count,) = HEADER.unpack(sys.stdin.buffer.read(HEADER.size))
    copied = array("Q")
    times = array("Q")
    for numbers in (copied, times):
        numbers.frombytes(sys.stdin.buffer.read(count * DIGEST))
    ours = frozenset(os.fsencode(name) for name in request["ours"])
    sign = b"{}\n" if "top" not in request else ALIVE_LINE + b"\n"
    walk = CopySearch(
        copied,
        times,
        ours,
        [*map(os.fsencode, request["left_out"])],
        KeepAlive(sys.stdout.buffer, sign),
    )
    if "top" not in request:
        report_files(walk, tops_of(request))
        return
    for top in tops_of(request):
        if top.path == base64.b64decode(request["top"]):
            send_top(walk, top, request["most"])
            return
    sys.stdout.write("\n")
    sys.stdout.flush()
