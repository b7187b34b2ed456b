"""The context of a verb that changes a cluster, the phases that it runs, and copies of the workspace."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar

from clusterctl.configure import ansible, inventory_file
from clusterctl.configure.events import TaskProgress
from clusterctl.errors import ClusterctlError, DiskError, MachineError
from clusterctl.hosts.probe import TIMEOUT_S, HostReport, probe_hosts
from clusterctl.hosts.roles import probe_requests
from clusterctl.providers import registry
from clusterctl.providers.base import NO_PROMPTS, Prompts, Provider
from clusterctl.scheduler.admin import scheduler_of
from clusterctl.scheduler.base import Jobs
from clusterctl.scheduler.session import PATIENCE_S
from clusterctl.spec.common import ProviderSettings
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory, applied_if_known, inventory_if_known
from clusterctl.state.workspace import WAIT_S, Workspace, write_atomic
from clusterctl.transport.connections import Connections
from clusterctl.transport.master import end_all
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.util.disk import append_line
from clusterctl.util.process import temporary_folder
from clusterctl.util.progress import SILENT, Reporter

R = TypeVar("R", bound="PhaseRunner")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The value that a phase returns, its summary for the table of phases, and notes for the user."""

    value: T
    summary: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """A row of the table that `up` and `down` end with."""

    name: str
    seconds: float
    note: str


@dataclass(frozen=True, slots=True)
class Drift:
    """Something of a host that is not as it should be; or ``what`` it was, and the ``action`` taken."""

    host: str
    what: str
    action: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.host, self.what, self.action)))


@dataclass(kw_only=True)
class PhaseRunner:
    """One `up` or `down` of a cluster: its phases are journaled, timed and reported while they run.

    wait_s: how long to wait for another clusterctl that works on the cluster, in seconds.
    """

    workspace: Workspace
    reporter: Reporter = SILENT
    wait_s: float = WAIT_S
    verb: str = "down"
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    repairs: list[Drift] = field(default_factory=list)

    def run(
        self: R,
        name: str,
        phase: Callable[Concatenate[R, P], Outcome[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a function as the phase of this name. Return its value; its notes are added to ``notes``."""
        self.reporter.step(name)
        start, ok, note = time.monotonic(), False, ""
        try:
            outcome = phase(self, *args, **kwargs)
            ok, note = True, outcome.summary
        except ClusterctlError as exc:
            note = exc.what
            raise
        finally:
            seconds = round(time.monotonic() - start, 3)
            self._journal(phase=name, ok=ok, note=note, seconds=seconds, at=time.time())
        self.phases.append(Phase(name, seconds, note))
        self.notes += outcome.notes
        return outcome.value

    def _journal(self, **row: str | float) -> None:
        """Append a row to the workspace's journal. `down` has removed it at the end, and needs no disk."""
        if self.workspace.root.is_dir():
            with suppress(DiskError):
                append_line(self.workspace.journal, json.dumps({"verb": self.verb, **row}))

    def repaired(self, repairs: Iterable[Drift]) -> None:
        """Report repairs at once: they are made even if a later phase fails."""
        for repair in repairs:
            self.repairs.append(repair)
            self.reporter.note(f"repaired: {repair}")


@dataclass(kw_only=True)
class ClusterContext(PhaseRunner):
    """What every step of `up` and `plan` needs, made once by the caller."""

    spec: ClusterSpec
    provider: Provider
    connections: Connections
    verb: str = "up"

    @classmethod
    def of(
        cls,
        spec: ClusterSpec,
        *,
        workspace: Workspace | None = None,
        provider: Provider | None = None,
        reporter: Reporter = SILENT,
        prompts: Prompts = NO_PROMPTS,
        wait_s: float = WAIT_S,
        verb: str = "up",
    ) -> Self:
        """Return the context of a cluster.

        workspace: default: the workspace of the spec's name.
        provider: default: the provider of the spec.
        prompts: how to ask about machines that the user owns. Default: refuse.
        """
        workspace = workspace or Workspace.of(spec.name)
        return cls(
            spec=spec,
            workspace=workspace,
            provider=provider or provider_of(spec.provider, replace(prompts, reporter=reporter)),
            connections=Connections(workspace.ssh_config),
            reporter=reporter,
            wait_s=wait_s,
            verb=verb,
        )

    @cached_property
    def inventory(self) -> Inventory | None:
        """The inventory that the last `up` left, read once; None if no `up` came that far."""
        return inventory_if_known(self.workspace)

    @cached_property
    def applied(self) -> ClusterSpec | None:
        """The spec that the last `up` was given, read once; None if it is unknown or damaged."""
        return applied_if_known(self.workspace)

    def scheduler(self, inventory: Inventory, *, patience_s: float = PATIENCE_S) -> Jobs:
        """Return the scheduler of the hosts of this inventory, as the admin user."""
        return scheduler_of(inventory, self.connections.to, patience_s=patience_s)

    def probe(
        self, inventory: Inventory, hosts: Collection[str], *, timeout_s: float = TIMEOUT_S
    ) -> dict[str, HostReport]:
        """Probe these hosts of the inventory.

        Raises:
            TransportError: a host did not answer; one failure each.
        """
        requests = probe_requests(self.spec, inventory, self.workspace)
        chosen = {host: request for host, request in requests.items() if host in hosts}
        return dict(probe_hosts(chosen, self.connections.to, timeout_s=timeout_s))

    def tasks_on(self, hosts: int) -> Callable[[TaskProgress], None]:
        """Return a function that reports the progress of a playbook that runs on so many hosts."""
        return lambda task: self.reporter.progress(task.step(hosts))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cluster's lock, and close the connections at the end."""
        lock = self.workspace.lock(self.verb, wait_s=self.wait_s, waiting=self.reporter.note)
        with lock, self.workspace.begun(), self.connections:
            yield


def provider_of(settings: ProviderSettings, prompts: Prompts = NO_PROMPTS) -> Provider:
    """Return the provider of these settings; ``prompts`` are for machines of the user's own."""
    return registry.provider_of(settings, replace(prompts, restore=_restore))


@contextmanager
def workspace_copy(
    workspace: Workspace, *, without: Collection[str], place: Path | None = None
) -> Iterator[Workspace]:
    """Make a copy of the workspace to write in, without files of these names. Without a workspace, a new one.

    place: the folder that the copy is made in. Default: where temporary files go.

    Raises:
        MachineError: it can't be made.
    """
    with temporary_folder(place) as folder:
        copy = Workspace(folder / workspace.root.name)
        try:
            if workspace.root.is_dir():
                skip = shutil.ignore_patterns(*without, workspace.connections.name)  # sockets can't be copied
                shutil.copytree(workspace.root, copy.root, ignore=skip, symlinks=True)
            with suppress(FileNotFoundError):
                shutil.copy2(workspace.copies, copy.copies)
        except OSError as exc:  # shutil's own error is one too
            raise MachineError(
                "no copy of the cluster's record can be made", code="record-not-copied", why=str(exc)
            ) from exc
        copy.create()
        if not copy.public_key.exists():
            copy.create_secrets()
        try:
            yield copy
        finally:
            end_all(copy.ssh_config)


def write_inventory(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> None:
    """Put the inventory where ordinary tools find it: `ssh -F`, `ansible-playbook -i`."""
    inventory_file.write_ansible_inventory(spec, inventory, workspace)
    _record(inventory, workspace)


def _record(inventory: Inventory, workspace: Workspace) -> None:
    write_ssh_files(inventory, workspace)
    write_atomic(workspace.inventory, inventory.model_dump_json(indent=2) + "\n")
    workspace.joining.unlink(missing_ok=True)  # all of it stands there now


def _restore(
    inventory: Inventory, hosts: Collection[str], workspace: Workspace, reporter: Reporter
) -> Mapping[str, tuple[str, ...]]:
    """Have Ansible put back what was on these; what was left on each, and why."""
    inventory_file.write_restore_inventory(inventory, workspace)
    _record(inventory, workspace)
    recap = ansible.run(
        "restore",
        inventory,
        workspace,
        hosts=hosts,
        progress=lambda task: reporter.progress(task.step(len(hosts))),
    )
    return recap.notes
