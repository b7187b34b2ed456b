"""A job's request to the scheduler: each value with the place at which the user wrote it.

A request is made once, after the options of a job are known, and is the only reader of the job's
script. The checks, the batch script, a dry run, its bound and `where` read it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

from clusterctl.scheduler.request.user_script import UserScript
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_options import OPTIONS, quantities_of
from clusterctl.spec.sbatch import (
    MARK,
    SINGLETON,
    Directive,
    directives_in,
    directives_of,
    plain_array,
    quoted,
)
from clusterctl.spec.units import parse_slurm_time_s
from clusterctl.state.ledger import PROGRAM_FOLDER

if TYPE_CHECKING:
    from clusterctl.state.inventory import Inventory, PartitionFacts

# The options of sbatch that tell how many tasks of a packed job run on a node at a time.
_TASK_COUNTS: Final = frozenset({"--ntasks", "--ntasks-per-node"})
# The jobs of a scaling have the same name. With this option, Slurm runs jobs with the same name in
# turn.
IN_TURN: Final = f"--dependency={SINGLETON}"
# Slurm would give a packed job of whole nodes only the default part of their memory.
_WHOLE_NODES: Final = ("--exclusive", "--mem=0")
# The product of these options is the number of tasks.
_SHAPE: Final = frozenset({"--nodes", "--ntasks-per-node"})
_SETS_SHAPE: Final = frozenset({"nodes", "ntasks-per-node", "tasks-per-node"})
# Options without an effect on jobs without GPUs.
_OF_GPUS: Final = frozenset({"--gpu-bind", "--gpu-freq"})
# Slurm checks time limits once a minute: a signal less than 60 s before the end could come too
# late. A short job gets the signal later, because it would otherwise get the signal at its start.
_SIGNAL: Final = "USR1"
_SIGNAL_S: Final = 60
_SIGNAL_PART: Final = 3


@dataclass(frozen=True, slots=True)
class Request:
    """A job's request to the scheduler.

    job: the options of the job. script: the user's script. None: a bundled job, or a shell.
    own: the options in the script's #SBATCH lines that neither flags nor --slurm replace.
    flags: the options that the job's flags and their defaults set. slurm: the options of --slurm.
    fills_nodes: whether a packed job has whole nodes, because the number of tasks that run on a
        node at a time is unknown.

    Each option is a ``Directive`` with its value and its place.
    """

    job: JobSpec
    script: UserScript | None = None
    own: tuple[Directive, ...] = ()
    flags: tuple[Directive, ...] = ()
    slurm: tuple[Directive, ...] = ()
    fills_nodes: bool = False

    @classmethod
    def read(cls, job: JobSpec) -> Request:
        """Return the request of a job. Raises UsageError if its script can't be read."""
        # The script of an interactive session is a folder.
        is_file = job.script is not None and not job.script.is_dir()
        return cls(job, UserScript.read(job.script) if job.script and is_file else None).of(job)

    def of(self, job: JobSpec) -> Request:
        """Return the request of a job with the same script, such as this request with defaults."""
        lines = self.script.directives.options if self.script is not None else ()
        slurm = directives_of(job.slurm)
        asked = {quantity for one in (*lines, *slurm) for quantity in one.quantities}
        has_count = "tasks_per_node" in job.model_fields_set or bool(asked & _TASK_COUNTS)
        fills_nodes = job.pack and not has_count
        if fills_nodes:
            has_memory = job.mem is not None or "--mem" in asked
            slurm += directives_of(_WHOLE_NODES[:1] if has_memory else _WHOLE_NODES)
        own = _unreplaced(lines, job, slurm)
        has_lines = self.script is not None and bool(self.script.directives.lines)
        flags = _flags(_as_for_slurm(job, (*own, *slurm)), defaults=not has_lines)
        return replace(
            self,
            job=job,
            own=tuple(_in_program_folder(one, job) for one in own),
            flags=tuple(flags),
            slurm=tuple(_in_program_folder(one, job) for one in slurm),
            fills_nodes=fills_nodes,
        )

    @property
    def options(self) -> tuple[Directive, ...]:
        """All options of sbatch that have an effect. The last of the same name counts."""
        return (*self.own, *self.flags, *self.slurm)

    def without(self, options: Collection[Directive]) -> Request:
        """Return the request without some of its options."""
        own, flags, slurm = (
            tuple(one for one in group if one not in options)
            for group in (self.own, self.flags, self.slurm)
        )
        return replace(self, own=own, flags=flags, slurm=slurm)

    def last(self, name: str) -> Directive | None:
        """Return the option with this name, such as ``--nodes``, that counts."""
        return next((one for one in reversed(self.options) if one.own_name == name), None)

    def value(self, name: str) -> str:
        """Return the value of the option with this name. Empty: the option is not given."""
        directive = self.last(name)
        return (directive.value if directive is not None else None) or ""

    def sets(self, *quantities: str) -> bool:
        """Return whether an option sets one of these quantities (see ``Directive.quantities``)."""
        return any(one.quantities & {*quantities} for one in self.options)

    @property
    def time_s(self) -> int | None:
        """The time limit. None: not set, or not a valid time."""
        return _time_s(self.options)

    @property
    def partitions(self) -> tuple[str, ...]:
        """The partitions, any of which may run the job. Empty: the scheduler's default."""
        return tuple(filter(None, self.value("--partition").split(",")))

    def partition_in(self, inventory: Inventory) -> PartitionFacts | None:
        """Return the partition of the job. None: it is unknown, or Slurm chooses among several."""
        by_name = {partition.name: partition for partition in inventory.partitions}
        if inventory.is_routed and not self.partitions:
            return None
        names = self.partitions or (inventory.partitions[0].name,)
        return by_name.get(names[0]) if len(names) == 1 else None

    def partition_name_in(self, inventory: Inventory) -> str | None:
        """Return the name of the job's partition. None: it is unknown, or Slurm chooses among
        several.
        """
        partition = self.partition_in(inventory)
        return partition.name if partition is not None else None

    @property
    def indices(self) -> str:
        """The indices of the tasks, also of packed tasks. Empty: the job has no tasks."""
        job = self.job
        own = self.script.directives.last("array") if job.array is None and self.script else None
        return str(plain_array(own.value if own is not None else job.array) or "")

    @property
    def array(self) -> str:
        """The indices of the job's array in Slurm. Empty: the job is not an array, or its tasks are
        packed into a single job.
        """
        return "" if self.job.pack else self.indices

    def notes(self) -> Iterator[str]:
        """Yield a line for each thing that the script asks of Slurm in vain."""
        if self.script is not None:
            yield from self.script.notes(self.job, self.own)

    @property
    def lines(self) -> tuple[str, ...]:
        """The script's #SBATCH lines, without the options that flags or --slurm replace."""
        directives = self.script.directives if self.script is not None else None
        if directives is None or self.own == directives.options:
            return directives.lines if directives is not None else ()
        lines = (group for _, group in groupby(self.own, key=lambda directive: directive.line))
        return tuple(
            f"{MARK} {' '.join(quoted(str(directive)) for directive in line)}" for line in lines
        )


def _unreplaced(
    lines: Sequence[Directive], job: JobSpec, slurm: Sequence[Directive]
) -> list[Directive]:
    """Return the options of a script that neither the job's flags nor --slurm replace."""
    given = {*quantities_of(job.model_fields_set)}
    given |= {one.own_name for one in lines if one.option and one.option.role == "ours"}
    for directive in slurm:
        given |= {*directive.quantities, directive.own_name}
    shapers = (one for one in lines if one.option and one.option.name in _SETS_SHAPE)
    shape = {quantity for one in shapers for quantity in one.quantities}
    if given & _SHAPE and given | shape >= _SHAPE:
        given.add("--ntasks")
    if "gpus" in job.model_fields_set and not job.gpus:
        given |= _OF_GPUS
    return [remaining for one in lines if (remaining := one.without(given))]


def _flags(job: JobSpec, *, defaults: bool) -> Iterator[Directive]:
    """Yield the options of sbatch for a job's options.

    defaults: also those that Slurm needs, such as ``--nodes=1``, which the user did not give.
    """
    for name, option in OPTIONS.items():
        if name not in job.model_fields_set and not (defaults and option.writes_default):
            continue
        for word in option.words(getattr(job, name)):
            place = job.places.get(name, option.flag)
            yield from (replace(one, place=place) for one in directives_in([(0, word)]))


def _as_for_slurm(job: JobSpec, given: Sequence[Directive]) -> JobSpec:
    """Return the job as Slurm gets it: packed tasks are no array, and a job that is requeued gets a
    signal shortly before its time limit. given: the options of the script and of --slurm.
    """
    if job.pack:
        job = job.model_copy(update={"array": None})
    if not job.requeue or job.signal or any("--signal" in one.quantities for one in given):
        return job
    limit_s = job.time or _time_s(given)
    lead_s = _SIGNAL_S if limit_s is None else min(_SIGNAL_S, max(limit_s // _SIGNAL_PART, 1))
    return job.model_copy(update={"signal": f"{_SIGNAL}@{lead_s}"})


def _time_s(options: Sequence[Directive]) -> int | None:
    """Return the time limit that options set, in seconds. None: not set, or not a valid time."""
    texts = [one.value for one in options if one.own_name == "--time"]
    with suppress(ValueError):
        return parse_slurm_time_s(texts[-1]) if texts else None
    return None


def _in_program_folder(directive: Directive, job: JobSpec) -> Directive:
    """Return an option, with the path of --input below the program's folder, to which the file is
    sent.
    """
    path = directive.value or ""
    if directive.own_name != "--input" or path.startswith("/"):
        return directive
    value = posixpath.normpath(f"{PROGRAM_FOLDER}/{job.place.start}/{path}")
    return replace(directive, value=value)
