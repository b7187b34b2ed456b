"""Job scripts for clusters without a scheduler, and the choice of a job's nodes."""

from __future__ import annotations

from dataclasses import replace

from clusterctl.errors import UsageError
from clusterctl.scheduler.base import JobRequest
from clusterctl.scheduler.script import (
    PLAIN,
    Environment,
    Words,
    common_words,
    mapping,
    mpirun_exports,
    program,
    watch_options,
)
from clusterctl.scheduler.user_script import UserScript, partition_of
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_options import OPTIONS
from clusterctl.spec.names import MPI_SSH, Launcher
from clusterctl.state.inventory import Inventory
from clusterctl.util.assets import render


def with_nodes(request: JobRequest, inventory: Inventory, job: JobSpec) -> JobRequest:
    """Return the request with the first nodes of the job's partition, and the job's time limit.

    Raises UsageError if the job uses options of Slurm, or asks for more than the partition has.
    """
    _reject_slurm_options(job)
    partition = partition_of(inventory, job)
    nodes = partition.nodes[: job.nodes]
    limit_s = job.time or partition.max_time or 0
    return replace(request, partition=partition.name, nodes=nodes, limit_s=limit_s)


def render_mpirun_script(
    inventory: Inventory, job: JobSpec, *, payload_hash: str, environment: Environment = PLAIN
) -> str:
    """Return the bash script that runs a job. The script is started on the job's first node."""
    nodes = with_nodes(JobRequest("", job.name, "", ""), inventory, job).nodes
    script = UserScript.of(job)
    if script is not None and script.directives.lines:
        raise UsageError(
            f"the script {script.name} has #SBATCH lines, and this cluster does not run Slurm",
            code="needs-slurm",
            why=f"the first is {script.directives.lines[0].strip()!r}",
            fix="remove the #SBATCH lines, and use options of `clusterctl submit` instead",
        )
    words = Words(
        folder='"$PWD"',
        start='env -C "$start"',
        nodes=str(len(nodes)),
        slots=str(job.tasks_per_node),
        job_id="${CLUSTERCTL_JOB_ID:-m0}",
        launcher=_launcher(job, len(nodes)),
        started_by=f" --of=mpirun --per-node={job.tasks_per_node}",
    )
    return render(
        "job.mpirun.j2",
        **common_words(job, script, environment, payload_hash),
        nodes=nodes,
        slots=job.tasks_per_node,
        cpus=job.cpus or 1,
        job_options=" ".join(
            (
                *watch_options(job, inventory.interval_s),
                f"--nodes={','.join(nodes)} --ssh='{MPI_SSH}'",
            )
        ),
        program=program(job, script, environment, words, cluster=inventory.cluster),
    )


def _launcher(job: JobSpec, nodes: int) -> tuple[str, ...]:
    if job.launcher is Launcher.TORCHRUN:
        spread = "--map-by ppr:1:node --bind-to none"
        ranks = nodes
    else:
        spread = (
            "--map-by "
            f"{mapping(job, str(job.tasks_per_node))}{f':PE={job.cpus}' if job.cpus else ''}"
        )
        ranks = job.ranks or job.tasks
    return f"mpirun -np {ranks} --hostfile job.hosts {spread}", mpirun_exports(job)


def _reject_slurm_options(job: JobSpec) -> None:
    given = {option.name: option.flag for option in OPTIONS.values() if option.needs_slurm}
    given = {name: flag for name, flag in given.items() if getattr(job, name)}
    # A scaling and a sweep also set options of Slurm.
    if "sweep" in given:
        given.pop("array", None)
    flags = [given["scaling"]] if "scaling" in given else [*given.values()]
    if "launcher" in job.model_fields_set and job.launcher is Launcher.SRUN:
        flags.append("--launcher srun")
    if flags:
        raise UsageError(
            f"this cluster has no scheduler, so jobs can't use {', '.join(flags)}",
            code="needs-slurm",
            why="only Slurm supports them; without it, jobs do not queue, and a job has its "
            "nodes to itself",
            fix="leave these options out, or use a cluster with `scheduler: slurm`",
        )
