"""What a provider of clusters that other people operate takes and answers: the options of `attach`,
the attached cluster, facts about it, and clusterctl's folder there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from clusterctl.errors import UsageError
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.remote_folders import FOLDERS
from clusterctl.state.workspace import WAIT_S, Workspace
from clusterctl.util import formatting
from clusterctl.util.numbers import counted
from clusterctl.util.progress import SILENT, Reporter

PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """The options of `attach`. None: as in an earlier call. Empty: withdraw the earlier choice.

    login: the destination for ssh. spec: a spec with the settings to start from. None: no spec.
    patience_s: longest wait for the start of the job that proves MPI. reporter: shown the progress.
    """

    login: str
    name: str = ""
    folder: str | None = None
    account: str | None = None
    qos: str | None = None
    partition: str | None = None
    modules: Sequence[str] | None = None
    time: str | None = None
    slurm: Sequence[str] | None = None
    python: str | None = None
    spec: ClusterSpec | None = None
    patience_s: float = PATIENCE_S
    wait_s: float = WAIT_S
    reporter: Reporter = SILENT


@dataclass(frozen=True, slots=True)
class SiteFact:
    """A fact about the site, and the command or job that found it.

    is_problem: jobs can't run well. is_known: False if nothing has found it out yet.
    """

    fact: str
    value: str
    learned: str
    is_problem: bool = False
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class Attached:
    """An attached cluster.

    folder: clusterctl's folder there. account: the Slurm account of jobs. Empty: the user's
        default.
    partitions: those that the account may use. proof_nodes: the size of the job that proves MPI.
    needs_time: Slurm accepts no job without a time limit. minutes: that of the test that Slurm has
        accepted, at most that of the default partition. "": none.
    has_launcher: it is known how to start MPI programs, from this proof or an earlier one.
    is_proven: the proof has succeeded. obstacle: (code, reason) if it has failed.
    proof, site: the proof and the description of the site, for `-o json`.
    """

    workspace: Workspace
    spec: ClusterSpec
    folder: str
    account: str
    partitions: tuple[str, ...]
    proof_nodes: int
    needs_time: bool
    minutes: str
    has_launcher: bool
    is_proven: bool
    obstacle: tuple[str, str] | None
    facts: tuple[SiteFact, ...]
    proof: Mapping[str, Any]
    site: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A file or folder in clusterctl's folder. what: its meaning. "": clusterctl did not create
    it.
    """

    name: str
    bytes: int
    files: int
    what: str = ""

    def __str__(self) -> str:
        amount = f"{formatting.size(self.bytes)} in {counted(self.files, 'file')}"
        return f"{self.name}: {amount} ({self.what or 'not of clusterctl'})"

    @property
    def is_made_by_attach(self) -> bool:
        return any(one.name == self.name for one in FOLDERS if one.is_made_by_attach)


class SiteFolder(Protocol):
    """Clusterctl's folder on an attached cluster."""

    def entries(self) -> tuple[FolderEntry, ...]:
        """Return the entries of the folder, without clusterctl's small files. (): there is no
        folder.

        UsageError: the folder's mark is missing, or of another cluster.
        """

    def remove(self) -> tuple[FolderEntry, ...]:
        """Remove the folder, and check that it is gone. Return the entries that it had.

        Raises:
            UsageError: the folder's mark is missing, or of another cluster.
            LeftoversError: some files can't be removed.
        """


@dataclass(frozen=True, slots=True)
class AttachedPlace:
    """Where a cluster is attached, by its spec: the login, and clusterctl's folder there."""

    login: str
    folder: str


def not_attached(provider: str) -> UsageError:
    """Return the error for `attach` and `detach` if the provider creates its clusters itself."""
    return UsageError(
        f"the cluster's provider is {provider}, so there is nothing to attach or detach",
        code="not-attached",
        where="provider.type",
        fix="`clusterctl attach LOGIN` uses a cluster of other people, `clusterctl up` creates one; "
        "`clusterctl down` removes that",
    )
