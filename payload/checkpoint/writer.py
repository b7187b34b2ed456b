"""The process that writes one rank's checkpoints, so that the rank can go on training.

``python -I writer.py MEMORY PARENT`` reads requests, one JSON object a line, and answers each with one:
about bytes that its parent has put into the shared memory MEMORY (a file descriptor). It ends when its parent
does, however that comes about; what it had not finished then stays ``.incomplete``. Standard library only,
and nothing of the payload, so that it starts fast.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

_CHUNK = 1 << 22
_OLD = ".old.incomplete"  # as in ``folder``, of which this program knows nothing


def main(memory: int, parent: int) -> None:
    """Serve until standard input ends.

    As one process among others: stood behind ranks that keep every core busy, what takes it 0.1 s takes ten
    times that, and the next checkpoint waits for it, while training gains nothing.
    """
    with suppress(OSError):  # ranks may be bound to a core each: any other that the job has will do
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with mmap.mmap(memory, os.fstat(memory).st_size, access=mmap.ACCESS_READ) as content:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = (
                    _write(content, parent, **request) if "size" in request else publish(parent, **request)
                )
            except OSError as exc:
                answer = {"error": f"{exc.filename or request['path']}: {exc.strerror}"}
            try:
                sys.stdout.write(json.dumps(answer) + "\n")
                sys.stdout.flush()
            except BrokenPipeError:
                # The run ended while this was written: nobody is to see a traceback of it.
                os._exit(1)


def _write(content: mmap.mmap, parent: int, *, path: str, size: int) -> dict[str, Any]:
    """The first ``size`` bytes into a file, to the disk."""
    began = time.perf_counter()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    crc32 = 0
    with memoryview(content) as view, Path(path).open("wb", buffering=0) as file:
        for start in range(0, size, _CHUNK):
            _end_with(parent)
            chunk = view[start : min(start + _CHUNK, size)]
            crc32 = zlib.crc32(chunk, crc32)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return {"size": size, "crc32": crc32, "seconds": time.perf_counter() - began}


def publish(
    parent: int,
    *,
    path: str,
    complete: str,
    texts: dict[str, str],
    sizes: dict[str, int],
    remove: list[str],
) -> dict[str, Any]:
    """All ranks' files, of these ``sizes``, are in the folder ``path``: add those of these ``texts``, make it
    the ``complete`` one, then remove old ones, and tell which of these are ``left`` since they could not be.

    Raises:
        OSError: it cannot be made one; nothing is removed then.
    """
    for name, size in sizes.items():
        with (Path(path) / name).open("rb") as file:  # of NFS, only opening asks the server
            found = os.fstat(file.fileno()).st_size
        if found != size:
            raise OSError(errno.EIO, f"has {found} bytes, not {size}", str(Path(path) / name))
    for name, text in texts.items():
        with (Path(path) / name).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    _sync_folder(Path(path))
    if Path(complete).exists():  # a broken one: nobody loads that, and nobody saves twice what is whole
        _discard(Path(complete))
    _end_with(parent)  # a run started anew may already clear up
    Path(path).rename(complete)
    _sync_folder(Path(complete).parent)
    left = []
    for old in remove:
        try:
            _discard(Path(old))
        except OSError as exc:
            left.append(f"{exc.filename or old}: {exc.strerror}")
    return {"left": left}


def _discard(folder: Path) -> None:
    """Remove a checkpoint, which is at no moment one with files missing."""
    aside = folder
    if not folder.name.endswith(_OLD):
        aside = folder.with_name(f"{folder.name}{_OLD}")
        folder.rename(aside)
    shutil.rmtree(aside)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _end_with(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
