"""Checks of a job before its submission: each yields an error for everything that does not fit.

A site has the checks that apply to it (see site.py), and runs all of them, so that a user sees all
errors at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from clusterctl.errors import UsageError, excluded, unaccompanied
from clusterctl.scheduler.request.arrays import count_at_most, tasks_of
from clusterctl.scheduler.request.capacity import shape_of
from clusterctl.scheduler.request.request import IN_TURN, Request
from clusterctl.scheduler.sites.script import is_launched
from clusterctl.scheduler.slurm.values import expand_nodes
from clusterctl.spec.job_options import OPTIONS, flag_of, job_options
from clusterctl.spec.names import Launcher
from clusterctl.spec.sbatch import Directive
from clusterctl.spec.sweep import MAX_TASKS
from clusterctl.util import formatting

if TYPE_CHECKING:
    from clusterctl.scheduler.sites.site import Site
    from clusterctl.state.inventory import Inventory, PartitionFacts


def check_partition(site: Site, request: Request) -> Iterator[UsageError]:
    """Yield errors if a partition is unknown, or if none of the partitions can run the job."""
    partitions = {partition.name: partition for partition in site.inventory.partitions}
    names = request.partitions or (site.inventory.partitions[0].name,)
    for name in names:
        if name not in partitions:
            yield _at(request, "--partition", site.unknown_partition(name))
    # If all are unknown, the other values are compared with the partitions that the user can name.
    open_to_job = [partitions[name] for name in names if name in partitions]
    open_to_job = open_to_job or [*partitions.values()]
    yield from _check_nodes(request, open_to_job)
    if site.refuses_too_much:
        yield from _check_share(site.inventory, request, open_to_job)
    yield from _check_time(request, open_to_job, site.time_unit_s)


def _at(request: Request, name: str, error: UsageError) -> UsageError:
    """Return an error about a quantity, with the place of the option that sets it."""
    of_quantity = (one for one in reversed(request.options) if name in one.quantities)
    directive = request.last(name) or next(of_quantity, None)
    error.where = directive.place if directive is not None else error.where
    return error


def _check_nodes(request: Request, partitions: Sequence[PartitionFacts]) -> Iterator[UsageError]:
    wanted = request.value("--nodes").partition("-")[0]
    largest = max(partitions, key=lambda partition: len(partition.nodes))
    count = len(largest.nodes)
    if wanted.isdecimal() and int(wanted) > count:
        error = UsageError(
            f"the job asks for {wanted} nodes",
            code="job-unfit",
            about="nodes",
            why=f"partition {largest.name} has {count}",
            fix=f"use --nodes {count} or fewer, or another partition",
        )
        yield _at(request, "--nodes", error)


def _check_time(
    request: Request, partitions: Sequence[PartitionFacts], unit_s: int
) -> Iterator[UsageError]:
    limits = [partition.max_time for partition in partitions]
    wanted_s = request.time_s
    longest = max(partitions, key=lambda partition: partition.max_time or 0)
    longest_s = longest.max_time
    if wanted_s is None or longest_s is None or None in limits:
        return
    # In slurm.conf a limit of 90 s becomes 2 minutes.
    if -(-wanted_s // unit_s) > -(-longest_s // unit_s):
        error = UsageError(
            f"the job asks for a time limit of {formatting.duration(wanted_s)}",
            code="job-unfit",
            about="time",
            why=f"the time limit (max_time) of partition {longest.name} is "
            f"{formatting.duration(longest_s)}",
            fix="use a shorter --time, or another partition",
        )
        yield _at(request, "--time", error)


def _check_share(
    inventory: Inventory, request: Request, partitions: Sequence[PartitionFacts]
) -> Iterator[UsageError]:
    """Yield errors if the job asks for more of a node than any node has."""
    shape = shape_of(request)
    if shape is None:
        return
    hosts = {host.name: host for host in inventory.hosts}
    nodes = [hosts.get(name) for partition in partitions for name in partition.nodes]
    asked: Mapping[str, tuple[int, list[int | None], str]] = {
        "CPUs": (shape.cpus, [node.cpus if node else None for node in nodes], "--cpus-per-task"),
        "MiB of memory": (
            shape.memory_mib,
            [node.memory_mib if node else None for node in nodes],
            "--mem",
        ),
        "GPUs": (shape.gpus, [partition.gpus for partition in partitions], "--gpus-per-node"),
    }
    for what, (wanted, known, name) in asked.items():
        numbers = [number for number in known if number is not None]
        if len(numbers) < len(known) or wanted <= max(numbers, default=wanted):
            continue
        error = UsageError(
            f"the job asks for {wanted} {what} of each node",
            code="job-unfit",
            about="node-size",
            why=f"no node of {', '.join(partition.name for partition in partitions)} has more than "
            f"{max(numbers)}",
            fix="ask for less of a node, or use another partition",
        )
        yield _at(request, name, error)


def check_directives(site: Site, request: Request) -> Iterator[UsageError]:  # noqa: ARG001
    """Yield errors about lines that can't be read, are no options of a job, or contradict flags."""
    if request.script is not None:
        yield from request.script.directives.faults
    for directive in request.own:
        if contradiction := _contradiction(request, directive):
            problem, fix = contradiction
            yield UsageError(f"{directive.place} {problem}", about="directive", fix=fix)


def _contradiction(request: Request, directive: Directive) -> tuple[str, str] | None:
    """Return the problem and the fix if an option of the script contradicts the job's flags, or
    None.
    """
    job = request.job
    name = directive.own_name
    flags = job.model_fields_set
    value = directive.value or ""
    if directive.option and directive.option.role == "never":
        use = directive.option.use
        advice = f"use `clusterctl submit {use}`" if use else directive.option.instead
        return "is not an option of a job", f"leave it out of the script; {advice}".rstrip("; ")
    flag = next((flag_of(quantity) for quantity in directive.quantities), "")
    if not directive.is_readable:
        return (
            "has a value that sbatch can't read",
            f"correct it{f', or pass {flag}' if flag else ''}",
        )
    if name == "--ntasks":
        shape = (OPTIONS["nodes"], OPTIONS["tasks_per_node"])
        for own, other in (shape, reversed(shape)):
            least = getattr(job, own.name)
            if own.name in flags and value.isdecimal() and int(value) < least:
                problem = f"asks for fewer tasks in total than {own.flag} {least}"
                return problem, f"also pass {other.flag}, which replaces --ntasks"
    count = _count_nodes(value) if name == "--nodelist" else 0
    if "nodes" in flags and count > job.nodes:
        fix = f"use --nodes {count}, or name other nodes with --slurm --nodelist=NODES"
        return f"names more nodes than --nodes {job.nodes}", fix
    if any(name == given.own_name for given in request.slurm):
        return (
            f"can't be combined with --slurm {name}",
            "leave out either, or pass --gpus or --cpus",
        )
    if flag and "gpu" in name and "gpus" in flags and not job.gpus:
        return "needs GPUs, and --gpus is 0", f"replace it with {flag}"
    return None


def _count_nodes(names: str) -> int:
    with suppress(ValueError):
        return len(expand_nodes(names))
    return 0


def unfit_foreign_lines(site: Site, request: Request) -> Iterator[UsageError]:
    """Yield an error for each line for another scheduler whose value would not fit the site.

    These lines have no effect, but the flags that replace them would be wrong.
    """
    for foreign in request.script.foreign if request.script is not None else ():
        # A value that is none of ours, such as an odd name, is named by its line alone.
        with suppress(UsageError):
            options = job_options(foreign.options).given
            update = {**options, "places": foreign.places}
            of_lines = request.of(request.job.model_copy(update=update))
            for fault in site.faults(of_lines):
                if fault.where in foreign.places.values():
                    yield fault


def check_pmix(site: Site, request: Request) -> Iterator[UsageError]:
    """Yield an error if the job's shell script uses PMIx, and Slurm has no PMIx plugin."""
    script = request.script
    if script is not None and script.uses_pmix and not site.inventory.pmix:
        yield UsageError(
            f"the script {script.name} starts ranks with PMIx",
            code="job-unfit",
            about="pmix",
            where=str(request.job.script),
            why="the PMIx plugin of Slurm is not installed on this cluster, so the job step "
            "would fail",
            fix="in the script, use `mpirun PROGRAM` instead of `srun --mpi=pmix PROGRAM`",
        )


def check_build(site: Site, request: Request) -> Iterator[UsageError]:
    """Yield errors if the job has nothing to build, or its nodes could not find the result."""
    job = request.job
    if job.build is None:
        return
    if job.bundled:
        yield excluded("--build", f"the bundled job {job.bundled}")
    if job.container:
        yield excluded("--build", "--container")
    if job.nodes > 1:
        error = UsageError(
            "--build needs a folder that all nodes share",
            code="unsupported",
            about="build",
            why="the program is built on the job's first node",
            fix="use --nodes 1, or give the hosts a shared folder (provider.shared)",
        )
        yield from site.folders.unfit(error)


def check_mount(site: Site, request: Request) -> Iterator[UsageError]:  # noqa: ARG001
    """Yield an error if the job mounts folders, and has no container."""
    if request.job.mount and not request.job.container:
        yield unaccompanied("--mount", "--container")


def check_excluded_files(site: Site, request: Request) -> Iterator[UsageError]:
    """Yield an error for each pattern of --exclude that is a node, which sbatch's option of this
    name excludes.
    """
    nodes = {name for partition in site.inventory.partitions for name in partition.nodes}
    for pattern in request.job.exclude:
        with suppress(ValueError):
            if not nodes.isdisjoint(expand_nodes(pattern)):
                yield UsageError(
                    f"--exclude leaves out files, but {pattern} names a node",
                    about="exclude",
                    fix=f"use --slurm --exclude={pattern} for the node, or --exclude /{pattern} "
                    "for a file",
                )


def check_launcher(site: Site, request: Request) -> Iterator[UsageError]:
    """Yield errors if the launcher can't start the program, or not as many ranks."""
    job = request.job
    script = request.script
    is_shell = script is not None and not script.is_python
    if job.launcher is Launcher.TORCHRUN and (script is None or is_shell):
        yield UsageError(
            "torchrun can start only Python programs",
            about="torchrun",
            why="a shell script starts its ranks itself"
            if is_shell
            else "the bundled jobs are MPI programs",
            fix="leave --launcher out",
        )
    if job.ranks is None or job.pack:
        return
    # Without Slurm, mpirun starts all ranks.
    by_mpirun = is_launched(job, script) and (
        job.launcher is Launcher.MPIRUN
        or (bool(site.rank_ssh) and job.launcher is not Launcher.TORCHRUN)
    )
    problem = ""
    fix = "use --launcher mpirun"
    if is_shell:
        problem = "a shell script starts its ranks itself"
        fix = f"in the script, use mpirun -n {job.ranks}"
    elif not by_mpirun and job.launcher is Launcher.MPIRUN:
        problem = "a job of a single task has no launcher"
        fix = "use a larger --tasks-per-node"
    elif not by_mpirun:
        problem = f"only mpirun can leave tasks free for MPI_Comm_spawn, not {job.launcher}"
    elif (script is None or not script.directives.lines) and job.ranks > job.tasks:
        problem = f"the job has {job.tasks} tasks"
        fix = "use a larger --nodes or --tasks-per-node"
    if problem:
        yield UsageError(
            f"--set ranks={job.ranks} is not possible",
            about="ranks",
            why=problem,
            fix=fix,
        )


_PACK: Final = "add --pack, which runs the tasks inside a single job"


def check_array(site: Site, request: Request) -> Iterator[UsageError]:
    """Yield an error if the job's array has an index above the limit of the site's Slurm, or more
    tasks than its queue takes of the user.
    """
    inventory = site.inventory
    indices = request.array
    # Without the step of a range, and the number of tasks at a time.
    highest = max(map(int, re.findall(r"(?<![:\d])\d+", indices.partition("%")[0])), default=0)
    if indices and highest >= inventory.max_array:
        error = UsageError(
            f"the array {indices} has an index above {inventory.max_array - 1}"
            if inventory.max_array
            else "the cluster's Slurm takes no arrays",
            code="job-unfit",
            about="array-index",
            why=f"MaxArraySize of the cluster's Slurm is {inventory.max_array}",
            fix=f"{_PACK}, or submit several arrays" if inventory.max_array > 1 else _PACK,
        )
        yield _at(request, "--array", error)
        return
    count = len(tasks_of(indices))
    most = inventory.max_submit
    if most is not None and count > most and _has_default_limits(inventory, request):
        error = UsageError(
            f"the array {indices} has {count} tasks",
            code="job-unfit",
            about="tasks",
            why=f"your account may have {most} jobs in Slurm's queue (MaxSubmitJobs)",
            fix=f"{_PACK}; or submit arrays or sweeps of at most {most} tasks, or use another "
            "--account or --qos",
        )
        yield _at(request, "--array", error)


def _has_default_limits(inventory: Inventory, request: Request) -> bool:
    """Return whether the limits that `attach` has read are those of the job, which may name another
    QOS.
    """
    defaults = {
        "--account": inventory.account,
        "--qos": inventory.qos,
        "--partition": inventory.partitions[0].name,
    }
    return all(request.value(name) in {"", default} for name, default in defaults.items())


def check_pack(site: Site, request: Request) -> Iterator[UsageError]:  # noqa: ARG001
    """Yield errors if the job packs no tasks, too many, or tasks with ranks."""
    job = request.job
    if not job.pack:
        return
    array = request.indices
    if count_at_most(array) > MAX_TASKS:
        yield UsageError(
            f"the array {array} has more than {MAX_TASKS:,} tasks",
            code="job-unfit",
            about="packed-tasks",
            why="a job can't pack more tasks",
            fix=f"submit several jobs of at most {MAX_TASKS:,} tasks",
        )
    elif not tasks_of(array):
        yield UsageError(
            "--pack needs the tasks of an array or a sweep",
            about="pack",
            fix="add --array or --sweep, or leave out --pack",
        )
    for name in ("ranks", "launcher"):
        if name in job.model_fields_set:
            yield excluded("--pack", OPTIONS[name].flag)


def check_scaling(site: Site, request: Request) -> Iterator[UsageError]:  # noqa: ARG001
    """Yield errors if a line, a flag or --slurm sets what a scaling sets."""
    job = request.job
    if job.scaling is None:
        return
    if "ranks" in job.model_fields_set:
        yield excluded(OPTIONS["ranks"].flag, "--scaling")
    lines = request.script.directives.options if request.script is not None else ()
    own = (one for one in request.slurm if str(one) != IN_TURN)
    # The tasks of a sweep are an array.
    flags = (one for one in request.flags if job.sweep is None or one.own_name != "--array")
    for directive in (*lines, *flags, *own):
        if directive.own_name in {"--array", "--dependency"}:
            yield excluded(directive.place, "--scaling")


def check_chain(site: Site, request: Request) -> Iterator[UsageError]:
    """Yield errors if a job with `chain` is not requeued, or if its attempts have no time limit, or
    a longer one.
    """
    job = request.job
    if job.chain is None:
        return
    if "requeue" in job.model_fields_set and not job.requeue:
        yield excluded("--set chain=", "--no-requeue")
    partition = request.partition_in(site.inventory)
    has_time = request.last("--time") is not None
    of_partition = partition.max_time if partition is not None else None
    limit_s = request.time_s if has_time else of_partition
    if limit_s is None and partition is not None and not has_time:
        yield UsageError(
            "--set chain= needs a time limit",
            about="chain-limit",
            why="the job is requeued each time that it reaches its time limit",
            fix="add the time limit of an attempt, such as --time 4h",
        )
    if limit_s is not None and job.chain < limit_s:
        yield UsageError(
            f"--set chain={formatting.duration(job.chain)} is shorter than the job's time limit of "
            f"{formatting.duration(limit_s)}",
            about="chain",
            why="--set chain= is the total time of all attempts of the job",
            fix="use a longer --set chain=, or only --time",
        )
