"""Find what exists only on the cluster, and bring it here.

It is looked for among all files on the shared folder and on hosts' own disks (remote_copies.py), without what
was sent from here and what is here already (copies.py): so it does not matter how a file came to be there.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from clusterctl.errors import (
    CollectError,
    Failure,
    MachineError,
    OnlyCopyError,
    TransferError,
    TransportError,
    printable,
)
from clusterctl.runs.collect import GOING_ON
from clusterctl.runs.fetch import FROM_JOB, shown_path
from clusterctl.state.inventory import Inventory, inventory_of, keeps_storage
from clusterctl.state.ledger import RunRecord
from clusterctl.state.submissions import SENT_FILES, UNCHANGED, JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, lines, remote_argv
from clusterctl.transport.connections import Connections
from clusterctl.transport.copies import Copies, note, read_copies, request_bytes
from clusterctl.transport.get import Sender
from clusterctl.transport.remote_content import Entry
from clusterctl.transport.remote_copies import digest
from clusterctl.transport.tree import Kind, Progress, shown_size, titled
from clusterctl.util.disk import reason
from clusterctl.util.process import on_each

_PROGRAM = "clusterctl.transport.remote_copies"
_MOST_FILES = 100_000  # files of one transfer
_ROUNDS = 3  # a file that changed while it was read is read again
_MOST_SHOWN = 20
_FEW_HOLES = 1 << 20  # bytes, which are not worth a word
_AGES = ((86400, "day"), (3600, "hour"), (60, "minute"))


@dataclass(frozen=True, slots=True)
class OnlyCopy:
    """Files below one path that exist only on a host, or where all hosts see them (``host`` is "").

    ``what`` they are for people; the youngest was written ``age_s`` seconds ago. ``bytes`` is their size as
    `ls -l` shows it, ``on_disk`` what they take there: less, if they have holes. ``top`` is the folder that
    is brought here as a whole.
    """

    what: str
    owner: str
    files: int
    bytes: int
    age_s: int
    host: str = ""
    top: str = ""
    why: str = ""
    job_id: str | None = None  # whose folder they are in
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
class Found:
    """What exists only on the cluster: files, ``runs`` not collected, ``jobs`` that wait or run.

    ``unknown`` is what can't be told, and why.
    """

    files: tuple[OnlyCopy, ...] = ()
    jobs: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
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
        return "; ".join([*total, *self.lines[:_MOST_SHOWN]])

    def error(self, what: str, *, fix: str) -> OnlyCopyError:
        """The refusal to remove it; of its failures the first has the ``fix``, which is that of all."""
        more = len(self.lines) - _MOST_SHOWN
        shown = [*self.lines[:_MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        return OnlyCopyError(
            what,
            why="\n".join(shown),
            fix=fix,
            failures=tuple(
                Failure(OnlyCopyError.code, line, phase="look", fix="" if number else fix)
                for number, line in enumerate(self.lines)
            ),
        )


NOTHING = Found()


def _age(seconds: int) -> str:
    for length, unit in _AGES:
        if seconds >= length:
            number = seconds // length
            return f"{number} {unit}{'s' if number > 1 else ''} old"
    return "just written"


@dataclass(frozen=True, slots=True)
class Search:
    """Where to look: at the shared folder or not, and at these hosts' own disks, as the admin user."""

    inventory: Inventory
    workspace: Workspace
    to: Connect
    hosts: Collection[str]
    shared: bool
    left_out: tuple[str, ...] = ()  # folders that are not looked at
    copies: tuple[Copies, ...] = field(init=False)
    known: array[int] = field(init=False)  # the numbers of all these files
    arrived: set[int] = field(init=False, default_factory=set)  # of these, what has come by now

    def __post_init__(self) -> None:
        object.__setattr__(self, "copies", tuple(_copies(self.workspace)))
        numbers = (number for one in self.copies for number in one.numbers())
        object.__setattr__(self, "known", array("Q", numbers))

    @classmethod
    def of_all(
        cls,
        inventory: Inventory,
        workspace: Workspace,
        to: Connect,
        *,
        kept_too: bool = False,
        left_out: tuple[str, ...] = (),
    ) -> Search:
        """Where `down` destroys files: not on machines of the user's own, nor on storage that is kept.

        ``kept_too``: both are removed as well.
        """
        owned = inventory.traits.user_owned
        kept = keeps_storage(workspace)
        hosts = () if owned else [host.name for host in inventory.hosts]
        return cls(inventory, workspace, to, hosts, kept_too or not (kept or owned), left_out)

    def find(self) -> Found:
        """Look at all hosts at once. One that does not answer is in ``unknown`` of what is returned."""
        controller = (self.inventory.controller.name,) if self.shared else ()
        entries = {one.remote_dir: one for one in Ledger(self.workspace.jobs).entries() if one.remote_dir}
        hosts = dict.fromkeys([*controller, *self.hosts])
        answers, failed = on_each(hosts, lambda host: self._ask(host, entries))
        files = _one_for_each_reason(one for found in answers.values() for one in found.files)
        unknown = [f"what is on {host} can't be told: {printable(exc.cause)}" for host, exc in failed.items()]
        unknown += [line for found in answers.values() for line in found.unknown]
        return Found(tuple(sorted(files, key=lambda one: -one.bytes)), unknown=tuple(unknown))

    def _request(self, host: str, **more: object) -> list[str]:
        shared = self.shared and host == self.inventory.controller.name
        asked = {
            "shared": self.inventory.shared,
            "look_at_shared": shared,
            "host": host,
            "local": host in self.hosts,
            "ours": sorted(SENT_FILES),
            "left_out": self.left_out,
            **more,
        }
        return ["sudo", "-n", *remote_argv(_PROGRAM, json.dumps(asked))]

    def _ask(self, host: str, entries: Mapping[str, JobEntry]) -> Found:
        files, unknown = [], []
        row: dict[str, Any] = {}
        with self.to(host).converse(self._request(host)) as talk:
            talk.send(request_bytes(self.known))
            try:
                for line in lines(iter(talk.receive, b""), _not_understood(host)):
                    row = json.loads(line)
                    if "files" in row:
                        files.append(self._only_copy(row, host, entries))
                    elif "unread" in row:
                        path = shown_path(base64.b64decode(row["unread"]))
                        unknown.append(f"{path} on {host} can't be looked at: {printable(str(row['why']))}")
            except (ValueError, TypeError, LookupError, RecursionError) as exc:
                raise _not_understood(host) from exc
            talk.finish()
        if "end" not in row:
            raise _not_understood(host)
        return Found(tuple(files), unknown=tuple(unknown))

    def _only_copy(self, row: Mapping[str, Any], host: str, entries: Mapping[str, JobEntry]) -> OnlyCopy:
        top, path = (os.fsdecode(base64.b64decode(row[name])) for name in ("top", "path"))
        full = f"{top}/{path}" if path else "others, which are not named"
        shared = self.inventory.shared
        where = "" if top == shared or top.startswith(f"{shared}/") else host
        what, why, job_id = printable(full), "", None
        for remote_dir, entry in entries.items():
            if full.startswith(f"{remote_dir}/"):
                inside = full.removeprefix(f"{remote_dir}/")
                what, why = f"{printable(inside)} of {entry.shown}", _why_left(entry, inside)
                job_id = entry.job_id
        copies = sorted(
            (one for one in self.copies if path and (one.sent or one.host == where)),
            key=lambda one: not one.sent,  # what was sent does not come back, unless it was changed there
        )
        why = why or printable(next(filter(None, (one.why_not(full) for one in copies)), ""))
        files, size, age_s, on_disk = (int(row[name]) for name in ("files", "bytes", "age_s", "on_disk"))
        owner = printable(str(row["owner"]))
        return OnlyCopy(what, owner, files, size, age_s, where, top, why, job_id, on_disk)

    def bring(self, found: Sequence[OnlyCopy], out: Path, *, progress: Progress) -> tuple[Path, ...]:
        """Bring all that was found into folders of ``out``, one for each home; returns these.

        Raises:
            CollectError: some could not be brought; what has arrived is kept.
            TransportError: a host can't be reached.
        """
        folders: dict[Path, None] = {}
        try:
            for host, top in dict.fromkeys((one.host, one.top) for one in found if one.top):
                folders |= dict.fromkeys(self._bring_top(host, top, out.absolute(), progress))
        except TransferError as exc:
            raise CollectError(exc.what, code=exc.code, where=exc.where, why=exc.why, fix=exc.fix) from exc
        except OSError as exc:
            where = printable(os.fsdecode(exc.filename or str(out)))
            fix = "make room and rights there, or name another folder with --out"
            what = "files of the cluster can't be written here"
            raise CollectError(
                what, code="copies-unwritable", where=where, why=reason(exc, out), fix=fix
            ) from exc
        return tuple(folders)

    def _bring_top(self, host: str, top: str, out: Path, progress: Progress) -> Iterator[Path]:
        at, place = host or self.inventory.controller.name, os.fsencode(top)
        argv = self._request(at, top=base64.b64encode(place).decode(), most=_MOST_FILES)
        files: list[Entry] | None = None
        while files is None or len(files) == _MOST_FILES:
            request = request_bytes(self.known)
            with closing(Sender(self.to(at), argv)) as sender, sender.listed(request) as download:
                if not download.entries:
                    return
                for entry in download.entries:
                    entry.mode |= 0o700 if entry.kind == Kind.FOLDER else 0o600
                folder = self._folder_of(host, top, out, download.entries)
                yield folder
                arrived = download.bring(download.entries, folder, progress=titled(folder.name, progress))
            files = [entry for entry in download.entries if entry.kind == Kind.FILE]
            come = [
                digest(os.fsencode(host), place + b"/" + one.path, one.size, one.mtime_ns)
                for one in files
                if one.index in arrived
            ]
            self.known.extend(come)
            self.arrived.update(come)
            if not arrived:
                return

    def _folder_of(self, host: str, top: str, out: Path, entries: Sequence[Entry]) -> Path:
        """Where files of a top go: where others went before, unless what is there by now is in the way."""
        for one in read_copies(self.workspace):
            folder = Path(one.directory)
            if (one.host, one.top, one.sent, one.renamed) != (host, top, False, "") or not folder.is_dir():
                continue
            if not self._overwrites(folder, host, top, entries):
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

    def _overwrites(self, folder: Path, host: str, top: str, entries: Sequence[Entry]) -> bool:
        """Whether one would take the place of anything but a file that has come just now."""
        for entry in entries:
            path = os.path.join(os.fsencode(folder), entry.path)  # noqa: PTH118  # names are bytes
            with suppress(FileNotFoundError, NotADirectoryError):
                status = os.lstat(path)
                if entry.kind == Kind.FOLDER and stat.S_ISDIR(status.st_mode):
                    continue
                full = os.fsencode(f"{top}/") + entry.path
                if digest(os.fsencode(host), full, status.st_size, status.st_mtime_ns) not in self.arrived:
                    return True
        return False


def bring_all(workspace: Workspace, out: Path, *, progress: Progress = lambda *_: None) -> tuple[Path, ...]:
    """Bring all files here that `down` is stopped by, and `down --storage` but on machines of the user's own.

    Returns the folders that they are in now, below ``out``.

    Raises:
        CollectError: some could not be brought, or looked for; what has arrived is kept.
        TransportError: a host can't be reached.
    """
    folders: dict[Path, None] = {}
    with Connections(workspace.ssh_config) as connections:
        inventory = inventory_of(workspace)
        # What a job at work writes changes all the time; it is collected as it stands.
        at_work = [one.remote_dir for one in Ledger(workspace.jobs).entries() if one.run_state in GOING_ON]
        search = Search.of_all(
            inventory,
            workspace,
            connections.to,
            kept_too=not inventory.traits.user_owned,
            left_out=tuple(filter(None, at_work)),
        )
        found = search.find()
        for _ in range(_ROUNDS):
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


def _one_for_each_reason(files: Iterable[OnlyCopy]) -> list[OnlyCopy]:
    """All that is of one job, for one reason, as one."""
    alike: dict[object, list[OnlyCopy]] = {}
    for number, one in enumerate(files):
        of_job = one.job_id is not None and one.why
        alike.setdefault((one.host, one.top, one.job_id, one.why) if of_job else number, []).append(one)
    found = []
    for first, *more in alike.values():
        path, _, job = first.what.rpartition(" of job ")
        every = (first, *more)
        found.append(
            replace(
                first,
                what=f"{path} and {len(more)} more of job {job}" if more else first.what,
                owner=first.owner if len({one.owner for one in every}) == 1 else "several users",
                files=sum(one.files for one in every),
                bytes=sum(one.bytes for one in every),
                on_disk=sum(one.bytes if one.on_disk is None else one.on_disk for one in every),
                age_s=min(one.age_s for one in every),
            )
        )
    return found


def found_on_storage(rows: Iterable[Mapping[str, Any]]) -> Found:
    """What remote_copies.py has told of kept storage."""
    files, unknown = [], []
    for row in rows:
        if "files" in row:
            top, path = (os.fsdecode(base64.b64decode(row[name])) for name in ("top", "path"))
            what = printable(f"{top}/{path}" if path else "others, which are not named")
            of_row = {name: row[name] for name in ("owner", "files", "bytes", "age_s", "on_disk")}
            files.append(OnlyCopy(what, **of_row, top=top))
        elif "unread" in row:
            unknown.append(f"{shown_path(base64.b64decode(row['unread']))} can't be looked at: {row['why']}")
    return Found(tuple(files), unknown=tuple(unknown))


def _why_left(entry: JobEntry, path: str) -> str:
    """Why `collect` has left this path of a job's folder on the cluster, if it has."""
    if not entry.run_dir:
        return "the run is not collected"
    with suppress(CollectError):
        for one in RunRecord.load(Path(entry.run_dir)).skipped:
            is_it = one.path == printable(path) or one.path.startswith(printable(f"{path}/"))
            if is_it and one.reason != UNCHANGED:
                return one.reason
    return "the run was collected before the job ended" if entry.run_state in GOING_ON else ""


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
