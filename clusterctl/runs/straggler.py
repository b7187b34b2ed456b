"""Names the node that keeps the others waiting, by how long each rank of `train` computed per step."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

# A straggler takes this much longer than the others at the median, and is the slowest so often that a fair
# node would be with less than this probability.
_SLOWER: Final = 1.2
_BY_CHANCE: Final = 1e-4


def compare_ranks(
    means: Sequence[float], slowest: Sequence[float], windows: int, hosts: Sequence[str]
) -> str:
    """How the ranks compare, in words: the straggler is a node, or a rank where all are on one node.

    ``means`` are milliseconds of computing per step, ``slowest`` the windows of ten steps in which no rank
    took longer, ``hosts`` the nodes, all by rank; ``windows`` is how many there were. How likely a fair node
    is the slowest in so many is bounded as Chernoff and Hoeffding do: exp(-n KL(share || fair)).
    """
    names = hosts if len({*hosts}) > 1 else [f"rank {rank}" for rank in range(len(means))]
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, name in enumerate(names):
        ranks[name].append(rank)
    worst = max(ranks, key=lambda name: sum(slowest[rank] for rank in ranks[name]))
    share = sum(slowest[rank] for rank in ranks[worst]) / windows
    fair = len(ranks[worst]) / len(means)
    own = sum(means[rank] for rank in ranks[worst]) / len(ranks[worst])
    others = statistics.median(means[rank] for name in ranks if name != worst for rank in ranks[name])
    if own >= _SLOWER * others and windows * _divergence(share, fair) >= -math.log(_BY_CHANCE):
        return (
            f"{worst} is a straggler: it computed {own:.5g} ms per step, the others {others:.5g} ms, "
            f"and it was the slowest in {100 * share:.0f} % of {windows} windows of ten steps"
        )
    too_few = windows * _divergence(1.0, fair) < -math.log(_BY_CHANCE)
    found = "too few steps to tell a straggler" if too_few else "no node is a straggler"
    return f"ranks computed {min(means):.5g} to {max(means):.5g} ms per step; {found}"


def _divergence(share: float, fair: float) -> float:
    """The Kullback-Leibler divergence of two probabilities of one event; 0 where it is no more than fair."""
    parts = ((share, fair), (1 - share, 1 - fair))
    return sum(a * math.log(a / b) for a, b in parts if a > 0) if share > fair else 0.0
