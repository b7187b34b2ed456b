"""Shows the progress of a job from its files. Uses only the standard library of Python 3.8 or
newer.

    python3 -IS observe.py watch FOLDER
    python3 -IS observe.py results FOLDER

`watch` prints a JSON object with the keys of ``look``, a few times a second, until its output is
closed. `results` prints a JSON object with the keys of ``results``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from payload.node import history, restarts

# The folder of the program below the job's, as clusterctl/state/ledger.py names it.
FILES = "files"
METRICS = f"{FILES}/metrics.jsonl"
LOOK_S = 0.25
STEP_S = 0.02
CHUNK = 1 << 20
# Differs between two files with the same tensors, because it depends on the name of the file.
_SERIALIZATION_ID = ".data/serialization_id"

if TYPE_CHECKING:
    # The number in its name (None: no number), the time of its last write, its size in bytes, and
    # the seconds from the creation of the file to its rename (None: unknown).
    Checkpoint = tuple[int | None, float, int, float | None]


class FolderWatch:
    """The observation of a job's folder, which is the current folder."""

    def __init__(self) -> None:
        self._step = 0
        self._checkpoints: dict[tuple[str, float], Checkpoint] = {}

    def look(self) -> dict[str, object]:
        """Observe the folder for ``LOOK_S`` seconds.

        Return the time, the text of job.events, changes of the step since the last call as pairs of
        time and step, and the checkpoints by path.
        """
        # If the events have the job's end, the look at steps and checkpoints comes after the end.
        events = restarts.end_of_file(history.EVENTS_FILE)
        steps = []
        end = time.monotonic() + LOOK_S
        while time.monotonic() < end:
            step = restarts.last_step("heartbeat", [FILES])
            # While a program replaces the text of its heartbeat, the file may be empty.
            if step and step != self._step:
                self._step = step
                steps.append((time.time(), step))
            time.sleep(STEP_S)
        checkpoints = dict(self._whole_checkpoints())
        return {"time": time.time(), "events": events, "steps": steps, "checkpoints": checkpoints}

    def _whole_checkpoints(self) -> Iterator[tuple[str, Checkpoint]]:
        for path, number, changed in restarts.checkpoints(
            FILES, time.monotonic() + restarts.SEARCH_S
        ):
            key = path, changed
            if key not in self._checkpoints:
                self._checkpoints[key] = number, changed, size_of(path), seconds_to_write(path)
            yield path, self._checkpoints[key]


def size_of(path: str) -> int:
    """Return the size of a file, or of all files below a folder."""
    with suppress(OSError):
        if os.path.isdir(path):
            return sum(size_of(os.path.join(path, name)) for name in os.listdir(path))
        return os.path.getsize(path)
    return 0


def seconds_to_write(path: str) -> float | None:
    """Return the seconds from the creation of a file or folder to the rename to its name, or
    None.
    """
    with suppress(OSError, ValueError):
        command = ["stat", "--format=%.6W %.6Z", "--", path]
        texts = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False
        ).stdout.split()
        created, renamed = map(float, texts)
        return round(renamed - created, 6) if created else None
    return None


def results() -> dict[str, object]:
    """Return hashes of checkpoints and of other files that the job wrote, by path, and lines of its
    output.

    A checkpoint is a mapping from its files to their hashes. The newest checkpoint is the last.
    Lines are those of the last attempt with their counts; numbers in lines are replaced.
    """
    attempts = history.of_chain(history.attempts_of(restarts.end_of_file(history.EVENTS_FILE)))
    starts = [each.started for each in attempts if each.started is not None]
    since = min(starts, default=0.0)
    deadline = time.monotonic() + restarts.SEARCH_S
    times = [(changed, path) for path, _, changed in restarts.checkpoints(FILES, deadline)]
    written = [path for changed, path in sorted(times) if changed >= since]
    checkpoints = {path: _tensors(dict(_hashes(path, since))) for path in written}
    outputs = {
        name: digest
        for entry in sorted(os.listdir(FILES))
        if not entry.endswith(".log")
        for name, digest in _hashes(f"{FILES}/{entry}", since)
        if name != METRICS
        and not any(name == path or name.startswith(f"{path}/") for path in checkpoints)
    }
    log = history.this_attempt(restarts.end_of_file("stdout.log"))
    lines = Counter(re.sub(r"\d+", "N", line) for line in log.splitlines() if line.strip())
    return {"checkpoints": checkpoints, "outputs": outputs, "lines": lines}


def _tensors(hashes: dict[str, str]) -> dict[str, str]:
    """Return the hashes of files with tensors, if there are any. Other files may contain times."""
    tensors = {
        path: digest for path, digest in hashes.items() if restarts.CHECKPOINT_FILE.fullmatch(path)
    }
    return tensors or hashes


def _hashes(path: str, since: float) -> Iterator[tuple[str, str]]:
    """Yield path and hash of a file, or of all files below a folder, that were written after a
    time.
    """
    with suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            for name in sorted(os.listdir(path)):
                yield from _hashes(os.path.join(path, name), since)
        elif os.path.isfile(path) and os.stat(path).st_mtime >= since:
            yield os.path.normpath(path), hash_of(path)


def hash_of(path: str) -> str:
    """Return a hash of a file's content. In a zip file, such as torch.save writes, only tensors
    count.
    """
    digest = hashlib.sha256()
    with suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            # The first part of the name is the name with which the file was created.
            name = info.filename.partition("/")[2] or info.filename
            if name != _SERIALIZATION_ID:
                digest.update(f"{name} {info.CRC} {info.file_size}\n".encode())
        return digest.hexdigest()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def emit(answer: dict[str, object]) -> None:
    """Print a JSON object on a line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(verb: str, folder: str) -> None:
    """Run the program, with the arguments that the module describes."""
    os.chdir(folder)
    if verb == "results":
        emit(results())
        return
    watch = FolderWatch()
    # The program ends when its output is closed.
    with suppress(BrokenPipeError):
        while True:
            emit(watch.look())


if __name__ == "__main__":
    main(*sys.argv[1:])
