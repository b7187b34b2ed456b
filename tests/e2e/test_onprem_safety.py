"""Machines with other people's work: `up` names what it changes on them, and `down` restores them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.own import differences, picture
from tests.support.lab import Box, Lab, lab
from tests.support.messages import condition
from tests.support.verbs import Clusterctl

NAMES = ("node1", "node2")
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
    """On-prem machines, a cluster of them, and the state of all before `up`."""

    lab: Lab
    verbs: Clusterctl
    file: Path
    before: dict[str, list[str]]
    planned: list[str]  # what `plan` noted before anything was done

    def json(self, *argv: str | Path) -> Any:
        """Return the answer of a verb with `-o json`."""
        return self.verbs("-o", "json", "-f", self.file, *argv, timeout_s=600).json

    def sh(self, host: str, script: str) -> str:
        return self.lab.host(host).inside.sh(script)


def users_differences(raised: Raised, name: str) -> list[str]:
    """Return what differs on a machine, without home folders of job users, which hold their work."""
    inside = raised.lab.host(name).inside
    # A package of the owner that the cluster needs is then marked as installed by hand.
    return differences(inside, raised.before[name], allowed="/shared/home|^procps$")


@pytest.fixture(scope="module")
def raised(no_residue: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raised]:
    """`up` of the machines. Leftovers of a test are removed with the machines."""
    with lab("debian", [Box(name) for name in NAMES], internet=True) as one:
        for name in NAMES:
            one.host(name).inside.sh(PLANT)
        before = {host.name: picture(host.inside) for host in one.hosts}
        folder = tmp_path_factory.mktemp("safe")
        found = Raised(one, Clusterctl(folder / "home", folder), folder / "safe.yaml", before, [])
        partitions = {"train": "node[1-2]"}
        found.file.write_text(one.spec("safe", controller="node1", partitions=partitions))
        found.planned.extend(found.json("plan")["notes"])
        found.verbs("-f", found.file, "up", timeout_s=600)
        yield found


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


def drift(raised: Raised) -> list[str]:
    """Return the hosts of which `plan` says that they differ."""
    changes = raised.json("plan")["changes"]
    return [change["name"] for change in changes if change["kind"] == "drift"]


def test_two_administrators_see_the_same(raised: Raised, tmp_path: Path) -> None:
    """What is wanted is recorded on the machines, so that neither calls the other's change his own, and
    an edit by hand is no state that anybody wanted.
    """
    shutil.copytree(raised.verbs.home, tmp_path / "home", symlinks=True)
    theirs = tmp_path / "safe.yaml"
    theirs.write_text(f"{raised.file.read_text()}slurm: {{extra: [KillWait=44]}}\n")
    other = replace(raised, verbs=Clusterctl(tmp_path / "home", tmp_path), file=theirs)
    other.json("up")
    (found,) = raised.json("doctor")["findings"]
    assert (found["level"], condition(found)) == ("warning", "another-up")
    assert drift(raised) == ["all hosts"]
    assert drift(other) == []
    raised.sh("node1", "sed -i s/KillWait=44/KillWait=45/ /etc/slurm/slurm.conf")
    answer = other.verbs("-o", "json", "-f", theirs, "doctor", rc=1).json
    assert [(each["host"], condition(each)) for each in answer["findings"]] == [
        ("node1", "drifted")
    ]
    raised.json("up")
    assert raised.json("doctor")["findings"] == []
    assert "KillWait=30" in raised.sh("node1", "cat /etc/slurm/slurm.conf")


def test_down_restores_machines_and_keeps_later_changes(raised: Raised) -> None:
    raised.sh("node2", "echo '10.9.9.8 scanner' >> /etc/hosts; echo 'mine' > /etc/munge/mine")
    raised.sh("node1", "echo '# my word' >> /etc/slurm/slurm.conf")
    down = raised.verbs("-f", raised.file, "down", "--yes", "--discard", timeout_s=600)
    raised.sh("node2", "sed -i '/scanner/d' /etc/hosts; rm -r /etc/munge")
    conf = "/etc/slurm/slurm.conf"
    assert "# my word" in raised.sh("node1", f"cat {conf}; mv {conf}.before-clusterctl {conf}")
    assert f"{conf}.before-clusterctl" in down.stderr
    assert "apt-get purge" in down.stderr
    left = {name: users_differences(raised, name) for name in NAMES}
    assert left == {name: [] for name in NAMES}
