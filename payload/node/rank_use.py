"""Readings of the ranks of a job on this node: their processor time, memory and GPUs."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from payload.node.sensors import MIB, own_memory
from payload.node.stacks import TICKS_PER_S, Activity, Process, Tracer, ranks_here

PROC = Path("/proc")
# Of a node with more ranks, only so many are read: a sample must fit into what `top` reads at a time
# (OF_TELEMETRY of clusterctl/jobs/remote_readings.py).
MOST_RANKS = 512
# The number of looks at the instructions of the ranks in a series.
LOOKS = 20


class Ranks:
    """The use of the node by each rank, with the processes that the rank has started.

    gpu_users: returns process id -> the indices of the GPUs that the process uses.
    ranks: returns rank -> its processes on this node.
    """

    def __init__(
        self,
        gpu_users: Callable[[], Mapping[int, Sequence[int]]],
        ranks: Callable[[], Mapping[int, Sequence[Process]]] = ranks_here,
        proc: Path = PROC,
    ) -> None:
        self._gpu_users = gpu_users
        self._ranks = ranks
        self._proc = proc
        # Rank -> when it was read, and the processor time that it had used, in seconds.
        self._last: dict[int, tuple[float, float]] = {}

    def read(self) -> dict[str, Any]:
        """Return the readings of each rank, by its number as text.

        ``cpu_percent``: of one core, since the last reading. ``memory_mib``: what the rank shares
        with no other process. ``gpus``: indices of the GPUs on which it has a process.
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
        return {"ranks": ranks} if ranks else {}

    def _cpu_s(self, pid: int) -> float:
        """Return the processor time of a process and its ended children; 0 if it has ended."""
        try:
            status = (self._proc / str(pid) / "stat").read_text(errors="replace")
        except OSError:
            return 0.0
        fields = status.rpartition(")")[2].split()[11:15]
        return sum(map(int, fields)) / TICKS_PER_S

    def _memory(self, pid: int) -> int:
        return own_memory(self._proc / str(pid) / "status")


def look() -> dict[int, dict[str, int]] | None:
    """Look once at the ranks here. Return rank -> library in which it waits -> 1. None: the system
    does not allow looks.
    """
    tracer = Tracer()
    ranks = {rank: Activity(each) for rank, each in sorted(ranks_here().items())[:MOST_RANKS]}
    for activity in ranks.values():
        activity.sample(tracer)
    tracer.release()
    if tracer.is_refused:
        return None
    return {rank: activity.waits for rank, activity in ranks.items()}


class Places:
    """In which libraries the ranks wait, by a few looks at their threads' instructions.

    A rank that waits in MPI uses as much processor time as one that computes, so only this tells
    which rank the others wait for. A look stops each running thread for some microseconds, so it is
    taken seldom. The looks are at random times: those in a single part of a second would all be in
    the same step of a program, and those at equal pauses in the same part of each step.

    seconds: the length of a series of looks. look: see ``look``.
    """

    def __init__(
        self, seconds: float, look: Callable[[], Mapping[int, Mapping[str, int]] | None] = look
    ) -> None:
        self._pause_s = seconds / LOOKS
        self._look = look
        self._counts: dict[int, Counter[str]] = {}
        self._looks = 0
        self._lock = threading.Lock()
        self._random = random.Random()  # noqa: S311
        threading.Thread(target=self._run, daemon=True).start()

    def read(self) -> dict[str, Any]:
        """Return, by rank, the number of looks and of those that found it in a library.

        Empty before the end of a series, without ranks, and if the system does not allow looks.
        """
        with self._lock:
            if self._looks < LOOKS:
                return {}
            counts = self._counts
            self._counts = {}
            self._looks = 0
        places = {str(rank): dict(count) for rank, count in sorted(counts.items())}
        return {"places": places} if places else {}

    def _run(self) -> None:
        while True:
            time.sleep(self._pause_s * self._random.uniform(0.5, 1.5))
            waits = self._look()
            if waits is None:
                return
            with self._lock:
                self._looks += 1
                for rank, libraries in waits.items():
                    count = self._counts.setdefault(rank, Counter())
                    count.update({"rounds": 1, **libraries})
