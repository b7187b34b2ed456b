"""Upload of files to the cluster. Files that the cluster has are skipped; interrupted uploads are
resumed.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, cast

from clusterctl.errors import CommandError, TransferError, TransportError, printable
from clusterctl.spec.names import first_few
from clusterctl.spec.remote_folders import STORE
from clusterctl.transport.base import (
    ENDED_BY_SIGNAL,
    PYTHON_GONE,
    Conversation,
    Transport,
    remote_argv,
)
from clusterctl.transport.remote_content import (
    ALIVE_LINE,
    HEADER,
    SAME,
    line_of,
    parse_request,
    send_file,
)
from clusterctl.transport.remote_incoming import Incoming, TruncatedError, UnexpectedError
from clusterctl.transport.remote_open import HELD
from clusterctl.transport.tree import (
    Item,
    ItemKind,
    Progress,
    ReceivedStream,
    hash_items,
    unreadable_error,
)
from clusterctl.util.assets import tree_files
from clusterctl.util.confine import reject_opened

_PROGRAM = "clusterctl.transport.remote_receive"
_PIECE = 1 << 18  # bytes
# A shell's exit status for a program that signal N has ended is this number and N.
_SIGNALLED = 128


@dataclass(frozen=True, slots=True)
class UploadResult:
    """Result of an upload to ``folder`` on the cluster. bytes: size of all files. sent_bytes: bytes
    sent.

    at: paths of the files in the cluster's file store; () if the files were sent to another folder.
    grown: paths of files that were growing. They were sent as they were when they were listed.
    """

    folder: str
    files: int
    bytes: int
    sent_bytes: int
    at: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload of files to a host. progress: called with the activity and the number of bytes."""

    transport: Transport
    progress: Progress = lambda *_: None

    def into(self, items: Sequence[Item], folder: str) -> UploadResult:
        """Upload items into a folder of the cluster. Create the folder if it is missing.

        A relative ``folder`` starts at the user's home. Other files in the folder stay. After an
        error, complete files stay on the cluster.

        Raises:
            UsageError: a local file can't be read.
            TransferError: a local file changed, or a file can't be written on the cluster.
            TransportError: the cluster can't be reached.
        """
        return self._converse(remote_argv(_PROGRAM, "", folder), items, None)

    def new_folder(
        self,
        items: Sequence[Item],
        hashes: Mapping[Path, str],
        folder: str,
        *,
        store: str,
        ours: Mapping[str, bytes],
    ) -> UploadResult:
        """Create a folder on the cluster from ``items`` and from generated files, ``ours`` (name ->
        content).

        Files are uploaded to the file store ``store`` and copied to the folder, which appears when
        complete. An item of kind ARCHIVE only goes to the store. hashes: local path of each file ->
        sha256.
        """
        return self._converse(_receiver(store, folder), items, hashes, ours)

    def to_store(self, files: Sequence[Path], *, store: str) -> Mapping[Path, str]:
        """Upload files into the cluster's file store only. Return a mapping: local path -> remote
        path.

        A stored file is read-only, named by its hash, and never uploaded again. The store removes
        files that were unused for 30 days, so call this before each use.
        """
        items = []
        for number, path in enumerate(files):
            try:
                item = Item.of(str(number), path, path.stat())
            except OSError as exc:
                raise unreadable_error([exc]) from exc
            if item is None or item.kind is not ItemKind.FILE:
                raise unreadable_error([OSError(0, "not a regular file", str(path))])
            items.append(item)
        hashes = hash_items(items, progress=self.progress)
        sent = self._converse(remote_argv(_PROGRAM, store, ""), items, hashes)
        if len(sent.at) != len(files):
            raise _not_understood(json.dumps(sent.at).encode(), self.transport.host)
        return dict(zip(files, sent.at, strict=True))

    def _converse(
        self,
        argv: Sequence[str],
        items: Sequence[Item],
        hashes: Mapping[Path, str] | None,
        ours: Mapping[str, bytes] = MappingProxyType({}),
    ) -> UploadResult:
        """Run ``argv`` on the cluster, and send it the list of items and the files that it then
        requests.

        hashes: local path -> sha256. If None, the list has no hashes.
        """
        host = self.transport.host
        try:
            with self.transport.converse(argv) as talk:
                answers = _answers(talk)
                outgoing = _Outgoing(talk, self.progress)
                for line in _listing(items, hashes, ours):
                    outgoing.write(line)
                outgoing.flush()
                requests = _read_requests(items, answers, host)
                replaceable = [request.item for request in requests if request.sha256]
                local_hashes = (
                    hash_items(replaceable, progress=self.progress) if replaceable else {}
                )
                # The hash of a job's file is that of the listed bytes.
                beginnings = hashes is not None
                total = _send_requested(outgoing, requests, local_hashes, beginnings=beginnings)
                sent = _result(items, next(answers, b""), total, host)
                talk.finish()
                return replace(sent, grown=tuple(outgoing.grown))
        except CommandError as exc:
            if exc.about == PYTHON_GONE:
                raise
            raise _write_error(host, exc) from exc
        except (TruncatedError, UnexpectedError):
            raise _not_understood(b"the transfer ended without an answer", host) from None


def begin_new_folder(transport: Transport, folder: str, *, store: str) -> None:
    """Start the receiving program early, so that ``Upload.new_folder`` need not wait for it."""
    transport.begin(_receiver(store, folder))


def _receiver(store: str, folder: str) -> list[str]:
    return remote_argv(_PROGRAM, store, folder)


def store_of(folder: str) -> str:
    """Return the path of the file store in the folder with a job user's files."""
    return f"{folder}/{STORE}"


def archives_of(folder: str) -> str:
    """Return the path of the file store's archives in the folder with a job user's files."""
    return f"{store_of(folder)}/archives"


@dataclass(frozen=True, slots=True)
class _Request:
    """A file that the cluster requests. have: bytes that the cluster has. sha256: of its file, or
    "".
    """

    item: Item
    have: int
    sha256: str


def _answers(talk: Conversation) -> Iterator[bytes]:
    incoming = Incoming(ReceivedStream(talk))
    while True:
        if (line := incoming.line()) != ALIVE_LINE:
            yield line


def _read_requests(items: Sequence[Item], answers: Iterator[bytes], host: str) -> list[_Request]:
    requests = []
    for line in iter(answers.__next__, b""):
        try:
            index, have, size, sha256 = parse_request(line)
            item = items[index]
        except (ValueError, IndexError) as exc:
            raise _not_understood(line, host) from exc
        is_sent = item.kind is ItemKind.FILE or (item.kind is ItemKind.ARCHIVE and not sha256)
        if index < 0 or not is_sent or size != item.size or not 0 <= have <= size:
            raise _not_understood(line, host)
        requests.append(_Request(item, have, sha256))
    return requests


def _listing(
    items: Sequence[Item], hashes: Mapping[Path, str] | None, ours: Mapping[str, bytes]
) -> Iterator[bytes]:
    for item in items:
        sha256 = "" if hashes is None else hashes.get(item.origin, "")
        payload = sha256 if item.kind is ItemKind.FILE else os.fsencode(item.target)
        yield line_of(
            item.kind,
            os.fsencode(item.path),
            payload,
            mode=item.mode,
            mtime_ns=item.mtime_ns,
            size=item.size,
            space=item.size,
        ).encode()
    now = time.time_ns()
    for name, content in ours.items():
        size = len(content)
        line = line_of(
            "ours", os.fsencode(name), content, mode=0o600, mtime_ns=now, size=size, space=size
        )
        yield line.encode()
    yield b"\n"


def _send_requested(
    outgoing: _Outgoing,
    requests: Sequence[_Request],
    hashes: Mapping[Path, str],
    *,
    beginnings: bool,
) -> int:
    """Send the requested files. Return the number of bytes, without files that the cluster has
    already.

    beginnings: send the listed bytes of a file that has grown. Otherwise, report that file as
        changed.
    """
    changed = [
        file for file in requests if not file.sha256 or hashes[file.item.origin] != file.sha256
    ]
    total = outgoing.total = sum(file.item.size - file.have for file in changed)
    outgoing.sent = done = 0
    for request in requests:
        item = request.item
        if item.kind is ItemKind.ARCHIVE:
            archive = archive_of(item.origin)
            outgoing.write(HEADER.pack(len(archive)) + archive)
            continue
        if request.sha256 and hashes[item.origin] == request.sha256:
            outgoing.write(HEADER.pack(SAME))
            continue
        try:
            fd = os.open(item.origin, os.O_RDONLY | os.O_CLOEXEC)
            try:
                reject_opened(fd, item.origin)
                # A file that grew still begins with the listed bytes, but it is no longer the
                # listed file.
                has_grown = os.fstat(fd).st_size > item.size
                if has_grown:
                    outgoing.grown.append(item.path)
                size = sys.maxsize if has_grown and not beginnings else item.size
                send_file(cast("BinaryIO", outgoing), fd, request.have, size)
            finally:
                os.close(fd)
        except OSError as exc:
            raise unreadable_error([OSError(exc.errno, exc.strerror, str(item.origin))]) from exc
        done += item.size - request.have
        # Holes are not sent, so the count is corrected after each file.
        outgoing.sent = done
    outgoing.flush()
    return total


def archive_of(folder: Path) -> bytes:
    """Return a folder's files as compressed JSON: path (with the folder's name) -> bytes as
    Latin-1.
    """
    files = {
        path.relative_to(folder.parent).as_posix(): path.read_bytes() for path in tree_files(folder)
    }
    return zlib.compress(
        json.dumps({path: data.decode("latin-1") for path, data in files.items()}).encode()
    )


@dataclass(slots=True)
class _Outgoing:
    """Buffered writer to the program on the cluster. If ``total`` is set, it reports its progress.

    grown: paths of sent files that have grown since they were listed.
    """

    talk: Conversation
    progress: Progress
    total: int | None = None
    sent: int = 0
    grown: list[str] = field(default_factory=list)
    _kept: bytearray = field(default_factory=bytearray)

    def write(self, data: bytes) -> None:
        self.sent += len(data)
        if len(data) >= _PIECE:
            self.flush()
            self.talk.send(data)
            return
        self._kept += data
        if len(self._kept) >= _PIECE:
            self.flush()

    def flush(self) -> None:
        self.talk.send(bytes(self._kept))
        self._kept.clear()
        if self.total is not None:
            self.progress("sending", min(self.sent, self.total), self.total)


def _result(items: Sequence[Item], line: bytes, total: int, host: str) -> UploadResult:
    """Parse the last line from the cluster. Raise TransferError if files changed. total: bytes
    sent.
    """
    try:
        answer = json.loads(line)
        folder = os.fsdecode(base64.b64decode(answer["folder"]))
        wrong = [items[index] for index in answer["wrong"]]
        store_paths = tuple(map(str, answer["at"]))
    except (LookupError, TypeError, ValueError, RecursionError) as exc:
        raise _not_understood(line, host) from exc
    if wrong:
        raise _changed_error(wrong)
    size = sum(item.size for item in items)
    return UploadResult(
        folder, sum(item.kind is ItemKind.FILE for item in items), size, total, store_paths
    )


# The fix on the host for an error of its file system.
_WAYS: Final = {
    errno.ENOSPC: "free disk space on the host",
    errno.EDQUOT: "remove some of your files on the host",
    errno.EACCES: "change the permissions on the host",
    errno.EPERM: "change the permissions on the host",
}
_OTHER_WAY: Final = "look at the folder on the host"


def _not_understood(answer: bytes, host: str) -> TransportError:
    problem = "clusterctl does not understand the cluster's answer"
    reason = printable(answer[:200].decode(errors="replace"))
    fix = "run the command again; if it fails again, report this as a bug"
    return TransportError(
        problem, code="internal", about="answer", where=host, why=reason, fix=fix, host=host
    )


def _write_error(host: str, exc: CommandError) -> TransferError:
    problem = "the files can't be written on the cluster"
    way = next((way for number, way in _WAYS.items() if os.strerror(number) in exc.why), _OTHER_WAY)
    fix = f"{way} (`clusterctl ssh`), then run the command again"
    reason = printable((exc.why.strip().splitlines() or [exc.what])[-1])
    if exc.rc == HELD:
        return TransferError(
            "another process holds the lock on the cluster's file store",
            code="in-use",
            about="files",
            where=host,
            why=reason,
            fix="end the process that holds the lock (`clusterctl ssh lslocks` lists it, or "
            "`lslocks` on another node), or remove the lock file while no `submit` runs; then "
            "run the command again",
            host=host,
        )
    if exc.rc == ENDED_BY_SIGNAL or exc.rc > _SIGNALLED:
        return TransferError(
            "the program that writes the files on the cluster was killed",
            about="killed",
            where=host,
            why=printable(exc.why.strip() or exc.what),
            fix="run the command again; a login node may limit the CPU time of programs, "
            "so send fewer files, or ask the site's administrators",
            host=host,
        )
    return TransferError(
        problem, code="file-unwritable", about="remote", where=host, why=reason, fix=fix, host=host
    )


def _changed_error(items: Sequence[Item]) -> TransferError:
    return TransferError(
        f"{printable(first_few([item.path for item in items]))} changed during the upload",
        about="changed",
        fix="run the command again when no program writes to these files; `submit` leaves out "
        "files with --exclude",
    )
