"""`up` and `down` killed on on-prem machines: the next call continues, and no file of clusterctl
stays.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.e2e.faults import Victim, at_work, eventually_none
from tests.e2e.own import as_before, state
from tests.support.lab import lab
from tests.support.verbs import Clusterctl

# Verb, the phase that it is killed in, and how long after its begin.
KILLS = (
    ("up", "converge", 10.0),
    ("down", "destroy", 4.0),
)


def test_killed_verb_continues_at_the_next_call(
    no_residue: None, cluster_name: str, clusterctl: Clusterctl, tmp_path: Path
) -> None:
    spec = tmp_path / "own.yaml"
    with lab("debian", 2, internet=True) as machines:
        before = {host.name: state(machines, host.name) for host in machines.hosts}
        spec.write_text(machines.spec(cluster_name, partitions={"train": "node[1-2]"}))
        for verb, phase, seconds in KILLS:
            if verb == "down":
                assert clusterctl("-o", "json", "-f", spec, "up").json["probed"] == [
                    "node1",
                    "node2",
                ]
            victim = Victim(clusterctl, "-f", spec, verb, *(["--yes"] if verb == "down" else []))
            victim.until_phase(phase)
            time.sleep(seconds)
            assert victim.hit("kill").rc == -signal.SIGKILL, (verb, phase)
            assert eventually_none(clusterctl.home) == [], (verb, phase)
        clusterctl("-f", spec, "down", "--yes")
        as_before(machines, before)
    assert at_work(clusterctl.home) == []
    assert not (clusterctl.home / cluster_name).exists()
