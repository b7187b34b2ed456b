"""Writes a run's measurements to metrics.jsonl and stdout, on rank 0."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from payload.cli.config import TrainConfig
from payload.cli.report import ResultWriter, place
from payload.cli.settings import to_record
from payload.comm.base import Communicator, on_all_ranks
from payload.device.base import Device
from payload.errors import PayloadError
from payload.node.host import host_memory_bytes, hostname, own_cores, versions
from payload.node.nvml import Card, open_card
from payload.optim.precision import PRECISIONS
from payload.parallel.engine import Evaluation, StepResult
from payload.parallel.mesh import Mesh
from payload.parallel.zero import FlatStorage
from payload.training.gpu_use import gpu_of, total_joules
from payload.training.peak import find_peak
from payload.training.tensorboard import EventFile
from payload.training.timing import CommTimes

# Number of iterations over which the ranks' times are averaged before they are compared.
_WINDOW = 10

FLOPS_FORMULA = "3 x the matrix products of the forward pass; recomputation is not counted"
"""Each product of the forward pass has two in the backward pass: one for the gradient of each
factor.
"""


@dataclass(frozen=True, slots=True)
class SampleWork:
    """The number of tokens and floating-point operations of a training sample."""

    # Operations of a sample's forward pass, summed over tensor-parallel ranks and pipeline stages.
    flops: float
    # If None, samples are images.
    tokens: int | None = None


@dataclass(slots=True)
class LostRecords:
    """The records that a resumed run has removed from its file, because it computes their
    iterations again.

    step: of the last iteration. begin, end: Unix seconds, from the start of the first iteration to
    the last record. seconds: of iterations, data_s: of them waiting for data. stall_s: of saving.
    """

    iterations: int = 0
    step: int = 0
    begin: float = math.inf
    end: float = 0.0
    seconds: float = 0.0
    data_s: float = 0.0
    stall_s: float = 0.0
    evaluation_s: float = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        seconds, data_ms, stall_s, save_s = (
            float(record.get(name) or 0.0) for name in ("seconds", "data_ms", "stall_s", "save_s")
        )
        self.begin = min(self.begin, record["time"] - seconds)
        self.end = max(self.end, record["time"])
        self.stall_s += stall_s + save_s
        if record["kind"] == "evaluation":
            self.evaluation_s += seconds
        elif record["kind"] == "iteration":
            self.iterations += 1
            self.step = max(self.step, int(record.get("step") or 0))
            self.seconds += seconds
            self.data_s += data_ms / 1e3


class MetricsWriter(ResultWriter):
    """Writer of a run's metrics. All ranks must call ``introduce`` and ``conclude``; only rank 0
    writes.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: Device,
        comm: Communicator,
        work: SampleWork,
        comm_times: CommTimes,
        *,
        done: int = 0,
        evaluated: bool = True,
    ) -> None:
        """Open the files, and remove lines about iterations after ``done``, which a resumed run
        repeats.

        evaluated: whether the evaluation after iteration ``done`` is complete. Otherwise it is
            repeated too.

        Raises UsageError on every rank if a file cannot be written.
        """
        self._done = done
        self._evaluated = evaluated
        self._lost = LostRecords()
        super().__init__(
            comm, config.run.out / "metrics.jsonl", keep=self._is_done if done else None
        )
        self._config = config
        self._device = device
        self._comm = comm
        self._work = work
        self._comm_times = comm_times
        # Computing time of each iteration on this rank since the last evaluation, in ms.
        self._computed: list[float] = []
        # How long the model was saved since the last evaluation.
        self._save_s = 0.0
        self._card: Card | None = open_card(device.gpu["uuid"]) if device.gpu else None
        # Sum over all ranks. None: unknown.
        self._peak_tflops: float | None = None
        board = comm.rank == 0 and config.measuring.tensorboard
        folder = config.run.out / "tensorboard"
        self._board = on_all_ranks(comm, lambda: EventFile(folder, done=done) if board else None)

    def _is_done(self, record: dict[str, Any]) -> bool:
        done = self._done if self._evaluated or record["kind"] != "evaluation" else self._done - 1
        is_done = record["kind"] != "result" and int(record.get("step", 0)) <= done
        if not is_done and record["kind"] != "result":
            self._lost.add(record)
        return is_done

    def introduce(self, data: Mapping[str, Any]) -> None:
        """Record the ranks, their devices, the settings, and ``data``, a description of the data
        set.
        """
        more = {"cores": own_cores(), "device_note": self._device.note}
        ranks = self._comm.allgather({**place(self._comm.rank, self._device), **more})
        dtype = PRECISIONS[self._config.precision.precision].compute
        peak = find_peak(self._device, self._comm, dtype, self._config.measuring.peak_tflops)
        peaks = self._comm.allgather(peak.tflops)
        known_peaks = [tflops for tflops in peaks if tflops is not None]
        self._peak_tflops = sum(known_peaks) if len(known_peaks) == len(peaks) else None
        self._joules_before = self._joules()
        self.write(
            "run",
            done=self._done,
            lost=asdict(self._lost) if self._lost.end else None,
            world_size=self._comm.size,
            ranks=ranks,
            peak_tflops=peaks,
            peak_source=peak.source,
            flops_per_sample=3 * self._work.flops,
            flops_formula=FLOPS_FORMULA,
            config=to_record(self._config),
            given=sorted(self._config.given),
            data=data,
            versions={**versions("numpy", "mpi4py", "cupy-cuda12x"), "mpi": self._comm.library},
        )
        hosts = sorted({str(rank["host"]) for rank in ranks})
        reason = f" ({self._device.note})" if self._device.note else ""
        processor = self._device.gpu["name"] if self._device.gpu else f"CPU{reason}"
        precision = self._config.precision.precision
        self.print_line(
            f"world size {self._comm.size}, on {', '.join(hosts)}; {precision} on {processor}"
        )

    def begin(self) -> None:
        """Start the timers of an iteration."""
        self._comm_times.take()
        self._began = self._data_ready = time.perf_counter()

    def mark_data_ready(self) -> None:
        """Note that the iteration's samples are ready now."""
        self._data_ready = time.perf_counter()

    def iteration(
        self, step: int, epoch: int, result: StepResult, *, lr: float, samples: int
    ) -> None:
        """Record a finished iteration, in the file and in TensorBoard."""
        seconds = time.perf_counter() - self._began
        comm = self._comm_times.take()
        data_s = self._data_ready - self._began
        self._computed.append(1e3 * (seconds - data_s - comm.exposed_s))
        flops_per_s = 3 * self._work.flops * samples / seconds
        fields = {
            "loss": result.loss,
            "lr": lr,
            "grad_norm": None if result.skipped else result.grad_norm,
            "loss_scale": result.loss_scale,
            "skipped": result.skips,
            "seconds": seconds,
            "samples_per_s": samples / seconds,
            "tokens_per_s": self._work.tokens and self._work.tokens * samples / seconds,
            "mfu": self._peak_tflops and flops_per_s / (self._peak_tflops * 1e12),
            "data_ms": data_s * 1e3,
            "comm_total_ms": comm.total_s * 1e3,
            "comm_exposed_ms": comm.exposed_s * 1e3,
            "comm_sent_bytes": comm.bytes_sent,
            "memory_bytes": self._device.memory_bytes(),
            "host_memory_bytes": host_memory_bytes(),
        }
        self.write("iteration", step=step, epoch=epoch, **fields)
        if self._board:
            self._board.write("training", step, fields)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long the ``with`` block saves the model."""
        began = time.perf_counter()
        yield
        self._save_s += time.perf_counter() - began

    def evaluation(
        self,
        step: int,
        epoch: int,
        evaluation: Evaluation,
        bytes_per_target: float | None = None,
        *,
        seconds: float,
    ) -> None:
        """Record an evaluation that took this long, with the ranks' computing times since the last
        evaluation.
        """
        fields = {"accuracy": evaluation.accuracy, "loss": evaluation.loss}
        if bytes_per_target:
            # The targets are text. An infinite perplexity is left out.
            fields["bits_per_byte"] = evaluation.bits_per_byte(bytes_per_target)
            if math.isfinite(evaluation.perplexity):
                fields["perplexity"] = evaluation.perplexity
        times = {"seconds": seconds, "save_s": self._save_s, **self._compute_times()}
        self._save_s = 0.0
        self.write("evaluation", step=step, epoch=epoch, **fields, **times)
        if self._board:
            self._board.write("evaluation", step, fields)

    def _compute_times(self) -> dict[str, Any]:
        """Return the ranks' mean computing times per iteration in ms, and how often each rank was
        slowest.

        The ranks are compared over groups of iterations. Waiting for data or other ranks is not
        computing.
        """
        windows = [self._computed[i : i + _WINDOW] for i in range(0, len(self._computed), _WINDOW)]
        own_means = [sum(window) / len(window) for window in windows]
        self._computed.clear()
        ranks = self._comm.allgather(own_means)
        slowest = Counter(means.index(max(means)) for means in zip(*ranks, strict=True))
        return {
            "compute_ms": [round(sum(means) / len(means), 3) for means in ranks if means],
            "slowest": [slowest[rank] for rank in range(len(ranks))],
            "windows": len(own_means),
        }

    def conclude(
        self, storage: FlatStorage, mesh: Mesh, evaluation: Evaluation, *, seconds: float
    ) -> None:
        """Record the final result. Raises PayloadError if ranks with the same parameters differ in
        values.
        """
        weights = storage.optimizer_device.to_host(storage.master_weights)
        digest = hashlib.sha256(weights.tobytes()).hexdigest()
        place = (mesh.pp.rank, mesh.tp.rank, mesh.dp.rank if storage.sharded else 0)
        hashes, hosts, places = zip(*self._comm.allgather((digest, hostname(), place)), strict=True)
        self.write(
            "result",
            accuracy=evaluation.accuracy,
            loss=evaluation.loss,
            param_hashes=list(hashes),
            hosts=list(hosts),
            world_size=self._comm.size,
            seconds=seconds,
            energy_j=self._energy_j(),
            peak_memory_bytes=self._comm.allgather(self._device.memory_bytes()),
        )
        self.close()
        # For each rank, the first rank that holds the same parameters.
        firsts = [places.index(place) for place in places]
        mismatches = [
            f"rank {rank} on {hosts[rank]} differs from rank {first} on {hosts[first]}"
            for rank, first in enumerate(firsts)
            if hashes[rank] != hashes[first]
        ]
        if mismatches:
            raise PayloadError(
                f"ranks' parameters differ: {', '.join(mismatches)}", code="parameters-differ"
            )
        replicas = places.count(places[0])
        replicas_note = f", and the same on its {replicas} replicas" if replicas > 1 else ""
        same = "on all ranks" if replicas == len(places) else f"on rank 0{replicas_note}"
        self.print_line(f"{seconds:.1f} s; parameters {digest[:12]} {same}")
        self.print_line(f"test accuracy {evaluation.accuracy:.4f}")

    def close(self) -> None:
        """Close the files."""
        super().close()
        if self._board:
            self._board.close()

    def _joules(self) -> float | None:
        return self._card.energy_j() if self._card else None

    def _energy_j(self) -> float | None:
        """Return the joules used by all GPUs since ``introduce``; None if they are not known."""
        start = self._joules_before
        end = self._joules()
        processes = self._card.processes() if self._card else None
        own_joules = None if start is None or end is None else end - start
        rank = gpu_of(self._device), own_joules, len(processes or ())
        joules = total_joules(self._comm.allgather(rank))
        return None if joules is None else round(joules, 3)
