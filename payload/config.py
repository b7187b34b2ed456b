"""The command line, and the frozen settings that come of it. Standard library only, so `--help` is fast."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from payload.errors import UsageError


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """What a training run was asked to do."""

    epochs: int  # passes over the training set
    iterations: int | None  # stop after this many; None: after the last epoch
    global_batch_size: int  # samples in one iteration, over all ranks
    lr: float
    momentum: float
    hidden: tuple[int, ...]  # widths of the hidden layers
    seed: int
    dtype: str
    device: str
    out: Path


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """What a probe was asked to check."""

    expect_hosts: tuple[str, ...]
    device: str


@dataclass(frozen=True, slots=True)
class GemmSize:
    """Of each rank's product: (m, k) times (k, n)."""

    m: int
    k: int
    n: int


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Which products are computed, and how often."""

    sizes: tuple[GemmSize, ...]
    dtypes: tuple[str, ...]
    warmup: int  # iterations that are not measured
    iterations: int
    seed: int
    device: str
    out: Path


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Where samples of this node go, and how often one is taken."""

    out: Path
    interval_s: float


_GEMM_DTYPES = ("float16", "float32", "float64")

Config = TrainConfig | GemmConfig | ProbeConfig | TelemetryConfig


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print a usage text from every rank and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see `{self.prog} --help`")


def parse(argv: Sequence[str]) -> Config:
    """Read a command line.

    Raises:
        UsageError: it is wrong.
        SystemExit: it asked for help, which was printed.
    """
    options = vars(_parser().parse_args(argv))
    config: type[Config] = options.pop("config")
    return config(**options)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m payload", description="Train, probe and watch on a cluster's nodes.")
    commands = parser.add_subparsers(
        required=True, metavar="{train,gemm,probe,telemetry}", parser_class=_Parser
    )
    _add_train(commands)
    _add_gemm(commands)
    _add_probe(commands)
    _add_telemetry(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "train",
        help="train a network on the handwritten digits, data-parallel over MPI",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epochs", type=_count, default=30, metavar="N", help="passes over the training set")
    add("--iterations", type=_count, metavar="N", help="stop after this many iterations, if sooner")
    add("--global-batch-size", type=_count, default=64, metavar="N", help="samples an iteration, all ranks")
    add("--lr", type=_positive, default=0.05, metavar="X", help="learning rate")
    add("--momentum", type=_fraction, default=0.9, metavar="X", help="in [0, 1)")
    add("--hidden", type=_widths, default="256,128", metavar="N[,N...]", help="widths of the hidden layers")
    add("--seed", type=_seed, default=0, metavar="N", help="of the weights and of the order of samples")
    add("--dtype", choices=("float32", "float64"), default="float64", help="of weights, gradients and sums")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU where CuPy finds one")
    add("--out", type=Path, default=Path(), metavar="DIR", help="folder for metrics.jsonl; made if missing")
    parser.set_defaults(config=TrainConfig)


def _add_gemm(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "gemm",
        help="multiply a layer's weights by data on each rank, sum by MPI, check",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    sizes = "each rank's (m, k) times (k, n); N alone is a cube"
    add("--sizes", type=_sizes, default="256,1024", metavar="N|MxKxN[,...]", help=sizes)
    add("--dtypes", type=_dtypes, default="float32", metavar="D[,D...]", help="float16, float32, float64")
    add("--warmup", type=_count, default=2, metavar="N", help="iterations that are not measured")
    add("--iterations", type=_count, default=10, metavar="N", help="iterations measured, of which the median")
    add("--seed", type=_seed, default=0, metavar="N", help="of the weights and the data")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU where CuPy finds one")
    add("--out", type=Path, default=Path(), metavar="DIR", help="folder for gemm.jsonl; made if missing")
    parser.set_defaults(config=GemmConfig)


def _add_probe(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "probe", help="check that all ranks reach each other and add up right", allow_abbrev=False
    )
    add = parser.add_argument
    add("--expect-hosts", type=_names, default=(), metavar="A,B,...", help="fail if one of these has no rank")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="where the summed arrays live")
    parser.set_defaults(config=ProbeConfig)


def _add_telemetry(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("telemetry", help="sample this node until SIGTERM", allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for HOSTNAME.jsonl; made if missing")
    add("--interval", dest="interval_s", type=_positive, default=1.0, metavar="S", help="seconds (default 1)")
    parser.set_defaults(config=TelemetryConfig)


def _count(text: str) -> int:
    return _whole(text, least=1)


def _seed(text: str) -> int:
    return _whole(text, least=0)


def _whole(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not in [0, 1)")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _widths(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _sizes(text: str) -> tuple[GemmSize, ...]:
    sizes = [[_count(number) for number in part.split("x")] for part in text.split(",")]
    if any(len(numbers) not in (1, 3) for numbers in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form N or MxKxN")
    return tuple(GemmSize(*(numbers * 3)[:3]) for numbers in sizes)


def _dtypes(text: str) -> tuple[str, ...]:
    for name in text.split(","):
        if name not in _GEMM_DTYPES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(_GEMM_DTYPES)}")
    return tuple(text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
