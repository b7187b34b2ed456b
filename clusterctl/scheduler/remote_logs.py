"""Program that reads the ends of a job's logs. Runs on the cluster and locally: standard library, Python 3.9.

    main(FOLDER, TASK)

TASK is the number of an array task, or "". The answer is a JSON object. ``stdout``, ``stderr``: end of each
log, "" if it is missing or not a file. ``ranks``: rank -> end of its own log. ``ends``: rank -> when and how
it failed, as recorded by payload/node/task.py, or "" if the rank was killed before it could write the record.
``gone``: whether the folder is missing.
"""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import islice
from typing import Any

from clusterctl.transport.remote_open import open_file

END = 1 << 16  # of a log
RANKS_END = 1 << 20  # of all ranks
MOST_RANKS = 2048
# A restarted job appends to its logs (payload/node/task.py).
RESTARTED = re.compile(r"(?m)^clusterctl: restart [0-9]+ of this job$")
RANK_LOG = re.compile(r"([0-9]{1,6})\.log")
RANK_END = re.compile(r"([0-9]{1,6})\.end")
RECORD = 300  # bytes


def end_of(folder: str, path: str, most: int) -> str:
    """Return the last ``most`` bytes of a log as text, without output from before the job's last restart."""
    try:
        fd = open_file(os.fsencode(folder), os.fsencode(path))
    except OSError:
        return ""
    try:
        text = os.pread(fd, most, max(0, os.fstat(fd).st_size - most)).decode(errors="replace")
        return RESTARTED.split(text)[-1]
    finally:
        os.close(fd)


def ends(folder: str, task: str) -> dict[str, Any]:
    """Return the ends of the logs of a job and its ranks, as the JSON object that the module describes."""
    suffix = f"-{task}" if task else ""
    ranks_folder = (f"task-{task}/" if task else "") + "rank-logs"
    try:
        with os.scandir(os.path.join(folder, ranks_folder)) as entries:  # noqa: PTH118
            names = [entry.name for entry in islice(entries, 2 * MOST_RANKS)]
    except OSError:
        names = []
    logs = sorted(filter(None, map(RANK_LOG.fullmatch, names)), key=lambda match: int(match[1]))
    most = RANKS_END // max(16, len(logs))
    return {
        "stderr": end_of(folder, f"stderr{suffix}.log", END),
        "stdout": end_of(folder, f"stdout{suffix}.log", END),
        "ranks": {log[1]: end_of(folder, f"{ranks_folder}/{log[0]}", most) for log in logs},
        "ends": {
            record[1]: end_of(folder, f"{ranks_folder}/{record[0]}", RECORD)
            for record in map(RANK_END.fullmatch, names)
            if record
        },
        "gone": not os.path.isdir(folder),  # noqa: PTH112
    }


def main(folder: str, task: str) -> None:
    json.dump(ends(folder, task), sys.stdout)
