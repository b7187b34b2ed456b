"""The bundled training program against PyTorch's DistributedDataParallel with gloo, ranks of 1
thread each.

Both sides live in the same processes, start from the same weights, see the same data and take
turns; their losses must agree as far as float32 allows. Variables that choose kernels (such as
OPENBLAS_CORETYPE) are unset, and the kernels in use are printed.

Usage: python benchmarks/training.py [--rounds N] [--ranks N] [--avx2] [WHAT...]
WHAT: mlp, gpt, resnet (a training step of each, on 2 ranks or --ranks); allreduce (also against a
bare mpi4py Allreduce, and what compressors send); checkpoint (for how long one stops training);
memory (under each stage of ZeRO, 4 ranks). Default: all. Needs what `scripts/bootstrap` installs,
PyTorch too. --avx2: in training steps, both sides use AVX2 and not AVX-512, as on a processor
without AVX-512.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.support import allreduce as sums
from benchmarks.support import ranks
from benchmarks.support.rounds import machine
from benchmarks.support.stalls import stalls

SUPPORT = "benchmarks.support"


def step(model: str, options: argparse.Namespace) -> None:
    arguments = (f"{SUPPORT}.steps", model, options.rounds)
    print(ranks.run(*arguments, ranks=options.ranks, avx2=options.avx2), end="")


def allreduce(options: argparse.Namespace) -> None:
    compared, wire = sums.compare(options.rounds)
    for one in compared:
        one.show()
    sums.show_wire(wire)


def memory(_: argparse.Namespace) -> None:
    print(ranks.run(f"{SUPPORT}.memory", ranks=4), end="")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "mlp": lambda options: step("mlp", options),
    "gpt": lambda options: step("gpt", options),
    "resnet": lambda options: step("resnet", options),
    "allreduce": allreduce,
    "checkpoint": lambda options: stalls(max(1, options.rounds // 3)).show(),
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=[*PARTS, []], default=[], metavar="WHAT")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--avx2", action="store_true")
    options = parser.parse_args()
    print(machine())
    for what in options.what or PARTS:
        PARTS[what](options)


if __name__ == "__main__":
    main()
