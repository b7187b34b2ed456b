"""The record of a `down` that has begun to remove hosts, from which the next `down` continues."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from clusterctl.errors import MachineError, NotUpError, UsageError
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.disk import read_rows


@dataclass(frozen=True, slots=True)
class BegunRemoval:
    """The permissions of an unfinished `down` to delete, and its progress.

    looked_at: the time when all hosts were searched for files that exist only there. None: some
        hosts did not answer.
    discarded: tokens of the submissions whose runs the user chose not to collect.
    changed: the machines of an owner from which the removal has begun. released: the machines that are
        free, as they were given back or had never joined.
    """

    looked_at: float | None = None
    discarded: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    released: tuple[str, ...] = ()


def begun_removal(workspace: Workspace) -> BegunRemoval | None:
    """Return the record of an unfinished `down`. None if no `down` has begun, or `up` has run since."""
    if not workspace.removing.exists():
        return None
    # `detach` and a full disk leave an empty file.
    row = next(read_rows(workspace.removing), {})
    looked_at = row.get("looked_at")
    return BegunRemoval(
        float(looked_at) if isinstance(looked_at, int | float) else None,
        tuple(row.get("discarded") or ()),
        tuple(row.get("changed") or ()),
        tuple(row.get("released") or ()),
    )


def record_removal(workspace: Workspace, removal: BegunRemoval) -> None:
    """Record that the cluster is being removed. A disk that can't be written does not stop `down`."""
    with suppress(MachineError):
        write_atomic(workspace.removing, json.dumps(asdict(removal)))


def record_machines(
    workspace: Workspace, *, changed: Collection[str] = (), released: Collection[str] = ()
) -> None:
    """Record from which machines the `down` of this cluster removes it, or that it has released them."""
    if (removal := begun_removal(workspace)) is not None:
        now_changed = tuple(sorted({*removal.changed, *changed}))
        now_released = tuple(sorted({*removal.released, *released}))
        record_removal(workspace, replace(removal, changed=now_changed, released=now_released))


def leaving_error(workspace: Workspace) -> NotUpError | None:
    """Return the error of commands that need a cluster which an unfinished `down` is removing. None
    if no `down` has begun.
    """
    if (removal := begun_removal(workspace)) is None:
        return None
    released: tuple[str, ...] = removal.released
    left: list[str] = []
    with suppress(UsageError, OSError, ValueError):
        inventory = Inventory.read(workspace.inventory.read_bytes())
        left = [host.name for host in inventory.hosts if host.name not in released]
    parts = [
        f"released: {', '.join(released)}" if released else "",
        f"not removed yet: {', '.join(left)}" if left else "",
    ]
    forget = " (with --forget HOST for a machine that is gone for good)" if released else ""
    return NotUpError(
        f"cluster {workspace.root.name!r} is being removed: its `clusterctl down` did not finish",
        about="leaving",
        why="; ".join(filter(None, parts)),
        fix=f"run `clusterctl down` again{forget}: it continues from there; or run `clusterctl up` to "
        "bring the cluster back",
    )
