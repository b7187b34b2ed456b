"""Facts about the node this process runs on. Standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
from importlib import metadata
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def hostname() -> str:
    """What Slurm calls the node; where it does not run, the machine's own short name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def host_memory_bytes() -> int:
    """This process's resident set, at its highest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_freed_memory() -> None:
    """Let this process use again what arrays free.

    By itself, glibc gives large pieces back to the kernel, which clears each page anew: an eighth of the time
    of a ResNet-18's iteration.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:  # other C libraries have no such call
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def own_cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def node_cores() -> list[int]:
    """The cores of this node.

    A container sees all of its host's cores in /proc. Its own are those that its first process may run on,
    whatever part of them this job step was given.
    """
    try:
        return sorted(os.sched_getaffinity(1))
    except OSError:
        return own_cores()


def cpu_model() -> str | None:
    """As the kernel names it; None where it names none (most Arm machines)."""
    for line in (read("/proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return None


def read(path: str) -> str | None:
    """The text of a small file of the system's, such as /etc/machine-id; None where there is no such file."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def versions(*packages: str) -> dict[str, str]:
    """Of Python, the kernel and those of the packages that are installed; imports none of them."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
