"""The settings of each command. ``arguments`` creates their flags and help, ``settings`` reads
config files.

To add a setting, declare a field in a section. If the setting's effect depends on another setting,
add a rule to ``arguments``. Standard library only, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Self

from payload.cli.settings import CommandConfig, setting, switch
from payload.cli.values import (
    DTYPES,
    GemmSize,
    ValueType,
    by_commas,
    count,
    data_name,
    depth,
    folder,
    fraction,
    gemm_size,
    input_path,
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
"""Default settings of each optimizer."""

TRANSPORTS = ("mpi", "nccl", "ring", "hierarchical", "naive")
COMPRESSORS = ("topk", "int8", "powersgd")
_transport = one_of(*TRANSPORTS)
_counts = by_commas(count)
_dtype = one_of(*DTYPES)
_formats = one_of("fp64", "fp32", "bf16", "fp16")
_device = one_of("auto", "cpu", "gpu"), "auto: a GPU if CuPy finds one, otherwise the CPU"
_weights = (
    one_of("best", "final"),
    "best: weights of the best evaluation; final: weights at the end",
)
_sizes = by_commas(gemm_size)
_output = one_of("text", "json")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of the model"""

    model: str = setting("mlp", one_of(*MODELS), "the flags below change its sizes")
    hidden: tuple[int, ...] | None = setting(None, _counts, "mlp: widths of the hidden layers")
    layers: int | None = setting(None, depth, "blocks of a Transformer, layers of an LSTM")
    heads: int | None = setting(None, count, "attention heads")
    width: int | None = setting(
        None, count, "per token, or units of an LSTM, or of a ResNet's first stage"
    )
    patch: int | None = setting(None, count, "vit: side of a patch in pixels")
    dropout: float | None = setting(None, fraction, "share of activations to drop, in [0, 1)")
    norm_eps: float | None = setting(None, positive, "Transformer: epsilon of its norms")


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Settings of the data"""

    data: str = setting("digits", data_name, "data for training and evaluation")
    augment: tuple[str, ...] = setting(
        (), some_of("crop", "flip"), "random changes to images", "crop,flip"
    )
    clean: bool = switch(False, "remove repeated images, and print their number")
    tokenizer: str = setting(
        "bytes", tokenizer_name, "bpe:N learns N tokens; gpt2:DIR: GPT-2's files"
    )
    sequence_length: int = setting(128, count, "tokens in a sample of text")
    prefetch: int = setting(2, whole, "iterations whose samples are prepared in advance")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings of the batch size and the length of the training"""

    global_batch_size: int = setting(64, count, "samples in an iteration, over all ranks")
    micro_batch_size: int | None = setting(
        None, count, "samples at once on a rank (default: its share)"
    )
    epochs: int = setting(30, count, "passes over the training set")
    iterations: int | None = setting(None, count, "stop after this many iterations, if earlier")
    seed: int = setting(0, whole, "for the initial weights and the order of samples")
    find: bool = switch(False, "do not train; find a batch size and a learning rate")


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Settings of the evaluations during training"""

    eval_interval: int | None = setting(
        None, count, "iterations between evaluations (default: after each epoch)"
    )
    eval_samples: int | None = setting(
        None, count, "held-out samples to evaluate on (default: all)"
    )


@dataclass(frozen=True, slots=True)
class ParallelismSettings:
    """Settings of the distribution over ranks; groups of tp x pp ranks split the batch"""

    tp: int = setting(1, count, "ranks that split each layer's tensors")
    pp: int = setting(1, count, "ranks that split the model's layers, as pipeline stages")
    zero: int = setting(0, stage, "ZeRO stage: how much is sharded over ranks", "0-3")
    offload_optimizer: bool = switch(
        False, "keep master weights and optimizer state in host memory"
    )
    recompute: bool = switch(
        False, "save only the activations between blocks, and recompute the rest"
    )
    bucket_mib: int = setting(25, count, "minimum size of gradients that are summed in one call")
    overlap: bool = switch(True, "sum gradients during the backward pass")
    comm: str = setting("mpi", _transport, "how ranks communicate")
    cuda_aware: bool = switch(False, "pass GPU memory to MPI directly")
    compress: str = setting("none", one_of("none", *COMPRESSORS), "compression of summed gradients")
    compress_ratio: float = setting(0.01, share, "topk: share of numbers that is sent")
    compress_rank: int = setting(4, count, "powersgd: rank of the factors")


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Settings of the optimizer"""

    optimizer: str = setting("sgd", one_of(*_OPTIMIZERS), "algorithm that updates the weights")
    lr: float | None = setting(
        None, positive, "learning rate (default 0.05; adamw 0.001, lamb 0.002)"
    )
    momentum: float = setting(0.9, fraction, "sgd: momentum, in [0, 1)")
    nesterov: bool = switch(False, "sgd: use Nesterov momentum")
    beta1: float = setting(0.9, fraction, "adamw and lamb: decay of the mean, in [0, 1)")
    beta2: float = setting(0.999, fraction, "adamw and lamb: decay of the mean square, in [0, 1)")
    eps: float | None = setting(None, positive, "epsilon (default 1e-8 for adamw, 1e-6 for lamb)")
    weight_decay: float | None = setting(
        None, non_negative, "for matrices (default: sgd 0, otherwise 0.01)"
    )
    clip_grad: float | None = setting(None, positive, "scale gradients down to this norm")
    schedule: str = setting(
        "constant", one_of("constant", "cosine", "step"), "decay of the learning rate"
    )
    warmup_iterations: int = setting(
        0, whole, "iterations in which the learning rate rises to --lr"
    )
    min_lr: float = setting(0.0, non_negative, "lowest learning rate of cosine and step")
    decay_iterations: tuple[int, ...] | None = setting(None, _counts, "when step lowers the rate")
    decay_factor: float = setting(0.1, share, "factor by which step lowers the rate, at most 1")
    scale_lr: str = setting(
        "none", one_of("none", "linear", "sqrt"), "growth with data-parallel ranks"
    )

    def __post_init__(self) -> None:
        for name, value in _OPTIMIZERS[self.optimizer].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    """Settings of the number formats"""

    precision: str = setting(
        "fp32", _formats, "for weights and activations; sums use at least fp32"
    )
    loss_scale: float | None = setting(
        None, positive, "fixed scale (default: dynamic for fp16, otherwise 1)"
    )
    kernels: str = setting(
        "plain",
        one_of("plain", "fused"),
        "fused: layers by cuDNN and cuBLASLt, with bf16 or fp16 on GPUs (not yet tried on a GPU)",
    )
    deterministic: bool = switch(
        False, "with --kernels fused: only algorithms with bit-identical results"
    )
    capture: bool = switch(
        False, "with --kernels fused: micro-batches as CUDA graphs (not yet tried on a GPU)"
    )


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Settings of checkpoints and the saved model"""

    save_interval: int | None = setting(
        None, count, "iterations between checkpoints (default: no checkpoints)"
    )
    save: str = setting("async", one_of("async", "sync"), "sync: training waits for the disk")
    keep: int = setting(2, count, "newest checkpoints to keep")
    checkpoints: Path | None = setting(None, folder, "shared by all nodes (default: in --out)")
    resume: str = setting(
        "never", word_or_path, "from the newest checkpoint, or from DIR", "auto|never|DIR"
    )
    save_model: bool = switch(True, "write the final and the best weights to model/ in --out")


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """Settings of measurements"""

    profile: bool = switch(False, "write a timeline of a few iterations to trace.json")
    profile_iterations: int = setting(10, count, "iterations in the timeline, without the first")
    tensorboard: bool = switch(False, "write TensorBoard's event files to tensorboard/")
    peak_tflops: float | None = setting(
        None, positive, "of a rank's processor (default: known or measured)"
    )


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of the device and the output"""

    device: str = setting("auto", *_device)
    out: Path = setting(
        Path(), folder, "for metrics.jsonl and the resolved config.toml; created if missing"
    )


@dataclass(frozen=True, slots=True)
class TrainConfig(CommandConfig):
    """train a model over MPI"""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    layout: ParallelismSettings = field(default_factory=ParallelismSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    measuring: MeasurementSettings = field(default_factory=MeasurementSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def placed(self) -> Self:
        """Return these settings with absolute paths."""
        data = self.data
        files = self.checkpoints
        resume = (
            files.resume
            if files.resume in ("auto", "never")
            else str(Path(files.resume).absolute())
        )
        return replace(
            self,
            data=replace(data, data=_absolute(data.data), tokenizer=_absolute(data.tokenizer)),
            checkpoints=replace(
                files,
                checkpoints=files.checkpoints and files.checkpoints.absolute(),
                resume=resume,
            ),
        )


def _absolute(name: str) -> str:
    """Make the path absolute in a value of ``--data`` or ``--tokenizer``, such as text:book.txt."""
    kind, _, path = name.partition(":")
    return f"{kind}:{Path(path).absolute()}" if kind in ("idx", "text", "gpt2") else name


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings of the benchmark"""

    rounds: int = setting(5, count, "rounds in which each configuration runs once")
    turn: int = setting(5, count, "iterations of each configuration in a round")
    warmup: int = setting(3, count, "iterations of each configuration that are not measured")
    ranks: tuple[int, ...] = setting((), _counts, "rank counts to compare with (default 1,2,4...)")


@dataclass(frozen=True, slots=True)
class BenchConfig(TrainConfig):
    """measure how fast a model trains, on all ranks and on fewer"""

    bench: BenchSettings = field(default_factory=BenchSettings)


@dataclass(frozen=True, slots=True)
class EvalConfig(CommandConfig):
    """evaluate a trained model on held-out data"""

    out: Path | None = setting(
        None, folder, "the run (default: this folder; not needed with --resume DIR)"
    )
    resume: str = setting("auto", word_or_path, "auto: the run's newest checkpoint; DIR: this one")
    model_folder: Path | None = setting(None, folder, "a run's model/, instead of a checkpoint")
    weights: str = setting("best", *_weights)
    data: str | None = setting(None, data_name, "data to evaluate on (default: that of the run)")
    tp: int = setting(1, count, "ranks that split each layer's tensors in this evaluation")
    pp: int = setting(1, count, "ranks that split the model's layers in this evaluation")
    device: str = setting("auto", *_device)

    def __post_init__(self) -> None:
        if self.model_folder and (self.out or self.resume != "auto" or self.tp > 1 or self.pp > 1):
            raise UsageError(
                "--out, --resume, --tp and --pp are for checkpoints, not for --model-folder",
                code="options-exclusive",
            )


@dataclass(frozen=True, slots=True)
class SampleConfig(CommandConfig):
    """generate text with a trained model"""

    takes = "text"
    model_folder: Path = setting(MISSING, folder, "a run's model/")
    weights: str = setting("best", *_weights)
    prompt: str = setting("", ValueType(str, "TEXT"), "start of the text")
    tokens: int = setting(200, count, "tokens to generate")
    temperature: float = setting(
        1.0, non_negative, "below 1 favours likely tokens; 0: always the most likely"
    )
    top_k: int | None = setting(None, count, "draw only among this many most likely tokens")
    seed: int = setting(0, whole, "for the random choice of tokens")
    output: str = setting("text", _output, "text as it comes, or one JSON object at the end")
    device: str = setting("auto", *_device)


@dataclass(frozen=True, slots=True)
class PredictConfig(CommandConfig):
    """classify images with a trained model"""

    takes = "images"
    model_folder: Path = setting(MISSING, folder, "a run's model/")
    files: tuple[Path, ...] = setting(
        MISSING, input_path, "an IDX file, or a CSV file (one image per row)", "FILE"
    )
    weights: str = setting("best", *_weights)
    output: str = setting("text", _output, "a line for each image, or one JSON object")
    device: str = setting("auto", *_device)


@dataclass(frozen=True, slots=True)
class ProbeConfig(CommandConfig):
    """check that all ranks communicate and compute correctly"""

    expect_hosts: tuple[str, ...] = setting((), some_of(), "fail if any of these hosts has no rank")


@dataclass(frozen=True, slots=True)
class GemmConfig(CommandConfig):
    """multiply matrices on each rank, sum the products over all ranks, and check the sums"""

    sizes: tuple[GemmSize, ...] = setting(
        _sizes.read("256,1024"),
        _sizes,
        "each rank's (m, k) times (k, n); N means NxNxN",
        "N|MxKxN[,...]",
    )
    dtypes: tuple[str, ...] = setting(
        ("float32",), by_commas(_dtype), ", ".join(DTYPES), "D[,D...]"
    )
    warmup: int = setting(2, count, "iterations that are not measured")
    iterations: int = setting(10, count, "measured iterations; the median counts")
    seed: int = setting(0, whole, "for the weights and the data")
    device: str = setting("auto", *_device)
    comm: str = setting("mpi", _transport, "how ranks sum")
    out: Path = setting(Path(), folder, "for gemm.jsonl; created if missing")


@dataclass(frozen=True, slots=True)
class AllreduceConfig(CommandConfig):
    """measure how fast ranks sum arrays, by array size and transport (such as MPI)"""

    comm: tuple[str, ...] = setting(("mpi",), some_of(*TRANSPORTS), ", ".join(TRANSPORTS))
    min: int = setting(4 << 10, memory, "smallest array, such as 4KiB")  # bytes
    max: int = setting(256 << 20, memory, "largest array; sizes grow by a factor of 4")  # bytes
    dtype: str = setting("float32", _dtype, "of the summed arrays")
    iterations: int = setting(10, count, "measured rounds; the median counts")
    cuda_aware: bool = switch(False, "pass GPU memory to mpi directly, if this MPI supports it")
    device: str = setting("auto", *_device)
    out: Path = setting(Path(), folder, "for allreduce.jsonl; created if missing")

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise UsageError(
                f"--min is {self.min} bytes, but --max is only {self.max}", code="min-above-max"
            )


@dataclass(frozen=True, slots=True)
class TelemetryConfig(CommandConfig):
    """record this node's telemetry until SIGTERM"""

    out: Path = setting(MISSING, folder, "for HOSTNAME.jsonl; created if missing")
    interval: float = setting(1.0, positive, "seconds between samples", "S")


@dataclass(frozen=True, slots=True)
class ExportConfig(CommandConfig):
    """write a trained model's weights for other programs"""

    to: Path | None = setting(None, path, "target (default model.safetensors)", "FILE")
    model_folder: Path | None = setting(None, folder, "a run's model/ folder")
    weights: str = setting("best", *_weights)
    checkpoint: Path | None = setting(
        None, input_path, "a checkpoint's folder, instead of --model-folder"
    )
    force: bool = switch(False, "overwrite an existing file")


COMMANDS: dict[str, type[CommandConfig]] = {
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
}
"""``__main__`` runs the module of the command."""
