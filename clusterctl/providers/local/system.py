"""The operating system under local nodes: tools, processes, mounts and kernel settings of this machine.

About 25 systemds fit in the default of 128 inotify instances; the next ones die with "Failed to allocate
manager object" and their nodes stay unknown to Slurm. The neighbours of all machines, n times n of them,
share one table of 1,024: from 32 nodes on, MPI's connections fail: "Resource temporarily unavailable".

Linux 6.18 gives a session (autogroup) all of a CPU for minutes while its threads there wake each other and it
has a process on another CPU too, as a training has. All others wait, the kernel's own threads among them:
nodes neither boot nor answer. Where systemd has booted the machine, nodes are in control groups of their own,
which no autogroup is made of.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from clusterctl.errors import ProvisionError
from clusterctl.state.workspace import write_atomic

# sudo's secure_path, or a user's PATH, may lack the places where ip, sshd and mount live.
TOOL_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/root",
}

_running: set[subprocess.Popen[str]] = set()


def run(argv: Sequence[str], *, what: str, stdin: str | None = None, where: str = "", fix: str = "") -> str:
    """Run a tool to its end and return its stdout. ``where`` and ``fix`` are for the error."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=TOOL_ENV,
        start_new_session=True,
    )
    _running.add(process)
    try:
        stdout, stderr = process.communicate(stdin)
    finally:
        _running.discard(process)
    if process.returncode != 0:
        said = (stderr or stdout).strip()[-1500:]
        if os.strerror(errno.ENOSPC) in said:
            fix = "make room on this machine: `df -h` and `df -i` show which disk is full"
        raise ProvisionError(
            f"{what} failed",
            where=where or " ".join(argv[:3]),
            why=said or f"exit {process.returncode}",
            fix=fix,
        )
    return stdout


def end_children() -> None:
    """End the tools that still run, with everything they started: the caller is gone."""
    for process in list(_running):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


Found = TypeVar("Found")


def scan_processes(read: Callable[[Path], Found | None]) -> Iterator[tuple[int, Found]]:
    """The pid of each process with what ``read`` finds in its folder below /proc, if anything.

    One that ends meanwhile, or that we may not look into, is passed over.
    """
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                found = read(folder)
                if found is not None:
                    yield int(folder.name), found


_DOOMED = ".removed-"


def mounted_under(folder: Path) -> tuple[Path, ...]:
    """Mount points at or below a folder, deepest first."""
    prefix = str(folder)
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if point == prefix or point.startswith(prefix + "/"):
            points.append(Path(point))
    return tuple(sorted(points, key=lambda p: len(p.parts), reverse=True))


def mount_disk(folder: Path, size_mib: int) -> Path:
    """Mount ``folder/disk``, a file system of that size in a sparse file, made if it is not there yet.

    Only the blocks that are in use take room on this machine.
    """
    image, point = folder / "disk.img", folder / "disk"
    point.mkdir(parents=True, exist_ok=True)
    if not image.exists():
        unfinished = image.with_suffix(".new")
        with unfinished.open("wb") as file:
            file.truncate(size_mib << 20)
        run(["mkfs.ext4", "-q", "-F", "-m", "0", str(unfinished)], what="making a node's disk")
        unfinished.rename(image)
    if not mounted_under(point):
        run(["mount", "-o", "loop,discard", str(image), str(point)], what="mounting a node's disk")
    return point


def disk_mib(folder: Path) -> int | None:
    """The size of the disk that ``mount_disk`` made there; None if there is none."""
    image = folder / "disk.img"
    return image.stat().st_size >> 20 if image.exists() else None


def loops_under(folder: Path) -> tuple[str, ...]:
    """Loop devices whose file lies below a folder, removed already or not."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # it was just given back
            if backing.read_text().startswith(f"{folder}/"):
                found.append(backing.parts[3])
    return tuple(found)


def mount_overlay(lower: tuple[Path, ...], folder: Path, changes: Path | None = None) -> Path:
    """Mount ``folder/root`` over the lower layers, topmost first; `upper` in ``changes`` takes the changes.

    ``changes`` is ``folder`` itself unless it is given.
    """
    changes = changes or folder
    root, upper, work = folder / "root", changes / "upper", changes / "work"
    if mounted_under(root):
        return root
    for part in (root, upper, work):
        part.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={':'.join(map(str, lower))},upperdir={upper},workdir={work}"
    run(["mount", "-t", "overlay", "clusterctl", "-o", options, str(root)], what="mounting the overlay")
    return root


def erase(folder: Path) -> None:
    """Unmount and delete a node's or a cluster's folder. Never walks into something still mounted.

    Whatever ends this midway leaves the folder whole or gone: a node that lacks some files would start.
    """
    for point in mounted_under(folder):
        run(["umount", str(point)], what=f"unmounting {point}")
    gone = doomed(folder)
    if gone.exists():
        delete(gone)
    if folder.exists():
        delete(folder.rename(gone))


def doomed(folder: Path) -> Path:
    """What a folder is called while it is deleted. One that is hidden is never taken for whole."""
    return folder if folder.name.startswith(".") else folder.with_name(f"{_DOOMED}{folder.name}")


def erase_doomed(place: Path) -> None:
    """Delete what an ``erase`` that was ended midway has left in there."""
    for folder in place.glob(f"{_DOOMED}*"):
        delete(folder)


def delete(folder: Path) -> None:
    """Delete a folder with `rm`: a job can nest folders deeper than Python's recursion, or a path, may go."""
    run(["rm", "-rf", "--one-file-system", "--", str(folder)], what=f"deleting {folder}")


def rooted_under(folder: Path) -> tuple[int, ...]:
    """Processes whose root is an overlay with its changes below the folder, still mounted here or not."""
    own = f"upperdir={folder}/"

    def rooted(process: Path) -> bool | None:
        lines = (process / "mountinfo").read_text().splitlines()
        return any(line.split()[4] == "/" and own in line for line in lines) or None

    return tuple(pid for pid, _ in scan_processes(rooted))


NODES_IN_DEFAULT_LIMITS = 16
_KERNEL_LIMITS = {
    "fs/inotify/max_user_instances": 8192,
    "fs/inotify/max_user_watches": 524288,
    "net/ipv4/neigh/default/gc_thresh2": 32768,
    "net/ipv4/neigh/default/gc_thresh3": 65536,
}
_AUTOGROUP = "kernel/sched_autogroup_enabled"
_SYS = Path("/proc/sys")
_SETTINGS_RECORD = Path("/run/clusterctl-limits.json")  # a reboot forgets it, and the limits too


def raise_kernel_limits(nodes: int) -> tuple[str, ...]:
    """Raise what is too low for so many nodes; returns what was changed, in words."""
    if nodes <= NODES_IN_DEFAULT_LIMITS:
        return ()
    said = []
    for name, wanted in _KERNEL_LIMITS.items():
        now = int((_SYS / name).read_text())
        if now < wanted:
            _set(name, now, wanted)
            said.append(
                f"raised {name.replace('/', '.')} from {now} to {wanted} until the last cluster is down"
            )
    return tuple(said)


def disable_autogroup() -> tuple[str, ...]:
    """Have processes share the CPUs, not sessions, where that can be chosen; returns what was changed."""
    with suppress(OSError):  # not in every kernel, nor for a container to write: nodes run all the same
        if now := int((_SYS / _AUTOGROUP).read_text()):
            _set(_AUTOGROUP, now, 0)
            return (f"set {_AUTOGROUP.replace('/', '.')} from {now} to 0 until the last cluster is down",)
    return ()


def _set(name: str, now: int, wanted: int) -> None:
    original = json.loads(_SETTINGS_RECORD.read_text()) if _SETTINGS_RECORD.exists() else {}
    write_atomic(_SETTINGS_RECORD, json.dumps({name: now} | original))
    (_SYS / name).write_text(str(wanted))


def restore_kernel_settings() -> None:
    """Put the settings back as they were."""
    if _SETTINGS_RECORD.exists():
        for name, value in json.loads(_SETTINGS_RECORD.read_text()).items():
            with suppress(OSError):  # not ours to write after all
                (_SYS / name).write_text(str(value))
        _SETTINGS_RECORD.unlink()


def has_dnf() -> bool:
    """Whether packages of this machine are dnf's, whatever image it can make."""
    return shutil.which("dnf") is not None and shutil.which("apt-get") is None
