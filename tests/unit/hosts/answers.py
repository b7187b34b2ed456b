"""What hosts answer the programs that look at them."""

from __future__ import annotations

import json

from tests.support.scripted import Step
from tests.unit.hosts.test_doctor import WELL, room

FACTS = (
    "@node\nCPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=2000\n"
)
SYSTEM = WELL["system"] | {"id": "debian", "version": "12"}
DISK = room(512, "/")


def answer(**node: object) -> str:
    """Of a host that is well, but for this."""
    fine = {"system": SYSTEM, "cards": 0, "said": FACTS, "checksums": {}, "space": [DISK]}
    return json.dumps({"state": "running", "node": fine | node})


def pairs(**unreached: str) -> Step:
    """Of a host to which the kernel gave port 1: why it does not reach that of the others."""
    said = {host.replace("_", "-"): {"1": why} for host, why in unreached.items()}
    return Step(("python3", "..."), f"[1]\n{json.dumps(said)}\n")
