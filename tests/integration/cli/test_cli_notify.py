"""Messages about jobs by `--notify`: to real commands, and by Apprise to a web server on this machine,
on a cluster whose Slurm is a double.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.cli import logs, submit, top
from clusterctl.cli.output import Screen
from clusterctl.errors import JobFailedError, UsageError
from clusterctl.runs.collect import collect
from clusterctl.util import receivers
from tests.support.clocks import replace_clock
from tests.support.messages import refused, shows
from tests.support.played.cluster import submitted
from tests.support.received import Service, serving

TEXT = Screen(json=False, color=False)
TOKEN = "tk_Zq8vN3xW7pL2"  # noqa: S105


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A job that fails."""
    folder = tmp_path / "program"
    folder.mkdir()
    path = folder / "job.sh"
    path.write_text("#!/bin/bash\necho 'gone: $(touch pwned); `touch pwned`' >&2\nexit 3\n")
    return path


@pytest.fixture
def keeper(tmp_path: Path) -> str:
    """A command that keeps its messages in files, as MESSAGE-EVENT."""
    program = tmp_path / "keep.sh"
    (tmp_path / "kept").mkdir()
    program.write_text(
        '#!/bin/sh\ncd "${0%/*}/kept" && { env -0 > "env-$CLUSTERCTL_EVENT"; '
        'cat > "text-$CLUSTERCTL_EVENT"; }\n'
    )
    program.chmod(0o755)
    return shlex.join([str(program), "two words", TOKEN])


def kept(folder: Path, event: str) -> tuple[str, dict[str, str]]:
    """The text of a kept message, and its variables."""
    lines = (folder / "kept" / f"env-{event}").read_text().split("\0")
    pairs = (line.partition("=") for line in lines)
    return (folder / "kept" / f"text-{event}").read_text(), {
        name: value for name, _, value in pairs
    }


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as server:
        yield server


def test_command_is_told_the_failure_and_its_cause(
    played_session, script, keeper, tmp_path, capsys
) -> None:
    with pytest.raises(JobFailedError) as caught:
        submit.submit(TEXT, str(script), wait=True, notify=[keeper])
    text, variables = kept(tmp_path, "failed")
    cause = caught.value.answer["diagnosis"]["cause"]
    expected = {"JOB": "1", "JOB_NAME": "job", "CLUSTER": "demo", "STATE": "FAILED", "CAUSE": cause}
    assert {name: variables[f"CLUSTERCTL_{name}"] for name in expected} == expected
    assert cause in text
    # The job's own words are never run.
    assert "touch pwned" in text
    assert not [*tmp_path.rglob("pwned")]
    assert shows(capsys.readouterr().err, "messages-while-running")


def test_followed_job_tells_its_end_by_apprise(played_session, script, service, capsys) -> None:
    script.write_text("#!/bin/bash\ntrue\n")
    url = f"json://ada:{TOKEN}@{service.address}/{TOKEN}"
    submit.submit(TEXT, str(script), follow=True, notify=[url])
    message = json.loads(service.received[-1].body)
    assert (message["type"], message["title"].split()[:2]) == ("success", ["job", "1"])
    assert message["message"].startswith("COMPLETED")


def test_token_is_in_no_file_and_no_output(
    *, played_session, cluster, script, keeper, service, tmp_path, capsys
) -> None:
    """Neither of the state folder, nor of the cluster, nor of the collected run; also if the service
    refuses the message."""
    service.status = 403
    url = f"json://ada:{TOKEN}@{service.address}/{TOKEN}"
    with pytest.raises(JobFailedError) as caught:
        submit.submit(
            Screen(json=False, color=False, verbose=True),
            str(script),
            wait=True,
            notify=[url, f"sh -c 'echo {TOKEN} >&2; exit 4'"],
        )
    shown = "".join(capsys.readouterr()) + str(caught.value)
    assert service.received
    assert shown.count("was not sent") >= 2
    assert shows(shown, "message-not-sent")
    collect(played_session, out=tmp_path / "runs")
    assert [*(tmp_path / "runs").rglob("run.json")]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "keep.sh"]
    assert len(files) > 10
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in shown


@pytest.mark.parametrize(
    ("limit", "is_of_message"), [("LIMIT_S", True), ("LAST_S", False)], ids=["message", "end"]
)
def test_receiver_that_hangs_delays_nothing_and_is_named(
    *, played_session, script, keeper, tmp_path, capsys, monkeypatch, limit, is_of_message
) -> None:
    """Its process ends, or the command does not wait for it at its end."""
    for name in ("LIMIT_S", "LAST_S"):
        monkeypatch.setattr(receivers, name, 2.0 if name == limit else 200.0)
    begun = time.monotonic()
    with pytest.raises(JobFailedError):
        submit.submit(TEXT, str(script), wait=True, notify=["sleep 600", keeper])
    assert time.monotonic() - begun < 60
    assert kept(tmp_path, "failed")
    notes = [
        line for line in capsys.readouterr().err.splitlines() if shows(line, "message-not-sent")
    ]
    assert notes
    assert all("receiver 1 (sleep)" in note for note in notes)
    assert all(("job 1" in note) is is_of_message for note in notes)


def test_receiver_that_crashes_loses_no_other_message(
    played_session, script, keeper, tmp_path, capsys
) -> None:
    with pytest.raises(JobFailedError):
        submit.submit(
            TEXT, str(script), wait=True, notify=["sh -c 'kill -SEGV $$'", "false", keeper]
        )
    assert kept(tmp_path, "failed")
    notes = [
        line for line in capsys.readouterr().err.splitlines() if shows(line, "message-not-sent")
    ]
    for name, is_named in (("sh", True), ("false", True), ("keep.sh", False)):
        assert any(f"({name})" in note for note in notes) is is_named


def test_top_tells_what_changes(
    *, played_session, cluster, keeper, tmp_path, monkeypatch, capsys
) -> None:
    (tmp_path / "state" / "notify.txt").write_text(f"{keeper}\n")
    job_id = submitted(played_session, tmp_path, f"until [ -e {tmp_path}/go ]; do sleep 0.1; done")

    def end(_: float) -> None:
        (tmp_path / "go").touch()
        cluster.wait_until_ended(job_id)

    replace_clock(monkeypatch, top, sleep=end)
    top.top(TEXT, [job_id])
    assert kept(tmp_path, "completed")[1]["CLUSTERCTL_JOB"] == job_id


def test_message_that_was_not_sent_is_noted_while_the_command_runs(
    *, played_session, cluster, tmp_path, monkeypatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(Screen, "note", lambda _, *lines: notes.extend(lines))
    job_id = submitted(played_session, tmp_path, f"until [ -e {tmp_path}/go ]; do sleep 0.1; done")
    looks = 0

    def look(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            cluster.change(job_id, state="RUNNING", restarts=1)
        elif any(shows(note, "message-not-sent") for note in notes):
            (tmp_path / "go").touch()
            cluster.wait_until_ended(job_id)
        else:
            time.sleep(0.1)
        assert looks < 300

    replace_clock(monkeypatch, top, sleep=look)
    top.top(TEXT, [job_id], notify=["false"])


@pytest.mark.parametrize(
    "call",
    [
        lambda notify: submit.submit(TEXT, "bench", notify=notify),
        lambda notify: logs.logs(TEXT, "1", notify=notify),
    ],
    ids=["submit", "logs"],
)
def test_notify_needs_a_command_that_watches(played_session, call) -> None:
    with refused("option-invalid/option-missing", UsageError, "--notify"):
        call(["cat"])


def test_wrong_receiver_is_refused_before_the_job_is_submitted(played_session, script) -> None:
    with refused("option-invalid/notify", UsageError):
        submit.submit(TEXT, str(script), wait=True, notify=["no-such-program-here"])
    assert played_session.ledger.entries() == ()
