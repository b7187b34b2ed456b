"""A job's folder from hosts that share none: each has what its own ranks wrote, and all of it becomes one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from clusterctl.runs.fetch import fetch_tree
from clusterctl.runs.manifest import MAX_FILE, Manifest, RemoteFile
from clusterctl.state.ledger import Skipped
from clusterctl.transport.base import Transport

NODES = b"nodes"  # holds, by host, files whose name another host has used for something else
_AT_ONCE = 8

Holder = tuple[str, Transport]


def fetch_from(
    holders: Sequence[Holder], folder: str, work: Path, *, still_changing: bool, max_file: int = MAX_FILE
) -> Manifest:
    """Make ``work/tree`` hold what the job's folder holds on all of these hosts.

    The first host's files keep their places. Those of the others do too, unless another host has a different
    file of that name: then they go to ``nodes/HOST/``.

    Raises:
        CollectError, TransportError: see ``fetch_tree``. What has arrived is kept.
    """
    tree = work / "tree"
    if len(holders) == 1:
        return fetch_tree(holders[0][1], folder, tree, still_changing=still_changing, max_file=max_file)

    def fetch(holder: Holder) -> Manifest:
        host, transport = holder
        place = work / "nodes" / host
        return fetch_tree(transport, folder, place, still_changing=still_changing, max_file=max_file)

    (work / "nodes").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        found = dict(zip((host for host, _ in holders), pool.map(fetch, holders), strict=True))
    return _as_one(found, work / "nodes", tree)


def _as_one(found: Mapping[str, Manifest], nodes: Path, tree: Path) -> Manifest:
    """Move the files of each host's tree into one."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    places = _Places()
    files: dict[bytes, RemoteFile] = {}
    sums: dict[bytes, str] = {}
    skipped: dict[tuple[str, str], Skipped] = {}
    for host, manifest in found.items():
        for file in manifest.files.values():
            sha256 = manifest.sha256[file.local]
            if sums.get(file.local) == sha256:
                continue
            local = places.take(file.local, host)
            target = tree / os.fsdecode(local)
            target.parent.mkdir(parents=True, exist_ok=True)
            (nodes / host / os.fsdecode(file.local)).replace(target)
            files[local], sums[local] = replace(file, local=local), sha256
        skipped |= {(one.path, one.reason): one for one in manifest.skipped}
    folders = {folder for manifest in found.values() for folder in manifest.folders}
    empty = tuple(sorted(folder for folder in folders if places.may_be_folder(folder)))
    for folder in empty:
        (tree / os.fsdecode(folder)).mkdir(parents=True, exist_ok=True)
    return Manifest(files, tuple(skipped.values()), sums, empty)


class _Places:
    """Names in the tree that are taken, by a file or as a folder."""

    def __init__(self) -> None:
        self._files: set[bytes] = set()
        self._folders: set[bytes] = set()

    def take(self, local: bytes, host: str) -> bytes:
        """The file's own place, or one below its host's name."""
        name, folder = local, host.encode()
        while self._is_taken(name):
            name, folder = b"/".join([NODES, folder, local]), folder + b"_"
        self._files.add(name)
        self._folders |= set(_parents(name))
        return name

    def may_be_folder(self, name: bytes) -> bool:
        """Whether no file lies there, or above."""
        return not self._files & {name, *_parents(name)}

    def _is_taken(self, name: bytes) -> bool:
        return name in self._files or name in self._folders or bool(self._files & set(_parents(name)))


def _parents(name: bytes) -> list[bytes]:
    parts = name.split(b"/")
    return [b"/".join(parts[:i]) for i in range(1, len(parts))]
