"""The training loop: load, split over ranks, iterate, evaluate, prove that all ranks agree."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from payload.comm import mpi
from payload.comm.base import Communicator, together
from payload.config import TrainConfig
from payload.data import digits
from payload.data.order import batches
from payload.device import Array, Device, choose
from payload.errors import PayloadError, UsageError
from payload.metrics import Metrics
from payload.models.mlp import MLP
from payload.nn.loss import SoftmaxCrossEntropy
from payload.optim import SGD
from payload.parallel.data import DataParallel


def run(config: TrainConfig) -> int:
    """Train, and give the exit code.

    Raises:
        UsageError: the batch is above the data, ``--out`` cannot be written, or there is no such device.
        LaunchError: the launcher and MPI disagree about the number of ranks.
        PayloadError: training diverged, or the ranks ended with different parameters.
    """
    world = mpi.start()
    device = together(world, lambda: choose(config.device, mpi.local_rank()))
    train(config, device, mpi.MpiCommunicator(device))
    return 0


def train(config: TrainConfig, device: Device, comm: Communicator) -> None:
    """Train on the digits, and record how well the held-out ones are known."""
    training, held_out = (split.on(device, config.dtype) for split in digits.load())
    samples = len(training.labels)
    if config.global_batch_size > samples:
        raise UsageError(f"--global-batch-size {config.global_batch_size} is above the {samples} samples")
    widths = (digits.PIXELS, *config.hidden, digits.CLASSES)
    model = MLP(device, widths, dtype=config.dtype, seed=config.seed)
    replica = DataParallel(model, SoftmaxCrossEntropy(device), comm)
    optimizer = SGD(device, model.buffers, lr=config.lr, momentum=config.momentum)
    metrics = together(comm, lambda: Metrics(config, device, comm))
    metrics.introduce()

    started = time.perf_counter()
    accuracy = test_loss = math.nan
    for step, epoch, ends_epoch, indices in _schedule(config, samples):
        began = time.perf_counter()
        batch = device.asarray(indices)
        loss = replica.gradients(training.x[batch], training.labels[batch])
        grad_norm = _norm(model.buffers.grads)
        _check_finite(step, loss, grad_norm)
        optimizer.step()
        speed = len(indices) / (time.perf_counter() - began)
        progress = {"loss": loss, "lr": optimizer.lr, "grad_norm": grad_norm, "samples_per_s": speed}
        metrics.write("iteration", step=step, epoch=epoch, **progress)
        if ends_epoch:
            accuracy, test_loss = replica.evaluate(held_out.x, held_out.labels)
            metrics.write("evaluation", step=step, epoch=epoch, accuracy=accuracy, loss=test_loss)
            metrics.say(
                f"epoch {epoch:3}  loss {loss:.4f}  test loss {test_loss:.4f}  accuracy {accuracy:.4f}"
            )
    seconds = time.perf_counter() - started
    metrics.conclude(model.buffers.values, accuracy=accuracy, loss=test_loss, seconds=seconds)


def _schedule(config: TrainConfig, samples: int) -> Iterator[tuple[int, int, bool, Array]]:
    """Iteration, epoch (both from 1), whether it ends an epoch or the run, and the indices of its batch."""
    per_epoch = -(-samples // config.global_batch_size)
    last = min(config.epochs * per_epoch, config.iterations or config.epochs * per_epoch)
    step = 0
    for epoch in range(1, config.epochs + 1):
        for indices in batches(samples, config.global_batch_size, seed=config.seed, epoch=epoch):
            step += 1
            yield step, epoch, step in (epoch * per_epoch, last), indices
            if step == last:
                return


def _check_finite(step: int, loss: float, grad_norm: float) -> None:
    """Stop a run that has diverged. All ranks see the same numbers, so they stop together.

    Raises:
        PayloadError: it has.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        numbers = f"loss {loss}, gradient norm {grad_norm}"
        raise PayloadError(f"training diverged at iteration {step} ({numbers}); try a lower --lr")


def _norm(flat: Array) -> float:
    return math.sqrt(float(flat @ flat))
