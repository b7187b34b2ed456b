"""The faults of a rehearsal, and the watch over the job, with a played Slurm and played
observations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.jobs.source import source_of
from clusterctl.jobs.submit import PreparedJob
from clusterctl.rehearse import rehearsal
from clusterctl.rehearse.rehearsal import Rehearser
from clusterctl.rehearse.verdict import Fault, FaultResult, Verdict
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.spec.job import JobSpec
from tests.support.local_transport import LocalTransport
from tests.support.played.cluster import PlayedCluster, node_record

SIZE = 100
NOW = time.time()
# Later than any fault that a test causes.
START = {"time": NOW - 10, "event": "start"}
LATER = NOW + 1e6
HANG = {"time": LATER, "event": "hang", "summary": "rank 0 sleeps"}
END = {"time": LATER + 10, "event": "end", "status": 0}


def look(*events: Any, saved: Sequence[int] = (1,)) -> bytes:
    """Return an answer of payload/node/observe.py."""
    checkpoints = {
        f"files/step-{number}.pt": (number, NOW - 9 + number, SIZE, 0.5) for number in saved
    }
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    return f"{json.dumps({'events': text, 'steps': [], 'checkpoints': checkpoints})}\n".encode()


class Observed(LocalTransport):
    """Shows these looks in each observation in its turn, and repeats the last look."""

    def __init__(self, *observations: Sequence[bytes]) -> None:
        self._observations = list(observations)

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        if "observe" not in argv:
            yield from super().stream(argv)
            return
        looks = self._observations.pop(0)
        yield from looks
        while True:
            yield looks[-1]


def rehearsed(
    cluster: PlayedCluster,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    transport: Observed,
) -> FaultResult:
    """Rehearse a job that writes two checkpoints. Each signal finds a rank after these writes."""
    script = folder / "job.sh"
    script.write_text(
        f"#!/bin/bash\nfor n in 1 2; do head -c {SIZE} /dev/zero > step-$n.pt; done\n"
    )
    job = JobSpec(name="mine", script=script)
    played = cluster.session()
    session = Session(played.site, SlurmClient(transport, patience_s=5.0), played.ledger)

    def signal_ranks(_: str, job_id: str, number: int, *, last: bool) -> tuple[str, ...]:
        cluster.wait_until_ended(job_id)
        return ("n-1",)

    def kill_host(*_: str) -> None:
        cluster.wait_until_ended("2")
        cluster.change("2", state="PENDING", reason="Resources")

    provider = SimpleNamespace(
        start_ahead=lambda: None, signal_ranks=signal_ranks, kill_host=kill_host
    )
    monkeypatch.setattr(rehearsal, "provider_of", lambda _: provider)
    prepared = PreparedJob(
        Request.read(job),
        session.site.render(Request.read(job), None),
        source=source_of(Request.read(job)),
    )
    preparer: Any = SimpleNamespace(prepare=lambda *_: (prepared,))
    (trial,) = Rehearser(session, lambda _: None).rehearse(preparer, job, [fault]).trials
    return trial


UNDISTURBED = [look(START), look(START, END)]


@pytest.mark.parametrize(
    ("action", "expected"),
    [("warn", (Verdict.SURVIVES, "")), ("end", (Verdict.HANGS, HANG["summary"]))],
)
def test_hang_ends_a_rehearsal_but_a_warning_does_not(
    cluster: PlayedCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    expected: tuple[Verdict, str],
) -> None:
    disturbed = [look(START), look(START, {**HANG, "action": action}), look(START, END)]
    transport = Observed(UNDISTURBED, disturbed)
    trial = rehearsed(cluster, tmp_path, monkeypatch, Fault.RANK_KILLED, transport)
    assert (trial.verdict, trial.cause) == expected


@pytest.mark.parametrize(
    ("saved", "expected"),
    [((1, 2), Verdict.DIFFERS), ((1, 3), Verdict.TOO_LATE)],
    ids=["newest", "missing"],
)
def test_newest_checkpoint_after_the_kill_is_torn(
    cluster: PlayedCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: tuple[int, ...],
    expected: Verdict,
) -> None:
    """The second checkpoint was written just before the kill. The third does not exist any more."""
    disturbed = [look(START), look(START, END, saved=saved)]
    after_the_kill = [look(START, saved=saved)]
    transport = Observed(UNDISTURBED, disturbed, after_the_kill, UNDISTURBED)
    trial = rehearsed(cluster, tmp_path, monkeypatch, Fault.CHECKPOINT_TORN, transport)
    assert trial.verdict is expected


def test_killed_node_is_started_if_its_job_keeps_waiting(
    cluster: PlayedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node is in service, but the job does not fit on it, or it is busy."""
    with cluster.state() as state:
        state["nodes"] = [node_record("n2", "other")]
    monkeypatch.setattr(rehearsal, "_WAITS_S", 0.0)
    monkeypatch.setattr(rehearsal, "LONGEST_TIMES", 0)
    monkeypatch.setattr(rehearsal, "LONGEST_MORE_S", 10.0)
    monkeypatch.setattr(rehearsal, "up", lambda *_: cluster.change("2", state="COMPLETED"))
    transport = Observed(UNDISTURBED, [look(START)])
    trial = rehearsed(cluster, tmp_path, monkeypatch, Fault.NODE_KILLED, transport)
    assert trial.verdict is Verdict.SURVIVES
