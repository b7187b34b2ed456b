"""JobSpec -> the text of a script that runs it without a scheduler, and the nodes that it takes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.scheduler.base import JobRequest
from clusterctl.scheduler.script import (
    PAYLOAD_ROOT,
    PLAIN,
    WATCH,
    Environment,
    UserScript,
    partition_of,
    program,
    telemetry_argv,
)
from clusterctl.spec.distributions import JOB_PROFILE
from clusterctl.spec.job import JobSpec, Launcher
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import MPI_SSH
from clusterctl.util.assets import render

# What only Slurm can do, by the field of a job, and why.
_SLURMS: Final[Mapping[str, str]] = {
    "account": "accounts are Slurm's",
    "qos": "qualities of service are Slurm's",
    "constraint": "features of nodes are Slurm's",
    "array": "jobs do not queue",
    "requeue": "jobs do not queue",
    "signal": "a job that is out of time gets SIGTERM, and nothing before",
    "mem": "a job has its nodes for itself",
    "gpus": "a job has all GPUs of its nodes",
}

# What jobs find of their host in their environment, as Slurm would have it from its TaskProlog.
_PROLOG: Final = """\
if [[ -x /opt/clusterctl/task-prolog ]]; then
    while IFS= read -r line; do export "${line#export }"; done < <(/opt/clusterctl/task-prolog)
fi"""

# Runs once a rank, on its node. Ranks that share a node get a GPU each, or a part of one, in turn.
_RANK: Final = (
    """\
gpus=(/dev/nvidia[0-9]*) names=("${!gpus[@]}")
[[ ! -r /opt/clusterctl/gpus ]] || mapfile -t names </opt/clusterctl/gpus
if [[ -z ${CUDA_VISIBLE_DEVICES+x} && -e ${gpus[0]} ]] && ((OMPI_COMM_WORLD_LOCAL_SIZE > 1)); then
    export CUDA_VISIBLE_DEVICES=${names[OMPI_COMM_WORLD_LOCAL_RANK % ${#names[@]}]}
fi
"""
    + _PROLOG
    + '\nexec "$@"'
)


def with_nodes(request: JobRequest, spec: ClusterSpec, job: JobSpec) -> JobRequest:
    """The request with the first nodes of the job's partition, in order, and its time limit.

    Raises:
        UsageError: it asks for what only Slurm can do, or for more than there is.
    """
    _refuse_slurms(job)
    partition = partition_of(spec, job)
    nodes = spec.node_names(partition)[: job.nodes]
    return replace(
        request, partition=partition.name, nodes=nodes, limit_s=job.time or partition.max_time or 0
    )


def render_mpirun_script(
    spec: ClusterSpec, job: JobSpec, *, payload_hash: str, environment: Environment = PLAIN
) -> str:
    """The script of a job, for bash on the first of its nodes."""
    nodes = with_nodes(JobRequest("", job.name, "", ""), spec, job).nodes
    own = UserScript.read(job.script) if job.script is not None else None
    if own is not None and own.directives:
        raise UsageError(
            f"the script {own.name} asks Slurm for what it needs, and this cluster has none",
            why=f"it has {own.directives[0].strip()!r}",
            fix="say it in flags, and remove the #SBATCH lines",
        )
    payload_root = f"{PAYLOAD_ROOT}/{payload_hash}"
    return render(
        "job.mpirun.j2",
        title=job.name,
        needs=f"{own.name} too" if own else "this file",
        nodes=nodes,
        submit_dir=own is not None or job.container is not None,
        profile=JOB_PROFILE,
        prolog=_PROLOG,
        path=environment.path,
        cpus=job.cpus or 1,
        hostfile=render("hostfile.j2", nodes=nodes, slots=job.tasks_per_node),
        payload_root=payload_root,
        watch=f'node=${{HOSTNAME%%.*}}; cd -- "$1" && shift || exit; {WATCH}',
        telemetry=telemetry_argv(spec.monitoring.interval),
        ssh=MPI_SSH,
        program=program(job, own, payload_root, environment, _launched),
    )


def _launched(job: JobSpec, command: str, exports: str) -> str:
    """The command as mpirun starts it, once a rank."""
    spread = f"--map-by ppr:{job.tasks_per_node}:node{f':PE={job.cpus}' if job.cpus else ''}"
    rank = f"bash -c {shlex.quote(_RANK)} rank {command}"
    return f"mpirun -np {job.tasks} --hostfile hostfile {spread} {exports} {rank}"


def _refuse_slurms(job: JobSpec) -> None:
    asked = {field: why for field, why in _SLURMS.items() if getattr(job, field)}
    if "launcher" in job.model_fields_set and job.launcher is Launcher.SRUN:
        asked["launcher srun"] = "srun is Slurm's"
    if asked:
        raise UsageError(
            f"this cluster has no scheduler, so a job can't have {', '.join(f'--{flag}' for flag in asked)}",
            why="; ".join(dict.fromkeys(asked.values())),
            fix="leave it out, or raise a cluster with `scheduler: slurm`",
        )
