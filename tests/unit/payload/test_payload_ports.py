"""Which port the ranks of a job meet at."""

from __future__ import annotations

from collections.abc import Container

import pytest

from payload.node import ports

FIRST = ports.FIRST_PORT
LAST = FIRST + ports.PORTS - 1


@pytest.mark.parametrize(
    ("job", "free", "port"),
    [
        (7, range(FIRST, LAST + 1), FIRST + 7),
        (7, {FIRST + 3, LAST}, LAST),
        # All ports of the range are tried, wherever the job begins.
        (ports.PORTS - 1, {FIRST + 3}, FIRST + 3),
    ],
)
def test_job_takes_the_next_free_port_of_the_range(
    monkeypatch: pytest.MonkeyPatch, job: int, free: Container[int], port: int
) -> None:
    monkeypatch.setattr(ports, "claim", lambda number, **_: number in free)
    assert ports.claim_job_port(job) == (port, True)
