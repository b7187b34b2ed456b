"""What a provider does: make the hosts of a spec, and remove them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clusterctl.inventory import Inventory
from clusterctl.spec import ClusterSpec
from clusterctl.workspace import Workspace

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BakeTarget:
    """An image under construction that answers SSH; ``install.yml`` is run on it."""

    address: str
    port: int
    user: str
    key: Path
    known_hosts: Path


Bake = Callable[[BakeTarget], None]


@dataclass(frozen=True, slots=True)
class Size:
    """What a compute host has, where the provider decides that."""

    cpus: int
    memory_mib: int
    disk_mib: int | None = None  # None: no limit of its own


@dataclass(frozen=True, slots=True)
class Provisioned:
    """Hosts that exist, and what the user should know about how.

    ``made`` ones are new; ``started`` ones were there, but did not run.
    """

    inventory: Inventory
    notes: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    started: tuple[str, ...] = ()


class Provider(Protocol):
    """The hosts of one kind of cluster. ``say`` reports progress in short lines."""

    def prepare(self, spec: ClusterSpec, workspace: Workspace, *, bake: Bake, say: Say) -> None:
        """Check that it can be done here, and bake the image unless it is cached.

        Raises:
            MachineError: this machine can't do it.
            ProvisionError: the image could not be made.
        """

    def sizes(self, spec: ClusterSpec) -> Mapping[str, Size]:
        """Compute host -> its size by this spec; without those whose own hardware decides."""

    def apply(
        self, spec: ClusterSpec, workspace: Workspace, *, keep: Mapping[str, Size], say: Say
    ) -> Provisioned:
        """Make what is missing, remove what is no longer named; doing it again changes nothing.

        Hosts in ``keep`` stay as large as they are said to be there.

        Raises:
            ProvisionError: it was tried and failed.
        """

    def alive(self, cluster_id: str) -> bool:
        """Whether any host of the cluster runs, whatever it answers."""

    def destroy(self, cluster_id: str, *, say: Say) -> None:
        """Remove everything of the cluster.

        Raises:
            ProvisionError: something could not be removed.
        """

    def leftovers(self, cluster_id: str) -> tuple[str, ...]:
        """What an independent look at the world finds of the cluster; empty when it is gone."""

    def orphans(self, name: str) -> tuple[str, ...]:
        """Ids of the caller's clusters of that name whose workspace was lost."""
