"""`plan --preflight` of on-prem hosts reports all problems at once."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.errors import ClusterctlError, ProvisionError
from clusterctl.hosts.checks import DoctorReport, Finding, Level
from clusterctl.hosts.probe import HostFacts
from clusterctl.providers.base import NO_PROMPTS
from clusterctl.providers.onprem.access import AccessError, explain
from clusterctl.providers.onprem.members import examine, members, notes
from clusterctl.providers.onprem.provider import OnpremProvider, _Examination, blocking_findings
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Clock, Deadline
from tests.support.inventories import inventory_of
from tests.support.messages import condition
from tests.support.messages import refused as rejected
from tests.unit.hosts.test_doctor import WELL, room
from tests.unit.onprem.played_time import PlayedTime

DROPPED = {"6817": "no answer within 2 s", "6819": "no answer within 2 s"}


def spec_of(**more: Any) -> ClusterSpec:
    given = {"type": "onprem", "controller": "n1", "hosts": {"n[1-5]": "10.0.0.[1-5]"}}
    given["shared"] = {"server": "nas", "export": "/vol"}
    partitions = [{"name": "t", "hosts": "n[1-5]", "gpus": {"type": "a100", "count": 1}}]
    users = [{"name": "ada", "uid": 2001}, {"name": "bob", "uid": 2002}]
    software = {"nvidia": {"driver": "open"}}
    whole = {"version": 1, "name": "d", "provider": given, "partitions": partitions, "users": users}
    return ClusterSpec.model_validate({**whole, "software": software, **more})


class Machines:
    """Hosts with played answers. By default they are healthy."""

    def __init__(self, folder: Path, spec: ClusterSpec) -> None:
        assert isinstance(spec.provider, OnpremSettings)
        self.spec = spec
        self.asked = members(spec, spec.provider)
        self.workspace = Workspace(folder / "d")
        self.facts = {host.name: _well(host.name) for host in self.asked}
        self.skew_s: dict[str, float] = {}
        self.lost: dict[str, ClusterctlError] = {}
        # Host -> the hosts and ports that it can't reach.
        self.unreached: dict[str, Mapping[str, Mapping[str, str]]] = {}
        self.tried: dict[str, Mapping[str, Any]] = {}
        self.time = PlayedTime()
        self.ended = threading.Event()
        self.hangs: dict[str, str] = {}  # until `ended`

    def root(self, host: str, *_: object) -> str:
        if self.hangs.get(host) == "host":
            self.time.passes(3600)
            self.ended.wait()
        facts = self.facts[host] | {"time": time.time() + self.skew_s.get(host, 0.0)}
        return json.dumps({"state": "", "host": facts})

    def run(self, host: str, argv: Sequence[str]) -> str:
        if self.hangs.get(host) == "run":
            self.time.passes(3600)
            self.ended.wait()
        (targets,) = json.loads(argv[-1])
        self.tried[host] = json.loads(targets)
        return json.dumps(self.unreached.get(host, {}))

    def found(self) -> tuple[Finding, ...]:
        names = [host.name for host in self.asked]
        login: Any = SimpleNamespace(root=self.root, run=self.run, workspace=self.workspace)
        limit = Deadline.within(28, self.time.clock)
        return examine(
            self.spec, self.asked, login, (), only=names, lost=self.lost, limit=limit
        ).findings


def _well(name: str) -> dict[str, Any]:
    number = int(name[1:])
    return {
        **WELL,
        "system": WELL["system"] | {"hostname": name},
        "addresses": ["127.0.0.1/8", f"10.0.0.{number}/24"],
        "space": [room(1 << 20, "/", "/usr", "/var", "/opt", "/tmp")],
        "gpus": {
            "cards": 1,
            "shown": ["A100"],
            "driver": "580.1",
            "nouveau": False,
            "secure_boot": False,
        },
        "accounts": {"ada": 2001},
    }


NO_DRIVER = {"cards": 1, "shown": [], "driver": None, "nouveau": False, "secure_boot": False}
DEBIAN = _well("n3")["system"] | {"id": "debian", "version": "12"}


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path, spec_of())


def test_preflight_of_healthy_machines_finds_nothing(machines: Machines) -> None:
    assert machines.found() == ()
    assert machines.tried["n2"] == {"nas": ["nas", [2049]]}


def plant(machines: Machines) -> Iterator[tuple[str, str, str, str]]:
    """Plant obstacles. Return (host, code, word of the cause, word of the fix) of each."""
    one = machines.facts["n1"]
    three = machines.facts["n3"]
    refusal = "may not run sudo as rocky"
    machines.lost["n4"] = AccessError.of(
        "n4", "sudo", refusal, "add it: `usermod -aG wheel rocky`", about="refused"
    )
    yield "n4", "refused", refusal, "usermod -aG wheel"
    stderr = "rocky@10.0.0.5: Permission denied (publickey)."
    refused = explain(stderr, host="n5", user="rocky", address="10.0.0.5")
    assert refused
    machines.lost["n5"] = refused
    yield "n5", "login-refused", "refuses the login of rocky", "ssh-copy-id"
    machines.skew_s["n3"] = 600.0
    yield "n3", "clock", "10m ahead", "chronyc makestep"
    one["gpus"] = NO_DRIVER
    yield "n1", "no-driver", "no working driver", "`clusterctl up` installs it"
    three["accounts"] = {"ada": 2001, "eve": 2001}
    yield (
        "n3",
        "uid-shared",
        "uid 2001, which ada needs, belongs to eve",
        "usermod --uid UID eve",
    )
    yield from plant_on_the_network(machines)


def plant_on_the_network(machines: Machines) -> Iterator[tuple[str, str, str, str]]:
    machines.unreached["n2"] = {"nas": {"2049": "the connection is refused"}}
    yield "n2", "nfs", "nas, port 2049: the connection", "showmount -e nas"


def test_preflight_reports_all_problems_at_once(machines: Machines) -> None:
    planted = [*plant(machines)]
    findings = machines.found()
    for host, code, why, fix in planted:
        hits = [
            f
            for f in findings
            if (f.host, condition(f)) == (host, code) and why in str(f) and fix in f.fix
        ]
        assert len(hits) == 1, (host, code, [*map(str, findings)])
    assert len(findings) == len(planted), [*map(str, findings)]


@pytest.mark.parametrize("known", [False, True])
def test_plan_notes_leave_out_problems_reported_elsewhere(machines: Machines, known: bool) -> None:
    machines.facts["n1"] |= {"cgroup_plugin": False, "units": ["munge"]}
    machines.facts["n1"]["gpus"] |= {"shown": [], "driver": None}
    lines = notes(machines.spec, machines.found(), joined=["n1"] if known else [])
    assert "munge is already running on the host" in lines[-1]
    others = lines[:-1]
    assert ["control groups" in line for line in others] == [True] * (not known)


def at(**interfaces: str) -> dict[str, Any]:
    """Return the facts of a host with these addresses."""
    return {"addresses": [*interfaces.values()]}


@pytest.mark.parametrize(
    ("host", "facts", "code", "why", "fix"),
    [
        (
            "n3",
            {"system": DEBIAN},
            "release-differs",
            "n1 has Rocky Linux 9",
            "the same distribution",
        ),
        (
            "n3",
            at(lo="127.0.0.1/8", eth0="10.9.0.3/24"),
            "address",
            "10.0.0.0/24",
            "provider.network",
        ),
        # Behind NAT.
        (
            "n1",
            at(eth0="10.1.0.1/24", eth1="10.2.0.1/24"),
            "address",
            "10.0.0.1 is no",
            "provider.network",
        ),
    ],
)
def test_incompatible_machines_are_errors_of_preflight(
    machines: Machines, *, host: str, facts: dict[str, Any], code: str, why: str, fix: str
) -> None:
    machines.facts[host] |= facts
    (one,) = machines.found()
    assert (one.host, one.level, condition(one)) == (host, "error", code)
    assert why in one.why
    assert fix in one.fix


@pytest.mark.parametrize(
    ("system", "found"), [({"id": "debian", "version": "12"}, True), ({}, False)]
)
def test_openhpc_slurm_is_refused_except_on_enterprise_linux(
    tmp_path: Path, system: Mapping[str, str], found: bool
) -> None:
    machines = Machines(tmp_path, spec_of(software={"slurm": {"from": "openhpc"}}))
    for facts in machines.facts.values():
        facts["system"] |= system
    assert {condition(finding) for finding in machines.found()} == (
        {"slurm-source"} if found else set()
    )


def test_unsupported_cuda_toolkit_is_an_error_of_preflight(tmp_path: Path) -> None:
    machines = Machines(tmp_path, spec_of(software={"nvidia": {"toolkit": "12.9"}}))
    assert machines.found() == ()
    for facts in machines.facts.values():
        facts["system"] |= {"id": "almalinux", "version": "10.1"}
    assert {(finding.host, finding.level, condition(finding)) for finding in machines.found()} == {
        (name, "error", "cuda-toolkit") for name in machines.facts
    }


@pytest.mark.parametrize(
    ("finding", "new", "ends"),
    [
        (("error", "slurm-in-use"), ["n2"], True),
        (("error", "slurm-in-use"), [], False),  # of a host that is in the cluster already
        (("error", "nfs"), ["n2"], True),
        (("error", "nfs"), ["n1"], False),
        (("warning", "nfs"), ["n2"], False),
        (("error", "release-differs"), [], True),  # no cluster can be made of them
        (("error", "address"), [], True),
        (("error", "cuda-toolkit"), [], True),
        (("error", "slurm-source"), [], True),
        # A new account that a machine of the cluster can't have.
        *((("error", code), [], True) for code in ("uid-differs", "uid-taken", "gid-taken")),
    ],
)
def test_up_stops_at_errors_of_new_hosts(
    machines: Machines, finding: tuple[Level, str], new: list[str], ends: bool
) -> None:
    facts = dict.fromkeys(machines.facts, HostFacts.model_construct(texts={}))
    report = DoctorReport((Finding("n2", *finding, "what", "why", "fix"),), facts)
    assert bool(blocking_findings(report, machines.asked, new, machines.workspace, {})) == ends


def test_unsupported_release_is_reported_once(machines: Machines) -> None:
    machines.facts["n3"]["system"] |= {"version": "7.9"}
    assert [condition(finding) for finding in machines.found()] == ["distribution"]


def desk(folder: Path, clock: Clock | None = None) -> tuple[ClusterSpec, Workspace, OnpremProvider]:
    """Return a cluster of the local machine, which has no address in the network of the spec."""
    shared = folder / "shared"
    workspace = Workspace(folder / "d")
    (shared / "home/ada").mkdir(parents=True)
    workspace.create()
    machine = {"controller": "desk", "hosts": {"desk": {"address": "localhost", "become": "none"}}}
    given = {
        "type": "onprem",
        **machine,
        "network": "203.0.113.0/24",
        "shared": {"path": str(shared)},
    }
    partitions = [{"name": "t", "hosts": "desk"}]
    users = [{"name": "ada", "uid": os.getuid() + 2001}]
    spec = spec_of(
        provider=given,
        partitions=partitions,
        users=users,
        # With it, no repository is tried.
        software={"mirrors": {"bundle": "file:///srv/demo.bundle"}},
    )
    assert isinstance(spec.provider, OnpremSettings)
    return spec, workspace, OnpremProvider(spec.provider, NO_PROMPTS, clock)


def test_preflight_ends_at_its_time_limit(tmp_path: Path) -> None:
    hours = itertools.count(0, 3600)
    spec, workspace, provider = desk(tmp_path, Clock(now=lambda: next(hours)))
    report = provider.preflight(spec, workspace)
    assert report is not None
    assert [(finding.host, finding.level, condition(finding)) for finding in report.findings] == [
        ("desk", "error", "unreachable")
    ]
    with rejected("host-unfit/hosts", ProvisionError):
        provider.plan(spec, workspace)


def test_apply_examines_machines_again_only_for_another_cluster_or_spec(tmp_path: Path) -> None:
    """An examination fails here, because its time is over at once."""
    hours = itertools.count(0, 3600)
    spec, workspace, provider = desk(tmp_path, Clock(now=lambda: next(hours)))
    assert isinstance(spec.provider, OnpremSettings)
    seen = _Examination(dump_spec(spec), workspace, inventory_of(), (), {}, spec.provider)
    provider._examination = seen
    assert provider.apply(spec, workspace).inventory == seen.inventory
    other = Workspace(tmp_path / "other")
    other.create()
    with rejected("host-unfit/hosts", ProvisionError):
        provider.apply(spec, other)
    with rejected("host-unfit/hosts", ProvisionError):
        provider.apply(spec.model_copy(update={"name": "e"}), workspace)


def test_preflight_does_not_wait_for_a_hung_host(machines: Machines) -> None:
    """Hosts that were not probed before the time limit are named, too."""
    machines.hangs["n3"] = "host"
    try:
        silent = {
            finding.host: finding
            for finding in machines.found()
            if condition(finding) == "unreachable"
        }
    finally:
        machines.ended.set()
    assert (silent["n3"].host, silent["n3"].level) == ("n3", "error")
    assert all("for all hosts" in finding.why for finding in silent.values())


def test_preflight_limits_the_time_of_network_checks(machines: Machines) -> None:
    machines.hangs["n3"] = "run"
    try:
        found = {finding.host: finding for finding in machines.found()}
    finally:
        machines.ended.set()
    assert (found["n3"].level, found["n3"].code) == ("warning", "not-looked-at")


@pytest.mark.parametrize("kind", ["existing", "none"])
def test_preflight_tries_no_server_without_one(tmp_path: Path, kind: str) -> None:
    given = spec_of().provider.model_dump() | {"shared": {"kind": kind}}
    machines = Machines(tmp_path, spec_of(provider=given))
    for facts in machines.facts.values():
        facts["files"] = ["/shared"]
    assert machines.found() == ()
    assert machines.tried == {}


def test_missing_shared_folder_is_an_error_of_preflight(tmp_path: Path) -> None:
    given = spec_of().provider.model_dump() | {"shared": {"kind": "existing"}}
    machines = Machines(tmp_path, spec_of(provider=given))
    for name in machines.facts.keys() - {"n2"}:
        machines.facts[name]["files"] = ["/shared"]
    (finding,) = machines.found()
    assert (finding.host, finding.level, finding.code) == ("n2", "error", "shared-folder")
    assert "mount /shared" in finding.fix
