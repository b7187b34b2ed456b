"""The training loop: load, split over ranks, iterate, evaluate, prove that all ranks agree."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from payload.checkpoint.session import Session
from payload.comm import mpi
from payload.comm.base import together
from payload.comm.mpi import MpiCommunicator
from payload.config import TrainConfig
from payload.data import digits
from payload.data.order import batches, shard
from payload.device import Array, Device, choose
from payload.errors import STOPPED, PayloadError, UsageError
from payload.metrics import Metrics, Work
from payload.models import mlp
from payload.nn.base import Unit
from payload.nn.loss import SoftmaxCrossEntropy
from payload.optim.base import Optimizer
from payload.optim.sgd import SGD
from payload.parallel.build import assemble
from payload.parallel.engine import Engine, Evaluation, Outcome
from payload.parallel.mesh import Mesh, make_mesh
from payload.parallel.stage import Batch
from payload.parallel.storage import Storage
from payload.precision import PRECISIONS
from payload.settings import to_toml
from payload.timing import CommTimes, timed_mesh, timed_optimizer, timed_units
from payload.trace import Trace, make_trace


def run(config: TrainConfig) -> int:
    """Train, and give the exit code.

    Raises:
        UsageError: the batch is above the data, ``--out`` cannot be written, or there is no such device.
        LaunchError: the launcher and MPI disagree about the number of ranks.
        PayloadError: training diverged, or the ranks ended with different parameters.
    """
    world = mpi.start()
    device = together(world, lambda: choose(config.run.device, mpi.local_rank()))
    return train(config, device, mpi.MpiCommunicator(device))


def train(config: TrainConfig, device: Device, world: MpiCommunicator) -> int:
    """Train on the digits, record how well the held-out ones are known, and give the exit code."""
    training, held_out = (split.on(device, config.precision.dtype) for split in digits.load())
    samples = len(training.labels)
    wanted, lr = config.batch.global_batch_size, config.optimizer.lr
    if wanted > samples:
        raise UsageError(f"--global-batch-size {wanted} is above the {samples} samples")
    trace = make_trace(device, config.measuring)
    times = CommTimes(device)
    mesh = timed_mesh(make_mesh(world, tp=config.layout.tp, pp=config.layout.pp), times, trace)
    units = _units(config, device, mesh)
    engine = _engine(config, device, mesh, timed_units(units, trace), trace)
    work = Work(flops=sum(unit.flops for unit in units))
    checkpoints = Session(config, engine)
    resumed = checkpoints.resume()
    done = resumed.iteration
    metrics = together(world, lambda: Metrics(config, device, world, work, times, done=done))
    together(world, lambda: _keep(config) if world.rank == 0 else None)
    metrics.introduce()
    for note in resumed.notes:
        metrics.say(note)

    held_out_share = _share(config, held_out, np.arange(len(held_out.labels)), mesh, device)
    started = time.perf_counter()
    evaluation: Evaluation | None = None
    last = _last(config, samples)
    with checkpoints.saver(partial(metrics.write, "checkpoint")) as saver:
        for step, epoch, ends_epoch, indices in _schedule(config, samples, after=done):
            metrics.begin()
            trace.next()
            with trace.span("batch", "data"):
                share = _share(config, training, indices, mesh, device)
            outcome = engine.step(share, targets=len(indices), iteration=step, lr=lr, votes=saver.votes())
            _check_finite(step, outcome)
            metrics.iteration(step, epoch, outcome, lr=lr, samples=len(indices))
            if ends_epoch:
                evaluation = engine.evaluate(held_out_share)
                accuracy, test_loss = evaluation.accuracy, evaluation.loss
                metrics.evaluation(step, epoch, evaluation)
                losses = f"loss {outcome.loss:.4f}  test loss {test_loss:.4f}"
                metrics.say(f"epoch {epoch:3}  {losses}  accuracy {accuracy:.4f}")
            if saver.after(step, outcome.votes, last=step == last):
                metrics.say(f"stopped by a signal; saved after iteration {step}: go on with --resume auto")
                metrics.close()
                return STOPPED
    evaluation = evaluation or engine.evaluate(held_out_share)  # all was done before
    trace.write(config.run.out / "trace.json", world)
    metrics.conclude(engine.storage.values, mesh, evaluation, seconds=time.perf_counter() - started)
    return 0


def _units(config: TrainConfig, device: Device, mesh: Mesh) -> list[Unit]:
    """The model that was asked for."""
    return mlp.build(
        mesh.context(device), inputs=digits.PIXELS, classes=digits.CLASSES, hidden=config.model.hidden
    )


def _engine(config: TrainConfig, device: Device, mesh: Mesh, units: Sequence[Unit], trace: Trace) -> Engine:
    """The model on the mesh."""
    return assemble(
        device,
        mesh,
        units,
        SoftmaxCrossEntropy(mesh.context(device)),
        lambda storage: timed_optimizer(_optimizer(config, storage), trace),
        seed=config.batch.seed,
        precision=PRECISIONS[config.precision.precision],
    )


def _optimizer(config: TrainConfig, storage: Storage) -> Optimizer:
    return SGD(storage.home, storage.values, storage.segments, momentum=config.optimizer.momentum)


def _share(
    config: TrainConfig, samples: digits.Split, indices: Array, mesh: Mesh, device: Device
) -> list[Batch]:
    """This rank's share of a global batch, in as many micro-batches as the largest share needs."""
    mine = shard(len(indices), mesh.dp.rank, mesh.dp.size)
    chosen = device.asarray(indices[mine])
    places = device.asarray(np.arange(mine.start, mine.stop, dtype="uint32"))
    largest = -(-len(indices) // mesh.dp.size)
    micro_batches = -(-largest // (config.batch.micro_batch_size or largest))
    return Batch(samples.x[chosen], samples.labels[chosen], places).cut(micro_batches)


def _last(config: TrainConfig, samples: int) -> int:
    """The last iteration."""
    per_epoch = -(-samples // config.batch.global_batch_size)
    return min(config.batch.epochs * per_epoch, config.batch.iterations or config.batch.epochs * per_epoch)


def _schedule(config: TrainConfig, samples: int, *, after: int) -> Iterator[tuple[int, int, bool, Array]]:
    """Iteration, epoch (both from 1), whether it ends an epoch or the run, and the indices of its batch; from
    that iteration on which comes after ``after``."""
    size, last = config.batch.global_batch_size, _last(config, samples)
    per_epoch = -(-samples // size)
    for epoch in range(1 + after // per_epoch, config.batch.epochs + 1):
        order = batches(samples, size, seed=config.batch.seed, epoch=epoch)
        for step, indices in enumerate(order, start=(epoch - 1) * per_epoch + 1):
            if after < step <= last:
                yield step, epoch, step in (epoch * per_epoch, last), indices


def _keep(config: TrainConfig) -> None:
    """Write the resolved settings into the run's folder.

    Raises:
        UsageError: they cannot be written.
    """
    path = config.run.out / "config.toml"
    try:
        path.write_bytes(to_toml(config).encode(errors="surrogateescape"))
    except OSError as exc:
        raise UsageError(f"--out: {path} cannot be written: {exc.strerror}") from exc


def _check_finite(step: int, outcome: Outcome) -> None:
    """Stop a run that has diverged. All ranks see the same numbers, so they stop together.

    Raises:
        PayloadError: it has.
    """
    if not outcome.finite:
        numbers = f"loss {outcome.loss}, gradient norm {outcome.grad_norm}"
        raise PayloadError(f"training diverged at iteration {step} ({numbers}); try a lower --lr")
