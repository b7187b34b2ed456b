"""All machines of an on-prem cluster lose power, and come back in several orders.

Nobody runs `up`: the nodes return by themselves, and no job is lost. The shared folder is on a file
server that loses power, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from clusterctl.state.workspace import Workspace
from tests.e2e.own import SharedFolder, raised
from tests.support.cluster import Cluster
from tests.support.lab import Box, Lab, lab
from tests.support.processes import eventually

pytestmark = [pytest.mark.sweep, pytest.mark.platform("stand-in", "nfs")]  # minutes

SHARED = SharedFolder("/srv/cluster", "hpc", 10000)
MACHINES = ("files", "node1", "node2", "node3")
NODES = ("node2", "node3")
# Longer than slurmd waits for the shared folder at a boot.
LONG_S = 75
# Machines that get their power back together, each group after so many seconds.
ORDERS = {
    "at once": ((0, MACHINES),),
    "controller first": ((0, ("files", "node1")), (20, ("node2",)), (20, ("node3",))),
    "controller in the middle": ((0, ("files", "node2")), (20, ("node1",)), (20, ("node3",))),
    "controller last": ((0, ("files", "node2", "node3")), (40, ("node1",))),
    "file server last": ((0, ("node1", "node2", "node3")), (LONG_S, ("files",))),
}
PATIENCE_S = 180
# For a verb while the file server is silent, beside other clusters on a busy machine.
SILENT_S = 900
OLD_S = 25
# On a node, until it starts again.
LONG = """\
#!/bin/bash
[ -n "$SLURM_RESTART_COUNT" ] || sleep 900
"""
SHORT = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive\nsrun hostname\n"


@pytest.fixture(scope="module")
def machines(no_residue: None) -> Iterator[Lab]:
    boxes = [Box(name) for name in MACHINES]
    with lab("debian", boxes, internet=True, options=["--bind=/dev/fuse"]) as one:
        source = SHARED.serve(one, one.host("files"))
        for host in one.hosts:
            if host.name != "files":
                line = f"{source} {SHARED.path} fuse.sshfs _netdev,nofail,{SHARED.options} 0 0"
                host.inside.sh(
                    f"echo '{line}' >>/etc/fstab; systemctl daemon-reload; "
                    f"systemctl start $(systemd-escape --path --suffix=mount {SHARED.path})"
                )
        yield one


@pytest.fixture(scope="module")
def cluster(
    machines: Lab,
    cluster_name: str,
    clusterctl_home: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    workspace = Workspace(clusterctl_home / cluster_name)
    workspace.create()
    # By root, whom sshfs does not let write there.
    mark = f"{SHARED.path}/home/.clusterctl-{workspace.cluster_id()}"
    machines.host("files").inside.sh(f"install -d {mark}")
    hosts = {host.name: host for host in machines.hosts if host.name != "files"}
    text = machines.spec(
        cluster_name,
        controller="node1",
        partitions={"train": "node[2-3]"},
        provider={
            "hosts": {
                name: {"address": host.address, "host_key": host.host_key}
                for name, host in hosts.items()
            },
            "shared": {"kind": "existing", "path": SHARED.path},
        },
        users=[{"name": SHARED.user, "uid": SHARED.uid}],
        # Machines of the tests share a kernel, so that Slurm does not see that a node has booted. It
        # requeues jobs that are missing on a node only if they are older than this.
        slurm={"extra": ["BatchStartTimeout=10"]},
    )
    cwd = tmp_path_factory.mktemp("power")
    with raised(machines, cluster_name, text, clusterctl_home, cwd) as one:
        yield one


def submit(cluster: Cluster) -> list[str]:
    """Submit a job with `--requeue` and one without, which fill the nodes, and one that waits for
    them. Return their ids.
    """
    for name, text in (("long", LONG), ("short", SHORT)):
        (cluster.runner.cwd / f"{name}.sh").write_text(text)
    long = ("submit", cluster.runner.cwd / "long.sh", "--slurm=--exclusive")
    running = [cluster.json(*long, *more)["job_id"] for more in (["--requeue"], [])]
    waiting = cluster.json("submit", cluster.runner.cwd / "short.sh")["job_id"]
    for job in running:
        eventually(partial(is_old, cluster, job), 120)
    return [*running, waiting]


def is_old(cluster: Cluster, job: str) -> bool:
    return (cluster.job_in("RUNNING", job)["elapsed_s"] or 0) > OLD_S


def idle_nodes(cluster: Cluster) -> set[str]:
    """Return the nodes that wait for jobs, by plain sinfo. Empty if Slurm does not answer."""
    rows = cluster.ssh("node1", "timeout 10 sinfo -h -N -p train -o '%N %T %E'", rc=None)
    return {row.split()[0] for row in rows.splitlines() if row.split()[1:] == ["idle", "none"]}


@pytest.mark.parametrize("order", ORDERS)
def test_nodes_are_idle_after_a_power_cut_and_no_job_is_lost(
    cluster: Cluster, machines: Lab, order: str
) -> None:
    jobs = submit(cluster)
    machines.cut_power(*MACHINES)
    for pause_s, group in ORDERS[order]:
        time.sleep(pause_s)
        machines.restore_power(*group)
    eventually(lambda: idle_nodes(cluster) == {*NODES}, PATIENCE_S, pause_s=1)
    for job in jobs:
        cluster.job_in("COMPLETED", job)
    assert cluster("doctor", rc=0)


def test_node_that_stays_off_is_named(cluster: Cluster, machines: Lab) -> None:
    off = NODES[1]
    jobs = submit(cluster)
    machines.cut_power(*MACHINES)
    machines.restore_power(*(name for name in MACHINES if name != off))
    eventually(lambda: idle_nodes(cluster) == {NODES[0]}, PATIENCE_S, pause_s=1)
    states = {node["name"]: node["state"] for node in cluster.json("status")["nodes"]}
    # The star of sinfo: Slurm calls the node down only after SlurmdTimeout.
    assert states[off].endswith("*")
    findings = cluster("-o", "json", "doctor", rc=1).json["findings"]
    assert off in {finding["host"] for finding in findings if finding["level"] == "error"}
    machines.restore_power(off)
    for job in jobs:
        cluster.job_in("COMPLETED", job)


def test_up_mounts_the_folder_that_its_controller_lost(cluster: Cluster, machines: Lab) -> None:
    """While the file server refuses, `up` ends with the host's name, and writes nothing to the empty
    mount point.
    """
    controller = machines.host("node1").inside
    server = machines.host("files").inside
    unit = controller.sh(f"systemd-escape --path --suffix=mount {SHARED.path}").strip()
    controller.sh(f"systemctl stop {unit}")
    (lack,) = cluster.json("status")["controller_lacks"]
    assert lack["code"] == "shared-folder-away"
    server.sh("systemctl stop ssh.service ssh.socket 2>/dev/null || systemctl stop ssh.service")
    try:
        failures = cluster("-o", "json", "up", rc=1).json["failures"]
        assert {failure["host"] for failure in failures} == {"node1"}
        assert controller.sh(f"ls -A {SHARED.path}") == ""
    finally:
        server.sh("systemctl start ssh.service")
    cluster.json("up")
    answer = cluster.json("status")
    assert (answer["ready"], answer["controller_lacks"]) == (True, [])


@pytest.mark.timeout(3 * SILENT_S)
def test_up_and_down_with_a_silent_file_server_name_the_folder_and_end(
    cluster: Cluster, machines: Lab
) -> None:
    """The folder stays mounted, and who looks at it waits: also systemd, whenever it is reloaded."""
    server = machines.host("files").inside
    server.sh(f"kill -STOP $(pgrep -u {SHARED.user})")
    try:
        for verb in (["up"], ["down", "--yes", "--discard"]):
            begun = time.monotonic()
            failures = cluster("-o", "json", *verb, rc=1).json["failures"]
            assert {failure["host"] for failure in failures} >= {"node1"}
            assert all(SHARED.path in failure["cause"] for failure in failures), failures
            assert time.monotonic() - begun < SILENT_S
    finally:
        server.sh(f"kill -CONT $(pgrep -u {SHARED.user})")
    cluster.json("up")
    assert cluster.json("status")["ready"]


def test_down_with_the_file_server_off_releases_the_machines_and_names_the_files(
    cluster: Cluster, machines: Lab
) -> None:
    """The controller has added the cluster's key to those of a user on the folder, and removes it; the
    nodes remove nothing there.
    """
    machines.cut_power(*MACHINES)
    others = [name for name in MACHINES if name != "files"]
    machines.restore_power(*others)
    for name in others:
        eventually(lambda name=name: machines.ssh(name, "true", rc=None).rc == 0, PATIENCE_S)
    try:
        down = cluster("down", "--yes", "--discard", rc=0)
        left = [line for line in down.stderr.splitlines() if "left on" in line]
        (line,) = [line for line in left if SHARED.path in line]
        assert "node1" in line
        assert f"{SHARED.home}/.ssh/authorized_keys" in line
        for name in others:
            assert machines.host(name).inside.sh(f"ls -A {SHARED.path}") == ""
            assert machines.host(name).inside.sh("ls -d /var/lib/clusterctl* || true") == ""
    finally:
        machines.restore_power("files")
