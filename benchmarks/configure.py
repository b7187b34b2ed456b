"""`configure.yml` on a live cluster with nothing to change: clusterctl's strategy against Ansible's own.

Raises a cluster of its own, runs both sides in turn, prints every round, medians and their ratio.
Usage: python benchmarks/configure.py [ROUNDS]
       python benchmarks/configure.py own [ROUNDS [NODES]]

The second compares, on machines of one's own (a lab's, Debian), `up --reconfigure` with all of Ansible run
here and with nodes that run it themselves: processor time of the programs started here, and the phase in
seconds. All machines share the processors of this one, which real ones don't.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
SPEC = "version: 1\nname: {name}\nprovider: {{type: local}}\npartitions:\n  - {{name: train, nodes: 2}}\n"


def environment(strategy: str) -> dict[str, str]:
    """Ansible's environment for one side; everything else is the same."""
    return {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"),
        "ANSIBLE_STRATEGY_PLUGINS": str(ROOT / "ansible/strategy_plugins"),
        "ANSIBLE_STRATEGY": strategy,
    }


def seconds(inventory: Path, strategy: str) -> float:
    """One run of the playbook, in seconds."""
    start = time.perf_counter()
    subprocess.run(
        [BIN / "ansible-playbook", "-i", inventory, ROOT / "ansible/configure.yml"],
        env=environment(strategy),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


SIDES: Final = ("here", "nodes")


def children_s() -> float:
    """The processor time of the programs that were started here and have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def own_machines(rounds: int, nodes: int) -> None:
    """Measure both ways on machines of one's own."""
    sys.path.insert(0, str(ROOT))
    from tests.support.lab import lab  # noqa: PLC0415 - needs root, and this checkout

    with (
        tempfile.TemporaryDirectory() as folder,
        lab("debian", nodes + 1, shared="/shared", internet=True) as one,
    ):
        environ, file = {**os.environ, "CLUSTERCTL_HOME": folder}, Path(folder, "cluster.yaml")
        name = f"b{secrets.token_hex(3)}"

        def run(side: str, *words: str) -> str:
            file.write_text(one.spec(name, provider={"ansible": side}))
            argv = [BIN / "clusterctl", "-o", "json", "-f", file, *words]
            return subprocess.run(argv, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout

        try:
            run("nodes", "up", "--yes")
            for _ in range(rounds):
                for side in SIDES:
                    before = children_s()
                    phases = json.loads(run(side, "up", "--yes", "--reconfigure"))["phases"]
                    spent = children_s() - before
                    (took,) = (phase["seconds"] for phase in phases if phase["phase"] == "converge")
                    load = os.getloadavg()[0]
                    print(
                        f"{side:5} processor {spent:6.1f} s   converge {took:6.1f} s   load {load:.1f}",
                        flush=True,
                    )
        finally:
            run("here", "down", "--yes", "--discard")


def main() -> None:
    """Measure."""
    if sys.argv[1:2] == ["own"]:
        rounds, nodes = (int(given) for given in (*sys.argv[2:4], *("2", "16")[len(sys.argv) - 2 :]))
        own_machines(rounds, nodes)
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    name = f"b{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "CLUSTERCTL_HOME": folder}
        file = Path(folder, "cluster.yaml")
        file.write_text(SPEC.format(name=name))
        command = [BIN / "clusterctl", "-f", file]
        subprocess.run([*command, "up"], env=environ, check=True, stdout=subprocess.DEVNULL)
        try:
            times: dict[str, list[float]] = {"clusterctl_linear": [], "linear": []}
            for _ in range(rounds):
                for strategy, taken in times.items():
                    taken.append(seconds(Path(folder, name, "inventory.yml"), strategy))
        finally:
            subprocess.run([*command, "down", "--yes"], env=environ, check=True, stdout=subprocess.DEVNULL)
    for strategy, taken in times.items():
        shown = " ".join(f"{t:.2f}" for t in taken)
        print(f"{strategy:17} median {statistics.median(taken):6.2f} s   rounds {shown}")
    ratio = statistics.median(times["linear"]) / statistics.median(times["clusterctl_linear"])
    print(f"ratio             linear / clusterctl_linear = {ratio:.2f}   ({rounds} rounds, 1 + 2 nodes)")


if __name__ == "__main__":
    main()
