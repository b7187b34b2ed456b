"""Checks of a command line without its data, GPUs and ranks, on the machine that submits the job.

Standard library only: what depends on the sizes of a model or of data, the program itself checks
when it starts. As a program, this module reads command lines as JSON, each with its number of ranks
(null: unknown) and, if it uses a run, the run's folder on this machine. It prints an error message
or null for each:

    $ echo '[[["train", "--lrr", "0.1"], 2], [["train", "--tp", "3"], 4]]' | python -m payload.training.fit
    ["unrecognized arguments: --lrr 0.1; did you mean --lr?", "--tp 3 x --pp 1 does not divide the 4
    ..."]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from payload.checkpoint.identity import identity_of_settings, refuse_other_settings
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
from payload.errors import UsageError
from payload.models import MODELS
from payload.parallel.ranks import compared_ranks, data_parallel_ranks
from payload.saved_model.record import usable_record
from payload.training.schedule import build_schedule


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
            _reject_unfit(config, ranks)
        if isinstance(config, BenchConfig) and ranks:
            compared_ranks(config, ranks)
        if run is not None:
            _reject_other_run(config, Path(run))
    except UsageError as exc:
        return str(exc).removesuffix("; see --help")
    return None


def _reject_unfit(config: TrainConfig, ranks: int | None) -> None:
    """Raise UsageError if the layout does not fit the number of ranks, or the learning rate the
    length of the run.
    """
    layout = config.layout
    bench = isinstance(config, BenchConfig)
    workers = data_parallel_ranks(ranks, tp=layout.tp, pp=layout.pp) if ranks else None
    if workers and not bench:
        check(config, several=workers > 1)
    if not (bench or config.batch.find):
        # The number of samples is not known, so only --iterations can be too few.
        build_schedule(config, workers or 1, sys.maxsize)


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
        refuse_other_settings(run, identity_of_settings(earlier), identity_of_settings(config))


if __name__ == "__main__":
    json.dump([find_error(*line) for line in json.load(sys.stdin)], sys.stdout)
