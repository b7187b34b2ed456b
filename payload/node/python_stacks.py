"""Reads the stacks of Python processes. Uses only the standard library of Python 3.8 or newer."""

from __future__ import annotations

import json
import linecache
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from payload.node import task
from payload.node.rank import STACK_FILE, STACK_SIGNAL

MOST_SOURCE_CHARACTERS = 80
# How long a process may take to print its stacks, and py-spy to read them.
DUMP_S = 1.0
SPY_S = 10.0
_LIBRARY = re.compile(r"/lib(?:64)?/python\d|^<|payload/node/rank\.py$")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Frame(NamedTuple):
    """A call in a Python stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line}, in {self.function}'


def python_stacks(pid: int) -> dict[str, list[Frame]]:
    """Return thread -> stack from the innermost call on, the main thread first. Empty: it is not
    Python.

    A rank that rank.py started prints its stacks itself. py-spy reads those of other programs and
    of stopped processes.
    """
    return _own_stacks(pid) or _spied_stacks(pid)


def _own_stacks(pid: int) -> dict[str, list[Frame]]:
    """Have a process print its stacks, and return them."""
    status = dict(line.split(":\t", 1) for line in task.text_of(f"/proc/{pid}/status").splitlines())
    handled = int(status.get("SigCgt", "0"), 16) >> (STACK_SIGNAL - 1) & 1
    path = next(_links_to(pid, f"/memfd:{STACK_FILE} (deleted)"), "")
    if not handled or not path or not status.get("State", "").startswith(("R", "S")):
        return {}
    try:
        before = os.stat(path).st_size
        os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + DUMP_S
        after = -1
        while time.monotonic() < deadline and (after <= before or after != os.stat(path).st_size):
            after = os.stat(path).st_size
            time.sleep(0.02)
        with open(path, errors="replace") as file:
            file.seek(before)
            return _parse(file.read())
    except OSError:
        return {}


def _links_to(pid: int, target: str) -> Iterator[str]:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            if os.readlink(path) == target:
                yield path


def _parse(text: str) -> dict[str, list[Frame]]:
    """Parse the output of faulthandler, which prints the main thread last."""
    stacks: dict[str, list[Frame]] = {}
    for line in text.splitlines():
        match = _FRAME.match(line)
        if match and stacks:
            [*stacks.values()][-1].append(Frame(match[3], match[1], int(match[2])))
        elif "hread" in line:
            stacks[line.partition(" (")[0].replace("Current thread", "Thread")] = []
    return {name: stacks[name] for name in reversed([*stacks])}


def _spied_stacks(pid: int) -> dict[str, list[Frame]]:
    spy = os.path.join(os.path.dirname(sys.executable), "py-spy")
    try:
        command = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, timeout=SPY_S, check=True)
        threads = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    threads.sort(key=lambda thread: thread["os_thread_id"] != pid)
    return {
        f"Thread {thread['os_thread_id']}": [
            Frame(frame["name"].rpartition(".")[2], frame["filename"], frame["line"])
            for frame in thread["frames"]
        ]
        for thread in threads
    }


def place_of(pid: int, stack: Sequence[Frame]) -> tuple[str, str]:
    """Return the innermost place of a stack that is not in a library, such as train.py:88, and its
    source.

    The place is relative to the current folder of the process, if the file is in it.
    """
    frame = next(
        (frame for frame in stack if not _LIBRARY.search(frame.file)), stack[0] if stack else None
    )
    if frame is None:
        return "", ""
    is_absolute = frame.file.startswith("/")
    folder = ""
    with suppress(OSError):
        folder = os.path.realpath(f"/proc/{pid}/cwd")
    name = frame.file[len(folder) + 1 :] if frame.file.startswith(f"{folder}/") else frame.file
    # The path as the process sees it, which may be in a container.
    path = f"/proc/{pid}/root{frame.file}" if is_absolute else f"/proc/{pid}/cwd/{frame.file}"
    source = ""
    # The file may be in no valid encoding, or may have changed.
    with suppress(SyntaxError, ValueError):
        source = linecache.getline(path, frame.line).strip()
    return f"{'/'.join(name.split('/')[-2:])}:{frame.line}", source[:MOST_SOURCE_CHARACTERS]
