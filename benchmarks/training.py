"""The bundled training program against PyTorch's DistributedDataParallel with gloo, 2 ranks of 1 thread each.

Both sides live in the same processes, start from the same weights, see the same data and take turns; their
losses must agree. Usage: python benchmarks/training.py [--rounds N] [WHAT...]
WHAT: mlp, gpt, resnet (a training step of each); allreduce (also against a bare mpi4py Allreduce, and what
compressors send); checkpoint (for how long one stops training); memory (under each stage of ZeRO, 4 ranks).
Default: all. Needs what `scripts/bootstrap` installs, PyTorch too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.support import allreduce as sums
from benchmarks.support import ranks
from benchmarks.support.rounds import machine
from benchmarks.support.stalls import stalls

SUPPORT = "benchmarks.support"


def step(model: str, rounds: int) -> None:
    print(ranks.run(f"{SUPPORT}.steps", model, rounds), end="")


def allreduce(rounds: int) -> None:
    compared, wire = sums.compare(rounds)
    for one in compared:
        one.show()
    sums.show_wire(wire)


def memory(_: int) -> None:
    print(ranks.run(f"{SUPPORT}.memory", ranks=4), end="")


PARTS: dict[str, Callable[[int], None]] = {
    "mlp": lambda rounds: step("mlp", rounds),
    "gpt": lambda rounds: step("gpt", rounds),
    "resnet": lambda rounds: step("resnet", rounds),
    "allreduce": allreduce,
    "checkpoint": lambda rounds: stalls(max(1, rounds // 3)).show(),
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=[*PARTS, []], default=[], metavar="WHAT")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(machine())
    for what in options.what or PARTS:
        PARTS[what](options.rounds)


if __name__ == "__main__":
    main()
