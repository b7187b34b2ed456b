"""Checks of a job before its submission. A site has those that apply to it (see site.py)."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from clusterctl.errors import UsageError, excluded, unaccompanied
from clusterctl.scheduler.parts import parts_of, tasks_of
from clusterctl.scheduler.script import array_of, dependencies_of
from clusterctl.scheduler.slurm_values import expand_nodes
from clusterctl.scheduler.user_script import UserScript, partition_of
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_options import quantities_of
from clusterctl.spec.program import is_python
from clusterctl.spec.sbatch import directives_of
from clusterctl.spec.units import parse_slurm_time_s
from clusterctl.state.inventory import Inventory

if TYPE_CHECKING:
    from clusterctl.scheduler.site import Site

_BY_PMIX: Final = re.compile(r"^[^#\n]*(?:--mpi[= ]pmix|SLURM_MPI_TYPE=pmix)", re.MULTILINE)


def reject_pmix(site: Site, job: JobSpec) -> None:
    """Raise UsageError if the job's shell script uses PMIx, and Slurm has no PMIx plugin."""
    if site.inventory.pmix or job.script is None or is_python(job.script):
        return
    if _BY_PMIX.search(job.script.read_text(errors="replace")):
        raise UsageError(
            f"the script {job.script.name} starts ranks with PMIx",
            code="no-pmix",
            where=str(job.script),
            why="the PMIx plugin of Slurm is not installed on this cluster, so the job step "
            "would fail",
            fix="in the script, use `mpirun PROGRAM` instead of `srun --mpi=pmix PROGRAM`",
        )


def reject_useless_build(site: Site, job: JobSpec) -> None:
    """Raise UsageError if the job has nothing to build, or its nodes could not find the result."""
    if job.build is None:
        return
    if job.bundled:
        raise excluded("--build", f"the bundled job {job.bundled}")
    if job.container:
        raise excluded("--build", "--container")
    if not site.inventory.is_shared and job.nodes > 1:
        raise UsageError(
            "--build needs a folder that all nodes share",
            code="build-not-shared",
            why="the program is built on the job's first node",
            fix="use --nodes 1, or give the hosts a shared folder (provider.shared)",
        )


def reject_useless_mount(site: Site, job: JobSpec) -> None:  # noqa: ARG001
    """Raise UsageError if the job mounts folders, and has no container."""
    if job.mount and not job.container:
        raise unaccompanied("--mount", "--container")


def reject_excluded_nodes(site: Site, job: JobSpec) -> None:
    """Raise UsageError if a pattern of --exclude is a node, which sbatch's option of this name
    excludes.
    """
    nodes = {name for partition in site.inventory.partitions for name in partition.nodes}
    for pattern in job.exclude:
        with suppress(ValueError):
            if not nodes.isdisjoint(expand_nodes(pattern)):
                raise UsageError(
                    f"--exclude leaves out files, but {pattern} names a node",
                    code="exclude-names-node",
                    fix=f"use --slurm --exclude={pattern} for the node, or --exclude /{pattern} "
                    "for a file",
                )


def reject_large_array(site: Site, job: JobSpec) -> None:
    """Raise UsageError if the job's array has an index above the site's limit."""
    indices = array_of(job, UserScript.of(job))
    # Without the step of a range, and the number of tasks at a time.
    highest = max(map(int, re.findall(r"(?<![:\d])\d+", indices.partition("%")[0])), default=0)
    if indices and highest >= site.array_limit:
        raise site.array_too_large(indices, highest)


def reject_many_tasks(site: Site, job: JobSpec) -> None:
    """Raise UsageError if the job's array has more tasks than Slurm's queue takes of the user."""
    inventory = site.inventory
    indices = array_of(job, UserScript.of(job))
    count = len(tasks_of(indices))
    if (
        inventory.max_submit is not None
        and count > inventory.max_submit
        and _has_default_limits(inventory, job)
    ):
        raise UsageError(
            f"the array {indices} has {count} tasks",
            code="too-many-tasks",
            why=f"your account may have {inventory.max_submit} jobs in Slurm's queue (MaxSubmitJobs)",
            fix=f"submit arrays or sweeps of at most {inventory.max_submit} tasks, "
            "or use another --account or --qos",
        )


def _has_default_limits(inventory: Inventory, job: JobSpec) -> bool:
    """Return whether the limits that `attach` has read are those of the job, which may name another
    QOS.
    """
    defaults = {
        "account": inventory.account,
        "qos": inventory.qos,
        "partition": inventory.partitions[0].name,
    }
    script = UserScript.of(job)
    requests = [*(script.directives.options if script else ()), *directives_of(job.slurm)]
    if any(request.quantities & quantities_of(defaults) for request in requests):
        return False
    return all(getattr(job, name) in {None, value} for name, value in defaults.items())


def reject_long_script(site: Site, job: JobSpec) -> None:
    """Raise UsageError if the time limit in a script's #SBATCH lines is above its partition's, as
    for --time.

    The Slurm of other people may accept such a job, which then never starts.
    """
    script = UserScript.read(job.script) if job.script is not None else None
    own_time = script.directives.last("time") if script is not None and job.time is None else None
    if script is None or own_time is None:
        return
    own = script.directives.last("partition")
    name = job.partition or (own.value if own is not None else None)
    limit_s = None
    with suppress(ValueError):
        limit_s = parse_slurm_time_s(own_time.value)
    # It may be a list of partitions.
    if limit_s is not None and name in {partition.name for partition in site.inventory.partitions}:
        partition_of(site, job.model_copy(update={"time": limit_s, "partition": name}))


def reject_parts_in_turn(inventory: Inventory, job: JobSpec, script: str) -> None:
    """Raise UsageError if parts of an array that run in turn would need a dependency that Slurm
    refuses.
    """
    array = array_of(job, UserScript.of(job))
    own = dependencies_of(script)
    if "?" in own and any(part.in_turn for part in parts_of(array, inventory.max_array)):
        raise UsageError(
            f"the array {array} can't have the dependency {own}",
            code="dependency-refused",
            why=f"Slurm gets the array in parts (MaxArraySize is {inventory.max_array}), each waits "
            "for the part before it, and Slurm accepts no list of dependencies with both "
            "`,` and `?`",
            fix="leave out the number of tasks at a time (%N), or name a single job in the "
            "dependency",
        )
