"""The order of the places for a job."""

from __future__ import annotations

import time

from clusterctl.jobs.first import JobPlace
from clusterctl.jobs.where import Candidate, ranked
from clusterctl.scheduler.request.capacity import Capacity


def candidate(
    name: str,
    accepted: bool | None = True,
    wait_s: float | None = 0.0,
    *,
    price: float | None = None,
    fitting: int | None = None,
) -> Candidate:
    return Candidate(
        place=JobPlace("lab", name),
        accepted=accepted,
        words="",
        asked_at=time.time(),
        start=None if wait_s is None else int(time.time() + wait_s),
        capacity=Capacity(fitting=fitting),
        usd_per_hour=price,
        finding="",
        is_known=True,
    )


def test_places_are_ranked_by_acceptance_start_price_and_room() -> None:
    best_first = [
        candidate("cheap", price=1.0),
        # So near a start is as good as now.
        candidate("dear", wait_s=20.0, price=2.0),
        candidate("roomy", fitting=9),
        candidate("small", fitting=1),
        candidate("later", wait_s=600.0, price=0.5),
        candidate("sometime", wait_s=None),
        candidate("unknown", None, None),
        candidate("refused", False, None),
    ]
    assert ranked(reversed(best_first)) == best_first
