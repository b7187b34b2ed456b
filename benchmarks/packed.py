"""How long many short tasks take: packed into a job, as an array, and by xargs in a job by hand.

Raises a cluster of its own with two nodes, runs the sides in turn, and prints every round, medians,
ratios, and the calls that slurmctld got (`sdiag`). xargs gets a fixed half of the tasks on each
node, and neither has folders, logs and records of the tasks nor repeats those that fail.

Usage: python benchmarks/packed.py [--rounds N] [--tasks N] [--seconds S] [--without-array]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from support.clusters import Cluster, raised
from support.rounds import machine, measure

NODES = 2
BY_HAND = """#!/bin/bash
srun --ntasks-per-node=1 bash -c 'seq 1 {half} | xargs -P "$(scontrol show node "$SLURMD_NODENAME" |
    sed -n "s/.*CPUTot=\\([0-9]*\\).*/\\1/p")" -I% sleep {seconds}'
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
    with raised(NODES) as cluster:
        script = cluster.folder / "task.sh"
        script.write_text(f"#!/bin/bash\nsleep {given.seconds}\n")
        by_hand = cluster.folder / "by-hand.sh"
        by_hand.write_text(BY_HAND.format(half=given.tasks // NODES, seconds=given.seconds))
        array = ("--array", f"0-{given.tasks - 1}")
        asked: dict[str, list[int]] = {"packed": [], "array": [], "xargs": []}

        def side(name: str, *words: str) -> Callable[[], None]:
            def run() -> None:
                before = calls(cluster)
                cluster.run("submit", *words, "--no-folder", "--wait")
                asked[name].append(calls(cluster) - before)

            return run

        nodes = ("--nodes", str(NODES))
        sides = {
            "packed": side("packed", str(script), *array, "--pack", *nodes),
            "xargs": side("xargs", str(by_hand), *nodes),
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
