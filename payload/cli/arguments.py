"""Parsing of the command lines of ``python -m payload``, and checks of settings against each other.

Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from dataclasses import MISSING, Field
from functools import cache
from typing import Any, NoReturn

from payload.cli.config import (
    COMMANDS,
    AllreduceConfig,
    BenchConfig,
    EvalConfig,
    ExportConfig,
    GemmConfig,
    TrainConfig,
)
from payload.cli.settings import (
    CommandConfig,
    did_you_mean,
    make,
    refuse_without_effect,
    sections_of,
    settings_of,
    text_of,
)
from payload.cli.values import input_path, yes_or_no
from payload.errors import UsageError
from payload.models import MODELS


class _Parser(argparse.ArgumentParser):
    """A parser that raises an exception on errors. argparse itself would print and exit on every
    rank.
    """

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help", code="bad-flag")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse. For an unknown flag, the error suggests a similar flag of the
        command.
        """
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown


@cache
def parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m payload", description="Train, test and monitor on a cluster's nodes."
    )
    subparsers = parser.add_subparsers(
        required=True, dest="command", metavar=f"{{{','.join(COMMANDS)}}}"
    )
    for name, command in COMMANDS.items():
        sub = subparsers.add_parser(
            name, help=command.__doc__, description=command.__doc__, allow_abbrev=False
        )
        groups: dict[str, argparse._ActionsContainer] = {"": sub}
        for section, kind in sections_of(command).items():
            groups[section] = sub.add_argument_group((kind.__doc__ or "").rstrip("."))
        for section, setting in settings_of(command).values():
            _add_flag(groups[section], setting)
        if command is TrainConfig:
            about = "TOML file with any of these settings; flags override it"
            sub.add_argument("--config", type=input_path.read, metavar="FILE", help=about)
    return parser


def _add_flag(group: argparse._ActionsContainer, setting: Field[Any]) -> None:
    """Add the flag of a setting. The parsed namespace contains the setting only if the user gave
    the flag.
    """
    kind = setting.metadata["kind"]
    about = setting.metadata["about"]
    default = setting.default
    if default not in (None, (), MISSING):
        about += f" (default {text_of(default).replace('%', '%%')})"
    value_options = {"type": kind.read, "metavar": setting.metadata["metavar"], "help": about}
    flag: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS}
    option = f"--{setting.name.replace('_', '-')}"
    if setting.name == "files":
        group.add_argument(setting.name, nargs="+", **value_options)
    elif kind is yes_or_no:
        group.add_argument(option, action=argparse.BooleanOptionalAction, help=about, **flag)
    else:
        group.add_argument(option, required=default is MISSING, **flag, **value_options)


def parse(argv: Sequence[str]) -> Any:
    """Parse a command line and its config file, and return the settings of the command.

    Raises UsageError if the command line or the file is wrong. After ``--help``, raises SystemExit.
    """
    flags = vars(parser().parse_args(argv))
    return make(COMMANDS[flags.pop("command")], flags, flags.pop("config", None))


def check(config: CommandConfig, *, several: bool | None = None, gpu: bool | None = None) -> None:
    """Raise UsageError if settings contradict each other, or the user set an option that has no
    effect.

    Args:
        several: whether there are several data-parallel ranks. None: not known yet.
        gpu: whether ranks compute on GPUs. None: not known yet.
    """
    if isinstance(config, TrainConfig):
        _refuse_without_gpu(
            config.run.device,
            [config.layout.comm],
            cuda_aware=config.layout.cuda_aware,
            fused=config.precision.kernels == "fused",
        )
        MODELS[config.model.model].reject_unfit_data(config.data.data)
        _refuse_contradictions(config)
        _refuse_for_launch(config, several, gpu)
        _refuse_useless(config)
    elif isinstance(config, GemmConfig):
        _refuse_without_gpu(config.device, [config.comm])
    elif isinstance(config, AllreduceConfig):
        _refuse_without_gpu(config.device, config.comm, cuda_aware=config.cuda_aware)
        if "mpi" not in config.comm:
            refuse_without_effect(config, "cuda_aware", "with --comm mpi")
    elif isinstance(config, EvalConfig | ExportConfig) and not config.model_folder:
        refuse_without_effect(config, "weights", "with --model-folder")


def _refuse_without_gpu(
    device: str, comm: Sequence[str], *, cuda_aware: bool = False, fused: bool = False
) -> None:
    needing_gpus = {
        "--comm nccl": "nccl" in comm,
        "--cuda-aware": cuda_aware,
        "--kernels fused": fused,
    }
    flag = next((flag for flag, is_set in needing_gpus.items() if is_set), None)
    if flag and device == "cpu":
        raise UsageError(f"{flag} needs GPUs: leave out --device cpu, or {flag}", code="no-gpu")


def _refuse_contradictions(config: TrainConfig) -> None:
    optimizer = config.optimizer
    layout = config.layout
    precision = config.precision
    complaint = ""
    if optimizer.schedule == "step" and not optimizer.decay_iterations:
        complaint = "--schedule step: pass --decay-iterations, after which the learning rate falls"
    elif layout.compress != "none" and layout.zero:
        complaint = f"--compress {layout.compress} and --zero {layout.zero} cannot be combined"
    elif layout.compress != "none" and precision.precision == "fp16" and not precision.loss_scale:
        complaint = (
            f"--compress {layout.compress} and --precision fp16 need a fixed --loss-scale, "
            "because delayed gradients cannot be rescaled; pass --loss-scale, or use "
            "--precision bf16"
        )
    elif precision.capture and (layout.tp > 1 or layout.pp > 1 or layout.zero > 1):
        complaint = (
            "--capture: ranks with --tp, --pp or --zero 2 or 3 exchange numbers during a "
            "micro-batch, which a CUDA graph can't; omit --capture"
        )
    elif precision.capture and config.measuring.profile:
        complaint = "--capture: a CUDA graph has no times of layers for --profile; omit either"
    if complaint:
        raise UsageError(complaint, code="bad-settings")


def _refuse_for_launch(config: TrainConfig, several: bool | None, gpu: bool | None) -> None:
    """Raise UsageError for flags (not config files) without effect here. several, gpu: see
    ``check``.
    """
    bench = isinstance(config, BenchConfig)
    find = config.batch.find
    training_only = (
        "epochs iterations lr schedule warmup_iterations min_lr decay_iterations decay_factor "
        "scale_lr eval_interval eval_samples save_interval save keep save_model "
        "profile profile_iterations tensorboard"
    )
    if bench or find:
        refuse_without_effect(config, training_only, "in training", in_files=False)
    if bench:
        names = "prefetch find checkpoints resume"
        refuse_without_effect(config, names, "in training and with --find", in_files=False)
    elif find:
        names = "compress compress_ratio compress_rank peak_tflops capture"
        refuse_without_effect(config, names, "in training and bench", in_files=False)
    if several is False:
        names = "zero bucket_mib overlap compress scale_lr"
        refuse_without_effect(config, names, "on two or more data-parallel ranks", in_files=False)
    if gpu is False:
        refuse_without_effect(config, "offload_optimizer", "on GPUs", in_files=False)


def _refuse_useless(config: TrainConfig) -> None:
    """Raise UsageError for settings that have no effect because of the value of another setting."""
    layout = config.layout
    optimizer = config.optimizer
    precision = config.precision
    files = config.checkpoints
    takes = MODELS[config.model.model].takes
    kind = config.data.data.partition(":")[0]
    resumes = bool(files.save_interval) or files.resume == "auto"
    for has_effect, names, condition in (
        (takes != "images", "sequence_length", "with a --model of text"),
        (kind == "text", "tokenizer", "with --data text:FILE"),
        (kind in ("digits", "idx"), "augment clean", "with images, --data digits or idx:DIR"),
        (layout.zero in (0, 1), "overlap", "with --zero 0 or 1"),
        (layout.comm == "mpi", "cuda_aware", "with --comm mpi"),
        (precision.precision in ("bf16", "fp16"), "kernels", "with --precision bf16 or fp16"),
        (precision.kernels == "fused", "deterministic capture", "with --kernels fused"),
        (layout.compress == "topk", "compress_ratio", "with --compress topk"),
        (layout.compress == "powersgd", "compress_rank", "with --compress powersgd"),
        (optimizer.optimizer == "sgd", "momentum nesterov", "with --optimizer sgd"),
        (optimizer.momentum > 0, "nesterov", "with a --momentum above 0"),
        (optimizer.optimizer != "sgd", "beta1 beta2 eps", "with --optimizer adamw or lamb"),
        (optimizer.schedule != "constant", "min_lr", "with --schedule cosine or step"),
        (optimizer.schedule == "step", "decay_iterations decay_factor", "with --schedule step"),
        (bool(files.save_interval), "save keep", "with --save-interval"),
        (resumes, "checkpoints", "with --save-interval or --resume auto"),
        (config.measuring.profile, "profile_iterations", "with --profile"),
    ):
        if not has_effect:
            refuse_without_effect(config, names, condition)


def parse_here(argv: Sequence[str]) -> CommandConfig | None:
    """Parse and check a command line where its files are missing. Raises UsageError if it is wrong.

    Return None if the command line requests help, or names a config file, which could change any
    setting.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            flags = vars(parser().parse_args(argv))
    except SystemExit:
        return None
    command = COMMANDS[flags.pop("command")]
    if flags.pop("config", None) is not None:
        return None
    config = make(command, flags)
    check(config)
    return config
