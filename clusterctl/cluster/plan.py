"""What `up` would do to the hosts, to their configuration, and to jobs.

Nothing is written to find that out: a provider gets a copy of the workspace to plan in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from clusterctl.cluster import converge
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.hardware import without_cgroups
from clusterctl.cluster.impact import Impact, impact_of, reject_changed_users
from clusterctl.cluster.node_class import class_ahead
from clusterctl.cluster.phases import Drift, Outcome, workspace_copy
from clusterctl.configure import ansible
from clusterctl.configure.events import TaskResult
from clusterctl.errors import (
    ConfigureError,
    MachineError,
    ProvisionError,
    SchedulerError,
    TransportError,
    UsageError,
)
from clusterctl.hosts.checks import failures
from clusterctl.jobs.environment import unbuilt
from clusterctl.providers.base import HostPlan
from clusterctl.providers.storage import storage_left_alone
from clusterctl.scheduler.session import SHORT_PATIENCE_S
from clusterctl.scheduler.slurm_parse import fold_nodes
from clusterctl.scheduler.standing import unusable
from clusterctl.spec.load import Difference, differences
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace

_WORDS = {"make": "made", "change": "changed", "replace": "made anew", "remove": "removed"}
_NOT_COPIED = ("logs", "rendered", "id_ed25519", "munge.key")


@dataclass(frozen=True, slots=True)
class Plan:
    """What `up` would do. ``notes`` change nothing; the user should know them all the same.

    ``tasks`` is what configuring would change on machines of the user's own.
    """

    hosts: HostPlan
    jobs: Impact = field(default_factory=Impact)
    settings: tuple[Difference, ...] = ()
    drift: tuple[Drift, ...] = ()
    notes: tuple[str, ...] = ()
    tasks: tuple[TaskResult, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether `up` would change nothing; it repairs all drift, or fails on it."""
        return not any((self.hosts.changes, self.hosts.other, self.settings, self.drift))

    @property
    def staying(self) -> set[str]:
        """The hosts that run, and stay."""
        return {host.name for host in self.hosts.hosts if host.action in {"keep", "change"} and not host.off}

    @property
    def summary(self) -> str:
        """``2 hosts made, 1 removed``."""
        actions = [host.action for host in self.hosts.hosts]
        counts = [(word, actions.count(action)) for action, word in _WORDS.items() if action in actions]
        parts = [f"{count} {word}" for word, count in counts] or [f"all {len(actions)} stay"]
        return f"hosts: {', '.join(parts)}"


def preview(cluster: ClusterContext) -> Plan:
    """What `up` would do with this spec, as far as a short look can tell."""
    before = cluster.inventory
    with workspace_copy(cluster.workspace, without=_NOT_COPIED) as copy, cluster.connections:
        outcome = plan_changes(replace(cluster, workspace=copy))  # a provider writes there
        plan = outcome.value
        notes = [*outcome.notes, *plan.hosts.notes, *plan.jobs.notes]
        if worker := cluster.workspace.worker():
            notes.append(f"{worker}: what it does may change this")
        notes += _refusals(cluster)
        drift = tuple(_drift(cluster, plan, notes))
        plan = replace(plan, drift=drift, notes=tuple(notes))
        if before is None or plan.is_empty or not cluster.spec.provider.user_owned:
            return plan
        return _with_tasks(cluster, plan, before, copy)


def prompt_about(plan: Plan) -> str:
    """Return the prompt to show before hosts or data are removed. "": the plan removes neither."""
    hosts = fold_nodes([host.name for host in plan.hosts.destroyed])
    if gone := [*([hosts] if hosts else []), *plan.hosts.other_lost]:
        return f"remove {', '.join(gone)}, with all data there?"
    leaving = fold_nodes([host.name for host in plan.hosts.released])
    return f"release {leaving} to the owner, restored as it was?" if leaving else ""


def plan_changes(cluster: ClusterContext, recreated: Collection[str] = ()) -> Outcome[Plan]:
    """Plan everything that must be known before anything is changed: all but drift.

    recreated: hosts that the provider is to remove and create again.

    Raises:
        UsageError: the cluster is up under another provider.
    """
    spec, workspace, provider = cluster.spec, cluster.workspace, cluster.provider
    before = cluster.inventory
    _reject_other_cluster(cluster)
    plan_hosts = partial(
        provider.plan,
        spec,
        workspace,
        inputs=class_ahead(cluster),
        recreated=recreated,
    )
    hosts = plan_hosts(keep={})
    if before is None:
        return Outcome(plan := Plan(hosts), plan.summary, storage_left_alone(spec))
    impact = impact_of(cluster, before, hosts, cluster.scheduler(before, patience_s=SHORT_PATIENCE_S))
    if impact.keep:
        hosts = plan_hosts(keep=impact.keep)
    unknown = (Difference("spec", "the applied spec is not known"),)
    plan = Plan(hosts, impact, differences(cluster.applied, spec) if cluster.applied else unknown)
    return Outcome(plan, plan.summary)


def _reject_other_cluster(cluster: ClusterContext) -> None:
    """Raise UsageError if the cluster is up under another provider, or with another scheduler."""
    spec, before, applied = cluster.spec, cluster.inventory, cluster.applied
    # Hosts may exist, though the last `up` left no inventory.
    provider = before.provider if before else applied and applied.provider.type
    if provider not in (None, spec.provider.type):
        differs, where = f"under the provider {provider}", "provider.type"
    elif before and before.scheduler != spec.scheduler:
        differs, where = f"with `scheduler: {before.scheduler}`", "scheduler"
    else:
        return
    raise UsageError(
        f"cluster {spec.name!r} is up already, {differs}",
        code="up-with-other-provider",
        where=where,
        fix="take it down first, or give the new cluster another name",
    )


def preflight(cluster: ClusterContext) -> Outcome[None]:
    """Ask a cloud for all that stands in the way of `up`, before anything is billed.

    Raises:
        ProvisionError: something does; one failure each.
    """
    report = cluster.provider.preflight(cluster.spec, cluster.workspace)
    findings = report.findings if report else ()
    errors = [one for one in findings if one.level == "error"]
    if errors:
        then = "nothing was made; `clusterctl plan --preflight` looks again"
        what = "this stands in the way: {hosts}"
        raise ProvisionError.of_hosts(
            what, failures(errors, phase="preflight"), code="preflight-failed", then=then
        )
    return Outcome(None, "nothing stands in the way", tuple(map(str, findings)))


def _drift(cluster: ClusterContext, plan: Plan, notes: list[str]) -> Iterator[Drift]:
    """What `up` would repair; what else is seen of the hosts is added to ``notes``."""
    spec, before, staying = cluster.spec, cluster.inventory, plan.staying
    if before is None or before.controller.name not in staying:
        if staying:
            yield Drift(spec.controller_host, converge.UNFINISHED)
        return
    cluster.reporter.progress("probing the hosts")
    try:
        reports = cluster.probe(before, staying, timeout_s=SHORT_PATIENCE_S)
    except TransportError as exc:
        for failure in exc.failures:
            host = failure.host or before.controller.name
            yield Drift(host, f"it does not answer: {failure.cause}")
        return
    notes += without_cgroups(before, reports)
    yield from converge.drift_of(cluster.workspace, reports)
    for host, report in reports.items():
        for disk in report.full:
            yield Drift(host, f"{disk}; `up` will not go on before there is room")
    nodes = converge.pending_changes(cluster, before, reports)
    for host, what in nodes.changes.items():
        yield Drift(host, f"{what}: {nodes.waiting[host]}" if host in nodes.waiting else what)
    is_alike = not (plan.hosts.changes or plan.settings)
    if is_alike and (why := converge.stale(cluster, before, nodes.unchanged)):
        yield Drift("all hosts", f"configured anew: {why}")
    yield from _drift_of_services(cluster, before, staying)


def _drift_of_services(cluster: ClusterContext, before: Inventory, staying: set[str]) -> Iterator[Drift]:
    """What Slurm says of its nodes, and whether the environment of the spec's requirements is there."""
    spec, controller = cluster.spec, before.controller.name
    try:
        nodes = cluster.scheduler(before, patience_s=SHORT_PATIENCE_S).nodes()
        for host, what in unusable(node for node in nodes if node.name in staying):
            yield Drift(host, what)
    except (SchedulerError, TransportError) as exc:
        yield Drift(controller, f"Slurm does not answer: {exc.why or exc.what}")
    if spec.software.python.requirements is None:
        return
    try:
        to = cluster.connections.to(controller, spec.job_user.name)
        lacks = unbuilt(spec, before.distribution, to)
    except TransportError as exc:
        lacks = f"it can't be looked at: {exc.why or exc.what}"
    if lacks:
        yield Drift(controller, f"the Python environment of the spec: {lacks}")


def _refusals(cluster: ClusterContext) -> Iterator[str]:
    """Why `up` would refuse the spec, its users, or this machine, at once."""
    for check in (partial(cluster.provider.check, cluster.spec), partial(reject_changed_users, cluster)):
        try:
            check()
        except (MachineError, UsageError) as exc:
            yield f"`up` refuses this: {exc.what}; {exc.why}; {exc.fix}"


def _with_tasks(cluster: ClusterContext, plan: Plan, before: Inventory, copy: Workspace) -> Plan:
    """Add to the plan what configuring would change on machines of the user's own that are members."""
    spec, workspace = cluster.spec, cluster.workspace
    if away := [host.name for host in before.hosts if host.name not in plan.staying]:
        return replace(plan, notes=(*plan.notes, f"no look ahead, task by task, without {', '.join(away)}"))
    cluster.reporter.progress("running Ansible in check mode")
    for secret in (workspace.munge_key, workspace.key):
        (copy.root / secret.name).symlink_to(secret)
    try:
        reports = cluster.probe(before, before.names, timeout_s=SHORT_PATIENCE_S)
        nodes = converge.pending_changes(cluster, before, reports)
        converge.render(spec, before, copy, nodes.reports)
        tasks, failures = ansible.preview(before, copy, hosts=tuple(nodes.reports))
    except (ConfigureError, TransportError) as exc:
        return replace(plan, notes=(*plan.notes, f"what tasks would change can't be told: {exc.what}"))
    told = (f"{f.host}: what comes after {f.phase} can't be told: {f.cause}" for f in failures)
    return replace(plan, tasks=tasks, notes=(*plan.notes, *told))
