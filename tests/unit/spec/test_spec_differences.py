"""What a later spec changes of a cluster, in words."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.spec.load import differences
from clusterctl.spec.models import ClusterSpec

ADA = {"name": "ada", "uid": 2001}
BOB = {"name": "bob", "uid": 2002}
TRAIN: dict[str, Any] = {"name": "train", "nodes": 2}


def spec(**settings: Any) -> ClusterSpec:
    whole = {"version": 1, "name": "d", "partitions": [TRAIN], "users": [ADA], **settings}
    return ClusterSpec.model_validate(whole)


def test_differences_of_equal_specs_are_none() -> None:
    assert differences(spec(), spec()) == ()


@pytest.mark.parametrize(
    "more",
    [{"nodes": 5}, {"cpus": 2}, {"memory": "2GiB"}],
    ids=lambda more: next(iter(more)),
)
def test_differences_leave_hosts_to_the_provider(more: dict[str, Any]) -> None:
    assert differences(spec(), spec(partitions=[TRAIN | more])) == ()


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (
            {},
            {"users": [ADA, BOB]},
            ["users: ada -> ada, bob", "users.bob.uid: not set -> 2002",
             "users.bob.accounts: not set -> default"],
        ),
        ({}, {"users": [ADA | {"uid": 2003}]}, ["users.ada.uid: 2001 -> 2003"]),
        ({"users": [ADA, BOB]}, {"users": [BOB, ADA]}, ["users: ada, bob -> bob, ada"]),
        (
            {},
            {"users": [ADA | {"accounts": ["physics", "default"]}]},
            ["users.ada.accounts: default -> physics, default"],
        ),
        (
            {"slurm": {"extra": ["KillWait=9"]}},
            {"slurm": {"extra": ["KillWait=8"]}},
            ["slurm.extra: KillWait=9 -> KillWait=8"],
        ),
        ({}, {"monitoring": {"interval": "90s"}}, ["monitoring.interval: 2s -> 1m30s"]),
        ({}, {"storage": {"name": "data"}}, ["storage.name: not set -> data"]),
        (
            {"partitions": [TRAIN | {"max_time": "2h"}]},
            {},
            ["partitions.train.max_time: 2h -> not set"],
        ),
        (
            {"partitions": [{"name": "gpus", "nodes": 1, "max_time": "2h"}]},
            {"partitions": [{"name": "gpus", "nodes": 1, "max_time": "3h"}]},
            ["partitions.gpus.max_time: 2h -> 3h"],
        ),
        (
            {},
            {"partitions": [TRAIN, {"name": "big", "nodes": 1}]},
            ["partitions: train -> train, big"],
        ),
    ],
)  # fmt: skip
def test_differences_name_each_setting_with_both_values(
    before: dict[str, Any], after: dict[str, Any], lines: list[str]
) -> None:
    assert [str(one) for one in differences(spec(**before), spec(**after))] == lines


def test_differences_cover_every_setting() -> None:
    """Each part of a spec is either of the hosts or compared: a new one must not be forgotten."""
    assert set(ClusterSpec.model_fields) == {
        "version", "name", "provider", "partitions", "users", "software", "storage", "scheduler", "slurm",
        "monitoring",
    }  # fmt: skip
