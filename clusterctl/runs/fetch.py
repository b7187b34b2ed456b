"""Copies a job's folder from the cluster. Paths and sizes that the cluster reports are not
trusted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from clusterctl.errors import CollectError, MachineError, TransferError, UsageError, printable
from clusterctl.runs.places import (
    Links,
    add_with_parents,
    choose_links,
    path_of_program,
    place_entries,
    target_of,
)
from clusterctl.runs.remote_files import (
    EVERYTHING,
    GONE,
    NOT_WANTED,
    OLDER,
    TOO_LARGE,
    UNFINISHED_ONE,
)
from clusterctl.state.ledger import (
    METRICS_FILE,
    SENT_FILES,
    TASK,
    TASKS_LOG,
    UNCHANGED,
    WRITTEN_FILES,
)
from clusterctl.state.run_record import SkippedFile, WhatDownDoes, strictness
from clusterctl.transport.base import Transport, remote_argv
from clusterctl.transport.get import MOST_ENTRIES, RemoteSender
from clusterctl.transport.remote_content import CHANGED
from clusterctl.transport.remote_copies import PARTIAL, stops_down
from clusterctl.transport.remote_incoming import IncomingEntry
from clusterctl.transport.tree import ItemKind, Progress, gitignore_spec
from clusterctl.util import formatting
from clusterctl.util.confine import refused_name
from clusterctl.util.numbers import counted
from clusterctl.util.process import call_on_hosts

_ROUNDS = 4
# The subfolder for files, by host, if two hosts have different files of the same name.
NODES = b"nodes"
REMOTE_PROGRAM = "clusterctl.runs.remote_files"

# Larger files, and a larger latest checkpoint, stay on the cluster unless the user asks for them.
MAX_FILE = 64 << 30  # bytes
MAX_CHECKPOINT = 4 << 30  # bytes

# The program on the cluster stops at 1,000,000 files.
_MOST_ROWS = 1_250_000
# Bytes of holes in sparse files, which cost no disk space but time to hash them.
_MOST_HOLES = 16 << 30
_MOST_SKIPPED = 1000
_LONGEST = 2048  # bytes
_UNWANTED = "not among the outputs"
_LINK = "a symbolic link"
_OURS = frozenset(name.encode() for name in SENT_FILES | WRITTEN_FILES | {METRICS_FILE})
_METRICS = METRICS_FILE.encode()
_ROOM = "free some space, choose another folder with --out, or skip large files with --max-file"
# What identifies a file that was fetched: its path on the cluster, its path in the run's folder,
# and its size.
_Key = tuple[bytes, bytes, int]


class _Left(NamedTuple):
    """A file or folder that stays on the cluster. down: see ``SkippedFile``. target: of a link."""

    path: bytes
    reason: str
    size: int
    files: int
    down: WhatDownDoes
    target: bytes = b""

    def record(self) -> SkippedFile:
        return SkippedFile(
            path=shown_path(self.path),
            reason=self.reason,
            bytes=self.size,
            files=self.files,
            down=self.down,
            target=shown_path(self.target),
        )


def _left_entry(entry: IncomingEntry, selection: Selection, job_id: str) -> _Left:
    """Return what the program on the cluster says of a path that it does not send."""
    reason = printable(entry.payload)
    down: WhatDownDoes = "refuses" if entry.mode else "deletes"
    return _Left(
        entry.path,
        selection.explain(reason, entry.size, job_id),
        entry.size,
        entry.space,
        "" if reason == GONE else down,
    )


def _left_file(entry: IncomingEntry, reason: str) -> _Left:
    return _Left(entry.path, reason, entry.size, 1, _down_of(entry))


def _down_of(file: IncomingEntry) -> WhatDownDoes:
    return "refuses" if stops_down(file.path, stat.S_IFREG, file.size) else "deletes"


# Files that an earlier collect copied: sizes and sha256 by path.
CollectedFiles = Mapping[bytes, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which files of a run `collect` copies. max_checkpoint, max_file: limits in bytes.

    checkpoints: the checkpoints to copy: "latest", "all" or "none"; or "everything": all files of
        the run.
    """

    checkpoints: str = "latest"
    max_checkpoint: int = MAX_CHECKPOINT
    max_file: int = MAX_FILE

    @property
    def everything(self) -> bool:
        return self.checkpoints == EVERYTHING

    @property
    def exceeds_default(self) -> bool:
        """Whether this selection may include files that `collect` without options does not copy."""
        larger = self.max_checkpoint > MAX_CHECKPOINT or self.max_file > MAX_FILE
        return larger or self.checkpoints in {"all", EVERYTHING}

    def explain(self, reason: str, size: int, job_id: str) -> str:
        """Return the reason why a file was skipped, with the `collect` command that copies it (if
        any).
        """
        if reason == TOO_LARGE:
            own, most = map(formatting.size, (size, self.max_checkpoint))
            reason = f"a checkpoint of {own}, more than {most}"
            flags = ["--max-checkpoint", f"{(size >> 30) + 1}GiB"]
        elif reason in {NOT_WANTED, OLDER, UNFINISHED_ONE}:
            flags = ["--checkpoints", "all"]
        elif reason == _UNWANTED or reason.startswith("more than"):
            flags = ["--all"]
        else:
            return reason
        return _with_command(reason, job_id, *flags)


def _with_command(reason: str, job_id: str, *flags: str) -> str:
    return f"{reason}: `{shlex.join(filter(None, ('clusterctl', 'collect', job_id, *flags)))}`"


DEFAULT = Selection()
ALL = Selection(EVERYTHING, sys.maxsize, sys.maxsize)
CHECKPOINTS = ("latest", "all", "none")


@dataclass(frozen=True, slots=True)
class RunManifest:
    """The files of a run's folder, and its empty folders. All paths are relative to the run's
    folder.

    files: path -> size in bytes. sha256: path -> hex digest. skipped: files that stay on the
        cluster.
    links: path -> path of its target, for links to make when all files are there.
    """

    files: Mapping[bytes, int]
    sha256: Mapping[bytes, str]
    skipped: tuple[SkippedFile, ...]
    folders: tuple[bytes, ...]
    links: Links = field(default_factory=dict)


class Outputs:
    """Selects the output files of a job: its logs, and the files that match the job's patterns.

    patterns: patterns as in .gitignore. The last pattern that matches decides; with ``!``, it
        excludes.
    sent: sizes of submitted files, by their paths; None: not known. If such a file is not copied,
        `collect` lists it as skipped only if it has another size now.
    """

    def __init__(self, patterns: Sequence[str], sent: Mapping[bytes, int | None] = {}) -> None:
        self._patterns = tuple(reversed(gitignore_spec(patterns).patterns))
        self._sent = dict(sent)

    def _match(self, path: str) -> bool:
        # GitIgnoreSpec itself would include files of an earlier pattern in spite of a later
        # `!folder/`.
        matching = (pattern for pattern in self._patterns if pattern.include is not None)
        return bool(next((p.include for p in matching if p.match_file(path) is not None), False))

    def has_sent(self, path: bytes, size: int) -> bool:
        """Return whether a file was submitted and still has the same size."""
        return path in self._sent and self._sent[path] in {None, size}

    def take(self, path: bytes, *, is_folder: bool, is_job: bool) -> bool:
        """Return whether a file or folder is an output, by its path in the program's folder.

        is_job: whether this is also the job's folder, so that names of clusterctl's files mean
            these files.
        """
        top, _, rest = path.partition(b"/")
        end = "/" if is_folder else ""
        for below in [path, rest] if rest and TASK.fullmatch(top) else [path]:
            first = below.partition(b"/")[0]
            is_ours = first in _OURS or TASKS_LOG.fullmatch(first) is not None
            if (is_ours and is_job) or below == _METRICS or self._match(os.fsdecode(below) + end):
                return True
        return False


@dataclass(frozen=True, slots=True)
class RunSource:
    """A job's folder on the cluster, and the rules for copying it.

    still_changing: the job is running, so files that keep changing are skipped.
    outputs: the files to copy, unless `collect --all` is used. None: all files but older
        checkpoints.
    home: files that an earlier `collect` copied to this machine. They are copied again only if they
        were changed since.
    since_ns: when the files in ``home`` were last compared, in nanoseconds by the cluster's clock.
    files: the folder below it with the program's files. "": they are in the job's folder itself.
    """

    folder: str
    job_id: str = ""
    still_changing: bool = False
    selection: Selection = DEFAULT
    outputs: Outputs | None = None
    home: CollectedFiles = field(default_factory=dict)
    progress: Progress = lambda *_: None
    files: str = ""
    since_ns: int = 0


def sender(transport: Transport) -> RemoteSender:
    """Return a client of a program on the host that lists a job's folder and sends its files."""
    return RemoteSender(
        transport, remote_argv(REMOTE_PROGRAM, *sorted(map(os.fsdecode, _OURS))), many=True
    )


def fetch_tree(sender: RemoteSender, source: RunSource, tree: Path) -> RunManifest:
    """Copy a job's files and empty folders, except those of ``source.home`` that did not change since.
    Remove other files in ``tree``.

    Raises:
        CollectError: files of an ended job keep changing, the local disk is full, or the answer is
            malformed.
        TransportError: the cluster can't be reached. Files that have arrived are kept.
    """
    folder = source.folder
    home = dict(source.home)
    selection = source.selection
    tree.mkdir(parents=True, exist_ok=True)
    is_new = not any(tree.iterdir())
    hashed: dict[_Key, str] = {}
    checkpoints = "all" if source.outputs and not selection.everything else selection.checkpoints
    request = (
        json.dumps(
            [folder, checkpoints, selection.max_checkpoint, source.files, source.since_ns]
        ).encode()
        + b"\n"
    )
    max_rows = MOST_ENTRIES if selection.everything else _MOST_ROWS
    for _ in range(_ROUNDS):
        try:
            with sender.listed(request, most=max_rows) as download:
                changed = _take_changed(download.entries)
                entries, links, skipped = choose_entries(
                    download.entries, download.left, source, tree
                )
                for entry in entries:
                    if entry.index in changed:
                        home.pop(entry.local, None)
                missing = [
                    entry
                    for entry in entries
                    if entry.local not in home and _key(entry) not in hashed
                ]
                arrived = download.bring(
                    missing, tree, own=True, room=_ROOM, progress=source.progress
                )
        except (TransferError, MachineError, UsageError) as exc:
            where = exc.where or f"{folder} on the cluster"
            raise CollectError(
                exc.what,
                code=exc.code,
                about=exc.about,
                where=where,
                why=exc.why,
                fix=exc.fix,
            ) from exc
        hashed |= {_key(entry): arrived[entry.index] for entry in missing if entry.index in arrived}
        files = [
            entry for entry in entries if entry.kind == ItemKind.FILE and entry.local not in home
        ]
        changing = [entry for entry in files if _key(entry) not in hashed]
        if not changing:
            break
        is_new = False
        sender.close()
    if changing and not source.still_changing:
        raise _restless(changing, folder)
    hashes = {entry.local: hashed[_key(entry)] for entry in files if _key(entry) in hashed}
    parents = {entry.local.rpartition(b"/")[0] for entry in entries}
    folders = tuple(
        e.local for e in entries if e.kind == ItemKind.FOLDER and e.local not in parents
    )
    if not is_new:
        _remove_leftovers(os.fsencode(tree), {*hashes, *folders})
    skipped += [_left_file(entry, "it changed while it was read") for entry in changing]
    sizes = {entry.local: entry.size for entry in files if entry.local in hashes}
    return RunManifest(
        sizes | {name: size for name, (size, _) in home.items()},
        hashes | {name: sha256 for name, (_, sha256) in home.items()},
        _skipped_records(skipped),
        folders,
        links,
    )


def _take_changed(entries: Iterable[IncomingEntry]) -> set[int]:
    """Return the indices of the files that are marked as changed, and remove the mark, which stands in
    place of a hash.
    """
    changed = set()
    for entry in entries:
        if entry.kind == ItemKind.FILE and entry.payload == CHANGED:
            entry.payload = ""
            changed.add(entry.index)
    return changed


def _restless(files: Sequence[IncomingEntry], folder: str) -> CollectError:
    return CollectError(
        f"{counted(len(files), 'file')} kept changing while being copied, such as "
        f"{shown_path(files[0].path)}",
        about="changing",
        where=f"{folder} on the cluster",
        why="a process still writes to the job's folder although the job has ended",
        fix="end that process (`clusterctl ssh`), then collect again; files that have arrived "
        "are kept",
    )


def _key(entry: IncomingEntry) -> _Key:
    return entry.path, entry.local, entry.size


def _skipped_records(skipped: Sequence[_Left]) -> tuple[SkippedFile, ...]:
    """Return a record for each of the largest skipped files, and a single record for all smaller
    files.
    """
    if len(skipped) > _MOST_SKIPPED:
        skipped = sorted(skipped, key=lambda row: (-row.size, -row.files))
    named = [row.record() for row in skipped[:_MOST_SKIPPED]]
    if unnamed := [row for row in skipped[_MOST_SKIPPED:] if row.reason != UNCHANGED]:
        size = sum(row.size for row in unnamed)
        files = sum(row.files for row in unnamed)
        reason = f"{len(unnamed):,} more, which are not listed"
        down = max((row.down for row in unnamed), key=strictness)
        named.append(SkippedFile(path=".", reason=reason, bytes=size, files=files, down=down))
    return tuple(named)


def _remove_leftovers(tree: bytes, keep: set[bytes]) -> None:
    """Remove all files and empty folders below ``tree`` that are not in ``keep``."""
    for folder, subfolders, names in os.walk(tree, topdown=False):
        below = (folder + b"/")[len(tree) + 1 :]
        for name in names:
            if below + name not in keep:
                os.unlink(os.path.join(folder, name))
        for name in subfolders:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                os.unlink(path)
            elif below + name not in keep and not os.listdir(path):
                os.rmdir(path)


def fetch_from_hosts(
    hosts: Sequence[tuple[str, RemoteSender]], source: RunSource, work: Path
) -> RunManifest:
    """Copy the job's folder from all hosts and merge the copies into ``work/tree``.

    If two hosts have different files of the same name, the first host's file keeps the path, and
    the other file goes to ``nodes/HOST/``. Raises the errors of ``fetch_tree``.
    """
    tree = work / "tree"
    nodes = work / "nodes"
    if len(hosts) == 1:
        return fetch_tree(hosts[0][1], source, tree)
    by_name = dict(hosts)
    # A file that is here already may be another host's file of that name, so all files are fetched.
    whole_source = replace(source, home={})
    manifests, failed = call_on_hosts(
        by_name, lambda name: fetch_tree(by_name[name], whole_source, nodes / name)
    )
    # All threads have ended, so nothing is written after the folder is unlocked.
    if failed:
        raise next(iter(failed.values()))
    return _merge(manifests, nodes, tree)


def _merge(manifests: Mapping[str, RunManifest], nodes: Path, tree: Path) -> RunManifest:
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    sizes: dict[bytes, int] = {}
    hashes: dict[bytes, str] = {}
    skipped: dict[tuple[str, str], SkippedFile] = {}
    for host, manifest in manifests.items():
        for local, size in manifest.files.items():
            if hashes.get(local) == manifest.sha256[local]:
                continue
            target = _free_place(tree, local, host)
            (nodes / host / os.fsdecode(local)).replace(tree / os.fsdecode(target))
            sizes[target] = size
            hashes[target] = manifest.sha256[local]
        for entry in manifest.skipped:
            other = skipped.setdefault((entry.path, entry.reason), entry)
            skipped[entry.path, entry.reason] = max(
                other, entry, key=lambda left: strictness(left.down)
            )
    empty = []
    for folder in sorted(
        {folder for manifest in manifests.values() for folder in manifest.folders}
    ):
        # A file of another host may have the folder's name.
        with suppress(FileExistsError, NotADirectoryError):
            (tree / os.fsdecode(folder)).mkdir(parents=True, exist_ok=True)
            empty.append(folder)
    # As with files, the first host's link keeps the path.
    links = {
        path: to
        for manifest in reversed([*manifests.values()])
        for path, to in manifest.links.items()
    }
    return RunManifest(sizes, hashes, tuple(skipped.values()), tuple(empty), links)


def _free_place(tree: Path, local: bytes, host: str) -> bytes:
    """Return an unused path in ``tree``: ``local`` or nodes/HOST/``local``. Create the parent
    folder.
    """
    for number in count():
        candidate = (
            local if number == 0 else b"/".join([NODES, host.encode() + b"_" * (number - 1), local])
        )
        full_path = tree / os.fsdecode(candidate)
        # A file may have the name of the parent folder.
        with suppress(FileExistsError, NotADirectoryError):
            full_path.parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(full_path):
                return candidate
    raise AssertionError("count never ends")


def choose_entries(
    listing: Sequence[IncomingEntry],
    left_entries: Sequence[IncomingEntry],
    source: RunSource,
    tree: Path,
) -> tuple[list[IncomingEntry], Links, list[_Left]]:
    """Return (the files and folders to copy, the links to make, the files left on the cluster).

    Sets the path and mode that each copied file or folder gets in the run's folder. A folder is
    copied if it is empty or contains a copied file or link.

    listing: files and folders that the remote program can send.
    left_entries: files and folders that it does not send. The ``payload`` of each is the reason.
    """
    selection = source.selection
    skipped = [_left_entry(entry, selection, source.job_id) for entry in left_entries]
    parents = {entry.path.rpartition(b"/")[0] for entry in (*listing, *left_entries)}
    outputs = None if selection.everything else source.outputs
    unwanted = list[IncomingEntry]()
    links = list[IncomingEntry]()
    max_holes = sys.maxsize if selection.everything else _MOST_HOLES
    coming: set[bytes] = set()
    for entry in listing:
        if entry.kind == ItemKind.FOLDER and entry.path in parents:
            continue
        path = path_of_program(entry.path, source.files)
        is_folder = entry.kind == ItemKind.FOLDER
        if (
            outputs
            and path
            and not outputs.take(path, is_folder=is_folder, is_job=not source.files)
        ):
            if entry.kind == ItemKind.FILE and not outputs.has_sent(path, entry.size):
                unwanted.append(entry)
        elif name := refused_name(os.fsdecode(entry.path)):
            reason = f"programs on this machine obey {name}: only the user may collect it"
            skipped.append(_left_file(entry, reason))
        elif entry.kind == ItemKind.LINK:
            links.append(entry)
        elif reason := _skip_reason(entry, max_holes, selection.max_file, source.job_id):
            skipped.append(_left_file(entry, reason))
        else:
            max_holes -= entry.size - entry.space
            add_with_parents(coming, entry.path)
    for path, files in _by_folder(unwanted, coming).items():
        reason = selection.explain(_UNWANTED, 0, source.job_id)
        size = sum(file.size for file in files)
        skipped.append(
            _Left(path, reason, size, len(files), max(map(_down_of, files), key=strictness))
        )
    made = choose_links(
        [e for e in links if not _name_fault(e.path)], coming, source.folder, source.files
    )
    skipped += [
        _Left(e.path, _LINK, 0, 0, "deletes", target_of(e)[:_LONGEST])
        for e in links
        if e.path not in made
    ]
    for link in made:
        add_with_parents(coming, link.rpartition(b"/")[0])
    placed = {*coming, *made}
    place_entries([entry for entry in listing if entry.path in placed], listing, source.files)
    places = {entry.path: entry.local for entry in listing}
    # An untrusted host may list a file without the file's folder.
    made = {places[path]: places[to] for path, to in made.items() if places.get(to)}
    chosen = [entry for entry in listing if entry.path in coming]
    _set_modes(chosen, source.files, tree.stat().st_mode)
    # The folder of an array's task is in the job's folder and in the program's, but once in the
    # run's folder.
    by_local = {entry.local: entry for entry in reversed(chosen) if entry.local}
    return [entry for entry in chosen if by_local.get(entry.local) is entry], made, skipped


def _set_modes(entries: Iterable[IncomingEntry], files: str, mode: int) -> None:
    """Set the modes of files and folders of a run. The program's keep theirs, within the user's
    umask.

    files: the folder of the program's files. mode: that of a new folder of the user.
    """
    for entry in entries:
        is_folder = entry.kind == ItemKind.FOLDER
        if path_of_program(entry.path, files):
            entry.mode |= stat.S_IRWXU if is_folder else stat.S_IRUSR
        else:
            entry.mode = 0o777 if is_folder else 0o666
        entry.mode &= mode & 0o777


def _by_folder(
    unwanted: Iterable[IncomingEntry], coming: Collection[bytes]
) -> dict[bytes, list[IncomingEntry]]:
    # Unwanted files are listed by their topmost folder without a path in ``coming``.
    folders: dict[bytes, list[IncomingEntry]] = {}
    for entry in unwanted:
        path = entry.path
        parent = entry.path.rpartition(b"/")[0]
        while parent and parent not in coming:
            path = parent
            parent = parent.rpartition(b"/")[0]
        folders.setdefault(path, []).append(entry)
    return folders


def _skip_reason(entry: IncomingEntry, max_holes: int, max_file: int, job_id: str) -> str:
    """Return why a file is not copied; "" if it is copied. max_holes: limit for a sparse file's
    holes.
    """
    if fault := _name_fault(entry.path):
        return fault
    if entry.size - entry.space > max_holes:
        size, on_disk, most = map(formatting.size, (entry.size, entry.space, _MOST_HOLES))
        sparse = (
            f"a sparse file of {size}, {on_disk} on disk; a run's files may have {most} of holes "
            "in all"
        )
        return _with_command(sparse, job_id, "--all")
    if entry.size > max_file:
        is_above_default = entry.size > MAX_FILE
        flags = ("--max-file", f"{(entry.size >> 30) + 1}GiB") if is_above_default else ("--all",)
        size = formatting.size(entry.size)
        return _with_command(f"{size}, more than {formatting.size(max_file)}", job_id, *flags)
    return ""


def _name_fault(path: bytes) -> str:
    if PARTIAL.fullmatch(path.rpartition(b"/")[2]):
        return "the name is reserved for files in transfer"
    return f"its path is longer than {_LONGEST:,} bytes" if len(path) > _LONGEST else ""


def shown_path(path: bytes) -> str:
    """Return a path as printable text for terminals and JSON."""
    return printable(path.decode(errors="surrogateescape"))
