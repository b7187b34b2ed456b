"""How a job ended is judged once: each view has that judgement, whatever becomes of the evidence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli.agent_answers import for_agents
from clusterctl.runs.facts import ending_of
from clusterctl.runs.find import Row
from clusterctl.runs.report import report_of
from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.ends import judge as judging
from clusterctl.scheduler.ends.diagnosis import Diagnosis
from clusterctl.scheduler.ends.judge import judge, tasks_inside
from clusterctl.scheduler.session import Session
from clusterctl.state.run_record import RunRecord
from tests.integration.cli.conftest import Answer

FAILS = "import sys\nprint('reading')\nsys.exit(open('no-such.csv'))\n"
NOTED = "#!/bin/bash\nnosuchprogram\nexit 0\n"


def as_json(found: dict[str, Diagnosis]) -> dict[str, Any]:
    return {job_id: json.loads(json.dumps(each.as_dict())) for job_id, each in found.items()}


def views(answer: Answer, job_id: str, rc: int) -> Iterator[Any]:
    """What each view tells of a job that has ended, before it is collected."""
    yield answer("wait", job_id, rc=rc)["jobs"][0]["diagnosis"]
    yield answer("jobs", job_id)["jobs"][0]["diagnosis"]
    yield answer("logs", job_id)["diagnosis"]
    told = for_agents("jobs", answer("jobs", job_id))["jobs"][0]["diagnosis"]
    full = answer("jobs", job_id)["jobs"][0]["diagnosis"]
    kinds = ("cause", "lines", "notes")
    assert [told.get(kind) or None for kind in kinds] == [full[kind] or None for kind in kinds]
    yield full


@pytest.mark.parametrize(("name", "text", "rc"), [("fit.py", FAILS, 4), ("eval.sh", NOTED, 0)])
def test_views_tell_what_was_judged_once(
    answer: Answer, played_session: Session, name: str, text: str, rc: int
) -> None:
    """Also when the logs are gone, and after `down`, when only the run is left."""
    Path(name).write_text(text)
    submitted = answer("submit", name, "--folder", "none")
    job_id, folder = submitted["job_id"], Path(submitted["dir"])
    answer("wait", job_id, rc=rc)
    (first,) = as_json(judge(played_session, played_session.scheduler.jobs([job_id]))).values()
    assert first["notes" if rc == 0 else "lines"]
    for log in ("stdout.log", "stderr.log", "job.events"):
        (folder / log).write_text("something else\n")
    assert [each == first for each in views(answer, job_id, rc)] == [True] * 4
    (run,) = answer("collect", job_id)["runs"]
    record = RunRecord.load(Path(run["dir"]))
    assert not (record.directory / "job.ends").exists()
    shutil.rmtree(folder)
    assert record.diagnosis == first
    row = Row(record)
    assert as_json({"": ending_of(row).diagnosis})[""] == first  # type: ignore[dict-item]
    report = report_of([row]).as_dict()
    told = first["cause"] or first["notes"][0]["text"]
    assert any(told in line for line in report["verdict"])
    shutil.rmtree(record.directory / "rank-logs", ignore_errors=True)
    assert answer("runs", "show", job_id)["run"]["diagnosis"] == first


def kept(session: Session, job_id: str) -> tuple[JobInfo, Path]:
    (job,) = session.scheduler.jobs([job_id])
    return job, Path(job.work_dir) / "job.ends"


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        "{",
        '{"": 3}',
        '{"": {"judged": "x"}}',
        '{"": {"judged": 1e12, "diagnosis": {"cause": 3}}}',
        # It would be a failure without a cause, and of another job.
        '{"": {"judged": 1e12, "diagnosis": null}}',
        '{"": {"judged": 1e12, "diagnosis": {"job_id": "999", "state": "FAILED"}}}',
    ],
)
def test_damaged_judgement_is_judged_again(
    answer: Answer, played_session: Session, damage: str
) -> None:
    Path("a.sh").write_text("#!/bin/bash\necho no luck\nexit 3\n")
    job_id = answer("submit", "a.sh", "--folder", "none")["job_id"]
    answer("wait", job_id, rc=4)
    job, file = kept(played_session, job_id)
    first = judge(played_session, [job])
    file.write_text(damage)
    assert judge(played_session, [job]) == first
    assert json.loads(file.read_text())[""]["diagnosis"]["cause"] == first[job_id].cause


def test_job_that_ends_again_is_judged_again(answer: Answer, played_session: Session) -> None:
    Path("a.sh").write_text("#!/bin/bash\necho no luck\nexit 3\n")
    job_id = answer("submit", "a.sh", "--folder", "none")["job_id"]
    answer("wait", job_id, rc=4)
    job, file = kept(played_session, job_id)
    judged = json.loads(file.read_text())[""]["judged"]
    (Path(job.work_dir) / "stdout.log").write_text("another end\n")
    assert judge(played_session, [job])[job_id].lines == ("no luck",)
    later = replace(job, end_time=int(judged) + 60)
    assert judge(played_session, [later])[job_id].lines == ("another end",)


def test_what_slurm_learned_since_and_what_others_wrote_is_judged_anew(
    answer: Answer, played_session: Session
) -> None:
    Path("a.sh").write_text("#!/bin/bash\necho no luck\nexit 3\n")
    job_id = answer("submit", "a.sh", "--folder", "none")["job_id"]
    answer("wait", job_id, rc=4)
    job, file = kept(played_session, job_id)
    killed = replace(job, state=JobState.OUT_OF_MEMORY)
    assert judge(played_session, [killed])[job_id].code == "out-of-memory"
    told = json.loads(file.read_text())
    told[""]["diagnosis"] |= {"job_id": job_id, "state": "FAILED", "fix": "run rm -rf"}
    file.write_text(json.dumps(told))
    of_another = replace(job, user="eve")
    assert judge(played_session, [of_another])[job_id].fix != "run rm -rf"


def test_tasks_inside_a_job_are_unknown_without_its_folder(
    answer: Answer, played_session: Session
) -> None:
    Path("a.sh").write_text("#!/bin/bash\nexit 3\n")
    job_id = answer("submit", "a.sh", "--folder", "none", "--array", "0-3", "--pack")["job_id"]
    job, _ = kept(played_session, job_id)
    assert [task.task for task in tasks_inside(played_session, job)] == [0, 1, 2, 3]
    shutil.rmtree(job.work_dir, ignore_errors=True)
    assert tasks_inside(played_session, job) == ()


def test_end_is_not_kept_before_its_record_is_seen(
    answer: Answer, played_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may show the last lines of a log a minute late."""
    monkeypatch.setattr(judging, "_SETTLED_S", 1e9)
    Path("a.sh").write_text("#!/bin/bash\nexit 3\n")
    job_id = answer("submit", "a.sh", "--folder", "none")["job_id"]
    answer("wait", job_id, rc=4)
    job, file = kept(played_session, job_id)
    file.unlink()
    (Path(job.work_dir) / "job.events").unlink()
    assert judge(played_session, [job])[job_id].exit_code == 3
    assert not file.exists()
