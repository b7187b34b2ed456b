"""Tells what is added to a job's logs. Runs on the cluster: standard library only, Python 3.9.

    main(FOLDER, HOW, OFFSETS, TASK, RANK)

``OFFSETS`` is a JSON object, log name -> bytes already told. ``TASK`` is the number of an array's task whose
logs alone are told, or empty. With RANK, the log of that rank is told instead, or those of ``all``; where
none are recorded, the job's logs are those of rank 0. Each answer is a JSON object a line:
``{"log": name, "at": offset, "data": base64}``, and ``{}`` now and then as a sign of life. ``HOW`` is
``follow`` (until it is ended) or ``once`` (all there is).
``{"gone": 1}`` says that the folder is not there. A log that is not there yet, is no file, or became shorter
(a requeue), is no error.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import time

from clusterctl.scheduler.remote_logs import RANK_LOG
from clusterctl.transport.remote_open import open_file, open_folder

LOG = re.compile(r"(stdout|stderr)(?:-([0-9]+))?\.log")
TASK = re.compile(r"task-([0-9]+)")
RANK_LOGS = "rank-logs"
CHUNK = 1 << 16
MOST_LOGS = 5000
PAUSE_S = 0.2
ALIVE_EVERY = 5  # looks


def emit(answer: dict[str, str | int]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def tell_new(folder: str, name: str, offset: int) -> int:
    """Tell what a log holds now from ``offset`` on; returns the new offset.

    What is added meanwhile waits for the next look: other logs have their turn, also beside one that grows
    faster than it is read.
    """
    try:
        fd = open_file(os.fsencode(folder), os.fsencode(name))
    except OSError:
        return offset
    try:
        size = os.fstat(fd).st_size
        if size < offset:
            offset = 0
        while data := os.pread(fd, min(CHUNK, size - offset), offset):
            emit({"log": name, "at": offset, "data": base64.b64encode(data).decode("ascii")})
            offset += len(data)
        return offset
    finally:
        os.close(fd)


def names_of(folder: str, task: str, rank: str) -> list[str]:
    """The names of the logs to tell, at most so many."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    logs = {name: match[2] or "" for name in names if (match := LOG.fullmatch(name))}
    found: list[str] = []
    folders = [("", RANK_LOGS)] + [(m[1], f"{m[0]}/{RANK_LOGS}") for m in map(TASK.fullmatch, names) if m]
    for of_task, path in folders if rank else ():
        if task in ("", of_task) and (ranks := ranks_in(folder, path)) is not None:
            logs = {name: number for name, number in logs.items() if number != of_task}
            found += [f"{path}/{one}.log" for one in ranks if rank in ("all", one)]
    if rank in ("", "all", "0"):
        found += [name for name, number in logs.items() if task in ("", number)]
    return found[:MOST_LOGS]


def ranks_in(folder: str, path: str) -> list[str] | None:
    """The ranks whose output is recorded there; None if that folder is not there."""
    try:
        fd = open_folder(os.fsencode(folder), os.fsencode(path))
    except OSError:
        return None
    try:
        return sorted((m[1] for m in map(RANK_LOG.fullmatch, os.listdir(fd)) if m), key=int)  # noqa: PTH208
    finally:
        os.close(fd)


def main(folder: str, how: str, begun: str, task: str, rank: str = "") -> None:
    offsets: dict[str, int] = json.loads(begun)
    looks = 0
    while True:
        try:
            names = names_of(folder, task, rank)
        except FileNotFoundError:
            names = []
            emit({"gone": 1})
        except OSError:
            names = []
        for name in names:
            offsets[name] = tell_new(folder, name, offsets.get(name, 0))
        if how == "once":
            return
        if looks % ALIVE_EVERY == 0:
            emit({})
        looks += 1
        time.sleep(PAUSE_S)
