"""The plan of a `submit` or `replay`: jobs with their scripts, files and packages, the most that they
can use, and a digest of all that is submitted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from clusterctl.jobs.source import Source
from clusterctl.jobs.submit import PreparedJob, content_of
from clusterctl.scheduler.arrays import count_at_most
from clusterctl.scheduler.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.site import Site
from clusterctl.state.inventory import (
    PartitionFacts,
    applied_if_known,
    identity_of,
    inventory_if_known,
    planned_inventory,
)
from clusterctl.state.workspace import Workspace
from clusterctl.util.digest import digest_of, plan_changed

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec

# A job with one of these options may get more nodes than --nodes tells, or start again.
_MAY_ADD: Final = frozenset(
    "--cluster --cluster-constraint --clusters --nodefile --nodelist --requeue".split()
)
# Without --nodes, Slurm chooses the number of nodes, unless the job has only these options.
_ON_ONE_NODE: Final = frozenset(
    "--account --array --cpus-per-task --error --gpus-per-node --job-name --mail-type --mail-user "
    "--mem --no-requeue --ntasks-per-node --output --partition --qos --signal --time".split()
)
# 3, 0-9 or 1-16:4, several of them, and how many tasks run at a time.
_ARRAY: Final = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?")
# Jobs that have ended, and the cluster's time zone, are only known on the cluster.
_OF_THE_MOMENT: Final = re.compile("#SBATCH --(dependency|begin|deadline)=")
_HOUR_S: Final = 3600
# Files that a dry run lists by name.
_MOST_LISTED: Final = 20
# Options with paths on this machine. A replay has a new temporary folder each time.
_PLACES: Final = frozenset({"script", "folder", "requirements"})

# The price of a node of a partition in USD an hour. None: unknown.
Price = Callable[[str], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AtMost:
    """The most that jobs can use together. None: unknown, so that it may be any amount.

    jobs: of the scheduler; an array counts as one. tasks: each task of an array counts.
    node_hours: the nodes times the time limit, for all tasks, and for all attempts of a chain.
        Slurm gives a job that lost a node its time limit anew, unless it has --no-requeue.
    usd: the price of these node hours. nodes: of the cluster that `up` creates; 0: another command.
    """

    jobs: int
    tasks: int | None = 0
    node_hours: float | None = 0.0
    usd: float | None = 0.0
    nodes: int = 0
    currency: str = "USD"

    def __str__(self) -> str:
        hours = "unknown" if self.node_hours is None else f"{self.node_hours:g}"
        usd = "unknown" if self.usd is None else f"{self.usd:g}"
        return f"at most: node hours {hours}, {self.currency} {usd}"


@dataclass(frozen=True, slots=True)
class SubmitPlan:
    """The effect of a submission on a cluster. `--dry-run`, agents and the Python interface show
    it, and `--if-digest` carries it out.

    spec: of the cluster. jobs: ``pinned``, so that they can only be submitted with these files.
    """

    spec: ClusterSpec
    jobs: tuple[PreparedJob, ...]
    at_most: AtMost
    digest: str

    @classmethod
    def of(cls, spec: ClusterSpec, jobs: Sequence[PreparedJob], verb: str) -> SubmitPlan:
        """Return the plan of jobs for a cluster. verb: that submits them."""
        fixed = pinned(jobs)
        identity, most = most_of_jobs(spec, [job.request for job in fixed])
        return cls(spec, fixed, most, digest(verb, identity, fixed))

    @property
    def answer(self) -> dict[str, Any]:
        """The fields that `-o json` shows for all jobs together."""
        return {
            "dry_run": True,
            "cluster": self.spec.name,
            "digest": self.digest,
            "at_most": asdict(self.at_most),
        }


@dataclass(frozen=True, slots=True)
class PlannedFiles:
    """A file that is sent, or (``files`` > 1) more files of a folder. bytes: their size together."""

    path: str
    bytes: int
    files: int = 1


def listed(source: Source) -> list[PlannedFiles]:
    """Return the first files that are sent with a job, and then the folders with the other files."""
    files = sorted(source.files, key=lambda item: item.path)
    rows = [PlannedFiles(item.path, item.size) for item in files[:_MOST_LISTED]]
    folders: dict[str, list[int]] = {}
    for item in files[_MOST_LISTED:]:
        folder, slash, _ = item.path.partition("/")
        folders.setdefault(f"{folder}/" if slash else "./", []).append(item.size)
    return [*rows, *(PlannedFiles(path, sum(sizes), len(sizes)) for path, sizes in folders.items())]


def most_of_jobs(spec: ClusterSpec, requests: Sequence[Request]) -> tuple[tuple[str, str], AtMost]:
    """Return the identity of a spec's cluster, and the most that jobs can use there.

    If the cluster is up, its present partitions and prices count, not those of the spec.
    """
    workspace = Workspace.of(spec.name)
    inventory = inventory_if_known(workspace)
    applied = (inventory and applied_if_known(workspace)) or spec
    site = site_of(inventory or planned_inventory(spec))
    return identity_of(workspace), at_most(site, requests, partial(_price, applied))


def _price(spec: ClusterSpec, partition: str) -> float | None:
    if spec.provider.shares_kernel:
        # Nodes that are a part of this machine cost nothing, unless the spec has a price.
        prices = {each.name: each.price_per_hour for each in spec.partitions}
        return prices.get(partition) or 0.0
    # A slow import, which a submission does not need.
    from clusterctl.providers.registry import provider_of  # noqa: PLC0415

    return provider_of(spec.provider).node_price(spec, partition)


def at_most(site: Site, requests: Sequence[Request], price: Price) -> AtMost:
    """Return the most that jobs can use on a site, as the site's ``fitted_to`` returns them."""
    uses = [_use_of(site, request, price) for request in requests]
    tasks, hours, costs = zip(*uses, strict=True)
    return AtMost(
        jobs=len(requests),
        tasks=_sum(tasks),
        node_hours=_rounded(_sum(hours)),
        usd=_rounded(_sum(costs)),
    )


def _sum(values: Sequence[Any]) -> Any:
    return None if None in values else sum(values)


def _rounded(value: float | None) -> float | None:
    """Round up, so that the value stays an upper bound."""
    return None if value is None else math.ceil(round(value * 1e4, 6)) / 1e4


def _use_of(
    site: Site, request: Request, price: Price
) -> tuple[int | None, float | None, float | None]:
    """Return a job's number of tasks, node hours and USD. None: unknown."""
    partition = request.partition_in(site.inventory)
    tasks = _tasks(request.array)
    nodes = _nodes(request)
    run_s = _run_s(site, request, partition)
    usd_per_hour = price(partition.name) if partition is not None else None
    if tasks is None or nodes is None:
        return tasks, None, _cost(None, usd_per_hour)
    hours = None if run_s is None else tasks * nodes * run_s / _HOUR_S
    return tasks, hours, _cost(hours, usd_per_hour)


def _cost(hours: float | None, usd_per_hour: float | None) -> float | None:
    if usd_per_hour == 0:
        return 0.0
    return None if hours is None or usd_per_hour is None else hours * usd_per_hour


def _tasks(array: str) -> int | None:
    """Return how many tasks a job with this array has in Slurm. None: the text can't be read."""
    if not array:
        return 1
    return count_at_most(array) if _ARRAY.fullmatch(array) else None


def _nodes(request: Request) -> int | None:
    """Return the number of nodes of a job, or of each task of an array."""
    # A flag of clusterctl does not change the number of nodes that another option sets.
    names = {one.own_name for one in (*request.own, *request.slurm)}
    if names & _MAY_ADD:
        return None
    if nodes := request.value("--nodes"):
        return int(nodes) if nodes.isdecimal() else None
    others = names - _ON_ONE_NODE
    is_single = not others or (others == {"--ntasks"} and request.value("--ntasks") == "1")
    return 1 if is_single else None


def _run_s(site: Site, request: Request, partition: PartitionFacts | None) -> float | None:
    """Return how long a job can run in seconds, over all attempts."""
    limit_s = request.time_s
    if limit_s is None and partition is not None and not site.inventory.is_foreign:
        limit_s = partition.max_time
    if limit_s is None:
        return None
    # Slurm counts limits in minutes.
    limit_s = -(-limit_s // site.time_unit_s) * site.time_unit_s
    job = request.job
    if job.chain is not None:
        # The last attempt may start just before the end of the chain.
        return job.chain + limit_s
    return None if job.requeue else limit_s


def pinned(jobs: Sequence[PreparedJob]) -> tuple[PreparedJob, ...]:
    """Return the jobs, which can only be submitted with the present content of their files."""
    return tuple(replace(job, content=content_of(job)) for job in jobs)


def digest(verb: str, cluster: Sequence[str], jobs: Sequence[PreparedJob]) -> str:
    """Return the digest of a submission. cluster: its name and id. jobs: ``pinned``."""
    return digest_of([verb, *cluster, *map(_submitted, jobs)])


def _submitted(prepared: PreparedJob) -> str:
    """Return all inputs of a job that decide its effect, as text."""
    job = prepared.job
    content = prepared.content
    lock = prepared.environment.lock
    text = json.dumps(
        {
            "name": job.name,
            "script": prepared.script,
            "job": {key: value for key, value in job.record.items() if key not in _PLACES},
            "content": asdict(content) if content is not None else None,
            "lock": lock.text if lock is not None else None,
        },
        sort_keys=True,
        default=str,
    )
    # The jobs of a scaling have a new name each time.
    return text if job.scaling is None else text.replace(job.name, "")


def with_content_of(
    prepared: Sequence[PreparedJob], shown: Sequence[PreparedJob]
) -> tuple[PreparedJob, ...]:
    """Return the jobs to submit, with the content of those of the dry run.

    prepared: for the cluster, by ``Preparer.prepare``. shown: of a plan.

    Raises UsageError if their scripts or Python environments differ.
    """
    pairs = list(zip(prepared, shown, strict=True))
    for job, before in pairs:
        lines = zip_longest(_fixed_lines(job), _fixed_lines(before), fillvalue="")
        if differing := next((pair for pair in lines if pair[0] != pair[1]), None):
            now, then = differing
            raise plan_changed(f"the job's script has {now!r} in place of {then!r} on the cluster")
        if job.environment.lock != before.environment.lock:
            raise plan_changed(f"the packages of {job.job.name} have changed")
    return tuple(replace(job, content=before.content) for job, before in pairs)


def _fixed_lines(prepared: PreparedJob) -> list[str]:
    """Return the lines of a job's script that do not depend on the state of the cluster."""
    return [line for line in prepared.script.splitlines() if not _OF_THE_MOMENT.match(line)]
