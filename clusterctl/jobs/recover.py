"""The files that were sent with a job, found again: in its run, in the script's folder, or in git's history.

The run may come from elsewhere, so nothing in it is believed: paths, numbers and sizes are bounded, and a
file counts only with the sha256 that was sent.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from clusterctl.errors import TransportError, UsageError, printable
from clusterctl.jobs.source import MAX_BYTES, MAX_FILES, Source, is_taken
from clusterctl.jobs.submit import MAX_DIFF, PATIENCE_S, output_of
from clusterctl.state.submissions import SOURCE_FILE
from clusterctl.transport.remote_open import read_json
from clusterctl.transport.tree import Item, Kind, hash_items
from clusterctl.util.process import run as run_program
from clusterctl.util.process import temporary_folder

_MAX_JSON: Final = 64 << 20
_MAX_BLOB: Final = 64 << 20  # of a file in a repository
_MAX_PATH: Final = 4096
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")
# git asks no remote for what is missing.
_GIT: Final = ("env", "GIT_ALLOW_PROTOCOL=none", "GIT_NO_LAZY_FETCH=1", "GIT_TERMINAL_PROMPT=0")


def no_replay(run: Path, why: str) -> UsageError:
    return UsageError(
        f"{run.name} can't be replayed",
        code="not-replayable",
        where=str(run),
        why=why,
        fix="submit its program anew",
    )


def read_mapping(run: Path, name: str) -> dict[str, Any]:
    """The mapping in a file of a run.

    Raises:
        UsageError: there is no such file, or it is a link or damaged.
    """
    try:
        return mapping(read_json(os.fsencode(run), name.encode(), _MAX_JSON))
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or str(exc).partition("\n")[0]
        raise no_replay(run, f"{name} can't be read: {printable(why)}") from exc


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return dict(value) if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """The same of each in a list."""
    return [mapping(one) for one in value] if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class _File:
    """A file that was sent. ``path`` is below the folder."""

    path: str
    sha256: str
    size: int
    executable: bool


def recover(run: Path, top: Path, git: Mapping[str, Any], temporary: Path) -> Source:
    """What source.json of a run lists, each file where it is found.

    ``top`` is the folder that it was sent from, ``git`` its state then. What only git has, is written to the
    folder ``temporary``.

    Raises:
        UsageError: a file is nowhere on this machine as it was sent, or the list is damaged.
    """
    files, links, folders = _listed(run)
    found = _found(files, run, own=False)
    found |= _found([one for one in files if one.path not in found], top, own=True)
    found |= _of_repository([one for one in files if one.path not in found], git, top, temporary)
    if missing := [one.path for one in files if one.path not in found]:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UsageError(
            f"{printable(missing[0])}{more} of {run.name} is not on this machine as it was sent",
            code="sent-files-missing",
            where=str(run / SOURCE_FILE),
            why=f"neither {run} nor {top} nor the commit of its git repository has it with the same sha256",
            fix=f"put it back into {top} as it was, or submit the program as it is now",
        )
    items = [Item(path, Kind.FOLDER, top / path, 0o755, time.time_ns()) for path in folders]
    items += [found[one.path] for one in files]
    items += [Item(path, Kind.LINK, top / path, 0o777, 0, target=target) for path, target in links]
    return Source(top, tuple(items))


def _listed(run: Path) -> tuple[list[_File], list[tuple[str, str]], list[str]]:
    """The files, the links and the folders that were sent.

    Raises:
        UsageError: the list is damaged, leads out of the folder, or is too long.
    """
    document = read_mapping(run, SOURCE_FILE)
    files: list[_File] = []
    links: list[tuple[str, str]] = []
    for one in mappings(document.get("files")):
        path, sha256, size = _inner(run, one.get("path")), str(one.get("sha256")), one.get("size")
        if not _SHA256.fullmatch(sha256) or not isinstance(size, int) or size < 0:
            raise no_replay(run, f"{SOURCE_FILE} does not tell what {printable(path)} was")
        files.append(_File(path, sha256, size, one.get("executable") is True))
    for one in mappings(document.get("links")):
        target = one.get("target")
        if not isinstance(target, str) or not 0 < len(target) <= _MAX_PATH or "\0" in target:
            raise no_replay(run, f"{SOURCE_FILE} does not tell where a link leads")
        links.append((_inner(run, one.get("path")), target))
    if len(files) + len(links) > MAX_FILES or sum(one.size for one in files) > MAX_BYTES:
        raise no_replay(run, f"{SOURCE_FILE} lists more than a job may have")
    leaves = [one.path for one in files] + [path for path, _ in links]
    listed = document.get("folders")
    folders = {_inner(run, path) for path in listed} if isinstance(listed, list) else set()
    folders |= {str(above) for path in (*leaves, *folders) for above in PurePosixPath(path).parents}
    folders.discard(".")
    # A file below what is a link here would be written to where that leads.
    if len(set(leaves)) < len(leaves) or not folders.isdisjoint(leaves):
        raise no_replay(run, f"{SOURCE_FILE} has two things of one name")
    return files, links, sorted(folders)


def _inner(run: Path, name: object) -> str:
    """A path below the folder."""
    text = name if isinstance(name, str) and len(name) <= _MAX_PATH else "/"
    path = PurePosixPath(text)
    try:
        is_path = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_path = False
    if not is_path or path.is_absolute() or ".." in path.parts or not path.parts:
        shown = printable(str(name)[:200])
        raise no_replay(run, f"{SOURCE_FILE} has a path that leads out of the folder: {shown}")
    if is_taken(str(path)):
        raise no_replay(run, f"{SOURCE_FILE} has a file of clusterctl's own: {path}")
    return str(path)


def _found(files: Sequence[_File], folder: Path, *, own: bool) -> dict[str, Item]:
    """The files that a folder has as they were sent. Links are followed only in the user's ``own`` folder."""
    items: list[Item] = []
    real = os.path.realpath(folder)
    for one in files:
        place = folder / one.path
        try:
            status = place.stat()
            if not own and os.path.realpath(place) != os.path.join(real, one.path):  # noqa: PTH118 - any name
                continue
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(status.st_mode) and status.st_size == one.size and os.access(place, os.R_OK):
            mode = 0o755 if one.executable else 0o644
            items.append(Item(one.path, Kind.FILE, place, mode, status.st_mtime_ns, status.st_size))
    hashes, wanted = hash_items(items), {one.path: one.sha256 for one in files}
    return {item.path: item for item in items if hashes[item.origin] == wanted[item.path]}


def _of_repository(
    files: Sequence[_File], git: Mapping[str, Any], folder: Path, temporary: Path
) -> dict[str, Item]:
    """Those of the commit that the folder was at, or of it with the changes that were not committed."""
    root, commit, diff = str(git.get("root")), str(git.get("commit")), git.get("diff")
    if not (files and _COMMIT.fullmatch(commit) and os.path.isabs(root) and os.path.isdir(root)):  # noqa: PTH112, PTH117
        return {}
    top = Path(os.path.relpath(os.path.realpath(folder), os.path.realpath(root)))
    if ".." in top.parts:
        return {}
    changes = (
        diff.encode(errors="replace") if isinstance(diff, str) and not git.get("diff_truncated") else b""
    )
    place = temporary / "files"
    for one in files:
        name, target = str(top / one.path), place / one.path
        target.parent.mkdir(parents=True, exist_ok=True)
        content = _blob(root, commit, name)
        if content is not None and hashlib.sha256(content).hexdigest() == one.sha256:
            target.write_bytes(content)
        elif 0 < len(changes) <= 3 * MAX_DIFF:  # bytes that are no UTF-8 have grown
            _patch(name, content, changes, target, temporary)
    return _found(files, place, own=False)


def _blob(root: str, commit: str, name: str) -> bytes | None:
    """A file of a commit; None if it has none, or a very large one."""
    argv = [*_GIT, "git", "--no-optional-locks", "-C", root, "cat-file", "blob", f"{commit}:{name}"]
    try:
        content = output_of(argv, _MAX_BLOB, PATIENCE_S)
    except (TransportError, ValueError):
        return None
    return content if len(content) <= _MAX_BLOB else None


def _patch(name: str, before: bytes | None, changes: bytes, target: Path, temporary: Path) -> None:
    """Apply what a diff says of a file to its content ``before``; its hash tells whether that was right."""
    with temporary_folder(temporary) as folder:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if before is not None:
            place.write_bytes(before)
        only = re.sub(r"([\\*?\[])", r"\\\1", name)
        no_repository = f"GIT_CEILING_DIRECTORIES={os.path.realpath(temporary)}"
        argv = [*_GIT, no_repository, "git", "-C", str(folder), "apply"]
        try:
            run_program(
                [*argv, "--whitespace=nowarn", f"--include={only}"], stdin=changes, timeout_s=PATIENCE_S
            )
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return
        if place.is_file() and not place.is_symlink():
            place.rename(target)
