"""Kinds of on-prem clusters: without scheduler, OpenHPC, other distributions; one machine, and
five.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterctl.spec.distributions import distribution_of
from tests.e2e.own import raised
from tests.support.cluster import Cluster, records
from tests.support.lab import Kind, Lab, lab
from tests.support.messages import shows
from tests.support.processes import eventually
from tests.support.verbs import Clusterctl

# Each raises a cluster and takes it down.
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(1800),
]
ROOT = Path(__file__).resolve().parents[2]
NODES = ["node2", "node3"]
PYTHON = "/opt/clusterctl/env/bin/python --version"
CAROL = "groupadd -g 2222 carol; useradd -m -u 2222 -g 2222 -s /bin/bash carol"
# Other modes than ours.
HER_KEYS = "install -D -m 644 -o carol -g carol /dev/null ~carol/.ssh/authorized_keys"
CAROLS_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAKEeQlcH+GwmzgE/RlWAKNrD2K+DSBNoCnvcOgaXFev"
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIm2Z7vS0S3Gq3Z0b0m7mB4nJrj0v0E2m2u3Zr0vXq5d"
CODEREADY = "rhui-codeready-builder-for-rhel-9-x86_64-rhui"
# RHEL's image at Google: tests/unit/packages/facts/el.toml has the names of its repositories.
AS_RHEL = rf"""
echo 'Red Hat Enterprise Linux release 9.6 (Plow)' >/etc/redhat-release
sed -i -E 's/^(NAME|PRETTY_NAME)=.*/\1="Red Hat Enterprise Linux"/; s/^ID=.*/ID="rhel"/' /etc/os-release
cd /etc/yum.repos.d
sed -i 's/^\[crb\]$/[{CODEREADY}-rpms]/' rocky.repo
for kind in debug source; do
    printf '\n[%s]\nname=%s\nbaseurl=http://dl.rockylinux.org/%s\nenabled=0\n' \
        {CODEREADY}-$kind-rpms $kind $kind >>rocky.repo
done
"""
EPEL = "https://dl.fedoraproject.org/pub/epel"
SLEEPER = "#!/bin/bash\nmpirun --map-by ppr:1:node sleep 600\n"


def hosts(machines: Lab, **names: str) -> dict[str, dict[str, str]]:
    """Return the machines by their names in the spec."""
    found = {name: machines.host(box) for name, box in names.items()}
    return {name: {"address": one.address, "host_key": one.host_key} for name, one in found.items()}


def trained(cluster: Cluster, nodes: Sequence[str] = NODES) -> Path:
    """Return the collected run of a training on these nodes."""
    done = cluster.json(
        "submit", "train", "--nodes", str(len(nodes)), "--wait", "--", "--epochs", "1"
    )
    assert done["state"] == "COMPLETED"
    run = cluster.run_of(done["job_id"])
    (start,) = (record for record in records(run / "metrics.jsonl") if record["kind"] == "run")
    assert [rank["host"] for rank in start["ranks"]] == list(nodes)
    return run


def play(cluster: Cluster, *more: str) -> str:
    """Run the roles by plain Ansible. Return the output."""
    program = Path(sys.executable).with_name("ansible-playbook")
    argv = [program, "-i", cluster.workspace / "inventory.yml", *more, ROOT / "ansible/site.yml"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def changes_nothing(cluster: Cluster) -> None:
    """Assert that the roles change nothing when they run again."""
    output = play(cluster)
    assert output.rsplit("PLAY RECAP", 1)[1].count("changed=0") == 3, output


def runs_jobs_without_a_scheduler(cluster: Cluster) -> None:
    """`up` was verified by mpirun; two nodes train; a job is cancelled."""
    assert cluster.raised["probed"] == NODES
    run = trained(cluster)
    assert json.loads((run / "run.json").read_text())["scheduler"] == "none"
    assert not (run / "sacct.json").exists()
    script = cluster.runner.cwd / "sleeper.sh"
    script.write_text(SLEEPER)
    job = cluster.json("submit", script, "--nodes", "2")["job_id"]
    eventually(lambda: all("sleep 600" in cluster.ssh(node, "ps -e -o args=") for node in NODES))
    assert cluster.json("cancel", job)["cancelled"] == [job]
    eventually(
        lambda: not any("sleep 600" in cluster.ssh(node, "ps -e -o args=") for node in NODES)
    )
    assert cluster.job(job)["state"] == "CANCELLED"


def lets_a_machine_in_that_was_installed_anew(cluster: Cluster, machines: Lab) -> None:
    """A reinstalled machine has another host key: it is refused, until its user's known_hosts has the
    new one.
    """
    key = "/etc/ssh/ssh_host_ed25519_key"
    host = machines.host("node3").inside
    host.sh(f"mv {key}* /root/; ssh-keygen -q -t ed25519 -N '' -f {key}; systemctl restart ssh")
    refused = cluster("-o", "json", "up", rc=None)
    (failure,) = refused.json["failures"]
    assert (failure["code"], failure["host"]) == ("host-key", "node3")
    assert "ssh-keygen -R" in failure["fix"]
    known = Path(cluster.runner.environ["HOME"]) / ".ssh/known_hosts"
    address = machines.host("node3").address
    lines = [line for line in known.read_text().splitlines() if line.split()[0] != address]
    known.write_text("\n".join([*lines, f"{address} {host.sh(f'cat {key}.pub')}"]))
    assert cluster.json("up")["ready"]


def leads_clocks_that_follow_nobody(cluster: Cluster, machines: Lab) -> None:
    """chrony of the distribution, with a pool that no route reaches, follows the controller."""
    play(cluster, "-e", json.dumps({"time_in_containers": True}))
    lead = machines.host("node1").address
    for node in NODES:
        machines.ssh(node, "sudo chronyc waitsync 60 0 0 0.5")
        assert lead in machines.ssh(node, "sudo chronyc -n tracking").stdout
    changes_nothing(cluster)


@pytest.mark.platform("real", "no-scheduler")
def test_cluster_of_debian_without_scheduler(
    no_residue: None, cluster_name: str, clusterctl: Clusterctl, tmp_path: Path
) -> None:
    with lab("debian", 3, internet=True, shared="/shared") as machines:
        unconfirmed = {host.name: {"address": host.address} for host in machines.hosts}
        users = [{"name": "carol", "uid": 2222, "ssh_keys": [CAROLS_KEY]}]
        text = machines.spec(
            cluster_name, scheduler="none", users=users, provider={"hosts": unconfirmed}
        )
        for name in ("node1", "node3"):  # with a home there; node2 gets one on the shared folder
            machines.host(name).inside.sh(CAROL)
        machines.host("node3").inside.sh(HER_KEYS)
        with raised(machines, cluster_name, text, clusterctl.home, tmp_path) as cluster:
            runs_jobs_without_a_scheduler(cluster)
            changes_nothing(cluster)
            count = f"grep -c '{CAROLS_KEY}' ~carol/.ssh/authorized_keys || true"
            assert [host.inside.sh(count).strip() for host in machines.hosts] == ["1", "1", "1"]
            cluster.spec.write_text(
                cluster.spec.read_text().replace(CAROLS_KEY[-30:], OTHER_KEY[-30:])
            )
            cluster("up")
            assert [host.inside.sh(count).strip() for host in machines.hosts] == ["0", "0", "0"]
            machines.host("node3").inside.sh("rm ~carol/.ssh/authorized_keys")
            assert "the cluster's key of user carol was missing" in json.dumps(
                cluster.json("up")["repaired"]
            )
            lets_a_machine_in_that_was_installed_anew(cluster, machines)
            shutil.rmtree(cluster.workspace)
            keys = {
                h.name: h.inside.sh("cat /etc/ssh/ssh_host_ed25519_key.pub") for h in machines.hosts
            }
            known = {
                name: {**output, "host_key": " ".join(keys[name].split()[:2])}
                for name, output in unconfirmed.items()
            }
            spec = tmp_path / "known.yaml"
            spec.write_text(
                machines.spec(cluster_name, scheduler="none", provider={"hosts": known})
            )
            assert (
                cluster_name
                in clusterctl("-f", spec, "orphans", "remove", "--yes", "--discard").stdout
            )
            machines.host("node3").inside.sh("mv /root/ssh_host_ed25519_key* /etc/ssh/")
        assert machines.host("node1").inside.sh("ls -A ~carol | grep -x .ssh || true") == ""
        modes = machines.host("node3").inside.sh(
            "stat -c %a:%s ~carol/.ssh ~carol/.ssh/authorized_keys"
        )
        assert [mode.partition(":")[0] for mode in modes.split()] == ["755", "644"]


@pytest.mark.platform("stand-in", "openhpc", "no-scheduler", "rocky-9")
def test_cluster_of_el_without_scheduler_and_with_openhpc(
    no_residue: None, cluster_name: str, clusterctl: Clusterctl, tmp_path: Path
) -> None:
    with lab("el", 3, shared="/shared") as machines:
        for host in machines.hosts:
            host.inside.sh("dnf -q -y install firewalld chrony >/dev/null")
            host.inside.sh(
                "systemctl enable --now firewalld chronyd; cp -p /etc/chrony.conf /root/"
            )
        text = machines.spec(cluster_name, scheduler="none")
        with raised(machines, cluster_name, text, clusterctl.home, tmp_path) as cluster:
            opened = machines.ssh(
                "node1", "sudo firewall-cmd --policy=clusterctl --list-all"
            ).stdout
            assert "32768-60999" in opened
            assert "6817" not in opened, "nothing of Slurm's runs"
            runs_jobs_without_a_scheduler(cluster)
            cluster.ssh("node3", "sudo rm /opt/clusterctl/orted")
            assert "/opt/clusterctl/orted was missing" in json.dumps(cluster.json("up")["repaired"])
            leads_clocks_that_follow_nobody(cluster, machines)
        for host in machines.hosts:
            host.inside.sh("cmp /etc/chrony.conf /root/chrony.conf")
        text = machines.spec(cluster_name, software={"slurm": {"from": "openhpc"}})
        with raised(machines, cluster_name, text, clusterctl.home, tmp_path) as cluster:
            assert cluster.ssh("node2", "rpm -q slurm-slurmd-ohpc").startswith(
                "slurm-slurmd-ohpc-23.11"
            )
            trained(cluster)
            changes_nothing(cluster)


@pytest.mark.platform("stand-in", "rocky-9")
def test_cluster_of_rhel_images_with_slurm_of_epel(
    no_residue: None, cluster_name: str, clusterctl: Clusterctl, tmp_path: Path
) -> None:
    """CodeReady Builder is RHUI's. The repository that has Slurm is EPEL's, by another name."""
    epel = {"url": f"{EPEL}/9/Everything/x86_64/"}
    slurm = {"from": epel["url"], "key": f"{EPEL}/RPM-GPG-KEY-EPEL-9"}
    with lab("el", 1) as machines:
        machines.host("node1").inside.sh(AS_RHEL)
        text = machines.spec(
            cluster_name,
            controller="node1",
            partitions={"train": "node1"},
            provider={"shared": {}},
            software={"slurm": slurm, "mirrors": {"epel": epel}},
        )
        with raised(machines, cluster_name, text, clusterctl.home, tmp_path) as cluster:
            enabled = cluster.ssh("node1", "dnf -q repolist --enabled").split()
            assert [word for word in enabled if "codeready" in word] == [f"{CODEREADY}-rpms"]
            assert {"epel", "clusterctl-slurm"} < {*enabled}
            installed = cluster.ssh("node1", "dnf -q list --installed slurm munge").splitlines()
            assert installed[-1].split()[0::2] == ["slurm.x86_64", "@clusterctl-slurm"]
            assert not shows(" ".join(cluster.raised["notes"]), "slurm-vulnerable")
            trained(cluster, ["node1"])
            assert "changed=0" in play(cluster).rsplit("PLAY RECAP", 1)[1]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("debian-13", marks=pytest.mark.platform("real", "debian-13")),
        pytest.param("ubuntu-22.04", marks=pytest.mark.platform("stand-in", "ubuntu-22.04")),
        pytest.param("ubuntu-24.04", marks=pytest.mark.platform("stand-in", "ubuntu-24.04")),
        pytest.param("el-10", marks=pytest.mark.platform("stand-in", "rocky-10")),
    ],
)
def test_cluster_of_another_distribution_runs_a_job(
    no_residue: None, cluster_name: str, clusterctl: Clusterctl, tmp_path: Path, kind: Kind
) -> None:
    release = kind.replace("el-", "rocky-")
    with (
        lab(kind, 3, internet=not kind.startswith("el"), shared="/shared") as machines,
        raised(
            machines, cluster_name, machines.spec(cluster_name), clusterctl.home, tmp_path
        ) as cluster,
    ):
        assert (
            f"clusterctl_release: {release}\n" in (cluster.workspace / "inventory.yml").read_text()
        )
        trained(cluster)
        python = distribution_of(release).python_version
        assert all(f"Python {python}" in cluster.ssh(node, PYTHON) for node in NODES)
        changes_nothing(cluster)


def test_single_machine_with_another_hostname_is_a_cluster(
    no_residue: None, cluster_name: str, clusterctl: Clusterctl, tmp_path: Path
) -> None:
    with lab("debian", 1, internet=True) as machines:
        provider = {"hosts": hosts(machines, desk="node1"), "shared": {}}
        text = machines.spec(
            cluster_name, controller="desk", partitions={"train": "desk"}, provider=provider
        )
        with raised(machines, cluster_name, text, clusterctl.home, tmp_path) as cluster:
            assert cluster.raised["probed"] == ["desk"]
            trained(cluster, ["desk"])
            assert cluster.ssh("desk", "hostname").strip() == "node1"
            assert "unchanged: 1 " in cluster("up").stdout
