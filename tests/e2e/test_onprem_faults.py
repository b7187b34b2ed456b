"""On-prem machines with faults: each fault is reported by its code, and no machine is changed.

Every machine has another fault at the same time. Then all are repaired, and no fault is reported.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.support.lab import Box, Lab, lab
from tests.support.messages import condition
from tests.support.processes import as_root
from tests.support.verbs import Clusterctl

HOUR_S = 3600
DISK_MIB = 8192
FILLER_MIB = 7000
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0PTNqbyrBJ7lBB7gR9M7zZbS6s1xKfsZCkqQpA0h4T"
# The machine's own clock is everybody's: what looks at it there is told another time.
EARLY = f'#!/bin/sh\nLD_PRELOAD=/opt/early.so FAKETIME=+{HOUR_S}s exec /usr/bin/python3.11 "$@"\n'
# What keeps each of these machines out, as its finding says it.
EXPECTED = {
    "nosudo": "password",
    "full": "disk-full",
    "wrongkey": "login-refused",
    "otherhost": "host-key",
    "alien": "distribution",
    "early": "clock",
}


@dataclass(frozen=True)
class Broken:
    """The machines, and the user who checks them."""

    lab: Lab
    runner: Clusterctl

    @property
    def spec(self) -> Path:
        return self.runner.cwd / "cluster.yaml"

    def write(self, name: str, keys: dict[str, str]) -> None:
        """Write the spec, with wrong host keys for some machines."""
        text = self.lab.spec(name, controller="lead", partitions={"train": ",".join(EXPECTED)})
        document = YAML(typ="safe").load(text)
        for host, key in keys.items():
            document["provider"]["hosts"][host]["host_key"] = key
        with self.spec.open("w") as file:
            YAML(typ="safe", pure=True).dump(document, file)

    def findings(self, *, rc: int) -> list[dict[str, Any]]:
        """Return the findings with their causes."""
        said: dict[str, Any] = self.runner("-o", "json", "-f", self.spec, "doctor", rc=rc).json
        found: list[dict[str, Any]] = said["findings"]
        assert all(finding["why"] for finding in found), found
        return found

    def accounts(self) -> dict[str, bool]:
        """Return for each machine whether it has the account of clusterctl."""
        hosts = (host.name for host in self.lab.hosts)
        return {host: self.lab.enter(host, ["id", "clusterctl"]).rc == 0 for host in hosts}


@pytest.fixture(scope="module")
def broken(clusterctl_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    boxes = [Box("lead"), *(Box(name) for name in EXPECTED if name not in ("nosudo", "full"))]
    boxes += [Box("nosudo", sudo="none"), Box("full", disk_mib=DISK_MIB)]
    with lab("debian", boxes, internet=True) as one:
        yield Broken(one, Clusterctl(clusterctl_home, tmp_path_factory.mktemp("cwd")))


def errors(findings: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the codes of the errors of each host."""
    found: dict[str, list[str]] = {}
    for finding in findings:
        if finding["level"] == "error":
            found.setdefault(finding["host"], []).append(condition(finding))
    return found


def break_them(one: Lab) -> None:
    """Cause a fault on each machine, as root on it. `nosudo` has its fault from the start."""
    early = one.host("early")
    subprocess.run(
        [*as_root(), "cp", FAKETIME, f"/proc/{early.leader}/root/opt/early.so"], check=True
    )
    early.inside.sh(f"cat > /opt/early <<'END'\n{EARLY}END\nchmod 755 /opt/early")
    for host, script in {
        "full": f"fallocate --length {FILLER_MIB}MiB /var/filler",
        "wrongkey": "mv ~rocky/.ssh/authorized_keys /root/",
        "alien": "sed -i.true 's/^ID=.*/ID=arch/' /etc/os-release",
        "early": "ln -sf /opt/early /usr/bin/python3",
    }.items():
        one.host(host).inside.sh(script)


def mend_them(one: Lab) -> None:
    """Repair each machine by the fix that was reported."""
    for host, script in {
        "nosudo": "echo 'rocky ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/rocky",
        "full": "rm /var/filler",
        "wrongkey": "mv /root/authorized_keys ~rocky/.ssh/",
        "alien": "mv /etc/os-release.true /etc/os-release",
        "early": "ln -sf python3.11 /usr/bin/python3",
    }.items():
        one.host(host).inside.sh(script)


def test_up_names_each_fault_and_changes_no_machine(broken: Broken, cluster_name: str) -> None:
    break_them(broken.lab)
    broken.write(cluster_name, {"otherhost": OTHER_KEY})
    found = broken.findings(rc=1)
    assert errors(found) == {host: [code] for host, code in EXPECTED.items()}
    refused = broken.runner("-o", "json", "-f", broken.spec, "up", rc=None)
    assert refused.rc == 1
    failures = {failure["host"]: failure for failure in refused.json["failures"]}
    assert set(failures) == set(EXPECTED)
    assert all(failure["fix"] for failure in failures.values())
    assert not any(broken.accounts().values())

    mend_them(broken.lab)
    broken.write(cluster_name, {})
    found = broken.findings(rc=0)
    assert errors(found) == {}
    assert not any(broken.accounts().values())
