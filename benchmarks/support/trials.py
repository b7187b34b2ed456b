"""Trials: a training, faults in it, and a verdict."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks.support.fault_kinds import Fault
from benchmarks.support.nodes import Nodes
from benchmarks.support.watched import WORKS, Figures, Seen, Training, end_of, figures

# A training computes for about so long, and writes so many checkpoints.
_TRAINING_S = 8.0
_CHECKPOINTS = 10
_LEAST_ITERATIONS = 100
_MODEL = "--hidden 1024,1024 --global-batch-size 256 --epochs 1000000 --resume auto".split()
_EXAMPLES = Path(__file__).parents[2] / "examples"
# Iterations of an epoch of torch_ddp.py on two ranks.
_EPOCH = 32
# How often to check whether nodes have recovered by themselves, and whether the remains of a job
# are gone. The checks take longer on a busy machine.
_CHECKS = 40
_CHECK_S = 0.5
# Suffixes of unfinished checkpoints.
_UNFINISHED = ("incomplete", "tmp")
# The longest pause between two faults of a campaign.
_PAUSE_S = 5.0


@dataclass(frozen=True)
class Plan:
    """A training, and faults that are caused in it. draw: of random pauses between the faults."""

    iterations: int
    faults: tuple[Fault, ...] = ()
    draw: random.Random | None = None

    @property
    def right_end(self) -> str:
        return self.faults[0].ends if self.faults else "COMPLETED"


@dataclass
class Result:
    """The result of a training in which these faults were caused.

    verdict: ok; lost: not the right end; hung: no end; wrong: other weights than an undisturbed
        training's; doubled: two starts at the same time, or two jobs; residue: something is left
        on the nodes; error: of the trial or of a verb.
    figures: of each fault.
    weights: their SHA-256.
    compared: same, differ, or none.
    repair: seconds of the `up` that repaired the nodes; 0: they recovered by themselves.
    iteration_s: mean time per iteration. load: load average.
    """

    faults: list[str]
    job: str
    verdict: str = "ok"
    end: str = ""
    figures: list[Figures] = field(default_factory=list)
    weights: str = ""
    compared: str = "none"
    diagnosis: str = ""
    residue: list[str] = field(default_factory=list)
    repair: float = 0
    iteration_s: float = 0
    load: float = 0
    error: str = ""


@dataclass
class Trials:
    """Trials on a cluster. patience: observations without progress after which a training counts as
    hung.
    """

    nodes: Nodes
    launcher: str
    patience: int
    save_interval: int = _LEAST_ITERATIONS
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _undisturbed: dict[int, str] = field(default_factory=dict)

    @cached_property
    def iterations(self) -> int:
        """Number of iterations of a training of the usual length, at this machine's present
        speed.
        """
        # Iterations of torch_ddp.py are short.
        least = 3 * _LEAST_ITERATIONS if self.launcher == "torchrun" else _LEAST_ITERATIONS
        result = self._trial(Plan(least))
        assert result.verdict == "ok", result
        iterations = max(least, int(_TRAINING_S / result.iteration_s))
        self.save_interval = iterations // _CHECKPOINTS
        return iterations

    def once(self, fault: Fault) -> Result:
        """Cause a fault at the same iteration in each trial."""
        return self._compared(Plan(self.iterations * fault.length, (fault,)))

    def several(self, faults: tuple[Fault, ...], draw: random.Random) -> Result:
        """Cause faults one after the other, at random times, in the same training."""
        return self._compared(Plan(self.iterations * (3 + 2 * len(faults)) // 3, faults, draw))

    def _compared(self, plan: Plan) -> Result:
        right = self._weights(plan.iterations) if plan.right_end == "COMPLETED" else ""
        result = self._trial(plan)
        if result.weights:
            result.compared = "same" if result.weights == right else "differ"
        if result.verdict in {"ok", "residue"} and result.weights != right:
            result.verdict = "wrong"
        return result

    def _weights(self, iterations: int) -> str:
        """Return the SHA-256 of the weights of an undisturbed training."""
        if iterations not in self._undisturbed:
            result = self._trial(Plan(iterations))
            assert result.verdict == "ok", result
            self._undisturbed[iterations] = result.weights
        return self._undisturbed[iterations]

    def _trial(self, plan: Plan) -> Result:
        files = self.nodes.files()
        training = Training.submit(self.nodes, f"fault{next(self._numbers)}", self._words(plan))
        result = Result([], training.job)
        times = []
        with training.watched() as seen:
            try:
                for fault, at in self._cause(training, seen, plan):
                    result.faults.append(fault.name)
                    times.append(at)
            except (SystemExit, AssertionError, LookupError, OSError) as error:
                result.error = repr(error)
            while not self._is_over(seen):
                time.sleep(0.1)
            over = time.time()
            result.end = end_of(seen) or self._cancel(training, seen)
        events = training.events()
        runs = training.runs()
        spans = itertools.pairwise([*times, over])
        result.figures = [figures(at, until, seen, events, runs) for at, until in spans]
        result.weights = training.weights()
        result.iteration_s = seen.iteration_s()
        result.load = os.getloadavg()[0]
        try:
            result.diagnosis = training.diagnosis()
            result.repair = self._repair()
        except SystemExit as error:
            result.error = str(error)
        result.residue = self._residue(training, files)
        result.verdict = _verdict(result, plan.right_end)
        return result

    def _words(self, plan: Plan) -> list[str]:
        """Return the arguments of `submit`."""
        options = ["--nodes", "2", "--requeue", "--launcher", self.launcher]
        options += plan.faults[0].options if plan.faults else ()
        if plan.faults and plan.faults[0].program:
            program = self.nodes.cluster.folder / "program.py"
            program.write_text(plan.faults[0].program)
            return [str(program), *options, "--folder", "none"]
        if self.launcher == "torchrun":
            requirements = _EXAMPLES / "requirements-torch.txt"
            numbers = ["--epochs", str(plan.iterations // _EPOCH)]
            numbers += ["--checkpoint-seconds", str(_TRAINING_S / _CHECKPOINTS)]
            script = str(_EXAMPLES / "torch_ddp.py")
            return [script, *options, "--requirements", str(requirements), "--", *numbers]
        numbers = ["--iterations", str(plan.iterations), "--save-interval", str(self.save_interval)]
        return ["train", *options, "--", *_MODEL, *numbers]

    def _cause(self, training: Training, seen: Seen, plan: Plan) -> Iterator[tuple[Fault, float]]:
        """Cause the faults as long as the training runs. Yield each with its time."""
        at = 0.0
        for fault in plan.faults:
            if not fault.program and not self._trains(seen, at):
                return
            if plan.draw:
                if at:
                    self._repair()
                time.sleep(plan.draw.uniform(0, _PAUSE_S))
                # A fault at the end of the training would come too late.
                trains = self._trains(seen, time.time())
                if not trains or seen.steps[-1][1] > plan.iterations - self.save_interval:
                    return
            at = fault.cause(training)
            seen.caused.append(time.time())
            yield fault, at

    def _trains(self, seen: Seen, since: float) -> bool:
        """Wait for an iteration after the time ``since``. Return False if the training ends or
        hangs.
        """
        # With two checkpoints, the newest can be damaged.
        first = int(2.3 * self.save_interval)
        while not seen.trains(first, since):
            if self._is_over(seen):
                return False
            time.sleep(0.05)
        return True

    def _is_over(self, seen: Seen) -> bool:
        """Return whether the training has ended or hangs."""
        return bool(end_of(seen)) or seen.idle() > self.patience

    def _cancel(self, training: Training, seen: Seen) -> str:
        """End a job that hangs. Return "hung in STATE", with Slurm's words on the job and nodes."""
        state = seen.states[-1][2]
        asks = (
            f"squeue -h --states=all -j {training.job} -o '%T %r, excluded: %x'; sinfo -h -N -o "
            "'%N %T %E'"
        )
        said = "; ".join(self.nodes.on_controller(asks).splitlines())
        self.nodes.on_controller(f"scancel {training.job}")
        for process in training.ranks():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return f"hung in {state} ({said})"

    def _repair(self) -> float:
        """Connect all nodes, have `up` repair nodes that do not recover, and return the seconds of
        `up`.
        """
        for host in self.nodes.compute:
            if self.nodes.init(host):
                self.nodes.link(host, "up")
        for _ in range(_CHECKS):
            states = self.nodes.states()
            if not all(map(self.nodes.init, self.nodes.compute)):
                break
            if states and set(states.values()) <= WORKS:
                return 0
            time.sleep(_CHECK_S)
        begun = time.monotonic()
        self.nodes.cluster.up()
        return time.monotonic() - begun

    def _residue(self, training: Training, files: set[str]) -> list[str]:
        """List processes and files that do not disappear, and further jobs of the same name."""
        for _ in range(_CHECKS):
            left = [f"process {words}" for words in training.left_processes()]
            left += sorted(self.nodes.files() - files)
            left += [
                path.name
                for end in _UNFINISHED
                for path in training.folder.glob(f"checkpoints/*.{end}")
            ]
            if not left:
                break
            time.sleep(_CHECK_S)
        jobs = self.nodes.on_controller(
            f"squeue -h --states=all --name={training.name} -o %i"
        ).split()
        return [*left, *(f"job {job}" for job in jobs if job != training.job)]


def _verdict(result: Result, right_end: str) -> str:
    if result.error:
        return "error"
    if result.end.startswith("hung"):
        return "hung"
    if result.end != right_end:
        return "lost"
    jobs = any(line.startswith("job ") for line in result.residue)
    if jobs or any(figures.doubled for figures in result.figures):
        return "doubled"
    return "residue" if result.residue else "ok"
