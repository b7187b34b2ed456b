"""metrics.jsonl and the lines on stdout: what a run was, did and came to, as rank 0 tells it."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

from payload.comm.base import Communicator
from payload.config import TrainConfig
from payload.device import Array, Device
from payload.errors import PayloadError
from payload.host import hostname, own_cores, versions
from payload.jsonl import JsonLines
from payload.parallel.engine import Evaluation
from payload.parallel.mesh import Mesh
from payload.settings import to_record


class Metrics:
    """The record of one run. All ranks must call ``introduce`` and ``conclude``; only rank 0 writes."""

    def __init__(self, config: TrainConfig, device: Device, comm: Communicator) -> None:
        """
        Raises:
            UsageError: the file cannot be written.
        """
        self._config, self._device, self._comm = config, device, comm
        self._file = JsonLines(config.run.out / "metrics.jsonl") if comm.rank == 0 else None

    def write(self, kind: str, **fields: Any) -> None:
        """Add one object to the file."""
        if self._file:
            self._file.write(kind, **fields)

    def say(self, line: str) -> None:
        """Print a line for people."""
        if self._file:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def introduce(self) -> None:
        """Who takes part, with what."""
        ranks = self._comm.allgather(
            {
                "rank": self._comm.rank,
                "host": hostname(),
                "cores": own_cores(),
                "gpu": self._device.gpu,
                "device_note": self._device.note,
            }
        )
        self.write(
            "run",
            world_size=self._comm.size,
            ranks=ranks,
            config=to_record(self._config),
            versions={**versions("numpy", "mpi4py", "cupy-cuda12x"), "mpi": self._comm.library},
        )
        hosts = sorted({str(rank["host"]) for rank in ranks})
        because = f" ({self._device.note})" if self._device.note else ""
        where = self._device.gpu["name"] if self._device.gpu else f"CPU{because}"
        precision = self._config.precision.precision
        self.say(f"world size {self._comm.size}, on {', '.join(hosts)}; {precision} on {where}")

    def conclude(self, values: Array, mesh: Mesh, evaluation: Evaluation, *, seconds: float) -> None:
        """The result, if all ranks with the same parameters came to the same values.

        Raises:
            PayloadError: they did not.
        """
        digest = hashlib.sha256(self._device.to_host(values).tobytes()).hexdigest()
        place = (mesh.pp.rank, mesh.tp.rank)
        hashes, hosts, places = zip(*self._comm.allgather((digest, hostname(), place)), strict=True)
        self.write(
            "result",
            accuracy=evaluation.accuracy,
            loss=evaluation.loss,
            param_hashes=list(hashes),
            hosts=list(hosts),
            world_size=self._comm.size,
            seconds=seconds,
        )
        firsts = [places.index(place) for place in places]  # the first rank that holds the same parameters
        strays = [
            f"rank {rank} on {hosts[rank]} from those of rank {first} on {hosts[first]}"
            for rank, first in enumerate(firsts)
            if hashes[rank] != hashes[first]
        ]
        if strays:
            raise PayloadError(f"parameters differ: {', '.join(strays)}")
        same = (
            "on all ranks"
            if len(set(places)) == 1
            else f"on rank 0, and alike on its {mesh.dp.size} replicas"
        )
        self.say(f"{seconds:.1f} s; parameters {digest[:12]} {same}")
        self.say(f"test accuracy {evaluation.accuracy:.4f}")
