"""A run that was collected is not final while the job's folder has newer files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.runs.collect import collect
from clusterctl.runs.folder import damaged_files
from clusterctl.state.run_record import RunRecord
from clusterctl.transport.get import Download
from tests.support.played.cluster import PlayedCluster, finished


@pytest.fixture
def job(
    session: Any, cluster: PlayedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path, Path]:
    """A collected job: its id, its program's folder on the cluster, and its run."""
    monkeypatch.chdir(tmp_path)
    line = json.dumps({"step": 1, "loss": 2.0})
    body = (
        f"echo old >result.txt; echo '{line}' >metrics.jsonl; mkdir -p checkpoint-1 checkpoint-2;"
    )
    body += "for n in 1 2; do echo $n >checkpoint-$n/weights; done"
    job_id = finished(session, cluster, tmp_path, body)
    (run,) = collect(session)
    entry = session.ledger.find(job_id)
    assert [skipped.path for skipped in run.skipped] == ["files/checkpoint-1"]
    return job_id, Path(entry.program_dir), run.directory


def written_by_a_child(there: Path) -> tuple[str, str]:
    (there / "child").mkdir()
    (there / "child" / "result.txt").write_text("of a child\n")
    return "child/result.txt", "of a child\n"


def grown(there: Path) -> tuple[str, str]:
    (there / "result.txt").write_text("old\nnew\n")
    return "result.txt", "old\nnew\n"


def edited_with_the_same_size_and_time(there: Path) -> tuple[str, str]:
    file = there / "result.txt"
    status = file.stat()
    file.write_text("odd\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    return "result.txt", "odd\n"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("change", [written_by_a_child, grown, edited_with_the_same_size_and_time])
def test_collect_fetches_what_came_or_changed_after_the_run(
    session, job, change: Callable[[Path], tuple[str, str]], *, named: bool
):
    job_id, there, here = job
    ids = [job_id] if named else None
    before = RunRecord.load(here).files
    path, content = change(there)
    (run,) = collect(session, ids)
    assert run.directory == here
    assert (here / path).read_text() == content
    assert damaged_files(here) == []
    expected = before + (path == "child/result.txt")
    assert (run.files, RunRecord.load(here).files) == (expected, expected)
    # It is final again, and an older checkpoint that stays there does not change that.
    assert collect(session) == ()


def test_metrics_that_came_later_are_in_the_record(session, job):
    _, there, here = job
    with (there / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "loss": 1.0}) + "\n")
    (run,) = collect(session)
    assert run.metrics["loss"].last == RunRecord.load(here).metrics["loss"].last == 1.0
    assert run.state == "COMPLETED"


def test_content_that_the_newer_file_lacks_stays_beside_it(session, job):
    """It may be the only copy: of an edited file, or of what the program has overwritten."""
    _, there, here = job
    (here / "result.txt").write_text("my note\n")
    grown(there)
    collect(session)
    assert (here / "result.txt").read_text() == "old\nnew\n"
    assert (here / "result.txt.changed").read_text() == "my note\n"
    # A file that has grown has all that it had.
    (there / "result.txt").write_text("old\nnew\nnewest\n")
    collect(session)
    assert not (here / "result.txt.changed-2").exists()
    (there / "result.txt").write_text("again\n")
    collect(session)
    assert (here / "result.txt").read_text() == "again\n"
    assert (here / "result.txt.changed").read_text() == "my note\n"
    assert (here / "result.txt.changed-2").read_text() == "old\nnew\nnewest\n"
    assert damaged_files(here) == []


def test_file_that_is_being_written_there_is_left_for_the_next_collect(
    session, job, monkeypatch: pytest.MonkeyPatch
):
    """A child that the job has submitted still runs."""
    _, there, here = job
    written_by_a_child(there)
    growing = there / "child.log"
    growing.write_text("0\n")
    send = Download.bring

    def truncated(self: Any, *args: Any, **more: Any) -> Any:
        growing.write_text("")
        arrived = send(self, *args, **more)
        growing.write_text("more\n")
        return arrived

    with monkeypatch.context() as patch:
        patch.setattr(Download, "bring", truncated)
        (run,) = collect(session)
    assert [left.path for left in run.skipped if "changed" in left.reason] == ["files/child.log"]
    assert (here / "child" / "result.txt").exists()
    growing.write_text("done\n")
    collect(session)
    assert (here / "child.log").read_text() == "done\n"


def test_run_that_differs_in_nothing_is_not_fetched(session, job, cluster):
    _, there, _ = job
    (there / "empty").touch()
    assert collect(session) == ()
