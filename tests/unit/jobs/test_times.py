"""Points in time in options of sbatch, which users mean in their own time zone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from clusterctl.jobs.times import moment_of, with_local_times
from clusterctl.scheduler.request import Request
from clusterctl.spec.job import JobSpec
from tests.support.scripted import ScriptedTransport, Step

NOW = datetime(2026, 11, 28, 4, 55)


@pytest.fixture(autouse=True)
def _tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


def job_of(tmp_path: Path, *slurm: str, lines: str = "") -> Request:
    script = tmp_path / "b.sh"
    script.write_text(f"#!/bin/bash\n{lines}\ndate\n")
    return Request.read(JobSpec(name="b", script=script, **({"slurm": slurm} if slurm else {})))


def controller(*times: str) -> ScriptedTransport:
    """A controller in another time zone. times: what `date` shows there."""
    return ScriptedTransport(
        [Step(("date", "-d", "@*", "+%Y-*"), stdout=f"{text}\n") for text in times]
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("05:55", "2026-11-28T05:55:00"),
        ("5:55", "2026-11-28T05:55:00"),
        ("04:55", "2026-11-29T04:55:00"),
        ("04:54:59", "2026-11-29T04:54:59"),
        ("5:30pm", "2026-11-28T17:30:00"),
        ("12:00 AM", "2026-11-29T00:00:00"),
        ("noon", "2026-11-28T12:00:00"),
        ("midnight", "2026-11-29T00:00:00"),
        ("2026-12-01", "2026-12-01T00:00:00"),
        ("2026-12-01T08:30", "2026-12-01T08:30:00"),
        ("2026-12-01T08:30:15", "2026-12-01T08:30:15"),
        ("12/01/26", "2026-12-01T00:00:00"),
        ("120126", "2026-12-01T00:00:00"),
        ("now+1hour", None),
        ("now", None),
        ("tomorrow", None),
        ("25:00", None),
        ("", None),
    ],
)
def test_begin_time_is_the_next_in_the_users_time_zone(text: str, expected: str | None) -> None:
    found = moment_of(text, NOW)
    assert (found and found.isoformat()) == (expected and f"{expected}+09:00")


def test_begin_time_after_year_9999_is_passed_to_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    assert moment_of("9999-12-31T23:59", NOW) is None


def test_begin_time_uses_summer_time_of_its_own_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    found = [moment_of(text, NOW) for text in ("2026-07-01T12:00", "2026-12-01T12:00")]
    assert [moment and moment.utcoffset() for moment in found] == [
        timedelta(hours=2),
        timedelta(hours=1),
    ]


@pytest.mark.parametrize(
    ("slurm", "lines"),
    [
        (["--begin=05:55", "--nice"], ""),
        (["--nice -b 05:55"], ""),
        (["--nice", "--begin=05:55"], "#SBATCH --begin=09:00"),
        (["--nice"], "#SBATCH -N1 -b05:55"),
    ],
)
def test_begin_is_converted_to_the_controllers_time_zone(
    tmp_path: Path, slurm: list[str], lines: str
) -> None:
    asked = controller("2026-11-27T20:55:00")
    request, notes = with_local_times(asked, job_of(tmp_path, *slurm, lines=lines), NOW)
    assert request.job.slurm == ("--nice", "--begin=2026-11-27T20:55:00")
    assert asked.calls[0].argv[2] == "@1795812900"
    assert len(notes) == 1
    assert {"--begin=05:55", "2026-11-28T05:55:00", "JST", "2026-11-27T20:55:00"} <= {
        word.strip(",") for word in notes[0].split()
    }


def test_begin_and_deadline_are_both_converted(tmp_path: Path) -> None:
    lines = "#SBATCH --begin=05:00 --deadline=06:00"
    request, notes = with_local_times(controller("A", "B"), job_of(tmp_path, lines=lines), NOW)
    assert (request.job.slurm, len(notes)) == (("--begin=A", "--deadline=B"), 2)


def test_relative_time_and_job_without_times_stay(tmp_path: Path) -> None:
    for slurm in (["--begin=now+1hour"], ["--nice"], []):
        job = job_of(tmp_path, *slurm)
        assert with_local_times(controller(), job, NOW) == (job, ())


def test_begin_time_in_another_format_is_passed_with_a_note(tmp_path: Path) -> None:
    job = job_of(tmp_path, "--begin=tomorrow")
    same, (note,) = with_local_times(controller(), job, NOW)
    assert same.job.slurm == job.job.slurm
    assert "--begin=tomorrow" in note


def test_dry_run_notes_that_a_time_will_be_converted(tmp_path: Path) -> None:
    job = job_of(tmp_path, lines="#SBATCH --begin=05:55")
    same, (note,) = with_local_times(None, job, NOW)
    assert (same.job.slurm, "--begin=05:55" in note) == ((), True)
