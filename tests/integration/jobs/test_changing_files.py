"""Files that change while a job is submitted: the log of the loop that submits, temporary files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.jobs.source import source_of
from clusterctl.jobs.submit import PreparedJob, Submitter
from clusterctl.scheduler.request.request import Request
from clusterctl.spec.job import JobSpec
from tests.support.messages import refused


@pytest.fixture
def job(tmp_path: Path) -> JobSpec:
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.sh").write_text("#!/bin/bash\ntrue\n")
    (project / "submit.log").write_text("submitted job 1\n")
    (project / "result.csv").write_text("1,2,3\n")
    (project / "part.tmp").write_text("x")
    return JobSpec(name="mine", script=project / "job.sh")


def test_submission_sends_changing_files_as_they_are(session, cluster, job):
    source = source_of(Request.read(job))
    assert source is not None
    project = source.folder
    with (project / "submit.log").open("a") as file:
        file.write("submitted job 2\n")
    notes: list[str] = []
    request = Request.read(job)
    prepared = PreparedJob(request, session.site.render(request, None), source)
    first = Submitter(session, notes.append).submit(prepared)
    sent = Path(first.remote_dir, "files")
    assert (sent / "submit.log").read_text() == "submitted job 1\n"
    assert [note.code for note in notes] == ["file-still-grows"]
    assert "submit.log" in notes[0]
    listed = json.loads((sent.parent / "source.json").read_text())["files"]
    assert {file["path"]: file["size"] for file in listed}["submit.log"] == len("submitted job 1\n")


def test_submission_lists_files_again_that_shrink_or_vanish(session, cluster, job):
    source = source_of(Request.read(job))
    assert source is not None
    (source.folder / "result.csv").write_text("4\n")
    (source.folder / "part.tmp").unlink()
    request = Request.read(job)
    prepared = PreparedJob(request, session.site.render(request, None), source)
    done = Submitter(session).submit(prepared)
    sent = Path(done.remote_dir, "files")
    assert (sent / "result.csv").read_text() == "4\n"
    assert {path.name for path in sent.iterdir()} >= {"job.sh", "submit.log", "result.csv"}
    assert not (sent / "part.tmp").exists()
    assert len(cluster.ledger.entries()) == 1


def test_submission_without_its_script_is_refused(session, cluster, job):
    source = source_of(Request.read(job))
    script = session.site.render(Request.read(job), None)
    job.place.folder.joinpath("job.sh").unlink()
    with refused("file-unreadable", UsageError, "job.sh"):
        Submitter(session).submit(PreparedJob(Request.read(job), script, source))
    assert cluster.ledger.entries() == ()
