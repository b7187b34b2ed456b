"""Limits of QOS and accounts that a job alone exceeds."""

from __future__ import annotations

import pytest

from clusterctl.scheduler.capacity import Shape
from clusterctl.scheduler.limits import Ask, Limits

MINUTE = 60
# As Slurm 24.11 prints the fields.
ROW = "{name}|{wall}|{job}|{user}|{account}|{group}|{node}|{minutes}|{least}"


def qos(name: str, **limits: str) -> str:
    values = dict.fromkeys(("wall", "job", "user", "account", "group", "node", "minutes", "least"))
    return "qos|" + ROW.format(name=name, **{key: limits.get(key, "") for key in values})


def association(qos: str = "normal", default: str = "", wall: str = "") -> str:
    return f"association|geo||{default}|{qos}|{wall}||||"


def limits(*rows: str, enforced: str = "associations,limits,qos") -> Limits:
    return Limits.parse("\n".join([f"enforced|{enforced}", "partition|batch|N/A", *rows]))


def ask(shape: Shape | None = Shape(), minutes: int | None = 10, qos: str = "") -> Ask:  # noqa: B008
    return Ask("batch", "", qos, shape, None if minutes is None else minutes * MINUTE)


@pytest.mark.parametrize(
    ("limit", "shape", "field"),
    [
        ({"wall": "00:03:00"}, Shape(), "MaxWall"),
        ({"wall": "00:10:00"}, Shape(), ""),
        ({"job": "node=1"}, Shape(nodes=2), "MaxTRES"),
        ({"user": "cpu=4"}, Shape(nodes=2, cpus=3), "MaxTRESPU"),
        ({"account": "gres/gpu=1"}, Shape(gpus=2), "MaxTRESPA"),
        ({"account": "gres/gpu:a100=1"}, Shape(gpus=2, gpu_type="a100"), "MaxTRESPA"),
        ({"account": "gres/gpu:a100=1"}, Shape(gpus=2, gpu_type="v100"), ""),
        ({"group": "mem=1G"}, Shape(memory_mib=2048), "GrpTRES"),
        ({"group": "mem=1G"}, Shape(), ""),
        ({"node": "cpu=2"}, Shape(nodes=2, cpus=2), ""),
        ({"node": "cpu=2"}, Shape(cpus=3), "MaxTRESPerNode"),
        ({"minutes": "cpu=30"}, Shape(cpus=4), "MaxTRESMins"),
        ({"least": "gres/gpu=1"}, Shape(), "MinTRES"),
        ({"job": "node=1"}, None, ""),
    ],
)
def test_job_above_a_limit_of_its_qos_never_starts(
    limit: dict[str, str], shape: Shape | None, field: str
) -> None:
    verdict = limits(qos("normal", **limit), association()).judge(ask(shape))
    assert (f"limit {field} of QOS normal" in verdict.never) is bool(field)
    assert not verdict.unknown


def test_job_without_a_time_limit_gets_that_of_the_qos() -> None:
    """Slurm then lowers the limit of the job."""
    assert not limits(qos("normal", wall="00:03:00"), association()).judge(ask(minutes=None)).never


@pytest.mark.parametrize(
    ("rows", "is_never"),
    [
        ([qos("normal"), association(wall="00:03:00")], True),
        # The limit of the QOS replaces that of the account, and that of the partition's QOS both.
        ([qos("normal", wall="01:00:00"), association(wall="00:03:00")], False),
        ([qos("normal", wall="01:00:00"), qos("p", wall="00:01:00"), association()], True),
        ([qos("normal", wall="00:01:00"), qos("p", wall="01:00:00"), association()], False),
        ([qos("normal"), qos("long", wall="00:01:00"), association(default="normal")], False),
    ],
)
def test_limit_of_the_partitions_qos_comes_first(rows: list[str], is_never: bool) -> None:
    own = "partition|batch|p" if any(row.startswith("qos|p|") for row in rows) else ""
    assert bool(limits(own, *rows).judge(ask()).never) is is_never


def test_named_qos_decides() -> None:
    rows = [qos("normal"), qos("short", wall="00:03:00"), association("normal,short")]
    assert limits(*rows).judge(ask(qos="short")).never
    assert not limits(*rows).judge(ask(qos="normal")).never
    # Slurm does not tell which of several it takes.
    assert limits(*rows).judge(ask()).unknown


def test_limits_that_are_not_enforced_stop_no_job() -> None:
    rows = (qos("normal", wall="00:03:00"), association())
    verdict = limits(*rows, enforced="associations,qos").judge(ask())
    assert not verdict.never
    assert not verdict.unknown


@pytest.mark.parametrize("text", ["", "enforced|safe\n", f"enforced|limits\n{qos('normal')}\n"])
def test_limits_that_the_user_may_not_read_are_unknown(text: str) -> None:
    assert Limits.parse(text).judge(ask()).unknown
