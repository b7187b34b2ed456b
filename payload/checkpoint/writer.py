"""The thread that writes a rank's checkpoints while the rank keeps training."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from payload.checkpoint.folder import INCOMPLETE, OLD
from payload.errors import PayloadError
from payload.node.heartbeat import beat

_CHUNK = 1 << 22


class WriterThread:
    """A thread that runs tasks in sequence."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoints", _use_all_cores)
        self._task: Future[Any] | None = None
        self.cancelled = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether ``begin`` has started a task and ``result`` has not been called since."""
        return self._task is not None

    @property
    def ready(self) -> bool:
        """Whether a task has ended, so that ``result`` does not wait."""
        return self._task is not None and self._task.done()

    def begin(self, task: Callable[..., Any], *arguments: Any) -> None:
        """Start a task. Call ``result`` before the next task."""
        self._task = self._thread.submit(task, *arguments)

    def result(self) -> Any:
        """Wait for the task, and return its result. Raises PayloadError if a file cannot be
        written.
        """
        assert self._task is not None  # noqa: S101
        task = self._task
        self._task = None
        try:
            return task.result()
        except OSError as exc:
            raise PayloadError(
                f"a checkpoint cannot be written: {exc.filename}: {exc.strerror}",
                code="checkpoint-unwritable",
            ) from exc

    def close(self, *, cancel: bool = False) -> None:
        """End the thread after its task. cancel: stop the task, which leaves an incomplete file."""
        if cancel:
            self.cancelled.set()
        self._thread.shutdown()


def _use_all_cores() -> None:
    """Let this thread run on all cores of the job, because training may keep the rank's core
    busy.
    """
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def write(memory: NDArray[Any], path: Path, cancelled: threading.Event) -> dict[str, Any]:
    """Write bytes to a file and sync it to disk, or raise OSError with the path.

    Return the file's ``size`` and ``crc32``, and the ``seconds`` that writing took.
    """
    began = time.perf_counter()
    crc32 = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb", buffering=0) as file:
            for start in range(0, len(memory), _CHUNK):
                if cancelled.is_set():
                    break
                beat()
                chunk = memory[start : start + _CHUNK].data
                crc32 = zlib.crc32(chunk, crc32)
                while chunk:
                    chunk = chunk[file.write(chunk) :]
            os.fsync(file.fileno())
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
    return {"size": len(memory), "crc32": crc32, "seconds": time.perf_counter() - began}


def publish(
    path: Path,
    complete: Path,
    texts: Mapping[str, str],
    sizes: Mapping[str, int],
    remove: Sequence[Path],
) -> list[str]:
    """Check a checkpoint's files, then add text files, rename the folder, and remove old
    checkpoints.

    Args:
        path: the unfinished checkpoint's folder, with the files of all ranks.
        complete: the new path of the folder.
        texts: text files to add, by name.
        sizes: sizes of the ranks' files, by name.
        remove: the old checkpoints.

    Return a message for each old checkpoint that could not be removed. Raises OSError, without
    removing any checkpoint, if a file is missing or cannot be written.
    """
    for name, size in sizes.items():
        # On NFS, only opening a file gets its current size from the server.
        with (path / name).open("rb") as file:
            actual_size = os.fstat(file.fileno()).st_size
        if actual_size != size:
            raise OSError(errno.EIO, f"has {actual_size} bytes, not {size}", str(path / name))
    for name, text in texts.items():
        write(np.frombuffer(text.encode(), np.uint8), path / name, threading.Event())
    _sync_folder(path)
    # An existing checkpoint is broken, because this run would have resumed from a whole checkpoint.
    if complete.exists():
        _discard(complete)
    path.rename(complete)
    _sync_folder(complete.parent)
    failures = []
    for old in remove:
        try:
            _discard(old)
        except OSError as exc:
            failures.append(f"{exc.filename or old}: {exc.strerror}")
    return failures


def update(path: Path, text: str) -> list[str]:
    """Replace a text file of a complete checkpoint, or raise OSError. Return no messages."""
    temporary = path.with_name(f"{path.name}{INCOMPLETE}")
    write(np.frombuffer(text.encode(), np.uint8), temporary, threading.Event())
    temporary.replace(path)
    _sync_folder(path.parent)
    return []


def _discard(folder: Path) -> None:
    """Rename a checkpoint, then remove it, so that a half-removed checkpoint does not look
    complete.
    """
    aside = folder
    if not folder.name.endswith(OLD):
        aside = folder.with_name(f"{folder.name}{OLD}")
        folder.rename(aside)
    shutil.rmtree(aside)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
