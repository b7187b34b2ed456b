"""What ``orchestration.large`` starts: a cluster of many nodes on paper, each step timed; prints
JSON.

Python starts anew for it, so that the peak memory is its own. No host is asked: what `up` and
`plan` compute from the spec, and write.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from clusterctl.configure.inventory_file import cluster_variables, inventory_text
from clusterctl.hosts.roles import probe_requests
from clusterctl.scheduler.slurm.conf import render_files
from clusterctl.spec.load import differences, load_spec
from clusterctl.state.inventory import Host, Inventory, job_inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.openssh import write_ssh_files

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJWsqlyNZ2zBT7lD+gy7dPtK9eE3kTvPhPFBEIgEbeJK"
PARTITION = 1000  # hosts that one may have
T = TypeVar("T")


def main(folder: Path, nodes: int) -> None:
    taken: dict[str, float] = {}

    def timed(what: str, call: Callable[[], T]) -> T:
        begun = time.perf_counter()
        found = call()
        taken[what] = time.perf_counter() - begun
        return found

    ranges = [f"n[{first + 1:05}-{first + PARTITION:05}]" for first in range(0, nodes, PARTITION)]
    file = folder / "cluster.yaml"
    lines = [
        "version: 1",
        "name: large",
        "provider:",
        "  type: onprem",
        "  controller: ctl",
        "  hosts:",
    ]
    lines += [
        "    ctl: {address: 10.0.0.1}",
        *(f"    {each}: {{}}" for each in ranges),
        "partitions:",
    ]
    lines += [f"  - {{name: p{number}, hosts: '{each}'}}" for number, each in enumerate(ranges)]
    file.write_text("\n".join([*lines, ""]))
    spec = timed("the spec is read", lambda: load_spec(file))
    names = ["ctl", *(name for partition in spec.partitions for name in spec.node_names(partition))]
    assert len(names) == 1 + nodes
    hosts = tuple(
        Host(
            name=name,
            address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            roles=("compute",) if number else ("controller",),
            partition=f"p{(number - 1) // PARTITION}" if number else None,
            host_key=KEY,
            cpus=64,
            memory_mib=256_000,
        )
        for number, name in enumerate(names)
    )
    place = {
        "cluster": "large",
        "cluster_id": "a1b2c3",
        "provider": "onprem",
        "network": "10.0.0.0/8",
    }
    inventory = Inventory(**place, hosts=hosts, shared="/shared", baked=False, job_user="hpc")  # type: ignore[arg-type]
    workspace = Workspace(folder / "workspace")
    workspace.create()
    workspace.create_secrets()
    timed("hosts.json", lambda: workspace.inventory.write_text(inventory.text))
    assert timed("hosts.json read", lambda: Inventory.read(workspace.inventory.read_bytes()))
    assert timed("hosts.json read as verbs do", lambda: job_inventory(workspace))
    timed("ssh_config and known_hosts", lambda: write_ssh_files(inventory, workspace))
    files = timed("Slurm's files", lambda: render_files(spec, inventory, {}))
    assert files["slurm.conf"].count("NodeName=") >= 1
    text = timed(
        "Ansible's inventory",
        lambda: inventory_text(inventory, workspace, cluster_variables(spec, inventory, workspace)),
    )
    assert names[-1] in text
    assert len(timed("what to probe", lambda: probe_requests(spec, inventory, workspace))) == len(
        names
    )
    assert not timed("the spec compared", lambda: differences(spec, spec))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(json.dumps({"taken": taken, "peak_mib": peak / 1024}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
