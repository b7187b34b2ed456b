"""Runs, times and records the phases of `up` and `down`. Also makes copies of a workspace."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar

from clusterctl.errors import ClusterctlError, DiskError, MachineError
from clusterctl.providers import registry
from clusterctl.providers.base import NO_PROMPTS, Prompts, Provider
from clusterctl.spec.models import AnyProvider
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import WAIT_S, Workspace
from clusterctl.transport.master import end_all_connections
from clusterctl.util.disk import append_line
from clusterctl.util.process import temporary_folder
from clusterctl.util.progress import SILENT, Reporter

R = TypeVar("R", bound="PhaseRunner")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PhaseResult(Generic[T]):
    """The value that a phase returns, its summary in the table of phases, notes for the user."""

    value: T
    summary: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """A finished phase of `up` or `down`: a row of the table that is printed at the end."""

    name: str
    seconds: float
    note: str


@dataclass(frozen=True, slots=True)
class Drift:
    """A deviation of a host, in words, and the ``action`` that repaired it ("" if none did)."""

    host: str
    what: str
    action: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.host, self.what, self.action)))


@dataclass(kw_only=True)
class PhaseRunner:
    """Runs the phases of an `up` or `down`: each is timed, shown, and logged in the workspace.

    wait_s: how long to wait for another clusterctl process that holds the cluster's lock, in
        seconds.
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
        phase: Callable[Concatenate[R, P], PhaseResult[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run ``phase(self, ...)`` as ``name``: show, log, and keep its notes. Return its value."""
        self.reporter.step(name)
        start = time.monotonic()
        ok = False
        note = ""
        try:
            outcome = phase(self, *args, **kwargs)
            ok = True
            note = outcome.summary
        except ClusterctlError as exc:
            note = exc.what
            raise
        finally:
            seconds = round(time.monotonic() - start, 3)
            self._journal(phase=name, ok=ok, note=note, seconds=seconds, at=time.time())
        self.phases.append(Phase(name, seconds, note))
        self.notes += [note for note in outcome.notes if note not in self.notes]
        return outcome.value

    def _journal(self, **row: str | float) -> None:
        # `down` removes the workspace, and then has no journal.
        if self.workspace.root.is_dir():
            with suppress(DiskError):
                append_line(self.workspace.journal, json.dumps({"verb": self.verb, **row}))

    def report_repairs(self, repairs: Iterable[Drift]) -> None:
        """Show these repairs at once, because they remain even if a later phase fails."""
        for repair in repairs:
            self.repairs.append(repair)
            self.reporter.note(f"repaired: {repair}")


def provider_of(settings: AnyProvider, prompts: Prompts = NO_PROMPTS) -> Provider:
    """Return the provider, which creates and removes hosts, and releases hosts by Ansible.

    prompts: ask about unknown host keys.
    """
    return registry.provider_of(settings, replace(prompts, remove_cluster=_remove_cluster))


def _remove_cluster(
    inventory: Inventory, hosts: Collection[str], workspace: Workspace, reporter: Reporter
) -> None:
    # Few commands release hosts, and importing Ansible takes time.
    from clusterctl.configure.ansible import remove_from  # noqa: PLC0415

    remove_from(inventory, hosts, workspace, reporter)


def _is_special(path: str) -> bool:
    """Return whether a path is a socket, a pipe or a device, such as one of `ssh`."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


@contextmanager
def workspace_copy(
    workspace: Workspace, *, without: Collection[str], place: Path | None = None
) -> Iterator[Workspace]:
    """Yield a writable, temporary copy of the workspace; an empty one if the original is missing.

    without: names of files that are not copied.
    place: the folder for the copy. Default: the folder of temporary files.
    Raise MachineError if the copy can't be written.
    """
    with temporary_folder(place) as folder:
        copy = Workspace(folder / workspace.root.name)
        try:
            if workspace.root.is_dir():
                shutil.copytree(
                    workspace.root,
                    copy.root,
                    ignore=lambda folder, names: {
                        name for name in names if name in without or _is_special(f"{folder}/{name}")
                    },
                    symlinks=True,
                )
            with suppress(FileNotFoundError):
                shutil.copy2(workspace.copies, copy.copies)
        except OSError as exc:
            raise MachineError(
                f"folder {workspace.root} can't be copied to {folder}",
                code="file-unwritable",
                about="record",
                why=str(exc),
            ) from exc
        copy.create()
        if not copy.public_key.exists():
            copy.create_secrets()
        try:
            yield copy
        finally:
            end_all_connections(copy.ssh_config)
