"""The phases of `up` and `down` as a person sees them, and what is asked about machines of the user's own."""

from __future__ import annotations

import functools
import getpass
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

from clusterctl.cli.options import Words, option
from clusterctl.cli.output import ENDINGS, Screen, can_draw
from clusterctl.cli.pictures import console, running_tasks
from clusterctl.errors import UsageError, printable
from clusterctl.providers.base import OfferedKey, Prompts
from clusterctl.util.progress import HostStep, PhaseLines, shown_phase

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from clusterctl.cluster.phases import Phase

Yes = Annotated[bool, option("Do not prompt.", "--yes", "-y")]
NoWait = Annotated[
    bool, option("Fail immediately if another clusterctl holds the cluster's lock.", "--no-wait")
]
AskBecomePass = Annotated[
    bool,
    option(
        "Prompt for the sudo password of on-prem hosts; without a terminal it is read from stdin.",
        "--ask-become-pass",
        "-K",
    ),
]
AcceptHostKey = Annotated[
    Words,
    option(
        "Accept the host key of an on-prem host that has this fingerprint. Repeatable.",
        "--accept-host-key",
        metavar="SHA256:...",
        show_default=False,
    ),
]
_FINGERPRINT: Final = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


def prompts_for(screen: Screen, *, ask_password: bool, accepted: Sequence[str] | None = None) -> Prompts:
    """What `up` needs: who is asked about host keys, and the password, which is asked for at once.

    Raises:
        UsageError: that is no fingerprint, or there is no password.
    """
    for text in accepted or ():
        if not _FINGERPRINT.fullmatch(text):
            raise UsageError(
                f"{text!r} is no fingerprint",
                code="not-a-fingerprint",
                where="--accept-host-key",
                fix="write it as `ssh-keygen -lf` does: SHA256: and 43 letters",
            )
    return Prompts(
        confirm=functools.partial(_confirm, screen),
        accepted=tuple(accepted or ()),
        password=sudo_password(ask=ask_password),
    )


def sudo_password(*, ask: bool) -> str | None:
    """Ask for the password for sudo if it is wanted; it is shown and noted nowhere."""
    if not ask:
        return None
    text = getpass.getpass("sudo password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if not text:
        raise UsageError(
            "there is no password",
            code="no-password",
            where="--ask-become-pass",
            fix="type one, or leave it out",
        )
    return text


def _confirm(screen: Screen, offered: Sequence[OfferedKey]) -> None:
    rows = [[one.title, one.address, one.kind, one.fingerprint] for one in offered]
    with screen.still():
        screen.note("these host keys are not confirmed yet; compare them with the machines' own")
        screen.note(*screen.table(["HOST", "ADDRESS", "KEY", "FINGERPRINT"], rows))
        if not screen.can_prompt:
            flags = [word for one in offered for word in ("--accept-host-key", one.fingerprint)]
            raise UsageError(
                "host keys must be confirmed",
                code="host-keys-unconfirmed",
                why="there is no terminal to prompt on",
                fix=f"if they are right, run: {shlex.join(['clusterctl', *sys.argv[1:], *flags])}",
                failures=tuple(one.failure for one in offered),
            )
        screen.confirm("are they right?", yes=False)


# Up to so many hosts that are waited for are named. More are counted.
_FEW: Final = 3


@dataclass(slots=True)
class _Progress:
    """How far a phase is: what it does now, and which of its hosts are through with that."""

    task: str = ""
    # All hosts that were heard of.
    hosts: dict[str, None] = field(default_factory=dict)
    # Task -> hosts that are through with it. Others may be at another task.
    through: dict[str, dict[str, None]] = field(default_factory=dict)
    of: int = 0

    def take(self, what: str | HostStep) -> None:
        if isinstance(what, str):
            self.task, self.through, self.of = what, {}, 0
            return
        self.task, self.of = what.task, what.of
        done = self.through.setdefault(what.task, {})
        if what.host in done:  # another task of this name
            done.clear()
        done[what.host] = self.hosts[what.host] = None

    def __str__(self) -> str:
        """``2/3 hosts, waiting for demo-train-2  slurmd: Install``; the task alone if it is of no host."""
        done = self.through.get(self.task, {})
        rest = [host for host in self.hosts if host not in done]
        if not done:
            return self.task
        if not self.of or len(done) >= self.of:
            progress = f"{len(done)} hosts" if len(done) > 1 else ", ".join(done)
        else:
            are_known = len(done) + len(rest) == self.of and len(rest) <= _FEW
            progress = f"{len(done)}/{self.of} hosts"
            progress += f", waiting for {', '.join(rest)}" if are_known else ""
        return f"{progress}  {self.task}"


class Phases(PhaseLines):
    """Shows the phases of `up` and `down`: a picture that moves on a terminal, lines elsewhere."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen.note, verbose=screen.verbose)
        self._screen = screen
        self._state = _Progress()
        self._drawn: TaskID | None = None
        self._picture: Progress | None = None

    @contextmanager
    def shown(self, then: str = "") -> Iterator[None]:
        """Show phases until the end of the ``with``; ``then`` says what Ctrl-C leaves."""
        try:
            with self._moving():
                yield
        except ENDINGS:
            if self.phase and then:
                self._screen.note(f"stopped half way: {then}")
            raise

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Draw phases with a spinner and their seconds, where stderr is a terminal that can draw lines anew.

        They are gone at the end, unless that is an error: then they show how far things got.
        """
        if not (sys.stderr.isatty() and can_draw()):
            yield
            return
        screen = self._screen
        shown_on = console(stderr=True, color=screen.color, wrap=True)
        picture = running_tasks(shown_on)
        with picture, screen.notes_go_above(shown_on):
            self._picture, screen.live = picture, picture.live
            try:
                yield
            except BaseException:
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
        self._state.take(message)
        super().progress(message)
        if self._picture and self._drawn is not None:
            self._picture.update(self._drawn, text=printable(self.now))


def phase_table(screen: Screen, phases: Sequence[Phase], *, total: bool = False) -> list[str]:
    """Return the lines of a table of phases, and an empty line."""
    rows: list[list[object]] = [[shown_phase(one.name), one.seconds, one.note] for one in phases]
    rows += [["total", sum(one.seconds for one in phases), ""]] if total else []
    return [*screen.table(["PHASE", "SECONDS", ""], rows), ""]


def phase_dicts(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    return [{"phase": one.name, "seconds": one.seconds, "note": one.note} for one in phases]
