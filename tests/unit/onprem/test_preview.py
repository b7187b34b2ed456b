"""What `plan` says of machines that are new to the cluster."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.hosts.probe import HostFacts
from clusterctl.providers.onprem.members import members, preview
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.onprem import OnpremSettings
from tests.unit.onprem.test_members import facts, spec_of

INSTALLED = "to be installed, with what they need: "


def said(spec: ClusterSpec, *new: HostFacts) -> list[str]:
    """Of these machines, while the others are in the cluster already."""
    assert isinstance(spec.provider, OnpremSettings)
    asked = members(spec, spec.provider)
    seen = {one.system.machine_id: one for one in new}
    return list(preview(spec, asked, {one.name: facts(one.name) for one in asked} | seen, seen))


def packages(spec: ClusterSpec, new: HostFacts) -> set[str]:
    """Those that are to be installed on it."""
    (line,) = said(spec, new)
    before, _, names = line.partition(INSTALLED)
    assert before == f"{new.system.machine_id}: "
    return set(names.split(", "))


def differing(name: str, **values: Any) -> HostFacts:
    return facts(name).model_copy(update=values)


def test_what_a_machine_lacks_is_named_by_its_roles() -> None:
    controller, compute, login = (packages(spec_of(), facts(name)) for name in ("n1", "n2", "n3"))
    assert {"slurmctld", "mariadb-server", "slurmd"} <= controller
    assert {"slurmd", "munge", "openmpi-bin", "python3-venv"} <= compute
    assert not {"mariadb-server", "slurmctld"} & compute
    assert "slurm-client" in login
    assert "slurmd" not in login


def test_without_a_scheduler_nothing_of_slurm_is_installed() -> None:
    found = packages(spec_of().model_copy(update={"scheduler": "none"}), facts("n2"))
    assert "openmpi-bin" in found
    assert not [name for name in found if "slurm" in name or "munge" in name]


@pytest.mark.parametrize(
    ("slurm", "name"), [("distribution", "slurm-slurmd"), ("openhpc", "slurm-slurmd-ohpc")]
)
def test_names_are_those_of_the_distribution(slurm: str, name: str) -> None:
    spec = spec_of()
    spec = spec.model_copy(update={"software": spec.software.model_copy(update={"slurm": slurm})})
    rocky = facts("n2").system.model_copy(update={"id": "rocky", "version": "9.6"})
    assert name in packages(spec, differing("n2", system=rocky))


def test_machines_that_are_alike_share_a_line() -> None:
    spec = spec_of(login=["n2", "n3"], controller="n1")
    spec = spec.model_copy(update={"partitions": (spec.partitions[0].model_copy(update={"hosts": "n1"}),)})
    (line,) = said(spec, facts("n2"), facts("n3"))
    assert line.startswith(f"n2, n3: {INSTALLED}")


def test_what_is_there_is_not_said() -> None:
    spec = spec_of()
    has = frozenset(packages(spec, facts("n2")))
    assert said(spec, differing("n2", packages=has)) == []


def test_accounts_and_files_are_named() -> None:
    users = [{"name": "ada", "uid": 2001}, {"name": "bob", "uid": 2002}]
    spec = ClusterSpec.model_validate({**spec_of().model_dump(exclude_unset=True), "users": users})
    new = differing("n2", accounts={"ada": 1000}, files=("/etc/hosts", "/etc/slurm/slurmdbd.conf"))
    assert said(spec, new)[1:] == [
        "n2: users to be made: bob",
        "n2: may be changed, kept aside, and put back by `down`: /etc/hosts",
    ]


def test_machines_of_the_cluster_are_none_of_it() -> None:
    assert said(spec_of()) == []
