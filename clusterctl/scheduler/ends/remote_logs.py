"""Program that reads the ends of jobs' logs. Runs on the cluster and locally: standard library,
Python 3.9.

    main("ends", FOLDER, PROGRAM, WHAT)
    main("keep", FOLDER)
    main("events", FOLDER...)
    main("records")

"ends" reads a JSON object from stdin: of each task ("": the job itself) when it ended, in Unix
seconds (null: unknown), and whether it completed. Its answer is a JSON object: ``packed``, the end of
packed.jsonl, if there is the folder; and ``tasks``, by WHAT: "kept" is what was judged of the end of
each task and kept here, if that was later than its end; "logs" are the ends of its logs; "kept or
logs" is the first, if there is any, or else the second. "keep" reads from stdin what to keep.
PROGRAM is the folder of the job's program.

"records" reads a JSON list of folders from stdin: an argument has at most 128 KiB. Its answer is a
JSON list: for each job's folder null if it does not exist, otherwise a JSON object with a record
for each task of an array that has started, or for "", the job itself. A record has ``events``, the
events of the last attempt, ``written``, when the job last wrote a file, in Unix seconds, and
``error``, why the events can't be read. An array's record "" has the reason why the tasks without a
record were not read.

The answer of "events" is a JSON list with the end of each job.events, "" if it can't be read.

The ends of the logs of a task are a JSON object. ``now``: when they were read, by the clock of this
host. ``stdout``, ``stderr``: end of each log, "" if it is missing or not a file. ``ranks``: rank ->
end of its own log. ``ends``: rank -> when and how it failed, as recorded by payload/node/task.py, or
"" if the rank was killed before it could write the record.
``events``: end of job.events, of all attempts of the job. The rest is about the job's last attempt.
``gone``: whether the folder is missing. ``full``: whether its file system has no room left.
``nonfinite``: of a completed task, the first line of its metrics with NaN or an infinite number.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import islice
from typing import Any

from clusterctl.scheduler.history import EVENTS_FILE, attempts_of, restart_in, this_attempt
from clusterctl.transport.remote_open import open_file

END = 1 << 16  # of a log
# The limit for the logs of all ranks of a job, or for the events of all jobs, together.
ALL_END = 1 << 20
MOST_RANKS = 2048
STARTED_TASK = re.compile(r"(?:stdout|stderr)(?:-([0-9]{1,10}))?\.log")
RANK_LOG = re.compile(r"([0-9]{1,6})\.log")
RANK_END = re.compile(r"([0-9]{1,6})\.end")
RECORD = 300  # bytes
ROOM = 1 << 12  # bytes; a log with less is cut
MOST_TASKS = 20000
# What was judged of each task (judge.py).
ENDS_FILE = "job.ends"
PACKED_FILE = "packed.jsonl"
MOST_KEPT = 64 << 20
MOST_PACKED = 1 << 22
NONFINITE = r'": *-?(NaN|Infinity)'


def end_of(folder: str, path: str, most: int) -> str:
    """Return the last ``most`` bytes of a file as text; "" if it is missing or not a file."""
    try:
        fd = open_file(os.fsencode(folder), os.fsencode(path))
    except OSError:
        return ""
    try:
        return os.pread(fd, most, max(0, os.fstat(fd).st_size - most)).decode(errors="replace")
    finally:
        os.close(fd)


def of_attempt(text: str, restarts: int, most: int) -> str | None:
    """Return the part of a log's end that the attempt after ``restarts`` restarts wrote, or None
    without it.

    most: number of bytes that were read. The start of a longer log is unknown.
    """
    noted = restart_in(text)
    if noted is not None:
        return this_attempt(text) if noted >= restarts else None
    # The note of the last restart may be in the part of the log that was not read.
    is_cut = len(text.encode()) >= most
    return text if restarts == 0 or is_cut else None


def own_prefix(task: str) -> str:
    """Return the path of a task's own folder, which ends in a slash. ``task``: "" if the job has no
    tasks.
    """
    return f"task-{task}/" if task else ""


def log_suffix(task: str) -> str:
    """Return what distinguishes the names of a task's logs in the job's folder."""
    return f"-{task}" if task else ""


def ends(folder: str, task: str, all_end: int = ALL_END) -> dict[str, Any]:
    """Return the ends of the logs of a job and its ranks, as the JSON object that the module
    describes. all_end: the limit for the logs of all its ranks together, in bytes.
    """
    now = time.time()
    own = own_prefix(task)
    suffix = log_suffix(task)
    events = end_of(folder, f"{own}{EVENTS_FILE}", END)
    restarts = attempts_of(events)[-1].number
    try:
        with os.scandir(os.path.join(folder, f"{own}rank-logs")) as entries:
            names = [entry.name for entry in islice(entries, 2 * MOST_RANKS)]
    except OSError:
        names = []
    logs = sorted(filter(None, map(RANK_LOG.fullmatch, names)), key=lambda match: int(match[1]))
    most = all_end // max(16, len(logs))
    ranks = {
        log[1]: of_attempt(end_of(folder, f"{own}rank-logs/{log[0]}", most), restarts, most)
        for log in logs
    }
    # A packed task has its logs in its folder.
    stdout, stderr = (
        end_of(folder, f"{name}{suffix}.log", END) or end_of(folder, f"{own}{name}.log", END)
        for name in ("stdout", "stderr")
    )
    return {
        "now": now,
        "stderr": of_attempt(stderr, restarts, END) or "",
        "stdout": of_attempt(stdout, restarts, END) or "",
        "ranks": {rank: text for rank, text in ranks.items() if text is not None},
        "ends": {
            record[1]: end_of(folder, f"{own}rank-logs/{record[0]}", RECORD)
            for record in map(RANK_END.fullmatch, names)
            # A rank that has not started in this attempt has the record of an earlier attempt.
            if record and ranks.get(record[1], "") is not None
        },
        "events": events,
        "gone": not os.path.isdir(folder),
        "full": is_full(folder),
    }


def is_full(folder: str) -> bool:
    """Return whether a folder's file system has no room for a file. False if that is unknown."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < ROOM or bool(room.f_files and not room.f_favail)


def records(folder: str, most: int = MOST_TASKS) -> dict[str, dict[str, Any]] | None:
    """Return the records of a job's tasks, as the module describes. most: number of tasks that are
    read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    except OSError as exc:
        return {"": unread(exc.strerror or str(exc))}
    tasks = {match[1] or "" for match in map(STARTED_TASK.fullmatch, names) if match}
    read = sorted(tasks, key=lambda task: (len(task), task))[:most]
    answer = {task: record(folder, task) for task in read}
    return (
        answer if len(tasks) == len(read) else {**answer, "": unread(f"only {most} tasks are read")}
    )


def unread(reason: str) -> dict[str, Any]:
    return {"events": "", "written": 0, "error": reason}


def record(folder: str, task: str) -> dict[str, Any]:
    """Return the record of a task. ``task``: "" if the job has no tasks."""
    own = own_prefix(task)
    suffix = log_suffix(task)
    events_file = f"{own}{EVENTS_FILE}"
    written_files = (
        events_file,
        f"{own}heartbeat",
        f"stdout{suffix}.log",
        f"stderr{suffix}.log",
    )
    events = end_of(folder, events_file, END)
    last = attempts_of(events)[-1]
    return {
        "events": "\n".join(json.dumps(event) for event in (last.start, *last.events) if event),
        "written": max(modified(folder, name) for name in written_files),
        "error": "" if events else reading_error(folder, events_file),
    }


def reading_error(folder: str, path: str) -> str:
    """Return why a file can't be read, "" if it can or does not exist."""
    try:
        os.close(open_file(os.fsencode(folder), os.fsencode(path)))
    except FileNotFoundError:
        return ""
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def modified(folder: str, name: str) -> float:
    try:
        return os.stat(os.path.join(folder, name)).st_mtime
    except OSError:
        return 0


def judged(folder: str, program: str, what: str, tasks: dict[str, Any]) -> dict[str, Any]:
    """Return the answer for "ends", as the module describes."""
    kept = kept_ends(folder) if "kept" in what else {}
    answer: dict[str, Any] = {}
    for task, (ended, has_completed) in tasks.items():
        own = kept.get(task)
        judged_at = own.get("judged") if isinstance(own, dict) else None
        # A job that ended again since is judged again.
        if isinstance(judged_at, (int, float)) and judged_at >= (ended or 0):
            answer[task] = {"kept": own}
        elif "logs" in what:
            answer[task] = ends(folder, task, max(ALL_END // 8, ALL_END // len(tasks)))
            if has_completed:
                metrics = os.path.join(program, own_prefix(task), "metrics.jsonl")
                answer[task]["nonfinite"] = first_nonfinite(metrics)
    if not os.path.isdir(folder):
        return {"tasks": answer}
    return {"packed": end_of(folder, PACKED_FILE, MOST_PACKED), "tasks": answer}


def kept_ends(folder: str) -> dict[str, Any]:
    """Return what was kept of the ends of a job's tasks; {} if that can't be read."""
    try:
        kept = json.loads(end_of(folder, ENDS_FILE, MOST_KEPT))
    except (ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def keep(folder: str, judgements: dict[str, Any]) -> None:
    """Add to what is kept of the ends of a job's tasks. Nothing is kept where that is impossible,
    such as in the folder of another user.
    """
    try:
        fd, name = tempfile.mkstemp(dir=folder, prefix=f".{ENDS_FILE}.")
    except OSError:
        return
    try:
        with open(fd, "w", encoding="utf-8") as file:
            json.dump({**kept_ends(folder), **judgements}, file)
        os.replace(name, os.path.join(folder, ENDS_FILE))
    except OSError:
        os.unlink(name)


def first_nonfinite(metrics: str) -> str:
    """Return the first line of a file with NaN or an infinite number, or ""."""
    if not os.path.isfile(metrics):
        return ""
    argv = ["grep", "-m1", "-aE", NONFINITE, metrics]
    found = subprocess.run(argv, capture_output=True, check=False).stdout
    return found[:END].decode(errors="replace")


def main(kind: str, *words: str) -> None:
    if kind == "ends":
        folder, program, what = words
        json.dump(judged(folder, program, what, json.load(sys.stdin)), sys.stdout)
    elif kind == "keep":
        keep(words[0], json.load(sys.stdin))
    elif kind == "records":
        json.dump([records(folder) for folder in json.load(sys.stdin)], sys.stdout)
    else:
        most = ALL_END // max(16, len(words))
        json.dump([end_of(folder, EVENTS_FILE, most) for folder in words], sys.stdout)
