"""The partition of a job: which it is, and whether the job is within its limits."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError
from clusterctl.scheduler.user_script import UserScript
from clusterctl.spec.units import format_duration, parse_slurm_time_s

if TYPE_CHECKING:
    from clusterctl.spec.job import JobSpec
    from clusterctl.state.facts import ClusterFacts, PartitionFacts


def partition_name(facts: ClusterFacts, job: JobSpec) -> str | None:
    """Return the partition of a job, or None if the script's #SBATCH lines set it."""
    script = UserScript.read(job.script) if job.partition is None and job.script is not None else None
    if script is not None and script.directives.last("partition"):
        return None
    return partition_of(facts, job).name


def partition_of(facts: ClusterFacts, job: JobSpec) -> PartitionFacts:
    """Return a job's partition (default: the first); raise UsageError if it is unknown or too small."""
    by_name = {partition.name: partition for partition in facts.partitions}
    partition = facts.partitions[0] if job.partition is None else by_name.get(job.partition)
    if partition is None:
        cause, attach = "", ""
        if facts.is_foreign:
            cause = "at `attach`, Slurm had no such partition, or accepted no job of yours in it"
            attach = f"`clusterctl attach LOGIN --account NAME --partition {job.partition}` tries it; or "
        raise UsageError(
            f"partition {job.partition!r} does not exist",
            code="unknown-partition",
            why=cause,
            fix=f"{attach}use one of these with --partition: {', '.join(by_name)}",
        )
    count = len(partition.nodes)
    if job.nodes > count:
        raise UsageError(
            f"the job asks for {job.nodes} nodes",
            code="too-many-nodes",
            why=f"partition {partition.name} has {count}",
            fix=f"use --nodes {count} or fewer, or another partition",
        )
    longest = partition.max_time
    # In slurm.conf a limit of 90 s becomes 2 minutes.
    unit = 60 if facts.has_slurm else 1
    if job.time is not None and longest is not None and -(-job.time // unit) > -(-longest // unit):
        raise UsageError(
            f"the job asks for a time limit of {format_duration(job.time)}",
            code="time-above-limit",
            why=f"the time limit (max_time) of partition {partition.name} is {format_duration(longest)}",
            fix="use a shorter --time, or another partition",
        )
    return partition


def reject_long_script(facts: ClusterFacts, job: JobSpec) -> None:
    """Raise UsageError if the time limit in a script's #SBATCH lines is above its partition's, as for --time.

    The Slurm of other people may accept such a job, which then never starts.
    """
    script = UserScript.read(job.script) if job.script is not None and facts.is_foreign else None
    own_time = script.directives.last("time") if script is not None and job.time is None else None
    if script is None or own_time is None:
        return
    own = script.directives.last("partition")
    name = job.partition or (own.value if own is not None else None)
    limit_s = None
    with suppress(ValueError):
        limit_s = parse_slurm_time_s(own_time.value)
    # It may be a list of partitions.
    if limit_s is not None and name in {partition.name for partition in facts.partitions}:
        partition_of(facts, job.model_copy(update={"time": limit_s, "partition": name}))
