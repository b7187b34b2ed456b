"""Readings of the ranks of a job on this node: their processor time, memory and GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from payload.node.processes import RankProcess, ranks_here
from payload.node.sensors import MIB, own_memory

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Of a node with more ranks, only so many are read: a sample must fit into what `top` reads at a time
# (OF_TELEMETRY of clusterctl/jobs/remote_readings.py).
MOST_RANKS = 512


class RankUsage:
    """The use of the node by each rank, with the processes that the rank has started.

    gpu_users: returns process id -> the indices of the GPUs that the process uses.
    ranks: returns rank -> its processes on this node.
    limit_mib: the job's memory on this node, if no control group tells what it uses of it. None: one
        does, or there is no limit.
    """

    def __init__(
        self,
        gpu_users: Callable[[], Mapping[int, Sequence[int]]],
        ranks: Callable[[], Mapping[int, Sequence[RankProcess]]] = ranks_here,
        proc: Path = PROC,
        limit_mib: int | None = None,
    ) -> None:
        self._gpu_users = gpu_users
        self._ranks = ranks
        self._proc = proc
        self._limit_mib = limit_mib
        # Rank -> when it was read, and the processor time that it had used, in seconds.
        self._last: dict[int, tuple[float, float]] = {}

    def read(self) -> dict[str, Any]:
        """Return the readings of each rank, by its number as text.

        ``cpu_percent``: of one core, since the last reading. ``memory_mib``: without files, and
        of memory that processes share, the rank's share. ``gpus``: indices of the GPUs on which
        it has a process.
        """
        users = self._gpu_users()
        ranks = {}
        last: dict[int, tuple[float, float]] = {}
        for rank, processes in sorted(self._ranks().items())[:MOST_RANKS]:
            pids = [process.pid for process in processes]
            now = last[rank] = time.monotonic(), sum(map(self._cpu_s, pids))
            reading: dict[str, Any] = {"memory_mib": sum(map(self._memory, pids)) // MIB}
            if rank in self._last:
                before_s, used_before_s = self._last[rank]
                elapsed_s = now[0] - before_s
                used_s = now[1] - used_before_s
                # If a process has ended that its parent did not wait for, its time is missing.
                reading["cpu_percent"] = round(100 * max(0.0, used_s) / max(elapsed_s, 1e-3), 1)
            if gpus := sorted({index for pid in pids for index in users.get(pid, ())}):
                reading["gpus"] = gpus
            ranks[str(rank)] = reading
        self._last = last
        if not ranks:
            return {}
        if not self._limit_mib:
            return {"ranks": ranks}
        used = sum(reading["memory_mib"] for reading in ranks.values())
        return {"ranks": ranks, "job_used_mib": used, "job_limit_mib": self._limit_mib}

    def _cpu_s(self, pid: int) -> float:
        """Return the processor time of a process and its ended children; 0 if it has ended."""
        try:
            status = (self._proc / str(pid) / "stat").read_text(errors="replace")
        except OSError:
            return 0.0
        fields = status.rpartition(")")[2].split()[11:15]
        return sum(map(int, fields)) / TICKS_PER_S

    def _memory(self, pid: int) -> int:
        return own_memory(self._proc / str(pid))
