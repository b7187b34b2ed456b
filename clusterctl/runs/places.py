"""The paths of a job's files in the folder of its run.

On the cluster, clusterctl's files and the program's are in different folders. A run has them side by side.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from clusterctl.state.submissions import ADDED_FILES, FROM_JOB, SENT_FILES, TASK, run_path, split_path
from clusterctl.transport.remote_incoming import Entry
from clusterctl.transport.tree import Kind

# Names that clusterctl writes into a run's folder. A job's file or folder of such a name is renamed.
_RESERVED = frozenset(name.encode() for name in SENT_FILES | ADDED_FILES)


def path_of_program(path: bytes, files: str) -> bytes | None:
    """Return the path in the program's folder of a path in the job's folder; None if it is not in there.

    files: the program's folder, below the job's. "": they are the same folder.
    """
    top = os.fsencode(files) + b"/" if files else b""
    return path[len(top) :] if path.startswith(top) else None


def place_entries(chosen: Sequence[Entry], listing: Sequence[Entry], files: str) -> None:
    """Set the path that each chosen entry gets in the run's folder; b"" for the program's folder itself.

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
        if entry.kind != Kind.FOLDER and entry.local in tasks:
            entry.local += FROM_JOB
    # Beside the program's folder are clusterctl's files. A program may have written more files there.
    used = {above + name for entry in chosen for above, name, _ in [split_path(entry.local)]}
    for entry in chosen:
        if not entry.local and entry.path != os.fsencode(files):
            is_of_task = entry.kind == Kind.FOLDER and entry.path in tasks
            entry.local = entry.path if is_of_task else _free(entry.path, _RESERVED | used, used)


def _free(path: bytes, reserved: Collection[bytes], used: Collection[bytes]) -> bytes:
    """Return the path. If its name is reserved, the result has another name, which is not in ``used``."""
    above, name, rest = split_path(path)
    new = name
    while above + new in reserved or (new != name and above + new in used):
        new += FROM_JOB
    return above + new + rest
