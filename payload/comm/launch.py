"""What the launcher (srun or mpirun) says about the ranks it started. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

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
    has_pmi = any(name.startswith(("PMIX_", "PMI_")) for name in environ)
    if "SLURM_STEP_ID" not in environ or has_pmi or not library.startswith("Open MPI"):
        return None
    return (
        "srun started this task without PMIx, by which the ranks of Open MPI find each other: "
        "use `srun --mpi=pmix` (for a list: `srun --mpi=list`)"
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
