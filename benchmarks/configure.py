"""`configure.yml` with nothing to change, with clusterctl's strategy and with Ansible's own.

Raises a cluster of its own, runs both sides in turn, prints every round, medians and their ratio.
Usage: python benchmarks/configure.py [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from support.clusters import BIN, raised
from support.rounds import machine, measure

ROOT = Path(__file__).resolve().parents[1]


def strategies(rounds: int) -> None:
    """Plain `ansible-playbook` with both strategies; all else is the same."""
    with raised(2) as cluster:
        settings = {
            "ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"),
            "ANSIBLE_STRATEGY_PLUGINS": str(ROOT / "ansible/strategy_plugins"),
        }
        argv = [
            BIN / "ansible-playbook",
            "-i",
            cluster.workspace / "inventory.yml",
            ROOT / "ansible/configure.yml",
        ]

        def play(strategy: str) -> None:
            environ = {**os.environ, **settings, "ANSIBLE_STRATEGY": strategy}
            subprocess.run(argv, env=environ, check=True, stdout=subprocess.DEVNULL)

        measure(
            "configure.yml on 1 + 2 local nodes, nothing to change",
            rounds,
            clusterctl_linear=lambda: play("clusterctl_linear"),
            linear=lambda: play("linear"),
        ).show()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(machine(), flush=True)
    strategies(asked.rounds)


if __name__ == "__main__":
    main()
