"""Benchmark of training on all ranks and on fewer: throughput, MFU, scaling, communication.

The compared configurations (sides) take turns in a job, a few iterations each, so that other load
on the machines affects all sides equally. With more ranks, strong scaling keeps the global batch,
and weak scaling keeps the share of each rank. Another side skips the sums of gradients. The time
that this saves is the cost of communication that does not overlap with computation.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from payload.cli.arguments import check
from payload.cli.config import BenchConfig
from payload.cli.report import ResultWriter, begin
from payload.comm import make_transport
from payload.comm.base import Communicator, CommunicatorWrapper, CompletedOperation, Pending
from payload.comm.transport import MpiTransport
from payload.data.base import Dataset
from payload.data.datasets import open_dataset
from payload.data.loader import IterationBatches
from payload.device.base import Array, Device
from payload.node.heartbeat import beat
from payload.node.nvml import open_card
from payload.optim.precision import PRECISIONS
from payload.parallel.engine import Engine
from payload.parallel.ranks import compared_ranks
from payload.training.build import build_engine, build_loader, build_mesh, build_units
from payload.training.gpu_use import SHORTEST_TURN_S, GpuMeter, figures_of, gpu_of
from payload.training.metrics import FLOPS_FORMULA, SampleWork
from payload.training.peak import find_peak
from payload.training.timing import CommTime, CommTimes, timed_mesh
from payload.training.trace import OFF

Record = dict[str, Any]

_LR = 1e-6
"""Small, so that training neither learns nor diverges."""


def run(config: BenchConfig) -> int:
    """Measure all configurations (sides), print the results, and return the exit code."""
    _, device = begin(config.run.device, config.precision)
    # Without ``several``, because a single rank is a valid side.
    check(config, gpu=device.gpu is not None)
    bench(
        config,
        device,
        make_transport(config.layout.comm, device, cuda_aware=config.layout.cuda_aware),
    )
    return 0


@dataclass(frozen=True, slots=True)
class BenchCase:
    """A configuration to measure: ``ranks`` ranks train on global batches of ``batch`` samples."""

    name: str
    ranks: int
    batch: int
    # Whether the sums of gradients are skipped.
    silent: bool = False


@dataclass(frozen=True, slots=True)
class GpuColumn:
    """A figure of the GPUs in the table. form: its format. unit: that in which it is shown."""

    key: str
    name: str
    form: str = ".1f"
    unit: float = 1.0

    def shown(self, record: Record) -> str:
        return format(record[self.key] / self.unit, self.form) if self.key in record else ""


_GPU_COLUMNS = (
    GpuColumn("gpu_idle_percent", "idle, %"),
    GpuColumn("gpu_sm_percent", "SMs, %"),
    GpuColumn("gpu_tensor_percent", "tensor, %"),
    GpuColumn("gpu_bandwidth_percent", "memory, %"),
    GpuColumn("gpu_bandwidth_bytes_per_s", "memory, GB/s", ".0f", 1e9),
    GpuColumn("samples_per_joule", "samples/J", ".4g"),
)


@dataclass(slots=True)
class BenchRun:
    """This rank's engine, data and measurements for a configuration (side)."""

    engine: Engine
    feed: IterationBatches
    times: CommTimes
    work: SampleWork
    # None: NVML does not know this rank's GPU.
    meter: GpuMeter | None
    iterations: int = 0
    # An entry for each measured iteration.
    seconds: list[float] = field(default_factory=list)
    comm: list[CommTime] = field(default_factory=list)

    def train(self, iterations: int) -> None:
        """Train on the same batch for some iterations."""
        for _ in range(iterations):
            self.iterations += 1
            beat()
            self.times.take()
            began = time.perf_counter()
            feed = self.feed
            self.engine.step(feed.batches, targets=feed.targets, iteration=self.iterations, lr=_LR)
            self.engine.device.synchronize()
            self.seconds.append(time.perf_counter() - began)
            self.comm.append(self.times.take())

    def train_measured(self, iterations: int, batch: int) -> None:
        """Train on the same batch of so many samples, and measure the use of this rank's GPU."""
        if self.meter:
            self.meter.begin()
        self.train(iterations)
        if self.meter:
            self.meter.end(iterations * batch)


def bench(config: BenchConfig, device: Device, world: MpiTransport) -> list[Record]:
    """Measure all configurations. Return a result for each, on all ranks. Rank 0 also prints the
    results.
    """
    report = ResultWriter(world, config.run.out / "bench.jsonl")
    dataset = open_dataset(config, world)
    sides = sides_of(config, world.size)
    teams = dict(_teams(config, device, world, dataset, sides))
    for round_number in range(config.bench.rounds + 1):
        for side in sides:
            world.barrier()
            team = teams.get(side)
            if team and round_number:
                team.train_measured(config.bench.turn, side.batch)
            elif team:
                team.train(config.bench.warmup)
        # Discard the times of the warm-up round.
        if not round_number:
            for team in teams.values():
                team.seconds.clear()
                team.comm.clear()
                if failure := team.engine.take_capture_failure():
                    report.print_line(f"--capture has no effect: {failure}")
    world.barrier()
    dtype = PRECISIONS[config.precision.precision].compute
    peak = find_peak(device, world, dtype, config.measuring.peak_tflops)
    peaks = world.allgather(peak.tflops)
    # Rank 0 takes part in every side.
    own_records = [_record(side, teams[side], peaks) for side in sides] if world.rank == 0 else []
    records = world.allgather(own_records)[0]
    for record, side in zip(records, sides, strict=True):
        record.update(_gpu_figures(device, world, teams.get(side)))
    _compare(records)
    for record in records:
        report.write("bench", **record)
    report.print_line(_table(records))
    for line in _gpu_lines(records, config.bench.turn, has_gpu=device.gpu is not None):
        report.print_line(line)
    about = {"world_size": world.size, "model": config.model.model, "peak_source": peak.source}
    report.answer(**about, flops_formula=FLOPS_FORMULA, sides=records)
    report.close()
    return records


def sides_of(config: BenchConfig, size: int) -> list[BenchCase]:
    """Return the sides: all ranks, with and without gradient sums; fewer ranks, strong and weak
    scaling.

    size: ranks of the job. Raises UsageError if a number in ``--ranks`` does not fit the job or the
        layout.
    """
    batch = config.batch.global_batch_size
    counts = compared_ranks(config, size)
    sides = [BenchCase("all", size, batch)]
    if size > config.layout.tp * config.layout.pp:
        sides.append(BenchCase("all, silent", size, batch, silent=True))
    for ranks in sorted({ranks for ranks in counts if ranks < size}, reverse=True):
        sides.append(BenchCase(f"strong {ranks}", ranks, batch))
        sides.append(BenchCase(f"weak {ranks}", ranks, max(1, batch * ranks // size)))
    return sides


def _teams(
    config: BenchConfig,
    device: Device,
    world: MpiTransport,
    dataset: Dataset,
    sides: Sequence[BenchCase],
) -> Iterator[tuple[BenchCase, BenchRun]]:
    """Yield (side, team) for each side with this rank. Sides that differ only in batch share an
    engine.
    """
    card = open_card(device.gpu["uuid"]) if device.gpu else None
    for (ranks, silent), group in itertools.groupby(
        sides, key=lambda side: (side.ranks, side.silent)
    ):
        members = world.split(int(world.rank < ranks), world.rank)
        if world.rank >= ranks:
            continue
        times = CommTimes(device)
        mesh, compressor = build_mesh(config.layout, members)
        mesh = timed_mesh(
            replace(mesh, dp=SilentCommunicator(mesh.dp)) if silent else mesh, times, OFF
        )
        units = build_units(config.model, dataset, mesh.context(device))
        engine = build_engine(config, device, mesh, units, compressor=compressor)
        work = SampleWork(sum(unit.flops for unit in units), dataset.facts.get("tokens"))
        for side in group:
            resized = replace(config, batch=replace(config.batch, global_batch_size=side.batch))
            feed = next(build_loader(resized, dataset, device, mesh).training(1, 1))
            yield side, BenchRun(engine, feed, times, work, GpuMeter(card) if card else None)


def _record(side: BenchCase, team: BenchRun, peaks: Sequence[float | None]) -> Record:
    """Return a side's results: medians over this rank's iterations. peaks: peak TFLOP/s of each
    rank.
    """
    seconds = statistics.median(team.seconds)
    samples_per_s = side.batch / seconds
    known_peaks = [peak for peak in peaks[: side.ranks] if peak is not None]
    peak = sum(known_peaks) * 1e12 if len(known_peaks) == side.ranks else None
    return {
        "side": side.name,
        "ranks": side.ranks,
        "global_batch_size": side.batch,
        "iterations": len(team.seconds),
        "iteration_ms": 1e3 * seconds,
        "samples_per_s": samples_per_s,
        "tokens_per_s": team.work.tokens and team.work.tokens * samples_per_s,
        "mfu": peak and 3 * team.work.flops * samples_per_s / peak,
        "comm_total_ms": 1e3 * statistics.median(times.total_s for times in team.comm),
        "comm_exposed_ms": 1e3 * statistics.median(times.exposed_s for times in team.comm),
        "comm_sent_bytes": team.comm[-1].bytes_sent,
        "memory_bytes": team.engine.device.memory_bytes(),
    }


def _gpu_figures(device: Device, world: Communicator, team: BenchRun | None) -> Record:
    """Return the use of the GPUs of a side's ranks, on all ranks. A GPU that ranks share counts
    once. team: this rank's, if it takes part in the side.
    """
    gpu = gpu_of(device)
    use = team.meter.use() if team and team.meter else None
    gathered = world.allgather((gpu, team is not None, use))
    ranks = Counter(gpu for gpu, *_ in gathered)
    uses = {gpu: (use, ranks[gpu]) for gpu, is_member, use in gathered if is_member}
    return figures_of([*uses.values()])


def _compare(records: Sequence[Record]) -> None:
    """Add, in place, the scaling efficiencies and the time that sums of gradients cost to the
    records.
    """
    all_ranks = records[0]
    for record in records:
        if record["side"] == "all, silent":
            all_ranks["silence_saves_ms"] = all_ranks["iteration_ms"] - record["iteration_ms"]
    for kind in ("strong", "weak"):
        series = [record for record in records if record["side"].startswith(kind)]
        if series:
            fewest = series[-1]
            for record in (all_ranks, *series):
                speedup = record["samples_per_s"] / fewest["samples_per_s"]
                record[f"{kind}_efficiency"] = speedup * fewest["ranks"] / record["ranks"]


def _table(records: Sequence[Record]) -> str:
    columns = (
        f"{'side':<14}{'ranks':>6}{'batch':>7}{'ms':>10}{'samples/s':>12}{'tokens/s':>11}{'MFU':>7}"
    )
    lines = [f"{columns}{'exposed ms':>12}{'strong':>8}{'weak':>7}"]
    for record in records:
        tokens = record["tokens_per_s"]
        mfu = record["mfu"]
        lines.append(
            f"{record['side']:<14}{record['ranks']:>6}{record['global_batch_size']:>7}{record['iteration_ms']:>10.2f}"
            f"{record['samples_per_s']:>12.1f}{'' if tokens is None else format(tokens, '.0f'):>11}"
            f"{'' if mfu is None else format(mfu, '.1%'):>7}{record['comm_exposed_ms']:>12.2f}"
            f"{_percent(record.get('strong_efficiency')):>8}{_percent(record.get('weak_efficiency')):>7}"
        )
    if "silence_saves_ms" in records[0]:
        lines.append(
            f"without the sums of gradients an iteration is {records[0]['silence_saves_ms']:.2f} "
            "ms shorter"
        )
    return "\n".join(lines)


def _gpu_lines(records: Sequence[Record], turn: int, *, has_gpu: bool) -> list[str]:
    """Return a table of the use of the GPUs, and the notes that it needs. turn: iterations in a
    turn.
    """
    lines = []
    measured = [any(column.key in record for column in _GPU_COLUMNS) for record in records]
    if any(measured):
        columns = [column for column in _GPU_COLUMNS if any(column.key in r for r in records)]
        lines.append(f"{'GPUs':<14}{''.join(f'{column.name:>14}' for column in columns)}")
        for record in records:
            cells = "".join(f"{column.shown(record):>14}" for column in columns)
            lines.append(f"{record['side']:<14}{cells}")
    turn_s = turn * min(record["iteration_ms"] for record in records) / 1e3
    if has_gpu and not all(measured) and turn_s < SHORTEST_TURN_S:
        enough = math.ceil(1.1 * SHORTEST_TURN_S / turn_s * turn)
        lines.append(
            f"turns of {SHORTEST_TURN_S:g} s or more tell what the GPUs do: --turn {enough}"
        )
    return lines


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


class SilentCommunicator(CommunicatorWrapper[Communicator]):
    """A wrapper of a communicator that skips its sums and allgathers of arrays, but no other
    calls.
    """

    def iallreduce(self, array: Array) -> Pending:  # noqa: ARG002
        return CompletedOperation()

    def ireduce_scatter(self, array: Array, out: Array) -> Pending:
        out[...] = array[self.rank * out.size : (self.rank + 1) * out.size]
        return CompletedOperation()

    def iallgather_into(self, part: Array, out: Array) -> Pending:
        out[self.rank * part.size : (self.rank + 1) * part.size] = part
        return CompletedOperation()
