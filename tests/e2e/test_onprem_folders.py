"""On-prem machines with a shared folder across hosts, and the same machines without one.

The folder is on one host, and the others mount it by sshfs: the kernel that runs the tests has no
NFS.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.own import SharedFolder
from tests.support.cluster import Cluster
from tests.support.lab import Lab, lab
from tests.support.verbs import Clusterctl

pytestmark = [pytest.mark.sweep, pytest.mark.platform("stand-in", "nfs")]  # minutes

FOLDER = "/srv/cluster"
USER = "hpc"
UID = 10000
SHARED = SharedFolder(FOLDER, USER, UID)
# Each node writes a file under its own name, and looks for those of the others.
JOB = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
srun bash -c 'cat given.txt; echo "made on $SLURMD_NODENAME" >"by-$SLURMD_NODENAME.txt"'
srun bash -c 'echo $SLURMD_NODENAME sees by-*.txt'
"""


@pytest.fixture(scope="module")
def machines(no_residue: None) -> Iterator[Lab]:
    """As in many a lab, the people's accounts are there already."""
    with lab("debian", 3, internet=True, options=["--bind=/dev/fuse"]) as one:
        first, *others = one.hosts
        source = SHARED.serve(one, first)
        for host in others:
            mount = f"sshfs -o {SHARED.options} {source} {FOLDER}"
            host.inside.sh(
                f"systemd-run --quiet --unit=cluster-folder --property=Type=forking {mount}"
            )
            assert host.inside.sh(f"stat -f -c %T {FOLDER}").strip() == "fuseblk"
        yield one


def write_spec(cluster: Cluster, machines: Lab, kind: str) -> None:
    shared = {"kind": kind, "path": FOLDER}
    users = [{"name": USER, "uid": UID}]
    cluster.spec.write_text(machines.spec(cluster.name, provider={"shared": shared}, users=users))


@pytest.fixture(scope="module")
def mine(
    machines: Lab,
    cluster_name: str,
    clusterctl_home: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Cluster:
    cwd = tmp_path_factory.mktemp("folders")
    one = Cluster(cluster_name, cwd / "cluster.yaml", Clusterctl(clusterctl_home, cwd), {})
    write_spec(one, machines, "existing")
    return one


def raised(cluster: Cluster) -> dict[str, Any]:
    """Return the answer of `up`. Packages come through a slow proxy."""
    return dict(cluster("-o", "json", "up", "--yes", timeout_s=580).json)


def run_job(cluster: Cluster) -> tuple[Path, set[str]]:
    """Return the run of JOB on both nodes, and the lines that it wrote."""
    folder = cluster.runner.cwd / "job"
    folder.mkdir(exist_ok=True)
    (folder / "given.txt").write_text("given\n")
    (folder / "job.sh").write_text(JOB)
    job = cluster.json("submit", folder / "job.sh", "--wait")
    run = cluster.run_of(job["job_id"])
    return run, set((run / "stdout.log").read_text().splitlines())


def test_shared_folder_across_hosts_is_used(mine: Cluster) -> None:
    assert raised(mine)["probed"] == ["node2", "node3"]
    run, lines = run_job(mine)
    both = "by-node2.txt by-node3.txt"
    assert lines == {"given", f"node2 sees {both}", f"node3 sees {both}"}
    assert {path.name for path in run.glob("by-*")} == {"by-node2.txt", "by-node3.txt"}


def test_shared_folder_that_differs_on_a_host_is_refused(mine: Cluster, machines: Lab) -> None:
    machines.host("node3").inside.sh(f"umount {FOLDER}")
    (failure,) = mine.json("up", "--yes", rc=1)["failures"]
    assert failure["host"] == "node3"
    assert f"{FOLDER} on node3 " in failure["cause"]


def test_cluster_without_shared_folder_runs_and_collects(mine: Cluster, machines: Lab) -> None:
    machines.host("node2").inside.sh(f"umount {FOLDER}")
    write_spec(mine, machines, "none")
    assert raised(mine)["probed"] == ["node2", "node3"]
    run, lines = run_job(mine)
    assert lines == {"given", "node2 sees by-node2.txt", "node3 sees by-node3.txt"}
    found = {path.name: path.read_text() for path in run.glob("by-*")}
    assert found == {f"by-{node}.txt": f"made on {node}\n" for node in ("node2", "node3")}
    assert {path.stem for path in run.glob("telemetry/*.jsonl")} == {"node2", "node3"}


def test_down_keeps_files_of_users(mine: Cluster, machines: Lab) -> None:
    mine("down", "--yes")
    assert machines.host("node1").inside.sh(f"stat -c %U {SHARED.home}").strip() == USER
