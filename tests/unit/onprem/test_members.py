"""Roles, addresses, names, networks and plan of on-prem hosts, from spec and facts."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.hosts.checks import Finding
from clusterctl.hosts.probe import HostFacts
from clusterctl.hosts.roles import CLAIM
from clusterctl.providers.onprem.members import (
    claim_findings,
    inventory,
    members,
    notes,
    preview,
)
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.spec.software import SlurmSource
from clusterctl.state.inventory import Inventory
from tests.support.messages import condition
from tests.unit.hosts.test_doctor import WELL


def spec_of(**provider: Any) -> ClusterSpec:
    given = {
        "type": "onprem",
        "controller": "n1",
        "login": ["n3"],
        "hosts": {"n[1-3]": "10.0.0.[1-3]"},
        **provider,
    }
    return ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "d",
            "provider": given,
            "partitions": [{"name": "t", "hosts": "n[1-2]"}],
        }
    )


def facts(name: str, *addresses: str, version: str = "12") -> HostFacts:
    system = {"id": "debian", "version": version, "hostname": f"{name}.lab"}
    names = {"127.0.0.1/8": "lo", **{one: f"eth{i}" for i, one in enumerate(addresses)}}
    system_facts = {
        "system": WELL["system"] | system,
        "addresses": tuple(names),
        "interfaces": names,
    }
    return HostFacts.model_validate(WELL | system_facts)


def made(spec: ClusterSpec, facts_by_host: dict[str, HostFacts]) -> Inventory:
    assert isinstance(spec.provider, OnpremSettings)
    cluster_hosts = members(spec, spec.provider)
    keys = {one.name: "ssh-ed25519 AAAA" for one in cluster_hosts}
    return inventory(
        spec,
        spec.provider,
        cluster_hosts,
        facts_by_host,
        keys,
        cluster_id="abc123",
        proxies={},
        silent={},
    )


def test_members_have_roles_names_and_network() -> None:
    facts_by_host = {
        f"n{i}": facts(f"n{i}" if i < 3 else "door", f"10.0.0.{i}/24", f"172.17.0.{i}/16")
        for i in (1, 2, 3)
    }
    found = made(spec_of(), facts_by_host)
    assert {host.name: host.roles for host in found.hosts} == {
        "n1": ("controller", "compute"),
        "n2": ("compute",),
        "n3": ("login",),
    }
    assert [host.partition for host in found.hosts] == ["t", "t", None]
    assert (found.network, found.controller.distribution) == ("10.0.0.0/24", "debian-12")
    assert [host.hostname for host in found.hosts] == [None, None, "door"]
    assert {host.ssh_address for host in found.hosts} == {None}


def test_slurm_network_may_differ_from_ssh_addresses() -> None:
    facts_by_host = {
        f"n{i}": facts(f"n{i}", f"10.0.0.{i}/24", f"192.168.7.{i}/24") for i in (1, 2, 3)
    }
    found = made(spec_of(network="192.168.7.0/24"), facts_by_host)
    assert [(host.address, host.ssh_address) for host in found.hosts] == [
        (f"192.168.7.{i}", f"10.0.0.{i}") for i in (1, 2, 3)
    ]
    assert {host.job_environment["UCX_NET_DEVICES"] for host in found.hosts} == {"eth1"}


def test_controller_address_is_in_the_network_of_the_spec() -> None:
    facts_by_host = {f"n{i}": facts(f"n{i}", f"10.1.0.{i}/24", f"10.2.0.{i}/24") for i in (1, 2, 3)}
    assert made(spec_of(network="10.2.0.0/24"), facts_by_host).controller.address == "10.2.0.1"


@pytest.mark.parametrize(
    ("shared", "kind"),
    [
        ({}, "nfs"),
        ({"kind": "existing"}, "existing"),
        ({"kind": "none"}, "none"),
        ({"server": "nas", "export": "/vol"}, "server"),
    ],
)
def test_shared_folder_kind_depends_on_the_spec(shared: dict[str, str], kind: str) -> None:
    facts_by_host = {f"n{i}": facts(f"n{i}", f"10.0.0.{i}/24") for i in (1, 2, 3)}
    assert made(spec_of(shared=shared), facts_by_host).shared_folder.kind == kind


def workstation(address: str) -> ClusterSpec:
    return ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "d",
            "provider": {"type": "onprem", "controller": "desk", "hosts": {"desk": address}},
            "partitions": [{"name": "t", "hosts": "desk"}],
        }
    )


def test_single_machine_exports_no_folder() -> None:
    found = made(workstation("10.0.0.1"), {"desk": facts("desk", "10.0.0.1/24")})
    assert (found.shared_folder.kind, found.controller.is_compute) == ("existing", True)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_single_local_machine_uses_the_loopback_network(address: str) -> None:
    found = made(workstation(address), {"desk": facts("box", "10.0.0.1/24", "172.17.0.1/16")})
    assert (found.network, found.controller.address) == ("127.0.0.0/8", "127.0.0.1")
    assert found.controller.hostname == "box"


INSTALLED = "packages to install, with dependencies: "


def preview_of(spec: ClusterSpec, *new: HostFacts) -> list[str]:
    """Return the preview of these new hosts. The other hosts are already in the cluster."""
    assert isinstance(spec.provider, OnpremSettings)
    cluster_hosts = members(spec, spec.provider)
    facts_by_host = {facts.system.hostname.removesuffix(".lab"): facts for facts in new}
    return list(
        preview(
            spec,
            cluster_hosts,
            {one.name: facts(one.name) for one in cluster_hosts} | facts_by_host,
            facts_by_host,
        )
    )


def packages(spec: ClusterSpec, new: HostFacts) -> set[str]:
    """Return the packages that `up` would install on a host."""
    _, line = preview_of(spec, new)
    before, _, names = line.partition(INSTALLED)
    assert before == f"{new.system.hostname.partition('.')[0]}: "
    return set(names.split(", "))


def differing(name: str, **values: Any) -> HostFacts:
    return facts(name).model_copy(update=values)


def test_missing_packages_depend_on_the_roles() -> None:
    controller, compute, login = (packages(spec_of(), facts(name)) for name in ("n1", "n2", "n3"))
    assert {"slurmctld", "mariadb-server", "slurmd"} <= controller
    assert {"slurmd", "munge", "openmpi-bin", "python3-venv"} <= compute
    assert not {"mariadb-server", "slurmctld"} & compute
    assert "slurm-client" in login
    assert "slurmd" not in login


def test_missing_packages_without_a_scheduler_have_no_slurm() -> None:
    found = packages(spec_of().model_copy(update={"scheduler": "none"}), facts("n2"))
    assert "openmpi-bin" in found
    assert not [name for name in found if "slurm" in name or "munge" in name]


@pytest.mark.parametrize(
    ("slurm", "name"), [("distribution", "slurm-slurmd"), ("openhpc", "slurm-slurmd-ohpc")]
)
def test_missing_packages_have_the_names_of_the_distribution(slurm: str, name: str) -> None:
    spec = spec_of()
    source = SlurmSource.model_validate({"from": slurm})
    spec = spec.model_copy(update={"software": spec.software.model_copy(update={"slurm": source})})
    rocky = facts("n2").system.model_copy(update={"id": "rocky", "version": "9.6"})
    assert name in packages(spec, differing("n2", system=rocky))


def test_preview_groups_identical_machines() -> None:
    spec = spec_of(login=["n2", "n3"], controller="n1")
    spec = spec.model_copy(
        update={"partitions": (spec.partitions[0].model_copy(update={"hosts": "n1"}),)}
    )
    root, line = preview_of(spec, facts("n2"), facts("n3"))
    assert root.startswith("n2, n3: to create as root")
    assert line.startswith(f"n2, n3: {INSTALLED}")


def test_preview_leaves_out_installed_packages() -> None:
    spec = spec_of()
    has = frozenset(packages(spec, facts("n2")))
    (line,) = preview_of(spec, differing("n2", packages=has))
    assert INSTALLED not in line


def test_preview_names_accounts_and_files() -> None:
    """Also the keys of an account that is there: its owner wants to know of them before."""
    users = [{"name": "ada", "uid": 2001}, {"name": "bob", "uid": 2002}]
    spec = ClusterSpec.model_validate({**spec_of().model_dump(exclude_unset=True), "users": users})
    new = differing("n2", accounts={"ada": 1000}, files=("/etc/hosts", "/etc/slurm/slurmdbd.conf"))
    assert preview_of(spec, new)[2:] == [
        "n2: users to create: bob",
        "n2: files that may change (kept as NAME.before-clusterctl, or by marked lines; `down` undoes "
        "both): /etc/hosts, ~ada/.ssh/authorized_keys",
    ]


def test_preview_skips_hosts_already_in_the_cluster() -> None:
    assert preview_of(spec_of()) == []


@pytest.mark.parametrize("text", ['{"id": "a1b', "[]", "{}", "\n", '{"id": 7}'])
def test_machine_with_a_damaged_claim_is_not_free(text: str) -> None:
    facts = {
        name: HostFacts.model_validate(WELL | {"texts": {CLAIM: claim}})
        for name, claim in {"n1": text, "n2": ""}.items()
    }
    (finding,) = claim_findings(facts, "a1b2c3")
    assert (finding.host, finding.level, condition(finding)) == ("n1", "error", "claim")


def test_notes_leave_out_errors_that_up_repairs_on_hosts_of_the_cluster() -> None:
    """Such as a health check that an `up` whose power was cut has not installed yet. A missing GPU
    stays missing.
    """
    findings = [Finding(host, "error", "health-silent", "", "", "") for host in ("n1", "n2")]
    findings.append(Finding("n1", "error", "gpus-missing", "", "", ""))
    found = notes(spec_of(), findings, joined=["n1"])
    assert [note.partition(":")[0] for note in found] == ["n2", "n1"]
