"""The cloud as a JSON file: existing resources, a log of operations, planned faults.

{"resources": {TYPE: {ID: ATTRIBUTES}}, "log": [{"at", "op", "type", "name", "id", "error"}],
 "faults": [...], "addresses": {NAME: IP}, "filled": [BUCKET], "next": NUMBER, "lag": CALLS,
 "unsettled": {WHAT: CALLS}}

"host_projects": [PROJECT], whose networks are shared with the cluster's project.
The double of the API reads "guest_attributes": {INSTANCE: {"ssh-ed25519": "AAAA..."}}, what an
instance published if that is not the usual key.

``lag``: so many calls that need a new service account or API do not know it; ``unsettled``: so many
    are left.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EMPTY = (
    '{"resources": {}, "log": [], "faults": [], "addresses": {}, "filled": [], "next": 1, "lag": 0,'
    ' "unsettled": {}}'
)


class Store:
    """The file at ``path``; whoever changes it holds its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """What is in it now."""
        world: dict[str, Any] = json.loads(self.path.read_text() if self.path.exists() else EMPTY)
        return world

    def put(self, kind: str, path: str, **attributes: Any) -> None:
        """Let a resource of a Terraform type exist, by its id; its name is the end of that."""
        with self.change() as state:
            name = path.rpartition("/")[2]
            state["resources"].setdefault(kind, {})[path] = {"id": path, "name": name, **attributes}

    def names(self, kind: str) -> list[str]:
        """The names of what there is of a Terraform type."""
        return sorted(row["name"] for row in self.read()["resources"].get(kind, {}).values())

    @contextmanager
    def change(self) -> Iterator[dict[str, Any]]:
        """What is in it, written back afterwards, also when an error is raised: the log has it
        then.
        """
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            world = self.read()
            try:
                yield world
            finally:
                fresh = self.path.with_suffix(".new")
                fresh.write_text(json.dumps(world))  # with an indent, Python writes it, slowly
                fresh.replace(self.path)
