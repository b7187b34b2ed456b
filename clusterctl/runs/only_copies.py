"""Find what exists only on the cluster, and bring it here.

All files on the shared folder and on hosts' own disks count (remote_copies.py), but for those that were sent
from here or are here already (copies.py): so it does not matter how a file came to be there.
"""

from __future__ import annotations

import base64
import json
import os
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from clusterctl.errors import (
    CollectError,
    Failure,
    MachineError,
    OnlyCopyError,
    TransportError,
    printable,
)
from clusterctl.runs.fetch import FROM_JOB, shown_path
from clusterctl.runs.folder import GOING_ON
from clusterctl.state.inventory import Inventory, inventory_of
from clusterctl.state.ledger import RunRecord
from clusterctl.state.submissions import SENT_FILES, UNCHANGED, JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, lines, remote_argv
from clusterctl.transport.copies import Copies, note, read_copies, request_bytes
from clusterctl.transport.get import Sender, writing_into
from clusterctl.transport.remote_copies import digest
from clusterctl.transport.remote_incoming import Entry
from clusterctl.transport.ssh import Connections
from clusterctl.transport.tree import Kind, Progress, shown_size, titled
from clusterctl.util.process import on_each

_PROGRAM = "clusterctl.transport.remote_copies"
# Files of one transfer of a home.
_MOST_FILES = 100_000
# A file that changed while it was read is read again.
_ROUNDS = 3
_MOST_SHOWN = 20
_MOST_REASONS = 3
# Bytes of holes in a sparse file that are not worth a word.
_FEW_HOLES = 1 << 20
_AGES = ((86400, "day"), (3600, "hour"), (60, "minute"))


@dataclass(frozen=True, slots=True)
class FilesThere:
    """Files below one path that exist only on a host, or where all hosts see them (``host`` is "").

    ``what`` names them for people. The youngest was written ``age_s`` seconds ago. ``bytes`` is their size as
    `ls -l` shows it, ``on_disk`` without the holes of sparse files. ``top`` is the folder that is brought
    here as a whole, ``job_id`` the job in whose folder they are.
    """

    what: str
    owner: str
    files: int
    bytes: int
    age_s: int
    host: str = ""
    top: str = ""
    why: str = ""
    job_id: str | None = None
    on_disk: int | None = None

    def __str__(self) -> str:
        files = f"{self.files:,} file{'s' if self.files > 1 else ''}"
        where = f" on {self.host}" if self.host else ""
        why = f"; {self.why}" if self.why else ""
        size = shown_size(self.bytes)
        if self.on_disk is not None and self.bytes - self.on_disk > max(self.on_disk, _FEW_HOLES):
            size += f" ({shown_size(self.on_disk)} on disk)"
        return f"{self.what}{where}: {size} in {files} of {self.owner}, {_age(self.age_s)}{why}"

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("what", "host", "owner", "files", "bytes", "age_s")}


@dataclass(frozen=True, slots=True)
class OnlyCopies:
    """What exists only on the cluster: ``jobs`` that wait or run, ``runs`` not collected, files.

    ``unknown``: what can't be told, and why.
    """

    jobs: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    files: tuple[FilesThere, ...] = ()
    unknown: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lines)

    @property
    def lines(self) -> tuple[str, ...]:
        return (*self.jobs, *self.runs, *map(str, self.files), *self.unknown)

    @property
    def shown(self) -> str:
        """All of it in one line, for the journal."""
        size, files = sum(one.bytes for one in self.files), sum(one.files for one in self.files)
        total = [f"{shown_size(size)} in {files:,} files"] if files else []
        return "; ".join([*total, *self._first_lines])

    @property
    def _first_lines(self) -> tuple[str, ...]:
        more = len(self.lines) - _MOST_SHOWN
        return (*self.lines[:_MOST_SHOWN], *([f"and {more} more"] if more > 0 else []))

    def error(self, what: str, *, fix: str) -> OnlyCopyError:
        """Return the refusal to remove all this, with one failure for each line."""
        failures = [Failure(OnlyCopyError.code, line, phase="look") for line in self.lines]
        failures[:1] = [Failure(OnlyCopyError.code, self.lines[0], phase="look", fix=fix)]
        return OnlyCopyError(what, why="\n".join(self._first_lines), fix=fix, failures=tuple(failures))


NOTHING = OnlyCopies()


def _age(seconds: int) -> str:
    for length, unit in _AGES:
        if seconds >= length:
            number = seconds // length
            return f"{number} {unit}{'s' if number > 1 else ''} old"
    return "just written"


class Search:
    """Looks for files on the shared folder, or not, and on the own disks of ``hosts``, as the admin user.

    left_out: folders that are passed over.
    """

    def __init__(
        self,
        inventory: Inventory,
        workspace: Workspace,
        to: Connect,
        hosts: Collection[str],
        *,
        shared: bool,
        left_out: Sequence[str] = (),
    ) -> None:
        self.inventory, self.workspace, self.to = inventory, workspace, to
        self.hosts, self.shared, self.left_out = hosts, shared, left_out
        self.entries = [entry for entry in Ledger(workspace.jobs).entries() if entry.remote_dir]
        # The digests of the files that are here, too; ``bring`` adds to them.
        self.known = array("Q", (number for one in _copies(workspace) for number in one.numbers()))

    def find(self) -> OnlyCopies:
        """Look at all hosts at once. A host that does not answer is in ``unknown`` of the result."""
        controller = (self.inventory.controller.name,) if self.shared else ()
        answers, failed = on_each(dict.fromkeys([*controller, *self.hosts]), self._ask)
        unknown = [f"what is on {host} can't be told: {printable(exc.cause)}" for host, exc in failed.items()]
        unknown += [line for found in answers.values() for line in found.unknown]
        files = sorted((one for found in answers.values() for one in found.files), key=lambda one: -one.bytes)
        return OnlyCopies(files=tuple(files), unknown=tuple(unknown))

    def _request(self, host: str, **more: object) -> list[str]:
        request = {
            "shared": self.inventory.shared,
            "look_at_shared": self.shared and host == self.inventory.controller.name,
            "host": host,
            "local": host in self.hosts,
            "ours": sorted(SENT_FILES),
            "left_out": self.left_out,
            **more,
        }
        return ["sudo", "-n", *remote_argv(_PROGRAM, json.dumps(request))]

    def _ask(self, host: str) -> OnlyCopies:
        files, unknown = [], []
        row: dict[str, Any] = {}
        with self.to(host).converse(self._request(host)) as talk:
            talk.send(request_bytes(self.known))
            try:
                for line in lines(iter(talk.receive, b""), _not_understood(host)):
                    row = json.loads(line)
                    if "files" in row:
                        files.append(self._files_there(row, host))
                    elif "unread" in row:
                        path = shown_path(base64.b64decode(row["unread"]))
                        unknown.append(f"{path} on {host} can't be looked at: {printable(str(row['why']))}")
            except (ValueError, TypeError, LookupError, RecursionError) as exc:
                raise _not_understood(host) from exc
            talk.finish()
        if "end" not in row:
            raise _not_understood(host)
        return OnlyCopies(files=tuple(files), unknown=tuple(unknown))

    def _files_there(self, row: Mapping[str, Any], host: str) -> FilesThere:
        top, path = (os.fsdecode(base64.b64decode(row[name])) for name in ("top", "path"))
        full = f"{top}/{path}" if path else "others, which are not named"
        shared = self.inventory.shared
        where = "" if top == shared or top.startswith(f"{shared}/") else host
        what, why, job_id = printable(full), "", None
        for entry in self.entries:
            if full == entry.remote_dir:
                what, why, job_id = f"files of {entry.shown}", _why_left(entry), entry.job_id
        files, size, age_s, on_disk = (int(row[name]) for name in ("files", "bytes", "age_s", "on_disk"))
        owner = printable(str(row["owner"]))
        return FilesThere(what, owner, files, size, age_s, where, top, why, job_id, on_disk)

    def bring(self, found: Sequence[FilesThere], out: Path, *, progress: Progress) -> tuple[Path, ...]:
        """Bring what was found into folders of ``out``, one for each home or disk; returns these.

        Raises:
            TransferError: some could not be brought; what has arrived is kept.
            TransportError: a host can't be reached.
        """
        folders = []
        for host, top in dict.fromkeys((one.host, one.top) for one in found if one.top):
            at, place = host or self.inventory.controller.name, os.fsencode(top)
            argv = self._request(at, top=base64.b64encode(place).decode(), most=_MOST_FILES)
            with (
                writing_into(out),
                closing(Sender(self.to(at), argv)) as sender,
                sender.listed(request_bytes(self.known)) as download,
            ):
                if not download.entries:
                    continue
                for entry in download.entries:
                    entry.mode |= 0o700 if entry.kind == Kind.FOLDER else 0o600
                folder = self._folder_of(host, top, out.absolute(), download.entries)
                arrived = download.bring(download.entries, folder, progress=titled(folder.name, progress))
            folders.append(folder)
            self.known.extend(
                digest(os.fsencode(host), place + b"/" + entry.path, entry.size, entry.mtime_ns)
                for entry in download.entries
                if entry.kind == Kind.FILE and entry.index in arrived
            )
        return tuple(folders)

    def _folder_of(self, host: str, top: str, out: Path, entries: Sequence[Entry]) -> Path:
        """Where files of a top go: where earlier ones went, unless one would take the place of another."""
        for one in read_copies(self.workspace):
            folder = Path(one.directory)
            is_of_top = (one.host, one.top, one.sent, one.renamed) == (host, top, False, "")
            if is_of_top and folder.is_dir() and not any(_is_taken(folder, entry) for entry in entries):
                return folder
        shared = self.inventory.shared
        below = top.removeprefix(shared).strip("/") if not host else top.strip("/")
        name = "-".join([host or self.inventory.cluster, *(below or "shared").split("/")])
        for number in count(1):
            folder = out / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                break
        note(self.workspace, [Copies(host, top, str(folder))])
        return folder


def _is_taken(folder: Path, entry: Entry) -> bool:
    """Return whether anything but a folder for a folder is in the place of an entry."""
    path = os.path.join(os.fsencode(folder), entry.path)  # noqa: PTH118 - names are bytes
    is_folder = os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114
    return os.path.lexists(path) and not (entry.kind == Kind.FOLDER and is_folder)


def search_all(
    inventory: Inventory,
    workspace: Workspace,
    to: Connect,
    *,
    shared: bool,
    left_out: Sequence[str] = (),
) -> Search:
    """Search where `down` destroys files: not on machines of the user's own."""
    owned = inventory.traits.user_owned
    hosts = [] if owned else [host.name for host in inventory.hosts]
    return Search(inventory, workspace, to, hosts, shared=shared and not owned, left_out=left_out)


def bring_all(workspace: Workspace, out: Path, *, progress: Progress = lambda *_: None) -> tuple[Path, ...]:
    """Bring all files here that stop `down`, and those on storage that it keeps.

    Returns the folders that they are in now, below ``out``.

    Raises:
        CollectError, TransferError: some could not be brought, or looked for; what has arrived is kept.
        TransportError: a host can't be reached.
    """
    folders: dict[Path, None] = {}
    # What a running job writes changes all the time; it is collected as it stands.
    running = [one.remote_dir for one in Ledger(workspace.jobs).entries() if one.run_state in GOING_ON]
    with Connections(workspace.ssh_config) as connections:
        left_out = [*filter(None, running)]
        search = search_all(
            inventory_of(workspace), workspace, connections.to, shared=True, left_out=left_out
        )
        found = search.find()
        for _ in range(_ROUNDS + sum(one.files for one in found.files) // _MOST_FILES):
            if not found.files:
                break
            folders |= dict.fromkeys(search.bring(found.files, out, progress=progress))
            found = search.find()
    if found:
        raise CollectError(
            "not all that exists only on the cluster could be brought home",
            code="only-copies-not-collected",
            why="\n".join(found.lines[:_MOST_SHOWN]),
            fix="end what writes there, have all hosts answer (`clusterctl up` repairs the cluster), then "
            "collect again; what has arrived is kept",
        )
    return tuple(folders)


def _why_left(entry: JobEntry) -> str:
    """Return why files of a job's folder are not here."""
    if not entry.run_dir:
        return "the run is not collected"
    if not Path(entry.run_dir).exists():
        return f"{printable(entry.run_dir)} is not here any more"
    if entry.run_state in GOING_ON:
        return "the run was collected before the job ended"
    with suppress(CollectError):
        skipped = RunRecord.load(Path(entry.run_dir)).skipped
        reasons = dict.fromkeys(one.reason for one in skipped if one.reason != UNCHANGED)
        if reasons:
            return ", ".join([*reasons][:_MOST_REASONS])
    return f"not the same as in {printable(entry.run_dir)}"


def _not_understood(host: str) -> TransportError:
    return TransportError("its list of files makes no sense", code="answer-garbled", where=host, host=host)


def _copies(workspace: Workspace) -> Iterator[Copies]:
    """Where files of the cluster are here: what was sent, runs, and what was brought otherwise."""
    for entry in Ledger(workspace.jobs).entries():
        if entry.run_dir and entry.remote_dir:
            yield Copies("", entry.remote_dir, entry.run_dir, renamed=os.fsdecode(FROM_JOB))
    yield from read_copies(workspace)


def note_copies(workspace: Workspace) -> None:
    """Note where the runs are: they lie on kept storage, too, and the workspace, which knows, is removed."""
    there = {*read_copies(workspace)}
    with suppress(MachineError):  # a full disk: then the next `down` takes what is there for the only copies
        note(workspace, (one for one in _copies(workspace) if one not in there))
