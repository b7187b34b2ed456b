"""Sends new output from a job's logs. Runs on the cluster: standard library only, Python 3.9.

    main(FOLDER, HOW, OFFSETS, TASK, RANK, MOST)

``HOW`` is ``once``, or ``follow`` to run until killed. ``OFFSETS`` is a JSON object with the number
of bytes of each log that were sent before. ``TASK`` selects a task of an array; empty: all.
``RANK`` selects the log of a rank, or of ``all`` ranks; empty: the job's logs. If ranks have no
logs, rank 0 has the job's logs.
``MOST``: of a log of which nothing was sent before, at most this many bytes at its end are sent; 0:
    all.

Each line of output is a JSON object: ``{"log": name, "at": offset, "data": base64}``, ``{}`` as a
keep-alive, ``{"gone": 1}`` if the folder does not exist, or ``{"unread": reason}`` if it can't be
read. A log that does not exist yet, is not a file, or has become shorter (a requeue) is not an
error.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import time

from clusterctl.scheduler.ends.remote_logs import RANK_LOG
from clusterctl.transport.remote_open import open_file, open_folder

LOG = re.compile(r"(stdout|stderr)(?:-([0-9]+))?\.log")
TASK = re.compile(r"task-([0-9]+)")
RANK_LOGS = "rank-logs"
CHUNK = 1 << 16
MOST_LOGS = 5000
PAUSE_S = 0.2
ALIVE_EVERY = 5  # rounds


def emit(answer: dict[str, str | int]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def send_new(folder: str, name: str, offset: int, most: int = 0) -> int:
    """Print the bytes of a log from ``offset`` to its end as JSON lines. Return the end's offset.

    most: if nothing was sent before, the maximum number of bytes, at the log's end. 0: all.
    Bytes that are added meanwhile wait for the next call: a fast-growing log must not delay other
    logs.
    """
    try:
        fd = open_file(os.fsencode(folder), os.fsencode(name))
    except OSError:
        return offset
    try:
        size = os.fstat(fd).st_size
        if size < offset:
            offset = 0
        if most and not offset:
            offset = max(0, size - most)
        while data := os.pread(fd, min(CHUNK, size - offset), offset):
            emit({"log": name, "at": offset, "data": base64.b64encode(data).decode("ascii")})
            offset += len(data)
        return offset
    finally:
        os.close(fd)


def select_logs(folder: str, task: str, rank: str) -> list[str]:
    """Return paths of logs in ``folder``, by array task ("": all) and rank ("": the job's own)."""
    with os.scandir(folder) as entries:
        # stdout first, because an error is the last that a program writes; shorter names are lower
        # numbers.
        names = sorted(
            (entry.name for entry in entries), key=lambda name: ("stderr" in name, len(name), name)
        )
    logs = {name: match[2] or "" for name in names if (match := LOG.fullmatch(name))}
    paths: list[str] = []
    folders = [("", RANK_LOGS)] + [
        (m[1], f"{m[0]}/{RANK_LOGS}") for m in map(TASK.fullmatch, names) if m
    ]
    for task_of_folder, path in folders if rank else ():
        # A job without a launcher has no logs in this folder, but may have stacks.
        if task in ("", task_of_folder) and (ranks := ranks_in(folder, path)):
            logs = {name: number for name, number in logs.items() if number != task_of_folder}
            paths += [f"{path}/{number}.log" for number in ranks if rank in ("all", number)]
    if rank in ("", "all", "0"):
        paths += [name for name, number in logs.items() if task in ("", number)]
        # The logs of a packed task, in its own folder. They may not exist.
        paths += [f"task-{task}/{name}.log" for name in ("stdout", "stderr") if task]
    return paths[:MOST_LOGS]


def ranks_in(folder: str, path: str) -> list[str]:
    """Return the sorted numbers of ranks with a log in ``folder``/``path``, which may not exist."""
    try:
        fd = open_folder(os.fsencode(folder), os.fsencode(path))
    except OSError:
        return []
    try:
        return sorted((m[1] for m in map(RANK_LOG.fullmatch, os.listdir(fd)) if m), key=int)
    finally:
        os.close(fd)


def main(folder: str, how: str, begun: str, *selection: str) -> None:
    task, rank, most = selection
    offsets: dict[str, int] = json.loads(begun)
    rounds = 0
    while True:
        try:
            names = select_logs(folder, task, rank)
        except FileNotFoundError:
            names = []
            emit({"gone": 1})
        except OSError as exc:
            names = []
            emit({"unread": exc.strerror or str(exc)})
        for name in names:
            offsets[name] = send_new(folder, name, offsets.get(name, 0), int(most))
        if how == "once":
            return
        if rounds % ALIVE_EVERY == 0:
            emit({})
        rounds += 1
        time.sleep(PAUSE_S)
