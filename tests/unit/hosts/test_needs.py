"""What nodes lack, as their health programs report it."""

from __future__ import annotations

import json

from clusterctl.errors import UnreachableError
from clusterctl.hosts.needs import REPORT, Lack, lacks_of, text_of
from clusterctl.transport.base import Transport
from tests.support.scripted import ScriptedTransport, Step

LACK = Lack("gpu-devices", "device files are missing", "/dev/nvidia0 is missing", "see dmesg")


def test_lacks_are_those_of_nodes_that_answer() -> None:
    need = {key: getattr(LACK, key) for key in ("code", "what", "why", "fix")}
    hosts: dict[str, Transport] = {
        "n1": ScriptedTransport([Step(REPORT, json.dumps([need, need]))]),
        "n2": ScriptedTransport([Step(REPORT, "[]")]),
        "n3": ScriptedTransport([Step(REPORT, error=UnreachableError("no route"))]),
        # Of an earlier version, which prints its problems.
        "n4": ScriptedTransport([Step(REPORT, "GPU 0: 96 C\n")]),
    }
    assert lacks_of(hosts, hosts.__getitem__, within_s=60) == {"n1": [LACK, LACK]}
    assert text_of([LACK]) == LACK.why
