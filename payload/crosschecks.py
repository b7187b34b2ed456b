"""Settings that are each right and do not go together, as far as the command line alone can tell."""

from __future__ import annotations

from collections.abc import Iterator

from payload.config import BenchConfig, Data, TrainConfig
from payload.errors import UsageError


def check(config: TrainConfig) -> None:
    """
    Raises:
        UsageError: two settings contradict each other, or one would be ignored.
    """
    for complaint in _complaints(config):
        raise UsageError(complaint)


def _complaints(config: TrainConfig) -> Iterator[str]:
    yield from _of_data(config.data)
    optimizer, layout, checkpoints = config.optimizer, config.layout, config.checkpoints
    if optimizer.nesterov and (optimizer.optimizer != "sgd" or not optimizer.momentum):
        yield "--nesterov: it is a kind of momentum; it needs --optimizer sgd and a --momentum above 0"
    if optimizer.schedule == "step" and not optimizer.decay_iterations:
        yield "--schedule step: it lowers the learning rate after --decay-iterations; say which"
    if optimizer.schedule != "step" and optimizer.decay_iterations:
        yield f"--decay-iterations: they are of --schedule step, not of --schedule {optimizer.schedule}"
    if not layout.overlap and layout.zero >= 2:  # noqa: PLR2004
        yield f"--no-overlap: --zero {layout.zero} sums gradients as they come, and keeps none till then"
    if layout.cuda_aware and layout.comm != "mpi":
        yield f"--cuda-aware: it is for --comm mpi, not for --comm {layout.comm}"
    if layout.compress != "none" and layout.zero:
        yield f"--compress {layout.compress} and --zero {layout.zero}: what is compressed is not in parts"
    if layout.compress != "none" and config.precision.precision == "fp16" and not config.precision.loss_scale:
        yield (
            f"--compress {layout.compress} and --precision fp16: what is held back is a multiple of the loss "
            "scale, which must not change then: give a fixed --loss-scale, or use --precision bf16"
        )
    if isinstance(config, BenchConfig):
        ignored = {
            "find": config.batch.find,
            "save-interval": checkpoints.save_interval is not None,
            "resume": checkpoints.resume != "never",
            "schedule": optimizer.schedule != "constant",
            "warmup-iterations": bool(optimizer.warmup_iterations),
        }
        for flag in (flag for flag, given in ignored.items() if given):
            yield f"--{flag}: bench only measures; `train` has that"


def _of_data(data: Data) -> Iterator[str]:
    kind = data.data.partition(":")[0]
    images = {"augment": bool(data.augment), "clean": data.clean}
    for flag in (flag for flag, given in images.items() if given and kind not in ("digits", "idx")):
        yield f"--{flag}: it is for the images of digits and idx:DIR, not for --data {data.data}"
    if data.tokenizer != "bytes" and kind != "text":
        yield f"--tokenizer {data.tokenizer}: it is for text:FILE, not for --data {data.data}"
