"""A training under observation, and the figures that follow from the observations."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.nodes import Nodes
from clusterctl.providers.local.processes import NodeProcess, ranks

Record = dict[str, Any]
# Slurm's states in which a node works.
WORKS = {"idle", "allocated", "mixed", "completing"}
_ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
}
# The watcher may yet requeue a job that has failed, but not after so many observations. They take
# longer on a busy machine, as the watcher does.
_SURE = 20
_METRICS_S = 0.1
_STATES_S = 0.5
_TAIL = 4096
# A shorter pause of a training on a busy machine is no stall.
_STALL_S = 1.5
# After a longer pause, a training without an end has not continued.
_HANG_S = 30.0


@dataclass(frozen=True)
class Seen:
    """Observations: iterations as (time, step); states of Slurm as (time, states of the nodes, the
    job's).

    caused: times at which the causes of faults, such as `up` after a power cut, were over.
    """

    steps: list[tuple[float, int]] = field(default_factory=list)
    states: list[tuple[float, dict[str, str], str]] = field(default_factory=list)
    caused: list[float] = field(default_factory=list)

    def add(self, moment: float, step: int) -> None:
        """Add the newest iteration in metrics.jsonl. A restart first removes iterations that it
        repeats.
        """
        if not self.steps or moment > self.steps[-1][0]:
            self.steps.append((moment, step))

    def trains(self, step: int, since: float) -> bool:
        """Return whether the training has reached a step, and has made progress since a time."""
        return bool(self.steps) and self.steps[-1][1] >= step and self.steps[-1][0] > since

    def iteration_s(self) -> float:
        """Return the mean time per iteration. 0: unknown."""
        if not self.steps:
            return 0.0
        (begin, first), (end, last) = self.steps[0], self.steps[-1]
        return (end - begin) / (last - first) if last > first else 0.0

    def idle(self) -> int:
        """Count the observations of Slurm since the newest iteration, change of the job's state, or
        cause.
        """
        times = [moment for moment, _ in self.steps[-1:]] + self.caused[-1:]
        changes = itertools.pairwise(list(self.states))
        times += [moment for (_, _, before), (moment, _, job) in changes if job and job != before]
        newest = max(times, default=0.0)
        return sum(moment > newest for moment, _, _ in self.states)


@dataclass(frozen=True)
class Figures:
    """Figures of a fault, in seconds after it. None: never.

    sign: the first sign of the fault, and noticed: its time.
    again: when training continued; 0: it did not stop.
    starts: number of starts of the job.
    redone: iterations that were repeated.
    doubled: whether two starts trained at the same time.
    """

    noticed: float | None
    sign: str
    again: float | None
    starts: int
    redone: int
    doubled: bool


def figures(
    at: float, until: float, seen: Seen, events: Sequence[Record], runs: Sequence[Record]
) -> Figures:
    """Compute the figures of the fault at the time ``at``.

    until: the time of the next fault, or of the end. events: the records of job.events. runs: the
    records of kind `run` in metrics.jsonl.
    """
    seen = Seen(
        [pair for pair in seen.steps if pair[0] < until], [s for s in seen.states if s[0] < until]
    )
    events = [event for event in events if event["time"] < until]
    # Every job ends with this event, and with these states.
    signs = [(e["time"], e["event"]) for e in events if e["time"] > at and e.get("status") != 0]
    signs += _slurm_signs(at, seen)
    noticed, sign = min(signs, default=(None, ""))
    starts = [event["time"] for event in events if event["event"] == "start"]
    lost = [_repeated(start, seen, runs) for start in starts[1:] if start > at]
    falls = sum(step < before for (_, before), (_, step) in itertools.pairwise(seen.steps))
    resumed = _resumed(at, until, seen, events)
    return Figures(
        None if noticed is None else noticed - at,
        sign,
        None if resumed is None else resumed - at,
        len(starts),
        max(lost, default=0),
        falls > max(0, len(starts) - 1),
    )


def _slurm_signs(at: float, seen: Seen) -> Iterator[tuple[float, str]]:
    for moment, nodes, job in seen.states:
        if moment > at:
            yield from (
                (moment, f"{host} {state}") for host, state in nodes.items() if state not in WORKS
            )
            if job not in {"", "RUNNING", "COMPLETING", "COMPLETED"}:
                yield moment, f"job {job}"


def _repeated(start: float, seen: Seen, runs: Sequence[Record]) -> int:
    # Not the largest step: the training may not yet have caught up since an earlier fault.
    before = next((step for moment, step in reversed(seen.steps) if moment < start), 0)
    begun = next((step - 1 for moment, step in seen.steps if moment > start), before)
    return max(0, before - next((int(run["done"]) for run in runs if run["time"] > start), begun))


def _resumed(at: float, until: float, seen: Seen, events: Sequence[Record]) -> float | None:
    """Return the time of the first iteration after the next start or, if there is none, after the
    stall.
    """
    after = [moment for moment, _ in seen.steps if moment > at]
    later = [event for event in events if event["time"] > at]
    starts = [event["time"] for event in later if event["event"] == "start"]
    if starts:
        return next((moment for moment in after if moment > starts[0]), None)
    # The last iterations of a training that did not survive are from before the fault took effect.
    ends = [event["status"] for event in later if event["event"] == "end"]
    if not after or any(ends) or (not ends and until - after[-1] > _HANG_S):
        return None
    pauses = [(end - begin, end) for begin, end in itertools.pairwise([at, *after])]
    longest, end = max(pauses)
    return end if longest > _STALL_S else at


@dataclass(frozen=True)
class Training:
    """A job on the cluster. ``folder``: its folder, ``program``: that of its program, as local
    paths.
    """

    nodes: Nodes
    job: str
    name: str
    folder: Path

    @classmethod
    def submit(cls, nodes: Nodes, name: str, words: Sequence[str | Path]) -> Training:
        """words: arguments of `submit`, those of the program after --."""
        answer = nodes.cluster.run("submit", words[0], "--name", name, *words[1:])
        return cls(
            nodes, answer["job_id"], name, nodes.shared / Path(answer["dir"]).relative_to("/shared")
        )

    @property
    def program(self) -> Path:
        return self.folder / "files"

    def ranks(self) -> list[NodeProcess]:
        """List the main processes of the program, by rank."""
        return ranks(self.job, self._processes())

    def host_of(self, rank: int) -> str:
        """Return the host on which a rank runs."""
        pid = self.ranks()[rank].pid
        return next(
            host
            for host in self.nodes.compute
            if pid in {p.pid for p in self.nodes.processes(host)}
        )

    def launcher(self) -> list[NodeProcess]:
        """List the processes of the program srun or mpirun that launched the ranks."""
        launchers = [
            process
            for process in self._processes()
            if process.name in {"srun", "mpirun", "prterun"}
        ]
        return [process for process in launchers if "--job-name=telemetry" not in process.words]

    def left_processes(self) -> list[str]:
        return [" ".join(process.words)[:120] for process in self._processes()]

    def _processes(self) -> list[NodeProcess]:
        processes = self.nodes.processes(*self.nodes.compute)
        return [
            process for process in processes if process.variables.get("SLURM_JOB_ID") == self.job
        ]

    def events(self) -> list[Record]:
        return _records(self.folder / "job.events")

    def runs(self) -> list[Record]:
        return [
            record for record in _records(self.program / "metrics.jsonl") if record["kind"] == "run"
        ]

    def newest_iteration(self) -> tuple[float, int] | None:
        # survive.py of the examples writes no metrics.
        heartbeat = self.folder / "heartbeat"
        with suppress(OSError, ValueError):
            return heartbeat.stat().st_mtime, int(heartbeat.read_text())
        with suppress(OSError), (self.program / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            for line in reversed(file.read().split(b"\n")[:-1]):
                with suppress(ValueError, KeyError):
                    record = json.loads(line)
                    if record["kind"] == "iteration":
                        return float(record["time"]), int(record["step"])
        return None

    def checkpoints(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        folders = self.program.glob("checkpoints/iteration-????????")
        return sorted([*folders, *self.program.glob("checkpoints/step-*.pt")])

    def new_checkpoints(self) -> list[Path]:
        """List the complete checkpoints that the job has written since its last start, oldest
        first.
        """
        started = max(
            (event["time"] for event in self.events() if event["event"] == "start"), default=0.0
        )
        found = []
        for path in self.checkpoints():
            # The training removes old checkpoints.
            with suppress(FileNotFoundError):
                if path.stat().st_mtime > started:
                    found.append(path)
        return found

    def weights(self) -> str:
        """Return the SHA-256 of the final weights. Empty: there are no weights."""
        for name in ("model/final.safetensors", "model.pt"):
            with suppress(FileNotFoundError):
                return hashlib.sha256((self.program / name).read_bytes()).hexdigest()
        return ""

    def diagnosis(self) -> str:
        """Return the code and the cause of the job's failure. Empty: the job has not failed."""
        (job,) = self.nodes.cluster.run("jobs", self.job)["jobs"]
        found = job["diagnosis"]
        return f"{found['code']}: {found['cause']}".splitlines()[0] if found else ""

    @contextmanager
    def watched(self) -> Iterator[Seen]:
        """Observe the training until the context ends."""
        seen = Seen()
        ended = threading.Event()

        def follow_metrics() -> None:
            while not ended.wait(_METRICS_S):
                newest = self.newest_iteration()
                if newest:
                    seen.add(*newest)

        def follow_states() -> None:
            ask = f"squeue -h --states=all -j {self.job} -o 'job %T'"
            while not ended.wait(_STATES_S):
                states = dict(
                    line.split()
                    for line in self.nodes.on_controller(
                        f"sinfo -h -N -o '%N %T'; {ask}"
                    ).splitlines()
                )
                job = states.pop("job", "")
                seen.states.append((time.time(), states, job))

        threads = [threading.Thread(target=target) for target in (follow_metrics, follow_states)]
        for thread in threads:
            thread.start()
        try:
            yield seen
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def end_of(seen: Seen) -> str:
    """Return the state in which the job has ended. Empty: the job has not ended."""
    last = [job for _, _, job in seen.states if job][-_SURE:]
    is_sure = last[-1:] == ["COMPLETED"] or last == last[-1:] * _SURE
    return last[-1] if last and last[-1] in _ENDED and is_sure else ""


def _records(file: Path) -> list[Record]:
    records = []
    with suppress(FileNotFoundError):
        for line in file.read_bytes().splitlines():
            # A killed writer leaves an incomplete line.
            with suppress(ValueError):
                records.append(json.loads(line))
    return records
