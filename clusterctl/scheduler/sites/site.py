"""The site of a cluster, as jobs meet it: clusterctl's own Slurm, the Slurm of other people, or no
Slurm.

Everything that differs between them is a method or an attribute of ``Site``, and sites.py has the
three. Code outside this package calls these methods, and never asks which site it is.
"""

# ruff: noqa: ARG002 - a method has the arguments that some site needs

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from clusterctl.errors import UsageError
from clusterctl.hosts.needs import Trial, UnmetNeed, lacks_of, last_trial
from clusterctl.scheduler.base import JobInfo, JobRequest, Jobs, NodeInfo
from clusterctl.scheduler.sites import advice
from clusterctl.scheduler.sites.advice import Advice
from clusterctl.scheduler.sites.folders import JobFolders, folders_of
from clusterctl.scheduler.slurm.availability import kept_out
from clusterctl.scheduler.slurm.parse import PartitionInfo
from clusterctl.scheduler.slurm.refusals import RequestedOptions
from clusterctl.state.inventory import Inventory, planned_inventory
from clusterctl.state.ledger import Ledger
from clusterctl.transport.base import Connect, Transport

if TYPE_CHECKING:
    from clusterctl.scheduler.request.request import Request
    from clusterctl.scheduler.sites.script import Environment
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.spec.sbatch import Directive

# Yields an error for everything that does not fit the site.
Check: TypeAlias = "Callable[[Site, Request], Iterator[UsageError]]"


@dataclass(frozen=True, slots=True)
class Pace:
    """The shortest times between two queries of Slurm about watched jobs, in seconds. 0: as often
    as needed.

    changed_s: on average, after an event in the job's folder, and for jobs that start or end.
    pending_s, running_s: while all jobs are pending, or running. Meanwhile only the jobs' folders
        are read.
    """

    changed_s: float = 0.0
    pending_s: float = 0.0
    running_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Overview:
    """The state of a cluster: its nodes or, of other people's cluster, its partitions.

    is_ready: whether all nodes can be used but for those that a person wants out. Of other people's
        cluster: whether any can.
    """

    jobs: tuple[JobInfo, ...]
    is_ready: bool
    nodes: tuple[NodeInfo, ...] = ()
    partitions: tuple[PartitionInfo, ...] = ()


@dataclass(frozen=True)
class Site(ABC):
    """A cluster's site.

    advice: remedies on the cluster itself.
    pace: how often the scheduler may be asked.
    rank_ssh: the command that reaches the other nodes of a job. "": a job step reaches them.
    restarts_jobs: whether the scheduler starts a job again after a failure or its time limit.
    shares_gpus: whether a job has only those GPUs of a node that it asks for.
    refuses_too_much: whether the scheduler refuses a job that asks for more of a node than it has.
    time_unit_s: the unit of the scheduler's time limits, to which it rounds up.
    as_root: the words before a command that examines all users' files on a host.
    """

    inventory: Inventory

    advice: ClassVar[Advice] = advice.OWN
    pace: ClassVar[Pace] = Pace()
    rank_ssh: ClassVar[str] = ""
    restarts_jobs: ClassVar[bool] = True
    shares_gpus: ClassVar[bool] = True
    refuses_too_much: ClassVar[bool] = True
    time_unit_s: ClassVar[int] = 60
    as_root: ClassVar[tuple[str, ...]] = ("sudo", "-n")

    @property
    def folders(self) -> JobFolders:
        """Where the hosts have the folders of jobs."""
        return folders_of(self.inventory)

    @property
    def upload_folder(self) -> str:
        """The folder on the cluster for files that the user sends without naming a folder."""
        return "."

    @property
    def own_folder(self) -> str:
        """The only folder that clusterctl may search for files. "": it may search all."""
        return ""

    @property
    def default_partition(self) -> str:
        """The partition that job scripts name by default. "": job scripts need no partition."""
        return ""

    def without_nodes(self, request: Request, names: Collection[str]) -> Request:
        """Return the request of the job, which the scheduler does not start on the nodes ``names``,
        which don't answer.
        """
        return request

    def unknown_partition(self, name: str) -> UsageError:
        """Return the error for a partition that the cluster does not have."""
        return UsageError(
            f"partition {name!r} does not exist",
            code="not-found",
            about="partition",
            fix=f"use one of these with --partition: {self.partition_names}",
        )

    @property
    def partition_names(self) -> str:
        """The names of all partitions, for a message."""
        return ", ".join(partition.name for partition in self.inventory.partitions)

    def planned(self, spec: ClusterSpec) -> Inventory:
        """Return the inventory after the next `up` with a spec, as far as jobs need it."""
        return planned_inventory(spec)

    def await_ends(self, scheduler: Jobs, jobs: Sequence[JobInfo]) -> None:
        """Wait until the controller sees the files that ended jobs have written on their nodes."""
        return

    def reject_without_slurm(self) -> None:
        """Raise UsageError if the cluster does not run Slurm, for operations that need it."""
        return

    def asked(self, options: Sequence[Directive]) -> RequestedOptions:
        """Return a request to Slurm, which explains a refusal. See ``RequestedOptions``."""
        return RequestedOptions(options, self.advice, not self.inventory.no_accounting)

    @abstractmethod
    def client(
        self, controller: Transport, to: Connect, patience_s: float, ledger: Ledger | None = None
    ) -> Jobs:
        """Return the client for the cluster's scheduler. With Slurm it acts as the user of
        ``controller``.

        ledger: for the records of jobs, if ``controller`` is the job user's connection.
        """

    def overview(self, scheduler: Jobs, to: Connect) -> Overview:
        """Return the state of the cluster. scheduler: of the job user. to: connects to a host as
        admin.
        """
        nodes, jobs = self._as_admin(scheduler, to).nodes_and_jobs()
        usable = {node.name for node in nodes if node.usable}
        wanted = {host.name for host in self.inventory.compute}
        is_ready = usable | kept_out(nodes).keys() >= wanted and (bool(usable) or not wanted)
        return Overview(jobs, is_ready, nodes=nodes)

    def out_of_service(self, scheduler: Jobs) -> tuple[NodeInfo, ...]:
        """Return the nodes that start no jobs, if ``overview`` does not list the nodes."""
        return ()

    def accounting_failure(self, scheduler: Jobs, to: Connect) -> str:
        """Return why Slurm's accounting does not answer; "" if it answers. See ``overview``."""
        return self._as_admin(scheduler, to).accounting_failure()

    def lacks(
        self, hosts: Collection[str], to: Connect, *, within_s: float
    ) -> Mapping[str, list[UnmetNeed]]:
        """Return host -> the needs of jobs that it does not meet. See ``lacks_of``."""
        return lacks_of(hosts, to, within_s=within_s)

    def last_trial(self, to: Connect, *, within_s: float) -> Trial | None:
        """Return the last trial of the nodes. See ``clusterctl.hosts.needs.last_trial``."""
        return last_trial(to(self.inventory.controller.name), within_s=within_s)

    def _as_admin(self, scheduler: Jobs, to: Connect) -> Jobs:
        return self.client(to(self.inventory.controller.name), to, scheduler.patience_s)

    def required_nodes(self, scheduler: Jobs) -> Mapping[int, tuple[str, ...]]:
        """Return number of a waiting job -> the nodes that it asks for by name, if the site lists
        its nodes.
        """
        return scheduler.required_nodes()

    @property
    @abstractmethod
    def checks(self) -> Sequence[Check]:
        """The checks of a job before its submission, in their order."""

    def faults(self, request: Request) -> Iterator[UsageError]:
        """Yield an error for everything in a job that does not fit the site."""
        for check in self.checks:
            yield from check(self, request)

    @abstractmethod
    def render(self, request: Request, environment: Environment | None = None) -> str:
        """Return the text of a job's script. The job has no ``faults``."""

    @abstractmethod
    def request(self, request: JobRequest, of_job: Request) -> JobRequest:
        """Return the request to the scheduler, completed with the options that the script lacks."""
