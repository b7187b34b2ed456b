"""Numbers of ranks that fit a layout. Standard library only: also checked where a job is submitted."""

from __future__ import annotations

from collections.abc import Sequence

from payload.cli.config import BenchConfig
from payload.errors import UsageError


def data_parallel_ranks(ranks: int, *, tp: int, pp: int) -> int:
    """Return the number of data-parallel ranks. Raise UsageError if tp x pp does not divide
    ``ranks``.
    """
    dp, remainder = divmod(ranks, tp * pp)
    if remainder:
        raise UsageError(
            f"--tp {tp} x --pp {pp} does not divide the {ranks} ranks; start a multiple of "
            f"{tp * pp}",
            code="ranks-not-divisible",
        )
    return dp


def compared_ranks(config: BenchConfig, size: int) -> Sequence[int]:
    """Return the numbers of ranks with which a benchmark on ``size`` ranks is compared.

    Raises UsageError if a number in ``--ranks`` does not fit the job or the layout.
    """
    smallest = config.layout.tp * config.layout.pp
    counts = config.bench.ranks or [
        smallest << power for power in range(32) if smallest << power < size
    ]
    for ranks in counts:
        if ranks > size:
            raise UsageError(
                f"--ranks {ranks}: this job has only {size} ranks", code="too-few-ranks"
            )
        if ranks % smallest:
            raise UsageError(
                f"--ranks {ranks} is not a multiple of --tp x --pp, which is {smallest}",
                code="ranks-not-divisible",
            )
    return counts
