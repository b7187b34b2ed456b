"""Tests of why jobs wait, if Slurm's reason is the same for different causes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from clusterctl.errors import SchedulerError
from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo
from clusterctl.scheduler.diagnosis import Diagnosis, diagnose
from clusterctl.scheduler.facts import Evidence
from clusterctl.scheduler.limits import Ask, exceeded_limit, with_limits
from clusterctl.scheduler.mpirun import MpirunClient
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


def slurm(limits: Mapping[str, str], qos: str, partition: str) -> Ask:
    """Answer as Slurm. limits: account -> "PARENT|TRES". qos: lines of all QOS. partition: its
    QoS.
    """

    def ask(argv: Sequence[str]) -> str:
        if argv[0] == "scontrol":
            return f"PartitionName=train AllowQos=ALL {partition} Nodes=n[1-2]\n"
        if "qos" in argv:
            return qos
        account = next(
            word.removeprefix("account=") for word in argv if word.startswith("account=")
        )
        return f"c|||{limits[account]}\nc|ada|||\n" if account in limits else ""

    return ask


class Silent(MpirunClient):
    """A scheduler whose accounting does not answer."""

    def __init__(self) -> None:
        pass

    def exceeded_limit(self, job: JobInfo) -> str:
        raise SchedulerError(f"no answer about {job.id}", code="slurm-command-failed")


LIMITED: Final = {
    "a": "top|cpu=2",
    "top": "root|cpu=8,mem=4G,node=4,gres/gpu=2",
    "root": "|",
}


@pytest.mark.parametrize(
    ("reason", "tres", "holder"),
    [
        ("AssocGrpCpuLimit", "cpu=4,mem=1G,node=1", "account a"),
        ("AssocGrpMemLimit", "cpu=1,mem=5000M,node=1", "account top"),
        ("AssocGrpNodeLimit", "cpu=2,mem=1G,node=5", "account top"),
        ("AssocGrpGRES", "cpu=1,mem=1G,node=1,gres/gpu=4", "account top"),
        ("QOSGrpCpuLimit", "cpu=4,mem=1G,node=1", "QOS normal"),
        ("QOSGrpMemLimit", "cpu=1,mem=9G,node=1", "QOS of-train"),
        ("QOSMaxCpuPerUserLimit", "cpu=4,mem=1G,node=1", "QOS normal"),
        ("MaxMemoryPerAccount", "cpu=4,mem=9G,node=1", "QOS of-train"),
        ("AssocGrpCPURunMinutesLimit", "cpu=3,node=1", "account a"),
        # Near misses: the job fits the limit, or waits for another one.
        ("AssocGrpCpuLimit", "cpu=2,mem=9G,node=9", ""),
        ("AssocGrpMemLimit", "cpu=9,mem=4G,node=9", ""),
        ("QOSGrpCpuLimit", "cpu=3,mem=1G,node=1", ""),
        ("QOSGrpJobsLimit", "cpu=99,mem=99G,node=99", ""),
        ("AssocGrpCPURunMinutesLimit", "cpu=2,node=1", ""),
        ("QOSMaxWallDurationPerJobLimit", "cpu=99", ""),
        ("Resources", "cpu=99", ""),
    ],
)
def test_job_beyond_a_group_limit_names_the_limit(reason: str, tres: str, holder: str) -> None:
    job = replace(PENDING, reason=reason, tres=tres, account="a", qos="normal", time_limit_s=3600)
    qos = "normal|cpu=3\nof-train|mem=8G\nother|cpu=1,mem=1G\n"
    limits = {"a": "root|cpu=150", "root": "|"} if "RunMinutes" in reason else LIMITED
    found = exceeded_limit(job, slurm(limits, qos, "QoS=of-train"))
    assert found.endswith(f" of {holder}") if holder else found == "", found
    waiting = replace(job, exceeds=found)
    assert waiting.is_stuck == (bool(holder) or "PerJob" in reason)
    code = diagnose(Evidence(job=waiting)).code
    assert (code == "waiting-beyond-job-limit") == (bool(holder) or "PerJob" in reason)


def test_limit_of_another_cluster_of_the_site_is_not_this_clusters() -> None:
    def ask(argv: Sequence[str]) -> str:
        if argv[0] == "scontrol":
            return "Configuration data\nClusterName             = mine\n"
        return "other|||root|cpu=2\nmine|||root|cpu=8\n" if "account=a" in argv else "mine||||\n"

    job = replace(PENDING, reason="AssocGrpCpuLimit", account="a", tres="cpu=4,node=1")
    assert exceeded_limit(job, ask) == ""
    assert exceeded_limit(replace(job, tres="cpu=9,node=1"), ask).endswith(
        "GrpTRES=cpu=8 of account a"
    )


def test_wait_ends_for_a_job_beyond_a_group_limit_and_survives_silence() -> None:
    job = replace(PENDING, reason="AssocGrpCpuLimit")
    other = replace(PENDING, reason="Resources")

    class Answers(Silent):
        def exceeded_limit(self, job: JobInfo) -> str:
            return f"cpu=8, more than GrpTRES=cpu=2 of account {job.account}"

    assert [each.is_stuck for each in with_limits(Answers(), [job, other])] == [True, False]
    assert [each.is_stuck for each in with_limits(Silent(), [job, other])] == [False, False]


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
