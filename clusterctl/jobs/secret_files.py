"""Files with secrets, which are sent with a folder only if the user names them.

spec/data/secret_files.toml lists their names and their first bytes.
"""

from __future__ import annotations

import codecs
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from clusterctl.errors import Notice, UsageError, printable
from clusterctl.spec.names import DATA, first_few
from clusterctl.state.inventory import applied_if_known
from clusterctl.state.workspace import Workspace
from clusterctl.transport.tree import Item, ItemKind, unreadable_error

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec

_READ = 1 << 16
# The key of a spec that names a private key.
_NAMES_KEYS = re.compile(rb"\bkey['\"]?\s*:")
_MOST_NAMED = 30


@dataclass(frozen=True, slots=True)
class _Table:
    """names: parts of the end of a path, the last with a slash if it is a folder's."""

    names: frozenset[tuple[str, ...]]
    lengths: tuple[int, ...]
    endings: tuple[str, ...]
    begins: re.Pattern[bytes]


@cache
def _table() -> _Table:
    table = tomllib.loads((DATA / "secret_files.toml").read_text(encoding="utf-8"))
    names = frozenset(tuple(re.findall("[^/]+/?$|[^/]+", name)) for name in table["names"])
    return _Table(
        names,
        tuple({len(name) for name in names}),
        tuple(table["endings"]),
        re.compile("|".join(table["begins"]).encode(), re.DOTALL),
    )


def without_secrets(
    items: Sequence[Item], named: Collection[str]
) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """Return the items to send, and the paths of the files and folders with secrets that are left
    out.

    named: paths that the user named. A file with secrets is sent if its own path is among them, or
        that of a folder of secrets that contains it, but not for that of another folder.

    Raises UsageError if files can't be read.
    """
    sent = []
    left_out = dict[str, None]()
    unreadable = []
    paths = [PurePath(path) for path in named]
    for item in items:
        try:
            secret = _secret_of(item)
        except OSError as exc:
            unreadable.append(exc)
            continue
        path = PurePath(item.path)
        if secret is None or any(
            name.is_relative_to(secret)
            and (
                path.is_relative_to(name)
                or (item.kind is ItemKind.FOLDER and name.is_relative_to(path))
            )
            for name in paths
        ):
            sent.append(item)
        else:
            is_folder = item.kind is ItemKind.FOLDER or path != secret
            left_out[f"{secret}/" if is_folder else str(secret)] = None
    if unreadable:
        raise unreadable_error(unreadable)
    return tuple(sent), tuple(left_out)


def _secret_of(item: Item) -> PurePath | None:
    """Return the path of the topmost folder of secrets that contains an item, or of the item if it
    is a file with secrets. None: the item is no secret. Raises OSError if a file can't be read.
    """
    path = PurePath(item.path)
    is_folder = item.kind is ItemKind.FOLDER
    if length := _listed(path.parts, is_folder=is_folder):
        return PurePath(*path.parts[:length])
    if item.kind is not ItemKind.FILE:
        return None
    # A link is sent as the file outside to which it leads.
    is_secret = (
        item.origin.is_symlink() and _listed(item.origin.resolve().parts, is_folder=False)
    ) or _begins_secret(item)
    return path if is_secret else None


def _listed(parts: Sequence[str], *, is_folder: bool) -> int:
    """Return the number of a path's parts up to the topmost entry that the table lists. 0: no
    entry.
    """
    table = _table()
    for end in range(1, len(parts) + 1):
        last = f"{parts[end - 1]}/" if is_folder or end < len(parts) else parts[end - 1]
        if last.endswith(table.endings):
            return end
        for length in table.lengths:
            if length <= end and (*parts[end - length : end - 1], last) in table.names:
                return end
    return 0


def _begins_secret(item: Item) -> bool:
    if not item.size:
        return False
    with suppress(FileNotFoundError):
        fd = os.open(item.origin, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            head = os.read(fd, _READ)
        except OSError as exc:
            exc.filename = str(item.origin)
            raise
        finally:
            os.close(fd)
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            head = head[2:].replace(b"\0", b"")
        return _table().begins.match(head.removeprefix(codecs.BOM_UTF8).lstrip()) is not None
    # Another program removed it just now.
    return False


def left_out_notice(paths: Sequence[str], way: str) -> Notice:
    """Return a note about files with secrets that are not sent. way: how to send one of them."""
    names = printable(first_few(paths, _MOST_NAMED))
    text = f"not sent, because such files hold secrets: {names}; to send one, {way}"
    return Notice("secrets-not-sent", text)


def reject_own_keys(
    items: Iterable[Item], workspace: Workspace, spec: ClusterSpec | None = None
) -> None:
    """Raise UsageError if one of the files to send has the content of a key with which clusterctl
    logs in to the cluster's hosts, under any name.

    spec: the cluster's. None: that of its last `up`.
    """
    keys = dict[bytes, Path]()
    for file in (workspace.key, workspace.host_key, *map(Path, _keys_of(workspace, spec))):
        with suppress(OSError):
            keys[file.read_bytes()] = file
    sizes = {len(content) for content in keys} - {0}
    for item in items:
        if item.kind is not ItemKind.FILE or item.size not in sizes:
            continue
        with suppress(OSError):
            if key := keys.get(item.origin.read_bytes()):
                raise UsageError(
                    f"{printable(item.path)} can't be sent to the cluster",
                    code="would-send-secret",
                    about="key",
                    where=str(item.origin),
                    why=f"it is the private key {key}, with which clusterctl logs in to the hosts",
                    fix="leave the file out with --exclude, or move it to another folder",
                )


def _keys_of(workspace: Workspace, spec: ClusterSpec | None) -> Collection[str]:
    if spec is None:
        with suppress(OSError):
            # To load a spec takes a tenth of a second. Each has the key `ssh_keys`.
            if _NAMES_KEYS.search(workspace.spec.read_bytes()):
                spec = applied_if_known(workspace)
    return spec.provider.keys if spec is not None else ()
