"""Where a job's files and symbolic links get in the folder of its run.

On the cluster, clusterctl's files and the program's are in different folders. A run has them side
by side.

A link is made only if it leads to a file or folder that is copied too, or to another such link. It
then gets a relative target inside the run's folder, also if the cluster reports another.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from clusterctl.state.ledger import (
    ADDED_FILES,
    FROM_JOB,
    SENT_FILES,
    TASK,
    is_own,
    run_path,
    split_path,
)
from clusterctl.transport.remote_incoming import IncomingEntry
from clusterctl.transport.tree import ItemKind

# Names that clusterctl writes into a run's folder. A job's file or folder of such a name is
# renamed.
_RESERVED = frozenset(name.encode() for name in SENT_FILES | ADDED_FILES)
# The longest target of a link that Linux allows.
_LONGEST = 4096  # bytes
_HERE = b"."
_UP = b".."

# Path of a link in the run's folder -> path of its target in the run's folder.
Links = Mapping[bytes, bytes]


def path_of_program(path: bytes, files: str) -> bytes | None:
    """Return the path in the program's folder of a path in the job's folder; None if it is not in
    there.

    files: the program's folder, below the job's. "": they are the same folder.
    """
    top = os.fsencode(files) + b"/" if files else b""
    return path[len(top) :] if path.startswith(top) else None


def place_entries(
    chosen: Sequence[IncomingEntry], listing: Sequence[IncomingEntry], files: str
) -> None:
    """Set the path that each chosen entry gets in the run's folder; b"" for the program's folder
    itself.

    listing: all entries of the job's folder. files: as for ``path_of_program``.
    """
    if not files:
        tops = {entry.path.partition(b"/")[0] for entry in listing}
        for entry in chosen:
            entry.local = _free(entry.path, _RESERVED, tops)
        return
    paths = {entry.path: path_of_program(entry.path, files) for entry in listing}
    siblings = {path for path in paths.values() if path}
    tasks = {path for path, below in paths.items() if below is None and TASK.fullmatch(path)}
    for entry in chosen:
        entry.local = run_path(paths[entry.path] or b"", siblings)
        if entry.kind != ItemKind.FOLDER and entry.local in tasks:
            entry.local += FROM_JOB
    # Beside the program's folder are clusterctl's files. A program may have written more files
    # there.
    used = {above + name for entry in chosen for above, name, _ in [split_path(entry.local)]}
    reserved = _RESERVED | used
    outer = [split_path(path) for path, below in paths.items() if below is None]
    used |= {above + name for above, name, _ in outer}
    for entry in chosen:
        if not entry.local and entry.path != os.fsencode(files):
            is_of_task = entry.kind == ItemKind.FOLDER and entry.path in tasks
            entry.local = entry.path if is_of_task else _free(entry.path, reserved, used)


def _free(path: bytes, reserved: Collection[bytes], used: Collection[bytes]) -> bytes:
    """Return the path. If its name is reserved, the result has another name, which is not in
    ``used``.
    """
    above, name, rest = split_path(path)
    new = name
    while above + new in reserved or (new != name and above + new in used):
        new += FROM_JOB
    return above + new + rest


def target_of(link: IncomingEntry) -> bytes:
    return base64.b64decode(link.payload)


def add_with_parents(paths: set[bytes], path: bytes) -> None:
    while path and path not in paths:
        paths.add(path)
        path = path.rpartition(b"/")[0]


def choose_links(
    links: Iterable[IncomingEntry], coming: Collection[bytes], top: str, files: str = ""
) -> dict[bytes, bytes]:
    """Return the links to make: path -> path of the target, both in the job's folder. Targets come
    first.

    coming: paths of the files and folders that are copied. top: path of the job's folder on the
        cluster.
    files: as for ``path_of_program``. clusterctl's own files are never links.
    """
    possible = (entry for entry in links if not _is_own(entry.path, files))
    targets = {entry.path: _path_in_run(entry, os.fsencode(top)) for entry in possible}
    made: dict[bytes, bytes] = {}
    for path in targets:
        chain: dict[bytes, None] = {}
        end = path
        while end in targets and end not in made and end not in chain:
            chain[end] = None
            end = targets[end]
        if end in made or end in coming:
            made |= {link: targets[link] for link in reversed(chain)}
        else:
            # So that this chain is not followed again for each link of it.
            targets |= dict.fromkeys(chain, b"")
    return made


def _is_own(path: bytes, files: str) -> bool:
    return is_own(split_path(path)[1]) and (not files or path_of_program(path, files) is None)


def _path_in_run(link: IncomingEntry, top: bytes) -> bytes:
    """Return the path in the job's folder that a link leads to; b"" if it leads elsewhere.

    No copied file has a path such as `a/../b`, which may lead elsewhere because `a` may be a link.
    """
    target = target_of(link)
    folder = link.path.split(b"/")[:-1]
    if target.startswith(top + b"/"):
        folder = []
        target = target[len(top) :].lstrip(b"/")
    names = [name for name in target.split(b"/") if name not in {b"", _HERE}]
    depth = next((i for i, name in enumerate(names) if name != _UP), len(names))
    if target.startswith(b"/") or len(target) > _LONGEST or depth > len(folder):
        return b""
    path = b"/".join([*folder[: len(folder) - depth], *names[depth:]])
    # Programs that follow links would never leave a folder with a link to itself.
    return b"" if (link.path + b"/").startswith(path + b"/") else path


def make_links(tree: Path, links: Links) -> None:
    """Make links in the complete folder of a run, except links that would replace a file or lead
    out.
    """
    root = tree.resolve()
    for path, target in links.items():
        link = root / os.fsdecode(path)
        place = root / os.fsdecode(target)
        # The user may have added links of that name, also in place of a folder.
        is_inside = link.parent.resolve() == link.parent and root in place.resolve().parents
        if is_inside and link.parent.is_dir() and place.exists() and not os.path.lexists(link):
            link.symlink_to(os.path.relpath(place, link.parent))
