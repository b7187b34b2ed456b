"""`doctor`: the findings that follow from the facts of hosts."""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from clusterctl.errors import HostKeyError, TransportError, UnreachableError
from clusterctl.hosts import checks
from clusterctl.hosts.checks import Finding, examine, findings_as_failures
from clusterctl.hosts.probe import (
    ProbeRequest,
    parse_report,
)
from clusterctl.hosts.roles import CLAIM, TEXTS, HostRequirements
from tests.support.messages import condition, refused

KEYS = (
    "paths",
    "units",
    "accounts",
    "uids",
    "files",
    "texts",
    "packages",
)
NOTHING: dict[str, Sequence[str | int]] = dict.fromkeys(KEYS, ())


def room(free_mib: int, *paths: str, inodes: int | None = None) -> dict[str, Any]:
    """Return the free space of the file system that has these paths. Default: `/` and `/var`."""
    size = free_mib << 20
    return {"paths": paths or ("/", "/var"), "free": size, "size": size, "inodes": inodes}


PORT = {"verbs": True, "fabric_ports": [{"name": "mlx5_0:1", "layer": "InfiniBand", "rate": 400}]}
WELL: dict[str, Any] = {
    "time": 1000.0,
    "uid": 0,
    "system": {
        "id": "rocky",
        "version": "9.6",
        "name": "Rocky Linux 9.6 (Blue Onyx)",
        "machine": "x86_64",
        "python": [3, 9],
        "systemd": True,
        "cpus": 8,
        "memory_mib": 16000,
        "hostname": "one",
    },
    "addresses": ["127.0.0.1/8", "10.0.0.1/24"],
    "space": [room(20000)],
    "selinux": "enforcing",
    "units": [],
    "gpus": {"cards": 0, "shown": [], "driver": None, "nouveau": False, "secure_boot": False},
    "accounts": {"hpc": 10000, "munge": 997},
    "groups": {"hpc": 10000, "lab": 10001},
    "texts": dict.fromkeys(TEXTS, ""),
}


def answer(**facts: object) -> str:
    return json.dumps({"state": "", "host": facts})


def expected(*, joined: bool = False, **differs: Any) -> HostRequirements:
    accounts = {"hpc": 10000, "slurm": 64030, "munge": 64031}
    return HostRequirements(accounts, {} if joined else {"/": 20, "/var": 4096}, **differs)


def found(
    changed: dict[str, Any],
    *,
    skew_s: float = 0.0,
    of_one: Mapping[str, Any] = MappingProxyType({}),
    **of_two: Any,
) -> list[Finding]:
    """Return the findings of two hosts: a healthy one, and one with these facts changed. A dot in a
    name leads into a nested fact.

    of_one: facts of the healthy host that differ from WELL. of_two: requirements of the other.
    """
    two = json.loads(json.dumps(WELL | {"addresses": ["10.0.0.2/24"]}))
    for key, value in changed.items():
        *above, last = key.split(".")
        place = two
        for part in above:
            place = place[part]
        place[last] = value

    def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
        facts = WELL | of_one if host == "one" else two
        return answer(**facts | {"time": time.time() + (skew_s if host == "two" else 0.0)})

    hosts = {"one": expected(), "two": expected(**of_two)}
    return list(examine(dict.fromkeys(hosts, ProbeRequest()), hosts, root, leader="one").findings)


def test_examine_healthy_hosts_finds_nothing() -> None:
    assert found({}) == []


@pytest.mark.parametrize("secure_boot", [False, True])
@pytest.mark.parametrize(
    ("here", "fix"),
    [(False, "`clusterctl node reboot two`"), (True, "reboot it yourself while no job is running")],
)
def test_fix_on_the_local_machine_leaves_the_reboot_to_the_user(
    here: bool, fix: str, secure_boot: bool
) -> None:
    gpus = {"gpus.cards": 1, "gpus.installed": "580.95.05", "gpus.secure_boot": secure_boot}
    (finding,) = found(gpus, here=here)
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("changed", "level", "code", "why"),
    [
        ({"uid": 1000}, "error", "not-root", "uid 1000"),
        (
            {"system.id": "arch", "system.version": ""},
            "error",
            "distribution",
            "names of its packages",
        ),
        ({"system.machine": "aarch64"}, "error", "architecture", "architecture is aarch64"),
        ({"system.systemd": False}, "error", "systemd", "process 1"),
        (
            {"space": [room(99999, "/"), room(12, "/var")]},
            "error",
            "disk-full",
            "/var has 12MiB free",
        ),
        (
            {"accounts": {"hpc": 1001}},
            "error",
            "uid-differs",
            "uid 1001 on the host, but 10000",
        ),
        (
            {"accounts": {"slurm": 997}},
            "error",
            "uid-differs",
            "uid 997 on the host, but 64030 on all",
        ),
        (
            {"accounts": {"lims": 64031}},
            "error",
            "uid-taken",
            "64031, which munge needs, belongs to lims",
        ),
        ({"accounts": {"anna": 10000}}, "error", "uid-taken", "belongs to anna"),
        (
            {"accounts": {}, "groups": {"lab": 10000}},
            "error",
            "gid-taken",
            "belongs to lab",
        ),
        (
            {"accounts": {}, "groups": {"hpc": 77}},
            "error",
            "gid-differs",
            "hpc has gid 77",
        ),
        ({"gpus.cards": 2, "gpus.nouveau": True}, "warning", "no-driver", "nouveau"),
        ({"gpus.cards": 2, "gpus.secure_boot": True}, "warning", "no-driver", "Secure Boot is on"),
        (
            {"gpus.cards": 2, "gpus.installed": "580.95.05", "gpus.nouveau": True},
            "warning",
            "reboot-needed",
            "driver 580.95.05 is installed, but the kernel uses nouveau",
        ),
        (
            {"gpus.cards": 2, "gpus.installed": "580.95.05"},
            "warning",
            "reboot-needed",
            "it is not loaded",
        ),
        (
            {"gpus.cards": 2, "gpus.installed": "580.95.05", "gpus.secure_boot": True},
            "warning",
            "secure-boot",
            "the kernel loads only modules that are signed with an enrolled key",
        ),
        (
            {"gpus.cards": 8, "gpus.shown": ["H100"] * 8, "gpus.driver": "580", "gpus.switches": 4},
            "warning",
            "fabric-manager",
            "nvidia-fabricmanager is not running",
        ),
        (
            {"gpus.cards": 2, "gpus.shown": ["T4"], "gpus.driver": "580"},
            "warning",
            "gpu-lost",
            "1 of 2",
        ),
        (
            {
                **PORT,
                "gpus.cards": 1,
                "gpus.shown": ["H100"],
                "gpus.driver": "580",
            },
            "warning",
            "gpudirect",
            "nvidia_peermem",
        ),
        (
            {"addresses": WELL["addresses"]},
            "error",
            "same-machine",
            "the same machine as one",
        ),
    ],
)
def test_examine_has_one_finding_for_each_fault(
    changed: dict[str, Any], level: str, code: str, why: str
) -> None:
    (finding,) = found(changed)
    assert (finding.host, finding.level, condition(finding)) == ("two", level, code)
    assert why in finding.why
    assert finding.fix


@pytest.mark.parametrize(
    "changed",
    [
        # UCX is not installed.
        {**PORT},
        # A local node sees the adapters of its host.
        {**PORT, "verbs": False},
        {**PORT, "gpus.shown": ["H100"], "gpus.cards": 1, "gpus.driver": "580",
         "gpudirect": "dma-buf"},
    ],
)  # fmt: skip
def test_examine_host_whose_fast_network_is_used_finds_nothing(changed: dict[str, Any]) -> None:
    assert found(changed) == []


TAKEN_OVER = [
    ({"units": ["slurmd"]}, "error", "slurm-in-use", "slurmd of another cluster"),
    ({"units": ["munge"]}, "warning", "munge-in-use", "replaces munge's key"),
    ({"databases": ["payroll"]}, "error", "database-in-use", "payroll"),
    ({"slurm_state": ["clustername"]}, "error", "slurm-state", "clustername"),
]


@pytest.mark.parametrize(("changed", "level", "code", "why"), TAKEN_OVER)
def test_examine_finds_foreign_daemons(
    changed: dict[str, Any], level: str, code: str, why: str
) -> None:
    brings = frozenset({"slurmctld", "mariadb"})
    (finding,) = found(changed, brings=brings)
    assert (finding.host, finding.level, condition(finding)) == ("two", level, code)
    assert why in finding.why
    assert found(changed) == []  # a host of the cluster's
    assert found({**changed, "texts": WELL["texts"] | {CLAIM: '{"id": "1"}'}}, brings=brings) == []


def test_foreign_databases_are_ignored_without_the_mariadb_role() -> None:
    assert found({"databases": ["payroll"]}, brings=frozenset({"slurmd", "munge"})) == []


@pytest.mark.parametrize(
    ("release", "plugin", "codes"),
    [
        ("rocky-9.6", True, []),
        ("rocky-9.6", None, []),
        ("rocky-9.6", False, ["no-cgroups"]),
        ("arch-1", None, ["distribution"]),
    ],
)
def test_slurm_without_cgroup_plugin_is_a_warning(
    release: str, plugin: bool | None, codes: list[str]
) -> None:
    name, _, version = release.partition("-")
    host = {"system.id": name, "system.version": version, "cgroup_plugin": plugin}
    assert [condition(finding) for finding in found(host, cgroups=True)] == codes
    assert "no-cgroups" not in [condition(finding) for finding in found(host)]


def test_gpus_of_the_spec_that_are_missing_are_an_error() -> None:
    (finding,) = found({"gpus.cards": 1}, gpus=2)
    assert (finding.level, condition(finding)) == ("error", "gpus-missing")
    assert found({"gpus.cards": 2, "gpus.shown": ["T4"] * 2, "gpus.driver": "580"}, gpus=2) == []


@pytest.mark.parametrize("skew_s", [3600.0, -3600.0])
def test_clock_finding_has_the_difference(skew_s: float) -> None:
    (finding,) = found({}, skew_s=skew_s)
    assert (finding.host, finding.level, condition(finding)) == ("two", "error", "clock")
    assert ("ahead of" if skew_s > 0 else "behind") in finding.why
    assert "1h" in finding.why
    assert found({}, skew_s=10.0) == []


def test_unreachable_host_is_a_finding_and_others_are_checked() -> None:
    def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
        if host == "one":
            raise UnreachableError("no connection", host=host, why="timed out", fix="switch it on")
        if host == "two":
            raise HostKeyError("the host is not who it should be", host=host, why="another key")
        changed = {"time": time.time(), "accounts": {"hpc": 1}}
        return answer(**WELL | changed)

    hosts = dict.fromkeys(("one", "two", "three"), expected())
    report = examine(dict.fromkeys(hosts, ProbeRequest()), hosts, root, leader="one")
    assert [(f.host, condition(f)) for f in report.findings] == [
        ("one", condition(UnreachableError)),
        ("two", condition(HostKeyError)),
        ("three", "uid-differs"),
    ]
    assert [(f.host, f.phase) for f in findings_as_failures(report.errors, phase="examine")] == [
        ("one", "examine"),
        ("two", "examine"),
        ("three", "examine"),
    ]


def test_fact_without_a_field_is_an_error() -> None:
    with refused("internal/answer", TransportError):
        parse_report(answer(**WELL, no_field=1))


def test_every_check_is_called() -> None:
    """A check without its decorator, and that no other function calls, never finds anything."""
    tree = ast.parse(Path(checks.__file__).read_text())
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    uncalled = {
        each.name
        for each in functions
        if each.name.startswith("_") and not each.decorator_list and each.name not in named
    }
    assert uncalled == set()


def test_file_system_that_does_not_answer_is_a_disk_finding() -> None:
    (one,) = found({"space": [room(99999, "/")]})
    assert (one.level, condition(one), one.why) == ("error", "disk", "/var can't be read")


def test_parse_report_of_other_text_is_an_error() -> None:
    with refused("internal/answer", TransportError):
        parse_report("bash: python3: command not found")


NEED = {"code": "clock", "what": "the clock is wrong", "why": "by 61.5 s", "fix": "set it"}


def test_doctor_shows_what_the_health_check_of_a_node_reports() -> None:
    unseen = {"code": "not-looked-at", "why": "packages: rpm does not end within 8 s"}
    one, other = found({"unmet": [NEED, unseen]})
    assert (other.level, condition(other), other.why) == ("warning", *unseen.values())
    assert (one.level, condition(one), one.why, one.fix) == (
        "error",
        "clock",
        "by 61.5 s",
        "set it",
    )
    uid = {**NEED, "code": "account-differs"}
    # `up` repairs the one, and stops at the other.
    both = found({"unmet": [uid], "accounts": {**WELL["accounts"], "hpc": 1001}})
    assert {condition(finding) for finding in both} == {"account-differs", "uid-differs"}
    assert found({"unmet": None}) == []  # a new host
    (silent,) = found({"unmet": None}, joined=True)
    assert (silent.level, condition(silent)) == ("error", "health-silent")
