"""The training loop. ``train`` builds the parts of a run, and ``Trainer.loop`` runs its
iterations.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from payload.checkpoint.saver import Saver, StopSignals
from payload.checkpoint.session import (
    CheckpointSession,
    ResumedState,
    command_to_resume,
    resume,
    variables_to_set,
)
from payload.cli.config import TrainConfig
from payload.cli.settings import to_toml
from payload.comm.base import on_all_ranks
from payload.comm.transport import MpiTransport
from payload.data.base import Dataset
from payload.data.datasets import data_record, open_dataset
from payload.data.loader import IterationBatches, IterationSamples, Loader
from payload.device.base import Device
from payload.errors import ENDED, STOPPED, PayloadError, UsageError
from payload.node.heartbeat import record_interruption
from payload.parallel.engine import Engine, Evaluation, StepResult
from payload.parallel.pipeline import MicroBatch, idle_share
from payload.saved_model.writer import ModelWriter
from payload.training.build import (
    build_engine,
    build_loader,
    build_mesh,
    build_units,
    model_record,
    run_identity,
)
from payload.training.metrics import MetricsWriter, SampleWork
from payload.training.schedule import LearningRate, build_schedule
from payload.training.search import find
from payload.training.timing import CommTimes, TimedOptimizer, timed_mesh, timed_units
from payload.training.trace import Timeline

# Batches of an evaluation between two looks for signals, per pipeline stage: a look empties the
# pipeline.
_UNTIL_LOOK = 4


class _StoppedError(Exception):
    """A signal came during an evaluation. Raised on all ranks after the same batch."""


def train(
    config: TrainConfig, device: Device, world: MpiTransport, signals: StopSignals | None = None
) -> int:
    """Train on all ranks of ``world``, record the metrics, and return the exit code.

    signals: when its ``came`` is True, the run saves its work and ends. Default: signals are not
        handled.
    """
    trace = _timeline(config, device)
    times = CommTimes(device)
    mesh, compressor = build_mesh(config.layout, world)
    mesh = timed_mesh(mesh, times, trace)
    checkpoints = CheckpointSession(config, world)
    dataset = open_dataset(config, world, checkpoints.data_state)
    if config.batch.find:
        find(config, device, mesh, dataset)
        return 0
    loader = build_loader(config, dataset, device, mesh)
    units = build_units(config.model, dataset, mesh.context(device))
    engine = build_engine(config, device, mesh, timed_units(units, trace), compressor=compressor)
    if trace.enabled:
        engine.optimizer = TimedOptimizer(engine.optimizer, trace)
    schedule = build_schedule(config, mesh.dp.size, loader.order.per_epoch)
    description = checkpoints.describe(engine, run_identity(config, dataset))
    resumed = resume(checkpoints.chosen, engine, description)
    work = SampleWork(sum(unit.flops for unit in units), tokens=dataset.facts.get("tokens"))
    metrics = MetricsWriter(
        config, device, world, work, times, done=resumed.iteration, evaluated=resumed.evaluated
    )
    on_all_ranks(world, lambda: _write_config(config) if world.rank == 0 else None)
    metrics.introduce(
        on_all_ranks(world, lambda: data_record(config, dataset) if world.rank == 0 else {})
    )

    record = model_record(config.model, dataset)
    model = None
    if config.checkpoints.save_model:
        resumed_model = (resumed.path, resumed.model) if resumed.path else None
        model = ModelWriter(config.run.out / "model", record, engine, units, resumed=resumed_model)
    trainer = Trainer(
        engine,
        loader,
        dataset,
        schedule,
        metrics,
        trace,
        model,
        signals,
        eval_interval=config.evaluation.eval_interval,
    )
    notes = (*trainer.notes(), *checkpoints.notes, *resumed.notes)
    for note in (*_profile_note(config, schedule, resumed.iteration), *notes):
        metrics.print_line(note)
    started = time.perf_counter()
    save_model = model.save_best if model else lambda _: record.fields()
    saving = checkpoints.saver(
        engine, description, metrics, data_state=dataset.data_state, save_model=save_model
    )
    with saving as saver:
        evaluation = trainer.loop(resumed, saver)
    trace.write(config.run.out / "trace.json", world)
    if evaluation is None:
        metrics.close()
        return STOPPED if saver else ENDED
    metrics.conclude(engine.storage, mesh, evaluation, seconds=time.perf_counter() - started)
    return 0


@dataclass(frozen=True, slots=True)
class Trainer:
    """The objects that the iterations of a training run use."""

    engine: Engine
    loader: Loader
    dataset: Dataset
    schedule: LearningRate
    metrics: MetricsWriter
    trace: Timeline
    model: ModelWriter | None = None
    signals: StopSignals | None = None
    # Iterations between two evaluations. None: an evaluation after each epoch.
    eval_interval: int | None = None

    def loop(self, resumed: ResumedState, saver: Saver | None) -> Evaluation | None:
        """Run the iterations that are left of the schedule, or until any rank gets a signal.

        Save the best model and the final model, and if there is a saver, checkpoints. A checkpoint
        that is due, and the model, are complete before an evaluation begins.

        Returns:
            The last evaluation. None: a signal ended the run.

        Raises:
            PayloadError: training diverged, or a checkpoint cannot be written. Raised on every
                rank.
        """
        iterations = self.schedule.iterations
        done = resumed.iteration
        evaluation = None
        if done >= iterations or not resumed.evaluated:
            evaluation = self._evaluate_resumed(resumed, saver)
            if evaluation is None:
                return None
        feeds = self.loader.training(done + 1, iterations)
        for iteration in range(done + 1, iterations + 1):
            self.metrics.begin()
            self.trace.next()
            with self.trace.span("batch", "data"):
                feed = next(feeds)
            self.metrics.mark_data_ready()
            last = iteration == iterations
            flags = self._signalled(), float(saver is not None and saver.written())
            result = self.step(iteration, feed, flags)
            asked_to_stop, written = result.flags
            stop = asked_to_stop > 0 and not last
            due = self._is_evaluation_due(feed.slot, last=last)
            if self.model and (stop or due):
                with self.metrics.saving():
                    self.model.write(iteration)
            with self.trace.span("save", "checkpoint"):
                if saver:
                    saver.after(iteration, written, stop=stop, last=last, evaluated=not due)
            if due and not stop:
                evaluation = self.evaluate(iteration, feed.slot.epoch, result)
                stop = evaluation is None
                if saver:
                    saver.evaluated(iteration, stopped=stop)
            if stop:
                self._report_stop(iteration, saver)
                return None
        return evaluation

    def _is_evaluation_due(self, slot: IterationSamples, *, last: bool) -> bool:
        ends_interval = (
            slot.iteration % self.eval_interval == 0 if self.eval_interval else slot.ends_epoch
        )
        return last or ends_interval

    def _evaluate_resumed(self, resumed: ResumedState, saver: Saver | None) -> Evaluation | None:
        """Evaluate the resumed weights, because it is due or they are the final weights. None: a
        signal.
        """
        done = resumed.iteration
        if self.model:
            with self.metrics.saving():
                self.model.write(done)
        if resumed.evaluated:
            evaluation = self._evaluate(done)
            if evaluation is not None and self.model:
                self.model.evaluated(evaluation)
        else:
            evaluation = self.evaluate(done, self.loader.order.at(done).epoch)
        if evaluation is None:
            if saver:
                saver.evaluated(done, stopped=True)
            self._report_stop(done, saver)
        return evaluation

    def _signalled(self) -> float:
        return float(self.signals is not None and self.signals.came)

    def _report_stop(self, iteration: int, saver: Saver | None) -> None:
        if self.signals:
            # The signal may have reached only another rank.
            self.signals.came = True
        saved = "saved" if saver or self.model else "nothing saved"
        self.metrics.print_line(f"stopped by a signal; {saved} after iteration {iteration}")
        record_interruption(iteration, continues=saver is not None)
        if saver:
            if names := ", ".join(variables_to_set(os.environ)):
                self.metrics.print_line(
                    f"first set these variables again, as their values are not recorded: {names}"
                )
            command = command_to_resume(sys.argv[1:], os.environ)
            self.metrics.print_line(f"unless the job is restarted, continue with: {command}")

    def step(self, iteration: int, feed: IterationBatches, flags: tuple[float, ...]) -> StepResult:
        """Update the weights with a global batch. ``feed`` is this rank's share of the batch.

        flags: this rank's numbers. The result's ``flags`` are the sums of these numbers over all
            ranks.
        """
        lr = self.schedule.at(iteration)
        result = self.engine.step(
            feed.batches, targets=feed.targets, iteration=iteration, lr=lr, flags=flags
        )
        _check_finite(iteration, result)
        if failure := self.engine.take_capture_failure():
            self.metrics.print_line(f"--capture has no effect: {failure}")
        self.metrics.iteration(
            iteration, feed.slot.epoch, result, lr=lr, samples=len(feed.slot.indices)
        )
        return result

    def evaluate(
        self, iteration: int, epoch: int, result: StepResult | None = None
    ) -> Evaluation | None:
        """Evaluate on the held-out samples, record and print the result, and save the model if it
        is best.

        result: of the iteration, if this run made it. Return None if a signal came.
        """
        began = time.perf_counter()
        evaluation = self._evaluate(iteration)
        if evaluation is None:
            return None
        seconds = time.perf_counter() - began
        bytes_per_target = self.dataset.bytes_per_target
        self.metrics.evaluation(iteration, epoch, evaluation, bytes_per_target, seconds=seconds)
        if self.model:
            self.model.evaluated(evaluation)
        step = f"  iteration {iteration}" if self.eval_interval else ""
        loss = f"  loss {result.loss:.4f}" if result else ""
        line = f"epoch {epoch:3}{step}{loss}  test loss {evaluation.loss:.4f}"
        if bytes_per_target:
            line += f"  bits per byte {evaluation.bits_per_byte(bytes_per_target):.4f}"
        self.metrics.print_line(f"{line}  accuracy {evaluation.accuracy:.4f}")
        return evaluation

    def _evaluate(self, iteration: int) -> Evaluation | None:
        """Evaluate on the held-out samples, or return None if any rank gets a signal.

        Raises PayloadError on every rank if the loss is not finite.
        """
        try:
            evaluation = self.engine.evaluate(self._held_out())
        except _StoppedError:
            return None
        if not math.isfinite(evaluation.loss):
            raise _diverged(iteration, f"test loss {evaluation.loss}", "--lr")
        return evaluation

    def _held_out(self) -> Iterator[MicroBatch]:
        mesh = self.engine.mesh
        for number, batch in enumerate(self.loader.held_out()):
            if number % (_UNTIL_LOOK * mesh.pp.size) == 0 and any(
                mesh.world.sum([self._signalled()])
            ):
                raise _StoppedError
            yield batch

    def notes(self) -> list[str]:
        """Return lines for the user about the data and the idle time of pipeline stages."""
        stages = self.engine.mesh.pp.size
        micro_batches = self.loader.micro_batches
        if stages == 1:
            return [self.dataset.about]
        idle = f"each stage is idle {idle_share(stages, micro_batches):.0%} of the time"
        pipeline = f"pipeline of {stages} stages, {micro_batches} micro-batches"
        return [
            self.dataset.about,
            f"{pipeline}: {idle}; a smaller --micro-batch-size lowers this share",
        ]


def _timeline(config: TrainConfig, device: Device) -> Timeline:
    measuring = config.measuring
    return Timeline(device, iterations=measuring.profile_iterations if measuring.profile else 0)


def _profile_note(config: TrainConfig, schedule: LearningRate, done: int) -> list[str]:
    if not config.measuring.profile or schedule.iterations - done >= 2:  # noqa: PLR2004
        return []
    return [
        (
            "--profile: trace.json will be empty, because it omits the first iteration; run at "
            "least 2 iterations"
        )
    ]


def _write_config(config: TrainConfig) -> None:
    """Write the resolved settings to the run's folder, with absolute paths."""
    path = config.run.out / "config.toml"
    try:
        path.write_bytes(to_toml(config.placed()).encode(errors="surrogateescape"))
    except OSError as exc:
        raise UsageError(
            f"--out: {path} cannot be written: {exc.strerror}", code="file-unwritable"
        ) from exc


def _check_finite(iteration: int, result: StepResult) -> None:
    """Raise PayloadError if the loss or the gradient is not finite. ``result`` is the same on all
    ranks.
    """
    if not result.finite and not result.skipped:
        flags = "--lr" if result.loss_scale == 1 else "--lr or --loss-scale"
        raise _diverged(iteration, f"loss {result.loss}, gradient norm {result.grad_norm}", flags)


def _diverged(iteration: int, numbers: str, flags: str) -> PayloadError:
    text = f"training diverged at iteration {iteration} ({numbers}); try a lower {flags}"
    return PayloadError(text, code="training-diverged")
