"""Machines that hold other people's work: what `up` changes on them, and that `down` gives them back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.lab import Box, Lab, LabHost, lab
from tests.support.verbs import Clusterctl

pytestmark = pytest.mark.sweep  # minutes

NAMES = ("node1", "node2", "node3")
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
# Everything that a cluster could change; the backups that useradd makes, and logs of packages, left out.
LOOK = r"""
find /etc /usr/local /opt /srv /home /shared -xdev ! -name '*-' \
    -printf '%y %m %U:%G %p %l\n' | sort
find /etc /usr/local /opt /srv /home /shared -xdev -type f ! -name '*-' -exec sha256sum {} + | sort -k2
dpkg-query -W -f '${db:Status-Status} ${binary:Package} ${Version}\n'
apt-mark showauto
systemctl list-unit-files --no-legend --no-pager | grep -v ^run-
systemctl list-units --no-legend --no-pager --plain --type=service --all | cut -d' ' -f1 |
    grep -v '^run-\|^user\|^session'
getent passwd; getent group
ls /var/lib /var/spool /opt /; cut -d' ' -f5 /proc/self/mountinfo | sort
sysctl -a 2>/dev/null | grep -E '^(net[.]ipv4[.]tcp_|vm[.]max_map)'
"""


@dataclass(frozen=True)
class Raised:
    """Machines of somebody's, a cluster made of two of them, and how they were before."""

    lab: Lab
    verbs: Clusterctl
    file: Path
    before: dict[str, list[str]]

    def write(self, nodes: str) -> None:
        """The spec with these nodes beside the controller, which computes, too."""
        self.file.write_text(self.lab.spec("safe", controller="node1", partitions={"train": nodes}))

    def sh(self, host: str, script: str) -> str:
        return self.lab.host(host).inside.sh(script)


def look(host: LabHost) -> list[str]:
    return host.inside.sh(LOOK).splitlines()


def theirs(raised: Raised, name: str) -> list[str]:
    """How a machine looks, but for the homes of jobs' users: they hold their work."""
    return [line for line in look(raised.lab.host(name)) if "/shared/home" not in line]


@pytest.fixture(scope="module")
def raised(no_residue: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raised]:
    """`up` of two machines; the third one waits. What a test leaves up goes with the machines."""
    with lab("debian", [Box(name) for name in NAMES], internet=True) as one:
        for name in NAMES:
            one.host(name).inside.sh(PLANT)
        before = {host.name: look(host) for host in one.hosts}
        folder = tmp_path_factory.mktemp("safe")
        found = Raised(one, Clusterctl(folder / "home", folder), folder / "safe.yaml", before)
        found.write("node[1-2]")
        found.verbs("-f", found.file, "up", timeout_s=600)
        yield found


def test_a_machine_is_added_beside_a_running_job(raised: Raised) -> None:
    at_work = raised.verbs.cwd / "at-work.sh"
    at_work.write_text("#!/bin/bash\n#SBATCH --nodes=2 --exclusive\nsrun sleep 600\n")
    job = raised.verbs("-o", "json", "-f", raised.file, "submit", at_work).json["job_id"]
    raised.sh("node1", f"until squeue -h -j {job} -t R | grep -q .; do sleep 0.2; done")
    started = raised.sh("node2", "systemctl show slurmd --property=MainPID,ActiveEnterTimestampMonotonic")
    raised.write("node[1-3]")
    up = raised.verbs("-o", "json", "-f", raised.file, "node", "add", "node3", timeout_s=600).json
    assert up["probed"] == ["node3"]
    now = raised.sh("node2", "systemctl show slurmd --property=MainPID,ActiveEnterTimestampMonotonic")
    assert now == started
    assert "node3" in raised.sh("node2", "getent hosts node3")
    ran = raised.verbs("-f", raised.file, "node", "remove", "node2", "--yes", rc=2)
    assert job in ran.stderr
    assert raised.verbs("-o", "json", "-f", raised.file, "jobs", job).json["jobs"][0]["state"] == "RUNNING"
    raised.verbs("-f", raised.file, "cancel", job)


def test_plan_shows_what_would_change_line_by_line_and_no_secret(raised: Raised) -> None:
    params = "/etc/openmpi/openmpi-mca-params.conf"
    munge = "/etc/munge/munge.key"
    raised.sh("node2", f"cp -p {params} {munge} /root; echo '# astray' >> {params}; echo x > {munge}")
    key = (raised.verbs.home / "safe" / "munge.key").read_bytes().hex()
    shown = raised.verbs("-f", raised.file, "plan", "--diff").stdout
    assert "node2: openmpi: Keep Open MPI to the cluster's network" in shown
    assert "-# astray" in shown
    assert key not in shown.encode().hex()
    assert "# astray" in raised.sh("node2", f"cat {params}")  # it only looked
    raised.sh(
        "node2", f"cp -p /root/munge.key {munge}; cp -p /root/openmpi-mca-params.conf {params}; rm /root/*.*"
    )


def test_a_machine_that_leaves_is_as_it_was(raised: Raised) -> None:
    raised.verbs("-f", raised.file, "node", "remove", "node3", "--yes", timeout_s=600)
    assert theirs(raised, "node3") == raised.before["node3"]
    status = raised.verbs("-o", "json", "-f", raised.file, "status").json
    assert [node["name"] for node in status["nodes"]] == ["node1", "node2"]


def test_the_machines_are_as_they_were_and_what_others_did_since_stays(raised: Raised) -> None:
    raised.sh("node2", "echo '10.9.9.8 scanner' >> /etc/hosts; echo 'mine' > /etc/munge/mine")
    raised.sh("node1", "echo '# my word' >> /etc/slurm/slurm.conf")
    down = raised.verbs("-f", raised.file, "down", "--yes", "--discard-runs", timeout_s=600)
    raised.sh("node2", "sed -i '/scanner/d' /etc/hosts; rm -r /etc/munge")
    kept = "/etc/slurm/slurm.conf.clusterctl-kept"
    assert "# my word" in raised.sh("node1", f"cat {kept}; rm {kept}")
    assert kept in down.stderr
    for name in ("node1", "node2"):
        assert theirs(raised, name) == raised.before[name]
