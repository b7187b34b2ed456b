"""`configure.yml` on a live cluster with nothing to change: clusterctl's strategy against Ansible's own.

Raises a cluster of its own, runs both sides in turn, prints every round, medians and their ratio.
Usage: python benchmarks/configure.py [ROUNDS]
"""

from __future__ import annotations

import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def main() -> None:
    """Measure."""
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
