"""The folder of a user's script: what of it travels with the job."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.jobs.folder import FolderWalk
from clusterctl.jobs.ignore import patterns
from clusterctl.spec.job import JobSpec
from clusterctl.transport.tree import Item, Kind, not_readable


@dataclass(frozen=True, slots=True)
class Source:
    """What is sent of a script's folder. ``notes`` are worth saying to the user."""

    folder: Path
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Item, ...]:
        """The files of it."""
        return tuple(item for item in self.items if item.kind is Kind.FILE)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(item.size for item in self.items)


def source_of(job: JobSpec) -> Source | None:
    """What travels with a job's script: its folder but for what is ignored; None with a bundled job.

    Raises:
        UsageError: something can't be read, leads out, has a name that is ours, or it is too much.
    """
    if job.script is None:
        if job.include or job.exclude:
            raise UsageError(
                "--include and --exclude are about the folder of a script",
                why=f"{job.bundled} is a bundled job, and no folder is sent with it",
            )
        return None
    folder = job.script.parent
    why_alone = _why_no_project(folder) if job.folder else "not wanted"
    if not why_alone:
        walk = FolderWalk(
            folder,
            job.script,
            patterns("--include", job.include, folder),
            patterns("--exclude", job.exclude, folder),
        )
        walk.run()
        return Source(folder, tuple(walk.items), walk.notes())
    if job.include:
        raise UsageError(
            f"--include is about the script's folder, and {folder} is {why_alone}",
            fix="put the script and what it needs into a folder of their own",
        )
    try:
        item = Item.of(job.script.name, job.script, job.script.stat())
    except OSError as exc:
        raise not_readable([exc]) from exc
    note = f"only the script is sent: its folder, {folder}, is {why_alone}"
    return Source(folder, (item,) if item else (), (note,) if job.folder else ())


def source_hash(items: Sequence[Item], hashes: Mapping[Path, str]) -> str:
    """The sha256 of what a job was given: names, contents, targets of links, and what can be run."""
    sha = hashlib.sha256()
    for item in sorted(items, key=lambda item: item.path):
        said = hashes[item.origin] if item.kind is Kind.FILE else item.target
        for part in (item.kind, item.path, said, "x" if _is_executable(item) else ""):
            raw = os.fsencode(part)
            sha.update(len(raw).to_bytes(8, "little"))
            sha.update(raw)
    return sha.hexdigest()


def manifest(items: Sequence[Item], hashes: Mapping[Path, str]) -> bytes:
    """The content of source.json: what the job was given. Names that are not UTF-8 have lone surrogates."""
    files = [
        {
            "path": item.path,
            "sha256": hashes[item.origin],
            "size": item.size,
            "executable": _is_executable(item),
        }
        for item in items
        if item.kind is Kind.FILE
    ]
    links = [{"path": item.path, "target": item.target} for item in items if item.kind is Kind.LINK]
    document = {"version": 1, "hash": source_hash(items, hashes), "files": files, "links": links}
    return (json.dumps(document, indent=1) + "\n").encode()


def _is_executable(item: Item) -> bool:
    return item.kind is Kind.FILE and bool(item.mode & stat.S_IXUSR)


def _why_no_project(folder: Path) -> str:
    """Why a folder is not one program's, or ""."""
    if folder == folder.parent:
        return "the root of the file system"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  # it never raises
    if folder.resolve() == home.resolve():
        return "your home folder"
    if folder.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH | stat.S_ISVTX:
        return "everybody's folder"
    return ""
