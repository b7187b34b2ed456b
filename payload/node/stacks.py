"""Reads the stacks of a job's ranks on this node, by py-spy or a debugger. Uses only the standard
library of Python 3.8 or newer.

    python -IS stacks.py FOLDER

This program writes the stacks of each rank to FOLDER/rank-logs/RANK.stack. It prints a JSON object
per rank, with the keys of ``RankStacks`` but ``stack``, and at the end another for the node:
``{"node": NAME, "ranks": COUNT}``.

py-spy, which payload/requirements.in declares, is beside this program's Python. It reads Python
programs, with the functions in C that they call. Other programs are read by gdb or eu-stack, if the
node has one. Each process is stopped for a moment while it is read.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from payload.node import task
from payload.node.processes import RankProcess, main_process, ranks_here, stat_of
from payload.node.rank import YAMA

# How many processes are read at the same time, and how long each of the at most three programs that
# read a process may take. After ``BEGIN_S``, no further process is read: hang.py waits for
# ``LONGEST_S``.
READERS = 4
READ_S = 10.0
BEGIN_S = 20.0
LONGEST_S = BEGIN_S + 3 * READ_S
MOST_PROCESSES_OF_RANK = 16
MOST_SOURCE_CHARACTERS = 80
# Limits of a printed rank: its workers, and the bytes of each text. slurmstepd sends output in
# messages of at most 1024 bytes, and srun mixes the messages of several nodes, so a longer line
# could be broken.
MOST_WORKERS = 3
MOST_BYTES = 100
# States of a rank. The kernel's letters for other states than running are in ``_STATES``.
RUNNING = "running"
STOPPED = "stopped by a signal"
BLOCKED = "blocked in the kernel"
_STATES = {"T": STOPPED, "t": "stopped by a debugger", "D": BLOCKED}
_NO_TIME = "the other processes took too long"
_NOT_PYTHON = "Failed to find python version"
_LABEL = re.compile(r"^ *(?:Error|\d+): ")
_REFUSED = re.compile("permission denied|not permitted", re.IGNORECASE)
# Files of Python's own library, and of the program that starts ranks.
_LIBRARY = re.compile(r"/lib(?:64)?/python\d|^<|payload/node/rank\.py$")
_THREAD = re.compile(r"(?:Thread \d|TID )")
_SHOWN = re.compile(rf"{_THREAD.pattern}|#\d")
# Separate files with debug symbols, also those of a server, are left out: gdb would need minutes for
# them, and would not tell any more which functions are in a library.
_GDB = (
    *("gdb", "-nx", "-batch"),
    *("-iex", "set debug-file-directory /nonexistent", "-iex", "set debuginfod enabled off"),
    *("-ex", "thread apply all -ascending backtrace 64", "-p"),
)
_EU_STACK = ("eu-stack", "-m", "-n", "64", "-p")
# The command of a debugger, and a function of the program's own file in its output.
_DEBUGGERS = (
    (_GDB, re.compile(r"^#\d+ +(?:0x[0-9a-f]+ in )?(?P<name>[^?].*?) \((?!.* from \S+$)")),
    (_EU_STACK, re.compile(r"^#\d+ +0x[0-9a-f]+ (?P<name>\S+) - (?P<file>.+)$")),
)


class Stack(NamedTuple):
    """The stacks of a process.

    place: the innermost line of the program, such as train.py:88, or its innermost function, such
        as a.out:exchange. source: the text of this line.
    unread: why the stacks could not be read. Empty: they were read.
    """

    lines: tuple[str, ...] = ()
    place: str = ""
    source: str = ""
    unread: str = ""


class RankStacks(NamedTuple):
    """Where a rank is.

    state: a constant of this module. place, source, unread: see ``Stack``; of the rank's main
        process.
    workers: the places, with their source, of the rank's other processes.
    """

    rank: int
    node: str
    pid: int
    state: str
    place: str
    source: str
    unread: str
    workers: tuple[str, ...]
    stack: tuple[str, ...]


def read_ranks(node: str) -> Iterator[RankStacks]:
    """Yield the ranks on this node with their stacks, in order."""
    ranks = sorted(ranks_here().items())
    until = time.monotonic() + BEGIN_S
    with ThreadPoolExecutor(READERS) as readers:
        yield from readers.map(lambda item: _read(item[0], item[1], node, until), ranks)


def _read(number: int, processes: Sequence[RankProcess], node: str, until: float) -> RankStacks:
    main = main_process(processes)
    state = _STATES.get("".join(stat_of(f"/proc/{main.pid}")[:1]), RUNNING)
    others = [process for process in processes if process != main]
    texts: list[str] = []
    stacks: list[Stack] = []
    for process in (main, *others)[:MOST_PROCESSES_OF_RANK]:
        stack = stack_of(process) if time.monotonic() < until else Stack(unread=_NO_TIME)
        stacks.append(stack)
        texts += [f"process {process.pid}: {' '.join(process.words)}", *stack.lines]
        texts += [f"no stack could be read: {stack.unread}"] if stack.unread else []
    own, *of_others = stacks
    workers = {": ".join(filter(None, (each.place, each.source))) for each in of_others}
    named = tuple(sorted(workers - {""}))
    return RankStacks(
        number, node, main.pid, state, own.place, own.source, own.unread, named, (*texts,)
    )


def stack_of(process: RankProcess) -> Stack:
    """Return the stacks of a process, by the first program that can read them."""
    spy = os.path.join(os.path.dirname(sys.executable), "py-spy")
    if not os.access(spy, os.X_OK):
        return Stack(unread=f"there is no {spy}; `clusterctl up`, or `attach`, installs it")
    why = ""
    # py-spy can't read functions in C of a process that is stopped.
    for how in ("--native", "--nonblocking"):
        output, why = _output([spy, "dump", "--json", how, "--pid", str(process.pid)])
        with suppress(ValueError, LookupError, TypeError):
            return _of_python(process.pid, json.loads(output))
    if _NOT_PYTHON not in why:
        return Stack(unread=_reason(why))
    for command, own in _DEBUGGERS:
        if shutil.which(command[0]):
            output, why = _output([*command, str(process.pid)])
            lines = tuple(line for line in output.splitlines() if _SHOWN.match(line))
            if lines[1:]:
                return Stack(lines, _innermost_function(process.pid, lines, own))
            return Stack(unread=_reason(why))
    return Stack(unread="it is no Python program, and this node has neither gdb nor eu-stack")


def _output(command: Sequence[str]) -> tuple[str, str]:
    """Return the output of a program, and its messages: why it failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=READ_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"{os.path.basename(command[0])} did not end within {READ_S:g} s"
    except OSError as exc:
        return "", f"{command[0]}: {exc.strerror}"
    return done.stdout, done.stderr.partition("\nStack backtrace:")[0]


def _reason(said: str) -> str:
    """Return why a program could not read a stack, by its messages, in a single line."""
    scope = task.text_of(YAMA).strip()
    if _REFUSED.search(said) and scope not in ("", "0"):
        return f"ptrace is forbidden by kernel.yama.ptrace_scope={scope}"
    lines = [_LABEL.sub("", line) for line in said.splitlines() if line.strip()]
    return ": ".join(dict.fromkeys(lines[:1] + lines[-1:])) or "the program said nothing"


def _of_python(pid: int, threads: Sequence[Mapping[str, Any]]) -> Stack:
    """Return the stacks that py-spy has printed, the main thread first."""
    ordered = sorted(threads, key=lambda thread: thread["os_thread_id"] != pid)
    lines = []
    for thread in ordered:
        name = thread["thread_name"] or ""
        lines.append(f"thread {thread['os_thread_id']} {name}".rstrip())
        for frame in thread["frames"]:
            number = f":{frame['line']}" if frame["line"] else ""
            lines.append(f"  {frame['name']} ({frame['filename']}{number})")
    frames = [frame for frame in ordered[0]["frames"] if frame["line"]]
    own = [frame for frame in frames if not _LIBRARY.search(frame["filename"])]
    place = next(((each["filename"], each["line"]) for each in own or frames), None)
    return Stack((*lines,), *(_place(pid, *place) if place else ()))


def _place(pid: int, file: str, line: int) -> tuple[str, str]:
    """Return a place such as train.py:88, and the text of this line.

    The place is relative to the current folder of the process, if the file is in it.
    """
    folder = ""
    with suppress(OSError):
        folder = os.path.realpath(f"/proc/{pid}/cwd")
    name = file[len(folder) + 1 :] if file.startswith(f"{folder}/") else file
    # The path as the process sees it, which may be in a container.
    path = f"/proc/{pid}/root{file}" if file.startswith("/") else f"/proc/{pid}/cwd/{file}"
    source = ""
    # The file may be in no valid encoding, or may have changed.
    with suppress(SyntaxError, ValueError):
        source = linecache.getline(path, line).strip()
    return f"{'/'.join(name.split('/')[-2:])}:{line}", source[:MOST_SOURCE_CHARACTERS]


def _innermost_function(pid: int, lines: Sequence[str], own: re.Pattern[str]) -> str:
    """Return the innermost function of the program's own file in the main thread, such as
    a.out:exchange, or "". lines: of a debugger.
    """
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""
    is_main = False
    for line in lines:
        if _THREAD.match(line):
            is_main = bool(re.search(rf"\b{pid}\b", line))
        frame = own.match(line)
        if is_main and frame and frame.groupdict().get("file", program) == program:
            return f"{os.path.basename(program)}:{frame['name']}"
    return ""


def short(rank: RankStacks) -> dict[str, object]:
    """Return the fields of a rank without its stack, cut so that they fit on a line of 900
    bytes.
    """
    fields = {name: value for name, value in rank._asdict().items() if name != "stack"}
    texts = {name: _cut(fields[name]) for name in ("place", "source", "unread")}
    return {**fields, **texts, "workers": [_cut(text) for text in rank.workers[:MOST_WORKERS]]}


def _cut(text: str) -> str:
    """Cut out the middle of a text that has more than ``MOST_BYTES`` bytes in JSON."""
    kept = len(text) // 2
    cut = text
    while len(json.dumps(cut)) > MOST_BYTES:
        kept -= 1
        cut = f"{text[:kept]}...{text[-kept:]}"
    return cut


def write_ranks(ranks: Iterable[RankStacks], folder: str, node: str) -> int:
    """Write the stacks of each rank to a file in ``folder``, and print where the rank is. Return
    the number of ranks.
    """
    with suppress(OSError):
        os.makedirs(f"{folder}/rank-logs", exist_ok=True)
    count = 0
    for rank in ranks:
        count += 1
        head = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} rank {rank.rank} on {node}"
        text = "\n".join((f"{head}: {rank.state}", *rank.stack, ""))
        path = f"{folder}/rank-logs/{rank.rank}.stack"
        task.write_file(path, os.O_TRUNC, text.encode(errors="surrogateescape"))
        emit(short(rank))
    return count


def emit(answer: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(folder: str) -> None:
    """Write the stacks of the ranks on this node to files in ``folder``, and print where the ranks
    are.
    """
    node = task.host_name()
    count = write_ranks(read_ranks(node), folder, node)
    emit({"node": node, "ranks": count})


if __name__ == "__main__":
    main(sys.argv[1])
