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
from pathlib import Path

from clusterctl.cluster import converge, impact, verify
from clusterctl.cluster.hardware import NodeConfig
from clusterctl.cluster.session import ClusterSession, Drift, known_inventory, known_spec
from clusterctl.configure.events import TaskProgress
from clusterctl.errors import ConfigureError, MachineError, SchedulerError, TransportError, UsageError
from clusterctl.hosts.probe import probe_hosts
from clusterctl.hosts.roles import probe_requests
from clusterctl.jobs.environment import unbuilt
from clusterctl.providers.base import Planned
from clusterctl.scheduler.session import admin_scheduler
from clusterctl.spec.load import Difference, differences
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.ssh import Connections, SSHTransport
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
    with copied(session.workspace, without=_NOT_COPIED) as copy, session.connections:
        planning = replace(session, workspace=copy)  # where the provider writes
        planning.connections = session.connections
        found = plan_changes(planning)
        notes = [*found.hosts.notes, *found.jobs.notes]
        if worker := session.workspace.worker():
            notes.append(f"{worker}: what it does may change this")
        notes += _of_check(session)
        notes += _of_users(session, found)
        found = replace(found, drift=tuple(_drift(session, found)), notes=tuple(notes))
        return found if found.is_empty else _with_tasks(session, found, copy)


def plan_changes(session: ClusterSession) -> Plan:
    """Plan all that must be known before anything is changed: all but what drifted.

    Raises:
        UsageError: the cluster is up under another provider.
        MachineError: this machine can't do it.
        ProvisionError: the provider can't tell.
    """
    spec, workspace, provider = session.spec, session.workspace, session.provider
    before = known_inventory(workspace)
    applied = known_spec(workspace)  # hosts may be there, though the last `up` left no inventory
    there = before.provider if before else applied and applied.provider.type
    if there not in (None, spec.provider.type):
        raise UsageError(
            f"cluster {spec.name!r} is up already, under the provider {there}",
            where="provider.type",
            fix="take it down first, or give the new cluster another name",
        )
    if before and before.scheduler != spec.scheduler:
        raise UsageError(
            f"cluster {spec.name!r} is up already, with `scheduler: {before.scheduler}`",
            where="scheduler",
            fix="take it down first, or give the new cluster another name",
        )
    hosts = provider.plan(spec, workspace, keep={}, report=session.report)
    if before is None:
        plan = Plan(hosts)
    else:
        affected = impact.impact_of(session, before, hosts)
        if affected.keep:
            hosts = provider.plan(spec, workspace, keep=affected.keep, report=session.report)
        plan = Plan(hosts, affected, _settings(spec, workspace))
    session.note = plan.summary
    return plan


def _settings(spec: ClusterSpec, workspace: Workspace) -> tuple[Difference, ...]:
    applied = known_spec(workspace)
    return differences(applied, spec) if applied else (Difference("spec", "the applied spec is not known"),)


def _drift(session: ClusterSession, found: Plan) -> Iterator[Drift]:
    """What has drifted on the hosts that stay and run."""
    spec, workspace, connections = session.spec, session.workspace, session.connections
    staying = {host.name for host in found.hosts.hosts if host.action in {"keep", "change"} and not host.off}
    before = known_inventory(workspace)
    if before is None or before.controller.name not in staying:
        if staying:
            yield Drift(spec.controller_host, "the last `clusterctl up` did not end")
        return
    controller = before.controller.name
    session.report("probing the hosts")
    asked = probe_requests(spec, before, workspace)
    try:
        views = probe_hosts(
            {host: asked[host] for host in asked if host in staying}, connections.to, timeout_s=PATIENCE_S
        )
    except TransportError as exc:
        for failure in exc.failures:
            yield Drift(failure.host or controller, f"it does not answer: {failure.cause}")
        return
    yield from converge.drift_of(workspace, views)
    for host, view in views.items():
        for disk in view.full:
            yield Drift(host, f"{disk}; `up` will not go on before there is room")
    nodes = converge.pending_changes(session, before, views)
    yield from _of_hardware(nodes)
    alike = nodes.unchanged
    if (
        not found.hosts.changes
        and not found.settings
        and (why := converge.stale(spec, before, workspace, alike))
    ):
        yield Drift("all hosts", f"configured anew: {why}")
    yield from _of_nodes(staying, before, connections)
    yield from _of_environment(session, before)


def _of_hardware(nodes: NodeConfig) -> Iterator[Drift]:
    """What came or went of it, and what must wait."""
    for host, what in nodes.changes.items():
        yield Drift(host, f"{what}: {nodes.waiting[host]}" if host in nodes.waiting else what)


def _of_nodes(staying: set[str], before: Inventory, connections: Connections) -> Iterator[Drift]:
    try:
        nodes = admin_scheduler(before, connections, patience_s=PATIENCE_S).nodes()
    except (SchedulerError, TransportError) as exc:
        yield Drift(before.controller.name, f"Slurm does not answer: {exc.why or exc.what}")
        return
    for host, what in verify.unusable(node for node in nodes if node.name in staying):
        yield Drift(host, what)


def _of_environment(session: ClusterSession, inventory: Inventory) -> Iterator[Drift]:
    spec = session.spec
    if spec.software.python.requirements is None:
        return
    controller = inventory.controller.name
    transport = SSHTransport(controller, session.workspace.ssh_config, user=spec.job_user.name)
    try:
        what = unbuilt(spec, inventory.distribution, lambda: transport)
    except TransportError as exc:
        what = f"it can't be looked at: {exc.why or exc.what}"
    finally:
        transport.close()
    if what:
        yield Drift(controller, f"the Python environment of the spec: {what}")


def _of_check(session: ClusterSession) -> Iterator[str]:
    """Why `up` would refuse the spec, or this machine, at once."""
    try:
        session.provider.check(session.spec)
    except (MachineError, UsageError) as exc:
        yield f"`up` refuses this: {exc.what}; {exc.why}; {exc.fix}"


def _of_users(session: ClusterSession, found: Plan) -> Iterator[str]:
    """Why `up` would refuse the users of the spec."""
    before = known_inventory(session.workspace)
    if before is None or not any(one.key.startswith("users") for one in found.settings):
        return
    try:
        accounts = session.connections.to(before.controller.name).run(["cat", "/etc/passwd"]).stdout
        impact.reject_taken_uids(session.spec, accounts)
    except TransportError:
        return  # it lies still; the look at the hosts says so
    except UsageError as exc:
        yield f"`up` refuses this: {exc.what}; {exc.why}"


def _with_tasks(session: ClusterSession, found: Plan, copy: Workspace) -> Plan:
    """The plan, with what configuring would change on hosts of somebody's own that are part of it already.

    On those that are new, everything is: what is there is noted first, and given back by `down`.
    """
    spec, workspace = session.spec, session.workspace
    before = known_inventory(workspace)
    if before is None or not spec.provider.user_owned:
        return found
    staying = {host.name for host in found.hosts.hosts if host.action in {"keep", "change"} and not host.off}
    if away := [host.name for host in before.hosts if host.name not in staying]:
        return replace(found, notes=(*found.notes, f"no look ahead, task by task, without {', '.join(away)}"))
    session.report("running Ansible in check mode")
    for secret in (workspace.munge_key, workspace.key):
        (copy.root / secret.name).symlink_to(secret)
    try:
        views = probe_hosts(
            probe_requests(spec, before, workspace), session.connections.to, timeout_s=PATIENCE_S
        )
        nodes = converge.pending_changes(session, before, views)
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
