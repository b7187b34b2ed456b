#!/usr/bin/python3 -IS
"""Ends the processes of jobs on this node if Slurm can't: after a node of the job, or this node,
was lost.

Also ends the processes that a job leaves, if Slurm uses no control groups and so can't find
daemons.

    fence        Reads a request from stdin, and answers `ok` on stdout. systemd starts this for each
                 connection to the port of clusterctl-fence.socket. A request is a munge credential
                 of root with the text `fence n1 12 13` (this node in Slurm, ids of jobs) or `fence
                 n1 all`. To `fence n1 list`, it answers `jobs` and the ids of jobs with a script
                 that runs here.
    fence start  Before slurmd starts: ends all jobs' processes if Slurm has set this node down, and removes
                 the files of dead steps.
    fence stop   When slurmd has ended: sets this node down in Slurm if the machine is shutting down.
                 (Slurm would use the node again if slurmd still answered.)

As Slurm's Epilog, with SLURM_JOB_ID, SLURM_JOB_UID and SLURMD_NODENAME, it kills the processes that
this job has left, and removes the files that the job has left in memory.

Runs as root with the platform's Python, from 3.9 on.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ROOT = Path("/")
# Patterns of files of a job's steps: script, sockets, hardware, PMIx. A later start of the job
# can't create its script or its PMIx socket if the file exists.
STEP_FILES = (
    "var/spool/clusterctl-slurmd/job{:0>5}",
    "var/spool/clusterctl-slurmd/*_{}.*",
    "var/spool/clusterctl-slurmd/*pmix.{}.*",
    "tmp/spmix_appdir_*_{}.*",
)
# Program, node, process and user, such as prterun.n1.442.2001. Open MPI 5
MPIRUN_FOLDER = re.compile(r"prte(?:run|d)?\..+\.(\d+)\.(\d+)")
JOB_OF_FILE = re.compile(r"[._](\d+)\.|^job0*(\d+)$")
# Folders of mpirun's other versions. Their owner needs them as long as one of the owner's processes
# runs.
MPIRUN_FOLDERS = ("tmp/ompi.*", "tmp/openmpi-sessions-*", "tmp/pmix-*", "tmp/pmix_*")
# This file is only on machines of the user's own, on which people may work.
OWN_MACHINE = "var/lib/clusterctl-host.json"
IN_MEMORY = re.compile(r"^\S+ /tmp tmpfs ", re.MULTILINE)
# States of jobs in squeue that are on a node.
ON_NODE = "RUNNING,SUSPENDED,STOPPED,CONFIGURING,COMPLETING,SIGNALING,STAGE_OUT,RESIZING"
ENDING = "COMPLETING"
# Paths in a command line.
MOST_PATHS = 500
# They get such names, and are removed later: users can fill folders so that this takes long.
OLD = "clusterctl-old."
OLD_FILES = (f"var/spool/clusterctl-slurmd/{OLD}*", f"tmp/{OLD}*")
LONGEST_REQUEST = 8192  # characters
# Limits of a run, of a command, and of the wait until killed processes are gone. systemd or a
# client must not wait longer, even if the controller is off. Any program can connect, so that a
# request has less time.
LIMIT_S = 15
REQUEST_S = 1
ASK_S = 5
END_S = 3.0
PAUSE_S = 0.02
STEPD = re.compile(rb"slurmstepd: \[(\d+)\b(\.batch\])?")
JOB_ID = re.compile(rb"(?:^|\0)SLURM_JOB_ID=(\d+)\0")
# The control group that slurmd, and processes of jobs, are in if Slurm uses no control groups.
OF_SLURMD = b"/slurmd.service"
OF_SLURM = re.compile(rb"/slurm(?:d\.service|stepd\.scope|/uid_)")
UIDS_LINE = re.compile(r"^Uid:(.*)", re.MULTILINE)
ZOMBIE = re.compile(r"^State:\s*Z", re.MULTILINE)
UID_LINE = re.compile(r"^Uid:\t(\d+)", re.MULTILINE)
UID = re.compile(r"^UID:.*\((\d+)\)$", re.MULTILINE)
NODE = r"^NodeName=(\S+) .*\bNodeHostName={} .*\bState=(\S+)"
ALL = "all"
LIST = "list"
SHUTDOWN = "clusterctl: the machine shuts down"

Jobs = Collection[str]


def ask(*argv: str, text: str = "") -> str:
    """Return the output of a command, or "" if it fails."""
    return output_of(*argv, text=text) or ""


def output_of(*argv: str, text: str = "") -> str | None:
    """Return the output of a command, or None if it fails."""
    with suppress(OSError, subprocess.TimeoutExpired):
        result = subprocess.run(
            argv,
            input=text,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=ASK_S,
            check=False,
            env={"PATH": PATH, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"},
        )
        return result.stdout if result.returncode == 0 else None
    return None


def decode(credential: str) -> tuple[str, Jobs]:
    """Return a request's node and job ids, or ``[ALL]``. Empty if it is not a credential of
    root.
    """
    head, _, payload = ask("unmunge", text=credential).partition("\n\n")
    uid = UID.search(head)
    node, *jobs = payload.split()[1:] or [""]
    is_valid = payload.startswith("fence ") and uid and uid[1] == "0"
    return (node, jobs) if is_valid else ("", [])


class Process(NamedTuple):
    """A process of this node.

    job: the id of the job if this is a slurmstepd, or an orphan of a slurmstepd. "user UID" if only
        the control group shows that this is an orphan of some job of the user. "" for other
        processes.
    runs_script: whether this is the slurmstepd of a job's script.
    """

    pid: int
    parent: int
    is_stepd: bool
    job: str
    runs_script: bool


def scan() -> Iterator[Process]:
    for folder in ROOT.glob("proc/[0-9]*"):
        # The process may end meanwhile.
        with suppress(OSError):
            pid = int(folder.name)
            parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
            stepd = STEPD.match((folder / "cmdline").read_bytes())
            job = ""
            if stepd:
                job = stepd[1].decode()
            # A shell of salloc on this host, and daemons that it has started, have the variable
            # too.
            elif parent == 1 and OF_SLURM.search((folder / "cgroup").read_bytes()):
                match = JOB_ID.search((folder / "environ").read_bytes())
                job = match[1].decode() if match else job_of_group(folder)
            yield Process(pid, parent, bool(stepd), job, bool(stepd and stepd[2]))


def job_of_group(folder: Path) -> str:
    """Return "user UID" for a process in slurmd's control group, or "". slurmd itself is root's."""
    is_of_slurmd = OF_SLURMD in (folder / "cgroup").read_bytes()
    uid = user_of(folder) if is_of_slurmd else "0"
    return "" if uid == "0" else f"user {uid}"


def user_of(folder: Path) -> str:
    """Return the uid of a process. folder: its folder in /proc. Raises OSError if it has ended."""
    match = UID_LINE.search((folder / "status").read_text(errors="replace"))
    return match[1] if match else "0"


def processes(jobs: Jobs) -> Iterator[int]:
    """Yield the processes of these jobs: slurmstepds, orphans of slurmstepds, and all their
    descendants.
    """
    children: dict[int, list[int]] = {}
    pids = []
    for process in scan():
        children.setdefault(process.parent, []).append(process.pid)
        if process.job and (ALL in jobs or process.job in jobs):
            pids.append(process.pid)
    while pids:
        yield (pid := pids.pop(0))
        pids += children.get(pid, [])


def kill(jobs: Jobs) -> bool:
    """Kill the processes of these jobs. Return whether they are gone."""
    deadline = time.monotonic() + END_S
    while pids := list(processes(jobs)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_S)
    return True


def end(jobs: Jobs) -> bool:
    """Kill the processes of these jobs, and rename the files of their steps. Return whether this is
    done.
    """
    is_done = kill(jobs)
    if is_done:
        rename_files(jobs)
    return is_done


def epilog(job: str, uid: str) -> None:
    """Kill the processes that a job has left.

    A process without the variable SLURM_JOB_ID may be of any job of its user, and is killed with
    the last.
    """
    kill([job])
    others = {process.job for process in scan() if process.job.isdigit() and process.job != job}
    if uid not in map(owner, processes(others)):
        kill([f"user {uid}"])


def remove_scratch(job: str, uid: str, node: str) -> None:
    """Remove mpirun's folders and the files that jobs have left in memory.

    The files are those of the job's user in /dev/shm, and in /tmp if it is in memory, that were
    created while jobs of the user were on this node. Slurm tells the start of a job in whole
    seconds, so files created earlier in the second of the start count as the job's. Files stay as
    long as the user has a process or another job on the node, and if Slurm does not answer.
    """
    remove([*ROOT.glob(f"tmp/spmix_appdir_*_{job}.*")])
    remove([path for path in ROOT.glob("tmp/prte*") if is_left_by_mpirun(path)])
    if any(is_of(uid, process) for process in ROOT.glob("proc/[0-9]*")):
        return
    remove(
        [
            path
            for pattern in MPIRUN_FOLDERS
            for path in ROOT.glob(pattern)
            if is_folder_of(uid, path)
        ]
    )
    created = {
        path: when for folder in folders_in_memory() for path, when in entries_of(uid, folder)
    }
    if not created:
        return
    periods = periods_of_jobs(job, uid, node, since=min(created.values()))
    chosen = [
        path
        for path, when in created.items()
        if any(start <= when <= end for start, end in periods)
    ]
    if chosen:
        remove(without_others(chosen, uid, since=min(start for start, _ in periods)))


def is_of(uid: str, process: Path) -> bool:
    """Return whether a process has this user id in any role, such as the effective one."""
    with suppress(OSError):
        text = (process / "status").read_text(errors="replace")
        ids = UIDS_LINE.search(text)
        return bool(ids and uid in ids[1].split() and not ZOMBIE.search(text))
    return False


def is_folder_of(uid: str, path: Path) -> bool:
    # Another process may remove it meanwhile.
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and str(status.st_uid) == uid
    return False


def folders_in_memory() -> Iterator[Path]:
    """Yield /dev/shm, and /tmp if it is in memory, and no people but users of jobs work on this
    machine.
    """
    yield ROOT / "dev/shm"
    with suppress(OSError):
        is_in_memory = IN_MEMORY.search((ROOT / "proc/mounts").read_text(errors="replace"))
        if is_in_memory and not (ROOT / OWN_MACHINE).exists():
            yield ROOT / "tmp"


def entries_of(uid: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the path and the time of creation of each entry of a folder that belongs to this
    user.
    """
    listing = (
        "find",
        str(folder),
        "-mindepth",
        "1",
        "-maxdepth",
        "1",
        "-user",
        uid,
        "-exec",
        "stat",
    )
    # On an old kernel, the time of creation is 0. Then take the time of the last change.
    rows = ask(*listing, "--printf=%W %Z %n\\0", "--", "{}", "+").split("\0")[:-1]
    for created, changed, path in (row.split(" ", 2) for row in rows):
        yield path, int(created) or int(changed)


def periods_of_jobs(job: str, uid: str, node: str, *, since: int) -> list[tuple[int, int]]:
    """Return the start and the end of each job that this user has had on this node since a time.

    Empty if the user has other jobs there than this one, which is ending, or if Slurm does not
    answer. Other jobs that are ending count only if they have a slurmstepd.
    """
    now = int(time.time())
    options = (f"--nodelist={node}", f"--user={uid}")
    rows = ask(
        "squeue", "--noheader", *options, f"--states={ON_NODE}", "--format=%A %T %S"
    ).splitlines()
    present = {process.job for process in scan() if process.is_stepd}
    periods: list[tuple[int, int]] = []
    is_known = False
    for row in rows:
        number, state, start = row.split()
        if number != job and (state != ENDING or number in present):
            return []
        is_known = is_known or number == job
        if start.isdigit():
            periods.append((int(start), now))
    if not is_known:
        return []
    # Earlier jobs, and earlier attempts of this job, which squeue lists with the time of its
    # requeue.
    past = ("--allocations", "--duplicates", "--noheader", "--parsable2", "--format=Start,End")
    for row in ask("sacct", *past, *options, f"--starttime=now-{max(1, now - since)}").splitlines():
        start, _, end = row.partition("|")
        if start.isdigit():
            periods.append((int(start), int(end) if end.isdigit() else now))
    return periods


def without_others(paths: list[str], uid: str, *, since: int) -> list[Path]:
    """Return those of the paths that are not folders with files of other users, or older than this
    time.
    """
    others = ("(", "!", "-user", uid, "-o", "!", "-newerct", f"@{since}", ")", "-printf", "%H\\0")
    chosen: list[Path] = []
    for chunk in chunks(paths):
        mixed = output_of("find", *chunk, *others)
        if mixed is not None:
            chosen += [Path(path) for path in chunk if path not in mixed.split("\0")]
    return chosen


def remove(paths: Collection[Path]) -> None:
    """Remove files and folders. Python's functions end at very deep folders."""
    for chunk in chunks([*map(str, paths)]):
        ask("rm", "-rf", "--one-file-system", "--", *chunk)


def chunks(paths: list[str]) -> Iterator[list[str]]:
    """Yield parts of a list that fit into a command line."""
    return (paths[first : first + MOST_PATHS] for first in range(0, len(paths), MOST_PATHS))


def owner(pid: int) -> str:
    with suppress(OSError):
        return user_of(ROOT / f"proc/{pid}")
    return ""


def files_of_steps(job: str) -> list[Path]:
    return [
        path
        for pattern in STEP_FILES
        for path in ROOT.glob(pattern.format("[0-9]*" if job == ALL else job))
    ]


def rename_files(jobs: Jobs) -> None:
    for path in (path for job in jobs for path in files_of_steps(job)):
        with suppress(OSError):
            path.rename(path.with_name(f"{OLD}{os.getpid()}.{time.monotonic_ns()}"))


def remove_old_files() -> None:
    """Remove the renamed files, and folders of mpirun's processes that have ended."""
    paths = [path for pattern in OLD_FILES for path in ROOT.glob(pattern)]
    paths += [path for path in ROOT.glob("tmp/prte*") if is_left_by_mpirun(path)]
    remove(paths)


def is_left_by_mpirun(path: Path) -> bool:
    """Return whether a process of mpirun has created this folder and has ended, by its name and
    owner.
    """
    # Another process may remove it meanwhile.
    with suppress(OSError):
        match = MPIRUN_FOLDER.fullmatch(path.name)
        status = path.lstat()
        if match and stat.S_ISDIR(status.st_mode) and status.st_uid == int(match[2]):
            return not (ROOT / "proc" / match[1]).exists()
    return False


def node_in_slurm(*names: str) -> tuple[str, str]:
    """Return this host's name and state in Slurm, or two empty texts if slurmctld does not answer.

    With a name, they are also empty if this host has another name.
    """
    pattern = NODE.format(re.escape(os.uname().nodename.partition(".")[0]))
    match = re.search(pattern, ask("scontrol", "--oneliner", "show", "node", *names), re.MULTILINE)
    return (match[1], match[2]) if match else ("", "")


def start() -> None:
    """End old processes of jobs if Slurm has set this node down. A restart of slurmd affects no
    job.

    Remove the files of steps that have ended without removing them.
    """
    if any(processes([ALL])) and node_in_slurm()[1].startswith("DOWN"):
        end([ALL])
    jobs = {
        match[1] or match[2]
        for path in files_of_steps(ALL)
        if (match := JOB_OF_FILE.search(path.name))
    }
    rename_files([job for job in jobs if not any(processes([job]))])
    remove_old_files()


def stop() -> None:
    """Set this node down if the machine is shutting down, so that its jobs start elsewhere at once.

    A node that is drained, for a reason that must stay, or that Slurm reboots, is left alone.
    """
    if ask("systemctl", "show", "--value", "--property=SystemState").strip() != "stopping":
        return
    name, state = node_in_slurm()
    if name and not re.search("DOWN|DRAIN|REBOOT|POWER", state):
        ask("scontrol", "update", f"nodename={name}", "state=down", f"reason={SHUTDOWN}")


def main(words: list[str]) -> int:
    # The default action of SIGALRM ends this process. If an Epilog fails, Slurm drains its node.
    if is_epilog := "SLURM_JOB_UID" in os.environ:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.alarm(LIMIT_S if words or is_epilog else REQUEST_S)
    if words == ["start"]:
        start()
    elif words == ["stop"]:
        stop()
    elif is_epilog:
        job = os.environ["SLURM_JOB_ID"]
        uid = os.environ["SLURM_JOB_UID"]
        epilog(job, uid)
        with suppress(OSError, ValueError):
            remove_scratch(job, uid, os.environ.get("SLURMD_NODENAME", ""))
    else:
        node, jobs = decode(sys.stdin.readline(LONGEST_REQUEST))
        signal.alarm(LIMIT_S)
        if not jobs or node_in_slurm(node)[0] != node:
            answer = "no"
        elif jobs == [LIST]:
            answer = " ".join(["jobs", *(process.job for process in scan() if process.runs_script)])
        else:
            answer = "ok" if end(jobs) else "no"
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
        if answer == "ok":
            remove_old_files()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
