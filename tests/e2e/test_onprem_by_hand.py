"""Machines that were configured by hand become a cluster, and `down` gives every line back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.own import is_of_package, packages_of, up
from tests.support.cluster import Cluster
from tests.support.lab import Lab, lab
from tests.support.verbs import Clusterctl

pytestmark = [pytest.mark.sweep, pytest.mark.platform("real", "debian-12")]  # minutes

# The controller, which computes, too: on its way to a Slurm of its own, with a clock of its own.
PLANT_LEAD = r"""
apt-get -qq update >/dev/null
apt-get -qq -y install --no-install-recommends munge slurm-client chrony cron environment-modules acl \
    >/dev/null 2>&1
groupadd -g 10000 hpc; useradd -u 10000 -g hpc -m -s /bin/bash hpc
echo thesis > /home/hpc/thesis; mkdir -m 700 /home/hpc/.ssh
echo '# none' > /home/hpc/.ssh/authorized_keys
chown -R hpc: /home/hpc
head -c 1024 /dev/urandom > /etc/munge/munge.key; chmod 400 /etc/munge/munge.key
printf 'ClusterName=theirs\nSlurmctldHost=elsewhere\n' > /etc/slurm/slurm.conf
chmod 640 /etc/slurm/slurm.conf
setfacl -m u:hpc:r /etc/slurm/slurm.conf
python3 -c 'import os; os.setxattr("/etc/slurm/slurm.conf", "user.note", b"theirs")'
printf 'pool time.example.org\ncmdport 0\n' > /etc/chrony/chrony.conf
echo '10.9.9.9 printer' >> /etc/hosts
echo 'net.core.somaxconn = 4097' > /etc/sysctl.d/theirs.conf
echo '* hard nofile 4096' > /etc/security/limits.d/theirs.conf
echo 'prepend-path PATH /opt/theirs' > /etc/environment-modules/theirs
echo '5 4 * * * root true' > /etc/cron.d/theirs; echo '1 2 * * * true' | crontab -u hpc -
systemctl restart munge; systemctl enable -q munge
mkfifo /etc/theirs.fifo; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("/etc/theirs.sock")'
"""
# A node: it serves a database and a folder to others, and holds a Slurm that was stopped.
PLANT_NODE = r"""
apt-get -qq update >/dev/null
apt-get -qq -y install --no-install-recommends mariadb-server slurmd nfs-kernel-server >/dev/null 2>&1
systemctl disable -q --now slurmd
printf 'ClusterName=theirs\nSlurmctldHost=elsewhere\n' > /etc/slurm/slurm.conf
echo 'SLURMD_OPTIONS=-v' > /etc/default/slurmd
mkdir -p /etc/systemd/system/slurmd.service.d; printf '[Service]\nNice=5\n' > \
    /etc/systemd/system/slurmd.service.d/theirs.conf
mkdir -p /var/spool/slurmd; echo state > /var/spool/slurmd/theirs; chown -R slurm: /var/spool/slurmd
systemctl enable -q --now mariadb
mariadb -e 'CREATE DATABASE payroll; CREATE TABLE payroll.t (a int); INSERT INTO payroll.t VALUES (42)'
mkdir -p /srv/theirs; echo '/srv/theirs 10.0.0.0/8(ro)' > /etc/exports
systemctl daemon-reload
"""
PLANTS = {"node1": PLANT_LEAD, "node2": PLANT_NODE}
# What a machine is: files everywhere; in /etc and where people keep things also what is in them.
LOOK = r"""
cd /; KEPT='etc home root opt srv usr/local var/spool/slurmd'
find . -xdev \( -path ./proc -o -path ./sys -o -path ./run -o -path ./tmp -o -path ./dev \
    -o -path ./var/cache -o -path ./var/log -o -path ./var/lib/dpkg/info -o -path ./var/lib/apt \
    -o -path ./var/lib/mysql -o -name __pycache__ \) -prune -o -printf 'file %p %y %m %U:%G %l\n' | sort
find $KEPT -xdev -type f -printf 'mtime %p %t\n' | sort
find $KEPT -xdev -type f -exec sha256sum {} + | sort -k2
getfacl -R -p etc/slurm 2>/dev/null || true
python3 -c 'import glob, os; print([(path, os.listxattr(path)) for path in glob.glob("/etc/slurm/*")])'
find var/log -type d -printf 'log %p %m %U:%G\n' | sort
dpkg-query -W -f 'package ${db:Status-Abbrev} ${binary:Package} ${Version}\n'
apt-mark showauto | sed 's/^/automatic /'
systemctl list-unit-files --no-legend --no-pager | grep -v ^run- | sed 's/^/unit /'
systemctl list-units --no-legend --no-pager --plain --all --type=service,socket,timer,mount |
    awk '$1 !~ /^(run-|user|session)/ {print "runs", $1, $3, $4}' | sort
getent passwd; getent group; getent shadow
ss -Hlntu | awk '{print "listens", $1, $5}' | sort
cut -d' ' -f5 /proc/self/mountinfo | grep -v ^/run/credentials | sort | sed 's/^/mount /'
nft list ruleset 2>/dev/null | sed 's/^/nft /' || true
crontab -u hpc -l 2>/dev/null || true
! command -v mariadb >/dev/null ||
    mariadb -BNe 'SHOW DATABASES; SELECT a FROM payroll.t; SELECT user FROM mysql.user'
! test -e /etc/munge/munge.key || munge -n | unmunge | grep STATUS
"""
# Written anew by whatever makes an account or installs a package, with what was in it; munged's own
# when it stops; ucf's older versions of its list; root's folder of Ansible, empty; and the homes of
# jobs' users with what jobs have left in them.
ALLOWED = re.compile(
    r"""^mtime\ etc/((passwd|group|shadow|gshadow|subuid|subgid)-?|ld\.so\.cache)\ |
    etc/(passwd|group|shadow|gshadow|subuid|subgid)-$ |
    ^file\ \./var/lib/(munge/munged\.seed|ucf/hashfile\.\d)\ |
    ^file\ \./root/\.ansible(/tmp)?\ |
    ^file\ \./shared(/home(/|\ )|\ ) | (home/hpc/|^mtime\ home/hpc/|/home/hpc/)clusterctl(/|\ ) """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Adopted:
    """A cluster of such machines, and their state before it."""

    lab: Lab
    cluster: Cluster
    before: dict[str, list[str]]


def look(machines: Lab, name: str) -> list[str]:
    lines = machines.host(name).inside.sh(LOOK).splitlines()
    return [line for line in lines if not ALLOWED.search(line)]


@pytest.fixture(scope="module")
def adopted(
    no_residue: None,
    cluster_name: str,
    clusterctl: Clusterctl,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Adopted]:
    cwd = tmp_path_factory.mktemp("by-hand")
    with lab("debian", len(PLANTS), internet=True) as machines:
        for name, script in PLANTS.items():
            machines.host(name).inside.sh(script)
        before = {name: look(machines, name) for name in PLANTS}
        spec = cwd / "lab.yaml"
        spec.write_text(machines.spec(cluster_name, partitions={"train": "node[1-2]"}))
        runner = Clusterctl(clusterctl.home, cwd)
        raised = up(runner, spec).json
        yield Adopted(machines, Cluster(cluster_name, spec, runner, raised), before)
        runner("-f", spec, "down", "--yes", "--discard", rc=None)


def test_hand_managed_machines_train_together(adopted: Adopted) -> None:
    cluster = adopted.cluster
    job = cluster.json("submit", "train", "--nodes", "2", "--wait", "--", "--epochs", "1")["job_id"]
    start = json.loads((cluster.run_of(job) / "metrics.jsonl").read_text().splitlines()[0])
    assert [rank["host"] for rank in start["ranks"]] == ["node1", "node2"]


def _rooted(line: str) -> str:
    return re.sub(r"(^| )(\./)?(?=(etc|home|opt|root|srv|usr|var)/)", r"\1/", line)


def test_down_gives_the_machines_back(adopted: Adopted, tmp_path: Path) -> None:
    adopted.cluster("down", "--yes", "--discard")
    wrong = {}
    for name, was in adopted.before.items():
        now = look(adopted.lab, name)
        if name == "node2":  # the home of the account that was made there stays, as homes do
            now = [line for line in now if " home/hpc" not in line and "./home/hpc" not in line]
        # Packages stay, with what they bring, and are marked as installed by hand.
        packaged = packages_of(adopted.lab.host(name).inside)
        removed = sorted(line for line in set(was) - set(now) if not line.startswith("automatic "))
        new = sorted(
            line for line in set(now) - set(was) if not is_of_package(_rooted(line), packaged)
        )
        if removed or new:
            wrong[name] = "\n".join(
                [*(f"- {line}" for line in removed), *(f"+ {line}" for line in new)]
            )
    assert not wrong, "\n".join(f"{name}:\n{lines}" for name, lines in wrong.items())
