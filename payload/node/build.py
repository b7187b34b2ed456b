"""Builds a job's program on its first node before the ranks start (`submit --build`).

The command runs in the folder of the sent files in which the program starts. The files that it
creates or changes are kept in the folder ``builds`` beside the folder of all jobs, by the hash of
the sent files, the command, the modules and the kind of node, so that later jobs copy them.
Uses only the standard library of Python 3.8 or newer.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import BinaryIO

from payload.node import restarts, task

LOG = "build.log"
# The end of the log tells later attempts of a job, and the tasks of its array, that the program is
# built.
BUILT = b"clusterctl: the program is built\n"
# A kept build that no job has used for this time is removed by the next build.
UNUSED_S = 30 * 86400.0
SHOWN_LINES = 20
# A shell's exit status for a program that signal N has ended is this number and N.
FROM_SHELL = 128


def build(options: Mapping[str, str]) -> int:
    """Build the program, or copy the files of an equal build. Return the exit status of the command.

    options: of `job.py run`. The current folder is the job's, for an array that of the task.
    """
    is_task = "array" in options
    files = os.path.dirname(options["files"]) if is_task else options["files"]
    job = os.path.abspath(".." if is_task else ".")
    with open(f"{job}/{LOG}", "a+b") as log:
        # Tasks of an array on other nodes wait for the build.
        with suppress(OSError):
            fcntl.flock(log, fcntl.LOCK_EX)
        log.seek(0)
        if log.read().endswith(BUILT):
            return 0
        status = build_or_copy(options, files, job, log)
        if status == 0:
            log.write(BUILT)
    return status


def build_or_copy(options: Mapping[str, str], files: str, job: str, log: BinaryIO) -> int:
    """Copy the files of an equal build to ``files``, or build and keep them. job: its folder."""
    kept = os.path.dirname(os.path.dirname(job)) + "/builds"
    folder = f"{kept}/{key_of(options, job)}"
    if os.path.isdir(folder):
        with suppress(OSError):
            os.utime(folder)
        copy(folder, files, list(found(folder)))
        log.write(f"clusterctl: copied the result of an equal build, {folder}\n".encode())
        return 0
    before = found(files)
    start = os.path.join(files, options.get("start", ""))
    status = run(options["build"], start, log)
    if status:
        complain(options["build"], status, f"{job}/{LOG}")
        return status if status > 0 else FROM_SHELL - status
    made = [path for path, state in found(files).items() if before.get(path) != state]
    # A full disk must not fail a job whose program is built.
    with suppress(OSError):
        keep(files, made, kept, folder)
    return 0


def run(command: str, start: str, log: BinaryIO) -> int:
    """Run a command in a folder, with its output in a file, and return its exit status."""
    return subprocess.call(
        ["bash", "-c", command],
        cwd=start,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def complain(command: str, status: int, log: str) -> None:
    end = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
    lines = restarts.end_of_file(log).splitlines()[-SHOWN_LINES:]
    task.write_all(2, "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
    task.complain(f"the build failed on {task.host_name()} with {end}: {command}")


def key_of(options: Mapping[str, str], job: str) -> str:
    """Return the hash of what a build depends on: files, command, modules, system and processor."""
    cpu = [line for line in task.text_of("/proc/cpuinfo").splitlines() if line[:10] == "model name"]
    parts = (
        task.text_of(f"{job}/source.json"),
        options["build"],
        options.get("start", ""),
        os.environ.get("LOADEDMODULES", ""),
        os.uname().machine,
        task.text_of("/etc/os-release"),
        *cpu[:1],
    )
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]


def found(folder: str) -> dict[str, tuple[int, int, int]]:
    """Return path below a folder -> kind, time and size of each file and link."""
    files = {}
    for top, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(f"{top}/{name}")]
        for name in (*names, *links):
            with suppress(OSError):
                status = os.lstat(f"{top}/{name}")
                path = os.path.relpath(f"{top}/{name}", folder)
                files[path] = (status.st_mode, status.st_mtime_ns, status.st_size)
    return files


def copy(source: str, target: str, paths: list[str]) -> None:
    for path in paths:
        os.makedirs(os.path.dirname(f"{target}/{path}"), exist_ok=True)
        # A file that is written in place would change a file that another job uses.
        with suppress(FileNotFoundError):
            os.unlink(f"{target}/{path}")
        shutil.copy2(f"{source}/{path}", f"{target}/{path}", follow_symlinks=False)


def keep(files: str, made: list[str], kept: str, folder: str) -> None:
    """Copy the files of a build to ``folder``, which appears when it is complete.

    Remove builds that no job has used for long. kept: the folder of all builds.
    """
    os.makedirs(kept, exist_ok=True)
    partial = f"{kept}/.{os.path.basename(folder)}.{task.host_name()}.{os.getpid()}"
    try:
        os.makedirs(partial)
        copy(files, partial, made)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for name in os.listdir(kept):
        with suppress(OSError):
            if time.time() - os.stat(f"{kept}/{name}").st_mtime > UNUSED_S:
                shutil.rmtree(f"{kept}/{name}")
