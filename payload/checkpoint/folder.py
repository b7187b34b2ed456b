"""The folder of a run's checkpoints: its file names, its lock, and the removal of unfinished
checkpoints.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import sys
import time
import weakref
from pathlib import Path

from payload.comm.base import Communicator, on_all_ranks
from payload.errors import UsageError
from payload.node.host import hostname

_NAME = re.compile(r"iteration-(\d{8,})")
INCOMPLETE = ".incomplete"
# Suffix of a checkpoint that is being removed.
OLD = f".old{INCOMPLETE}"


def checkpoint_name(iteration: int) -> str:
    return f"iteration-{iteration:08}"


def complete(folder: Path) -> dict[int, Path]:
    """Return the paths of all complete checkpoints by iteration, in ascending order. Reads no
    files.
    """
    checkpoints = {
        int(match[1]): path for path in folder.glob("*") if (match := _NAME.fullmatch(path.name))
    }
    return dict(sorted(checkpoints.items()))


def superseded(folder: Path, iteration: int, *, keep: int) -> list[Path]:
    """Return the folders to delete after saving ``iteration``, so that ``keep`` checkpoints
    remain.
    """
    older = [path for number, path in complete(folder).items() if number < iteration]
    leftovers = list(folder.glob(f"iteration-*{OLD}"))
    return leftovers + (older[: len(older) - (keep - 1)] if len(older) >= keep else [])


def prepare(folder: Path, world: Communicator) -> None:
    """Create the folder on rank 0, delete unfinished checkpoints, and check that all ranks see the
    folder.

    Raises UsageError on every rank if the folder cannot be written, or is not shared by all nodes.
    """
    mark = world.allgather(f".shared-{secrets.token_hex(8)}")[0]

    def make() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for unfinished in folder.glob(f"iteration-*{INCOMPLETE}"):
                shutil.rmtree(unfinished)
            (folder / mark).touch()
        except OSError as exc:
            raise UsageError(
                f"--checkpoints: cannot use {exc.filename or folder}: {exc.strerror}",
                code="checkpoints-unusable",
            ) from exc

    def check() -> None:
        if not (folder / mark).exists():
            raise UsageError(
                f"--checkpoints: {folder} is not the same folder on all nodes: use a shared folder",
                code="checkpoints-not-shared",
            )

    on_all_ranks(world, lambda: make() if world.rank == 0 else None)
    try:
        on_all_ranks(world, check)
    finally:
        if world.rank == 0:
            (folder / mark).unlink(missing_ok=True)


PATIENCE_S = 100.0
"""How long a run waits for the lock. An NFS server may take 90 s to release the locks of a dead
node.
"""


class FolderLock:
    """Locks a folder, so that two runs never write checkpoints into it at the same time.

    The lock is on the file ``.lock`` in the folder, until ``close`` or the end of the process. The
    file remains, and names the last run that held the lock.
    """

    def __init__(self, folder: Path, *, patience_s: float = PATIENCE_S) -> None:
        """Create the folder, and wait for the lock. Raises UsageError if that fails or takes too
        long.
        """
        path = folder / ".lock"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self.close = weakref.finalize(self, os.close, self._descriptor)
            self._wait(folder, patience_s)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, _name().encode(), 0)
        except OSError as exc:
            raise UsageError(
                f"--checkpoints: cannot use {exc.filename or path}: {exc.strerror}",
                code="checkpoints-unusable",
            ) from exc

    def _wait(self, folder: Path, patience_s: float) -> None:
        start = time.monotonic()
        has_warned = False
        while not self._try():
            holder = os.pread(self._descriptor, 1024, 0).decode(errors="replace") or "another run"
            if time.monotonic() - start >= patience_s:
                raise UsageError(
                    f"--checkpoints: {folder} is in use by {holder}: stop that run, or use "
                    "another folder",
                    code="checkpoints-in-use",
                )
            if not has_warned:
                text = (
                    f"waiting up to {patience_s:.0f} s for the lock of {folder}, which {holder} "
                    "holds"
                )
                sys.stderr.write(f"payload: {text}\n")
                sys.stderr.flush()
                has_warned = True
            time.sleep(0.2)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _name() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {hostname()}{f' of job {job}' if job else ''}"
