"""On-prem machines behind a jump host become a cluster, and `down` restores them.

They have no route out, and clusterctl contacts no package index: all packages come from a bundle.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.own import asking, at_home, knowing, owner, raised
from tests.support.cluster import Cluster
from tests.support.lab import GATE, PASSWORD, ROUTE_OUT, Box, Lab, copy_folder, lab
from tests.support.messages import condition
from tests.support.verbs import Clusterctl
from tests.support.wheels import debian_bundle, unconnected

pytestmark = pytest.mark.platform("real", "debian-12", "offline")

OUTSIDE = "192.0.2.1"  # of nobody, by RFC 5737
HOSTS = ("node1", "node2")
BUNDLE = "/shared/demo.bundle"
APT = "sudo ls -R /etc/apt /var/lib/apt/lists"
BOXES = (Box("node1"), Box("node2", sudo="password"), Box("spare"))


# What the benchmarks of CIS and the STIG ask of a machine. Their settings of kernel.* are those of
# the machine that runs the tests.
HARDENED = r"""
sed -i 's/^UMASK.*/UMASK 077/; s/^PASS_MAX_DAYS.*/PASS_MAX_DAYS 60/' /etc/login.defs
for file in common-session common-session-noninteractive sudo; do
    echo 'session optional pam_umask.so' >>/etc/pam.d/$file
done
printf 'Defaults %s\n' use_pty umask=0077 timestamp_timeout=0 \
    'secure_path="/sbin:/bin:/usr/sbin:/usr/bin"' >/etc/sudoers.d/00-hardened
for folder in /tmp /var/tmp /home /dev/shm; do
    mount --bind $folder $folder
    mount -o remount,bind,noexec,nosuid,nodev $folder
done
mount -o remount,hidepid=2 /proc
printf 'net.ipv6.conf.%s.disable_ipv6 = 1\n' all default >/etc/sysctl.d/60-hardened.conf
printf 'net.ipv4.conf.%s = 0\n' all.send_redirects all.accept_redirects all.accept_source_route \
    >>/etc/sysctl.d/60-hardened.conf
echo 'net.ipv4.conf.all.rp_filter = 1' >>/etc/sysctl.d/60-hardened.conf
sysctl -q -p /etc/sysctl.d/60-hardened.conf
echo 'Authorized uses only' | tee /etc/issue.net >/etc/motd
printf '%s\n' 'MaxSessions 1' 'DisableForwarding yes' 'PermitRootLogin no' 'Banner /etc/issue.net' \
    'MaxAuthTries 4' 'LoginGraceTime 60' 'ClientAliveInterval 15' >/etc/ssh/sshd_config.d/00-hardened.conf
systemctl restart ssh
"""


@pytest.fixture(scope="module")
def machines(no_residue: None) -> Iterator[Lab]:
    """Hardened machines. Only the second has a sudo that wants a terminal: the tests use that of
    the first without one.
    """
    with lab("debian", BOXES, gate=True, shared="/shared") as one:
        for host in HOSTS:
            one.host(host).inside.sh(HARDENED)
        one.host("node2").inside.sh("echo 'Defaults requiretty' >>/etc/sudoers.d/00-hardened")
        yield one


def spec_of(machines: Lab, name: str, **provider: object) -> str:
    """node1 is the controller and computes, users log in to node2. More nodes: test_onprem_el.py."""
    hosts = {host: {"address": machines.host(host).address} for host in HOSTS}
    given = {"login": ["node2"], "hosts": hosts, **provider}
    return machines.spec(
        name,
        controller="node1",
        partitions={"train": "node1"},
        provider=given,
        software={"mirrors": {"bundle": f"file://{BUNDLE}"}},
    )


def test_up_reports_all_wrong_machines_before_changing_any(
    machines: Lab, cluster_name: str, clusterctl: Clusterctl, tmp_path: Path
) -> None:
    spec = tmp_path / "wrong.yaml"
    wrong = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPUbN2nHEYzKZ8DzT2M9bTGUQcxJ4z2mR0n9ZkYxT3pQ"
    hosts = {
        "node1": {"address": machines.host("node1").address},
        "node2": {"address": machines.host("node2").address, "host_key": machines.host("node2").host_key},
        "spare": {"address": machines.host("spare").address, "host_key": machines.host("spare").host_key,
                  "user": "nobody-here"},
    }  # fmt: skip
    spec.write_text(spec_of(machines, cluster_name, hosts=hosts, login=["node2", "spare"]))
    stranger = owner(machines, clusterctl.home, tmp_path, at_home(tmp_path))
    asked = stranger("-o", "json", "-f", spec, "up", rc=1)  # the owner never logged in to the gate
    assert {one["code"] for one in asked.json["failures"]} == {"host-key"}
    assert all(machines.host(GATE).name in one["cause"] for one in asked.json["failures"])
    user = owner(machines, clusterctl.home, tmp_path, knowing(machines, tmp_path))
    known = tmp_path / ".ssh/known_hosts"
    known.write_text(known.read_text().replace(machines.host("node1").host_key, wrong))
    ran = user("-o", "json", "-f", spec, "up", rc=1)
    failures = {one["host"]: one for one in ran.json["failures"]}
    assert {host: condition(one) for host, one in failures.items()} == {
        "node1": "host-key",
        "node2": "sudo/password",
        "spare": "login-refused",
    }
    assert "SUDO_ASKPASS" in failures["node2"]["fix"]
    assert "nobody-here" in failures["spare"]["cause"]
    wrongly = owner(machines, user.home, tmp_path, {**user.environ, **asking(tmp_path, "wrong")})
    bad = wrongly("-o", "json", "-f", spec, "up", rc=1)
    codes = {one["host"]: condition(one) for one in bad.json["failures"]}
    assert codes["node2"] == "sudo/wrong-password"
    assert not (clusterctl.home / cluster_name).exists()  # nothing was begun


def test_machines_are_reached_by_the_jump_host_only(machines: Lab) -> None:
    assert not is_reached_from_here(machines.host("node1").address)
    assert is_reached_from_here(machines.host(GATE).address)
    for host in HOSTS:
        assert machines.ssh(host, ROUTE_OUT).stdout == ""
        tried = machines.ssh(host, f"timeout 5 bash -c 'echo > /dev/tcp/{OUTSIDE}/80'", rc=None)
        assert "Network is unreachable" in tried.stderr
    offered = machines.ssh("node1", "sudo apt-get update -qq; apt-cache policy munge", rc=None)
    assert offered.stdout == ""


def is_reached_from_here(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=2) as connection:
            # A router may take connections to anywhere.
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


@pytest.fixture(scope="module")
def apt(machines: Lab) -> str:
    """The state of apt on the first machine before `up`."""
    return machines.ssh("node1", APT).stdout


@pytest.fixture(scope="module")
def cluster(
    machines: Lab,
    apt: str,
    cluster_name: str,
    clusterctl_home: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """A cluster, up from a bundle and verified."""
    cwd = tmp_path_factory.mktemp("own")
    bundle = debian_bundle()
    environ = {**unconnected(tmp_path_factory.mktemp("cache"), bundle), **asking(cwd)}
    copy_folder(bundle, machines, "node1", BUNDLE)
    text = spec_of(machines, cluster_name)
    with raised(machines, cluster_name, text, clusterctl_home, cwd, environ=environ) as one:
        yield one


def test_packages_came_from_the_bundle_alone(cluster: Cluster, machines: Lab, apt: str) -> None:
    assert cluster.raised["nodes"] == cluster.raised["probed"] == ["node1"]
    for host in HOSTS:
        assert (
            "installed" in machines.ssh(host, "dpkg-query -W -f '${db:Status-Status}' munge").stdout
        )
    assert machines.ssh("node1", APT).stdout == apt


@pytest.mark.story
def test_training_on_a_node_is_collected(cluster: Cluster) -> None:
    job = cluster.json("submit", "train", "--wait", "--", "--epochs", "1")["job_id"]
    run = cluster.run_of(job)
    start = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert [rank["host"] for rank in start["ranks"]] == ["node1"]


def test_login_host_has_the_slurm_commands(cluster: Cluster) -> None:
    assert cluster.ssh("node2", "sinfo -h -o %n").split() == ["node1"]
    ran = cluster.ssh("node2", "srun hostname", user=cluster.user)
    assert ran.split() == ["node1"]
    assert cluster.ssh("node2", "pgrep -x 'slurmd|slurmctld|mariadbd'", rc=1) == ""


def test_up_again_changes_nothing_and_there_is_no_account_of_clusterctl(
    cluster: Cluster, machines: Lab
) -> None:
    phases = {one["phase"]: one["note"] for one in cluster.json("up")["phases"]}
    assert phases["plan_changes"] == "hosts: all 2 stay"
    assert phases["converge"].startswith("unchanged: 2 ")
    for host in HOSTS:
        assert machines.enter(host, ["getent", "passwd", "clusterctl"]).rc != 0
        assert machines.enter(host, ["grep", "-r", "clusterctl", "/etc/sudoers.d"]).rc != 0
        assert cluster.ssh(host, "whoami").strip() == machines.user


@pytest.mark.story
def test_up_applies_a_changed_spec(cluster: Cluster) -> None:
    text = cluster.spec.read_text()
    cluster.spec.write_text(f"{text}slurm: {{extra: [KillWait=7]}}\n")
    phases = {one["phase"]: one["note"] for one in cluster.json("up")["phases"]}
    assert phases["plan_changes"] == "hosts: all 2 stay"
    assert cluster.ssh("node1", "scontrol show config | grep KillWait").split()[2] == "7"


def test_machine_of_one_cluster_is_not_taken_by_another(
    cluster: Cluster, machines: Lab, tmp_path: Path
) -> None:
    spec = tmp_path / "other.yaml"
    hosts = {
        "node1": {
            "address": machines.host("node1").address,
            "host_key": machines.host("node1").host_key,
        }
    }
    text = machines.spec(
        "other", controller="node1", partitions={"t": "node1"}, provider={"hosts": hosts}
    )
    spec.write_text(text)
    gate = machines.host("gate")
    line = f"{gate.address} {gate.host_key}\n"
    own = owner(machines, cluster.runner.home, tmp_path, at_home(tmp_path))
    (tmp_path / ".ssh/known_hosts").write_text(line)  # what the user's own ssh knows is known
    ran = own("-o", "json", "-f", spec, "up", rc=1)
    (claimed,) = (one for one in ran.json["failures"] if condition(one) == "in-use/machine")
    assert cluster.name in claimed["cause"]
    assert not (own.home / "other").exists()  # nothing was begun
    assert cluster.json("status")["ready"]


def test_password_is_in_no_file_or_journal(cluster: Cluster) -> None:
    for path in cluster.workspace.rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes(), path


def test_homes_stay_after_down(cluster: Cluster, machines: Lab) -> None:
    user = cluster.user
    cluster.ssh("node1", "echo 0.5 > weights", user=user)
    cluster("down", "--yes", "--discard")
    assert "weights" in machines.enter("node1", ["ls", f"/shared/home/{user}"]).stdout
