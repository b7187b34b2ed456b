"""The settings of each command. ``settings`` makes flags, help and config files of them.

To add a setting, declare it in its section and use it; if others can make it useless, ``arguments`` has the
rules. Standard library only, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Self

from payload.cli.settings import Command, choice, section, setting, switch
from payload.cli.values import (
    DTYPES,
    GemmSize,
    by_commas,
    count,
    data_name,
    fraction,
    gemm_size,
    memory,
    names,
    non_negative,
    one_of,
    path,
    positive,
    share,
    some_of,
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
"""With what each of them begins."""

_PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
TRANSPORTS = ("mpi", "nccl", "ring", "hierarchical", "naive")
COMPRESSORS = ("topk", "int8", "powersgd")
_DEVICES = ("auto", "cpu", "gpu")
_WEIGHTS = ("best", "final")
_OUTPUTS = ("text", "json")


@dataclass(frozen=True, slots=True)
class Model:
    """The model."""

    model: str = choice("mlp", tuple(MODELS), "its sizes can be changed by what follows")
    hidden: tuple[int, ...] | None = setting(
        None, by_commas(count), "N[,N...]", "of an mlp: widths of hidden layers"
    )
    layers: int | None = setting(
        None, whole(1, most=10_000), "N", "blocks of a Transformer, layers of an LSTM"
    )
    heads: int | None = setting(None, count, "N", "of attention")
    width: int | None = setting(
        None, count, "N", "numbers for a token; units of an LSTM; channels of a ResNet's first stage"
    )
    patch: int | None = setting(None, count, "N", "of a vit: pixels along a side of a patch")
    dropout: float | None = setting(None, fraction, "X", "share of activations that is left out, in [0, 1)")
    norm_eps: float | None = setting(None, positive, "X", "of a Transformer: what its norms add to variances")


@dataclass(frozen=True, slots=True)
class Data:
    """The data."""

    data: str = setting(
        "digits", data_name, "digits|idx:DIR|text:FILE|synthetic", "what is trained on, and judged by"
    )
    augment: tuple[str, ...] = setting((), some_of("crop", "flip"), "crop,flip", "vary images by chance")
    clean: bool = switch(False, "leave repeated images out, and say how many")
    tokenizer: str = setting(
        "bytes",
        tokenizer_name,
        "bytes|bpe:N|gpt2:DIR",
        "of text; N is learned; gpt2 has the files that GPT-2 came with",
    )
    sequence_length: int = setting(128, count, "N", "tokens in a sample of text")
    prefetch: int = setting(2, whole(0), "N", "iterations for which samples are made ahead")


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch, and for how long."""

    global_batch_size: int = setting(64, count, "N", "samples in an iteration, over all ranks")
    micro_batch_size: int | None = setting(
        None, count, "N", "samples that a rank works on at once; by default all of its share"
    )
    epochs: int = setting(30, count, "N", "passes over the training set")
    iterations: int | None = setting(None, count, "N", "stop after so many, if sooner")
    seed: int = setting(0, whole(0), "N", "of the weights and of the order of samples")
    find: bool = switch(False, "do not train, but look for a micro-batch size and a learning rate")


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout: what is split over ranks; the batch is, over those that are left."""

    tp: int = setting(1, count, "N", "ranks that split each layer's tensors")
    pp: int = setting(1, count, "N", "ranks that split the model's layers, as stages of a pipeline")
    zero: int = setting(0, whole(0, most=3), "0-3", "ZeRO's stage: what ranks hold in parts")
    offload_optimizer: bool = switch(False, "masters and optimizer state are in host memory")
    recompute: bool = switch(False, "keep no activations but those between blocks")
    bucket_mib: int = setting(25, count, "N", "of gradients, at least, that are summed in one call")
    overlap: bool = switch(True, "sum gradients while the backward pass goes on")
    comm: str = choice("mpi", TRANSPORTS, "how ranks talk")
    cuda_aware: bool = switch(False, "give MPI a GPU's memory as it is")
    compress: str = choice("none", ("none", *COMPRESSORS), "sums of gradients over ranks")
    compress_ratio: float = setting(0.01, share, "X", "of topk: the share that is sent")
    compress_rank: int = setting(4, count, "N", "of powersgd's factors")


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer."""

    optimizer: str = choice("sgd", tuple(_OPTIMIZERS), "how gradients change the weights")
    lr: float | None = setting(
        None, positive, "X", "learning rate (default 0.05 for sgd, 0.001 for adamw, 0.002 for lamb)"
    )
    momentum: float = setting(0.9, fraction, "X", "of sgd, in [0, 1)")
    nesterov: bool = switch(False, "Nesterov's momentum, for sgd")
    beta1: float = setting(0.9, fraction, "X", "of adamw and lamb, in [0, 1)")
    beta2: float = setting(0.999, fraction, "X", "of adamw and lamb, in [0, 1)")
    eps: float | None = setting(None, positive, "X", "by default 1e-8 for adamw, 1e-6 for lamb")
    weight_decay: float | None = setting(
        None, non_negative, "X", "of matrices, not of biases and gains; by default 0 for sgd, else 0.01"
    )
    clip_grad: float | None = setting(None, positive, "X", "scale gradients down to this norm")
    schedule: str = choice("constant", ("constant", "cosine", "step"), "of the rate, once warm")
    warmup_iterations: int = setting(0, whole(0), "N", "in which the learning rate climbs")
    min_lr: float = setting(0.0, non_negative, "X", "where cosine and step end")
    decay_iterations: tuple[int, ...] | None = setting(
        None, by_commas(count), "N[,N...]", "after which step lowers the rate"
    )
    decay_factor: float = setting(0.1, share, "X", "by which step lowers it, at most 1")
    scale_lr: str = choice("none", ("none", "linear", "sqrt"), "how it grows with data-parallel workers")

    def __post_init__(self) -> None:
        for name, value in _OPTIMIZERS[self.optimizer].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision."""

    precision: str = choice(
        "fp32", _PRECISIONS, "of weights and activations; sums and masters are at least fp32"
    )
    loss_scale: float | None = setting(
        None, positive, "X", "that keeps gradients in range; by default dynamic for fp16, else 1"
    )


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints."""

    save_interval: int | None = setting(
        None, count, "N", "iterations between checkpoints (default: none are made)"
    )
    save: str = choice("async", ("async", "sync"), "sync: training waits for the disk")
    keep: int = setting(2, count, "N", "checkpoints to keep, the newest")
    checkpoints: Path | None = setting(
        None, Path, "DIR", "folder for them, the same on all nodes (default: in --out)"
    )
    resume: str = setting(
        "never", word_or_path, "auto|never|DIR", "go on from the newest checkpoint, or that one"
    )
    init: Path | None = setting(
        None,
        path,
        "FILE|DIR",
        "begin with these weights: of a model/, of transformers or of torchvision; a checkpoint goes before",
    )
    new_head: bool = switch(False, "but draw the last layer, for other classes")
    save_model: bool = switch(True, "write the final and the best weights to model/ in --out")


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is measured."""

    profile: bool = switch(False, "write a timeline of a few iterations to trace.json")
    profile_iterations: int = setting(10, count, "N", "of the timeline; not the first")
    tensorboard: bool = switch(False, "write TensorBoard's event files to tensorboard/")
    peak_tflops: float | None = setting(
        None, positive, "X", "of one rank's processor, for MFU (default: by a table, or measured)"
    )


@dataclass(frozen=True, slots=True)
class Run:
    """Where it runs, and where files go."""

    device: str = choice("auto", _DEVICES, "auto: a GPU where CuPy finds one")
    out: Path = setting(
        Path(), Path, "DIR", "folder for metrics.jsonl and the resolved config.toml; made if missing"
    )


@dataclass(frozen=True, slots=True)
class TrainConfig(Command):
    """train a model over MPI"""

    model: Model = section(Model)
    data: Data = section(Data)
    batch: Batch = section(Batch)
    layout: Layout = section(Layout)
    optimizer: Optimizer = section(Optimizer)
    precision: Precision = section(Precision)
    checkpoints: Checkpoints = section(Checkpoints)
    measuring: Measuring = section(Measuring)
    run: Run = section(Run)

    def placed(self) -> Self:
        """The same, with absolute paths of the data and the checkpoints."""
        data, tokenizer = (
            f"{kind}:{Path(where).absolute()}" if kind in ("idx", "text", "gpt2") else f"{kind}{colon}{where}"
            for kind, colon, where in (self.data.data.partition(":"), self.data.tokenizer.partition(":"))
        )
        folder, resume = self.checkpoints.checkpoints, self.checkpoints.resume
        if resume not in ("auto", "never"):
            resume = str(Path(resume).absolute())
        return replace(
            self,
            data=replace(self.data, data=data, tokenizer=tokenizer),
            checkpoints=replace(
                self.checkpoints,
                checkpoints=folder and folder.absolute(),
                resume=resume,
                init=self.checkpoints.init and self.checkpoints.init.absolute(),
            ),
        )


@dataclass(frozen=True, slots=True)
class Bench:
    """The measurement."""

    rounds: int = setting(5, count, "N", "in which all sides take their turns")
    turn: int = setting(5, count, "N", "iterations of each side in a round")
    warmup: int = setting(3, count, "N", "iterations of each side that are not measured")
    ranks: tuple[int, ...] = setting(
        (), by_commas(count), "N[,N...]", "fewer ranks to compare with (default 1,2,4...)"
    )


@dataclass(frozen=True, slots=True)
class BenchConfig(TrainConfig):
    """measure how fast a model trains, on all ranks and on fewer"""

    bench: Bench = section(Bench)


@dataclass(frozen=True, slots=True)
class EvalConfig(Command):
    """judge a trained model by held-out data"""

    out: Path | None = setting(
        None, Path, "DIR", "folder of the run (default: this one, or with --resume DIR the checkpoint alone)"
    )
    resume: str = setting("auto", word_or_path, "auto|DIR", "the run's newest checkpoint, or that one")
    model_folder: Path | None = setting(None, Path, "DIR", "a run's model/, instead of a checkpoint")
    weights: str = choice("best", _WEIGHTS, "at the best evaluation, or at the end")
    data: str | None = setting(None, data_name, "idx:DIR|text:FILE|...", "other data than the run's")
    tp: int = setting(1, count, "N", "ranks that split each layer's tensors, now")
    pp: int = setting(1, count, "N", "ranks that split the model's layers, now")
    device: str = choice("auto", _DEVICES, "auto: a GPU where CuPy finds one")

    def __post_init__(self) -> None:
        checkpoint = self.out or self.resume != "auto" or self.tp > 1 or self.pp > 1
        if self.model_folder and checkpoint:
            raise UsageError(
                "--model-folder takes no --out, --resume, --tp or --pp: these are of checkpoints",
                code="options-exclusive",
            )


@dataclass(frozen=True, slots=True)
class SampleConfig(Command):
    """write text by a trained model"""

    model_folder: Path = setting(MISSING, Path, "DIR", "a run's model/")
    weights: str = choice("best", _WEIGHTS, "at the best evaluation, or at the end")
    prompt: str = setting("", str, "TEXT", "what the text begins with")
    tokens: int = setting(200, count, "N", "tokens to write")
    temperature: float = setting(
        1.0, non_negative, "X", "below 1 likely tokens become likelier; 0: always the likeliest"
    )
    top_k: int | None = setting(None, count, "N", "draw among so many of the likeliest tokens")
    seed: int = setting(0, whole(0), "N", "of what is drawn")
    output: str = choice("text", _OUTPUTS, "text as it comes, or one JSON object at the end")
    device: str = choice("auto", _DEVICES, "auto: a GPU where CuPy finds one")


@dataclass(frozen=True, slots=True)
class PredictConfig(Command):
    """tell the classes of images by a trained model"""

    model_folder: Path = setting(MISSING, Path, "DIR", "a run's model/")
    files: tuple[Path, ...] = setting(
        MISSING, path, "FILE", "a PNG, an IDX file, or a CSV file with an image a row", words=True
    )
    weights: str = choice("best", _WEIGHTS, "at the best evaluation, or at the end")
    output: str = choice("text", _OUTPUTS, "a line for each image, or one JSON object")
    device: str = choice("auto", _DEVICES, "auto: a GPU where CuPy finds one")


@dataclass(frozen=True, slots=True)
class ProbeConfig(Command):
    """check that all ranks reach each other and add up right"""

    expect_hosts: tuple[str, ...] = setting((), names, "A,B,...", "fail if one of these has no rank")


@dataclass(frozen=True, slots=True)
class GemmConfig(Command):
    """multiply a layer's weights by data on each rank, sum by MPI, check"""

    sizes: tuple[GemmSize, ...] = setting(
        by_commas(gemm_size)("256,1024"),
        by_commas(gemm_size),
        "N|MxKxN[,...]",
        "each rank's (m, k) times (k, n); N alone is a cube",
    )
    dtypes: tuple[str, ...] = setting(("float32",), by_commas(one_of(*DTYPES)), "D[,D...]", ", ".join(DTYPES))
    warmup: int = setting(2, count, "N", "iterations that are not measured")
    iterations: int = setting(10, count, "N", "iterations measured, of which the median")
    seed: int = setting(0, whole(0), "N", "of the weights and the data")
    device: str = choice("auto", _DEVICES, "auto: a GPU where CuPy finds one")
    comm: str = choice("mpi", TRANSPORTS, "how ranks sum")
    out: Path = setting(Path(), Path, "DIR", "folder for gemm.jsonl; made if missing")


@dataclass(frozen=True, slots=True)
class AllreduceConfig(Command):
    """measure how fast ranks sum, by size and by transport"""

    comm: tuple[str, ...] = setting(("mpi",), some_of(*TRANSPORTS), "A[,B...]", ", ".join(TRANSPORTS))
    min_bytes: int = setting(4 << 10, memory, "SIZE", "smallest array, such as 4KiB", flag="min")
    max_bytes: int = setting(256 << 20, memory, "SIZE", "largest; each is 4 times the one before", flag="max")
    dtype: str = choice("float32", DTYPES, "of what is summed")
    iterations: int = setting(10, count, "N", "rounds measured, of which the median")
    cuda_aware: bool = switch(False, "let mpi have device memory, if this MPI can")
    device: str = choice("auto", _DEVICES, "auto: a GPU where CuPy finds one")
    out: Path = setting(Path(), Path, "DIR", "folder for allreduce.jsonl; made if missing")

    def __post_init__(self) -> None:
        if self.min_bytes > self.max_bytes:
            raise UsageError(
                f"--min is {self.min_bytes} bytes, above --max, which is {self.max_bytes}",
                code="min-above-max",
            )


@dataclass(frozen=True, slots=True)
class TelemetryConfig(Command):
    """sample this node until SIGTERM"""

    out: Path = setting(MISSING, Path, "DIR", "folder for HOSTNAME.jsonl; made if missing")
    interval_s: float = setting(1.0, positive, "S", "seconds between samples", flag="interval")


@dataclass(frozen=True, slots=True)
class ExportConfig(Command):
    """write a trained model's weights for other programs"""

    to: Path | None = setting(None, Path, "FILE|DIR", "to write (default model.safetensors; hf: model-hf)")
    model_folder: Path | None = setting(None, Path, "DIR", "the folder model/ that a run left")
    weights: str = choice("best", _WEIGHTS, "at the best evaluation, or at the end")
    checkpoint: Path | None = setting(None, path, "DIR", "or a checkpoint's folder")
    export_as: str = choice(
        "torch",
        ("torch", "hf", "torchvision"),
        "names of tensors: PyTorch's for such layers; transformers' with a config.json; or torchvision's",
    )
    force: bool = switch(False, "overwrite what is there")


@dataclass(frozen=True, slots=True)
class AlignConfig(Command):
    """line a run's metrics and telemetry up by time"""

    folder: Path = setting(MISSING, Path, "DIR", "a job's or run's, with metrics.jsonl and telemetry/")


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
