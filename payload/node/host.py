"""The node that this process runs on, and the launcher that started it. Standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

# These parameters of mallopt are defined in malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def hostname() -> str:
    """Return Slurm's name of this node, or the short host name without Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def host_memory_bytes() -> int:
    """Return the maximum resident set size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of freed arrays.

    By default, glibc returns large blocks to the kernel, and the kernel clears the pages of new
    blocks. This clearing takes 1/8 of a ResNet-18 iteration. Other C libraries lack mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def own_cores() -> list[int]:
    """Return the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def node_cores() -> list[int]:
    """Return all cores of this node, including cores that this job step may not use.

    /proc lists the cores of the physical host, even in a container. So use the cores of process 1
    instead.
    """
    try:
        return sorted(os.sched_getaffinity(1))
    except OSError:
        return own_cores()


def cpu_model() -> str | None:
    """Return the CPU model from /proc/cpuinfo. On most Arm machines, this file does not name a
    model.
    """
    for line in (read("/proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return None


def read(path: str) -> str | None:
    """Return the text of a system file, such as /etc/machine-id, or None if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, the kernel and installed packages, without importing the
    packages.
    """
    installed = {"python": platform.python_version(), "kernel": platform.release()}
    # importlib.metadata would take an eighth of the CPU time of the telemetry's start.
    for path in (path for folder in sys.path for path in Path(folder).glob("*-*.*-info")):
        # Debian's packages have egg-info, some with the version of Python:
        # mpi4py-3.1.4-py3.11.egg-info
        name, _, version = path.stem.partition("-")
        if (package := name.replace("_", "-").lower()) in packages:
            installed.setdefault(package, version.partition("-")[0])
    return installed


_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")


def launcher_rank(environ: Mapping[str, str]) -> int | None:
    """Return the rank number that srun or mpirun gave this process, or None without a launcher."""
    for name in _RANK_VARIABLES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def size_complaint(world_size: int, environ: Mapping[str, str]) -> str | None:
    """Return an error message if MPI's world size differs from the number of ranks in
    ``environ``.
    """
    for name, size in _stated_sizes(environ).items():
        if size != world_size:
            return (
                f"{name}={size}, but MPI sees a world of size {world_size}: the tasks did not "
                "find each other. Usually srun was given the wrong --mpi plugin: use `srun "
                "--mpi=pmix` (for a list: `srun --mpi=list`), and start this program only "
                "through srun or mpirun"
            )
    return None


def pmi_complaint(library: str, environ: Mapping[str, str]) -> str | None:
    """Return an error message if the MPI library (its name and version) cannot start under this
    srun.

    Without a PMI server, Open MPI would end the process in MPI_Init with a misleading message.
    """
    has_pmi = any(name == "PMIX_RANK" or name.startswith("PMI_") for name in environ)
    if "SLURM_STEP_ID" not in environ or has_pmi or not library.startswith("Open MPI"):
        return None
    return (
        "srun started this task without PMIx, which the ranks of Open MPI need to find each other: "
        "use `srun --mpi=pmix`, or mpirun if `srun --mpi=list` shows no pmix"
    )


def _stated_sizes(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the environment variables that state the number of ranks: name -> number."""
    # mpirun starts a daemon on each node as a job step, and ranks inherit the step's variables,
    # which count daemons. Only on the batch script's node there are no such variables, so Slurm's
    # numbers count ranks.
    names = ["OMPI_COMM_WORLD_SIZE"] if "OMPI_COMM_WORLD_SIZE" in environ else []
    if "SLURM_STEP_NUM_TASKS" not in environ:
        names.append("SLURM_NTASKS")
    elif not names:
        names.append("SLURM_STEP_NUM_TASKS")
    return {name: int(environ[name]) for name in names if environ.get(name, "").isdigit()}
