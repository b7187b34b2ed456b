"""`clusterctl replay`: what it says before and after, and which tasks it takes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from clusterctl import __version__
from clusterctl.cli.main import app
from clusterctl.jobs.source import manifest, source_of
from clusterctl.jobs.submit import client_facts
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import job_spec
from clusterctl.transport.tree import hash_items
from tests.support.messages import condition, shows
from tests.unit.runs.made import made_run

LOSSES = """\
#!/bin/bash
for step in 1 2 3; do echo "{\\"step\\": $step, \\"loss\\": ${2:-0}.$step}"; done >metrics.jsonl
"""
RunVerb = Callable[..., tuple[str, str]]


@pytest.fixture
def run_verb(played_session: Session, capsys: pytest.CaptureFixture[str]) -> RunVerb:
    """Runs a verb; what it printed, and what it noted."""

    def run(*words: str, rc: int = 0) -> tuple[str, str]:
        assert (app([*words], prog_name="clusterctl", standalone_mode=False) or 0) == rc, (
            capsys.readouterr()
        )
        output = capsys.readouterr()
        return output.out, output.err

    return run


@pytest.fixture
def run(run_verb: RunVerb) -> str:
    """A run in ./runs, whose script has changed since."""
    Path("losses.sh").write_text(LOSSES)
    run_verb("submit", "losses.sh", "--wait", "--tag", "base", "--", "--lr", "1")
    run_verb("collect")
    Path("losses.sh").write_text("#!/bin/bash\nexit 3\n")
    return "demo-1-losses"


def differences(run_verb: RunVerb, a: str, b: str) -> tuple[list[str], bool]:
    """Return the keys that differ between two runs, and whether their losses are identical."""
    found = json.loads(run_verb("-o", "json", "runs", "diff", a, b)[0])
    keys = [one["key"] for one in found["differences"] if one["section"] != "result"]
    return keys, found["losses"]["identical"]


def test_replay_reports_identical_losses(run: str, run_verb: RunVerb) -> None:
    out, err = run_verb("replay", run, "--wait", "--tag", "again")
    assert "replay of demo-1-losses; " in err
    assert "->" not in err
    home = Path("runs/demo-2-losses").absolute()
    ended, losses = out.splitlines()
    assert ended.startswith("job 2 (losses) COMPLETED")
    assert ended.endswith(f": {home}")
    assert losses.startswith("losses: identical ")
    assert losses.endswith(" 3 steps")
    assert json.loads((home / "run.json").read_text())["tags"] == ["again"]
    assert differences(run_verb, run, "2") == ([], True)


def test_replay_shows_differences_before_and_after_the_run(run: str, run_verb: RunVerb) -> None:
    facts = Path("runs", run, "environment.json")
    facts.write_text(
        facts.read_text().replace(f'"clusterctl": "{__version__}"', '"clusterctl": "0.0.1"')
    )
    words = ("replay", run, "--set", "lr=2", "--wait")
    out, err = run_verb(*words)
    assert f":\n  clusterctl: 0.0.1 -> {__version__}\n  lr: 1 -> 2\n" in err
    assert "losses: different " in out
    assert "demo-1-losses demo-2-losses`" in out
    answer = json.loads(run_verb("-o", "json", *words)[0])
    assert answer["differences"][1] == {"key": "lr", "a": 1, "b": "2"}
    assert answer["losses"].pop("largest") == pytest.approx(1)
    counts = {"steps": 3, "a": 3, "b": 3, "first": 1}
    assert answer["losses"] == {"identical": False, "axis": "step", "complete": True, **counts}
    assert differences(run_verb, run, "2") == (["clusterctl", "lr"], False)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('"loss": NaN, "step": 9', "9"),
        ('"x": -Infinity', ""),
        ('"note": "NaN"', None),
        ("x", None),
    ],
)
def test_submit_wait_names_first_metric_without_number(
    played_session: Session, run_verb: RunVerb, line: str, named: str | None
) -> None:
    text = f"#!/bin/bash\ncat >metrics.jsonl <<'END'\n{{{line}}}\nEND\n"
    Path("losses.sh").write_text(text)
    err = run_verb("submit", "losses.sh", "--wait")[1]
    assert shows(err, "metrics-nonfinite") is (named is not None)
    assert f" at step {named}" in err if named else " at step" not in err


@pytest.mark.parametrize(
    ("command", "is_noted"),
    [
        ("python3 -c 'raise RuntimeError(7)' 2>&1 | cat", True),
        ("python3 -c 'raise RuntimeError(7)'\necho done", True),
        ("nosuchcommand | cat", True),
        ("python3 -c 'raise RuntimeError(7)'; for i in 1 2 3 4 5; do echo $i >&2; done", False),
        ("echo 'WARNING: error: none'", False),
        ("echo 'the last error: 0.01'", False),
    ],
)
def test_submit_wait_notes_error_at_the_end_of_a_completed_job(
    played_session: Session, run_verb: RunVerb, command: str, *, is_noted: bool
) -> None:
    Path("losses.sh").write_text(f"#!/bin/bash\n{command}\nexit 0\n")
    err = run_verb("submit", "losses.sh", "--wait")[1]
    assert shows(err, "log-ends-with-error") is is_noted


@pytest.mark.parametrize(("after", "is_noted"), [("print('recovered')", False), ("", True)])
def test_submit_wait_notes_a_handled_error_if_it_is_the_last_line(
    played_session: Session, run_verb: RunVerb, after: str, *, is_noted: bool
) -> None:
    handled = "import traceback\ntry:\n    open('no')\nexcept OSError:\n    traceback.print_exc()\n"
    Path("fit.py").write_text(handled + after + "\n")
    err = run_verb("submit", "fit.py", "--wait")[1]
    assert shows(err, "log-ends-with-error") is is_noted
    assert "set -eo pipefail" not in err


def test_submit_wait_notes_a_thread_that_an_exception_has_ended(
    played_session: Session, run_verb: RunVerb
) -> None:
    text = "import threading\nthread = threading.Thread(target=lambda: 1 / 0, name='loader')\n"
    Path("fit.py").write_text(f"{text}thread.start()\nthread.join()\nprint('done')\n")
    err = run_verb("submit", "fit.py", "--wait")[1]
    assert shows(err, "part-ended-by-exception")
    assert not shows(err, "log-ends-with-error")
    assert "(thread loader): ZeroDivisionError" in err


def test_replay_without_wait_names_the_command_to_compare(run: str, run_verb: RunVerb) -> None:
    out, err = run_verb("replay", "1")
    assert "job 2 (losses)" in out
    assert "`clusterctl collect 2`" in err
    assert "diff demo-1-losses 2`" in err
    out, err = run_verb("replay", "1", "--dry-run", "--time", "5m")
    assert "#SBATCH --time=00:05:00" in out
    assert "would send 2 files (" in err


def sweep(states: Mapping[int, str], job_id: int = 7, **fields: Any) -> None:
    """A sweep of four tasks as `collect` leaves it, or a run of some of its tasks."""
    job = job_spec(
        "losses.sh", {"sweep": {"grid": {"lr": "0..3"}, "parallel": 2}, "args": ["--base", "1"]}
    )
    tasks = [
        {
            "id": f"{job_id}_{number}",
            "state": state,
            "config": {"lr": number},
            "metrics": {"loss": {"last": number + job_id / 100}} if state == "COMPLETED" else {},
        }
        for number, state in states.items()
    ]
    record = made_run(
        Path("runs"), job_id, name="losses", tasks=tasks, **{"sweep": job.sweep.record, **fields}
    )
    source = source_of(Request.read(job))
    (record.directory / "source.json").write_bytes(manifest(source.items, hash_items(source.files)))
    facts = client_facts(job, folder=Path.cwd(), known={"git": None})
    (record.directory / "environment.json").write_text(json.dumps({"client": facts}))
    (record.directory / "sweep-tasks.json").write_text(json.dumps(job.sweep.record))


FAILED = {0: "COMPLETED", 1: "FAILED", 2: "COMPLETED", 3: "TIMEOUT"}
AGAIN = {"replay_of": f"{7:08x}", "of_failed": True}


@pytest.fixture
def swept(played_session: Session) -> None:
    Path("losses.sh").write_text(LOSSES)
    sweep(FAILED)


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("--set", "lr"), "option-invalid/setting", "--set: 'lr'"),
        (("--set", "lr=1", "--set", "--lr=2"), "option-invalid/setting", "'lr' is given"),
        (("--timeout", "5"), "option-invalid/option-missing", "--timeout"),
        (("--failed",), "option-invalid/array", "demo-7-losses"),
        (("--time", "soon"), "option-invalid/not-a-time", "--time: 'soon'"),
        (("--partition", "tarin", "--dry-run"), "not-found/partition", "'tarin'"),
    ],
)
def test_replay_with_wrong_options_is_refused(
    swept: None, run_verb: RunVerb, words: tuple[str, ...], code: str, named: str
) -> None:
    (failure,) = json.loads(run_verb("-o", "json", "replay", "7_2", *words, rc=2)[0])["failures"]
    assert condition(failure) == code
    assert named in failure["cause"]


def array(script: str) -> str:
    return next(
        line.split("=")[1] for line in script.splitlines() if line.startswith("#SBATCH --array")
    )


def test_replay_failed_repeats_tasks_that_still_fail(swept: None, run_verb: RunVerb) -> None:
    out, err = run_verb("replay", "7", "--failed", "--dry-run")
    assert array(out) == "1,3%2"
    assert "demo-7-losses, tasks 1,3%2" in err
    sweep({1: "COMPLETED", 3: "FAILED"}, 8, **AGAIN)
    for name in ("7", "8"):
        assert array(run_verb("replay", name, "--failed", "--dry-run")[0]) == "3%2"
    sweep({3: "COMPLETED"}, 9, **AGAIN)
    assert "demo-7-losses" in run_verb("replay", "7", "--failed", "--wait")[0]
    assert json.loads(run_verb("replay", "7", "--failed", "-o", "json")[0])["jobs"] == []


def test_sweep_and_its_failed_tasks_are_ranked_together(swept: None, run_verb: RunVerb) -> None:
    sweep({1: "COMPLETED", 3: "FAILED"}, 8, **AGAIN)
    sweep(
        dict.fromkeys(range(4), "COMPLETED"), 9, replay_of=AGAIN["replay_of"]
    )  # of all, which is another one
    for name in ("7", "8"):
        rows = json.loads(run_verb("runs", "--sweep", name, "-o", "json")[0])["runs"]
        assert [row["job"] for row in rows] == ["7_0", "8_1", "7_2", "8_3"]
    rows = json.loads(run_verb("runs", "--sweep", "9", "-o", "json")[0])["runs"]
    assert [row["job"] for row in rows] == ["9_0", "9_1", "9_2", "9_3"]


def test_replay_with_current_code_sends_and_lists_it(swept: None, run_verb: RunVerb) -> None:
    shutil.copy("losses.sh", "runs/demo-7-losses")
    err = run_verb("replay", "7", "--failed", "--dry-run")[1]
    assert not shows(err, "code-changed-since")
    Path("losses.sh").write_text(f"{LOSSES}\n# corrected\n")
    Path("more.txt").write_text("new\n")
    assert shows(run_verb("replay", "7", "--failed", "--dry-run")[1], "code-changed-since")
    assert (
        array(run_verb("replay", "7", "--failed", "--code", "current", "--dry-run")[0]) == "1,3%2"
    )
    out, err = run_verb("replay", "7_1", "--code", "current", "--wait", "-o", "json")
    assert not shows(err, "code-changed-since")
    (answer,) = json.loads(out)["jobs"]
    changed = {entry["key"]: (entry["a"], entry["b"]) for entry in answer["differences"]}
    assert list(changed) == ["losses.sh", "more.txt"]
    sent = Path(answer["dir"], "files", "losses.sh")
    assert changed["losses.sh"][1] == sha256(sent.read_bytes()).hexdigest()[:12]
    assert changed["more.txt"][0] is None
    assert sent.read_text().endswith("# corrected\n")
    facts = json.loads(Path("runs/demo-1-losses/environment.json").read_text())["client"]
    assert (condition(facts), facts["job"]["script"]) == (
        "current",
        str(Path("losses.sh").absolute()),
    )


def test_ranking_names_failed_tasks_and_other_code(swept: None, run_verb: RunVerb) -> None:
    out = run_verb("runs", "--sweep", "7")[0]
    assert shows(out, "sweep-incomplete")
    assert not shows(out, "sweep-of-two-programs")
    sweep({1: "COMPLETED", 3: "COMPLETED"}, 8, **AGAIN, source="0" * 64)
    out = run_verb("runs", "--sweep", "7")[0]
    assert not shows(out, "sweep-incomplete")
    assert shows(out, "sweep-of-two-programs")


def test_replay_with_current_code_of_a_removed_script_is_refused(
    swept: None, run_verb: RunVerb
) -> None:
    Path("losses.sh").unlink()
    refusal = run_verb("replay", "7", "--failed", "--code", "current", "--dry-run", rc=2)[1]
    assert shows(refusal, "not-replayable")
    assert "losses.sh" in refusal


def test_replay_failed_skips_running_tasks(swept: None, run_verb: RunVerb) -> None:
    sweep({1: "RUNNING", 3: "PENDING"}, 8, **AGAIN, final=False)
    refusal = run_verb("replay", "7", "--failed", rc=2)[1]
    assert shows(refusal, "job-not-ended")
    assert "job 8 " in refusal
    assert shows(
        run_verb("replay", "7", "--failed", "--set", "base=2", rc=2)[1], "options-exclusive"
    )


def test_winner_is_replayed_as_one_job(swept: None, run_verb: RunVerb) -> None:
    out, err = run_verb("replay", "7_2", "--set", "lr=5", "--dry-run")
    assert "--array" not in out
    assert '"$files"/losses.sh --base 1 --lr 5' in out
    assert "  lr: 2 -> 5\n" in err


def test_replay_of_an_impossible_task_number_is_refused(
    played_session: Session, run_verb: RunVerb
) -> None:
    for number, one in enumerate(("²", "9" * 5000, "1; rm"), 1):
        tasks = [{"id": f"{number}_{one}", "state": "FAILED"}]
        made_run(Path("runs"), number, tasks=tasks)
        assert shows(run_verb("replay", str(number), "--failed", rc=2)[1], "task-without-number")


def test_replay_of_a_bundled_job_compares_its_programs(
    played_session: Session, run_verb: RunVerb
) -> None:
    facts = {"payload": "0123456789abcdef", "given": ["nodes"]}
    made_run(
        Path("runs"), args=["--epochs", "1"], job={"bundled": "train", "nodes": 2}, client=facts
    )
    Path("runs/demo-1-train/source.json").unlink()
    out, err = run_verb("replay", "1", "--dry-run")
    assert "#SBATCH --nodes=2" in out
    assert " train --epochs 1" in out
    assert "  clusterctl: 1.0 -> " in err
    assert "programs: 0123456789abcdef -> " in err
