"""The status of a cluster: its nodes, and its waiting and running jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from clusterctl.errors import Failure, SlurmAwayError
from clusterctl.hosts.needs import Trial, UnmetNeed, text_of
from clusterctl.jobs.events import with_hangs
from clusterctl.jobs.kept_files import KeptFiles, kept_files
from clusterctl.scheduler.base import JobInfo, NodeInfo
from clusterctl.scheduler.session import SHOWN_PATIENCE_S, connections_of, session_of, site_of
from clusterctl.scheduler.sites.advice import OWN, Advice
from clusterctl.scheduler.slurm.availability import waits_for_nodes
from clusterctl.scheduler.slurm.parse import PartitionInfo
from clusterctl.state.chosen import naming_lock_holder
from clusterctl.state.inventory import applied_spec, job_inventory
from clusterctl.state.removal import leaving_error
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from clusterctl.util import formatting
from clusterctl.util.process import start_in_thread

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec

# A host that is off does not answer at all.
_HEALTH_S: Final = 8.0


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a cluster.

    ready: whether every node can be used and the controller lacks nothing. nodes: all nodes, as
        shown by the scheduler.
    jobs: the waiting and running jobs.
    partitions: the partitions of a cluster that other people operate. Such a cluster is ready if a
        partition has usable nodes. Its nodes are not listed, and its jobs are only the user's own.
    out_of_service: the nodes of such a cluster that start no jobs, with Slurm's reasons.
    required_nodes: number of a waiting job -> the nodes that it asks for by name.
    accounting_failure: why Slurm's accounting does not answer; "" if it answers.
    controller_lacks: the needs of jobs that the controller does not meet; see touches.yml.
    auto_down: the idle time after which the cluster removes itself, and whether the timer is
        active.
    kept: what clusterctl keeps for later jobs of the user, by its folder. Of hosts without a shared
        folder, only what the controller has.
    advice: remedies on the cluster itself.
    trial: when nodes were last tried, and what failed. None: not known.
    """

    cluster: str
    provider: str
    ready: bool
    nodes: tuple[NodeInfo, ...]
    jobs: tuple[JobInfo, ...]
    accounting_failure: str = ""
    controller_lacks: tuple[UnmetNeed, ...] = ()
    auto_down: dict[str, Any] | None = None
    partitions: tuple[PartitionInfo, ...] = ()
    out_of_service: tuple[NodeInfo, ...] = ()
    required_nodes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    kept: Mapping[str, KeptFiles] = field(default_factory=dict)
    advice: Advice = OWN
    trial: Trial | None = None


def status_of(workspace: Workspace) -> Status:
    """Ask the cluster for its status. Raise NotUpError if there is no such cluster.

    If the cluster does not answer: LockedError while another clusterctl process holds its lock,
    else SchedulerError or TransportError.
    """
    with naming_lock_holder(workspace):
        if (leaving := leaving_error(workspace)) is not None:
            raise leaving
        site = site_of(job_inventory(workspace))
        with connections_of(site, workspace) as connections:
            # Only the job user can read the files of its jobs.
            session = session_of(site, workspace, connections, patience_s=SHOWN_PATIENCE_S)
            controller = site.inventory.controller.name
            ask_lacks = partial(site.lacks, [controller], connections.to, within_s=_HEALTH_S)
            lacks = start_in_thread(ask_lacks)
            ask_accounting = partial(site.accounting_failure, session.scheduler, connections.to)
            accounting_failure = start_in_thread(ask_accounting)
            trial = start_in_thread(partial(site.last_trial, connections.to, within_s=_HEALTH_S))
            out_of_service = start_in_thread(partial(site.out_of_service, session.scheduler))
            ask_kept = partial(kept_files, session.transport, site.inventory.folder)
            kept = start_in_thread(ask_kept)
            try:
                overview = site.overview(session.scheduler, connections.to)
            except SlurmAwayError as exc:
                if unmet := lacks().get(controller):
                    raise _controller_unfit(controller, unmet, exc) from exc
                raise
            # Parsing a spec with all its rules takes time, and most specs don't set auto_down.
            has_auto_down = (
                b"auto_down" in workspace.spec.read_bytes() if workspace.spec.exists() else False
            )
            timer = (
                auto_down(applied_spec(workspace), connections.to(controller))
                if has_auto_down
                else None
            )
            active = with_hangs(session, [job for job in overview.jobs if not job.ended])
            waits = any(map(waits_for_nodes, active))
            required = site.required_nodes(session.scheduler) if waits else {}
            silent = [node.name for node in overview.nodes if node.is_lost]
            nodes = _with_lacks(
                overview.nodes, site.lacks(silent, connections.to, within_s=_HEALTH_S)
            )
            failure = accounting_failure()
            controller_lacks = tuple(lacks().get(controller, ()))
            found_kept = kept()
            out = out_of_service()
            tried = trial()
    return Status(
        site.inventory.cluster,
        site.inventory.provider,
        overview.is_ready and not controller_lacks,
        nodes,
        active,
        failure,
        controller_lacks,
        timer,
        overview.partitions,
        out,
        required,
        found_kept,
        site.advice,
        tried,
    )


def _controller_unfit(host: str, lacks: Sequence[UnmetNeed], exc: SlurmAwayError) -> SlurmAwayError:
    failures = [
        Failure("host-unfit", lack.why, host, None, lack.fix, about=lack.code) for lack in lacks
    ]
    return SlurmAwayError.of_hosts(
        f"Slurm does not answer, and {{hosts}} can't serve jobs ({exc.why or exc.what})",
        failures,
        about="controller",
    )


def _with_lacks(
    nodes: tuple[NodeInfo, ...], lacks: Mapping[str, Sequence[UnmetNeed]]
) -> tuple[NodeInfo, ...]:
    """Add the unmet needs to the reasons of nodes that don't answer Slurm, if their hosts answer.

    slurmd runs the health check that drains a node, so that Slurm has no other reason if slurmd ends.
    """
    return tuple(
        replace(node, reason="; ".join(filter(None, (node.reason, text_of(lacks[node.name])))))
        if node.name in lacks
        else node
        for node in nodes
    )


def auto_down(spec: ClusterSpec, controller: Transport) -> dict[str, Any] | None:
    """Return {"after": idle time until the cluster removes itself, "armed": if its timer runs}."""
    if (idle_s := spec.provider.idle_timeout_s) is None:
        return None
    state = controller.run(
        ["systemctl", "is-active", "clusterctl-auto-down.timer"], check=False
    ).stdout.strip()
    return {"after": formatting.duration(idle_s), "armed": state == "active"}
