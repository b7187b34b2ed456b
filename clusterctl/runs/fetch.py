"""Bring a job's folder here. Nothing the cluster says is trusted to be a sane path, or to be little."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from clusterctl.errors import CollectError, MachineError, TransferError, UsageError, printable
from clusterctl.runs.remote_files import (
    EVERYTHING,
    NOT_WANTED,
    OLDER,
    TASK,
    TASKS_LOG,
    TOO_LARGE,
    UNFINISHED_ONE,
)
from clusterctl.spec.units import parse_size_mib
from clusterctl.state.ledger import Skipped
from clusterctl.state.submissions import ADDED_FILES, SENT_FILES, UNCHANGED, WRITTEN_FILES
from clusterctl.transport.base import Transport, remote_argv
from clusterctl.transport.get import Sender
from clusterctl.transport.remote_incoming import Entry
from clusterctl.transport.tree import Kind, Progress, shown_size
from clusterctl.util.process import on_each

_ROUNDS = 4  # a file that changed while it was read is read again
NODES = b"nodes"  # holds, by host, files whose name another host has used for something else
REMOTE_PROGRAM = "clusterctl.runs.remote_files"

# Written by us into a run's folder; a job's own file or folder of that name gets another one.
RESERVED = frozenset(name.encode() for name in SENT_FILES | ADDED_FILES)
FROM_JOB = b".from-job"
MAX_FILE = 64 << 30  # bytes: what is larger stays on the cluster unless it is asked for
MAX_CHECKPOINT = 4 << 30  # bytes of the latest checkpoint: the same

_MOST_ROWS = 1_250_000  # the cluster itself stops at 1,000,000
_MOST_HOLES = 16 << 30  # bytes of a job's files, which cost no disk but the time to hash them
_MOST_SKIPPED = 1000  # that are named one by one
_LONGEST = 2048  # bytes of a path: it must fit below any folder here
_UNWANTED = "not among the outputs"
_OURS = frozenset(name.encode() for name in SENT_FILES | WRITTEN_FILES)
# `x/**` is what lies below x, not x itself, which pathspec would leave out with it.
_BELOW = re.compile(r"/\*\*(\s*)$")
_ROOM = "make room, name another folder with --out, or leave large files there with --max-file"
# As make_places of remote_incoming.py makes them.
_PARTIAL = re.compile(rb"\.clusterctl-[0-9a-f]{32}\.part(\.[0-9]+)?")
_Key = tuple[bytes, bytes, int]  # a file's path, place and size
_Left = tuple[bytes, str, int, int]  # a path, why it stays, how many bytes in how many files
Home = Mapping[bytes, tuple[int, str]]  # files that an earlier collect brought: their sizes and sha256


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a run comes home: ``checkpoints`` latest, all, none, or everything, which means all of the run.

    The latest checkpoint comes if it has at most ``max_checkpoint`` bytes, a file if it has ``max_file``.
    """

    checkpoints: str = "latest"
    max_checkpoint: int = MAX_CHECKPOINT
    max_file: int = MAX_FILE

    @property
    def everything(self) -> bool:
        return self.checkpoints == EVERYTHING

    @property
    def asks_more(self) -> bool:
        """Whether what a collect by default has left may come by this one."""
        larger = self.max_checkpoint > MAX_CHECKPOINT or self.max_file > MAX_FILE
        return larger or self.checkpoints in {"all", EVERYTHING}

    def why(self, reason: str, size: int, job_id: str) -> str:
        """Why something stays there, by the reason of remote_files.py, and what brings it home."""
        if reason == TOO_LARGE:
            reason = f"a checkpoint of {shown_size(size)}, more than {shown_size(self.max_checkpoint)}"
            flags = ["--max-checkpoint", f"{(size >> 30) + 1}GiB"]
        elif reason in {NOT_WANTED, OLDER, UNFINISHED_ONE}:
            flags = ["--checkpoints", "all"]
        elif reason == _UNWANTED or reason.startswith("more than"):
            flags = ["--all"]
        else:
            return reason
        return _with_command(reason, job_id, *flags)


def _with_command(reason: str, job_id: str, *flags: str) -> str:
    """The reason why something stays on the cluster, and the command that brings it."""
    return f"{reason}: `{shlex.join(filter(None, ('clusterctl', 'collect', job_id, *flags)))}`"


DEFAULT = Selection()
ALL = Selection(EVERYTHING, sys.maxsize, sys.maxsize)
CHECKPOINTS = ("latest", "all", "none")


def selection_of(
    checkpoints: str | None, max_checkpoint: str | None, max_file: str | None, *, everything: bool
) -> Selection:
    """Return what of runs is copied, by the options of `collect`. None: its default.

    checkpoints: which checkpoints of each run: latest, all or none.
    max_checkpoint, max_file: sizes such as 4GiB. Larger files are left and listed.
    everything: copy everything, whatever its size.

    Raises:
        UsageError: a value is wrong, or contradicts ``everything``.
    """
    if everything:
        if any(one is not None for one in (checkpoints, max_checkpoint, max_file)):
            raise UsageError(
                "--all copies everything",
                code="options-exclusive",
                fix="leave out --checkpoints, --max-checkpoint and --max-file",
            )
        return ALL
    if checkpoints not in {None, *CHECKPOINTS}:
        raise UsageError(
            f"--checkpoints: {checkpoints!r} is none of them",
            code="unknown-value",
            fix=f"say {', '.join(CHECKPOINTS)}",
        )
    return Selection(
        checkpoints or "latest",
        _bytes("--max-checkpoint", max_checkpoint, MAX_CHECKPOINT),
        _bytes("--max-file", max_file, MAX_FILE),
    )


def _bytes(flag: str, size: str | None, default: int) -> int:
    try:
        return default if size is None else parse_size_mib(size) << 20
    except ValueError as exc:
        raise UsageError(f"{flag} is wrong", code="bad-value", why=str(exc)) from exc


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run's tree holds: ``files`` with their sizes in bytes and the sha256 of each in hex.

    ``folders`` are the empty ones. All paths are relative to the tree; ``skipped`` is left on the cluster.
    """

    files: Mapping[bytes, int]
    sha256: Mapping[bytes, str]
    skipped: tuple[Skipped, ...]
    folders: tuple[bytes, ...]


class Outputs:
    """What a job is to leave: files that its patterns take, of which the last that matches counts, and ours.

    sent: files that were sent with the job. They are not told of if they are none of its outputs.
    """

    def __init__(self, patterns: Sequence[str], sent: Iterable[bytes] = ()) -> None:
        from pathspec import GitIgnoreSpec, PathSpec  # noqa: PLC0415 - slow, and few jobs name their outputs

        lines = [_BELOW.sub(r"/**/*\1", pattern) for pattern in patterns]
        with warnings.catch_warnings():  # of brackets in what pathspec makes of patterns such as a[[:alpha:]]
            warnings.simplefilter("ignore", FutureWarning)
            # GitIgnoreSpec itself would take files that an earlier pattern names in spite of `!folder/`.
            self._spec = PathSpec(GitIgnoreSpec.from_lines(lines).patterns)
        self.sent = frozenset(sent)

    def take(self, entry: Entry) -> bool:
        """Whether it is wanted by its path in the job's folder, or in that of a task of an array."""
        top, _, rest = entry.path.partition(b"/")
        end = "/" if entry.kind == Kind.FOLDER else ""
        for path in [entry.path, rest] if rest and TASK.fullmatch(top) else [entry.path]:
            first = path.partition(b"/")[0]
            if first in _OURS or TASKS_LOG.fullmatch(first) or self._spec.match_file(os.fsdecode(path) + end):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Source:
    """A job's folder on the cluster, and what of it is wanted here.

    With ``still_changing`` (the job runs), files that can't be caught in a consistent state are skipped.
    outputs: what of it is wanted, but for a selection of everything. None: all but old checkpoints.
    """

    folder: str
    job_id: str = ""
    still_changing: bool = False
    selection: Selection = DEFAULT
    outputs: Outputs | None = None
    home: Home = field(default_factory=dict)
    progress: Progress = lambda *_: None


def sender(transport: Transport) -> Sender:
    """What lists and sends folders of jobs on a host."""
    return Sender(transport, remote_argv(REMOTE_PROGRAM, *sorted(SENT_FILES | WRITTEN_FILES)), many=True)


def fetch_tree(sender: Sender, source: Source, tree: Path) -> Manifest:
    """Make ``tree`` hold exactly the files and empty folders of the source, but for those that are at home.

    Returns what it holds, with those at home.

    Raises:
        CollectError: files keep changing or vanish although the job has ended; the disk is too small; or the
            cluster's answer can't be a folder's content.
        TransportError: the cluster can't be reached. What has arrived is kept.
    """
    folder, home = source.folder, source.home
    tree.mkdir(parents=True, exist_ok=True)
    is_new = not any(tree.iterdir())
    here: dict[_Key, str] = {}  # -> sha256
    wanted = source.selection
    checkpoints = "all" if source.outputs and not wanted.everything else wanted.checkpoints
    request = json.dumps([folder, checkpoints, wanted.max_checkpoint]).encode() + b"\n"
    most = sys.maxsize if wanted.everything else _MOST_ROWS
    for _ in range(_ROUNDS):
        try:
            with sender.listed(request, most=most) as download:
                entries, skipped = choose(download.entries, download.left, source, tree)
                missing = [entry for entry in entries if entry.local not in home and _key(entry) not in here]
                arrived = download.bring(missing, tree, own=True, room=_ROOM, progress=source.progress)
        except (TransferError, MachineError, UsageError) as exc:
            where = exc.where or f"{folder} on the cluster"
            raise CollectError(exc.what, code=exc.code, where=where, why=exc.why, fix=exc.fix) from exc
        here |= {_key(one): arrived[one.index] for one in missing if one.index in arrived}
        files = [entry for entry in entries if entry.kind == Kind.FILE and entry.local not in home]
        restless = [entry for entry in files if _key(entry) not in here]
        if not restless:
            break
        is_new = False
        sender.close()  # what went wrong is not to last
    if restless and not source.still_changing:
        raise _restless(restless, folder)
    hashes = {one.local: here[_key(one)] for one in files if _key(one) in here}
    around = {entry.local.rpartition(b"/")[0] for entry in entries}
    folders = tuple(e.local for e in entries if e.kind == Kind.FOLDER and e.local not in around)
    if not is_new:
        _remove_others(os.fsencode(tree), {*hashes, *folders})
    skipped += [(one.path, "it changed while it was read", one.size, 1) for one in restless]
    sizes = {entry.local: entry.size for entry in files if entry.local in hashes}
    return Manifest(
        sizes | {name: size for name, (size, _) in home.items()},
        hashes | {name: sha256 for name, (_, sha256) in home.items()},
        _named(skipped),
        folders,
    )


def _restless(files: Sequence[Entry], folder: str) -> CollectError:
    return CollectError(
        f"{len(files)} files keep changing while they are read, such as {shown_path(files[0].path)}",
        code="files-keep-changing",
        where=f"{folder} on the cluster",
        why="something still writes there although the job has ended",
        fix="end what writes there (`clusterctl ssh`), then collect again; what has arrived is kept",
    )


def _key(entry: Entry) -> _Key:
    return entry.path, entry.local, entry.size


def _named(skipped: Sequence[_Left]) -> tuple[Skipped, ...]:
    """What is left there. A job may leave any number of things: then the largest are named."""
    if len(skipped) > _MOST_SKIPPED:
        skipped = sorted(skipped, key=lambda one: (-one[2], -one[3]))
    named = [
        Skipped(path=shown_path(path), reason=why, bytes=size, files=files)
        for path, why, size, files in skipped[:_MOST_SKIPPED]
    ]
    if unnamed := [one for one in skipped[_MOST_SKIPPED:] if one[1] != UNCHANGED]:
        size, files = sum(one[2] for one in unnamed), sum(one[3] for one in unnamed)
        reason = f"{len(unnamed):,} more, which are not named"
        named.append(Skipped(path=".", reason=reason, bytes=size, files=files))
    return tuple(named)


def _remove_others(tree: bytes, keep: set[bytes]) -> None:
    """Remove what an earlier, unfinished collect left and what is gone on the cluster by now."""
    for folder, subfolders, names in os.walk(tree, topdown=False):
        below = (folder + b"/")[len(tree) + 1 :]
        for name in names:
            if below + name not in keep:
                os.unlink(os.path.join(folder, name))  # noqa: PTH108, PTH118  # names are bytes
        for name in subfolders:
            path = os.path.join(folder, name)  # noqa: PTH118
            if os.path.islink(path):  # noqa: PTH114
                os.unlink(path)  # noqa: PTH108
            elif below + name not in keep and not os.listdir(path):  # noqa: PTH208
                os.rmdir(path)  # noqa: PTH106


def fetch_from(hosts: Sequence[tuple[str, Sender]], source: Source, work: Path) -> Manifest:
    """Make ``work/tree`` hold what the job's folder holds on all of these hosts.

    The first host's files keep their places. Those of the others do too, unless another host has a different
    file of that name: then they go to ``nodes/HOST/``. It raises what ``fetch_tree`` does.
    """
    tree, nodes = work / "tree", work / "nodes"
    if len(hosts) == 1:
        return fetch_tree(hosts[0][1], source, tree)
    by_name = dict(hosts)
    # What is at home says nothing of another host's file of that name, so all are fetched.
    every = replace(source, home={})
    found, failed = on_each(by_name, lambda name: fetch_tree(by_name[name], every, nodes / name))
    if failed:  # all have ended: nothing writes there once the folder is unlocked
        raise next(iter(failed.values()))
    return _as_one(found, nodes, tree)


def _as_one(found: Mapping[str, Manifest], nodes: Path, tree: Path) -> Manifest:
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    sizes: dict[bytes, int] = {}
    hashes: dict[bytes, str] = {}
    skipped: dict[tuple[str, str], Skipped] = {}
    for host, manifest in found.items():
        for local, size in manifest.files.items():
            if hashes.get(local) == manifest.sha256[local]:
                continue
            place = _free_place(tree, local, host)
            (nodes / host / os.fsdecode(local)).replace(tree / os.fsdecode(place))
            sizes[place], hashes[place] = size, manifest.sha256[local]
        skipped |= {(one.path, one.reason): one for one in manifest.skipped}
    empty = []
    for folder in sorted({folder for manifest in found.values() for folder in manifest.folders}):
        with suppress(FileExistsError, NotADirectoryError):  # a file of another host has the name
            (tree / os.fsdecode(folder)).mkdir(parents=True, exist_ok=True)
            empty.append(folder)
    return Manifest(sizes, hashes, tuple(skipped.values()), tuple(empty))


def _free_place(tree: Path, local: bytes, host: str) -> bytes:
    """A file's own place if nothing else has it, or one below its host's name; the folder is made."""
    for number in count():
        place = local if number == 0 else b"/".join([NODES, host.encode() + b"_" * (number - 1), local])
        target = tree / os.fsdecode(place)
        with suppress(FileExistsError, NotADirectoryError):  # a file is where a folder must be
            target.parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(target):
                return place
    raise AssertionError("count never ends")


def choose(
    listing: Sequence[Entry], left: Sequence[Entry], source: Source, tree: Path
) -> tuple[list[Entry], list[_Left]]:
    """What of a job's folder comes home, each with its place and mode in the run; and what stays, and why.

    Of folders come the empty ones, and those in which something comes.
    """
    wanted = source.selection
    skipped = [
        (one.path, wanted.why(printable(one.payload), one.size, source.job_id), one.size, one.space)
        for one in left
    ]
    around = {entry.path.rpartition(b"/")[0] for entry in (*listing, *left)}
    outputs = None if wanted.everything else source.outputs
    unwanted: list[Entry] = []
    holes = sys.maxsize if wanted.everything else _MOST_HOLES  # that may come yet
    coming: set[bytes] = set()
    for entry in listing:
        if entry.kind == Kind.FOLDER and entry.path in around:
            continue
        if outputs and not outputs.take(entry):
            if entry.kind == Kind.FILE and entry.path not in outputs.sent:
                unwanted.append(entry)
        elif why := _why_not(entry, holes, wanted.max_file, source.job_id):
            skipped.append((entry.path, why, entry.size, 0 if entry.kind == Kind.LINK else 1))
        else:
            holes -= entry.size - entry.space
            path = entry.path
            while path and path not in coming:  # the folders of most files are in it
                coming.add(path)
                path = path.rpartition(b"/")[0]
    unwanted_why = wanted.why(_UNWANTED, 0, source.job_id)
    for path, (size, files) in _by_folder(unwanted, coming).items():
        skipped.append((path, unwanted_why, size, files))
    tops = {entry.path.partition(b"/")[0] for entry in listing}
    chosen = [entry for entry in listing if entry.path in coming]
    mode = tree.stat().st_mode  # the user's umask
    for entry in chosen:
        entry.local = _local(entry.path, tops)
        entry.mode = mode & (0o777 if entry.kind == Kind.FOLDER else 0o666)
    return chosen, skipped


def _by_folder(unwanted: Iterable[Entry], coming: Collection[bytes]) -> dict[bytes, tuple[int, int]]:
    """How many bytes in how many files stay, by the topmost folders of which nothing comes, else by file."""
    found: dict[bytes, tuple[int, int]] = {}
    for entry in unwanted:
        path, above = entry.path, entry.path.rpartition(b"/")[0]
        while above and above not in coming:
            path, above = above, above.rpartition(b"/")[0]
        size, files = found.get(path, (0, 0))
        found[path] = size + entry.size, files + 1
    return found


def _why_not(entry: Entry, holes: int, max_file: int, job_id: str) -> str:
    """Why something stays on the cluster; "" if it comes. ``holes``: bytes of them that may still come."""
    if entry.kind == Kind.LINK:
        return "a symbolic link"
    if _PARTIAL.fullmatch(entry.path.rpartition(b"/")[2]):
        return "files on their way have such names"
    if len(entry.path) > _LONGEST:
        return f"its path is longer than {_LONGEST:,} bytes"
    if entry.size - entry.space > holes:
        size, on_disk, most = map(shown_size, (entry.size, entry.space, _MOST_HOLES))
        sparse = f"a sparse file of {size}, {on_disk} on disk; a run's files may have {most} of holes in all"
        return _with_command(sparse, job_id, "--all")
    if entry.size > max_file:
        large = entry.size > MAX_FILE  # else the user has chosen less
        flags = ("--max-file", f"{(entry.size >> 30) + 1}GiB") if large else ("--all",)
        size = shown_size(entry.size)
        return _with_command(f"{size}, more than {shown_size(max_file)}", job_id, *flags)
    return ""


def shown_path(path: bytes) -> str:
    """A path fit for a terminal and for JSON."""
    return printable(path.decode(errors="surrogateescape"))


def _local(path: bytes, tops: set[bytes]) -> bytes:
    """Where a file goes below the run's folder; ``tops`` are the first parts of all paths."""
    top, slash, rest = path.partition(b"/")
    if top in RESERVED:
        top += FROM_JOB
        while top in tops:  # the job has such a one of its own
            top += FROM_JOB
    return top + slash + rest
