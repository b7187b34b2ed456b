"""Submissions whose answer was lost on the way: found again by the comment that marks them."""

from __future__ import annotations

import time

from clusterctl.scheduler.base import Scheduler
from clusterctl.state.ledger import Ledger

_SBATCH_MAY_HANG_S = 600


def resolve(scheduler: Scheduler, ledger: Ledger) -> None:
    """Find out what became of such submissions, and write it down.

    Raises:
        SchedulerError: it can't be told.
    """
    for entry in ledger.entries():
        if entry.job_id is None and not entry.refused:
            found = scheduler.by_comment(entry.comment, entry.submitted_at)
            if found is not None:
                ledger.update(entry, job_id=found.whole_id)
            elif time.time() - entry.submitted_at > _SBATCH_MAY_HANG_S:
                ledger.update(entry, refused=True)
