"""Checks of a command line without its data, GPUs and ranks, on the machine that submits the job.

As a program, this module reads command lines as JSON, each with its number of ranks (null: unknown)
and, if it uses a run, the run's folder on this machine. It prints an error message or null for
each:

    $ echo '[[["train", "--lrr", "0.1"], 2], [["train", "--tp", "3"], 4]]' | python -m payload.training.fit
    ["unrecognized arguments: --lrr 0.1; did you mean --lr?", "--tp 3 x --pp 1 does not divide the 4
    ..."]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from payload.checkpoint.session import refuse_other_settings
from payload.cli.arguments import check, parse_here
from payload.cli.config import (
    BenchConfig,
    EvalConfig,
    ExportConfig,
    PredictConfig,
    SampleConfig,
    TrainConfig,
)
from payload.cli.settings import CommandConfig, make
from payload.comm.base import Solo
from payload.data.datasets import open_dataset
from payload.data.images import facts
from payload.data.text import text_facts
from payload.device.base import CpuDevice
from payload.errors import UsageError
from payload.models import MODELS
from payload.nn.module import LayerContext
from payload.parallel.engine import stages_of
from payload.parallel.mesh import alone, data_parallel_ranks
from payload.saved_model.folder import usable_record
from payload.training.build import build_schedule, build_units, reject_large_batch, run_identity

# Sizes that are assumed for data that is not on this machine: images that any number of patches and
# strides divides, and tokens of bytes.
_SIDE = 32
_VOCABULARY = 256


class _Group(Solo):
    """A group of ranks that do not exist."""

    def __init__(self, size: int) -> None:
        self.size = size


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a data set. training, held_out: number of samples. None and 0: unknown."""

    facts: Mapping[str, int]
    training: int | None = None
    held_out: int = 0


def find_error(argv: Sequence[str], ranks: int | None, run: str | None = None) -> str | None:
    """Return the error in a command line, or None. Config files, which are on the cluster, are not
    read.

    ranks: the number of ranks that run the command. None: not known yet.
    run: the copy on this machine of the run that `train` continues, or of another command's model
        folder. None: no copy.
    """
    try:
        config = parse_here(argv)
        if isinstance(config, EvalConfig) and ranks:
            data_parallel_ranks(ranks, tp=config.tp, pp=config.pp)
        elif isinstance(config, TrainConfig):
            reject_unfit(config, ranks)
        if isinstance(config, BenchConfig) and ranks:
            compared_ranks(config, ranks)
        if run is not None:
            _reject_other_run(config, Path(run))
    except UsageError as exc:
        return str(exc).removesuffix("; see --help")
    return None


def reject_unfit(config: TrainConfig, ranks: int | None) -> None:
    """Raise UsageError if the model does not fit the data or the layout, or the run its number of
    ranks.
    """
    layout = config.layout
    bench = isinstance(config, BenchConfig)
    dp = data_parallel_ranks(ranks, tp=layout.tp, pp=layout.pp) if ranks else None
    if dp and not bench:
        check(config, several=dp > 1)
    data = _sizes_of(config)
    units = build_units(config.model, data, LayerContext(CpuDevice(), tp=_Group(layout.tp)))
    stages_of(units, tp=layout.tp, pp=layout.pp, recompute=layout.recompute)
    samples = data.training or sys.maxsize
    reject_large_batch(config.batch.global_batch_size, samples)
    if not (bench or config.batch.find):
        build_schedule(
            config,
            replace(alone(), dp=_Group(dp or 1)),
            math.ceil(samples / config.batch.global_batch_size),
        )


def _reject_other_run(config: CommandConfig | None, run: Path) -> None:
    """Raise UsageError if a run's model does not fit the command, or `train` can't continue the
    run.
    """
    if isinstance(config, SampleConfig | PredictConfig | EvalConfig | ExportConfig):
        record = usable_record(run, config.weights, takes=config.takes)
        if isinstance(config, EvalConfig) and config.data:
            MODELS[record.model].reject_unfit_data(config.data)
    # A run with --out has its settings in another folder.
    elif (
        isinstance(config, TrainConfig)
        and config.checkpoints.resume == "auto"
        and (file := run / "config.toml").is_file()
    ):
        try:
            earlier = make(TrainConfig, {}, file)
        except UsageError:
            # The file is of another version, or of another program.
            return
        sizes = _sizes_of(config)
        refuse_other_settings(run, run_identity(earlier, sizes), run_identity(config, sizes))


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


def _sizes_of(config: TrainConfig) -> _Sizes:
    """Return the sizes of the data. For files, which are on the cluster, these are sizes that
    fit.
    """
    kind = config.data.data.partition(":")[0]
    if kind == "text":
        return _Sizes(text_facts(_VOCABULARY, config.data.sequence_length))
    if kind == "idx":
        side = _SIDE * (config.model.patch or 1)
        return _Sizes(facts(side, side, 1, 10))
    dataset = open_dataset(config, Solo())
    return _Sizes(dataset.facts, dataset.training, dataset.held_out)


if __name__ == "__main__":
    json.dump([find_error(*line) for line in json.load(sys.stdin)], sys.stdout)
