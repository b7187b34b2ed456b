"""Answers of hosts to the programs that probe them."""

from __future__ import annotations

import json

from tests.unit.hosts.test_doctor import WELL, room

FACTS = (
    "@node\nCPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=2000\n"
)
SYSTEM = WELL["system"] | {"id": "debian", "version": "12"}
DISK = room(512, "/")


def answer(**node: object) -> str:
    """Return the answer of a healthy node, except for these fields."""
    fine = {
        "system": SYSTEM,
        "cards": 0,
        "said": FACTS,
        "checksums": {},
        "wanted": {},
        "space": [DISK],
    }
    return json.dumps({"state": "running", "node": fine | node})
