"""The folder of a run's checkpoints: its names, what killed runs left in it, and its lock."""

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
OLD = f".old{INCOMPLETE}"  # while one is being removed


def checkpoint_name(iteration: int) -> str:
    return f"iteration-{iteration:08}"


def complete(folder: Path) -> dict[int, Path]:
    """By iteration, from the first to the last, whether whole or broken since."""
    found = {int(match[1]): path for path in folder.glob("*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def superseded(folder: Path, iteration: int, *, keep: int) -> list[Path]:
    """Which to remove once there is one of ``iteration``, to keep that and the newest before it; with what is
    left of those that could not be removed."""
    older = [path for number, path in complete(folder).items() if number < iteration]
    left = list(folder.glob(f"iteration-*{OLD}"))
    return left + (older[: len(older) - (keep - 1)] if len(older) >= keep else [])


def prepare(folder: Path, world: Communicator) -> None:
    """Make the folder on rank 0, without what killed runs left, and see that it is there for all ranks.

    Raises:
        UsageError: it cannot be written, or it is another one on another node.
    """
    mark = world.allgather(f".shared-{secrets.token_hex(8)}")[0]

    def make() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"iteration-*{INCOMPLETE}"):
                shutil.rmtree(left)
            (folder / mark).touch()
        except OSError as exc:
            raise UsageError(
                f"--checkpoints: {exc.filename or folder}: {exc.strerror}", code="checkpoints-unusable"
            ) from exc

    def look() -> None:
        if not (folder / mark).exists():
            raise UsageError(
                f"--checkpoints: {folder} is not the same folder on all nodes: give a shared one",
                code="checkpoints-not-shared",
            )

    on_all_ranks(world, lambda: make() if world.rank == 0 else None)
    try:
        on_all_ranks(world, look)
    finally:
        if world.rank == 0:
            (folder / mark).unlink(missing_ok=True)


PATIENCE_S = 100.0
"""For which a run that was started again waits for the one before it. An NFS server takes 90 s to free what a
node held that died."""


class Lock:
    """Keeps two live runs from writing into one folder: each would take the other's checkpoints for its own.

    It is a lock of the file ``.lock`` in the folder, until it is closed or its process is dead. The file
    stays; it tells which run has the lock.
    """

    def __init__(self, folder: Path, *, patience_s: float = PATIENCE_S) -> None:
        """Make the folder, and wait for the lock.

        Raises:
            UsageError: another run has it for too long, or the folder cannot be written or locked.
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
                f"--checkpoints: {exc.filename or path}: {exc.strerror}", code="checkpoints-unusable"
            ) from exc

    def _wait(self, folder: Path, patience_s: float) -> None:
        began, told = time.monotonic(), False
        while not self._try():
            holder = os.pread(self._descriptor, 1024, 0).decode(errors="replace") or "another run"
            if time.monotonic() - began >= patience_s:
                raise UsageError(
                    f"--checkpoints: {folder} is in use by {holder}: end that, or give another folder",
                    code="checkpoints-in-use",
                )
            if not told:
                sys.stderr.write(f"payload: waits up to {patience_s:.0f} s for {folder}, used by {holder}\n")
                sys.stderr.flush()
                told = True
            time.sleep(0.2)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _name() -> str:
    """Of this run, for people."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {hostname()}{f' of job {job}' if job else ''}"
