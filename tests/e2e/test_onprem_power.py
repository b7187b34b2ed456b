"""All machines of an on-prem cluster lose power, and come back.

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

pytestmark = pytest.mark.platform("stand-in", "nfs")

SHARED = SharedFolder("/srv/cluster", "hpc", 10000)
MACHINES = ("files", "node1", "node2", "node3")
NODES = ("node2", "node3")
PATIENCE_S = 180
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


def test_nodes_are_idle_after_a_power_cut_and_no_job_is_lost(
    cluster: Cluster, machines: Lab
) -> None:
    """The controller comes last, so that all others wait for it."""
    jobs = submit(cluster)
    machines.cut_power(*MACHINES)
    machines.restore_power("files", *NODES)
    time.sleep(20)
    machines.restore_power("node1")
    eventually(lambda: idle_nodes(cluster) == {*NODES}, PATIENCE_S, pause_s=1)
    for job in jobs:
        cluster.job_in("COMPLETED", job)
    assert cluster("doctor", rc=0)


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
