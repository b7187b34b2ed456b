"""What `up` would do, found out by looking alone: to the hosts, to their configuration, and to jobs.

The spec is compared with the cluster as it was raised, and with its live hosts. Nothing is written: a
provider gets a copy of the workspace to plan in.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from clusterctl.cluster import converge, impact, verify
from clusterctl.cluster.session import ClusterSession, Drift, known_inventory, known_spec
from clusterctl.configure.events import TaskProgress
from clusterctl.errors import ConfigureError, MachineError, SchedulerError, TransportError, UsageError
from clusterctl.hosts.probe import probe_hosts
from clusterctl.hosts.roles import probe_requests
from clusterctl.jobs.environment import unbuilt
from clusterctl.providers.base import Planned
from clusterctl.scheduler.session import scheduler_of
from clusterctl.spec.load import Difference, differences
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.process import temporary_folder

PATIENCE_S = 5.0  # for hosts and Slurm to answer
_WORDS = {"make": "made", "change": "changed", "replace": "made anew", "remove": "removed"}
_NOT_COPIED = ("logs", "rendered", "id_ed25519", "munge.key")
_HEAVY = ".terraform"  # plugins of a hundred megabytes; linked


@dataclass(frozen=True, slots=True)
class Plan:
    """What `up` would do. ``notes`` change nothing; the user should know them all the same.

    ``tasks`` is what configuring would change on machines of the user's own.
    """

    hosts: Planned
    jobs: impact.Impact = field(default_factory=impact.Impact)
    settings: tuple[Difference, ...] = ()
    drift: tuple[Drift, ...] = ()
    notes: tuple[str, ...] = ()
    tasks: tuple[TaskProgress, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether `up` would change nothing; it repairs all drift, or fails on it."""
        return not (self.hosts.changes or self.hosts.other or self.settings or self.drift)

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


def preview(session: ClusterSession) -> Plan:
    """What `up` would do with this spec, as far as a short look can tell.

    Raises:
        UsageError: the cluster is up under another provider.
        MachineError: this machine can't do it.
        ProvisionError: the provider can't tell.
    """
    before = known_inventory(session.workspace)
    with copied(session.workspace, without=_NOT_COPIED) as copy, session.connections:
        planning = replace(session, workspace=copy)  # where the provider writes
        planning.connections = session.connections
        found = plan_changes(planning)
        notes = [*found.hosts.notes, *found.jobs.notes]
        if worker := session.workspace.worker():
            notes.append(f"{worker}: what it does may change this")
        notes += _refusals(session, before)
        found = replace(found, drift=tuple(_drift(session, found, before)), notes=tuple(notes))
        if before is None or found.is_empty or not session.spec.provider.user_owned:
            return found
        return _with_tasks(session, found, before, copy)


def plan_changes(session: ClusterSession) -> Plan:
    """Plan all that must be known before anything is changed: all but what drifted.

    Raises:
        UsageError: the cluster is up under another provider.
    """
    spec, workspace, provider = session.spec, session.workspace, session.provider
    before = known_inventory(workspace)
    applied = known_spec(workspace)  # hosts may be there, though the last `up` left no inventory
    there = before.provider if before else applied and applied.provider.type
    differs = where = ""
    if there not in (None, spec.provider.type):
        differs, where = f"under the provider {there}", "provider.type"
    elif before and before.scheduler != spec.scheduler:
        differs, where = f"with `scheduler: {before.scheduler}`", "scheduler"
    if differs:
        fix = "take it down first, or give the new cluster another name"
        raise UsageError(f"cluster {spec.name!r} is up already, {differs}", where=where, fix=fix)
    hosts = provider.plan(spec, workspace, keep={}, report=session.report)
    if before is None:
        plan = Plan(hosts)
    else:
        affected = impact.impact_of(session, before, hosts)
        if affected.keep:
            hosts = provider.plan(spec, workspace, keep=affected.keep, report=session.report)
        no_spec = (Difference("spec", "the applied spec is not known"),)
        plan = Plan(hosts, affected, differences(applied, spec) if applied else no_spec)
    session.note = plan.summary
    return plan


def _drift(session: ClusterSession, found: Plan, before: Inventory | None) -> Iterator[Drift]:
    """What has drifted on the hosts that stay and run."""
    spec, workspace, staying = session.spec, session.workspace, found.staying
    if before is None or before.controller.name not in staying:
        if staying:
            yield Drift(spec.controller_host, "the last `clusterctl up` did not end")
        return
    session.report("probing the hosts")
    asked = {h: one for h, one in probe_requests(spec, before, workspace).items() if h in staying}
    try:
        reports = probe_hosts(asked, session.connections.to, timeout_s=PATIENCE_S)
    except TransportError as exc:
        for failure in exc.failures:
            host = failure.host or before.controller.name
            yield Drift(host, f"it does not answer: {failure.cause}")
        return
    yield from converge.drift_of(workspace, reports)
    for host, report in reports.items():
        for disk in report.full:
            yield Drift(host, f"{disk}; `up` will not go on before there is room")
    nodes = converge.pending_changes(session, before, reports)
    for host, what in nodes.changes.items():
        yield Drift(host, f"{what}: {nodes.waiting[host]}" if host in nodes.waiting else what)
    is_alike = not (found.hosts.changes or found.settings)
    if is_alike and (why := converge.stale(spec, before, workspace, nodes.unchanged)):
        yield Drift("all hosts", f"configured anew: {why}")
    yield from _drift_of_services(session, before, staying)


def _drift_of_services(session: ClusterSession, before: Inventory, staying: set[str]) -> Iterator[Drift]:
    """What Slurm says of its nodes, and whether the environment of the spec's requirements is there."""
    spec, controller = session.spec, before.controller.name
    try:
        nodes = scheduler_of(before, session.connections.to, patience_s=PATIENCE_S).nodes()
        for host, what in verify.unusable(node for node in nodes if node.name in staying):
            yield Drift(host, what)
    except (SchedulerError, TransportError) as exc:
        yield Drift(controller, f"Slurm does not answer: {exc.why or exc.what}")
    if spec.software.python.requirements is None:
        return
    try:
        to = session.connections.to(controller, spec.job_user.name)
        lacks = unbuilt(spec, before.distribution, lambda: to)
    except TransportError as exc:
        lacks = f"it can't be looked at: {exc.why or exc.what}"
    if lacks:
        yield Drift(controller, f"the Python environment of the spec: {lacks}")


def _refusals(session: ClusterSession, before: Inventory | None) -> Iterator[str]:
    """Why `up` would refuse the spec, its users, or this machine, at once."""
    checks = [partial(session.provider.check, session.spec)]
    if before is not None:
        checks.append(partial(impact.reject_changed_users, session, before))
    for check in checks:
        try:
            check()
        except (MachineError, UsageError) as exc:
            yield f"`up` refuses this: {exc.what}; {exc.why}; {exc.fix}"


def _with_tasks(session: ClusterSession, found: Plan, before: Inventory, copy: Workspace) -> Plan:
    """The plan, with what configuring would change on hosts of somebody's own that are part of it already.

    On those that are new, everything is: what is there is noted first, and given back by `down`.
    """
    spec, workspace = session.spec, session.workspace
    if away := [host.name for host in before.hosts if host.name not in found.staying]:
        return replace(found, notes=(*found.notes, f"no look ahead, task by task, without {', '.join(away)}"))
    session.report("running Ansible in check mode")
    for secret in (workspace.munge_key, workspace.key):
        (copy.root / secret.name).symlink_to(secret)
    try:
        asked = probe_requests(spec, before, workspace)
        reports = probe_hosts(asked, session.connections.to, timeout_s=PATIENCE_S)
        nodes = converge.pending_changes(session, before, reports)
        tasks, failures = converge.preview(spec, before, copy, nodes.reports)
    except (ConfigureError, TransportError) as exc:
        return replace(found, notes=(*found.notes, f"what tasks would change can't be told: {exc.what}"))
    told = (f"{f.host}: what comes after {f.phase} can't be told: {f.cause}" for f in failures)
    return replace(found, tasks=tasks, notes=(*found.notes, *told))


@contextmanager
def copied(
    workspace: Workspace, *, without: Collection[str], place: Path | None = None
) -> Iterator[Workspace]:
    """A copy of the workspace, to write in, but for what bears these names; a fresh one where there is none.

    It is below ``place``, by default where temporary files go.

    Raises:
        MachineError: none can be made.
    """
    with temporary_folder(place) as folder:
        copy = Workspace(folder / workspace.root.name)
        try:
            if workspace.root.is_dir():
                ignored = shutil.ignore_patterns(*without)
                shutil.copytree(workspace.root, copy.root, ignore=ignored, symlinks=True, copy_function=_take)
        except OSError as exc:  # shutil's own error is one too
            raise MachineError("no copy of the cluster's record can be made", why=str(exc)) from exc
        copy.create()
        if not copy.public_key.exists():
            copy.create_secrets()
        yield copy


def _take(source: str, target: str) -> str:
    if _HEAVY in Path(source).parts:
        try:
            os.link(source, target)
        except OSError:  # another file system
            return shutil.copy2(source, target)
        return target
    return shutil.copy2(source, target)
