"""`up` and `down` ended at every phase and at random moments: the next command converges.

A failed case shows the seed of the random moments; SWEEP_SEED=N repeats it.
test_convergence.py has some of the cases, for `make test`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from tests.e2e.faults import Victim, eventually_none
from tests.support.messages import shows
from tests.support.residue import Machine, left_behind, look_as_root
from tests.support.verbs import Clusterctl, CommandResult

# The workers of one run must agree on it: they collect the same tests.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID")
SEED = int(os.environ.get("SWEEP_SEED") or random.Random(RUN).randrange(10_000))  # noqa: S311
SPEC = (
    "version: 1\n"
    "name: {name}\n"
    "provider: {{type: local}}\n"
    "partitions:\n"
    "  - {{name: train, nodes: 2}}\n"
    "users:\n"
    "  - {{name: hpc, uid: {uid}}}\n"
)
UP = (
    "plan_changes",
    "prepare_image",
    "prepare_template",
    "provision",
    "probe",
    "converge",
    "verify",
)
DOWN = ("destroy",)
FIRST_UID = 10_000
HOWS = ("kill", "kill-all", "int")
# -1: it came before a signal could be heard.
CODES = {"int": {130}, "hup": {129, -1}, "kill": {-9}, "kill-all": {-9}, "reboot": {-9}}


@dataclass(frozen=True)
class Case:
    """An interruption. when: a phase, or a fraction of the duration of the verb. then: the verb
    after it. number: of the random moment. seed: shown if the case fails.
    """

    verb: str
    when: str | float
    how: str
    then: str
    number: int = 0
    seed: int = SEED

    @property
    def id(self) -> str:
        """Return a name without what differs from run to run."""
        when = self.when if isinstance(self.when, str) else f"moment {self.number}"
        return f"{self.verb} {when}: {self.how}"


def cases() -> list[Case]:
    draw = random.Random(SEED)  # noqa: S311

    def then() -> str:
        return draw.choice(["up", "down"])

    found = [Case("up", phase, how, then()) for phase in UP for how in HOWS]
    found += [Case("down", phase, how, then()) for phase in DOWN for how in HOWS]
    hows = ("kill", "kill-all", "int", "reboot", "hup")
    found += [Case("up", "converge", "reboot", "up")]
    found += [Case("up", draw.random(), hows[i % len(hows)], then(), i) for i in range(20)]
    found += [Case("down", draw.random(), hows[i % len(hows)], then(), i) for i in range(10)]
    return found


class Stage:
    """The machine and home of the cases, one after the other: each begins with the leftovers of the
    previous.
    """

    def __init__(self, clusterctl: Clusterctl, name: str) -> None:
        self.clusterctl = clusterctl
        self._name = name
        self._machine = Machine(clusterctl.home)
        self._before = look_as_root(self._machine)
        self._seconds: dict[str, float] = {}
        self._last = ""
        self._uid = FIRST_UID
        self._write_spec()

    def play(self, case: Case) -> None:
        """End a verb, then see that the next command converges."""
        if case.verb == "down":
            self.run("up")
        # No class is made of a cluster that is up, or was up before.
        if case.when == "prepare_template":
            self.run("down")
            self._uid += 1
            self._write_spec()
        ended = self._end(case)
        assert ended.rc in {0, *CODES[case.how]}, ended
        assert ended.rc != -1 or not ended.stderr, ended
        assert "Traceback" not in ended.stderr, ended
        assert "Exception ignored" not in ended.stderr, ended
        if case.how != "kill":
            assert eventually_none(self.clusterctl.home) == []
        self.run(case.then)
        if case.then == "up":
            assert self.clusterctl("-o", "json", "status").json["ready"]
        assert eventually_none(self.clusterctl.home) == []

    def run(self, verb: str) -> None:
        """Run a verb without interruption. If `down` finds no cluster, nothing may be left."""
        ran = self.clusterctl(*words(verb), rc=None)
        assert ran.rc == 0 or shows(ran.stderr, "unknown-cluster"), ran
        if verb == "down":
            left = left_behind(self._before, lambda: look_as_root(self._machine))
            assert not left, "\n".join(left)
            left_there = [
                path.name for path in self.clusterctl.home.iterdir() if self._name in path.name
            ]
            assert left_there in ([], [f".{self._name}.lock"])

    def _write_spec(self) -> None:
        spec = SPEC.format(name=self._name, uid=self._uid)
        (self.clusterctl.cwd / "cluster.yaml").write_text(spec)

    def _end(self, case: Case) -> CommandResult:
        after = case.when if isinstance(case.when, str) else case.when * self._time(case.verb)
        victim = Victim(self.clusterctl, *words(case.verb))
        if isinstance(after, str):
            victim.until_phase(after)
        else:
            victim.until(after)
        return victim.hit(case.how, self._cluster_id)

    @property
    def _cluster_id(self) -> str:
        """The ID of the cluster, or of the previous one if `down` has just removed its workspace."""
        with suppress(FileNotFoundError):
            self._last = (self.clusterctl.home / self._name / "id").read_text().strip()
        return self._last

    def _time(self, verb: str) -> float:
        """Return the duration of a verb without interruption, in seconds."""
        if not self._seconds:
            for one in ("up", "down"):
                began = time.monotonic()
                self.run(one)
                self._seconds[one] = time.monotonic() - began
            if verb == "down":
                self.run("up")
        return self._seconds[verb]


def words(verb: str) -> tuple[str, ...]:
    # Where hosts are gone, `down` can't tell what exists only there: it goes on under --discard
    # alone.
    return (verb, "--yes", "--discard") if verb == "down" else (verb,)


@pytest.fixture(scope="module")
def stage(clusterctl: Clusterctl, cluster_name: str) -> Iterator[Stage]:
    """A stage whose cluster is removed at the end."""
    yield Stage(clusterctl, cluster_name)
    clusterctl("-f", clusterctl.cwd / "cluster.yaml", "down", "--yes", "--discard", rc=None)


@pytest.mark.sweep
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_command_after_any_interruption_converges(stage: Stage, case: Case) -> None:
    stage.play(case)
