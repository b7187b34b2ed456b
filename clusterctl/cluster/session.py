"""What the steps of `up`, `plan` and `down` share: the session, and the phases that it runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from clusterctl.configure import ansible, inventory_file
from clusterctl.errors import MachineError
from clusterctl.providers import registry
from clusterctl.providers.base import NO_PROMPTS, Prompts, Provider
from clusterctl.spec.common import ProviderSettings
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory
from clusterctl.state.ledger import Journal
from clusterctl.state.workspace import WAIT_S, Workspace, write_atomic
from clusterctl.transport.connections import Connections
from clusterctl.transport.multiplex import end_all
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.util.assets import digest
from clusterctl.util.process import temporary_folder
from clusterctl.util.progress import WAITING, HostStep, PhaseReporter, Reporter

S = TypeVar("S", bound="PhaseRunner")
P = ParamSpec("P")
T = TypeVar("T")
_HEAVY = ".terraform"  # plugins of a hundred megabytes; linked


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

    ``reporter`` gets (phase, message), ``on_repair`` each repair as soon as it is made, ``on_warning`` what
    is to be read before anything is changed. ``wait_s`` bounds how
    long another clusterctl that works on the cluster is waited for. A phase leaves in ``note`` what the table
    of phases says of it.
    """

    workspace: Workspace
    reporter: PhaseReporter = lambda *_: None
    on_repair: Callable[[Drift], None] = lambda _: None
    on_warning: Callable[[str], None] = lambda _: None
    wait_s: float = WAIT_S
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    note: str = ""
    verb: str = ""
    _current: str = ""

    def phase(self: S, function: Callable[Concatenate[S, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function as a phase; its name is the phase's in the journal."""
        self._current, self.note = function.__name__, ""
        self.reporter(self._current, "")
        spec = self.workspace.spec
        inputs = digest(spec.read_bytes()) if spec.exists() else ""
        with Journal(self.workspace.journal).phase(self.verb, self._current, inputs=inputs) as step:
            try:
                result = function(self, *args, **kwargs)
            finally:
                step.note = self.note
        self.phases.append(Phase(self._current, step.seconds, step.note))
        return result

    def report(self, message: str | HostStep) -> None:
        self.reporter(self._current, message)

    def report_waiting(self, message: str) -> None:
        """Report that the cluster's lock, or its disk, is waited for."""
        self.reporter(WAITING, message)

    def repaired(self, repairs: Iterable[Drift]) -> None:
        """Report repairs at once: they are made, whatever becomes of the phases to come."""
        for repair in repairs:
            self.on_repair(repair)


@dataclass(kw_only=True)
class ClusterSession(PhaseRunner):
    """What every step of `up` and `plan` needs, made once by the command line."""

    spec: ClusterSpec
    provider: Provider
    connections: Connections = field(init=False)

    def __post_init__(self) -> None:
        self.connections = Connections(self.workspace.ssh_config)

    @contextmanager
    def locked(self, verb: str) -> Iterator[None]:
        """Hold the cluster's lock, and close the connections at the end."""
        self.verb = verb
        lock = self.workspace.lock(verb, wait_s=self.wait_s, waiting=self.report_waiting)
        with lock, self.workspace.begun(), self.connections:
            yield


def provider_of(settings: ProviderSettings, prompts: Prompts = NO_PROMPTS) -> Provider:
    """The provider of these settings; ``prompts`` are for machines of the user's own."""
    return registry.provider_of(settings, replace(prompts, restore=_restore))


@contextmanager
def workspace_copy(
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
                skip = shutil.ignore_patterns(*without, workspace.connections.name)  # sockets can't be copied
                shutil.copytree(
                    workspace.root, copy.root, ignore=skip, symlinks=True, copy_function=_copy_file
                )
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


def _copy_file(source: str, target: str) -> str:
    if _HEAVY in Path(source).parts:
        with suppress(OSError):  # another file system
            os.link(source, target)
            return target
    return shutil.copy2(source, target)


def write_inventory(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> None:
    """Put the inventory where ordinary tools find it: `ssh -F`, `ansible-playbook -i`."""
    inventory_file.write_ansible_inventory(spec, inventory, workspace)
    _record(inventory, workspace)


def _record(inventory: Inventory, workspace: Workspace) -> None:
    write_ssh_files(inventory, workspace)
    write_atomic(workspace.inventory, inventory.model_dump_json(indent=2) + "\n")
    workspace.joining.unlink(missing_ok=True)  # all of it stands there now


def _restore(
    inventory: Inventory, hosts: Collection[str], workspace: Workspace, report: Reporter
) -> Mapping[str, tuple[str, ...]]:
    """Have Ansible put back what was on these; what was left on each, and why."""
    inventory_file.write_restore_inventory(inventory, workspace)
    _record(inventory, workspace)

    recap = ansible.run(
        "restore", inventory, workspace, limit=hosts, progress=lambda task: report(task.step(len(hosts)))
    )
    return recap.notes
