"""Progress: what a phase reports while it runs, and the functions that receive it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostStep:
    """A host has finished ``task``, one of ``of`` hosts (0: not known) that run it; ``how`` it went."""

    host: str
    task: str
    of: int = 0
    how: str = ""
    failed: bool = False

    def __str__(self) -> str:
        return ": ".join(part for part in (self.host, self.task, self.how) if part)


class Waiting(str):
    """A message that another command holds a lock: shown immediately, on a terminal or not."""

    __slots__ = ()


Reporter = Callable[[str | HostStep], None]  # gets each message of a phase
LineReporter = Callable[[str], None]  # gets messages that concern no single host
PhaseReporter = Callable[[str, str | HostStep], None]  # gets (phase, message); "" when the phase begins
WAITING = "waiting"  # in place of a phase, while another clusterctl holds the lock
