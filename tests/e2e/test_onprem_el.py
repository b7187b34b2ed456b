"""Machines similar to Rocky Linux become a cluster, train together, and are restored.

They have an ordinary user with a key and sudo, a running firewall, dnf and its repositories.
tests/support/el and docs/onprem.md describe the machines, and what they can't show. Outputs are
compared with docs/howto/first-day-rocky.md.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from clusterctl.spec.hosts import expand
from tests.e2e.own import at_home
from tests.e2e.torch_job import train_on_nodes
from tests.support.cluster import Cluster, records
from tests.support.lab import Lab, lab
from tests.support.manual import assert_shown, blocks
from tests.support.messages import shows
from tests.support.nested import Host
from tests.support.nvidia.machines import PROGRAM, rtx_4070
from tests.support.terminal import plain, terminal
from tests.support.verbs import Clusterctl, CommandResult

pytestmark = [
    pytest.mark.platform("stand-in", "rocky-9", "nvidia-packages"),
    pytest.mark.platform("real", "firewalld"),
]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
FIRST_DAY = ROOT / "docs" / "howto" / "first-day-rocky.md"
NODES = ["node1", "node2"]  # the first is the controller, too; the second has the cards
# Doubles of the kernel and the driver, which the machines can't have.
MODINFO = """\
#!/bin/bash
[ "$*" = "-F version -k $(uname -r) nvidia" ] || exit 1
rpm -q --qf '%{version}\\n' kmod-nvidia-open-dkms"""
NVIDIA_SMI = """\
#!/bin/bash
[ -e /proc/driver/nvidia/version ] && exec python3 /usr/local/lib/nvidia_smi.py "$@"
echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver." >&2
exit 9"""
BOOT = """\
#!/bin/bash
mount --bind /opt/pci /sys/bus/pci/devices
version=$(rpm -q --qf '%{version}' kmod-nvidia-open-dkms) || exit 0
mkdir -p /run/driver/nvidia && cd /run/driver/nvidia
echo "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  $version  Release Build" >version
mount --bind /run/driver /proc/driver
ln -sf /dev/null /dev/nvidia0"""
BOOT_UNIT = """\
[Unit]
Before=slurmd.service
[Service]
Type=oneshot
ExecStart=/usr/local/sbin/boot
[Install]
WantedBy=multi-user.target"""
# NVIDIA's network software with its Open MPI, as on Google's images for GPUs and on sites with
# InfiniBand.
DOCA = """\
[doca]
name=DOCA Online Repo
baseurl=https://linux.mellanox.com/public/repo/doca/2.10.0/rhel9.6/x86_64
gpgkey=https://linux.mellanox.com/public/repo/doca/GPG-KEY-Mellanox.pub
enabled=1"""
# CIQ's repository, also on these images; here its server is away.
CIQ = """\
[ciq-sigcloud-next]
name=CIQ SIG/Cloud Next
baseurl=https://depot.ciq.com/public/download/ciq-sigcloud-next-9/ciq-sigcloud-next-9.x86_64
enabled=1"""
# The first is NVIDIA's, the second the distribution's: prefix and file of parameters.
NVIDIA_MPI = (
    "/usr/mpi/gcc/openmpi-4.1.7rc1",
    "/usr/mpi/gcc/openmpi-4.1.7rc1/etc/openmpi-mca-params.conf",
)
EL_MPI = ("/usr/lib64/openmpi", "/etc/openmpi-x86_64/openmpi-mca-params.conf")
# A firewall that answers nothing to other machines.
SHUT = """\
table ip lab {
  chain in { type filter hook input priority 0; iif != lo tcp dport { 6817, 6819 } drop; }
}"""
# What a cluster brings along, except packages, which stay: accounts, files, running units, firewall
# policies.
TRACES = """\
set +e
ls /etc/slurm/slurm.conf /etc/munge/munge.key /var/lib/mysql/slurm_acct_db /etc/dnf/modules.d 2>/dev/null
find /etc /opt /usr/local /var/lib -xdev -name '*clusterctl*'
systemctl list-units --state=active --plain --no-legend 'slurm*' 'munge*' 'mariadb*' 'nvidia*'
systemctl list-unit-files --state=enabled --no-legend 'slurm*' 'munge*' 'mariadb*' 'nvidia*'
firewall-cmd --get-policies; firewall-cmd --get-ipsets; firewall-cmd --get-zones
cat /etc/hosts
"""


def traces(machines: Lab) -> dict[str, str]:
    """Return the traces of a cluster on each machine."""
    return {host.name: host.inside.sh(TRACES, rc=None) for host in machines.hosts}


def furnish_cards(host: Host) -> None:
    """Put an RTX 4070 and an NVSwitch on the bus of the host. A boot loads the driver that is
    installed then.
    """
    for path, text in {
        "/opt/pci/0000:01:00.0/vendor": "0x10de\n",
        "/opt/pci/0000:01:00.0/class": "0x030000\n",
        "/opt/pci/0000:01:00.0/device": "0x2786\n",
        "/opt/pci/0000:02:00.0/vendor": "0x10de\n",
        "/opt/pci/0000:02:00.0/class": "0x068000\n",
        "/opt/pci/0000:02:00.0/device": "0x22a3\n",
        "/usr/local/bin/modinfo": MODINFO,
        "/usr/local/bin/nvidia-smi": NVIDIA_SMI,
        "/usr/local/lib/nvidia_smi.py": PROGRAM.read_text(),
        "/etc/nvidia-stand-in.json": json.dumps(rtx_4070(driver="580.95.05")),
        "/usr/local/sbin/boot": BOOT,
        "/etc/systemd/system/boot.service": BOOT_UNIT,
    }.items():
        host.sh(
            f"mkdir -p {Path(path).parent}; cat >{path} <<'EOF'\n{text}\nEOF\nchmod 0755 {path}"
        )
    host.sh("systemctl enable boot; systemctl start boot")


@pytest.fixture(scope="module")
def machines(no_residue: None) -> Iterator[Lab]:
    with lab("el", 2, shared="/shared") as one:
        for host in one.hosts:
            host.inside.sh(
                "dnf -q -y install firewalld >/dev/null; systemctl enable --now firewalld"
            )
        furnish_cards(one.host("node2").inside)
        yield one


@pytest.fixture(scope="module")
def before(machines: Lab) -> dict[str, str]:
    """The traces of machines with repositories of CIQ and NVIDIA. The GPU host has NVIDIA's Open
    MPI.
    """
    repos = "/etc/yum.repos.d"
    for host in machines.hosts:
        host.inside.sh(f"cat >{repos}/doca.repo <<'EOF'\n{DOCA}\nEOF")
    machines.host("node2").inside.sh("dnf -q -y install openmpi rdma-core ucx >/dev/null")
    for host in machines.hosts:
        host.inside.sh(f"cat >{repos}/ciq-sigcloud-next.repo <<'EOF'\n{CIQ}\nEOF")
    return traces(machines)


@pytest.fixture(scope="module")
def file(machines: Lab, cluster_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the spec of a cluster of the machines."""
    path = tmp_path_factory.mktemp("rocky") / "cluster.yaml"
    nvidia = {"driver": "open", "toolkit": "12.9", "dcgm": True, "nccl": True}
    software = {"cupy": False, "nvidia": nvidia}
    partitions = {"train": "node[1-2]"}
    path.write_text(
        machines.spec(cluster_name, controller="node1", partitions=partitions, software=software)
    )
    return path


@pytest.fixture(scope="module")
def rocky(
    file: Path, machines: Lab, before: dict[str, str], cluster_name: str, clusterctl_home: Path
) -> Iterator[Cluster]:
    """The cluster, up. Its host keys had not been confirmed before."""
    runner = Clusterctl(clusterctl_home, file.parent, at_home(file.parent))
    file.write_text(re.sub(r"host_key: ssh-ed25519\s+\S+(?=})", "", file.read_text()))
    try:
        shown = answered(runner, "up")
        for turn in (0, 1):
            as_shown(shown, "clusterctl up", cluster_name, turn)
        yield Cluster(cluster_name, file, runner, {"shown": shown})
    finally:
        runner("-f", file, "down", "--yes", "--discard", rc=None)


def answered(runner: Clusterctl, verb: str) -> str:
    """Return the output of a verb for a user who answers yes."""
    with terminal(runner, verb, size=(60, 200)) as window:
        window.read_until("[y/N] ")
        window.type("y\n")
        code = window.end()
    assert code == 0, window.shown
    return plain(window.shown)


def as_shown(said: CommandResult | str, text: str, name: str, turn: int = 0) -> None:
    """Assert that the page of the first day shows this output."""
    if isinstance(said, CommandResult):
        said = f"{said.stderr}{said.stdout}"
    assert_shown(FIRST_DAY, text, said, {name: "lab"}, turn)


def spec_of_the_page(machines: Lab, **provider: Any) -> str:
    """Return the spec of the page, with the addresses of these machines."""
    (text,) = (block.text for block in blocks(FIRST_DAY) if block.language == "yaml")
    said = YAML(typ="safe").load(text)
    assert expand(*said["provider"]["hosts"]) == tuple(NODES)
    hosts = {
        host.name: {"address": host.address, "host_key": host.host_key} for host in machines.hosts
    }
    access = {**said["provider"]["access"], "key": str(machines.key)}
    return json.dumps(
        {**said, "provider": {**said["provider"], "hosts": hosts, "access": access, **provider}}
    )


def test_up_reports_the_obstacles_of_the_first_day_page(
    no_residue: None, clusterctl: Clusterctl, tmp_path: Path
) -> None:
    with lab("el", 2) as machines:
        spec = tmp_path / "cluster.yaml"
        shared = {"kind": "existing", "path": "/shared"}
        spec.write_text(spec_of_the_page(machines, shared=shared))
        machines.host("node2").inside.sh("mkdir /shared")
        as_shown(
            clusterctl("plan", "--preflight", rc=1, cwd=tmp_path),
            "clusterctl plan --preflight",
            "lab",
        )
        machines.host("node1").inside.sh("mkdir /shared")
        as_shown(
            clusterctl("plan", "--preflight", cwd=tmp_path), "clusterctl plan --preflight", "lab", 1
        )


def test_plan_matches_the_first_day_page(
    machines: Lab, clusterctl: Clusterctl, tmp_path: Path
) -> None:
    spec = tmp_path / "cluster.yaml"
    spec.write_text(spec_of_the_page(machines))
    for verb in ("validate", "plan"):
        as_shown(clusterctl(verb, cwd=tmp_path), f"clusterctl {verb}", "lab")


def test_up_on_el_uses_packages_of_the_distribution(rocky: Cluster) -> None:
    assert rocky.json("status")["ready"]
    assert (
        rocky.ssh("node2", "rpm -q --qf '%{name} ' slurm-slurmd openmpi") == "slurm-slurmd openmpi "
    )
    units = "slurmctld slurmdbd mariadb munge"
    assert rocky.ssh("node1", f"systemctl is-active {units}").split() == ["active"] * 4
    assert rocky.ssh("node2", "sudo firewall-cmd --state").strip() == "running"


def test_doctor_shows_the_active_firewall_as_open(rocky: Cluster) -> None:
    looked = rocky.json("doctor")
    firewalls = [host["firewall"] for host in looked["hosts"].values()]
    assert firewalls == [{"name": "firewalld", "zone": "public"}] * 2
    assert "network" not in [finding["code"] for finding in looked["findings"]]
    as_shown(rocky("status"), "clusterctl status", rocky.name)


def test_doctor_reports_closed_ports_of_a_running_cluster(rocky: Cluster, machines: Lab) -> None:
    host = machines.host("node1").inside
    address = machines.host("node1").address
    host.sh(f"nft -f - <<'EOF'\n{SHUT}\nEOF")
    try:
        findings = rocky.json("doctor", rc=1)["findings"]
    finally:
        host.sh("nft delete table ip lab")
    (found,) = (one for one in findings if one["code"] == "network")
    assert (found["host"], found["level"]) == ("node1", "error")
    assert found["why"].startswith("node2 ")
    assert f" {address}, port 6817, 6819: no answer" in found["why"]


def test_firewall_admits_hosts_of_the_cluster_only(rocky: Cluster, machines: Lab) -> None:
    for host, port in (("node1", 6817), ("node1", 6819), ("node1", 6818)):
        address = machines.host(host).address
        rocky.ssh("node2", f"timeout 5 bash -c 'echo >/dev/tcp/{address}/{port}'")
        with socket.create_connection((address, 22), timeout=5):  # this machine is no member
            pass
        with socket.socket() as stranger:
            stranger.settimeout(5)
            assert stranger.connect_ex((address, port)) == errno.EHOSTUNREACH


def test_gpu_host_has_the_packages_and_a_note_about_its_reboot(rocky: Cluster) -> None:
    wanted = (
        "nvidia-open cuda-toolkit-12-9 datacenter-gpu-manager-4-cuda12 libnccl nvidia-fabricmanager"
    )
    assert rocky.ssh("node2", f"rpm -q --qf '%{{name}} ' {wanted}").split() == wanted.split()
    assert "not installed" in rocky.ssh("node1", "rpm -q nvidia-open || true")
    unwanted = rocky.ssh("node2", "rpm -q libnccl-devel libnccl-static || true")
    assert unwanted.count("not installed") == 2
    (needed,) = (line for line in rocky.raised["shown"].splitlines() if "node reboot node2" in line)
    assert needed.startswith("note: node2: ")
    assert shows(needed, "reboot-needed")


@pytest.mark.platform("stand-in", "doca")
def test_repositories_of_other_suppliers_are_left_out(rocky: Cluster) -> None:
    """Otherwise the controller would get newer packages for RDMA, and `up` would fail with one
    supplier's server.
    """
    asked = "rpm -q --qf '%{name}-%{version} ' ucx openmpi"
    assert rocky.ssh("node1", asked).split() == ["ucx-1.17.0", "openmpi-4.1.1"]
    assert rocky.ssh("node2", asked).split() == ["ucx-1.18.0", "openmpi-4.1.7rc1"]
    assert rocky.ssh("node2", "rpm -q --qf '%{version}' rdma-core") == "2410mlnx54"
    enabled = rocky.ssh("node1", "dnf repolist --quiet | cut -d' ' -f1")
    assert {"ciq-sigcloud-next", "doca"} <= {*enabled.split()}


@pytest.mark.platform("stand-in", "doca")
def test_open_mpi_of_each_package_reads_the_clusters_parameters(rocky: Cluster) -> None:
    """The GPU host has NVIDIA's package, which has the distribution's name and another prefix."""
    for node, version, (prefix, params) in (
        ("node1", "4.1.1", EL_MPI),
        ("node2", "4.1.7rc1", NVIDIA_MPI),
    ):
        assert rocky.ssh(node, "rpm -q --qf %{version} openmpi") == version
        profile = ". /opt/clusterctl/job-profile.sh"
        assert (
            rocky.ssh(node, f"{profile}; readlink -f $(command -v mpirun)").strip()
            == f"{prefix}/bin/orterun"
        )
        shown = rocky.ssh(
            node, f"{profile}; ompi_info --parsable --all | grep :btl_tcp_if_include:source:"
        )
        assert ":file (/etc/openmpi/openmpi-mca-params.conf:" in shown
        assert rocky.ssh(node, "readlink -f /etc/openmpi/openmpi-mca-params.conf").strip() == params
        assert "btl_tcp_if_include = " in rocky.ssh(node, f"cat {params}")


@pytest.mark.platform("stand-in", "doca")
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_jobs_span_hosts_with_different_open_mpi_packages(rocky: Cluster, launcher: str) -> None:
    """The ranks on the GPU host get the environment of the job's first host."""
    done = rocky.json("submit", "probe", "--nodes", "2", "--launcher", launcher, "--wait")
    assert done["state"] == "COMPLETED", done


@pytest.mark.platform("stand-in", "doca")
def test_missing_parameters_of_nvidias_open_mpi_are_restored(rocky: Cluster) -> None:
    _, params = NVIDIA_MPI
    rocky.ssh("node2", f"sudo rm {params}")
    restored = {"host": "node2", "what": f"{params} was missing", "action": "restored"}
    assert restored in rocky.json("up")["repaired"]
    assert "btl_tcp_if_include = " in rocky.ssh("node2", f"cat {params}")


def test_training_on_two_nodes_is_collected(rocky: Cluster) -> None:
    for text in (
        "submit probe --nodes 2 --wait",
        "submit train --nodes 2 --follow -- --epochs 2",
        "collect",
    ):
        as_shown(rocky(*text.split()), f"clusterctl {text}", rocky.name)
    (run,) = rocky.runner.cwd.glob("runs/*-train")
    (start,) = (record for record in records(run / "metrics.jsonl") if record["kind"] == "run")
    assert (start["world_size"], [rank["host"] for rank in start["ranks"]]) == (2, NODES)
    assert json.loads((run / "run.json").read_text())["state"] == "COMPLETED"
    assert run.name.split("-")[1] in (run / "sacct.json").read_text()


@pytest.mark.platform("real", "pytorch")
def test_torch_trains_on_two_nodes(rocky: Cluster) -> None:
    train_on_nodes(rocky, NODES, "torchrun")


def test_down_restores_the_el_machines(
    rocky: Cluster, machines: Lab, before: dict[str, Any]
) -> None:
    assert not any(traces(machines)[host] == said for host, said in before.items())
    as_shown(answered(rocky.runner, "down"), "clusterctl down", rocky.name)
    assert traces(machines) == before
