"""Tests of why jobs wait, if Slurm's reason is the same for different causes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo
from clusterctl.scheduler.ends.diagnose import diagnose
from clusterctl.scheduler.ends.diagnosis import Diagnosis
from clusterctl.scheduler.ends.facts import Evidence
from tests.unit.scheduler.test_diagnosis import GUEST, JOB, OPERATOR

RESERVED: Final = "ReqNodeNotAvail, May be reserved for other job"
PENDING: Final = replace(JOB, state=JobState.PENDING, reason=RESERVED, partition="train", nodes=())


def node(
    name: str, shown: str = "idle", reason: str = "", partition: str = "train", by: str = "root"
) -> NodeInfo:
    return NodeInfo(name, shown, reason, 2, 4000, "", (partition,), reason_by=by)


def waits(
    *nodes: NodeInfo,
    required: Sequence[str] = (),
    reader: Mapping[str, Any] = OPERATOR,
    **job: Any,
) -> Diagnosis:
    evidence = Evidence(job=replace(PENDING, **job), nodes=nodes, required=required, **reader)
    return diagnose(evidence)


HEALTH = node("n2", "idle+drain", "clusterctl health: /tmp has 0 MiB free, but needs 50")
PERSON = node("n2", "idle+drain", "fan broken", by="ada")
DOWN = node("n2", "down*", "Not responding")
OUT = "waiting-for-nodes-out-of-service"
TAKEN = "waiting-for-reserved-nodes"


@pytest.mark.parametrize(
    ("nodes", "required", "code", "in_cause", "in_fix"),
    [
        ((node("n1"), HEALTH), ["n2"], OUT, "/tmp has 0 MiB free", "health check"),
        ((node("n1"), PERSON), ["n2"], OUT, "fan broken", "clusterctl node resume n2"),
        ((node("n1"), DOWN), ["n2"], OUT, "not responding", "clusterctl up"),
        ((node("n1"), node("n2", "idle+drain+maint")), ["n2"], TAKEN, "reserved", "--time"),
        ((node("n1"), node("n2", "reserved")), ["n2"], TAKEN, "reserved", "--time"),
        ((node("n1", "mixed"), PERSON), (), OUT, "n2 is drained", "resume"),
        # Near misses: another node, another partition, or nothing that shows either.
        ((node("n1", "reserved"), PERSON), ["n1"], TAKEN, "reserved", "--time"),
        (
            (node("n1", "reserved"), node("n2", "down", "x", "debug")),
            (),
            TAKEN,
            "reserved",
            "--time",
        ),
        ((node("n1"), PERSON), ["n1"], "waiting-for-unavailable-nodes", "or reserved", "sinfo -R"),
        ((), ["n2"], "waiting-for-unavailable-nodes", "or reserved", "sinfo -R"),
    ],
)
def test_waiting_for_nodes_is_diagnosed_by_node_states(
    nodes: Sequence[NodeInfo], required: Sequence[str], code: str, in_cause: str, in_fix: str
) -> None:
    found = waits(*nodes, required=required)
    assert (found.code, in_cause in found.cause, in_fix in found.fix) == (code, True, True), found


def test_waiting_for_nodes_of_a_foreign_site_names_the_administrators() -> None:
    found = waits(PERSON, reader=GUEST)
    assert (found.code, "administrators" in found.fix, "resume" in found.fix) == (OUT, True, False)


def test_nodes_in_slurms_reason_are_shown() -> None:
    found = waits(node("n1", "down"), PERSON, reason="ReqNodeNotAvail, UnavailableNodes:n2")
    assert ("n2 is drained" in found.cause, "n1" in found.cause) == (True, False)


@pytest.mark.parametrize(
    ("reason", "days", "is_told"),
    [
        ("Resources", 1, True),
        ("Priority", 30, True),
        # A job ahead has no time limit, for which Slurm takes a year.
        ("Resources", 364.9, False),
        ("Priority", 100, False),
        ("JobHeldUser", 1, False),
        ("JobHeldAdmin", 1, False),
        ("job requeued in held state", 0.1, False),
        ("JobHoldMaxRequeue", 0.1, False),
    ],
)
def test_expected_start_is_shown_only_if_slurm_estimates_it(
    reason: str, days: float, *, is_told: bool
) -> None:
    found = waits(reason=reason, expected_start=int(time.time() + days * 86_400))
    assert ("expects to start" in found.cause) is is_told, found


NEVER: Final[JobInfo] = replace(JOB, nodes=(), exit_code=0, start_time=5, end_time=5)


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (replace(NEVER, state=JobState.NODE_FAIL, reason="NodeDown"), "never-started"),
        (replace(NEVER, signal=1, reason="BadConstraints"), "never-started"),
        (replace(JOB, state=JobState.NODE_FAIL, reason="NodeDown"), "lost-node"),
        (replace(NEVER, exit_code=3, end_time=9), "exit-code"),
    ],
)
def test_node_fail_of_a_job_without_nodes_is_no_lost_node(job: JobInfo, code: str) -> None:
    """Slurm ends a waiting job with NODE_FAIL if a node that it asks for leaves the cluster."""
    assert diagnose(Evidence(job=job)).code == code
