"""What the spec says of a job's partition: that there is one, how many nodes it has, and for how long."""

from __future__ import annotations

from clusterctl.errors import UsageError
from clusterctl.scheduler.slurm.config import slurm_minutes
from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import ClusterSpec, Partition
from clusterctl.spec.units import format_duration


def partition_of(spec: ClusterSpec, job: JobSpec) -> Partition:
    """The partition that a job names; the first one if it names none.

    Raises:
        UsageError: there is no such partition, or it has less than the job asks for.
    """
    by_name = {partition.name: partition for partition in spec.partitions}
    partition = spec.partitions[0] if job.partition is None else by_name.get(job.partition)
    if partition is None:
        raise UsageError(
            f"there is no partition {job.partition!r}", fix=f"--partition can be: {', '.join(by_name)}"
        )
    _refuse_too_much(spec, partition, job)
    return partition


def _refuse_too_much(spec: ClusterSpec, partition: Partition, job: JobSpec) -> None:
    count = len(spec.node_names(partition))
    if job.nodes > count:
        raise UsageError(
            f"a job can't have {job.nodes} nodes",
            why=f"partition {partition.name} has {count}",
            fix=f"say --nodes {count} or less, or name another partition",
        )
    longest = partition.max_time
    counts = slurm_minutes if spec.has_slurm else int  # in slurm.conf 90s are 2 minutes
    if job.time is not None and longest is not None and counts(job.time) > counts(longest):
        raise UsageError(
            f"a job can't have {format_duration(job.time)}",
            why=f"max_time of partition {partition.name} is {format_duration(longest)}",
            fix="ask for less with --time",
        )
