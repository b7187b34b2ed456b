"""Limits of QOS and accounts that a job alone exceeds."""

from __future__ import annotations

import pytest

from clusterctl.scheduler.limits import Limits, RequestedResources
from clusterctl.scheduler.request import Request
from clusterctl.spec.job import JobSpec
from clusterctl.spec.sbatch import directives_of

# As Slurm 24.11 prints the fields.
ROW = "{name}|{flags}|{wall}|{job}|{user}|{account}|{group}|{node}|{minutes}|{least}"
FIELDS = ("flags", "wall", "job", "user", "account", "group", "node", "minutes", "least")
ACCOUNT = "account|geo||"


def qos(name: str, **limits: str) -> str:
    return "qos|" + ROW.format(name=name, **{key: limits.get(key, "") for key in FIELDS})


def association(qos: str = "normal", default: str = "", **limits: str) -> str:
    wall, job, group = (limits.get(key, "") for key in ("wall", "job", "group"))
    return f"association|geo||{default}|{qos}|{wall}|{job}|{group}||"


def limits(
    *rows: str, enforced: str = "associations,limits,qos", accounts: tuple[str, ...] = (ACCOUNT,)
) -> Limits:
    lines = [f"enforced|{enforced}", "partition|batch|N/A", *rows, *accounts]
    return Limits.parse("\n".join(lines))


def ask(*words: str, max_time: str = "", partition: str = "batch") -> RequestedResources:
    """Return what a job of 10 minutes with these options of sbatch asks."""
    named = [f"--partition={partition}"] if partition else []
    given = directives_of([*named, "--time=10", *words])
    return RequestedResources.of(Request(JobSpec(name="a", bundled="probe"), own=given), max_time)


@pytest.mark.parametrize(
    ("limit", "words", "field"),
    [
        ({"wall": "00:03:00"}, "", "MaxWall"),
        ({"wall": "00:10:00"}, "", ""),
        ({"job": "node=1"}, "-N2", "MaxTRES"),
        ({"user": "cpu=5"}, "-N2 --ntasks-per-node=3", "MaxTRESPU"),
        ({"user": "cpu=3"}, "-N2 -n3", ""),
        ({"user": "cpu=63"}, "-n64 --gpus=8", "MaxTRESPU"),
        ({"user": "node=1"}, "-N2 -n1", ""),
        ({"user": "gres/gpu=7"}, "-n64 --gpus=8", "MaxTRESPU"),
        ({"user": "gres/gpu=7"}, "-n64 --gpus-per-task=1", "MaxTRESPU"),
        ({"account": "gres/gpu=1"}, "--gres=gpu:2", "MaxTRESPA"),
        ({"account": "gres/gpu:a100=1"}, "--gres=gpu:a100:2", "MaxTRESPA"),
        ({"account": "gres/gpu:a100=1"}, "--gpus-per-node=v100:2", ""),
        ({"group": "mem=1G"}, "--mem=2G", "GrpTRES"),
        ({"group": "mem=3G"}, "--mem-per-cpu=1G -c4", "GrpTRES"),
        ({"group": "mem=1G"}, "", ""),
        ({"node": "cpu=2"}, "-N2 --ntasks-per-node=2", ""),
        ({"node": "cpu=2"}, "-c3", "MaxTRESPerNode"),
        ({"minutes": "cpu=30"}, "-c4", "MaxTRESMins"),
    ],
)
def test_job_above_a_limit_of_its_qos_never_starts(
    limit: dict[str, str], words: str, field: str
) -> None:
    verdict = limits(qos("normal", **limit), association()).judge(ask(*words.split()))
    assert bool(verdict.never) is bool(field)
    assert field in verdict.never
    assert not verdict.unknown


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        # Slurm chooses the number of nodes.
        ({"job": "node=1"}, "-n64"),
        ({"job": "node=2"}, "-N2-4"),
        ({"node": "cpu=8"}, "-n64"),
        ({"job": "gres/gpu=8"}, "-n64 --gpus-per-node=8"),
        ({"job": "gres/gpu:a100=8"}, "--gpus-per-node=a100:9,v100:1"),
        # The job has whole nodes, also if the partition gives each job these.
        ({"job": "cpu=8"}, "--exclusive"),
        ({"least": "cpu=8"}, ""),
        ({"least": "gres/gpu=1"}, ""),
        ({"job": "mem=1G"}, "--mem=0"),
        # The cluster's size is not known.
        ({"flags": "Relative", "job": "cpu=50"}, ""),
    ],
)
def test_job_whose_resources_depend_on_the_nodes_may_exceed_a_limit(
    limit: dict[str, str], words: str
) -> None:
    verdict = limits(qos("normal", **limit), association()).judge(ask(*words.split()))
    assert not verdict.never
    assert verdict.unknown


def test_job_without_a_time_limit_gets_that_of_the_qos() -> None:
    """Slurm then lowers the limit of the job."""
    rows = (qos("normal", wall="00:03:00"), association())
    assert not limits(*rows).judge(RequestedResources("batch")).never


@pytest.mark.parametrize(
    ("rows", "is_never"),
    [
        ([qos("normal"), association(wall="00:03:00")], True),
        # The limit of the QOS replaces that of the account, and that of the partition's QOS both.
        ([qos("normal", wall="01:00:00"), association(wall="00:03:00")], False),
        ([qos("normal", wall="01:00:00"), qos("p", wall="00:01:00"), association()], True),
        ([qos("normal", wall="00:01:00"), qos("p", wall="01:00:00"), association()], False),
        ([qos("normal"), qos("long", wall="00:01:00"), association(default="normal")], False),
        # Unless the QOS of the job says otherwise.
        (
            [
                qos("normal", flags="DenyOnLimit,OverPartQOS", wall="01:00:00"),
                qos("p", wall="00:01:00"),
                association(),
            ],
            False,
        ),
        # It replaces only the limit of the same resource.
        ([qos("normal", job="gres/gpu=9"), association(job="cpu=1,gres/gpu=1")], True),
        ([qos("normal", job="cpu=9"), association(job="cpu=1,gres/gpu=1")], False),
    ],
)
def test_limit_of_the_partitions_qos_comes_first(rows: list[str], is_never: bool) -> None:
    own = "partition|batch|p" if any(row.startswith("qos|p|") for row in rows) else ""
    assert bool(limits(own, *rows).judge(ask("-c2")).never) is is_never


@pytest.mark.parametrize(
    ("flags", "enforced", "is_never"),
    [
        ("", "limits", True),
        ("", "none", True),
        ("PartitionTimeLimit", "limits", False),
        ("PartitionTimeLimit", "none", False),
    ],
)
def test_qos_may_lift_the_time_limit_of_a_partition(
    flags: str, enforced: str, is_never: bool
) -> None:
    found = limits(qos("normal", flags=flags), association(), enforced=enforced)
    verdict = found.judge(ask(max_time="00:05:00"))
    assert (bool(verdict.never), verdict.unknown) == (is_never, "")


def test_named_qos_decides() -> None:
    rows = [qos("normal"), qos("short", wall="00:03:00"), association("normal,short")]
    assert limits(*rows).judge(ask("--qos=short")).never
    assert not limits(*rows).judge(ask("--qos=normal")).never
    # Slurm does not tell which of several it takes.
    assert limits(*rows).judge(ask()).unknown
    assert limits(*rows).judge(ask("--qos=hidden")).unknown


def test_qos_of_a_partition_that_the_site_chooses_is_unknown() -> None:
    rows = [qos("normal"), qos("p", wall="00:03:00"), association(), "partition|other|p"]
    assert limits(*rows).judge(ask(partition="")).unknown
    assert limits(*rows, "partition|batch|p").judge(ask(partition="")).never


def test_resources_of_an_account_and_its_parents_are_limits() -> None:
    rows = (qos("normal"), association())
    upper = "account|uni||cpu=4"
    for accounts in [("account|geo||cpu=4",), ("account|geo|uni|", upper)]:
        found = limits(*rows, accounts=accounts)
        assert "GrpTRES" in found.judge(ask("-c8")).never
        assert not found.judge(ask("-c4")).unknown
    for accounts in [(), ("account|geo|uni|",)]:
        assert limits(*rows, accounts=accounts).judge(ask()).unknown
    replaced = (qos("normal", group="cpu=99"), association())
    assert not limits(*replaced, accounts=("account|geo|uni|", upper)).judge(ask("-c8")).never


def test_limits_that_are_not_enforced_stop_no_job() -> None:
    rows = (qos("normal", wall="00:03:00"), association())
    verdict = limits(*rows, enforced="associations,qos").judge(ask())
    assert not verdict.never
    assert not verdict.unknown


@pytest.mark.parametrize("text", ["", "enforced|safe\n", f"enforced|limits\n{qos('normal')}\n"])
def test_limits_that_the_user_may_not_read_are_unknown(text: str) -> None:
    assert Limits.parse(text).judge(ask()).unknown
