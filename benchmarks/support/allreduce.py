"""Sums of two ranks: the payload's, a bare mpi4py Allreduce's, and PyTorch's over gloo; compressed
sums.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.support.ranks import run

RANKS = 2
OURS = "payload"
BARE = "mpi4py Allreduce"
GLOO = "torch gloo"
AIMS = {BARE: 1.0, GLOO: 3.0}


@dataclass(frozen=True)
class Compared:
    """Seconds a sum in every round, by side, of arrays of one size."""

    nbytes: int
    rounds: Mapping[str, list[float]]

    def ratio(self, other: str) -> float:
        """The other's median over ours: above 1, ours is faster."""
        return statistics.median(self.rounds[other]) / statistics.median(self.rounds[OURS])

    def best_ratio(self, other: str) -> float:
        """The same of the best rounds, which other work on the machine disturbs least."""
        return min(self.rounds[other]) / min(self.rounds[OURS])

    def show(self) -> None:
        print(f"\nallreduce of {self.nbytes:,} bytes, {RANKS} ranks")
        for side, taken in self.rounds.items():
            shown = " ".join(f"{seconds * 1e6:.1f}" for seconds in taken)
            print(f"  {side:18} median {statistics.median(taken) * 1e6:10.1f} us   rounds {shown}")
        for other, aim in AIMS.items():
            ratios = f"{self.ratio(other):.2f} (best rounds {self.best_ratio(other):.2f})"
            print(f"  {other} / payload = {ratios}   (aim: {aim:.1f})")


def compare(rounds: int = 15) -> tuple[list[Compared], dict[str, dict[str, float]]]:
    """Arrays of 4 KiB to 256 MiB; and by compressor, or ``none``, the bytes that a rank sends for
    gradients of 5.8 million parameters, those of an MLP, and the seconds that it takes on this
    machine."""
    found = json.loads(run("benchmarks.support.allreduce_ranks", rounds, ranks=RANKS))
    return [Compared(one["nbytes"], one["rounds"]) for one in found["sizes"]], found["wire"]


def show_wire(wire: Mapping[str, Mapping[str, float]]) -> None:
    """What each compressor saves on the wire, and costs in time on one machine."""
    print(f"\ncompressed gradients of an MLP, {RANKS} ranks")
    for name, one in wire.items():
        share = one["bytes"] / wire["none"]["bytes"]
        print(
            f"  {name:9} {one['bytes']:12,.0f} bytes a rank ({share:7.2%})   "
            f"{one['seconds'] * 1e3:8.2f} ms"
        )
