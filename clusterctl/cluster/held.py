"""Jobs that Slurm holds since a node could not start them: they would wait until somebody releases them."""

from __future__ import annotations

from clusterctl.cluster.diagnose import Connect
from clusterctl.errors import CommandError
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.state.inventory import Inventory


def release_held(inventory: Inventory, to: Connect) -> tuple[str, ...]:
    """Let them wait for nodes again, now that these are well; returns their ids.

    Raises:
        SlurmError: Slurm did not answer, or not as expected.
        UnreachableError: the controller can't be reached.
    """
    if not inventory.has_slurm:
        return ()
    slurm = SlurmClient(to(inventory.controller.name))
    return tuple(job.id for job in slurm.all_jobs() if job.failed_to_launch and _is_released(slurm, job.id))


def _is_released(slurm: SlurmClient, job_id: str) -> bool:
    try:
        slurm.release(job_id)
    except CommandError:  # it was cancelled meanwhile
        return False
    return True
