"""Find files that exist only on the cluster, and copy them to this machine.

The search covers the shared folder and the hosts' own disks (remote_copies.py). It leaves out files
that were sent from this machine or already copied to it (copies.py).
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from clusterctl.errors import (
    CollectError,
    Failure,
    OnlyCopyError,
    TransportError,
    printable,
)
from clusterctl.runs.fetch import shown_path
from clusterctl.scheduler.base import GOING_ON
from clusterctl.scheduler.ends.remote_logs import ENDS_FILE
from clusterctl.scheduler.session import Session, site_of
from clusterctl.state.inventory import Inventory, inventory_of
from clusterctl.state.ledger import (
    FROM_JOB,
    SENT_FILES,
    JobEntry,
    Ledger,
    note_copied_folder,
)
from clusterctl.state.run_record import RunRecord
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, remote_argv, split_lines
from clusterctl.transport.copies import (
    LocalCopies,
    clock_of,
    encode_digests,
    read_copies,
    record_copies,
    times_of,
)
from clusterctl.transport.get import RemoteSender, writing_into
from clusterctl.transport.remote_copies import digest
from clusterctl.transport.remote_incoming import IncomingEntry
from clusterctl.transport.ssh import Connections
from clusterctl.transport.tree import ItemKind, Progress, with_title
from clusterctl.util import formatting
from clusterctl.util.confine import refused_name
from clusterctl.util.numbers import counted
from clusterctl.util.process import call_on_hosts

_PROGRAM = "clusterctl.transport.remote_copies"
# Maximum number of files in a transfer.
_MOST_FILES = 100_000
# A file that changed while it was read is read again.
_ROUNDS = 3
_MOST_SHOWN = 20
# Lines of an answer that name files or unreadable paths. The host's program prints at most 222.
_MOST_LINES = 1000
_MOST = 1 << 63  # bytes, files or seconds
_MOST_REASONS = 3
# Bytes of holes in sparse files that are too few to mention.
_FEW_HOLES = 1 << 20


@dataclass(frozen=True, slots=True)
class UncopiedFiles:
    """Files below a path that exist only on ``host``, or only in the shared folder (then ``host``
    is "").

    what: the path or job, for messages. why: the reason why the files were not collected. bytes:
    the size as `ls -l` shows it. on_disk: the size without holes of sparse files. age_s: the age of
    the newest file.
    top: the home folder or disk that is copied as a whole. job_id: the job that owns the files.
    token: of the submission of this job. changed_ns: the newest ctime of the files by the host's
    clock, in nanoseconds.
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
    token: str = ""
    changed_ns: int = 0

    def __str__(self) -> str:
        files = counted(self.files, "file")
        location = f" on {self.host}" if self.host else ""
        reason = f"; {self.why}" if self.why else ""
        size = formatting.size(self.bytes)
        if self.on_disk is not None and self.bytes - self.on_disk > max(self.on_disk, _FEW_HOLES):
            size += f" ({formatting.size(self.on_disk)} on disk)"
        age = formatting.about(self.age_s)
        return f"{self.what}{location}: {size} in {files} of {self.owner}, {age} old{reason}"

    def as_dict(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("what", "host", "owner", "files", "bytes", "age_s")
        }


@dataclass(frozen=True, slots=True)
class OnlyCopies:
    """Data that exists only on the cluster: pending and running jobs, uncollected runs, and files.

    ``unknown`` has a line for each host or path that could not be checked.
    job_ids: the ids of ``jobs``, without those of tasks.
    has_jobs_of_others: whether one of the jobs belongs to another user than the cluster's job user.
    """

    jobs: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    files: tuple[UncopiedFiles, ...] = ()
    unknown: tuple[str, ...] = ()
    job_ids: tuple[str, ...] = ()
    has_jobs_of_others: bool = False

    def __bool__(self) -> bool:
        return bool(self.lines)

    @property
    def lines(self) -> tuple[str, ...]:
        return (*self.jobs, *self.runs, *map(str, self.files), *self.unknown)

    @property
    def shown(self) -> str:
        """A summary in a single line, for the log of `clusterctl up` or `clusterctl down`."""
        size = sum(row.bytes for row in self.files)
        files = sum(row.files for row in self.files)
        total = [f"{formatting.size(size)} in {counted(files, 'file')}"] if files else []
        return "; ".join([*total, *self._first_lines])

    @property
    def _first_lines(self) -> tuple[str, ...]:
        more = len(self.lines) - _MOST_SHOWN
        return (*self.lines[:_MOST_SHOWN], *([f"and {more} more"] if more > 0 else []))

    def error(self, refusal: str, *, fix: str) -> OnlyCopyError:
        """Return the error of a command that refuses (``refusal``) to delete this data, with a list
        of it.
        """
        failures = [
            Failure(OnlyCopyError.code, line, phase="look", about=OnlyCopyError.about)
            for line in self.lines
        ]
        failures[0] = replace(failures[0], fix=fix)
        return OnlyCopyError(
            refusal, why="\n".join(self._first_lines), fix=fix, failures=tuple(failures)
        )


NOTHING = OnlyCopies()


class Search:
    """A search, as the admin user, for files that exist only on the cluster.

    hosts: hosts with disks to search. shared: also search the shared folder. left_out: folders to
    skip. jobs: search only the folders of these jobs, which are the job user's, as that user. On a
    cluster that other people run, the job user searches only clusterctl's folder.
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
        jobs: Sequence[JobEntry] = (),
    ) -> None:
        self.inventory = inventory
        self.site = site_of(inventory)
        self.workspace = workspace
        self.to = to
        self.hosts = hosts
        self.shared = shared
        self.left_out = left_out
        self.jobs = jobs
        # Names that keep `bring` from writing files.
        self.refused: set[str] = set()
        self.entries = [entry for entry in Ledger(workspace.jobs).entries() if entry.remote_dir]
        # Digests of the files that are also on this machine, with the times of the copies. `bring`
        # adds to them.
        self.known = times_of(_copies(workspace, jobs or self.entries))

    def find(self) -> OnlyCopies:
        """Search all hosts in parallel. The result's ``unknown`` lists hosts that do not answer."""
        controller = (self.inventory.controller.name,) if self.shared else ()
        answers, failed = call_on_hosts(dict.fromkeys([*controller, *self.hosts]), self.ask)
        unknown = [
            f"{host} could not be checked: {printable(exc.cause)}" for host, exc in failed.items()
        ]
        unknown += [line for answer in answers.values() for line in answer.unknown]
        files = sorted(
            (row for answer in answers.values() for row in answer.files), key=lambda r: -r.bytes
        )
        return OnlyCopies(files=tuple(files), unknown=tuple(unknown))

    def _request(self, host: str, **more: object) -> list[str]:
        request = {
            "shared": self.inventory.shared,
            "look_at_shared": self.shared and host == self.inventory.controller.name,
            "host": host,
            "local": host in self.hosts,
            "ours": sorted({*SENT_FILES, ENDS_FILE}),
            "left_out": self.left_out,
            "folder": self.site.own_folder,
            "jobs": [entry.remote_dir for entry in self.jobs],
            "root": "/",
            **more,
        }
        as_root = () if self.jobs else self.site.as_root
        return [*as_root, *remote_argv(_PROGRAM, json.dumps(request))]

    def ask(self, host: str) -> OnlyCopies:
        """Search a host. Raises TransportError: it does not answer, or can't be understood."""
        files = []
        unknown = []
        row: dict[str, Any] = {}
        with self.to(host).converse(self._request(host)) as talk:
            talk.send(encode_digests(self.known))
            try:
                for line in split_lines(iter(talk.receive, b""), _not_understood(host)):
                    row = json.loads(line)
                    if "files" in row:
                        files.append(self._files_there(row, host))
                    elif "unread" in row:
                        path = shown_path(base64.b64decode(row["unread"]))
                        unknown.append(
                            f"{path} on {host} can't be read: {printable(str(row['why']))}"
                        )
                    if len(files) + len(unknown) > _MOST_LINES + len(self.jobs):
                        raise _not_understood(host)
            except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as exc:
                raise _not_understood(host) from exc
            talk.finish()
        if "end" not in row:
            raise _not_understood(host)
        return OnlyCopies(files=tuple(files), unknown=tuple(unknown))

    def _files_there(self, row: Mapping[str, Any], host: str) -> UncopiedFiles:
        top, path = (os.fsdecode(base64.b64decode(row[name])) for name in ("top", "path"))
        full = os.path.join(top, path) if path else "more files, which are not listed"
        shared = self.inventory.shared
        host_shown = "" if top == shared or top.startswith(f"{shared}/") else host
        title = printable(full)
        reason = ""
        job_id = None
        token = ""
        for entry in self.entries:
            if full == entry.remote_dir:
                title = f"files of {entry.shown}"
                reason = _why_left(entry)
                job_id = entry.job_id
                token = entry.token
        numbers = [int(row[name]) for name in ("files", "bytes", "age_s", "on_disk", "changed_ns")]
        files, size, age_s, on_disk, changed_ns = numbers
        if "\0" in top + path or not all(0 <= number < _MOST for number in numbers):
            raise ValueError("a path or number is out of range")
        owner = printable(str(row["owner"]))
        return UncopiedFiles(
            title,
            owner,
            files,
            size,
            age_s,
            host_shown,
            top,
            reason,
            job_id,
            on_disk,
            token,
            changed_ns,
        )

    def bring(
        self, only_copies: Sequence[UncopiedFiles], out: Path, *, progress: Progress
    ) -> tuple[Path, ...]:
        """Copy files into folders below ``out``, a folder for each home folder or disk. Return the
        folders.

        Raises:
            TransferError: some files could not be copied. Files that have arrived are kept.
            TransportError: a host can't be reached.
        """
        folders = []
        for host, top in dict.fromkeys((copy.host, copy.top) for copy in only_copies if copy.top):
            source_host = host or self.inventory.controller.name
            at_ns = clock_of(self.to(source_host))
            source = os.fsencode(top)
            argv = self._request(
                source_host, top=base64.b64encode(source).decode(), most=_MOST_FILES
            )
            with (
                writing_into(out),
                closing(RemoteSender(self.to(source_host), argv)) as sender,
                sender.listed(encode_digests(self.known)) as download,
            ):
                entries = self._writable(download.entries)
                if not entries:
                    continue
                for entry in entries:
                    entry.mode |= 0o700 if entry.kind == ItemKind.FOLDER else 0o600
                folder = self._folder_of(host, top, out.absolute(), entries)
                copies = LocalCopies(host, top, str(folder), at_ns=at_ns)
                record_copies(self.workspace, [copies])
                arrived = download.bring(
                    entries, folder, progress=with_title(folder.name, progress)
                )
            folders.append(folder)
            for entry in entries:
                if entry.kind == ItemKind.FILE and entry.index in arrived:
                    path = os.path.join(source, entry.path)
                    number = digest(os.fsencode(host), path, entry.size, entry.mtime_ns)
                    self.known[number] = at_ns
        return tuple(folders)

    def _writable(self, listed: Sequence[IncomingEntry]) -> list[IncomingEntry]:
        """Return the entries that this command may write, with the folders that these are in. Note
        the names of others.
        """
        entries = []
        for entry in listed:
            if name := refused_name(os.fsdecode(entry.path)):
                self.refused.add(name)
            else:
                entries.append(entry)
        has_files = any(entry.kind != ItemKind.FOLDER for entry in entries)
        return entries if has_files else []

    def _folder_of(self, host: str, top: str, out: Path, entries: Sequence[IncomingEntry]) -> Path:
        """Return the local folder of an earlier copy of ``top`` if no file is replaced, else a new
        folder.
        """
        for copies in read_copies(self.workspace):
            folder = Path(copies.directory)
            is_of_top = (copies.host, copies.top, copies.sent, copies.renamed) == (
                host,
                top,
                False,
                "",
            )
            if (
                is_of_top
                and folder.is_dir()
                and not any(_is_taken(folder, entry) for entry in entries)
            ):
                return folder
        shared = self.inventory.shared
        below = top.removeprefix(shared).strip("/") if not host else top.strip("/")
        default = "disk" if host else "shared"
        name = "-".join([host or self.inventory.cluster, *(below or default).split("/")])
        for number in count(1):
            folder = out / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                break
        note_copied_folder(folder)
        return folder


def _is_taken(folder: Path, entry: IncomingEntry) -> bool:
    """Return whether ``folder`` already has the entry's path, unless both are folders."""
    path = os.path.join(os.fsencode(folder), entry.path)
    is_folder = os.path.isdir(path) and not os.path.islink(path)
    return os.path.lexists(path) and not (entry.kind == ItemKind.FOLDER and is_folder)


def search_all(
    inventory: Inventory,
    workspace: Workspace,
    to: Connect,
    *,
    shared: bool,
    left_out: Sequence[str] = (),
) -> Search:
    """Return a search of all that `clusterctl down` deletes: nothing if the hosts are the user's
    machines.
    """
    owned = inventory.traits.adopts_hosts
    hosts = [] if owned else [host.name for host in inventory.hosts]
    return Search(inventory, workspace, to, hosts, shared=shared and not owned, left_out=left_out)


def bring_all(
    workspace: Workspace, out: Path, *, progress: Progress = lambda *_: None
) -> tuple[Path, ...]:
    """Copy all files that exist only on the cluster. Return the local folders with the copies.

    Raises:
        CollectError, TransferError: some files could not be found or copied. Arrived files are
            kept.
        TransportError: a host can't be reached.
    """
    folders: dict[Path, None] = {}
    # The files of a running job change all the time. `collect` copies a snapshot of them.
    running = [
        entry.remote_dir
        for entry in Ledger(workspace.jobs).entries()
        if entry.run_state in GOING_ON
    ]
    with Connections(workspace.ssh_config) as connections:
        left_out = [*filter(None, running)]
        search = search_all(
            inventory_of(workspace), workspace, connections.to, shared=True, left_out=left_out
        )
        only_copies = search.find()
        for _ in range(_ROUNDS + sum(entry.files for entry in only_copies.files) // _MOST_FILES):
            if not only_copies.files:
                break
            folders |= dict.fromkeys(search.bring(only_copies.files, out, progress=progress))
            only_copies = search.find()
    if only_copies:
        raise CollectError(
            "some files that exist only on the cluster could not be collected",
            code="would-lose",
            about="not-collected",
            why="\n".join(only_copies.lines[:_MOST_SHOWN]),
            fix=f"{_obeyed_fix(search.refused)}end the processes that write these files, then "
            f"collect again; if a host does not answer, {search.site.advice.repair}; files that "
            "have arrived are kept",
        )
    return tuple(folders)


def _obeyed_fix(names: Collection[str]) -> str:
    if not names:
        return ""
    return (
        f"programs on this machine obey {', '.join(sorted(names))}: only the user may collect such "
        "files, with `clusterctl collect --all`; "
    )


def _why_left(entry: JobEntry) -> str:
    if not entry.run_dir:
        return "the run is not collected"
    if not Path(entry.run_dir).exists():
        return f"{printable(entry.run_dir)} no longer exists on this machine"
    if entry.run_state in GOING_ON:
        return "the run was collected before the job ended"
    with suppress(CollectError):
        reasons = dict.fromkeys(
            skipped.reason for skipped in RunRecord.load(Path(entry.run_dir)).not_here
        )
        if reasons:
            return ", ".join([*reasons][:_MOST_REASONS])
    return f"different from the files in {printable(entry.run_dir)}"


def _not_understood(host: str) -> TransportError:
    message = f"{host} sent a malformed list of files"
    return TransportError(message, code="internal", about="answer", where=host, host=host)


def _copies(workspace: Workspace, entries: Sequence[JobEntry]) -> Iterator[LocalCopies]:
    """Yield the local folders with copies of the cluster's files: sent or fetched files, and the
    collected runs of these jobs.
    """
    for entry in entries:
        if entry.run_dir and entry.remote_dir:
            renamed = os.fsdecode(FROM_JOB)
            files = entry.files or ""
            yield LocalCopies(
                "",
                entry.remote_dir,
                entry.run_dir,
                renamed=renamed,
                files=files,
                at_ns=entry.compared_ns,
            )
    yield from read_copies(workspace)


def newer_than_runs(session: Session, entries: Sequence[JobEntry]) -> frozenset[str]:
    """Compare collected runs with the folders of their jobs. Return the tokens of the jobs with files
    that have no copy here and were changed after the last comparison.

    entries: jobs of the job user whose runs are here; at least one. Files that the last `collect` did
    not copy do not count, nor do files in folders that the user can't read.

    Raises TransportError: the cluster can't be reached.
    """
    search = Search(
        session.inventory,
        session.workspace,
        lambda _: session.transport,
        (),
        shared=True,
        jobs=entries,
    )
    compared = {entry.token: entry.compared_ns for entry in entries}
    return frozenset(
        row.token
        for row in search.ask(session.inventory.controller.name).files
        if row.token in compared and row.changed_ns > compared[row.token]
    )
