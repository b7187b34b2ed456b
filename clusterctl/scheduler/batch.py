"""The script and the request of a job, by the scheduler of its cluster."""

from __future__ import annotations

from clusterctl.scheduler.models import JobRequest
from clusterctl.scheduler.script import PLAIN, Environment, partition_name
from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.ledger import JobEntry
from clusterctl.util.assets import payload_hash


def script_of(spec: ClusterSpec, job: JobSpec, environment: Environment = PLAIN) -> str:
    """The text of a job's script, for plain sbatch, or for bash without a scheduler.

    Raises:
        UsageError: the user's script can't be read or can't be run as a job, or its partition can't have it.
    """
    if spec.has_slurm:
        from clusterctl.scheduler.slurm.script import render_script  # noqa: PLC0415

        partition_name(spec, job)
        return render_script(
            job, payload_hash=payload_hash(), interval_s=spec.monitoring.interval, environment=environment
        )
    from clusterctl.scheduler.mpirun.script import render_mpirun_script  # noqa: PLC0415

    return render_mpirun_script(spec, job, payload_hash=payload_hash(), environment=environment)


def request_of(spec: ClusterSpec, job: JobSpec, entry: JobEntry, script: str) -> JobRequest:
    """The request to start a job, whose script has that name in its folder."""
    at = entry.submitted_at
    request = JobRequest(entry.token, entry.name, entry.remote_dir or "", script, submitted_at=at)
    if spec.has_slurm:
        return request  # its script says the rest
    from clusterctl.scheduler.mpirun.script import with_nodes  # noqa: PLC0415

    return with_nodes(request, spec, job)
