"""The training loop: load, split over ranks, iterate, evaluate, prove that all ranks agree.

``train`` makes the parts of a run, ``Trainer.loop`` is the loop over iterations, ``Trainer.step`` one of
them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from payload.checkpoint.saver import Saver, StopSignals
from payload.checkpoint.session import Session, resume
from payload.cli.config import TrainConfig
from payload.cli.settings import to_toml
from payload.comm.base import on_all_ranks
from payload.comm.transport import Transport
from payload.data.base import Dataset
from payload.data.datasets import data_record, open_dataset
from payload.data.loader import Feed, Loader
from payload.device.base import Device
from payload.errors import ENDED, STOPPED, PayloadError, UsageError
from payload.parallel.engine import Engine, Evaluation, StepResult
from payload.parallel.pipeline import idle_share
from payload.saved_model.writer import ModelWriter
from payload.training.build import (
    build_engine,
    build_loader,
    build_mesh,
    build_schedule,
    build_units,
    model_record,
    model_sizes,
    run_identity,
)
from payload.training.initial import initial
from payload.training.metrics import Metrics, Work
from payload.training.schedule import LearningRate
from payload.training.search import find
from payload.training.timing import CommTimes, TimedOptimizer, timed_mesh, timed_units
from payload.training.trace import Timeline


def train(config: TrainConfig, device: Device, world: Transport, signals: StopSignals | None = None) -> int:
    """Train on all ranks of ``world``, record the metrics, and give the exit code.

    Args:
        signals: that end a run, once its work is saved.
    """
    trace, times = _timeline(config, device), CommTimes(device)
    mesh, compressor = build_mesh(config.layout, world)
    mesh = timed_mesh(mesh, times, trace)
    checkpoints = Session(config, world)
    begun = initial(config.checkpoints.init, world)
    data_state = checkpoints.data_state
    if begun and data_state is None:
        data_state = begun.data_state(config.data.tokenizer)
    dataset = open_dataset(config, world, data_state)
    if config.batch.find:
        find(config, device, mesh, dataset)
        return 0
    loader = build_loader(config, dataset, device, mesh)
    units = build_units(config.model, dataset, mesh.context(device))
    engine = build_engine(config, device, mesh, timed_units(units, trace), compressor=compressor)
    if trace.wanted:
        engine.optimizer = TimedOptimizer(engine.optimizer, trace)
    schedule = build_schedule(config, mesh, loader.order.per_epoch)
    now = checkpoints.describe(engine, run_identity(config, dataset))
    resumed = resume(checkpoints.chosen, engine, now)
    if begun and not resumed.iteration:
        begun.load(engine, units, config, model_sizes(config.model, dataset))
        resumed.notes.append(f"begins with the weights of {begun.file}")
    work = Work(sum(unit.flops for unit in units), tokens=dataset.facts.get("tokens"))
    metrics = Metrics(config, device, world, work, times, done=resumed.iteration)
    on_all_ranks(world, lambda: _write_config(config) if world.rank == 0 else None)
    metrics.introduce(on_all_ranks(world, lambda: data_record(config, dataset) if world.rank == 0 else {}))

    record, model = model_record(config.model, dataset), None
    if config.checkpoints.save_model:
        again = (resumed.path, resumed.model) if resumed.path else None
        model = ModelWriter(config.run.out / "model", record, engine, units, resumed=again)
    trainer = Trainer(engine, loader, dataset, schedule, metrics, trace, model, signals)
    for note in (*_profile_note(config, schedule, resumed.iteration), *trainer.notes(), *resumed.notes):
        metrics.print_line(note)
    started = time.perf_counter()
    save_model = model.save_best if model else lambda _: record.fields()
    saving = checkpoints.saver(engine, now, metrics, data_state=dataset.data_state, save_model=save_model)
    with saving as saver:
        evaluation = trainer.loop(resumed.iteration, saver)
    trace.write(config.run.out / "trace.json", world)
    if evaluation is None:
        metrics.close()
        return STOPPED if saver else ENDED
    metrics.conclude(engine.storage, mesh, evaluation, seconds=time.perf_counter() - started)
    return 0


@dataclass(frozen=True, slots=True)
class Trainer:
    """What the iterations of a run need."""

    engine: Engine
    loader: Loader
    dataset: Dataset
    schedule: LearningRate
    metrics: Metrics
    trace: Timeline
    model: ModelWriter | None = None
    signals: StopSignals | None = None

    def loop(self, done: int, saver: Saver | None) -> Evaluation | None:
        """Iterate after the ``done`` iterations to the end of the schedule, and save the best model and
        checkpoints on the way; and at the end, or when a signal comes to any rank, the final model.

        Returns:
            The last evaluation; None if a signal ended the run, whose work is on disk then.

        Raises:
            PayloadError: training diverged, or a checkpoint cannot be written; on every rank.
        """
        iterations = self.schedule.iterations
        feeds = self.loader.training(done + 1, iterations)
        for iteration in range(done + 1, iterations + 1):
            self.metrics.begin()
            self.trace.next()
            with self.trace.span("batch", "data"):
                feed = next(feeds)
            self.metrics.fed()
            last = iteration == iterations
            signalled = float(self.signals is not None and self.signals.came)
            result = self.step(iteration, feed, (signalled, float(saver is not None and saver.written())))
            asked_to_stop, written = result.flags
            stop, evaluation = asked_to_stop > 0 and not last, None
            if feed.slot.ends_epoch or last:
                evaluation = self.evaluate(iteration, feed.slot.epoch, result)
            if self.model and (stop or last):
                self.model.conclude(iteration, evaluation)
            with self.trace.span("save", "checkpoint"):
                if saver:
                    saver.after(iteration, written, stop=stop, last=last)
            if stop:
                self._stopped(iteration, saver)
                return None
            if last:
                return evaluation
        evaluation = self._evaluated(iterations)  # all was done before
        if self.model:
            self.model.conclude(iterations, evaluation)
        return evaluation

    def _stopped(self, iteration: int, saver: Saver | None) -> None:
        """A signal has ended the run."""
        if self.signals:
            self.signals.came = True  # perhaps to another rank
        go_on = ": go on with --resume auto" if saver else ""
        saved = "saved" if saver or self.model else "nothing saved"
        self.metrics.print_line(f"stopped by a signal; {saved} after iteration {iteration}{go_on}")

    def step(self, iteration: int, feed: Feed, flags: tuple[float, ...]) -> StepResult:
        """One update of the weights by a global batch, of which ``feed`` is this rank's share."""
        lr = self.schedule.at(iteration)
        result = self.engine.step(feed.batches, targets=feed.targets, iteration=iteration, lr=lr, flags=flags)
        _check_finite(iteration, result)
        self.metrics.iteration(iteration, feed.slot.epoch, result, lr=lr, samples=len(feed.slot.indices))
        return result

    def evaluate(self, iteration: int, epoch: int, result: StepResult) -> Evaluation:
        """Loss and accuracy on the held-out samples, recorded and printed."""
        evaluation = self._evaluated(iteration)
        bytes_per_target = self.dataset.bytes_per_target
        self.metrics.evaluation(iteration, epoch, evaluation, bytes_per_target)
        if self.model:
            self.model.evaluated(iteration, evaluation)
        line = f"epoch {epoch:3}  loss {result.loss:.4f}  test loss {evaluation.loss:.4f}"
        if bytes_per_target:
            line += f"  bits per byte {evaluation.bits_per_byte(bytes_per_target):.4f}"
        self.metrics.print_line(f"{line}  accuracy {evaluation.accuracy:.4f}")
        return evaluation

    def _evaluated(self, iteration: int) -> Evaluation:
        """Evaluate, or raise PayloadError on all ranks if the loss is not finite."""
        evaluation = self.engine.evaluate(self.loader.held_out())
        if not math.isfinite(evaluation.loss):
            raise _diverged(iteration, f"test loss {evaluation.loss}", "--lr")
        return evaluation

    def notes(self) -> list[str]:
        """For people: what the data is, and how long the stages of a pipeline wait for each other."""
        stages, number = self.engine.mesh.pp.size, self.loader.micro_batches
        if stages == 1:
            return [self.dataset.about]
        waits = f"each stage waits {idle_share(stages, number):.0%} of the time"
        return [
            self.dataset.about,
            f"pipeline of {stages} stages, {number} micro-batches: {waits}, less with more micro-batches",
        ]


def _timeline(config: TrainConfig, device: Device) -> Timeline:
    measuring = config.measuring
    return Timeline(device, iterations=measuring.profile_iterations if measuring.profile else 0)


def _profile_note(config: TrainConfig, schedule: LearningRate, done: int) -> list[str]:
    if not config.measuring.profile or schedule.iterations - done >= 2:  # noqa: PLR2004
        return []
    return ["--profile: trace.json stays empty, since it leaves the first iteration out; run two or more"]


def _write_config(config: TrainConfig) -> None:
    """Write the resolved settings into the run's folder, with paths that hold from any other."""
    path = config.run.out / "config.toml"
    try:
        path.write_bytes(to_toml(config.placed()).encode(errors="surrogateescape"))
    except OSError as exc:
        raise UsageError(f"--out: {path} cannot be written: {exc.strerror}", code="file-unwritable") from exc


def _check_finite(iteration: int, result: StepResult) -> None:
    """Raise PayloadError if the run has diverged: on all ranks, which see the same numbers."""
    if not result.finite and not result.skipped:
        flags = "--lr" if result.loss_scale == 1 else "--lr or --loss-scale"
        raise _diverged(iteration, f"loss {result.loss}, gradient norm {result.grad_norm}", flags)


def _diverged(iteration: int, numbers: str, flags: str) -> PayloadError:
    text = f"training diverged at iteration {iteration} ({numbers}); try a lower {flags}"
    return PayloadError(text, code="training-diverged")
