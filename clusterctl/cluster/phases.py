"""The phases of `up` and `down`, the provider that they work with, and copies of the workspace."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar

from clusterctl.errors import ClusterctlError, DiskError, MachineError
from clusterctl.providers import registry
from clusterctl.providers.base import NO_PROMPTS, Prompts, Provider
from clusterctl.spec.common import ProviderSettings
from clusterctl.state.workspace import WAIT_S, Workspace
from clusterctl.transport.ssh import end_all
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


def provider_of(settings: ProviderSettings, prompts: Prompts = NO_PROMPTS) -> Provider:
    """Return the provider of these settings; ``prompts`` are for machines of the user's own."""
    if settings.user_owned:  # Ansible and all that it needs is imported for these alone
        from clusterctl.configure.ansible import restore  # noqa: PLC0415

        prompts = replace(prompts, restore=restore)
    return registry.provider_of(settings, prompts)


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
