"""`configure.yml` with nothing to change: clusterctl's strategy and Ansible's own, or run here and by nodes.

Raises a cluster of its own, runs both sides in turn, prints every round, medians and their ratio.
Usage: python benchmarks/configure.py [--rounds N]
       python benchmarks/configure.py own [--rounds N] [--nodes N] [--kind KIND]

The second compares, on machines of one's own, a lab's (tests/support/lab.py) of a kind (`debian`, `el`,
...), the phase `converge` of `up --reconfigure` with `ansible: nodes` and with all of Ansible here, and the
processor time of the programs started here. All machines share this one's processors, which real ones don't.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support.clusters import BIN, Cluster, raised
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


def own_machines(rounds: int, nodes: int, kind: str) -> None:
    """Both ways on machines of one's own."""
    sys.path.insert(0, str(ROOT))
    from tests.support.lab import lab  # noqa: PLC0415 - needs root, and this checkout

    has_mirror = not kind.startswith("el")  # its packages are in its image
    with (
        tempfile.TemporaryDirectory(prefix="clusterctl-bench-") as folder,
        lab(kind, nodes + 1, shared="/shared", internet=has_mirror) as one,  # type: ignore[arg-type]
    ):
        cluster = Cluster.new(folder, nodes)

        def converge(where: str) -> float:
            spec = one.spec(cluster.name, provider={"ansible": where})
            (cluster.folder / "cluster.yaml").write_text(spec)
            phases = cluster.run("up", "--yes", "--reconfigure")["phases"]
            return next(float(phase["seconds"]) for phase in phases if phase["phase"] == "converge")

        try:
            print(
                f"first `up`, packages and all, with `ansible: nodes`: converge {converge('nodes'):.1f} s",
                flush=True,
            )
            measure(
                f"converge of `up --reconfigure`, 1 + {nodes} {kind} machines, nothing to change",
                rounds,
                on_the_nodes=lambda: converge("nodes"),
                here=lambda: converge("here"),
            ).show()
        finally:
            cluster.down()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["strategies", "own"], default="strategies")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--kind", default="debian")
    asked = parser.parse_args()
    print(machine(), flush=True)
    if asked.what == "own":
        own_machines(asked.rounds, asked.nodes, asked.kind)
    else:
        strategies(asked.rounds)


if __name__ == "__main__":
    main()
