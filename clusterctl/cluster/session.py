"""The phases that `up` and `down` are made of: journaled, timed, told of while they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from clusterctl.cluster.converge import Mended
from clusterctl.configure import ansible, events, inventory_file
from clusterctl.providers import registry
from clusterctl.providers.base import Provider
from clusterctl.providers.prompts import NO_PROMPTS, Prompts
from clusterctl.scheduler.session import applied_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.models import Provider as ProviderSettings
from clusterctl.state.inventory import Inventory
from clusterctl.state.journal import Journal, Step
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.connections import write_ssh_files
from clusterctl.util.progress import HostStep, PhaseReporter, Reporter

TellMended = Callable[[Mended], None]


def untold(_: Mended) -> None:
    """For who does not want to hear of what was mended before all is done."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A row of the table that `up` and `down` end with."""

    name: str
    seconds: float
    note: str


@dataclass(slots=True)
class Run:
    """One `up` or `down` under way: its journal, and what it has to say."""

    verb: str
    journal: Journal
    reporter: PhaseReporter
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mended: list[Mended] = field(default_factory=list)
    tell_mended: TellMended = untold

    def has_mended(self, things: Iterable[Mended]) -> None:
        """Tell of it at once: it was done, whatever becomes of the phases to come."""
        for one in things:
            self.mended.append(one)
            self.tell_mended(one)

    @contextmanager
    def phase(self, name: str, *, inputs: str = "") -> Iterator[tuple[Step, Reporter]]:
        """Journal a phase; yields where to leave its note, and a way to say what it is doing."""
        self.reporter(name, "")
        with self.journal.phase(self.verb, name, inputs=inputs) as step:
            yield step, lambda what: self.reporter(name, what)
        self.phases.append(Phase(name, step.seconds, step.note))


def provider_of(settings: ProviderSettings, prompts: Prompts = NO_PROMPTS) -> Provider:
    """The provider of these settings; ``prompts`` are for machines of the user's own."""
    return registry.provider_of(settings, replace(prompts, restore=_give_back))


def write_inventory(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> None:
    """Put the inventory where ordinary tools find it: `ssh -F`, `ansible-playbook -i`."""
    write_ssh_files(inventory, workspace)
    inventory_file.write_inventory(spec, inventory, workspace)
    write_atomic(workspace.hosts, inventory.model_dump_json(indent=2) + "\n")
    workspace.joining.unlink(missing_ok=True)  # all of it stands there now


def _give_back(
    inventory: Inventory, hosts: Collection[str], workspace: Workspace, report: Reporter
) -> Mapping[str, tuple[str, ...]]:
    """Have Ansible put back what was on these; what was left on each, and why."""
    write_inventory(applied_spec(workspace), inventory, workspace)

    def progress(task: events.TaskProgress) -> None:
        report(HostStep(task.host, task.what, len(hosts), task.status, task.failed))

    return ansible.restore(inventory, workspace, limit=hosts, progress=progress)
