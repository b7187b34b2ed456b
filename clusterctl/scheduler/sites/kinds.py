"""The sites of clusters: clusterctl's own Slurm, the Slurm of other people, and mpirun without Slurm.

Only this package imports this module; ``site_of`` in session.py chooses the site once.
"""

# ruff: noqa: ARG002 - a method has the arguments that some site needs

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from clusterctl.errors import SchedulerError, UsageError
from clusterctl.hosts.needs import Trial, UnmetNeed
from clusterctl.scheduler.base import JobInfo, JobRequest, Jobs, NodeInfo
from clusterctl.scheduler.sites import advice
from clusterctl.scheduler.sites.site import Check, Overview, Pace, Site
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.scheduler.slurm.records import await_ends
from clusterctl.spec.names import MPI_SSH
from clusterctl.spec.remote_folders import FILES
from clusterctl.state.inventory import Inventory
from clusterctl.state.ledger import Ledger
from clusterctl.transport.base import Connect, Transport
from clusterctl.util.assets import payload_hash

if TYPE_CHECKING:
    from clusterctl.scheduler.request.request import Request
    from clusterctl.scheduler.sites.script import Environment
    from clusterctl.spec.models import ClusterSpec


class OwnSlurm(Site):
    """Slurm that `clusterctl up` has installed and configured."""

    def client(
        self,
        controller: Transport,
        to: Connect,
        patience_s: float,
        ledger: Ledger | None = None,
    ) -> Jobs:
        return SlurmClient(
            controller,
            patience_s=patience_s,
            ledger=self.folders.records(ledger),
            no_accounting=self.inventory.no_accounting,
            advice=self.advice,
        )

    @property
    def checks(self) -> Sequence[Check]:
        # The models of jobs are slow to import, and most verbs need no job.
        from clusterctl.scheduler.sites import checks  # noqa: PLC0415

        return (
            checks.check_directives,
            checks.check_partition,
            checks.check_array,
            checks.check_pack,
            checks.check_scaling,
            checks.check_chain,
            checks.check_launcher,
            checks.check_pmix,
            checks.check_build,
            checks.check_mount,
            checks.check_excluded_files,
        )

    def render(self, request: Request, environment: Environment | None = None) -> str:
        from clusterctl.scheduler.sites.script import Environment, render_script  # noqa: PLC0415

        return render_script(
            self.inventory,
            request,
            payload_hash=payload_hash(),
            environment=environment or Environment.of(self.inventory),
        )

    def request(self, request: JobRequest, of_job: Request) -> JobRequest:
        return request

    def without_nodes(self, request: Request, names: Collection[str]) -> Request:
        # Of several options --exclude, only the last counts.
        excluded = ",".join(filter(None, [request.value("--exclude"), *names]))
        slurm = (*request.job.slurm, f"--exclude={excluded}")
        return request.of(request.job.model_copy(update={"slurm": slurm}))


class ForeignSlurm(OwnSlurm):
    """Slurm of other people, who have given the user an account. It serves many users."""

    advice = advice.FOREIGN
    # A running job that is killed records nothing, so Slurm is asked.
    pace = Pace(changed_s=10.0, pending_s=30.0, running_s=300.0)
    as_root = ()

    @property
    def upload_folder(self) -> str:
        return f"{self.inventory.folder}/{FILES}"

    @property
    def own_folder(self) -> str:
        return self.inventory.folder

    @property
    def default_partition(self) -> str:
        # Slurm may have another default.
        return "" if self.inventory.is_routed else self.inventory.partitions[0].name

    def unknown_partition(self, name: str) -> UsageError:
        return UsageError(
            f"partition {name!r} does not exist",
            code="not-found",
            about="partition",
            why="at `attach`, Slurm had no such partition, or accepted no job of yours in it",
            fix=f"`clusterctl attach LOGIN --account NAME --partition {name}` tries it; or use one "
            f"of these with --partition: {self.partition_names}",
        )

    def planned(self, spec: ClusterSpec) -> Inventory:
        return self.inventory

    def await_ends(self, scheduler: Jobs, jobs: Sequence[JobInfo]) -> None:
        await_ends(scheduler.transport, scheduler.clock, jobs)

    def overview(self, scheduler: Jobs, to: Connect) -> Overview:
        partitions, jobs = scheduler.partitions_and_own_jobs()
        is_ready = any(partition.usable for partition in partitions)
        return Overview(jobs, is_ready, partitions=partitions)

    def out_of_service(self, scheduler: Jobs) -> tuple[NodeInfo, ...]:
        # A site may let users see no nodes (PrivateData).
        with suppress(SchedulerError):
            return scheduler.nodes_out_of_service()
        return ()

    def accounting_failure(self, scheduler: Jobs, to: Connect) -> str:
        # The jobs of users don't need it.
        return ""

    def lacks(
        self, hosts: Collection[str], to: Connect, *, within_s: float
    ) -> Mapping[str, list[UnmetNeed]]:
        # These hosts have no health check of clusterctl's.
        return {}

    def last_trial(self, to: Connect, *, within_s: float) -> Trial | None:
        return None

    def required_nodes(self, scheduler: Jobs) -> Mapping[int, tuple[str, ...]]:
        return {}


class Mpirun(Site):
    """A cluster of `clusterctl up` without Slurm: mpirun over SSH, a job at a time."""

    rank_ssh = MPI_SSH
    restarts_jobs = False
    shares_gpus = False
    refuses_too_much = False
    time_unit_s = 1

    def reject_without_slurm(self) -> None:
        raise UsageError(
            "this command needs Slurm, and the cluster does not run Slurm",
            code="unsupported",
            about="slurm",
            why="the cluster's spec has `scheduler: none`",
            fix="run jobs with `clusterctl submit`, or open a shell on a host with `clusterctl "
            "ssh HOST`",
        )

    def client(
        self,
        controller: Transport,
        to: Connect,
        patience_s: float,
        ledger: Ledger | None = None,
    ) -> Jobs:
        from clusterctl.scheduler.sites.mpirun import MpirunClient  # noqa: PLC0415 - few clusters need it

        user = self.inventory.job_user
        return MpirunClient(self.inventory, user, controller, to, patience_s=patience_s)

    @property
    def checks(self) -> Sequence[Check]:
        from clusterctl.scheduler.sites import checks  # noqa: PLC0415 - as above
        from clusterctl.scheduler.sites.mpirun import check_slurm_options  # noqa: PLC0415 - as above

        return (
            check_slurm_options,
            checks.check_partition,
            checks.check_launcher,
            checks.check_build,
            checks.check_excluded_files,
        )

    def render(self, request: Request, environment: Environment | None = None) -> str:
        from clusterctl.scheduler.sites.mpirun import render_mpirun_script  # noqa: PLC0415
        from clusterctl.scheduler.sites.script import Environment  # noqa: PLC0415

        return render_mpirun_script(
            self,
            request,
            payload_hash=payload_hash(),
            environment=environment or Environment.of(self.inventory),
        )

    def request(self, request: JobRequest, of_job: Request) -> JobRequest:
        from clusterctl.scheduler.sites.mpirun import with_nodes  # noqa: PLC0415 - as above

        return with_nodes(request, self, of_job)
