"""The values of a provider of clusters that other people operate: the options of `attach`, the
attached cluster, facts about it, and clusterctl's folder there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from clusterctl.errors import UsageError
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import Launcher
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
    own_python: use a Python of clusterctl's own, not the site's Python.
    patience_s: longest wait for the job that proves MPI. reporter: shown the progress.
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
    own_python: bool = False
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
class ProofJob:
    """A job that has proven MPI, or may prove it, with its launcher and environment modules."""

    job_id: str
    launcher: Launcher
    modules: tuple[str, ...]
    is_proven: bool


@dataclass(frozen=True, slots=True)
class MpiProof:
    """The result of the job that proves MPI.

    state: ``pending``: it has not ended in time. ``refused``: by Slurm. job_id: "" if it was refused.
    hosts: nodes on which it ran. glibc: the oldest C library on them, such as `2.36`. "": unknown.
    why, fix: unless it is proven. lacks_python: the nodes don't have the Python of jobs.
    """

    state: Literal["proven", "failed", "refused", "pending"]
    launcher: Launcher
    job_id: str = ""
    hosts: tuple[str, ...] = ()
    glibc: str = ""
    why: str = ""
    fix: str = ""
    lacks_python: bool = False


@dataclass(frozen=True, slots=True)
class AttachedCluster:
    """An attached cluster.

    folder: clusterctl's folder there. account: the Slurm account of jobs. Empty: the user's
        default.
    partitions: those that the account may use, the default partition of jobs first.
    proof_nodes: the size of the job that proves MPI. minutes: its time limit. "": no limit.
        needs_time: Slurm accepts no job without a time limit.
    launchers: to be tried in this order by jobs that prove MPI. modules: that jobs load.
    other_modules: more of the site's modules with an MPI library.
    waiting: the job of an earlier `attach` that may prove the first launcher. "": no such job.
    has_launcher: it is known how to start MPI programs, by the spec or by an earlier proof.
    site_python: the site's Python that jobs use. "": jobs use clusterctl's own Python, or one that
        the user has chosen.
    site: the description of the site, for `-o json`.
    """

    workspace: Workspace
    spec: ClusterSpec
    folder: str
    account: str
    partitions: tuple[str, ...]
    proof_nodes: int
    minutes: str
    needs_time: bool
    launchers: tuple[Launcher, ...]
    modules: tuple[str, ...]
    other_modules: tuple[str, ...]
    waiting: str
    has_launcher: bool
    site_python: str
    facts: tuple[SiteFact, ...]
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
        code="unsupported",
        about="attach",
        where="provider.type",
        fix="`clusterctl attach LOGIN` uses a cluster of other people, `clusterctl up` creates one; "
        "`clusterctl down` removes a cluster that `up` created",
    )
