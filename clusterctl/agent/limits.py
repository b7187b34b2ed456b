"""What the jobs of agents can use, counted against the user's limits."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from clusterctl.agent.journal import Journal, RecordedCall
from clusterctl.util.confine import Asked, check, confinement

DAY_S: Final = 86400


def node_hours_of_day(calls: Iterable[RecordedCall]) -> float:
    """Return the node hours that the calls of the last 24 hours can use. Unknown ones count as 0."""
    since = time.time() - DAY_S
    return sum(call.node_hours or 0.0 for call in calls if call.time > since)


def check_use(asked: Asked, *, reserves: bool = False) -> None:
    """Raise LimitError if this command is an agent's, and may not use as much as it asks for.

    reserves: let the node hours count for 24 hours.
    """
    limits = confinement()
    if limits is None:
        return
    journal = Journal()
    with journal.lock():
        check(limits, replace(asked, used=node_hours_of_day(journal.calls().values())))
        if reserves:
            journal.reserve(limits.call, asked.node_hours)
