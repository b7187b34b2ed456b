"""The plan of `up`: its changes to hosts and to their configuration.

Planning writes nothing to the workspace: providers plan in a temporary copy of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from clusterctl.cluster import converge
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.hardware import cgroup_notes
from clusterctl.cluster.impact import reject_changed_users, reject_jobs
from clusterctl.cluster.phases import Drift, PhaseResult, workspace_copy
from clusterctl.cluster.template_inputs import inputs_of_node_template
from clusterctl.configure import ansible
from clusterctl.configure.events import TaskResult
from clusterctl.errors import (
    ConfigureError,
    MachineError,
    ProvisionError,
    SchedulerError,
    SlurmError,
    TransportError,
    UsageError,
)
from clusterctl.hosts.checks import findings_as_failures
from clusterctl.jobs.environment import describe_pending_build
from clusterctl.providers.base import HostOptions, HostPlan
from clusterctl.providers.storage import other_storage
from clusterctl.scheduler.session import SHORT_PATIENCE_S
from clusterctl.scheduler.slurm.availability import find_unusable_nodes
from clusterctl.scheduler.slurm.values import fold_nodes
from clusterctl.spec.load import SpecDifference, differences
from clusterctl.spec.models import ClusterSpec, software_notes
from clusterctl.state.inventory import Inventory, planned_distribution
from clusterctl.state.workspace import Workspace

_WORDS = {"make": "created", "change": "changed", "replace": "recreated", "remove": "removed"}
_PACKAGES = "software.packages"
_NOT_COPIED = ("logs", "rendered", "id_ed25519", "munge.key")


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes that `up` would make.

    hosts: hosts to create, change, recreate or remove, and their cost.
    settings: settings that differ from the last `up`, as far as an action follows. stays: what the spec
        no longer has and `up` leaves as it is. drift: deviations that `up` would repair.
    notes: other information for the user.
    tasks: changes that Ansible's check mode reports. Only for machines that the user owns.
    """

    hosts: HostPlan
    settings: tuple[SpecDifference, ...] = ()
    drift: tuple[Drift, ...] = ()
    notes: tuple[str, ...] = ()
    tasks: tuple[TaskResult, ...] = ()
    stays: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether `up` would change nothing. A plan that repairs drift is not empty."""
        return not any((self.hosts.changes, self.hosts.other, self.settings, self.drift))

    @property
    def staying(self) -> set[str]:
        """The names of running hosts that `up` would keep or change, but not remove or recreate."""
        return {
            host.name
            for host in self.hosts.hosts
            if host.action in {"keep", "change"} and not host.off
        }

    @property
    def summary(self) -> str:
        """The changes of hosts in a few words, such as ``hosts: 2 created, 1 removed``."""
        actions = [host.action for host in self.hosts.hosts]
        counts = [
            (word, actions.count(action)) for action, word in _WORDS.items() if action in actions
        ]
        parts = [f"{count} {word}" for word, count in counts] or [f"all {len(actions)} stay"]
        return f"hosts: {', '.join(parts)}"


def preview(cluster: ClusterContext) -> Plan:
    """Return the plan of `up` for this spec, with drift and notes. Nothing is changed."""
    inventory = cluster.inventory
    with workspace_copy(cluster.workspace, without=_NOT_COPIED) as copy, cluster.connections:
        outcome = plan_changes(replace(cluster, workspace=copy))
        plan = outcome.value
        notes = [*outcome.notes, *plan.hosts.notes]
        if worker := cluster.workspace.lock_holder():
            notes.append(f"{worker}: this plan may change while it works")
        notes += _reasons_to_reject(cluster, plan.hosts)
        drift = tuple(_drift(cluster, plan, notes))
        plan = replace(plan, drift=drift, notes=tuple(notes))
        if inventory is None or plan.is_empty or not cluster.spec.provider.adopts_hosts:
            return plan
        return _with_tasks(cluster, plan, inventory, copy)


def prompt_about(plan: Plan) -> str:
    """Return the question before hosts are removed. "" if the plan removes nothing."""
    hosts = plan.hosts.hosts
    if removed := fold_nodes([host.name for host in hosts if host.destroys]):
        return f"remove {removed} and all data on it?"
    if detached := [disk for host in hosts for disk in host.detached_disks]:
        return f"detach {', '.join(detached)}?"
    leaving = fold_nodes([host.name for host in hosts if host.released])
    return f"release {leaving} and give it back?" if leaving else ""


def plan_changes(cluster: ClusterContext, recreated: Collection[str] = ()) -> PhaseResult[Plan]:
    """Plan the changes of hosts and settings. Drift is not part of this plan.

    recreated: hosts that the provider must remove and create again.
    Raise UsageError if the cluster is up with another provider or scheduler.
    """
    spec = cluster.spec
    workspace = cluster.workspace
    provider = cluster.provider
    inventory = cluster.inventory
    _reject_other_cluster(cluster)
    options = HostOptions(recreated=recreated, inputs=inputs_of_node_template(cluster))
    hosts = provider.plan(spec, workspace, options)
    notes = software_notes(spec, hosts.distribution or planned_distribution(spec, workspace))
    if inventory is None:
        plan = Plan(hosts)
        return PhaseResult(plan, plan.summary, notes)
    unknown = (SpecDifference("spec", "the applied spec is unknown"),)
    if cluster.applied is None:
        plan = Plan(hosts, unknown)
    else:
        settings, stays = _settings_and_stays(cluster.applied, spec)
        plan = Plan(hosts, settings, stays=stays)
    return PhaseResult(plan, plan.summary, notes)


def _settings_and_stays(
    before: ClusterSpec, after: ClusterSpec
) -> tuple[tuple[SpecDifference, ...], tuple[str, ...]]:
    """Return the differences from which an action of `up` follows, and what stays although the spec no
    longer has it.
    """
    names = [user.name for user in after.users]
    gone = [user.name for user in before.users if user.name not in names]
    packages = [name for name in before.software.packages if name not in after.software.packages]
    stays = [f"user {name}: the account, the home and the Slurm association" for name in gone]
    stays += [f"package {name}, on the hosts that have it" for name in packages]
    settings = []
    for each in differences(before, after):
        changed: SpecDifference | None = each
        if each.key.startswith(tuple(f"users.{name}." for name in gone)):
            changed = None
        elif each.key == "users" and gone:
            changed = replace(each, what=_change_of_users(before, after, gone))
        elif each.key == _PACKAGES and packages:
            added = [n for n in after.software.packages if n not in before.software.packages]
            changed = replace(each, what=f"{', '.join(added)} added") if added else None
        settings += [changed] if changed else []
    return tuple(settings), tuple(stays)


def _change_of_users(before: ClusterSpec, after: ClusterSpec, gone: Sequence[str]) -> str:
    known = {user.name for user in before.users}
    added = [user.name for user in after.users if user.name not in known]
    texts = [f"{', '.join(added)} added"] if added else []
    texts.append(f"the login of {', '.join(gone)} by clusterctl's key ends")
    if before.job_user.name != after.job_user.name:
        texts.append(f"your jobs run as {after.job_user.name}")
    return "; ".join(texts)


def _reject_other_cluster(cluster: ClusterContext) -> None:
    spec = cluster.spec
    inventory = cluster.inventory
    applied = cluster.applied
    # Hosts may exist even if the last `up` wrote no inventory.
    provider = inventory.provider if inventory else applied and applied.provider.type
    if provider not in (None, spec.provider.type):
        difference = f"with `provider.type: {provider}`"
        spec_key = "provider.type"
    elif inventory and inventory.scheduler != spec.scheduler:
        difference = f"with `scheduler: {inventory.scheduler}`"
        spec_key = "scheduler"
    elif inventory and applied and applied.software.slurm.kind != spec.software.slurm.kind:
        difference = f"with `software.slurm.from: {applied.software.slurm.origin}`"
        spec_key = "software.slurm"
    elif applied and applied.storage != spec.storage:
        raise other_storage(spec.name, applied.storage.name)
    else:
        return
    raise UsageError(
        f"cluster {spec.name!r} is already up {difference}",
        code="exists",
        about="cluster",
        where=spec_key,
        fix="take the cluster down first, or give the new cluster another name",
    )


def preflight(cluster: ClusterContext) -> PhaseResult[None]:
    """Ask the provider about all problems that would stop `up`, before anything is created.

    Raise ProvisionError if there are such problems, with a failure for each problem.
    """
    report = cluster.provider.preflight(cluster.spec, cluster.workspace)
    findings = report.findings if report else ()
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        consequence = "nothing was created; `clusterctl plan --preflight` checks again"
        message = "the provider can't create the cluster: {hosts}"
        codes = {finding.kind for finding in errors}
        raise ProvisionError.of_hosts(
            message,
            findings_as_failures(errors, phase="preflight"),
            code=codes.pop() if len(codes) == 1 else "host-unfit",
            about="preflight",
            then=consequence,
        )
    return PhaseResult(None, "no obstacles found", tuple(map(str, findings)))


def _drift(cluster: ClusterContext, plan: Plan, notes: list[str]) -> Iterator[Drift]:
    """Yield the deviations that `up` would repair. Append other facts about hosts to ``notes``."""
    spec = cluster.spec
    inventory = cluster.inventory
    staying = plan.staying
    if inventory is None:
        if staying:
            yield Drift(spec.controller_host, converge.UNFINISHED)
        return
    # A controller that is recreated, or has another address, can't be asked.
    if inventory.controller.name not in staying:
        return
    cluster.reporter.progress("probing the hosts")
    try:
        reports = cluster.probe(inventory, staying, timeout_s=SHORT_PATIENCE_S)
    except TransportError as exc:
        for failure in exc.failures:
            host = failure.host or inventory.controller.name
            yield Drift(host, f"does not answer: {failure.cause}")
        return
    notes += cgroup_notes(inventory, reports)
    yield from converge.drift_of(inventory, reports)
    for host, report in reports.items():
        for disk in report.full:
            yield Drift(host, f"{disk}; `up` stops until there is free space")
    nodes = converge.pending_changes(cluster, inventory, reports)
    for host, change in nodes.changes.items():
        yield Drift(host, f"{change}: {nodes.waiting[host]}" if host in nodes.waiting else change)
    is_alike = not (plan.hosts.changes or plan.settings)
    if is_alike and (reason := converge.why_outdated(cluster, inventory, nodes.unchanged)):
        yield Drift("all hosts", f"will be configured again: {reason}")
    yield from _drift_of_services(cluster, inventory, staying)


def _drift_of_services(
    cluster: ClusterContext, inventory: Inventory, staying: set[str]
) -> Iterator[Drift]:
    """Yield a deviation for each node that Slurm can't use, and a missing Python environment."""
    spec = cluster.spec
    controller = inventory.controller.name
    try:
        nodes = cluster.scheduler(inventory, patience_s=SHORT_PATIENCE_S).nodes()
        for host, problem in find_unusable_nodes(node for node in nodes if node.name in staying):
            yield Drift(host, problem)
    except (SchedulerError, TransportError) as exc:
        yield Drift(controller, f"Slurm does not answer: {exc.why or exc.what}")
    if spec.software.python.requirements is None:
        return
    try:
        controller_connection = cluster.connections.to(controller, spec.job_user.name)
        reason = describe_pending_build(spec, inventory.distribution, controller_connection)
    except TransportError as exc:
        reason = f"it can't be checked: {exc.why or exc.what}"
    if reason:
        yield Drift(controller, f"Python environment of the spec: {reason}")


def _reasons_to_reject(cluster: ClusterContext, planned: HostPlan) -> Iterator[str]:
    """Yield each reason why `up` would reject the spec, its users, the plan, or this machine."""
    for check in (
        partial(cluster.provider.check, cluster.spec),
        partial(reject_changed_users, cluster),
        partial(reject_jobs, cluster, planned),
    ):
        try:
            check()
        except (MachineError, UsageError) as exc:
            yield f"`up` would fail: {exc.what}; {exc.why}; {exc.fix}"


def _with_tasks(cluster: ClusterContext, plan: Plan, inventory: Inventory, copy: Workspace) -> Plan:
    """Add to the plan the tasks that, by Ansible's check mode, would change the user's machines."""
    spec = cluster.spec
    workspace = cluster.workspace
    if absent := [host.name for host in inventory.hosts if host.name not in plan.staying]:
        return replace(
            plan, notes=(*plan.notes, f"Ansible's tasks are unknown without {', '.join(absent)}")
        )
    if not workspace.is_configured:
        note = "Ansible's tasks are not listed: no `clusterctl up` has configured the hosts yet"
        return replace(plan, notes=(*plan.notes, note))
    cluster.reporter.progress("running Ansible in check mode")
    for secret in (workspace.munge_key, workspace.key):
        (copy.root / secret.name).symlink_to(secret)
    try:
        reports = cluster.probe(inventory, inventory.names, timeout_s=SHORT_PATIENCE_S)
        nodes = converge.pending_changes(cluster, inventory, reports)
        converge.render(spec, inventory, copy, nodes.reports)
        tasks, failures = ansible.preview(inventory, copy, hosts=tuple(nodes.reports))
    except (ConfigureError, SlurmError, TransportError) as exc:
        return replace(
            plan, notes=(*plan.notes, f"the changes of Ansible's tasks are unknown: {exc.what}")
        )
    unchecked = (f"{f.host}: the changes after {f.phase} are unknown: {f.cause}" for f in failures)
    return replace(plan, tasks=tasks, notes=(*plan.notes, *unchecked))
