"""The display of the phases of `up` and `down`. Prompts for host keys."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

from clusterctl.cli.options import option
from clusterctl.cli.output import ENDINGS, Screen, can_draw
from clusterctl.cli.pictures import console, running_tasks
from clusterctl.cli.verbs import VerbFunction
from clusterctl.errors import UsageError, printable
from clusterctl.providers.base import OfferedKey, Prompts
from clusterctl.state.chosen_spec import reject_foreign
from clusterctl.util.progress import HostStep, PhaseLines, shown_phase

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from clusterctl.cluster.phases import Phase

Yes = Annotated[bool, option("Do not prompt.", "--yes", "-y")]
NoWait = Annotated[
    bool, option("Fail at once if another clusterctl holds the cluster's lock.", "--no-wait")
]


def for_operators(function: VerbFunction) -> VerbFunction:
    """Refuse a command, which changes hosts, for a cluster that other people operate."""

    @functools.wraps(function)
    def command(screen: Screen, *args: Any, **options: Any) -> int | None:
        reject_foreign(screen.chosen())
        return function(screen, *args, **options)

    return command


def prompts_for(screen: Screen) -> Prompts:
    """Return Prompts, which ask about host keys."""
    return Prompts(confirm=functools.partial(_confirm, screen))


def _confirm(screen: Screen, offered: Sequence[OfferedKey]) -> None:
    rows = [[key.title, key.address, key.kind, key.fingerprint] for key in offered]
    with screen.still():
        screen.note(
            "these host keys are not confirmed yet; compare them with the keys on the machines"
        )
        screen.note(*screen.table(["HOST", "ADDRESS", "KEY", "FINGERPRINT"], rows))
        if not screen.can_prompt:
            raise UsageError(
                "host keys must be confirmed",
                code="host-key",
                about="unconfirmed",
                why="there is no terminal to prompt on",
                fix="run the command on a terminal, or log in to these hosts once with `ssh`",
                failures=tuple(key.failure for key in offered),
            )
        screen.confirm("are these keys correct?", yes=False)


# At most this many unfinished hosts are listed by name.
_FEW: Final = 3


@dataclass(slots=True)
class _Progress:
    """The progress of a phase: its current task, and the hosts that finished each task.

    hosts: the hosts that have finished at least one task.
    total: the number of hosts of the current task. 0: unknown.
    """

    task: str = ""
    hosts: dict[str, None] = field(default_factory=dict)
    hosts_done: dict[str, dict[str, None]] = field(default_factory=dict)
    total: int = 0

    def update(self, step: str | HostStep) -> None:
        if isinstance(step, str):
            self.task = step
            self.hosts_done = {}
            self.total = 0
            return
        self.task = step.task
        self.total = step.of
        done = self.hosts_done.setdefault(step.task, {})
        # If a host finishes a task with this name twice, there are two tasks with the same name.
        if step.host in done:
            done.clear()
        done[step.host] = self.hosts[step.host] = None

    def __str__(self) -> str:
        """Return a line such as ``2/3 hosts, waiting for demo-train-2  slurmd: Install``."""
        done = self.hosts_done.get(self.task, {})
        rest = [host for host in self.hosts if host not in done]
        if not done:
            return self.task
        if not self.total or len(done) >= self.total:
            progress = f"{len(done)} hosts" if len(done) > 1 else ", ".join(done)
        else:
            are_known = len(done) + len(rest) == self.total and len(rest) <= _FEW
            progress = f"{len(done)}/{self.total} hosts"
            if are_known:
                progress += f", waiting for {', '.join(rest)}"
        return f"{progress}  {self.task}"


class Phases(PhaseLines):
    """Shows the phases of `up` and `down`: animated on a terminal, otherwise a line for each."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen.note, verbose=screen.verbose)
        self._screen = screen
        self._state = _Progress()
        self._drawn: TaskID | None = None
        self._picture: Progress | None = None

    @contextmanager
    def shown(self, then: str = "") -> Iterator[None]:
        """Show phases during the ``with`` block. ``then``: the note after Ctrl-C, if any."""
        try:
            with self._moving():
                yield
        except ENDINGS:
            if self.phase and then:
                self._screen.note(f"interrupted: {then}")
            raise

    @contextmanager
    def _moving(self) -> Iterator[None]:
        if not (sys.stderr.isatty() and can_draw()):
            yield
            return
        screen = self._screen
        shown_on = console(stderr=True, color=screen.color, wrap=True)
        picture = running_tasks(shown_on)
        with picture, screen.notes_go_above(shown_on):
            self._picture = picture
            screen.live = picture.live
            try:
                yield
            except BaseException:
                # After an error, the display stays on the terminal, to show the progress.
                picture.live.transient = False
                raise
            finally:
                screen.live = None
        self._picture = None

    @property
    def now(self) -> str:
        return str(self._state)

    def step(self, phase: str) -> None:
        if phase == self.phase:
            return
        self._state = _Progress()
        picture = self._picture
        if picture is None:
            super().step(phase)
            return
        self.phase = phase
        if self._drawn is not None:
            picture.stop_task(self._drawn)
            picture.update(self._drawn, completed=1, text="")
        self._drawn = picture.add_task(printable(shown_phase(phase)), total=1, text="")

    def progress(self, message: str | HostStep) -> None:
        self._state.update(message)
        super().progress(message)
        if self._picture and self._drawn is not None:
            self._picture.update(self._drawn, text=printable(self.now))


def phase_table(screen: Screen, phases: Sequence[Phase], *, total: bool = False) -> list[str]:
    """Return the lines of a table of phases and their seconds. ``total``: whether to add a sum."""
    rows: list[list[object]] = [
        [shown_phase(phase.name), phase.seconds, phase.note] for phase in phases
    ]
    if total:
        rows.append(["total", sum(phase.seconds for phase in phases), ""])
    return [*screen.table(["PHASE", "SECONDS", ""], rows), ""]


def phase_dicts(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    return [{"phase": phase.name, "seconds": phase.seconds, "note": phase.note} for phase in phases]
