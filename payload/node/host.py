"""The node that this process runs on, and the launcher that started it. Standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
from collections.abc import Mapping
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
    from importlib import metadata  # noqa: PLC0415 - it takes 11 ms, and all ranks load this module

    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")


def launcher_rank(environ: Mapping[str, str]) -> int | None:
    """This process's rank as its launcher numbers it; None when nothing launched it."""
    for name in _RANK_VARIABLES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def size_complaint(world_size: int, environ: Mapping[str, str]) -> str | None:
    """What is wrong if MPI's world is not of the size that the launcher started; None if they agree."""
    for name, size in _stated_sizes(environ).items():
        if size != world_size:
            return (
                f"{name}={size}, but MPI sees a world of size {world_size}: the tasks did not find each "
                "other. Usually srun was given the wrong --mpi plugin: use `srun --mpi=pmix` (for a list: "
                "`srun --mpi=list`), and start this program only through srun or mpirun"
            )
    return None


def pmi_complaint(library: str, environ: Mapping[str, str]) -> str | None:
    """What is wrong if MPI, by the name of its library, cannot start under this srun; None if it may.

    Without a PMI to talk to, Open MPI ends the process in MPI_Init, and blames the way it was built.
    """
    has_pmi = any(name == "PMIX_RANK" or name.startswith("PMI_") for name in environ)
    if "SLURM_STEP_ID" not in environ or has_pmi or not library.startswith("Open MPI"):
        return None
    return (
        "srun started this task without PMIx, by which the ranks of Open MPI find each other: "
        "use `srun --mpi=pmix`, or mpirun if `srun --mpi=list` shows no pmix"
    )


def _stated_sizes(environ: Mapping[str, str]) -> dict[str, int]:
    """Each statement about the number of ranks, by the variable that makes it.

    mpirun starts its daemons, one a node, as a step of their own, and ranks inherit that step's variables.
    So under mpirun Slurm's numbers count ranks only where no step is named: on the batch script's node.
    """
    names = ["OMPI_COMM_WORLD_SIZE"] if "OMPI_COMM_WORLD_SIZE" in environ else []
    if "SLURM_STEP_NUM_TASKS" not in environ:
        names.append("SLURM_NTASKS")
    elif not names:
        names.append("SLURM_STEP_NUM_TASKS")
    return {name: int(environ[name]) for name in names if environ.get(name, "").isdigit()}
