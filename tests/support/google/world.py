"""What "Google" has, in the one JSON file that the stand-in provider and the double of the API share.

{"resources": {TYPE: {ID: ATTRIBUTES}},                       Terraform's types, ids and attributes
 "guest_attributes": {INSTANCE: {"ssh-ed25519": "AAAA..."}},
 "objects": {BUCKET: [NAME]}}                                 these two are the double's own
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class World:
    """The file. Processes that change it wait for each other."""

    path: Path

    def read(self) -> dict[str, Any]:
        """All of it; empty before anything was made."""
        try:
            state: dict[str, Any] = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {"resources": {}}
        return state

    @contextmanager
    def change(self) -> Iterator[dict[str, Any]]:
        """The state to change; it is written when the block ends well."""
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self.read()
            yield state
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps(state, indent=1))
            fresh.replace(self.path)

    def put(self, kind: str, path: str, **attributes: Any) -> None:
        """Let a resource of a Terraform type exist, by its id; its name is the end of that."""
        with self.change() as state:
            name = path.rpartition("/")[2]
            state["resources"].setdefault(kind, {})[path] = {"id": path, "name": name, **attributes}

    def names(self, kind: str) -> list[str]:
        """The names of what there is of a Terraform type."""
        return sorted(row["name"] for row in self.read()["resources"].get(kind, {}).values())
