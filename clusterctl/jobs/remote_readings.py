"""Sends the new data in the folders of running jobs: telemetry, metrics, events and ends of logs.
Runs on the cluster: standard library only, Python 3.9.

    main()

It reads a JSON list from stdin, with an object for each job or task of an array: ``top``, the job's
folder, ``task``, the number of the task as text, or "", ``files``, the path of the program's folder
below ``top``, and ``sent``, file -> number of bytes of it that were sent before. Its answer is a
JSON list with an object for each job: file -> [offset, base64 of the bytes from there on].

The files are ``host/NAME``, the first line of a host's telemetry, ``telemetry/NAME``, ``metrics``,
``events``, ``stdout`` and ``stderr``. Only the last of a file's new bytes are sent.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from itertools import islice
from typing import Any

from clusterctl.scheduler.ends.remote_logs import log_suffix, own_prefix
from clusterctl.transport.remote_open import open_file, open_folder

# The most bytes that are sent of a file at a time.
# A sample of payload/node/rank_use.py's MOST_RANKS ranks must fit.
OF_TELEMETRY = 1 << 16
OF_METRICS = 1 << 18
OF_EVENTS = 1 << 16
OF_LOGS = 1 << 12
# A job may write any number of files.
MOST_HOSTS = 1024
HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})\.jsonl")


def added(folder: str, path: str, sent: int, most: int) -> tuple[int, bytes] | None:
    """Return (offset, bytes) of a file's new data after ``sent`` bytes, at most the last ``most``
    bytes. None if the file has no new data or does not exist.

    A file that has become shorter, such as that of a requeued job, is sent again.
    """
    try:
        fd = open_file(os.fsencode(folder), os.fsencode(path))
    except OSError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size == sent:
            return None
        begin = max(size - most, sent if sent < size else 0)
        return begin, os.pread(fd, size - begin, begin)
    finally:
        os.close(fd)


def hosts_of(folder: str) -> list[str]:
    """Return the names of the hosts with telemetry in a job's folder."""
    try:
        fd = open_folder(os.fsencode(folder), b"telemetry")
    except OSError:
        return []
    try:
        with os.scandir(fd) as entries:
            found = (HOST.fullmatch(entry.name) for entry in islice(entries, 2 * MOST_HOSTS))
            return sorted(match[1] for match in found if match)[:MOST_HOSTS]
    finally:
        os.close(fd)


def first_line(folder: str, path: str) -> bytes:
    """Return the first line of a file, as far as it is read; empty if there is no such file."""
    try:
        fd = open_file(os.fsencode(folder), os.fsencode(path))
    except OSError:
        return b""
    try:
        line, end, _ = os.pread(fd, OF_TELEMETRY, 0).partition(b"\n")
        return line + end
    finally:
        os.close(fd)


def gained(job: dict[str, Any]) -> dict[str, tuple[int, bytes]]:
    """Return the new data in the files of a job: file -> (offset, bytes)."""
    top = job["top"]
    sent = job["sent"]
    own = own_prefix(job["task"])
    suffix = log_suffix(job["task"])
    files = [
        ("metrics", f"{job['files']}/{own}metrics.jsonl", OF_METRICS),
        ("events", f"{own}job.events", OF_EVENTS),
        ("stdout", f"stdout{suffix}.log", OF_LOGS),
        ("stderr", f"stderr{suffix}.log", OF_LOGS),
    ]
    answer = {}
    for host in hosts_of(f"{top}/{own}"):
        path = f"{own}telemetry/{host}.jsonl"
        files.append((f"telemetry/{host}", path, OF_TELEMETRY))
        if f"host/{host}" not in sent and (line := first_line(top, path)):
            answer[f"host/{host}"] = 0, line
    for name, path, most in files:
        new = added(top, path, sent.get(name, 0), most)
        if new is not None:
            answer[name] = new
    return answer


def main() -> None:
    answers = [gained(job) for job in json.load(sys.stdin)]
    encoded = [
        {name: [at, base64.b64encode(data).decode("ascii")] for name, (at, data) in answer.items()}
        for answer in answers
    ]
    json.dump(encoded, sys.stdout)
