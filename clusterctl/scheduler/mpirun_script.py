"""The script of a job on a cluster without a scheduler, for bash and mpirun; and the nodes it gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.scheduler.base import JobRequest
from clusterctl.scheduler.script import (
    PLAIN,
    Environment,
    UserScript,
    Words,
    common_words,
    exports,
    partition_of,
    program,
)
from clusterctl.spec.job import JobSpec
from clusterctl.spec.names import MPI_SSH, Launcher
from clusterctl.state.facts import ClusterFacts
from clusterctl.util.assets import render

# What of a job only Slurm can do.
_SLURMS: Final = ("account", "qos", "constraint", "array", "requeue", "signal", "mem", "gpus")


def with_nodes(request: JobRequest, facts: ClusterFacts, job: JobSpec) -> JobRequest:
    """The request with the first nodes of the job's partition, in order, and its time limit.

    Raises:
        UsageError: it asks for what only Slurm can do, or for more than there is.
    """
    _refuse_slurms(job)
    partition = partition_of(facts, job)
    nodes, limit_s = partition.nodes[: job.nodes], job.time or partition.max_time or 0
    return replace(request, partition=partition.name, nodes=nodes, limit_s=limit_s)


def render_mpirun_script(
    facts: ClusterFacts, job: JobSpec, *, payload_hash: str, environment: Environment = PLAIN
) -> str:
    """The script of a job, for bash on the first of its nodes."""
    nodes = with_nodes(JobRequest("", job.name, "", ""), facts, job).nodes
    own = UserScript.read(job.script) if job.script is not None else None
    if own is not None and own.directives:
        raise UsageError(
            f"the script {own.name} asks Slurm for what it needs, and this cluster has none",
            code="needs-slurm",
            why=f"it has {own.directives[0].strip()!r}",
            fix="say it in flags, and remove the #SBATCH lines",
        )
    words = Words(
        folder='"$PWD"',
        nodes=str(len(nodes)),
        slots=str(job.tasks_per_node),
        job_id="${CLUSTERCTL_JOB_ID:-m0}",
        launcher=_launcher(job, len(nodes)),
        started_by=f" --of=mpirun --per-node={job.tasks_per_node}",
    )
    return render(
        "job.mpirun.j2",
        **common_words(job, own, environment, payload_hash),
        nodes=nodes,
        slots=job.tasks_per_node,
        cpus=job.cpus or 1,
        job_options=f"--telemetry={facts.interval_s:g} --nodes={','.join(nodes)} --ssh='{MPI_SSH}'",
        program=program(job, own, environment, words),
    )


def _launcher(job: JobSpec, nodes: int) -> tuple[str, ...]:
    if job.launcher is Launcher.TORCHRUN:
        spread, ranks = "--map-by ppr:1:node --bind-to none", nodes
    else:
        spread = f"--map-by ppr:{job.tasks_per_node}:node{f':PE={job.cpus}' if job.cpus else ''}"
        ranks = job.tasks
    return f"mpirun -np {ranks} --hostfile hostfile {spread}", exports(job)


def _refuse_slurms(job: JobSpec) -> None:
    asked = [field for field in _SLURMS if getattr(job, field)]
    if "launcher" in job.model_fields_set and job.launcher is Launcher.SRUN:
        asked.append("launcher srun")
    if asked:
        raise UsageError(
            f"this cluster has no scheduler, so a job can't have {', '.join(f'--{flag}' for flag in asked)}",
            code="needs-slurm",
            why="these are Slurm's: here jobs do not queue, and each has all of its nodes",
            fix="leave it out, or raise a cluster with `scheduler: slurm`",
        )
