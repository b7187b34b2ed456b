"""Runs on the cluster: tells what is added to a job's logs. Standard library only, Python 3.9.

    python3 -c THIS_FILE FOLDER ONCE OFFSETS TASK

``OFFSETS`` is a JSON object, log name -> bytes already told. ``TASK`` is the number of an array's task whose
logs alone are told, or empty. Each answer is a JSON object a line:
``{"log": name, "at": offset, "data": base64}``, and ``{}`` now and then as a sign of life. With ``ONCE`` = 1
it tells what there is and ends. ``{"gone": 1}`` says that the folder is not there. A log that is not there
yet, or became shorter (a requeue), is no error.
"""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import sys
import time

LOG = re.compile(r"(stdout|stderr)(-[0-9]+)?\.log")
CHUNK = 1 << 16
PAUSE_S = 0.2
ALIVE_EVERY = 5  # looks


def tell(answer: dict[str, str | int]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def tell_new(folder: str, name: str, offset: int) -> int:
    """Tell what a log holds from ``offset`` on; returns the new offset."""
    try:
        fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return offset
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return offset
        if status.st_size < offset:
            offset = 0
        while True:
            data = os.pread(fd, CHUNK, offset)
            if not data:
                return offset
            tell({"log": name, "at": offset, "data": base64.b64encode(data).decode("ascii")})
            offset += len(data)
    finally:
        os.close(fd)


def main(folder: str, once: bool, offsets: dict[str, int], task: str) -> None:
    log = re.compile(rf"(stdout|stderr)-{task}\.log") if task else LOG
    looks = 0
    while True:
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if log.fullmatch(entry.name))
        except FileNotFoundError:
            names = []
            tell({"gone": 1})
        except OSError:
            names = []
        for name in names:
            offsets[name] = tell_new(folder, name, offsets.get(name, 0))
        if once:
            return
        if looks % ALIVE_EVERY == 0:
            tell({})
        looks += 1
        time.sleep(PAUSE_S)


main(sys.argv[1], sys.argv[2] == "1", json.loads(sys.argv[3]), sys.argv[4])
