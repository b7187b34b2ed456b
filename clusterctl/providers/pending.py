"""Pending releases: machines that left a cluster before they could be released to their owner.

Each has a small workspace of its own inside the cluster's: its host entry, how to log in, the admin key. By
that it is released later, once it answers again; no spec is needed.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from clusterctl.errors import Failure
from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.inventory import Host, Inventory
from clusterctl.state.workspace import Workspace, write_atomic

REPLACED: Final = "another machine takes its place"
FOLDER: Final = "pending-releases"
_NOTE: Final = "pending.json"
_FIX: Final = "have {name} answer; or, if it is gone for good: `clusterctl down --forget {name}`"


@dataclass(frozen=True, slots=True)
class PendingRelease:
    """One machine: its workspace, ``since`` when it is due (Unix time), and ``why`` it was not released.

    ``machine`` says how its owner logs in.
    """

    workspace: Workspace
    host: Host
    machine: OnpremHost
    since: float
    why: str

    @property
    def address(self) -> str:
        """Its address and port."""
        return address_of(self.host)

    @property
    def title(self) -> str:
        """Its name and address: its name may be another machine's by now."""
        return f"{self.host.name} ({self.address})"

    @property
    def fix(self) -> str:
        """What to do about it while the cluster is up."""
        return (
            "have it answer: `clusterctl up` then releases it; or, if it is gone for good: "
            f"`clusterctl node forget {self.host.name}`"
        )

    @property
    def failure(self) -> Failure:
        """The failure of a `down` that could not release it."""
        return Failure(
            "pending-release", str(self), self.host.name, "destroy", _FIX.format(name=self.host.name)
        )

    def __str__(self) -> str:
        return f"{self.title} is not released yet: {self.why}"

    def as_dict(self) -> dict[str, Any]:
        """The machine as `-o json` shows it."""
        return {"host": self.host.name, "address": self.address, "since": self.since, "why": self.why}

    def save(self) -> PendingRelease:
        """Write its note; from here on it counts."""
        machine = self.machine.model_dump(mode="json")
        note = json.dumps({"since": self.since, "why": self.why, "machine": machine})
        write_atomic(self.workspace.root / _NOTE, f"{note}\n")
        return self

    def remove(self) -> None:
        """Remove its workspace: it is released, or forgotten."""
        root = Path(self.workspace.root)
        (root / _NOTE).unlink(missing_ok=True)  # first: half of it counts for nothing
        shutil.rmtree(root, ignore_errors=True)
        with suppress(OSError):  # there are others
            root.parent.rmdir()


def pending_releases(workspace: Workspace) -> tuple[PendingRelease, ...]:
    """All pending releases of a cluster."""
    found = []
    for note in sorted((workspace.root / FOLDER).glob(f"*/{_NOTE}")):
        one = Workspace(note.parent)
        with suppress(FileNotFoundError, ValidationError, ValueError, KeyError):
            said = json.loads(note.read_bytes())
            host = Inventory.model_validate_json(one.hosts.read_bytes()).hosts[0]
            machine = OnpremHost.model_validate(said["machine"])
            found.append(PendingRelease(one, host, machine, float(said["since"]), str(said["why"])))
    return tuple(found)


def address_of(host: Host) -> str:
    """A host's address and port, as known_hosts has them."""
    return host_port(host.ssh_address or host.address, host.port)


def host_port(host: str, port: int) -> str:
    """An address and a port, as known_hosts has them."""
    return host if port == 22 else f"[{host}]:{port}"  # noqa: PLR2004 - ssh's own
