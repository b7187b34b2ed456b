"""`doctor`: the findings that follow from the facts of hosts."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import clusterctl
from clusterctl.errors import HostKeyError, TransportError, UnreachableError
from clusterctl.hosts import checks
from clusterctl.hosts.checks import Finding, examine, findings_as_failures
from clusterctl.hosts.probe import (
    ProbeRequest,
    parse_report,
)
from clusterctl.hosts.remote_probe import unmounted
from clusterctl.hosts.roles import CLAIM, TEXTS, HostRequirements
from scripts import message_reference
from tests.support.messages import refused

KEYS = (
    "names",
    "ports",
    "paths",
    "units",
    "accounts",
    "uids",
    "entrants",
    "users",
    "files",
    "texts",
    "packages",
)
NOTHING: dict[str, Sequence[str | int]] = dict.fromkeys(KEYS, ())
PORTS = {6816: "clusterctl-fence", 6817: "slurmctld", 6818: "slurmd"}


def room(free_mib: int, *paths: str, inodes: int | None = None, **mounted: bool) -> dict[str, Any]:
    """Return the free space of the file system that has these paths. Default: `/` and `/var`."""
    size = free_mib << 20
    more = {"inodes": inodes, "read_only": False, **mounted}
    return {"paths": paths or ("/", "/var"), "free": size, "size": size, **more}


SHARED = room(2000, "/dev/shm", inodes=20_000, noexec=True)
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
    "resolved": {"one": ["10.0.0.1"], "two": ["10.0.0.2"]},
    "space": [room(20000), SHARED],
    "listeners": {"6816": "systemd", "6817": "slurmctld"},
    "selinux": "enforcing",
    "units": [],
    "gpus": {"cards": 0, "shown": [], "driver": None, "nouveau": False, "secure_boot": False},
    "accounts": {"hpc": 10000, "munge": 997},
    "groups": {"hpc": 10000, "lab": 10001},
    "texts": dict.fromkeys(TEXTS, ""),
}


def answer(**facts: object) -> str:
    return json.dumps({"state": "", "host": facts})


def expected(address: str, *, joined: bool = False, **differs: Any) -> HostRequirements:
    accounts = {"hpc": 10000, "slurm": 64030, "munge": 64031}
    free_mib = {} if joined else {"/": 20, "/var": 4096, "/dev/shm": 32}
    return HostRequirements(address, PORTS, accounts, free_mib, **differs)


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

    hosts = {"one": expected("10.0.0.1"), "two": expected("10.0.0.2", **of_two)}
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
            {"space": [room(99999, "/"), room(12, "/var"), SHARED]},
            "error",
            "disk-full",
            "/var has 12MiB free",
        ),
        (
            {"space": [room(99999), room(12, "/dev/shm")]},
            "warning",
            "disk-full",
            "/dev/shm has 12MiB free",
        ),
        (
            {"space": [room(99999), room(2000, "/dev/shm", inodes=3)]},
            "warning",
            "disk-full",
            "/dev/shm has 3 inodes",
        ),
        (
            {"space": [room(99999, inodes=3), SHARED]},
            "error",
            "disk-full",
            "/ has 3 inodes",
        ),
        (
            {"space": [room(99999, inodes=0, read_only=True), SHARED]},
            "error",
            "read-only",
            "mounted read-only",
        ),
        (
            {"space": [room(99999, "/"), room(99999, "/var", noexec=True), SHARED]},
            "error",
            "noexec",
            "/var is mounted noexec",
        ),
        ({"refuses_ed25519": True}, "error", "ed25519-refused", "FIPS mode"),
        (
            {"listeners": {"6818": "nc"}},
            "error",
            "port-taken",
            "nc listens on port 6818, which slurmd needs",
        ),
        ({"accounts": {"hpc": 1001}}, "error", "uid-differs", "uid 1001 on the host, but 10000"),
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
        ({"accounts": {}, "groups": {"lab": 10000}}, "error", "gid-taken", "belongs to lab"),
        ({"accounts": {}, "groups": {"hpc": 77}}, "error", "gid-differs", "hpc has gid 77"),
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
        ({**PORT, "ucx_fabric": False}, "warning", "ucx-fabric", "mlx5_0:1"),
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
        ({"resolved": {"one": ["10.9.9.9"]}}, "warning", "name", "one to 10.9.9.9, but"),
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
    assert (finding.host, finding.level, finding.code) == ("two", level, code)
    assert why in finding.why
    assert finding.fix


def login(
    home: str = "/home/bob", program: str = "/bin/bash", groups: str = "2002", closed: str = ""
) -> dict[str, Any]:
    """The account bob as a host reports it."""
    return {"bob": {"home": home, "shell": program, "groups": groups, "closed": closed}}


@pytest.mark.parametrize(
    ("one", "two", "own_homes", "codes"),
    [
        (login(), login(), True, []),
        ({}, login("/srv/bob"), True, []),
        (login(), login("/srv/bob"), True, ["home-differs"]),
        (login(), login("/srv/bob"), False, []),
        (login(), login(program="/usr/sbin/nologin"), True, ["no-shell"]),
        (login(), login(program="/bin/false"), False, []),
        (login(), login(closed="/home/bob/clusterctl/jobs"), True, ["jobs-folder-closed"]),
        (login(), login(closed="/home/bob/clusterctl/jobs"), False, []),
        (login(), login(groups="2002 27 5000"), False, ["groups-differ"]),
        ({}, login(groups="2002 5000"), True, ["groups-differ"]),
        (login(groups="2002 5000"), login(groups="100 27"), True, []),
    ],
)
def test_account_of_a_job_user_that_differs_between_hosts_is_a_finding(
    one: dict[str, Any],
    two: dict[str, Any],
    own_homes: bool,
    codes: list[str],
) -> None:
    findings = found({"logins": two}, of_one={"logins": one}, own_homes=own_homes)
    assert [(finding.host, finding.code) for finding in findings] == [("two", c) for c in codes]
    assert all(finding.fix for finding in findings)


FSTAB = """\
# /etc/fstab: static file system information.
UUID=1 / ext4 errors=remount-ro 0 1
UUID=2 none swap sw 0 0
files:/home /home nfs4 hard,_netdev,nofail 0 0
files:/data /data/ nfs4 hard,_netdev,nofail 0 0
/dev/sdb1 /media/usb vfat noauto,user 0 0
"""


def test_folders_of_fstab_that_are_not_mounted_are_reported(tmp_path: Path) -> None:
    fstab = tmp_path / "fstab"
    fstab.write_text(FSTAB)
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\nfiles:/home /home nfs4 rw 0 0\n")
    assert unmounted(str(fstab), str(mounts)) == ["/data"]
    mounts.write_text(f"{mounts.read_text()}files:/data /data nfs4 rw 0 0\n")
    assert unmounted(str(fstab), str(mounts)) == []


def test_homes_in_a_folder_that_is_not_mounted_are_a_finding() -> None:
    changed = {"logins": login("/shared/home/bob"), "unmounted": ["/shared"]}
    (finding,) = found(changed, of_one={"logins": login("/shared/home/bob")})
    assert (finding.host, finding.level, finding.code) == ("two", "error", "shared-folder-away")
    assert "bob" in finding.why


def test_other_folder_that_is_not_mounted_is_no_finding() -> None:
    assert found({"logins": login("/shared2/bob"), "unmounted": ["/media/usb", "/shared"]}) == []


@pytest.mark.parametrize(
    ("refused", "more", "names"),
    [
        # Jobs log in on the controller, and where homes are a host's own.
        ({"hpc": "AllowUsers rocky"}, {}, []),
        ({"hpc": "AllowUsers rocky"}, {"own_homes": True}, ["hpc"]),
        # There clusterctl starts an sshd of its own.
        ({"hpc": "AllowUsers rocky"}, {"own_homes": True, "here": True}, []),
    ],
)
def test_list_of_sshd_that_refuses_clusterctls_accounts_is_a_finding(
    refused: dict[str, str], more: dict[str, bool], names: list[str]
) -> None:
    findings = found({"refused": refused}, **more)
    assert [finding.code for finding in findings] == ["account-refused"] * bool(names)
    assert all(name in findings[0].fix for name in names)


@pytest.mark.parametrize(
    "changed",
    [
        {**PORT, "ucx_fabric": True},
        # UCX is not installed.
        {**PORT},
        {"ucx_fabric": False},
        # A local node sees the adapters of its host.
        {**PORT, "ucx_fabric": False, "verbs": False},
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
    assert (finding.host, finding.level, finding.code) == ("two", level, code)
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
        ("ubuntu-22.04", None, ["no-cgroups"]),
        ("arch-1", None, ["distribution"]),
    ],
)
def test_slurm_without_cgroup_plugin_is_a_warning(
    release: str, plugin: bool | None, codes: list[str]
) -> None:
    name, _, version = release.partition("-")
    host = {"system.id": name, "system.version": version, "cgroup_plugin": plugin}
    assert [finding.code for finding in found(host, cgroups=True)] == codes
    assert "no-cgroups" not in [finding.code for finding in found(host)]


def test_gpus_of_the_spec_that_are_missing_are_an_error() -> None:
    (finding,) = found({"gpus.cards": 1}, gpus=2)
    assert (finding.level, finding.code) == ("error", "gpus-missing")
    assert found({"gpus.cards": 2, "gpus.shown": ["T4"] * 2, "gpus.driver": "580"}, gpus=2) == []


@pytest.mark.parametrize(
    ("skew_s", "level"), [(3600.0, "error"), (-3600.0, "error"), (10.0, "warning")]
)
def test_clock_finding_has_the_difference(skew_s: float, level: str) -> None:
    (finding,) = found({}, skew_s=skew_s)
    assert (finding.host, finding.level, finding.code) == ("two", level, "clock")
    assert ("ahead of" if skew_s > 0 else "behind") in finding.why
    assert ("1h" if abs(skew_s) > 60 else "10s") in finding.why


def test_host_that_has_joined_must_know_the_names_of_the_others() -> None:
    unknown = {"resolved": {"one": [], "two": []}}
    (finding,) = found(unknown, joined=True)
    assert (finding.host, finding.level, finding.code) == ("two", "error", "name-unknown")
    assert found(unknown) == []


def test_hostname_may_resolve_to_a_loopback_address() -> None:
    assert found({"resolved": {"two": ["127.0.1.1"]}}) == []


@pytest.mark.parametrize(("resolved", "codes"), [("10.0.0.1", []), ("10.9.9.9", ["name"])])
def test_host_with_an_ipv6_address_in_the_spec_resolves_to_its_ipv4_address(
    resolved: str, codes: list[str]
) -> None:
    def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
        return answer(**WELL | {"time": time.time(), "resolved": {"one": [resolved]}})

    hosts = {"one": expected("fd00::1")}
    findings = examine(dict.fromkeys(hosts, ProbeRequest()), hosts, root, leader="one").findings
    assert [finding.code for finding in findings] == codes


def test_single_host_is_asked_to_resolve_all_names() -> None:
    def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
        return answer(**WELL | {"time": time.time(), "resolved": {"two": ["10.0.0.9"]}})

    hosts = {"one": expected("10.0.0.1"), "two": expected("10.0.0.2")}
    (finding,) = examine({"one": ProbeRequest()}, hosts, root, leader="one").findings
    assert (finding.host, finding.code) == ("one", "name")


def test_unreachable_host_is_a_finding_and_others_are_checked() -> None:
    def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
        if host == "one":
            raise UnreachableError("no connection", host=host, why="timed out", fix="switch it on")
        if host == "two":
            raise HostKeyError("the host is not who it should be", host=host, why="another key")
        changed = {"time": time.time(), "accounts": {"hpc": 1}, "resolved": {"one": ["10.0.0.1"]}}
        return answer(**WELL | changed)

    hosts = {name: expected(f"10.0.0.{i}") for i, name in enumerate(("one", "two", "three"), 1)}
    report = examine(dict.fromkeys(hosts, ProbeRequest()), hosts, root, leader="one")
    assert [(f.host, f.code) for f in report.findings] == [
        ("one", UnreachableError.code),
        ("two", HostKeyError.code),
        ("three", "uid-differs"),
    ]
    assert [(f.host, f.phase) for f in findings_as_failures(report.errors, phase="examine")] == [
        ("one", "examine"),
        ("two", "examine"),
        ("three", "examine"),
    ]


def test_fact_without_a_field_is_an_error() -> None:
    with refused("answer-garbled", TransportError):
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


def test_page_of_doctor_lists_the_codes_of_all_checks() -> None:
    """Checks of a project of Google Cloud, which only `plan` and `up` run, are in docs/gcp.md."""
    known = message_reference.messages()[0]
    findings = {
        each.code
        for each in known
        if each.kind == "Finding" and not each.place.startswith("clusterctl/providers/gcp/")
    }
    page = (message_reference.ROOT / "docs/doctor.md").read_text().partition("\n## Checks\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    listed = {code for row in rows for code in re.findall(r"`([^`]+)`", row)}
    assert findings - listed == set()
    # Some codes are chosen at run time, such as the keys of a dict, so the snapshot lacks them.
    source = "".join(file.read_text() for file in Path(clusterctl.__file__).parent.rglob("*.py"))
    known_codes = {*message_reference.printed_texts(), *re.findall(r'"([a-z-]+)"', source)}
    assert listed - known_codes == set()


def test_file_system_that_does_not_answer_is_a_disk_finding() -> None:
    (one,) = found({"space": [room(99999, "/"), SHARED]})
    assert (one.level, one.code, one.why) == ("error", "disk", "/var can't be read")


def test_parse_report_of_other_text_is_an_error() -> None:
    with refused("answer-garbled", TransportError):
        parse_report("bash: python3: command not found")


NEED = {"code": "clock", "what": "the clock is wrong", "why": "by 61.5 s", "fix": "set it"}


def test_doctor_shows_what_the_health_check_of_a_node_reports() -> None:
    (one,) = found({"unmet": [NEED]})
    assert (one.level, one.code, one.why, one.fix) == ("error", "clock", "by 61.5 s", "set it")
    uid = {**NEED, "code": "account-differs"}
    # `up` repairs the one, and stops at the other.
    both = found({"unmet": [uid], "accounts": {**WELL["accounts"], "hpc": 1001}})
    assert {finding.code for finding in both} == {"account-differs", "uid-differs"}
    assert found({"unmet": None}) == []  # a new host
    (silent,) = found({"unmet": None}, joined=True)
    assert (silent.level, silent.code) == ("error", "health-silent")
