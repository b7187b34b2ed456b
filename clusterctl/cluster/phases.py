"""The phases that `up` and `down` are made of: journaled, timed, told of while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from clusterctl.cluster.converge import Mended
from clusterctl.state.journal import Journal, Step
from clusterctl.util.progress import PhaseReporter, Reporter

TellMended = Callable[[Mended], None]


def untold(_: Mended) -> None:
    """For who does not want to hear of what was mended before all is done."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A row of the table that `up` and `down` end with."""

    name: str
    seconds: float
    note: str


@dataclass(slots=True)
class Run:
    """One `up` or `down` under way: its journal, and what it has to say."""

    verb: str
    journal: Journal
    reporter: PhaseReporter
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mended: list[Mended] = field(default_factory=list)
    tell_mended: TellMended = untold

    def has_mended(self, things: Iterable[Mended]) -> None:
        """Tell of it at once: it was done, whatever becomes of the phases to come."""
        for one in things:
            self.mended.append(one)
            self.tell_mended(one)

    @contextmanager
    def phase(self, name: str, *, inputs: str = "") -> Iterator[tuple[Step, Reporter]]:
        """Journal a phase; yields where to leave its note, and a way to say what it is doing."""
        self.reporter(name, "")
        with self.journal.phase(self.verb, name, inputs=inputs) as step:
            yield step, lambda what: self.reporter(name, what)
        self.phases.append(Phase(name, step.seconds, step.note))
