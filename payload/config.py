"""What the commands can be asked to do. ``settings`` makes flags, help and config files of it.

To add a setting, declare it in its section and use it. Standard library only, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from payload.errors import UsageError
from payload.settings import add_flags, choice, make, required, section, setting, switch
from payload.values import count, fraction, names, one_of, positive, whole, widths

_DEVICES = ("auto", "cpu", "gpu")


@dataclass(frozen=True, slots=True)
class Model:
    """The model."""

    hidden: tuple[int, ...] = setting((256, 128), widths, "N[,N...]", "widths of the hidden layers")


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch, and for how long."""

    global_batch_size: int = setting(64, count, "N", "samples in an iteration, over all ranks")
    micro_batch_size: int | None = setting(
        None, count, "N", "samples that a rank works on at once; by default all of its share"
    )
    epochs: int = setting(30, count, "N", "passes over the training set")
    iterations: int | None = setting(None, count, "N", "stop after this many iterations, if sooner")
    seed: int = setting(0, whole(0), "N", "of the weights and of the order of samples")


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout: what is split over ranks; the batch is, over those that are left."""

    tp: int = setting(1, count, "N", "ranks that split each layer's tensors")
    pp: int = setting(1, count, "N", "ranks that split the model's layers, as stages of a pipeline")


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer."""

    lr: float = setting(0.05, positive, "X", "learning rate")
    momentum: float = setting(0.9, fraction, "X", "in [0, 1)")


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision."""

    precision: str = choice("fp32", ("fp32", "fp64"), "of weights, gradients and sums")

    @property
    def dtype(self) -> str:
        """As NumPy calls it."""
        return {"fp32": "float32", "fp64": "float64"}[self.precision]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints."""

    save_interval: int | None = setting(
        None, count, "N", "iterations between checkpoints; else there are none"
    )
    save: str = choice("async", ("async", "sync"), "sync: training waits until a checkpoint is on disk")
    keep: int = setting(2, count, "N", "checkpoints to keep, the newest")
    checkpoints: Path | None = setting(
        None, Path, "DIR", "folder for them, the same on all nodes (default: checkpoints in --out)"
    )
    resume: str = setting(
        "never", str, "auto|never|DIR", "go on from the newest checkpoint, or from that one"
    )


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is measured."""

    profile: bool = switch(False, "write a timeline of a few iterations to trace.json")
    profile_iterations: int = setting(10, count, "N", "of the timeline, which leaves the first one out")
    tensorboard: bool = switch(False, "write TensorBoard's event files to tensorboard/")
    peak_tflops: float | None = setting(
        None, positive, "X", "of one rank's processor, for MFU; else by a table of GPUs, or measured on a CPU"
    )


@dataclass(frozen=True, slots=True)
class Run:
    """Where it runs, and where files go."""

    device: str = choice("auto", _DEVICES, "auto: a GPU where CuPy finds one")
    out: Path = setting(
        Path(), Path, "DIR", "folder for metrics.jsonl and the resolved config.toml; made if missing"
    )


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """train a network on the handwritten digits, data-parallel over MPI"""

    model: Model = section(Model)
    batch: Batch = section(Batch)
    layout: Layout = section(Layout)
    optimizer: Optimizer = section(Optimizer)
    precision: Precision = section(Precision)
    checkpoints: Checkpoints = section(Checkpoints)
    measuring: Measuring = section(Measuring)
    run: Run = section(Run)


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """check that all ranks reach each other and add up right"""

    expect_hosts: tuple[str, ...] = setting((), names, "A,B,...", "fail if one of these has no rank")
    device: str = choice("auto", _DEVICES, "where the summed arrays live")


@dataclass(frozen=True, slots=True)
class GemmSize:
    """Of each rank's product: (m, k) times (k, n)."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


_GEMM_DTYPES = ("bfloat16", "float16", "float32", "float64")


def _sizes(text: str) -> tuple[GemmSize, ...]:
    sizes = [[count(number) for number in part.split("x")] for part in text.split(",")]
    if any(len(numbers) not in (1, 3) for numbers in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form N or MxKxN")
    return tuple(GemmSize(*(numbers * 3)[:3]) for numbers in sizes)


def _dtypes(text: str) -> tuple[str, ...]:
    return tuple(one_of(*_GEMM_DTYPES)(name) for name in text.split(","))


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """multiply a layer's weights by data on each rank, sum by MPI, check"""

    sizes: tuple[GemmSize, ...] = setting(
        _sizes("256,1024"), _sizes, "N|MxKxN[,...]", "each rank's (m, k) times (k, n); N alone is a cube"
    )
    dtypes: tuple[str, ...] = setting(("float32",), _dtypes, "D[,D...]", ", ".join(_GEMM_DTYPES))
    warmup: int = setting(2, count, "N", "iterations that are not measured")
    iterations: int = setting(10, count, "N", "iterations measured, of which the median")
    seed: int = setting(0, whole(0), "N", "of the weights and the data")
    device: str = choice("auto", _DEVICES, "auto: a GPU where CuPy finds one")
    out: Path = setting(Path(), Path, "DIR", "folder for gemm.jsonl; made if missing")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """sample this node until SIGTERM"""

    out: Path = required(Path, "DIR", "folder for HOSTNAME.jsonl; made if missing")
    interval_s: float = setting(1.0, positive, "S", "seconds between samples", flag="interval")


@dataclass(frozen=True, slots=True)
class AlignConfig:
    """line a run's metrics and telemetry up by time"""

    folder: Path = required(Path, "DIR", "a job's or run's, with metrics.jsonl and telemetry/")


Config = TrainConfig | GemmConfig | ProbeConfig | TelemetryConfig | AlignConfig

_COMMANDS: dict[str, type[Config]] = {
    "train": TrainConfig,
    "gemm": GemmConfig,
    "probe": ProbeConfig,
    "telemetry": TelemetryConfig,
    "align": AlignConfig,
}


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print a usage text from every rank and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see `{self.prog} --help`")


def parse(argv: Sequence[str]) -> Config:
    """Read a command line, and the config file that it names.

    Raises:
        UsageError: one of them is wrong.
        SystemExit: it asked for help, which was printed.
    """
    flags = vars(_parser().parse_args(argv))
    return make(_COMMANDS[flags.pop("command")], flags, flags.pop("config", None))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m payload", description="Train, probe and watch on a cluster's nodes.")
    commands = parser.add_subparsers(
        required=True, dest="command", metavar=f"{{{','.join(_COMMANDS)}}}", parser_class=_Parser
    )
    for name, command in _COMMANDS.items():
        sub = commands.add_parser(name, help=command.__doc__, description=command.__doc__, allow_abbrev=False)
        add_flags(sub, command)
        if command is TrainConfig:
            sub.add_argument(
                "--config",
                type=Path,
                metavar="FILE",
                help="TOML with any of these settings; flags win over it",
            )
    return parser
