"""How long many short tasks take: packed into a job, by GNU parallel in a job, and as an array.

Raises a cluster of its own with two nodes, runs the sides in turn, and prints every round, medians,
ratios, and the calls that slurmctld got (`sdiag`). GNU parallel runs on each node with a fixed half
of the tasks, and keeps the output and the end of each task, as --pack does.

Usage: python benchmarks/packed.py [--rounds N] [--tasks N] [--seconds S] [--without-array]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from support.clusters import Cluster, raised
from support.rounds import machine, measure

NODES = 2
SPEC = "software: {packages: [parallel]}\n"
BY_HAND = """#!/bin/bash
srun --ntasks-per-node=1 --cpu-bind=none bash -c 'seq "$SLURM_NODEID" {nodes} {last} |
    parallel --jobs "$SLURM_CPUS_ON_NODE" --retries 2 --joblog "ends-$SLURM_NODEID" \\
        --results "output-$SLURM_NODEID" bash task.sh'
"""


def calls(cluster: Cluster) -> int:
    """The messages that slurmctld has got since it has started."""
    text = cluster.ssh("sdiag")
    return sum(
        map(
            int,
            re.findall(r"^\t\w+ +\( *\d+\) count:(\d+)", text.partition("type")[2], re.MULTILINE),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--without-array", action="store_true")
    given = parser.parse_args()
    with raised(NODES, SPEC) as cluster:
        folder = cluster.folder / "tasks"
        folder.mkdir()
        script = folder / "task.sh"
        script.write_text(f"#!/bin/bash\nsleep {given.seconds}\n")
        by_hand = folder / "by-hand.sh"
        by_hand.write_text(BY_HAND.format(nodes=NODES, last=given.tasks - 1))
        array = ("--array", f"0-{given.tasks - 1}")
        asked: dict[str, list[int]] = {"packed": [], "parallel": [], "array": []}

        def side(name: str, *words: str) -> Callable[[], None]:
            def run() -> None:
                before = calls(cluster)
                cluster.run("submit", *words, "--wait")
                asked[name].append(calls(cluster) - before)

            return run

        nodes = ("--nodes", str(NODES))
        sides = {
            "packed": side("packed", str(script), *array, "--pack", *nodes),
            "parallel": side("parallel", str(by_hand), *nodes, "--slurm=--exclusive"),
        }
        if not given.without_array:
            sides["array"] = side("array", str(script), *array)
        title = f"{given.tasks} tasks of {given.seconds:g} s on {NODES} nodes"
        measured = measure(title, given.rounds, **sides)
        for name in sides:
            measured.notes.append(f"calls of slurmctld, {name}: {asked[name]}")
        measured.show()
    print(machine())


if __name__ == "__main__":
    main()
