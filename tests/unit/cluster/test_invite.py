"""What `invite` prints, and for whom it refuses."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from clusterctl.cluster.invite import invite
from clusterctl.errors import UsageError
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import LOGIN
from tests.support.inventories import KEY, host_of, inventory_of
from tests.support.messages import refused

PUBLIC = (
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIgWUoVkmyWXbcIdPHr/8G5GCH/ojIJjYVCT4uX53UXV ann@laptop"
)
SPEC = ClusterSpec.model_validate(
    {
        "version": 1,
        "name": "d",
        "provider": {"type": "local"},
        "partitions": [{"name": "train", "nodes": 1}],
        "users": [{"name": "ann", "uid": 2001, "ssh_keys": [PUBLIC]}, {"name": "bob", "uid": 2002}],
    }
)


@pytest.mark.parametrize(
    ("host", "login", "known"),
    [
        ({}, "ann@10.0.0.2", "10.0.0.2"),
        ({"port": 2222}, "ssh://ann@10.0.0.2:2222", "[10.0.0.2]:2222"),
        ({"ssh_address": "fd00::1"}, "ssh://ann@[fd00::1]:22", "fd00::1"),
        ({"ssh_address": "head.example"}, "ann@head.example", "head.example"),
    ],
)
def test_invitation_has_the_login_and_the_host_key(host: dict, login: str, known: str) -> None:
    inventory = inventory_of("n1")
    inventory = replace(
        inventory, hosts=(replace(inventory.controller, **host), *inventory.compute)
    )
    found = invite(SPEC, inventory, "ann")
    assert (found.login, found.known_hosts) == (login, f"{known} {KEY}")
    assert found.command.endswith(f"clusterctl attach {shlex.quote(login)} --name d")


def test_invitation_of_the_job_user_has_a_folder_of_its_own() -> None:
    found = invite(SPEC, replace(inventory_of("n1"), job_user="ann"), "ann")
    assert found.command.endswith(" --name d --folder '~/clusterctl-attached'")


def test_invitation_leads_to_the_login_host_of_the_cluster() -> None:
    inventory = inventory_of("n1", host_of("d-login", LOGIN, address="10.0.0.9"))
    assert invite(SPEC, inventory, "ann").login == "ann@10.0.0.9"


@pytest.mark.parametrize(
    ("user", "change", "code"),
    [
        ("eve", {}, "unknown-user"),
        ("bob", {}, "user-without-key"),
        ("ann", {"jump": "gate"}, "invite-behind-proxy"),
        ("ann", {"proxy_command": "gcloud x"}, "invite-behind-proxy"),
    ],
)
def test_invitation_that_nobody_could_use_is_refused(user: str, change: dict, code: str) -> None:
    inventory = inventory_of("n1")
    hosts = (replace(inventory.controller, **change), *inventory.compute)
    with refused(code, UsageError):
        invite(SPEC, replace(inventory, hosts=hosts), user)


def test_invitation_to_a_cluster_without_users_says_so() -> None:
    with refused("unknown-user", UsageError, "has none"):
        invite(SPEC.model_copy(update={"users": ()}), inventory_of("n1"), "ann")


def test_cluster_without_slurm_has_no_invitation() -> None:
    with refused("needs-slurm", UsageError):
        invite(SPEC, replace(inventory_of("n1"), scheduler="none"), "ann")
