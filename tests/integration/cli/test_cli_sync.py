"""`collect --sync`, with doubles of `wandb` and `trackio` that refuse what these programs refuse;
test_cli_sync_sweep.py has the real ones.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import clusterctl
from clusterctl.cli import collect as verb
from clusterctl.cli.output import Screen
from clusterctl.errors import CollectError, MachineError, UsageError
from clusterctl.runs.collect import uncollected
from clusterctl.scheduler.session import Session
from tests.support.disks import small_disk
from tests.support.messages import condition, shows
from tests.support.played.cluster import PlayedCluster, finished, submitted

JSON = Screen(json=True, color=False)
RUN = "wandb/offline-run-20261128_162731-gh55nr35"
RECORDS = f"mkdir -p {RUN} && echo data >{RUN}/run-gh55nr35.wandb && ln -s ${{PWD}}/{RUN} wandb/latest-run"
# wandb 0.31: cli.py exits with 1 without a key; beta_sync.py only prints what the server refuses,
# and exits with 0. Only what was sent gets the marker.
WANDB = """\
#!/bin/sh
echo "$@" >>{folder}/calls
[ "$WANDB_API_KEY" ] || { echo 'Error: No API key configured. Use `wandb login` to log in.' >&2; exit 1; }
[ "$WANDB_API_KEY" = good ] || { echo 'wandb: ERROR permission denied' >&2; exit 0; }
touch "$2/run-gh55nr35.wandb.synced"
"""
# trackio 0.43: cli.py needs --project; it writes to the database, and needs a token.
TRACKIO = """\
#!/bin/sh
echo "$@" >>{folder}/calls
echo changed >>"$TRACKIO_DIR/digits.db"
[ "$HF_TOKEN" ] || { echo 'huggingface_hub.errors.LocalTokenNotFoundError: no token' >&2; exit 1; }
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the doubles, first on PATH. `calls` has their arguments."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, text in {"wandb": WANDB, "trackio": TRACKIO}.items():
        (folder / name).write_text(text.replace("{folder}", str(folder)))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("WANDB_API_KEY", "good")
    monkeypatch.setenv("HF_TOKEN", "good")
    return folder


@pytest.fixture
def program(tmp_path: Path) -> Path:
    folder = tmp_path / "program"
    folder.mkdir()
    return folder


@pytest.fixture
def sync(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[tuple[str, str]]]:
    """`sync("wandb", "1")`: the paths and states of what was synced."""

    def run(tool: str, *ids: str, **options: Any) -> list[tuple[str, str]]:
        capsys.readouterr()
        verb.collect(JSON, [*ids], sync=[tool], **options)
        return paths_and_states(json.loads(capsys.readouterr().out))

    return run


def paths_and_states(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["path"], each["state"]) for each in answer["synced"]]


def database(program: Path, space: str = "") -> str:
    """Shell commands that put a database of Trackio into the job's folder."""
    with closing(sqlite3.connect(program / "digits.db")) as connection:
        connection.execute("CREATE TABLE project_metadata (key TEXT, value TEXT)")
        if space:
            connection.execute("INSERT INTO project_metadata VALUES ('space_id', ?)", (space,))
        connection.commit()
    return "mkdir trackio && cp digits.db trackio && touch trackio/digits.lock"


def calls(tools: Path) -> list[str]:
    path = tools / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_collect_tells_that_an_earlier_copy_stays_where_it_is(
    played_session: Session, cluster: PlayedCluster, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    job_id = finished(played_session, cluster, tmp_path, "true")
    out = tmp_path / "elsewhere"
    for chosen, is_told in ((None, False), (out, True), (Path("runs"), False)):
        verb.collect(Screen(json=False, color=False), [job_id], out=chosen)
        assert shows(capsys.readouterr().err, "run-stays") is is_told
    assert not out.exists()


def the_run(tmp_path: Path) -> Path:
    (run,) = (tmp_path / "cwd" / "runs").iterdir()
    return run


def test_offline_run_is_sent_once(*, played_session, cluster, program, tools, sync) -> None:
    finished(played_session, cluster, program, RECORDS)
    assert sync("wandb") == [(RUN, "sent")]
    assert sync("wandb", "1") == [(RUN, "before")]
    assert len(calls(tools)) == 1


def test_python_interface_sends_recordings(*, played_session, cluster, program, tools) -> None:
    job_id = finished(played_session, cluster, program, RECORDS)
    clusterctl.Cluster().job(job_id).collect(sync="wandb")
    assert len(calls(tools)) == 1


def test_run_that_is_already_here_is_sent_without_its_id(
    *, played_session, cluster, program, tools, sync
) -> None:
    finished(played_session, cluster, program, RECORDS)
    verb.collect(JSON)
    assert sync("wandb") == [(RUN, "sent")]


def test_runs_of_other_projects_are_not_sent_without_their_ids(
    *, played_session, cluster, program, tools, sync, tmp_path
) -> None:
    finished(played_session, cluster, program, RECORDS)
    (entry,) = played_session.ledger.entries()
    played_session.ledger.update(entry, folder=str(tmp_path / "other"))
    verb.collect(JSON, ["1"])
    assert sync("wandb") == []
    assert sync("wandb", "1") == [(RUN, "sent")]


@pytest.mark.parametrize(("key", "words"), [("", "wandb login"), ("bad", "permission denied")])
def test_refused_recording_is_named_with_the_last_line_of_the_tool(
    *, key, words, played_session, cluster, program, tools, sync, tmp_path, monkeypatch
) -> None:
    """Also if the tool exits with 0. The run is here and whole, and the next call sends it."""
    finished(played_session, cluster, program, RECORDS)
    monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(CollectError) as caught:
        sync("wandb", "1")
    assert condition(caught.value) == "transfer-failed/tracker"
    assert words in caught.value.failures[0].cause
    assert caught.value.answer["runs"][0]["job_id"] == "1"
    assert paths_and_states(caught.value.answer) == [(RUN, "failed")]
    check = ["sha256sum", "-c", "--quiet", "SHA256SUMS"]
    subprocess.run(check, cwd=the_run(tmp_path), check=True)
    monkeypatch.setenv("WANDB_API_KEY", "good")
    assert sync("wandb", "1") == [(RUN, "sent")]


@pytest.mark.parametrize(
    ("tool", "code"),
    [
        ("wandb", "tool-missing/tracker"),
        ("mlflow", "option-invalid/tracker-server"),
        ("neptune", "option-invalid/value-unknown"),
    ],
)
def test_tool_that_can_send_nothing_stops_before_anything_is_copied(
    *, tool, code, played_session, cluster, program, tools, sync, monkeypatch
) -> None:
    finished(played_session, cluster, program, RECORDS)
    (tools / "wandb").unlink()
    (tools / "mlflow").write_text("#!/bin/sh\n")
    (tools / "mlflow").chmod(0o755)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises((MachineError, UsageError)) as caught:
        sync(tool, "1")
    assert condition(caught.value) == code
    assert [entry.job_id for entry in uncollected(played_session.ledger.workspace)] == ["1"]


def test_running_job_is_not_sent(
    *, played_session, cluster, program, tools, sync, tmp_path
) -> None:
    submitted(played_session, program, f"{RECORDS}; touch {tmp_path}/recorded; sleep 600")
    while not (tmp_path / "recorded").exists():
        cluster.job("1")
    assert sync("wandb", "1") == [(RUN, "left")]
    assert calls(tools) == []
    cluster.end_jobs()


def test_recording_with_a_file_that_stayed_on_the_cluster_is_not_sent(
    *, played_session, cluster, program, tools, sync
) -> None:
    body = f"{RECORDS}; head -c 2M /dev/zero >{RUN}/big"
    finished(played_session, cluster, program, body)
    with pytest.raises(CollectError) as caught:
        sync("wandb", "1", max_file="1MiB")
    (failure,) = caught.value.failures
    assert "--all" in failure.cause
    assert "collect 1 --all --sync wandb" in failure.fix
    assert not failure.retryable
    assert paths_and_states(caught.value.answer) == [(RUN, "incomplete")]
    assert calls(tools) == []
    assert sync("wandb", "1", everything=True) == [(RUN, "sent")]


def test_list_of_what_was_sent_is_not_taken_from_the_job(
    *, played_session, cluster, program, tools, sync, tmp_path
) -> None:
    """A job may have a file of its name, which stays as it is."""
    forged = json.dumps({"wandb": {RUN: 1}})
    finished(played_session, cluster, program, f"{RECORDS}; echo '{forged}' >synced.json")
    assert sync("wandb", "1") == [(RUN, "sent")]
    assert json.loads((the_run(tmp_path) / "synced.json.from-job").read_text()) == json.loads(
        forged
    )


def test_what_was_sent_is_known_after_the_run_gets_more_files(
    *, played_session, cluster, program, tools, sync, tmp_path
) -> None:
    body = f"{database(program)}; mkdir ckpt-1 ckpt-2; touch ckpt-1/a ckpt-2/a"
    finished(played_session, cluster, program, body)
    assert sync("trackio", "1") == [("trackio/digits.db", "sent")]
    assert sync("trackio", "1", checkpoints="all") == [("trackio/digits.db", "before")]
    assert len([*the_run(tmp_path).glob("ckpt-*")]) == 2


def test_trackio_sends_a_copy_to_a_private_space(
    *, played_session, cluster, program, tools, sync, tmp_path
) -> None:
    """It would change the database in the run."""
    finished(played_session, cluster, program, database(program))
    assert sync("trackio", "1") == [("trackio/digits.db", "sent")]
    assert calls(tools) == ["sync --project digits --private"]
    check = ["sha256sum", "-c", "--quiet", "SHA256SUMS"]
    subprocess.run(check, cwd=the_run(tmp_path), check=True)


def test_folder_with_the_name_of_a_project_does_not_stop_trackio(
    *, played_session, cluster, program, tools, sync
) -> None:
    body = f"{database(program)}; mkdir trackio/digits.old; touch trackio/digits.old/a"
    finished(played_session, cluster, program, body)
    assert sync("trackio", "1") == [("trackio/digits.db", "sent")]


def test_recording_that_can_not_be_copied_is_named_with_all_runs(
    *, played_session, cluster, program, tools, sync, monkeypatch
) -> None:
    """A full disk: the run is here, and the next call sends it."""
    finished(played_session, cluster, program, database(program))
    with small_disk() as disk, monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(disk.path))
        disk.suffer("full")
        with pytest.raises(CollectError) as caught:
            sync("trackio", "1")
    assert paths_and_states(caught.value.answer) == [("trackio/digits.db", "failed")]
    assert caught.value.answer["runs"][0]["job_id"] == "1"
    assert caught.value.failures[0].retryable
    assert sync("trackio", "1") == [("trackio/digits.db", "sent")]


def test_project_that_has_a_space_is_left(*, played_session, cluster, program, tools, sync) -> None:
    """`trackio sync` would replace what the Space has of the project."""
    finished(played_session, cluster, program, database(program, "me/space"))
    assert sync("trackio", "1") == [("trackio/digits.db", "left")]
    assert calls(tools) == []
