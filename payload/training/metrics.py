"""metrics.jsonl and the lines on stdout: what a run was, did and came to, as rank 0 tells it."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from payload.cli.config import TrainConfig
from payload.cli.report import Report, place
from payload.cli.settings import to_record
from payload.comm.base import Communicator, on_all_ranks
from payload.device.base import Device
from payload.errors import PayloadError
from payload.node.host import host_memory_bytes, hostname, own_cores, versions
from payload.node.sensors import Gpus
from payload.optim.precision import PRECISIONS
from payload.parallel.engine import Evaluation, StepResult
from payload.parallel.mesh import Mesh
from payload.parallel.zero import Storage
from payload.training.peak import find_peak
from payload.training.tensorboard import EventFile
from payload.training.timing import CommTimes

_WINDOW = 10  # iterations, over which a rank's time is averaged before ranks are compared

FLOPS_FORMULA = "3 x the matrix products of the forward pass; what is recomputed is not counted"
"""Each product of the forward pass has two in the backward pass: the gradients by either factor."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one sample is, and costs."""

    flops: float  # of its forward pass, over all ranks that share it
    tokens: int | None = None  # None: it is not made of tokens


class Metrics(Report):
    """The record of one run. All ranks must call ``introduce`` and ``conclude``; only rank 0 writes."""

    def __init__(
        self,
        config: TrainConfig,
        device: Device,
        comm: Communicator,
        work: Work,
        comm_times: CommTimes,
        *,
        done: int = 0,
    ) -> None:
        """
        Args:
            done: iterations, with which the run goes on. What the file has of later ones is removed.

        Raises:
            UsageError: a file cannot be written; on every rank.
        """
        self._done = done
        super().__init__(comm, config.run.out / "metrics.jsonl", keep=self._is_done if done else None)
        self._config, self._device, self._comm, self._work = config, device, comm, work
        self._comm_times = comm_times
        self._computed: list[float] = []  # milliseconds of this rank's iterations since the last evaluation
        self._gpus = Gpus()
        self._peak_tflops: float | None = None  # of all ranks
        board = comm.rank == 0 and config.measuring.tensorboard
        folder = config.run.out / "tensorboard"
        self._board = on_all_ranks(comm, lambda: EventFile(folder, done=done) if board else None)

    def _is_done(self, record: dict[str, Any]) -> bool:
        """Whether it is of an iteration with which the run goes on."""
        return record["kind"] != "result" and int(record.get("step", 0)) <= self._done

    def introduce(self, data: Mapping[str, Any]) -> None:
        """Who takes part, with what; ``data``: what is read, as ``data_record`` says it."""
        more = {"cores": own_cores(), "device_note": self._device.note}
        ranks = self._comm.allgather({**place(self._comm.rank, self._device), **more})
        dtype = PRECISIONS[self._config.precision.precision].compute
        peak = find_peak(self._device, self._comm, dtype, self._config.measuring.peak_tflops)
        peaks = self._comm.allgather(peak.tflops)
        known = [one for one in peaks if one is not None]
        self._peak_tflops = sum(known) if len(known) == len(peaks) else None
        self._joules_before = self._joules()
        self.write(
            "run",
            done=self._done,
            world_size=self._comm.size,
            ranks=ranks,
            peak_tflops=peaks,
            peak_source=peak.source,
            flops_per_sample=3 * self._work.flops,
            flops_formula=FLOPS_FORMULA,
            config=to_record(self._config),
            data=data,
            versions={**versions("numpy", "mpi4py", "cupy-cuda12x"), "mpi": self._comm.library},
        )
        hosts = sorted({str(rank["host"]) for rank in ranks})
        because = f" ({self._device.note})" if self._device.note else ""
        where = self._device.gpu["name"] if self._device.gpu else f"CPU{because}"
        precision = self._config.precision.precision
        self.print_line(f"world size {self._comm.size}, on {', '.join(hosts)}; {precision} on {where}")

    def begin(self) -> None:
        """An iteration begins here."""
        self._comm_times.take()
        self._began = self._fed = time.perf_counter()

    def fed(self) -> None:
        """Its samples are here."""
        self._fed = time.perf_counter()

    def iteration(self, step: int, epoch: int, outcome: StepResult, *, lr: float, samples: int) -> None:
        """It is over: one line, and one point of each of TensorBoard's curves."""
        seconds = time.perf_counter() - self._began
        comm, data_s = self._comm_times.take(), self._fed - self._began
        self._computed.append(1e3 * (seconds - data_s - comm.exposed_s))
        flops_per_s = 3 * self._work.flops * samples / seconds
        fields = {
            "loss": outcome.loss,
            "lr": lr,
            "grad_norm": None if outcome.skipped else outcome.grad_norm,
            "loss_scale": outcome.loss_scale,
            "skipped": outcome.skips,
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

    def evaluation(
        self, step: int, epoch: int, evaluation: Evaluation, bytes_per_target: float | None = None
    ) -> None:
        """One line, also of how long the ranks computed since the last one."""
        fields = {"accuracy": evaluation.accuracy, "loss": evaluation.loss}
        if bytes_per_target:
            fields["bits_per_byte"] = evaluation.bits_per_byte(bytes_per_target)
        self.write("evaluation", step=step, epoch=epoch, **fields, **self._compute_times())
        if self._board:
            self._board.write("evaluation", step, fields)

    def _compute_times(self) -> dict[str, Any]:
        """Of each rank the milliseconds of an iteration in which it computed, and in how many windows of
        iterations no rank took longer: waits for data and for other ranks are left out.
        """
        parts = [self._computed[at : at + _WINDOW] for at in range(0, len(self._computed), _WINDOW)]
        mine = [sum(part) / len(part) for part in parts]
        self._computed.clear()
        ranks = self._comm.allgather(mine)
        slowest = Counter(at.index(max(at)) for at in zip(*ranks, strict=True))
        return {
            "compute_ms": [round(sum(one) / len(one), 3) for one in ranks if one],
            "slowest": [slowest[rank] for rank in range(len(ranks))],
            "windows": len(mine),
        }

    def conclude(self, storage: Storage, mesh: Mesh, evaluation: Evaluation, *, seconds: float) -> None:
        """The result, if all ranks with the same parameters came to the same values.

        Raises:
            PayloadError: they did not.
        """
        digest = hashlib.sha256(
            storage.optimizer_device.to_host(storage.master_weights).tobytes()
        ).hexdigest()
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
        firsts = [places.index(place) for place in places]  # the first rank that holds the same parameters
        strays = [
            f"rank {rank} on {hosts[rank]} from those of rank {first} on {hosts[first]}"
            for rank, first in enumerate(firsts)
            if hashes[rank] != hashes[first]
        ]
        if strays:
            raise PayloadError(f"parameters differ: {', '.join(strays)}", code="parameters-differ")
        replicas = places.count(places[0])
        alike = f", and alike on its {replicas} replicas" if replicas > 1 else ""
        same = "on all ranks" if replicas == len(places) else f"on rank 0{alike}"
        self.print_line(f"{seconds:.1f} s; parameters {digest[:12]} {same}")
        self.print_line(f"test accuracy {evaluation.accuracy:.4f}")

    def close(self) -> None:
        """All is written."""
        if self._board:
            self._board.close()

    def _joules(self) -> float | None:
        return self._gpus.energy_j(str(self._device.gpu["uuid"])) if self._device.gpu else None

    def _energy_j(self) -> float | None:
        """What the GPUs in use took since ``introduce``, each counted once; None where one does not say."""
        before, now = self._joules_before, self._joules()
        mine = None if before is None or now is None else now - before
        gpu = (hostname(), self._device.gpu and self._device.gpu["uuid"])
        each = dict(self._comm.allgather((gpu, mine)))
        known = [joules for joules in each.values() if joules is not None]
        return round(sum(known), 3) if len(known) == len(each) else None
