"""What a phase has to say while it is at work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostStep:
    """One host is through with ``task``, which ``of`` hosts have to do (0: not known); ``how`` it went."""

    host: str
    task: str
    of: int = 0
    how: str = ""
    failed: bool = False

    def __str__(self) -> str:
        return ": ".join(part for part in (self.host, self.task, self.how) if part)


class Waiting(str):
    """A message that another command is waited for: shown at once, on a terminal or not."""

    __slots__ = ()


Say = Callable[[str | HostStep], None]
Tell = Callable[[str, str | HostStep], None]  # (phase, what is happening; "" at its begin)
WAITING = "waiting"  # no phase: what is told while another clusterctl is waited for
