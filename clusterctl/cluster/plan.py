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

from clusterctl.cluster import converge, verify
from clusterctl.cluster.impact import Foreseen, foresee, refuse_taken_uids
from clusterctl.configure.events import TaskPreview
from clusterctl.errors import ConfigureError, MachineError, SchedulerError, TransportError, UsageError
from clusterctl.hosts.probe import probe_hosts
from clusterctl.jobs.environment import unbuilt
from clusterctl.providers.base import Planned, Provider
from clusterctl.scheduler.session import admin_scheduler, applied_spec, inventory_of
from clusterctl.spec.differences import Difference, differences
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.connections import Connections
from clusterctl.transport.ssh import SSHTransport
from clusterctl.util.lifetime import temporary_folder
from clusterctl.util.progress import Reporter

PATIENCE_S = 5.0  # for hosts and Slurm to answer
_WORDS = {"make": "made", "change": "changed", "replace": "made anew", "remove": "removed"}
_NOT_COPIED = ("logs", "rendered", "id_ed25519", "munge.key")
_HEAVY = ".terraform"  # plugins of a hundred megabytes; linked


@dataclass(frozen=True, slots=True)
class Drift:
    """Something that is not as it should be, and that `up` mends, or fails on."""

    host: str
    what: str

    def __str__(self) -> str:
        return f"{self.host}: {self.what}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What `up` would do. ``notes`` change nothing; the user should know them all the same.

    ``tasks`` is what configuring would change on machines of the user's own.
    """

    hosts: Planned
    jobs: Foreseen = field(default_factory=Foreseen)
    settings: tuple[Difference, ...] = ()
    drift: tuple[Drift, ...] = ()
    notes: tuple[str, ...] = ()
    tasks: tuple[TaskPreview, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether `up` would change nothing."""
        return not (self.hosts.changes or self.hosts.other or self.settings or self.drift)

    @property
    def summary(self) -> str:
        """``2 hosts made, 1 removed``."""
        actions = [host.action for host in self.hosts.hosts]
        counts = [(word, actions.count(action)) for action, word in _WORDS.items() if action in actions]
        parts = [f"{count} {word}" for word, count in counts] or [f"all {len(actions)} stay"]
        return f"hosts: {', '.join(parts)}"


def plan(spec: ClusterSpec, workspace: Workspace, provider: Provider, *, report: Reporter) -> Plan:
    """What `up` would do with this spec, as far as a short look can tell.

    Raises:
        UsageError: the cluster is up under another provider.
        MachineError: this machine can't do it.
        ProvisionError: the provider can't tell.
    """
    with copied(workspace, without=_NOT_COPIED) as copy, Connections(workspace.ssh_config) as connections:
        found = ahead(spec, copy, provider, connections, report=report)
        notes = (*found.hosts.notes, *found.jobs.notes)
        if worker := workspace.worker():
            notes += (f"{worker}: what it does may change this",)
        notes += tuple(_of_check(spec, provider))
        notes += tuple(_of_users(spec, found, connections, copy))
        drift = tuple(_drift(spec, workspace, found, connections, report))
        found = replace(found, drift=drift, notes=notes)
        return (
            found
            if found.is_empty
            else _with_tasks(found, spec, workspace, copy=copy, connections=connections, report=report)
        )


def ahead(
    spec: ClusterSpec, workspace: Workspace, provider: Provider, connections: Connections, *, report: Reporter
) -> Plan:
    """What must be known before anything is changed: all but what drifted.

    Raises:
        UsageError: the cluster is up under another provider.
        MachineError: this machine can't do it.
        ProvisionError: the provider can't tell.
    """
    before = _before(workspace)
    there = before.provider if before else _provider_asked_before(workspace)
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
    hosts = provider.plan(spec, workspace, keep={}, report=report)
    if before is None:
        return Plan(hosts)
    scheduler = admin_scheduler(before, connections, patience_s=PATIENCE_S)

    def alive() -> bool:
        return provider.alive(before.cluster_id)

    harm = foresee(spec, before, provider.sizes(spec), scheduler, hosts=hosts.changes, alive=alive)
    if harm.keep:
        hosts = provider.plan(spec, workspace, keep=harm.keep, report=report)
    return Plan(hosts, harm, _settings(spec, workspace))


def _before(workspace: Workspace) -> Inventory | None:
    try:
        return inventory_of(workspace)
    except UsageError:
        return None


def _provider_asked_before(workspace: Workspace) -> str | None:
    """Whose hosts may be there, though the last `up` did not come to an inventory."""
    try:
        return applied_spec(workspace).provider.type
    except UsageError:
        return None


def _settings(spec: ClusterSpec, workspace: Workspace) -> tuple[Difference, ...]:
    try:
        return differences(applied_spec(workspace), spec)
    except UsageError:
        return (Difference("spec", "nobody knows any more what it was"),)


def _drift(
    spec: ClusterSpec, workspace: Workspace, found: Plan, connections: Connections, report: Reporter
) -> Iterator[Drift]:
    """What is not right of the hosts that stay and run."""
    staying = {host.name for host in found.hosts.hosts if host.action in {"keep", "change"} and not host.off}
    before = _before(workspace)
    if before is None or before.controller.name not in staying:
        if staying:
            yield Drift(spec.controller_host, "the last `clusterctl up` did not end")
        return
    controller = before.controller.name
    report("looking at the hosts")
    asked = converge.questions(spec, before, workspace)
    try:
        views = probe_hosts(
            {host: asked[host] for host in asked if host in staying}, connections.to, timeout_s=PATIENCE_S
        )
    except TransportError as exc:
        for failure in exc.failures:
            yield Drift(failure.host or controller, f"it does not answer: {failure.cause}")
        return
    for host, what in converge.astray(workspace, views):
        yield Drift(host, what)
    for host, view in views.items():
        for disk in view.full:
            yield Drift(host, f"{disk}; `up` will not go on before there is room")
    fitted = converge.news(spec, before, workspace, connections, views)
    yield from _of_hardware(fitted)
    alike = fitted.unchanged
    if (
        not found.hosts.changes
        and not found.settings
        and (why := converge.stale(spec, before, workspace, alike))
    ):
        yield Drift("all hosts", f"configured anew: {why}")
    yield from _of_nodes(staying, before, connections)
    yield from _of_environment(spec, workspace, before)


def _of_hardware(fitted: converge.NodeConfig) -> Iterator[Drift]:
    """What came or went of it, and what must wait."""
    for host, what in fitted.changes.items():
        yield Drift(host, f"{what}: {fitted.waiting[host]}" if host in fitted.waiting else what)


def _of_nodes(staying: set[str], before: Inventory, connections: Connections) -> Iterator[Drift]:
    try:
        nodes = admin_scheduler(before, connections, patience_s=PATIENCE_S).nodes()
    except (SchedulerError, TransportError) as exc:
        yield Drift(before.controller.name, f"Slurm does not answer: {exc.why or exc.what}")
        return
    for host, what in verify.astray(node for node in nodes if node.name in staying):
        yield Drift(host, what)


def _of_environment(spec: ClusterSpec, workspace: Workspace, inventory: Inventory) -> Iterator[Drift]:
    if spec.software.python.requirements is None:
        return
    controller = inventory.controller.name
    transport = SSHTransport(controller, workspace.ssh_config, user=spec.job_user.name)
    try:
        what = unbuilt(spec, inventory.distribution, lambda: transport)
    except TransportError as exc:
        what = f"it can't be looked at: {exc.why or exc.what}"
    finally:
        transport.close()
    if what:
        yield Drift(controller, f"the Python environment of the spec: {what}")


def _of_check(spec: ClusterSpec, provider: Provider) -> Iterator[str]:
    """Why `up` would refuse the spec, or this machine, at once."""
    try:
        provider.check(spec)
    except (MachineError, UsageError) as exc:
        yield f"`up` refuses this: {exc.what}; {exc.why}; {exc.fix}"


def _of_users(
    spec: ClusterSpec, found: Plan, connections: Connections, workspace: Workspace
) -> Iterator[str]:
    """Why `up` would refuse the users of the spec."""
    before = _before(workspace)
    if before is None or not any(one.key.startswith("users") for one in found.settings):
        return
    try:
        accounts = connections.to(before.controller.name).run(["cat", "/etc/passwd"]).stdout
        refuse_taken_uids(spec, accounts)
    except TransportError:
        return  # it lies still; the look at the hosts says so
    except UsageError as exc:
        yield f"`up` refuses this: {exc.what}; {exc.why}"


def _with_tasks(
    found: Plan,
    spec: ClusterSpec,
    workspace: Workspace,
    *,
    copy: Workspace,
    connections: Connections,
    report: Reporter,
) -> Plan:
    """The plan, with what configuring would change on hosts of somebody's own that are part of it already.

    On those that are new, everything is: what is there is noted first, and given back by `down`.
    """
    before = _before(workspace)
    if before is None or not spec.provider.user_owned:
        return found
    staying = {host.name for host in found.hosts.hosts if host.action in {"keep", "change"} and not host.off}
    if away := [host.name for host in before.hosts if host.name not in staying]:
        return replace(found, notes=(*found.notes, f"no look ahead, task by task, without {', '.join(away)}"))
    report("asking Ansible what it would change")
    for secret in (workspace.munge_key, workspace.key):
        (copy.root / secret.name).symlink_to(secret)
    try:
        views = probe_hosts(converge.questions(spec, before, workspace), connections.to, timeout_s=PATIENCE_S)
        fitted = converge.news(spec, before, workspace, connections, views)
        tasks, failures = converge.outlook(spec, before, copy, fitted.views)
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
