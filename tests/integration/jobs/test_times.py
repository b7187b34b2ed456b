"""The time zone of a job's times, as `submit` names it."""

from __future__ import annotations

from pathlib import Path

from clusterctl.jobs.prepare import Preparer, Submission
from tests.unit.jobs.test_times import (
    _tokyo,  # noqa: F401
    job_of,
)


def test_submission_says_the_time_zone_of_a_time(session, tmp_path: Path) -> None:
    notes: list[str] = []
    request = job_of(tmp_path, "--begin=2030-01-01")
    (prepared,) = Preparer(notes.append).prepare(session, Submission([request]))
    assert "#SBATCH --begin=2030-01-01T00:00:00" in prepared.script
    assert [note for note in notes if "JST" in note] == notes
