"""The training loop: load, split over ranks, iterate, evaluate, prove that all ranks agree."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from functools import partial

from payload.build import build_engine, build_loader, build_mesh, build_schedule, build_units, run_identity
from payload.checkpoint.saver import StopSignals
from payload.checkpoint.session import Session
from payload.comm import make_transport
from payload.comm.base import on_all_ranks
from payload.comm.transport import Transport
from payload.config import TrainConfig, check
from payload.data.base import Dataset
from payload.data.datasets import open_dataset
from payload.data.loader import Loader
from payload.device import Device
from payload.errors import STOPPED, PayloadError, UsageError
from payload.finder import find
from payload.metrics import Metrics, Work
from payload.parallel.engine import Engine, Evaluation, StepResult
from payload.parallel.mesh import Mesh
from payload.parallel.pipeline import idle_share
from payload.report import begin
from payload.settings import to_toml
from payload.timing import CommTimes, TimedOptimizer, timed_mesh, timed_units
from payload.trace import Timeline


def run(config: TrainConfig) -> int:
    """Train, and give the exit code."""
    stoppable = config.checkpoints.save_interval and not config.batch.find
    with StopSignals() if stoppable else nullcontext() as signals:  # before all that takes long
        world, device = begin(config.run.device)
        layout = config.layout
        check(config, several=world.size > layout.tp * layout.pp, gpu=device.gpu is not None)
        transport = make_transport(layout.comm, device, cuda_aware=layout.cuda_aware)
        return train(config, device, transport, signals)


def train(config: TrainConfig, device: Device, world: Transport, signals: StopSignals | None = None) -> int:
    """Train, record how well the held-out samples are known, and give the exit code.

    Args:
        signals: that end a run with checkpoints.
    """
    profile = config.measuring
    trace = Timeline(device, iterations=profile.profile_iterations if profile.profile else 0)
    times = CommTimes(device)
    mesh, compressor = build_mesh(config.layout, world)
    mesh = timed_mesh(mesh, times, trace)
    checkpoints = Session(config, world)
    dataset = open_dataset(config, world, checkpoints.data_state)
    if config.batch.find:
        find(config, device, mesh, dataset)
        return 0
    loader = build_loader(config, dataset, device, mesh)
    units = build_units(config.model, dataset, mesh.context(device))
    engine = build_engine(config, device, mesh, timed_units(units, trace), compressor=compressor)
    if trace.wanted:
        engine.optimizer = TimedOptimizer(engine.optimizer, trace)
    rate = build_schedule(config, mesh, loader.order.per_epoch)
    resumed = checkpoints.resume(engine, run_identity(config, dataset), dataset.data_state)
    work = Work(sum(unit.flops for unit in units), tokens=dataset.facts.get("tokens"))
    metrics = Metrics(config, device, world, work, times, done=resumed.iteration)
    on_all_ranks(world, lambda: _keep(config) if world.rank == 0 else None)
    metrics.introduce()
    if config.measuring.profile and rate.iterations - resumed.iteration < 2:  # noqa: PLR2004
        metrics.say(
            "--profile: trace.json stays empty, since it leaves the first iteration out; run two or more"
        )
    for note in (dataset.about, *_bubble(mesh, loader), *resumed.notes):
        metrics.say(note)

    started = time.perf_counter()
    evaluation: Evaluation | None = None
    feeds = loader.training(resumed.iteration + 1, rate.iterations)
    with checkpoints.saver(partial(metrics.write, "checkpoint"), metrics.say, signals) as saver:
        for step in range(resumed.iteration + 1, rate.iterations + 1):
            metrics.begin()
            trace.next()
            with trace.span("batch", "data"):
                feed = next(feeds)
            lr, last = rate.at(step), step == rate.iterations
            flags = saver.flags() if saver else ()
            outcome = engine.step(feed.batches, targets=feed.targets, iteration=step, lr=lr, flags=flags)
            _check_finite(step, outcome)
            metrics.iteration(step, feed.slot.epoch, outcome, lr=lr, samples=len(feed.slot.indices))
            if feed.slot.ends_epoch or last:
                evaluation = _evaluate(step, engine, loader)
                metrics.evaluation(step, feed.slot.epoch, evaluation, dataset.bytes_per_target)
                metrics.say(_progress(feed.slot.epoch, outcome, evaluation, dataset))
            with trace.span("save", "checkpoint"):
                stopped = saver is not None and saver.after(step, outcome.flags, last=last)
            if stopped:
                metrics.say(f"stopped by a signal; saved after iteration {step}: go on with --resume auto")
                trace.write(config.run.out / "trace.json", world)
                metrics.close()
                return STOPPED
    evaluation = evaluation or _evaluate(rate.iterations, engine, loader)  # all was done before
    trace.write(config.run.out / "trace.json", world)
    metrics.conclude(engine.storage, mesh, evaluation, seconds=time.perf_counter() - started)
    return 0


def _bubble(mesh: Mesh, loader: Loader) -> list[str]:
    """What a pipeline costs."""
    if mesh.pp.size == 1:
        return []
    stages, number = mesh.pp.size, loader.micro_batches
    waits = f"each stage waits {idle_share(stages, number):.0%} of the time"
    return [f"pipeline of {stages} stages, {number} micro-batches: {waits}, less with more micro-batches"]


def _progress(epoch: int, outcome: StepResult, evaluation: Evaluation, dataset: Dataset) -> str:
    line = f"epoch {epoch:3}  loss {outcome.loss:.4f}  test loss {evaluation.loss:.4f}"
    if dataset.bytes_per_target:
        line += f"  bits per byte {evaluation.bits_per_byte(dataset.bytes_per_target):.4f}"
    return f"{line}  accuracy {evaluation.accuracy:.4f}"


def _keep(config: TrainConfig) -> None:
    """Write the resolved settings into the run's folder, with paths that hold from any other.

    Raises:
        UsageError: they cannot be written.
    """
    path = config.run.out / "config.toml"
    try:
        path.write_bytes(to_toml(config.placed()).encode(errors="surrogateescape"))
    except OSError as exc:
        raise UsageError(f"--out: {path} cannot be written: {exc.strerror}") from exc


def _evaluate(step: int, engine: Engine, loader: Loader) -> Evaluation:
    """How well the held-out samples are known.

    Raises:
        PayloadError: the loss is not finite; on all ranks, which see the same.
    """
    evaluation = engine.evaluate(loader.held_out())
    if not math.isfinite(evaluation.loss):
        raise PayloadError(
            f"training diverged at iteration {step} (test loss {evaluation.loss}); try a lower --lr"
        )
    return evaluation


def _check_finite(step: int, outcome: StepResult) -> None:
    """Stop a run that has diverged. All ranks see the same numbers, so they stop together.

    Raises:
        PayloadError: it has.
    """
    if not outcome.finite and not outcome.skipped:
        numbers = f"loss {outcome.loss}, gradient norm {outcome.grad_norm}"
        advice = "--lr" if outcome.loss_scale == 1 else "--lr or --loss-scale"
        raise PayloadError(f"training diverged at iteration {step} ({numbers}); try a lower {advice}")
