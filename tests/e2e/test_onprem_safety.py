"""Machines with other people's work: `up` names what it changes on them, and `down` restores them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.own import differences, picture
from tests.support.lab import Box, Lab, lab
from tests.support.messages import condition
from tests.support.nested import leader
from tests.support.verbs import Clusterctl

pytestmark = pytest.mark.sweep  # minutes

NAMES = ("node1", "node2", "node3", "node4")
# What people have on their machines, also where our roles write.
PLANT = r"""
echo '10.9.9.9 printer # theirs' >> /etc/hosts
rm -f /etc/systemd/system.conf.d/clusterctl.conf
mkdir -p /etc/slurm /opt/theirs /etc/systemd/system/slurmd.service.d /shared/data
echo 'ClusterName=old' > /etc/slurm/slurm.conf; chmod 640 /etc/slurm/slurm.conf
echo 'theirs' > /etc/slurm/notes; ln -s notes /etc/slurm/link
echo 'keep' > /opt/theirs/notes.txt
printf '[Service]\nNice=5\n' > /etc/systemd/system/slurmd.service.d/theirs.conf
echo '* soft nofile 4096' > /etc/security/limits.d/theirs.conf
useradd --create-home dave; echo thesis > /home/dave/thesis; echo results > /shared/data/results
printf '[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n' \
    > /etc/systemd/system/theirs.service
systemctl daemon-reload; systemctl enable --quiet --now theirs
apt-mark auto procps >/dev/null
"""


@dataclass(frozen=True)
class Raised:
    """On-prem machines, a cluster of two of them, and the state of all before `up`."""

    lab: Lab
    verbs: Clusterctl
    file: Path
    before: dict[str, list[str]]
    planned: list[str]  # what `plan` noted before anything was done

    def write(self, nodes: str, **others: str) -> None:
        """Write the spec with these nodes and the controller, which also computes. others: new
        names.
        """
        machines = {name: self.lab.host(others.get(name, name)) for name in NAMES[:3]}
        hosts = {
            name: {"address": one.address, "host_key": one.host_key}
            for name, one in machines.items()
        }
        text = self.lab.spec(
            "safe", controller="node1", partitions={"train": nodes}, provider={"hosts": hosts}
        )
        self.file.write_text(text)

    def json(self, *argv: str | Path) -> Any:
        """Return the answer of a verb with `-o json`."""
        return self.verbs("-o", "json", "-f", self.file, *argv, timeout_s=600).json

    def state_of(self, job: str) -> str:
        return str(self.json("jobs", job)["jobs"][0]["state"])

    def sh(self, host: str, script: str) -> str:
        return self.lab.host(host).inside.sh(script)


def users_differences(raised: Raised, name: str) -> list[str]:
    """Return what differs on a machine, without home folders of job users, which hold their work."""
    inside = raised.lab.host(name).inside
    # A package of the owner that the cluster needs is then marked as installed by hand.
    return differences(inside, raised.before[name], allowed="/shared/home|^procps$")


@pytest.fixture(scope="module")
def raised(no_residue: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raised]:
    """`up` of two of the machines. Leftovers of a test are removed with the machines."""
    with lab("debian", [Box(name) for name in NAMES], internet=True) as one:
        for name in NAMES:
            one.host(name).inside.sh(PLANT)
        before = {host.name: picture(host.inside) for host in one.hosts}
        folder = tmp_path_factory.mktemp("safe")
        found = Raised(one, Clusterctl(folder / "home", folder), folder / "safe.yaml", before, [])
        found.write("node[1-2]")
        found.planned.extend(found.json("plan")["notes"])
        found.verbs("-f", found.file, "up", timeout_s=600)
        yield found


@pytest.fixture(scope="module")
def job(raised: Raised) -> str:
    """A job on both nodes that runs until the cluster is removed."""
    at_work = raised.verbs.cwd / "at-work.sh"
    at_work.write_text("#!/bin/bash\n#SBATCH --nodes=2 --exclusive\nsrun sleep 3600\n")
    found = str(raised.json("submit", at_work)["job_id"])
    raised.sh("node1", f"until squeue -h -j {found} -t R | grep -q .; do sleep 0.2; done")
    return found


def lose(raised: Raised, name: str) -> None:
    """Power a machine off. It starts again and refuses all logins."""
    host = raised.lab.host(name)
    before = host.leader
    raised.sh(name, "systemctl disable --quiet ssh")
    raised.lab.enter(name, ["systemctl", "reboot", "--force", "--force"])
    while leader(host.machine) in (None, before):
        time.sleep(0.2)


def planned(raised: Raised, words: str) -> list[tuple[str, set[str]]]:
    """Return the note of `plan` with these words: machines, and the list behind them."""
    notes = [note for note in raised.planned if f": {words}" in note]
    return [(note.partition(": ")[0], set(note.rpartition(": ")[2].split(", "))) for note in notes]


def test_plan_lists_packages_users_and_files_to_change(raised: Raised) -> None:
    ((machines, files),) = planned(raised, "files that may change")
    assert machines == "node1, node2"
    assert {"/etc/hosts", "/etc/slurm/slurm.conf"} <= files
    users = planned(raised, "users to create")
    assert users == [("node1, node2", {"hpc"})]
    installed = dict(planned(raised, "packages to install"))
    assert {"slurmctld", "slurmd", "munge"} <= installed["node1"]
    assert "slurmctld" not in installed["node2"]
    for name, packages in installed.items():
        raised.sh(name, f"dpkg-query --show {' '.join(packages)} >/dev/null")


def test_node_add_of_a_lost_machine_keeps_a_running_job(raised: Raised, job: str) -> None:
    slurmd = "systemctl show slurmd --property=MainPID,ActiveEnterTimestampMonotonic"
    started = raised.sh("node2", slurmd)
    raised.write("node[1-3]")
    adding = raised.verbs.start("-o", "json", "-f", raised.file, "node", "add", "node3")
    raised.sh("node3", "until pgrep -x dpkg >/dev/null; do sleep 0.1; done")
    lose(raised, "node3")
    stdout, shown = adding.communicate(timeout=300)
    assert adding.returncode == 1, stdout + shown
    failures = json.loads(stdout)["failures"]
    assert {failure["host"] for failure in failures} == {"node3"}, stdout
    assert all(failure["cause"] for failure in failures), stdout
    assert raised.state_of(job) == "RUNNING"

    raised.sh("node3", "systemctl enable --quiet --now ssh")
    assert raised.json("up", "--limit", "node3")["probed"] == ["node3"]
    assert "node3" in raised.sh("node2", "getent hosts node3")
    assert raised.sh("node2", slurmd) == started
    ran = raised.verbs("-f", raised.file, "node", "remove", "node2", "--yes", rc=2)
    assert job in ran.stderr
    assert raised.state_of(job) == "RUNNING"


def test_node_replace_replaces_an_unreachable_machine(raised: Raised, job: str) -> None:
    raised.sh("node3", "systemctl stop ssh")
    raised.write("node[1-3]", node3="node4")
    ran = raised.verbs("-f", raised.file, "node", "replace", "node3", rc=2)
    assert "release node3" in ran.stderr  # nobody was there to be asked, and nothing is changed
    assert raised.json("status")["pending_releases"] == []
    ran = raised.verbs("-f", raised.file, "node", "replace", "node3", "--yes", timeout_s=600)
    old = raised.lab.host("node3").address
    assert any("node3" in line and old in line for line in ran.stderr.splitlines())
    status = raised.json("status")
    assert [(one["host"], one["address"]) for one in status["pending_releases"]] == [("node3", old)]
    assert status["ready"]
    assert raised.sh("node1", "srun --immediate=20 -w node3 hostname").strip() == "node4"
    (found,) = (
        one
        for one in raised.json("doctor")["findings"]
        if condition(one) == "leftovers/pending-release"
    )
    assert found["host"] == "node3"
    assert raised.state_of(job) == "RUNNING"


def test_plan_shows_a_diff_of_files_without_secrets(raised: Raised) -> None:
    params = "/etc/openmpi/openmpi-mca-params.conf"
    munge = "/etc/munge/munge.key"
    raised.sh(
        "node2", f"cp -p {params} {munge} /root; echo '# astray' >> {params}; echo x > {munge}"
    )
    key = (raised.verbs.home / "safe" / "munge.key").read_bytes().hex()
    shown = raised.verbs("-f", raised.file, "plan", "--diff").stdout
    assert "node2: openmpi: " in shown
    assert "-# astray" in shown
    assert key not in shown.encode().hex()
    assert "# astray" in raised.sh("node2", f"cat {params}")  # it only looked
    raised.sh(
        "node2",
        f"cp -p /root/munge.key {munge}; cp -p /root/openmpi-mca-params.conf {params}; rm "
        "/root/*.*",
    )


def test_machine_removed_from_the_spec_is_restored(raised: Raised) -> None:
    raised.verbs("-f", raised.file, "node", "remove", "node3", "--yes", timeout_s=600)
    assert users_differences(raised, "node4") == []
    status = raised.verbs("-o", "json", "-f", raised.file, "status").json
    assert [node["name"] for node in status["nodes"]] == ["node1", "node2"]


def test_down_restores_machines_and_keeps_later_changes(raised: Raised) -> None:
    raised.sh("node2", "echo '10.9.9.8 scanner' >> /etc/hosts; echo 'mine' > /etc/munge/mine")
    raised.sh("node1", "echo '# my word' >> /etc/slurm/slurm.conf")
    down = raised.verbs("-f", raised.file, "down", "--yes", "--discard", rc=1, timeout_s=600)
    assert "node3" in down.stderr  # it still lets nobody in; all others are given back
    assert "--forget node3" in down.stderr
    raised.sh("node3", "systemctl start ssh")
    raised.verbs("-f", raised.file, "down", "--yes", "--discard", timeout_s=600)
    raised.sh("node2", "sed -i '/scanner/d' /etc/hosts; rm -r /etc/munge")
    conf = "/etc/slurm/slurm.conf"
    assert "# my word" in raised.sh("node1", f"cat {conf}; mv {conf}.before-clusterctl {conf}")
    assert f"{conf}.before-clusterctl" in down.stderr
    assert "apt-get purge" in down.stderr
    left = {name: users_differences(raised, name) for name in ("node1", "node2", "node3")}
    assert left == {"node1": [], "node2": [], "node3": []}
