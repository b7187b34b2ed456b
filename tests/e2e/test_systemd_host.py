"""A host with systemd as PID 1: faults of the host, then the cluster of an ordinary user.

Every fault is real, and leads to a single error with exit code 1 and to no partial change. Before
`up`, the firewall is closed as beside Docker: the packet filter drops all forwarded and all
unsolicited traffic; the host does not forward; and with br_netfilter, traffic between the ports of
a bridge would pass the filter, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.local.layout import CACHE
from clusterctl.providers.local.provider import LocalProvider, image_keys
from clusterctl.spec.providers.local import LocalSettings
from tests.support.cluster import raised
from tests.support.messages import condition
from tests.support.nested import CLUSTERCTL, PLACE, Host, booted

pytestmark = pytest.mark.platform("real", "systemd-host")

STRANGER = "ben"  # may not use sudo
USER = "ada"
NODES = ("nested-ctl", "nested-train-1", "nested-train-2")
SPEC = (
    "version: 1\nname: nested\nprovider: {type: local}\npartitions:\n  - {name: train, nodes: 2}\n"
)
PEOPLE = f"""\
useradd --create-home {USER}
echo '{USER} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/{USER}
printf '{SPEC}' | runuser -u {USER} -- tee ~{USER}/cluster.yaml
"""
FIREWALL = """\
iptables -P FORWARD DROP
iptables -N DOCKER-USER
iptables -A DOCKER-USER -j RETURN
iptables -A FORWARD -j DOCKER-USER
iptables -A INPUT -i lo -j ACCEPT
iptables -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
iptables -P INPUT DROP
nft add table inet shut
nft add chain inet shut forward '{ type filter hook forward priority 10; policy drop; }'
echo 0 > /proc/sys/net/ipv4/ip_forward
"""
BRIDGE_FILTER = "/proc/sys/net/bridge/bridge-nf-call-iptables"
INSTALL = f"{PLACE}/lib/python3*/site-packages/clusterctl/_assets/ansible/install.yml"
OVERLAY = (
    "mkdir -p /run/faulty/{upper,work}; mount -t overlay faulty "
    "-o lowerdir=/mnt,upperdir=/run/faulty/upper,workdir=/run/faulty/work"
)
PORT = 8099
# Kills clusterctl alone, once somebody asks a server for it that never answers. The rest ends by
# itself.
KILLED = f"""\
import os, signal, socket, subprocess, sys, time
from pathlib import Path
def begun():
    return list(Path("/var/cache/clusterctl").glob(".building-*"))
server = socket.create_server(("127.0.0.1", {PORT}))
server.settimeout(60)
up = subprocess.Popen(sys.argv[1:])
asked, _ = server.accept()
assert begun()
os.kill(up.pid, signal.SIGKILL)
deadline = time.monotonic() + 60
while left := begun():
    assert time.monotonic() < deadline, left
    time.sleep(0.1)
"""


def lent_image(folder: Path) -> tuple[Path, ...]:
    """The folders of the node image in this machine's cache; a cluster is created first if there is
    no image.
    """
    base, key = image_keys(LocalSettings())
    if key not in {kept.key for kept in LocalProvider(LocalSettings()).cached_images()}:
        with raised(
            "bake",
            "version: 1\nname: bake\npartitions: [{name: train, nodes: 1}]\n",
            folder,
            folder,
        ):
            pass
    return (CACHE / f"base-{base}", CACHE / f"image-{key}")


@pytest.fixture(scope="module")
def host(no_residue: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    images = lent_image(tmp_path_factory.mktemp("bake"))
    with booted(tmp_path_factory.mktemp("host"), images) as one:
        one.sh(f"useradd --create-home {STRANGER}; {PEOPLE}")
        yield one


@contextmanager
def fault(host: Host, make: str, mend: str) -> Iterator[None]:
    host("bash", "-ec", make)
    try:
        yield
    finally:
        host("bash", "-ec", mend)


def spec(host: Host, **provider: str) -> str:
    """Write a spec with these settings of the provider. Return its path."""
    text = {
        "version": 1,
        "name": "faulty",
        "provider": {"type": "local", **provider},
        "partitions": [{"name": "train", "nodes": 1}],
    }
    host.sh(f"echo '{json.dumps(text)}' > /tmp/cluster.yaml")
    return "/tmp/cluster.yaml"


def up(*argv: str, env: dict[str, str] | None = None) -> list[str]:
    return ["env", *(f"{k}={v}" for k, v in (env or {}).items()), CLUSTERCTL, *argv, "up"]


def refusal(
    host: Host, *, user: str = "root", env: dict[str, str] | None = None, **provider: str
) -> dict[str, Any]:
    """Return the only failure of `up`, which must leave the host unchanged."""
    before = host.look()
    ran = host(*up("-o", "json", "-f", spec(host, **provider), env=env), user=user, rc=1)
    assert "Traceback" not in ran.stderr
    assert host.look() == before
    assert ran.stdout, ran
    assert not ran.json["ok"]
    (failure,) = ran.json["failures"]
    return dict(failure)


@pytest.fixture
def other_image(host: Host) -> Iterator[None]:
    """A clusterctl with other install roles, which needs another image than the cached one."""
    with fault(
        host, f"cp {INSTALL} /root/kept; echo '# other' >> {INSTALL}", f"cat /root/kept > {INSTALL}"
    ):
        yield


TOOLS = "/usr/bin/systemd-nspawn /usr/bin/mmdebstrap"
# How a fault is made and mended, how `up` is started; the code of its failure, and words of cause
# and fix.
FAULTS: dict[str, tuple[str, str, dict[str, Any], str, tuple[str, ...]]] = {
    "tools": (
        f"chmod a-x {TOOLS}",
        f"chmod a+x {TOOLS}",
        {},
        "tool-missing",
        ("systemd-nspawn, mmdebstrap", "apt-get install mmdebstrap systemd-container"),
    ),
    "overlays": (
        f"{OVERLAY} /var/lib/clusterctl",
        "umount /var/lib/clusterctl; rm -r /run/faulty",
        {},
        "host-unfit/overlayfs",
        ("/var/lib",),
    ),
    "routes": (
        "ip link add vpn type bridge; ip link set vpn up;for range in 10.0.0.0/8 172.16.0.0/12 "
        "192.168.0.0/16; do ip route add $range dev vpn; done",
        "ip link delete vpn",
        {},
        "in-use/all-subnets",
        ("provider.subnet",),
    ),
    "subnet": (
        "ip link add office type bridge; ip addr add 10.77.3.1/16 dev office",
        "ip link delete office",
        {"subnet": "10.77.0.0/24"},
        "in-use/subnet",
        ("10.77.0.0/24", "10.77.0.0/16"),
    ),
    "sudo": (  # a user whom no rule names: test_ordinary_user.py
        "chmod a-x /usr/bin/sudo",
        "chmod 4755 /usr/bin/sudo",
        {"user": STRANGER},
        "sudo/nodes",
        ("install sudo",),
    ),
    "disk": (
        "mount -t tmpfs -o ro faulty /mnt",
        "umount /mnt",
        {"env": {"CLUSTERCTL_HOME": "/mnt/home"}},
        "disk-full/state",
        ("Read-only file system: /mnt",),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_unfit_host_is_one_error_with_a_fix(host: Host, name: str) -> None:
    make, mend, options, code, words = FAULTS[name]
    with fault(host, make, mend):
        failure = refusal(host, **options)
    assert condition(failure) == code
    assert [word for word in words if word not in failure["cause"] + failure["fix"]] == []


def killed(host: Host, *argv: str) -> None:
    """Kill `up` while it waits for an answer. None of its processes may remain."""
    before = host.look()
    host("python3", "-c", KILLED, *argv)
    assert host.look() == before


def test_up_killed_while_building_the_base_continues(host: Host) -> None:
    killed(host, *up("-f", spec(host, mirror=f"http://127.0.0.1:{PORT}/debian")))
    again = refusal(host, mirror="http://127.0.0.1:9/debian")
    assert condition(again) == "tool-failed/machine"
    assert "Connection refused" in again["cause"]
    assert "provider.mirror" in again["fix"]


def test_up_killed_while_baking_the_image_continues(host: Host, other_image: None) -> None:
    env = {"PIP_INDEX_URL": f"http://127.0.0.1:{PORT}/simple", "PIP_RETRIES": "0"}
    killed(host, *up("-f", spec(host), env=env))
    again = refusal(host, env={**env, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"})
    assert condition(again) == "transfer-failed/wheels"
    assert "package index" in again["fix"]


def clusterctl(host: Host, *argv: str) -> Any:
    """Return the answer of a verb with `-o json`."""
    return host(CLUSTERCTL, "-o", "json", *argv, user=USER, timeout_s=300).json


def machines(host: Host) -> list[str]:
    listed = json.loads(host("machinectl", "list", "--output=json").stdout)
    assert all(
        one["class"] == "container" and one["service"] == "systemd-nspawn" for one in listed
    ), listed
    return sorted(one["machine"] for one in listed)


@pytest.fixture(scope="module")
def before(host: Host, record_testsuite_property: Any) -> dict[str, str]:
    """The state of the host before `up`, with its firewall closed. The report says whether the
    kernel has br_netfilter.
    """
    host.sh(FIREWALL)
    offered = host.sh(
        f"if test -e {BRIDGE_FILTER}; then echo 1 > {BRIDGE_FILTER}; echo yes; else echo no; fi"
    )
    record_testsuite_property("br_netfilter", offered.strip())
    return host.look()


@pytest.fixture(scope="module")
def cluster(host: Host, before: dict[str, str]) -> dict[str, Any]:
    """The answer of `up`."""
    answer: dict[str, Any] = clusterctl(host, "up")
    return answer


def test_up_verifies_the_cluster(host: Host, cluster: dict[str, Any]) -> None:
    assert cluster["ready"]
    assert cluster["probed"] == list(NODES[1:])
    assert clusterctl(host, "status")["ready"]


def test_firewall_of_the_host_never_sees_traffic_of_nodes(
    host: Host, cluster: dict[str, Any]
) -> None:
    shown = host("iptables", "--list", "FORWARD", "--verbose", "--exact", "--numeric").stdout
    assert "policy DROP 0 packets, 0 bytes" in shown


def test_machinectl_lists_the_nodes(host: Host, cluster: dict[str, Any]) -> None:
    ask = ("hostname", "--pipe", "--quiet")
    names = [
        host("systemd-run", "--machine", one, *ask[1:], ask[0]).stdout.strip()
        for one in machines(host)
    ]
    assert names == list(NODES)


def test_nodes_live_in_units_of_machine_slice(host: Host, cluster: dict[str, Any]) -> None:
    for machine in machines(host):
        unit = f"clusterctl-{machine}.service"
        shown = host("systemctl", "show", "--property=Slice,ActiveState,Delegate", unit).stdout
        assert set(shown.split()) == {"Slice=machine.slice", "ActiveState=active", "Delegate=yes"}
        leader = host("machinectl", "show", "--property=Leader", "--value", machine).stdout.strip()
        assert f"/machine.slice/{unit}/" in host("cat", f"/proc/{leader}/cgroup").stdout


def test_job_runs_across_the_nodes_as_its_user(host: Host, cluster: dict[str, Any]) -> None:
    assert clusterctl(host, "submit", "probe", "--nodes", "2", "--wait")["state"] == "COMPLETED"
    (job,) = (job for job in clusterctl(host, "jobs")["jobs"] if job["name"] == "probe")
    assert job["user"] == USER


def test_files_written_for_the_user_belong_to_the_user(host: Host, cluster: dict[str, Any]) -> None:
    others = host.sh(f"find ~{USER} ! -user {USER}")
    assert others == ""


def test_down_leaves_the_host_as_it_was(
    host: Host, cluster: dict[str, Any], before: dict[str, str]
) -> None:
    clusterctl(host, "down", "--yes")
    assert host.look() == before
    assert host.sh(f"ls ~{USER}/.local/state/clusterctl") == "runs.jsonl\n", "where runs are"
    assert before["machines"] == before["units"] == before["failed"] == before["processes"] == ""
    assert re.search(r"^net\.ipv4\.ip_forward = 0$", before["sysctl"], re.MULTILINE)
    units = host("journalctl", "--no-pager", "--unit=clusterctl-*").stdout
    assert "halt container" in units
    assert [line for line in units.splitlines() if "Failed with result" in line] == []
