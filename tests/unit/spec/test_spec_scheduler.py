"""What a spec can't ask for without a scheduler: one finding each, in its place."""

from __future__ import annotations

import pytest

from clusterctl.errors import SpecError
from clusterctl.spec.load import parse_spec

BASE = """\
version: 1
name: demo
scheduler: none
provider: {type: local}
partitions:
  - {name: train, nodes: 2}
"""
ONPREM = """\
version: 1
name: demo
scheduler: none
provider:
  type: onprem
  controller: one
  shared: {kind: none}
  hosts: {one: {address: 10.0.0.1}, two: {address: 10.0.0.2}}
partitions:
  - {name: train, hosts: NODES}
"""


def problems(text: str) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "c.yaml")
    return [(problem.key, problem.message) for problem in caught.value.problems]


def test_it_is_slurm_by_default() -> None:
    assert parse_spec(BASE.replace("scheduler: none\n", ""), "c.yaml").has_slurm
    assert not parse_spec(BASE, "c.yaml").has_slurm


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("slurm: {qos: [{name: urgent}]}\n", "slurm.qos"),
        ("slurm: {extra: [KillWait=9]}\n", "slurm.extra"),
        ("users: [{name: ada, uid: 2000, accounts: [lab]}]\n", "users[0].accounts"),
    ],
)
def test_what_is_slurms_is_refused_once(more: str, key: str) -> None:
    ((found, message),) = problems(BASE + more)
    assert found == key
    assert "Slurm" in message
    parse_spec((BASE + more).replace("scheduler: none", "scheduler: slurm"), "c.yaml")


def test_all_of_it_at_once() -> None:
    more = "slurm: {qos: [{name: urgent}], extra: [KillWait=9]}\n"
    more += "users: [{name: ada, uid: 2000, accounts: [lab]}]\n"
    assert {key for key, _ in problems(BASE + more)} == {"slurm.qos", "slurm.extra", "users[0].accounts"}


def test_an_account_by_default_is_no_account() -> None:
    parse_spec(BASE + "users: [{name: ada, uid: 2000, accounts: [default]}]\n", "c.yaml")


def test_hosts_need_a_shared_folder_unless_they_are_one() -> None:
    (found,) = problems(ONPREM.replace("NODES", "two"))
    assert found == ("provider.shared.kind", "without Slurm, jobs need a folder that all hosts see")
    alone = ONPREM.replace("NODES", "one").replace(", two: {address: 10.0.0.2}", "")
    assert not parse_spec(alone, "c.yaml").has_slurm
