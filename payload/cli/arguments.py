"""Command lines of ``python -m payload``: they are parsed, and their settings checked against each other.

As a program it checks command lines without running them: JSON in, JSON out.

    $ echo '[["train", "--lrr", "0.1"], ["gemm"]]' | python -m payload.cli.arguments
    ["unrecognized arguments: --lrr 0.1; did you mean --lr?", null]

Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from payload.cli.config import COMMANDS, AllreduceConfig, BenchConfig, EvalConfig, ExportConfig, TrainConfig
from payload.cli.settings import Command, make, parser_of, refuse_idle
from payload.errors import UsageError
from payload.models import MODELS

Rule = tuple[bool, str, str]
"""Whether settings have an effect, their fields by spaces, and when they have one in words."""


@cache
def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    return parser_of(COMMANDS, TrainConfig)


def parse(argv: Sequence[str]) -> Any:
    """Read a command line, and the config file that it names.

    Raises:
        UsageError: one of them is wrong.
        SystemExit: it asked for help, which was printed.
    """
    flags = vars(parser().parse_args(argv))
    return make(COMMANDS[flags.pop("command")], flags, flags.pop("config", None))


def check(config: Command, *, several: bool | None = None, gpu: bool | None = None) -> None:
    """Check settings against each other.

    Args:
        several: whether there are several data-parallel ranks. None: not known yet.
        gpu: whether ranks compute on GPUs. None: not known yet.

    Raises:
        UsageError: two settings contradict each other, or one that was given would have no effect.
    """
    if isinstance(config, TrainConfig):
        _refuse_contradictions(config)
        for useful, fields, wanted in _launch_rules(config, several, gpu):
            if not useful:
                refuse_idle(config, fields, wanted, in_files=False)
        for useful, fields, wanted in _rules(config):
            if not useful:
                refuse_idle(config, fields, wanted)
    elif isinstance(config, AllreduceConfig) and "mpi" not in config.comm:
        refuse_idle(config, "cuda_aware", "with --comm mpi")
    elif isinstance(config, EvalConfig | ExportConfig) and not config.model_folder:
        refuse_idle(config, "weights", "with --model-folder")


def _refuse_contradictions(config: TrainConfig) -> None:
    optimizer, layout, precision = config.optimizer, config.layout, config.precision
    complaint = ""
    if optimizer.schedule == "step" and not optimizer.decay_iterations:
        complaint = "--schedule step: it lowers the learning rate after --decay-iterations; say which"
    elif layout.compress != "none" and layout.zero:
        complaint = (
            f"--compress {layout.compress} and --zero {layout.zero}: what is compressed is not in parts"
        )
    elif layout.compress != "none" and precision.precision == "fp16" and not precision.loss_scale:
        complaint = (
            f"--compress {layout.compress} and --precision fp16: what is held back is a multiple of the loss "
            "scale, which must not change then: give a fixed --loss-scale, or use --precision bf16"
        )
    if complaint:
        raise UsageError(complaint, code="bad-settings")


def _launch_rules(config: TrainConfig, several: bool | None, gpu: bool | None) -> tuple[Rule, ...]:
    """Flags that have an effect in some launches only. A config file may hold them for another launch."""
    bench, find = isinstance(config, BenchConfig), config.batch.find
    of_training = (
        "epochs iterations lr schedule warmup_iterations min_lr decay_iterations decay_factor scale_lr "
        "save_interval save keep init new_head save_model profile profile_iterations tensorboard"
    )
    of_ranks = "zero bucket_mib overlap compress scale_lr"
    return (
        (not bench and not find, of_training, "in training"),
        (not bench, "prefetch find checkpoints resume", "in training and with --find"),
        (bench or not find, "compress compress_ratio compress_rank peak_tflops", "in training and bench"),
        (
            several is not False,
            of_ranks,
            "on two or more data-parallel ranks",
        ),
        (gpu is not False, "offload_optimizer", "on GPUs"),
    )


def _rules(config: TrainConfig) -> tuple[Rule, ...]:
    """Flags and keys that have an effect with some other settings only."""
    layout, optimizer, files = config.layout, config.optimizer, config.checkpoints
    takes, kind = MODELS[config.model.model].takes, config.data.data.partition(":")[0]
    resumes = bool(files.save_interval) or files.resume == "auto"
    return (
        (takes != "images", "sequence_length", "with a --model of text"),
        (takes == "images", "new_head", "with a --model of images"),
        (kind == "text", "tokenizer", "with --data text:FILE"),
        (kind in ("digits", "idx"), "augment clean", "with images, --data digits or idx:DIR"),
        (layout.zero < 2, "overlap", "with --zero 0 or 1"),  # noqa: PLR2004
        (layout.comm == "mpi", "cuda_aware", "with --comm mpi"),
        (layout.compress == "topk", "compress_ratio", "with --compress topk"),
        (layout.compress == "powersgd", "compress_rank", "with --compress powersgd"),
        (optimizer.optimizer == "sgd", "momentum nesterov", "with --optimizer sgd"),
        (optimizer.momentum > 0, "nesterov", "with a --momentum above 0"),
        (optimizer.optimizer != "sgd", "beta1 beta2 eps", "with --optimizer adamw or lamb"),
        (optimizer.schedule != "constant", "min_lr", "with --schedule cosine or step"),
        (optimizer.schedule == "step", "decay_iterations decay_factor", "with --schedule step"),
        (bool(files.save_interval), "save keep", "with --save-interval"),
        (resumes, "checkpoints", "with --save-interval or --resume auto"),
        (files.init is not None, "new_head", "with --init"),
        (config.measuring.profile, "profile_iterations", "with --profile"),
    )


def wrong_with(argv: Sequence[str]) -> str | None:
    """What is wrong with a command line, as far as that shows without the files that it names."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            flags = vars(parser().parse_args(argv))
        command = COMMANDS[flags.pop("command")]
        if flags.pop("config", None) is None:  # the file is the node's
            check(make(command, flags))
    except SystemExit:  # the help is wanted
        return None
    except UsageError as exc:
        program = f"{parser().prog} {argv[0]}" if argv else parser().prog
        return str(exc).removeprefix(f"{program}: ").removesuffix(f"; see `{program} --help`")
    return None


if __name__ == "__main__":
    json.dump([wrong_with(argv) for argv in json.load(sys.stdin)], sys.stdout)
