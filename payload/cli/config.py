"""The settings of each command. ``arguments`` makes flags and help of them, ``settings`` config files.

To add a setting, declare it in its section and use it; if other settings can make it useless, add a rule to
``arguments``. Standard library only, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Self

from payload.cli.settings import Command, setting, switch
from payload.cli.values import (
    DTYPES,
    GemmSize,
    Kind,
    by_commas,
    count,
    data_name,
    depth,
    folder,
    fraction,
    gemm_size,
    memory,
    non_negative,
    one_of,
    path,
    positive,
    share,
    some_of,
    stage,
    tokenizer_name,
    whole,
    word_or_path,
)
from payload.errors import UsageError
from payload.models import MODELS

_OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.05, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01},
    "lamb": {"lr": 2e-3, "eps": 1e-6, "weight_decay": 0.01},
}
"""The defaults of each."""

TRANSPORTS = ("mpi", "nccl", "ring", "hierarchical", "naive")
COMPRESSORS = ("topk", "int8", "powersgd")
_transport = one_of(*TRANSPORTS)
_counts = by_commas(count)
_dtype = one_of(*DTYPES)
_formats = one_of("fp64", "fp32", "bf16", "fp16")
_device = one_of("auto", "cpu", "gpu"), "auto: a GPU where CuPy finds one"
_weights = one_of("best", "final"), "at the best evaluation, or at the end"
_sizes = by_commas(gemm_size)
_output = one_of("text", "json")


@dataclass(frozen=True, slots=True)
class Model:
    """The model."""

    model: str = setting("mlp", one_of(*MODELS), "its sizes can be changed by what follows")
    hidden: tuple[int, ...] | None = setting(None, _counts, "of an mlp: widths of hidden layers")
    layers: int | None = setting(None, depth, "blocks of a Transformer, layers of an LSTM")
    heads: int | None = setting(None, count, "of attention")
    width: int | None = setting(None, count, "per token, or units of an LSTM, or of a ResNet's first stage")
    patch: int | None = setting(None, count, "of a vit: pixels along a side of a patch")
    dropout: float | None = setting(None, fraction, "share of activations that is left out, in [0, 1)")
    norm_eps: float | None = setting(None, positive, "of a Transformer: what its norms add to variances")


@dataclass(frozen=True, slots=True)
class Data:
    """The data."""

    data: str = setting("digits", data_name, "data to train on and to evaluate on")
    augment: tuple[str, ...] = setting((), some_of("crop", "flip"), "vary images by chance", "crop,flip")
    clean: bool = switch(False, "leave repeated images out, and print their number")
    tokenizer: str = setting("bytes", tokenizer_name, "of text; N is learned; gpt2: its own files in DIR")
    sequence_length: int = setting(128, count, "tokens in a sample of text")
    prefetch: int = setting(2, whole, "iterations for which samples are made ahead")


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch, and for how long."""

    global_batch_size: int = setting(64, count, "samples in an iteration, over all ranks")
    micro_batch_size: int | None = setting(None, count, "samples at once on a rank (default: its share)")
    epochs: int = setting(30, count, "passes over the training set")
    iterations: int | None = setting(None, count, "stop after so many, if sooner")
    seed: int = setting(0, whole, "of the weights and of the order of samples")
    find: bool = switch(False, "do not train, but look for a micro-batch size and a learning rate")


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout: what is split over ranks. The batch is split over the remaining ones."""

    tp: int = setting(1, count, "ranks that split each layer's tensors")
    pp: int = setting(1, count, "ranks that split the model's layers, as stages of a pipeline")
    zero: int = setting(0, stage, "ZeRO's stage: what ranks hold in parts", "0-3")
    offload_optimizer: bool = switch(False, "masters and optimizer state are in host memory")
    recompute: bool = switch(False, "keep no activations but those between blocks")
    bucket_mib: int = setting(25, count, "of gradients, at least, that are summed in one call")
    overlap: bool = switch(True, "sum gradients during the backward pass")
    comm: str = setting("mpi", _transport, "how ranks talk")
    cuda_aware: bool = switch(False, "give MPI a GPU's memory directly")
    compress: str = setting("none", one_of("none", *COMPRESSORS), "sums of gradients over ranks")
    compress_ratio: float = setting(0.01, share, "of topk: the share that is sent")
    compress_rank: int = setting(4, count, "of powersgd's factors")


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer."""

    optimizer: str = setting("sgd", one_of(*_OPTIMIZERS), "how gradients change the weights")
    lr: float | None = setting(None, positive, "learning rate (default 0.05; of adamw 0.001, of lamb 0.002)")
    momentum: float = setting(0.9, fraction, "of sgd, in [0, 1)")
    nesterov: bool = switch(False, "Nesterov's momentum, for sgd")
    beta1: float = setting(0.9, fraction, "of adamw and lamb, in [0, 1)")
    beta2: float = setting(0.999, fraction, "of adamw and lamb, in [0, 1)")
    eps: float | None = setting(None, positive, "(default 1e-8 for adamw, 1e-6 for lamb)")
    weight_decay: float | None = setting(None, non_negative, "of matrices (default 0 for sgd, else 0.01)")
    clip_grad: float | None = setting(None, positive, "scale gradients down to this norm")
    schedule: str = setting("constant", one_of("constant", "cosine", "step"), "of the rate, once warm")
    warmup_iterations: int = setting(0, whole, "in which the learning rate climbs")
    min_lr: float = setting(0.0, non_negative, "where cosine and step end")
    decay_iterations: tuple[int, ...] | None = setting(None, _counts, "after which step lowers the rate")
    decay_factor: float = setting(0.1, share, "by which step lowers it, at most 1")
    scale_lr: str = setting("none", one_of("none", "linear", "sqrt"), "how it grows with data-parallel ranks")

    def __post_init__(self) -> None:
        for name, value in _OPTIMIZERS[self.optimizer].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision."""

    precision: str = setting("fp32", _formats, "of weights and activations; sums are at least fp32")
    loss_scale: float | None = setting(None, positive, "fixed (default: dynamic for fp16, else 1)")


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints."""

    save_interval: int | None = setting(
        None, count, "iterations between checkpoints (default: no checkpoints)"
    )
    save: str = setting("async", one_of("async", "sync"), "sync: training waits for the disk")
    keep: int = setting(2, count, "checkpoints to keep, the newest")
    checkpoints: Path | None = setting(None, folder, "the same on all nodes (default: in --out)")
    resume: str = setting("never", word_or_path, "from the newest checkpoint, or that one", "auto|never|DIR")
    init: Path | None = setting(
        None, path, "weights of a model/, transformers or torchvision; a checkpoint comes first", "FILE|DIR"
    )
    new_head: bool = switch(False, "but draw the last layer, for other classes")
    save_model: bool = switch(True, "write the final and the best weights to model/ in --out")


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is measured."""

    profile: bool = switch(False, "write a timeline of a few iterations to trace.json")
    profile_iterations: int = setting(10, count, "of the timeline; not the first")
    tensorboard: bool = switch(False, "write TensorBoard's event files to tensorboard/")
    peak_tflops: float | None = setting(None, positive, "of a rank's processor (default: known or measured)")


@dataclass(frozen=True, slots=True)
class Run:
    """Where it runs, and where files go."""

    device: str = setting("auto", *_device)
    out: Path = setting(Path(), folder, "for metrics.jsonl and the resolved config.toml; made if missing")


@dataclass(frozen=True, slots=True)
class TrainConfig(Command):
    """train a model over MPI"""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    layout: Layout = field(default_factory=Layout)
    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: Precision = field(default_factory=Precision)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    measuring: Measuring = field(default_factory=Measuring)
    run: Run = field(default_factory=Run)

    def placed(self) -> Self:
        """Return the same settings with absolute paths of the data and the checkpoints."""
        data, files = self.data, self.checkpoints
        resume = files.resume if files.resume in ("auto", "never") else str(Path(files.resume).absolute())
        return replace(
            self,
            data=replace(data, data=_absolute(data.data), tokenizer=_absolute(data.tokenizer)),
            checkpoints=replace(
                files,
                checkpoints=files.checkpoints and files.checkpoints.absolute(),
                resume=resume,
                init=files.init and files.init.absolute(),
            ),
        )


def _absolute(name: str) -> str:
    """Return the name of data or a tokenizer with an absolute path, if it has a path."""
    kind, _, where = name.partition(":")
    return f"{kind}:{Path(where).absolute()}" if kind in ("idx", "text", "gpt2") else name


@dataclass(frozen=True, slots=True)
class Bench:
    """The measurement."""

    rounds: int = setting(5, count, "in which all sides take their turns")
    turn: int = setting(5, count, "iterations of each side in a round")
    warmup: int = setting(3, count, "iterations of each side that are not measured")
    ranks: tuple[int, ...] = setting((), _counts, "fewer ranks to compare with (default 1,2,4...)")


@dataclass(frozen=True, slots=True)
class BenchConfig(TrainConfig):
    """measure how fast a model trains, on all ranks and on fewer"""

    bench: Bench = field(default_factory=Bench)


@dataclass(frozen=True, slots=True)
class EvalConfig(Command):
    """evaluate a trained model on held-out data"""

    out: Path | None = setting(None, folder, "of the run (default: this one; not needed with --resume DIR)")
    resume: str = setting("auto", word_or_path, "the run's newest checkpoint, or that one")
    model_folder: Path | None = setting(None, folder, "a run's model/, instead of a checkpoint")
    weights: str = setting("best", *_weights)
    data: str | None = setting(None, data_name, "other data than the run's")
    tp: int = setting(1, count, "ranks that split each layer's tensors, now")
    pp: int = setting(1, count, "ranks that split the model's layers, now")
    device: str = setting("auto", *_device)

    def __post_init__(self) -> None:
        if self.model_folder and (self.out or self.resume != "auto" or self.tp > 1 or self.pp > 1):
            raise UsageError(
                "--model-folder takes no --out, --resume, --tp or --pp: these are of checkpoints",
                code="options-exclusive",
            )


@dataclass(frozen=True, slots=True)
class SampleConfig(Command):
    """write text by a trained model"""

    model_folder: Path = setting(MISSING, folder, "a run's model/")
    weights: str = setting("best", *_weights)
    prompt: str = setting("", Kind(str, "TEXT"), "what the text begins with")
    tokens: int = setting(200, count, "tokens to write")
    temperature: float = setting(
        1.0, non_negative, "below 1 likely tokens become likelier; 0: only the likeliest"
    )
    top_k: int | None = setting(None, count, "draw among so many of the likeliest tokens")
    seed: int = setting(0, whole, "of what is drawn")
    output: str = setting("text", _output, "text as it comes, or one JSON object at the end")
    device: str = setting("auto", *_device)


@dataclass(frozen=True, slots=True)
class PredictConfig(Command):
    """tell the classes of images by a trained model"""

    model_folder: Path = setting(MISSING, folder, "a run's model/")
    files: tuple[Path, ...] = setting(MISSING, path, "a PNG, IDX or CSV file (an image a row)", "FILE")
    weights: str = setting("best", *_weights)
    output: str = setting("text", _output, "a line for each image, or one JSON object")
    device: str = setting("auto", *_device)


@dataclass(frozen=True, slots=True)
class ProbeConfig(Command):
    """check that all ranks reach each other and add up right"""

    expect_hosts: tuple[str, ...] = setting((), some_of(), "fail if one of these has no rank")


@dataclass(frozen=True, slots=True)
class GemmConfig(Command):
    """multiply a layer's weights by data on each rank, sum by MPI, check"""

    sizes: tuple[GemmSize, ...] = setting(
        _sizes.read("256,1024"), _sizes, "each rank's (m, k) times (k, n); N alone is a cube", "N|MxKxN[,...]"
    )
    dtypes: tuple[str, ...] = setting(("float32",), by_commas(_dtype), ", ".join(DTYPES), "D[,D...]")
    warmup: int = setting(2, count, "iterations that are not measured")
    iterations: int = setting(10, count, "iterations measured, of which the median")
    seed: int = setting(0, whole, "of the weights and the data")
    device: str = setting("auto", *_device)
    comm: str = setting("mpi", _transport, "how ranks sum")
    out: Path = setting(Path(), folder, "for gemm.jsonl; made if missing")


@dataclass(frozen=True, slots=True)
class AllreduceConfig(Command):
    """measure how fast ranks sum, by size and by transport"""

    comm: tuple[str, ...] = setting(("mpi",), some_of(*TRANSPORTS), ", ".join(TRANSPORTS))
    min: int = setting(4 << 10, memory, "smallest array, such as 4KiB")  # bytes
    max: int = setting(256 << 20, memory, "largest; each is 4 times the one before")  # bytes
    dtype: str = setting("float32", _dtype, "of what is summed")
    iterations: int = setting(10, count, "rounds measured, of which the median")
    cuda_aware: bool = switch(False, "let mpi have device memory, if this MPI can")
    device: str = setting("auto", *_device)
    out: Path = setting(Path(), folder, "for allreduce.jsonl; made if missing")

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise UsageError(
                f"--min is {self.min} bytes, above --max, which is {self.max}", code="min-above-max"
            )


@dataclass(frozen=True, slots=True)
class TelemetryConfig(Command):
    """sample this node until SIGTERM"""

    out: Path = setting(MISSING, folder, "for HOSTNAME.jsonl; made if missing")
    interval: float = setting(1.0, positive, "seconds between samples", "S")


@dataclass(frozen=True, slots=True)
class ExportConfig(Command):
    """write a trained model's weights for other programs"""

    to: Path | None = setting(None, path, "to write (default model.safetensors; hf: model-hf)", "FILE|DIR")
    model_folder: Path | None = setting(None, folder, "the folder model/ that a run left")
    weights: str = setting("best", *_weights)
    checkpoint: Path | None = setting(None, path, "or a checkpoint's folder")
    export_as: str = setting(
        "torch", one_of("torch", "hf", "torchvision"), "whose names of tensors: PyTorch's, transformers' ..."
    )
    force: bool = switch(False, "overwrite what is there")


@dataclass(frozen=True, slots=True)
class AlignConfig(Command):
    """line a run's metrics and telemetry up by time"""

    folder: Path = setting(MISSING, folder, "a job's or run's, with metrics.jsonl and telemetry/")


COMMANDS: dict[str, type[Command]] = {
    "train": TrainConfig,
    "eval": EvalConfig,
    "sample": SampleConfig,
    "predict": PredictConfig,
    "export": ExportConfig,
    "bench": BenchConfig,
    "gemm": GemmConfig,
    "allreduce": AllreduceConfig,
    "probe": ProbeConfig,
    "telemetry": TelemetryConfig,
    "align": AlignConfig,
}
"""Each is run by the module of its name."""
