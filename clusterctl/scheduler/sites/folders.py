"""Where the hosts of a cluster have the folders of jobs: in a folder that they share, or each on its
own disk.

``Site.folders`` chooses it once. Everything that differs is a method or an attribute of it, and
nothing else asks whether hosts share a folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from clusterctl.errors import UsageError
    from clusterctl.state.inventory import Inventory
    from clusterctl.state.ledger import Ledger

T = TypeVar("T")


class JobFolders(ABC):
    """The folders of jobs on the hosts of a cluster.

    are_one: whether the controller has all files of a job, and sees its logs grow.
    secret_options: the options of job.py for values of --secret on each node.
    """

    are_one: ClassVar[bool]
    secret_options: ClassVar[tuple[str, ...]]

    @abstractmethod
    def apart(self, hosts: Sequence[T]) -> Sequence[T]:
        """Return those of the hosts that have the folders of jobs on their own disk."""

    @abstractmethod
    def unfit(self, error: UsageError) -> Sequence[UsageError]:
        """Return the error for an option that needs a shared folder, if hosts share no folder."""

    @abstractmethod
    def records(self, ledger: Ledger | None) -> Ledger | None:
        """Return the ledger whose jobs have their records on the controller."""


class SharedJobFolder(JobFolders):
    """One folder, which all hosts share."""

    are_one = True
    secret_options = ()

    def apart(self, hosts: Sequence[T]) -> Sequence[T]:  # noqa: ARG002
        return ()

    def unfit(self, error: UsageError) -> Sequence[UsageError]:  # noqa: ARG002
        return ()

    def records(self, ledger: Ledger | None) -> Ledger | None:
        return ledger


class OwnDisks(JobFolders):
    """A folder of each host on its own disk. The controller has the sent files."""

    are_one = False
    secret_options = ("--each-node",)

    def apart(self, hosts: Sequence[T]) -> Sequence[T]:
        return hosts

    def unfit(self, error: UsageError) -> Sequence[UsageError]:
        return (error,)

    def records(self, ledger: Ledger | None) -> Ledger | None:  # noqa: ARG002
        return None


def folders_of(inventory: Inventory) -> JobFolders:
    """Return where the hosts of a cluster have the folders of jobs."""
    return SharedJobFolder() if inventory.is_shared else OwnDisks()
