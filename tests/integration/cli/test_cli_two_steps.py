"""`--dry-run`, then `--if-digest`: a command does what its dry run has shown, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli.main import app
from clusterctl.cli.verbs import VERBS
from clusterctl.jobs.submit import Submitter
from clusterctl.scheduler.session import Session
from scripts.cli_reference import verbs
from tests.integration.cli.conftest import Answer
from tests.support.verbs import Clusterctl

BOTH = {"--dry-run", "--if-digest"}


@pytest.fixture
def script(played_session: Session) -> Path:
    path = Path("a.sh")
    path.write_text("#!/bin/bash\nsleep 60\n")
    return path


def code(found: dict[str, Any]) -> str:
    (failure,) = found["failures"]
    return str(failure["code"])


def test_verbs_with_two_steps() -> None:
    found = {
        " ".join(path)
        for path, command in verbs(app)
        if {name for parameter in command.params for name in parameter.opts} >= BOTH
    }
    assert found == {"submit", "replay", "up", "cancel", "down", "node remove"} < set(VERBS)


def test_submit_does_what_its_dry_run_has_shown(
    answer: Answer, script: Path, played_session: Session
) -> None:
    words = ("submit", "a.sh", "--time", "30m")
    shown = answer(*words, "--dry-run")
    assert shown["dry_run"] is True
    assert shown["cluster"] == "demo"
    assert shown["at_most"] == {
        "jobs": 1,
        "tasks": 1,
        "node_hours": 0.5,
        "usd": 0.0,
        "nodes": 0,
        "currency": "USD",
    }
    digest = shown["digest"]
    assert not played_session.ledger.entries()
    assert code(answer(*words, "--requeue", "--if-digest", digest, rc=2)) == "plan-changed"
    done = answer(*words, "--if-digest", digest)
    assert done["job_id"] == "1"
    assert "script" not in done
    # A digest allows one command as well as its repetition; it does not count them.
    script.write_text("#!/bin/bash\nsleep 61\n")
    assert code(answer(*words, "--if-digest", digest, rc=2)) == "plan-changed"
    Path("new.txt").write_text("x")
    assert code(answer(*words, "--if-digest", digest, rc=2)) == "plan-changed"
    assert [entry.job_id for entry in played_session.ledger.entries()] == ["1"]


@pytest.mark.parametrize("file", ["a.sh", "data.csv"])
def test_file_that_changes_after_the_check_is_not_sent(
    answer: Answer,
    script: Path,
    played_session: Session,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
) -> None:
    Path("data.csv").write_text("1234567")
    digest = answer("submit", "a.sh", "--dry-run")["digest"]
    submit = Submitter.submit

    def submit_late(*given: Any) -> Any:
        Path(file).write_text("# late\n")
        return submit(*given)

    monkeypatch.setattr(Submitter, "submit", submit_late)
    assert code(answer("submit", "a.sh", "--if-digest", digest, rc=2)) == "plan-changed"
    assert not played_session.ledger.entries()


def test_cancel_means_the_jobs_of_its_dry_run(answer: Answer, script: Path) -> None:
    ids = [answer("submit", "a.sh")["job_id"] for _ in range(2)]
    shown = answer("cancel", *ids, "--dry-run")
    assert shown["dry_run"] is True
    assert shown["cancelled"] == ids
    assert [row["state"] for row in answer("jobs")["jobs"] if row["state"] == "CANCELLED"] == []
    digest = shown["digest"]
    assert code(answer("cancel", ids[0], "--if-digest", digest, rc=2)) == "plan-changed"
    assert answer("cancel", *ids, "--if-digest", digest)["cancelled"] == ids
    assert code(answer("cancel", *ids, "--if-digest", digest, rc=2)) == "plan-changed"
    assert answer("cancel", *ids, "--dry-run")["cancelled"] == []


def test_replay_does_what_its_dry_run_has_shown(answer: Answer, script: Path) -> None:
    script.write_text("#!/bin/bash\necho done\n")
    answer("submit", "a.sh", "--wait")
    answer("collect")
    digest = answer("replay", "demo-1-a", "--dry-run")["digest"]
    assert answer("submit", "a.sh", "--dry-run")["digest"] != digest
    words = ("replay", "demo-1-a", "--if-digest")
    assert code(answer(*words, "0" * 64, rc=2)) == "plan-changed"
    assert answer(*words, digest)["job_id"] == "2"


def test_up_is_refused_before_anything_is_made(cli: Clusterctl) -> None:
    shown = cli("-o", "json", "up", "--dry-run").json
    assert shown["dry_run"] is True
    assert shown["at_most"]["usd"] == 0.0
    assert cli("-o", "json", "up", "--dry-run").json["digest"] == shown["digest"]
    found = cli("-o", "json", "up", "--if-digest", "0" * 64, rc=2).json
    assert code(found) == "plan-changed"
    assert shown["digest"] in found["failures"][0]["cause"]
    assert cli("-o", "json", "up", "--reconfigure", "--dry-run").json["digest"] != shown["digest"]


def test_two_steps_exclude_each_other(cli: Clusterctl) -> None:
    for words in (
        ("submit", "train", "--dry-run"),
        ("submit", "train", "--local", "--run", "1"),
        ("up", "--dry-run"),
        ("down", "--dry-run"),
        ("cancel", "1", "--dry-run"),
        ("node", "remove", "x", "--dry-run"),
    ):
        found = cli("-o", "json", *words, "--if-digest", "0", rc=2).json
        assert code(found) == "options-exclusive", words
    for step in (["--dry-run"], ["--if-digest", "0"]):
        found = cli("-o", "json", "submit", "train", "--first", "best:2", *step, rc=2).json
        assert code(found) == "first-not-foreseen"
    assert code(cli("-o", "json", "submit", "eval", "--local", "--dry-run", rc=2).json) == (
        "options-exclusive"
    )
