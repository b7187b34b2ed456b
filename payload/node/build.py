"""Builds a job's program on its first node before the ranks start (`submit --build`).

The command runs in the folder of the sent files in which the program starts. The files that it
creates or changes are kept in the folder ``builds`` beside the folder of all jobs, by the hash of
the sent files, the command, the modules, the Python environment and the kind of node, so that later
jobs copy them. Uses only the standard library of Python 3.8 or newer.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

from payload.node import restarts, task
from payload.node.output import start_with_output

LOG = "build.log"
CODE = "build-failed"
# The end of the log tells later attempts of a job, and the tasks of its array, that the program is
# built. Another job may run in the same folder, perhaps after its files were edited.
BUILT = "clusterctl: the program of job {} is built\n"
# The folder of kept builds, beside that of all jobs.
KEPT = "builds"
# A kept build that no job has used for this time is removed by the next build.
UNUSED_S = 30 * 86400.0
SHOWN_LINES = 20
# The NVIDIA driver has a folder for each GPU, whose file information has a line with its model.
GPUS = "/proc/driver/nvidia/gpus"
CHUNK = 1 << 20
# Files of an environment that pip, conda and R write when they install or remove a package.
RECORDS = (
    "conda-meta/*.json",
    "lib/python3*/site-packages/*.dist-info/RECORD",
    "lib/python3*/site-packages/*.egg-*",
    "lib/python3*/site-packages/*.pth",
    "lib/R/library/*/DESCRIPTION",
    "pyvenv.cfg",
)


def build(options: Mapping[str, str]) -> None:
    """Build the program, or copy the files of an equal build. CannotStartError: that failed.

    options: of `job.py run`. The current folder is the job's, for an array that of the task.
    """
    is_task = "array" in options
    files = os.path.dirname(options["files"]) if is_task else options["files"]
    job = os.path.abspath(".." if is_task else ".")
    number = os.environ.get("SLURM_ARRAY_JOB_ID" if is_task else "SLURM_JOB_ID")
    built = BUILT.format(number or os.environ.get("CLUSTERCTL_JOB_ID", "")).encode()
    try:
        with open(f"{job}/{LOG}", "a+b", buffering=0) as log:
            # Tasks of an array on other nodes wait for the build.
            with suppress(OSError):
                fcntl.flock(log, fcntl.LOCK_EX)
            log.seek(0)
            if log.read().endswith(built):
                return
            build_or_copy(options, files, job, log)
            with suppress(OSError):
                log.write(built)
    except OSError as exc:
        text = f"the program can't be built on {task.host_name()}: {exc}"
        raise task.CannotStartError(CODE, text) from exc


def build_or_copy(options: Mapping[str, str], files: str, job: str, log: io.FileIO) -> None:
    """Copy the files of an equal build to ``files``, or build and keep them. job: its folder.

    Nothing is copied or kept if ``files`` has other files than those that were sent. OSError: a
    file can't be copied. CannotStartError: the command failed.
    """
    kept = f"{os.path.dirname(os.path.dirname(job))}/{KEPT}"
    source = task.text_of(f"{job}/source.json")
    folder = f"{kept}/{key_of(options, source)}" if is_as_sent(files, source) else ""
    if folder and os.path.isdir(folder):
        with suppress(OSError):
            os.utime(folder)
        log.write(f"clusterctl: copying the result of an equal build, {folder}\n".encode())
        copy(folder, files, list(found(folder)))
        return
    before = found(files)
    start = os.path.join(files, options.get("start", ""))
    status = run(options["build"], start, log)
    if status:
        show_end(f"{job}/{LOG}")
        end = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        text = f"--build {options['build']} failed on {task.host_name()} with {end}"
        raise task.CannotStartError(CODE, text, task.as_in_shell(status))
    made = [path for path, state in found(files).items() if before.get(path) != state]
    # A full disk must not fail a job whose program is built.
    with suppress(OSError):
        if folder:
            keep(files, made, kept, folder)


def run(command: str, start: str, log: io.FileIO) -> int:
    """Run a command in a folder, with its output in a file, and return its exit status."""
    process, copying = start_with_output(
        lambda out, err: subprocess.Popen(
            ["bash", "-c", command], cwd=start, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        ),
        (log.fileno(), log.fileno()),
    )
    status = process.wait()
    copying.end(task.DRAIN_S)
    return status


def show_end(log: str) -> None:
    """Write the last lines of a log to this job's log."""
    lines = restarts.end_of_file(log).splitlines()[-SHOWN_LINES:]
    task.write_all(2, "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))


def is_as_sent(files: str, source: str) -> bool:
    """Return whether a folder has the files and links of a source.json, unchanged, and no others.

    source: text of source.json. "": there is none.
    """
    try:
        listed = json.loads(source)
        hashes = {file["path"]: file["sha256"] for file in listed["files"]}
        links = {link["path"]: link["target"] for link in listed["links"]}
        return (
            found(files).keys() == {*hashes, *links}
            and all(os.readlink(f"{files}/{path}") == links[path] for path in links)
            and all(sha256_of(f"{files}/{path}") == hashes[path] for path in hashes)
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


def sha256_of(path: str) -> str:
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            sha.update(chunk)
    return sha.hexdigest()


def key_of(options: Mapping[str, str], source: str) -> str:
    """Return the hash of what a build depends on: files, command, modules, Python environment with
    its packages, system, processor and models of GPUs.

    source: text of source.json.
    """
    path = os.environ.get("CLUSTERCTL_PATH", "")
    cpu = [line for line in task.text_of("/proc/cpuinfo").splitlines() if line[:10] == "model name"]
    parts = (
        source,
        options["build"],
        options.get("start", ""),
        os.environ.get("LOADEDMODULES", ""),
        *(task.text_of(file) for file in os.environ.get("_LMFILES_", "").split(":")),
        path,
        *(record for folder in path.split(":") for record in installed(folder)),
        os.uname().machine,
        task.text_of("/etc/os-release"),
        *cpu[:1],
        *gpu_models(),
    )
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]


def installed(programs: str) -> list[str]:
    """Return the files that record the packages of an environment, each with its time.

    programs: the environment's folder ``bin``.
    """
    found = []
    for pattern in RECORDS:
        for path in sorted(glob.glob(f"{glob.escape(programs)}/../{pattern}")):
            with suppress(OSError):
                found.append(f"{path} {os.stat(path).st_mtime_ns}")
    return found


def gpu_models() -> list[str]:
    """Return the models of this node's GPUs, each once."""
    try:
        texts = [task.text_of(f"{GPUS}/{name}/information") for name in os.listdir(GPUS)]
    except OSError:
        return []
    return sorted({line for text in texts for line in text.splitlines() if line[:6] == "Model:"})


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
        folder = os.path.dirname(f"{target}/{path}")
        os.makedirs(folder, exist_ok=True)
        # A file that is written in place would change a file that another job uses, and make would
        # take an incomplete file for a result.
        partial = f"{folder}/.partial.{os.getpid()}"
        try:
            shutil.copy2(f"{source}/{path}", partial, follow_symlinks=False)
            os.replace(partial, f"{target}/{path}")
        finally:
            with suppress(FileNotFoundError):
                os.unlink(partial)


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
