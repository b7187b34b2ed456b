"""The plan of a `submit` or `replay`: jobs with their scripts, files and packages, and the most that
they can use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from clusterctl.jobs.source import Source
from clusterctl.jobs.submit import PreparedJob
from clusterctl.scheduler.request.arrays import count_at_most
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.site import Site
from clusterctl.state.inventory import (
    PartitionFacts,
    applied_if_known,
    inventory_if_known,
    planned_inventory,
)
from clusterctl.state.workspace import Workspace
from clusterctl.util.confine import Asked

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
_HOUR_S: Final = 3600
# Files that a dry run lists by name.
_MOST_LISTED: Final = 20

# The price of a node of a partition in USD an hour. None: unknown.
Price = Callable[[str], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AtMost:
    """The most that jobs can use together. None: unknown, so that it may be any amount.

    jobs: of the scheduler; an array counts as one. tasks: each task of an array counts.
    node_hours: the nodes times the time limit, for all tasks, and for all attempts of a chain.
        Slurm gives a job that lost a node its time limit anew, unless it has --no-requeue.
    usd: the price of these node hours.
    nodes: of the largest job, or task of an array. time_s: the longest time that a job can run.
    """

    jobs: int
    tasks: int | None
    node_hours: float | None
    usd: float | None
    nodes: int | None
    time_s: float | None
    currency: str = "USD"

    def __str__(self) -> str:
        hours = "unknown" if self.node_hours is None else f"{self.node_hours:g}"
        usd = "unknown" if self.usd is None else f"{self.usd:g}"
        return f"at most: node hours {hours}, {self.currency} {usd}"

    @property
    def asked(self) -> Asked:
        """What the limits of agents count."""
        return Asked(nodes=self.nodes, time_s=self.time_s, node_hours=self.node_hours)


@dataclass(frozen=True, slots=True)
class SubmitPlan:
    """The effect of a submission on the cluster of a spec. `--dry-run` and the Python interface show
    it.
    """

    spec: ClusterSpec
    jobs: tuple[PreparedJob, ...]
    at_most: AtMost

    @property
    def answer(self) -> dict[str, Any]:
        """The fields that `-o json` shows for all jobs together."""
        return {
            "dry_run": True,
            "cluster": self.spec.name,
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


def most_of_jobs(spec: ClusterSpec, requests: Sequence[Request]) -> AtMost:
    """Return the most that jobs can use on a spec's cluster.

    If the cluster is up, its present partitions and prices count, not those of the spec.
    """
    workspace = Workspace.of(spec.name)
    inventory = inventory_if_known(workspace)
    applied = (inventory and applied_if_known(workspace)) or spec
    site = site_of(inventory or planned_inventory(spec))
    return at_most(site, requests, partial(_price, applied))


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
    return AtMost(
        jobs=len(requests),
        tasks=_sum([use.tasks for use in uses]),
        node_hours=_rounded(_sum([use.node_hours for use in uses])),
        usd=_rounded(_sum([use.usd for use in uses])),
        nodes=_most([use.nodes for use in uses]),
        time_s=_most([use.time_s for use in uses]),
    )


def _sum(values: Sequence[Any]) -> Any:
    return None if None in values else sum(values)


def _most(values: Sequence[Any]) -> Any:
    return None if None in values else max(values)


def _rounded(value: float | None) -> float | None:
    """Round up, so that the value stays an upper bound."""
    return None if value is None else math.ceil(round(value * 1e4, 6)) / 1e4


def _use_of(site: Site, request: Request, price: Price) -> AtMost:
    """Return the most that a single job can use."""
    partition = request.partition_in(site.inventory)
    tasks = _tasks(request.array)
    nodes = _nodes(request)
    run_s = _run_s(site, request, partition)
    usd_per_hour = price(partition.name) if partition is not None else None
    hours = None
    if tasks is not None and nodes is not None and run_s is not None:
        hours = tasks * nodes * run_s / _HOUR_S
    return AtMost(
        jobs=1,
        tasks=tasks,
        node_hours=hours,
        usd=_cost(hours, usd_per_hour),
        nodes=nodes,
        time_s=run_s,
    )


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
