"""Copy a user's files and folders to the cluster (`put`) and from it (`get`)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from clusterctl.errors import MachineError, TransferError, UsageError
from clusterctl.jobs.secret_files import reject_own_keys, without_secrets
from clusterctl.scheduler.session import open_session
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.workspace import cache_home, state_home
from clusterctl.transport.copies import LocalCopies, clock_of, record_copies
from clusterctl.transport.get import DownloadResult, fetch
from clusterctl.transport.put import Upload, UploadResult
from clusterctl.transport.tree import ItemKind, Progress, list_items
from clusterctl.util.confine import reject_read


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of `put`.

    skipped: paths that were not sent because they are neither files nor folders.
    own: clusterctl's folders with keys and caches, which are not sent with a folder that contains
        them.
    secrets: files and folders with secrets, which are sent only if their own path is given.
    place: path on the cluster of the folder that was sent, of a file that got a new name, or the
        folder of several paths or a file.
    """

    sent: UploadResult
    skipped: tuple[Path, ...]
    own: tuple[Path, ...] = ()
    secrets: tuple[str, ...] = ()
    place: str = ""


def put(
    chosen: ChosenCluster, paths: Sequence[str], *, progress: Progress = lambda *_: None
) -> PutResult:
    """Copy files and folders to a folder on the cluster.

    paths: local paths, then the folder on the cluster, or for a single file its name there (see
        ``_is_name``). A single path is copied to the home folder, or on a cluster that other people
        run, to the folder `files` in clusterctl's folder there.

    Raises:
        UsageError: a path is empty, the last path is a local file or begins with a variable, or a
            file is a key with which clusterctl logs in.
        TransferError: the files can't be sent, or changed during the transfer.
        TransportError: the cluster can't be reached.
    """
    _reject_empty(paths)
    local, remote = _split(paths)
    reject_read(*local)
    items, skipped = list_items([Path(path) for path in local])
    own_folders = [path.resolve() for path in (state_home(), cache_home())]
    own = tuple(
        item.origin
        for item in items
        if "/" in item.path
        and item.kind is ItemKind.FOLDER
        and item.origin.resolve() in own_folders
    )
    items = tuple(item for item in items if not any(map(item.origin.is_relative_to, own)))
    given = {item.path for item in items if "/" not in item.path}
    items, secrets = without_secrets(items, given)
    with open_session(chosen) as session:
        reject_own_keys(items, session.ledger.workspace)
        if remote is None:
            remote = session.site.upload_folder
        elif len(items) == 1 and items[0].kind is ItemKind.FILE:
            kind = session.transport.run(["sh", "-c", _KIND, "kind", remote]).stdout.strip()
            if _is_name(paths[-1], items[0].path, kind):
                remote, name = os.path.split(remote)
                remote = remote or "."
                items = (replace(items[0], path=name),)
        try:
            sent = Upload(session.transport, progress).into(items, remote)
        except TransferError as exc:
            home = f"{Path.home()}/"
            if exc.about == "remote" and remote.startswith(home):
                there = f"~/{paths[-1].removeprefix(home)}"
                exc.fix = (
                    f"if your shell has put your home of this machine in place of `~`, quote the "
                    f"path: '{there}'; otherwise {exc.fix}"
                )
            raise
        at_ns = clock_of(session.transport)
        copies = [
            LocalCopies(
                session.transport.host,
                f"{sent.folder}/{item.path}",
                str(item.origin.absolute()),
                sent=True,
                at_ns=at_ns,
            )
            for item in items
            if "/" not in item.path
        ]
        # If this machine's disk is full, `down` treats the files on the cluster as only copies.
        with suppress(MachineError):
            record_copies(session.ledger.workspace, copies)
    tops = [item for item in items if "/" not in item.path]
    is_place = len(tops) == 1 and (
        tops[0].kind is ItemKind.FOLDER or tops[0].path != tops[0].origin.name
    )
    place = f"{sent.folder}/{tops[0].path}" if is_place else sent.folder
    return PutResult(sent, tuple(skipped), own, secrets, place)


def get(
    chosen: ChosenCluster,
    paths: Sequence[str],
    *,
    progress: Progress = lambda *_: None,
) -> DownloadResult:
    """Copy files and folders from the cluster to a local folder.

    paths: remote paths, then the local folder, or for a single file its name here (see
        ``_is_name``). A single path is copied to the current folder.

    Raises:
        UsageError: a path is empty or begins with a variable, or a folder is refused.
        TransferError: the files can't be fetched.
        TransportError: the cluster can't be reached.
    """
    _reject_empty(paths)
    remote, local = (paths, ".") if len(paths) == 1 else (paths[:-1], paths[-1])
    kind = "folder" if os.path.isdir(local) else "file" if os.path.isfile(local) else ""
    is_name = len(remote) == 1 and _is_name(local, Path(remote[0]).name, kind)
    with open_session(chosen) as session:
        return fetch(
            session.transport,
            [_below_home(path) for path in remote],
            Path(local),
            is_name=is_name,
            progress=progress,
        )


# Paths that are relative begin in the home folder.
_KIND: Final = 'cd; if [ -d "$1" ]; then echo folder; elif [ -e "$1" ]; then echo file; fi'


def _is_name(target: str, file: str, kind: str) -> bool:
    """Return whether the target of a single file is a new name for it, and not a folder.

    target: as the user wrote it. file: name of the file. kind: of what exists at the target:
    "folder", "file" or "".
    """
    if target.endswith(("/", "/.", "/..")) or target in (".", "..", "~") or kind == "folder":
        return False
    name = Path(target).name
    return kind == "file" or name == file or bool(Path(name).suffix)


def _reject_empty(paths: Sequence[str]) -> None:
    """Raise UsageError for an empty path: it would mean the current folder, but may be an unset
    variable.
    """
    if "" in paths:
        raise UsageError(
            "a path is empty",
            about="path",
            fix="pass a file or folder, or `.` for the whole folder",
        )


def _split(paths: Sequence[str]) -> tuple[Sequence[str], str | None]:
    """Return (local paths, remote folder). Raises UsageError if the last of several paths is a
    local file.
    """
    if len(paths) == 1:
        return paths, None
    *local, remote = paths
    # Unlike Path.is_file, no error if this account may not look into a folder of that name here.
    if os.path.isfile(remote) and not remote.endswith("/"):
        raise UsageError(
            f"{remote} is a local file, but the last argument must be a folder on the cluster",
            about="target",
            fix="add a folder on the cluster as last argument (`.` is your home folder); if "
            f"{remote} is the name of that folder, write {remote}/",
        )
    return local, _below_home(remote)


_VARIABLE: Final = re.compile(r"\$\{?[A-Za-z_]")


def _below_home(path: str) -> str:
    """Return a path on the cluster, which begins in the home folder if it is relative.

    Raise UsageError if it begins with a variable, which nothing would replace.
    """
    if _VARIABLE.match(path):
        raise UsageError(
            f"the path {path} on the cluster begins with a variable, which is not replaced there",
            about="path-variable",
            fix="relative paths begin in the home folder there, so leave out `$HOME/`; if the "
            f"folder has this name, write './{path}'",
        )
    return os.path.normpath(path.removeprefix("~/")) if path != "~" else "."
