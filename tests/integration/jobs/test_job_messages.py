"""Messages about a job from its first node, to a server on loopback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from clusterctl.jobs.messages import _VERBS
from clusterctl.jobs.prepare import node_messages_notice
from clusterctl.scheduler.request.job_secrets import secrets_folder
from clusterctl.spec.names import NODE_RECEIVERS
from clusterctl.transport.base import remote_argv
from payload.node import messages
from tests.support.messages import condition
from tests.support.played.batch import Batch, rendered, shell_job
from tests.support.received import Service, serving

TOKEN = "tk_Zq8vN3xW7pL2"  # noqa: S105
SECRET = {messages.VARIABLE: SecretStr("unused")}


def url_of(service: Service) -> str:
    return f"http://{service.address}/{TOKEN}"


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as server:
        yield server


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    (tmp_path / "jobs").mkdir()
    return Batch(tmp_path / "jobs")


def run(batch: Batch, addresses: str, body: str, **options: str) -> tuple[int, str, str]:
    """Run a shell script as a job with receivers."""
    argv = remote_argv(
        "clusterctl.scheduler.request.remote_secrets", secrets_folder(str(batch.folder))
    )
    subprocess.run(argv, input=f"{messages.VARIABLE}={addresses}\0".encode(), check=True)
    return batch.run(rendered(shell_job(batch, body, secret=SECRET, **options)))


def verbs(service: Service) -> list[str]:
    """What the messages say that the job did."""
    found = [body.splitlines()[0] for _, _, body in service.received]
    return [
        next(kind for kind, verb in messages.VERBS.items() if f") {verb}" in line) for line in found
    ]


def events(batch: Batch, kind: str) -> list[dict[str, object]]:
    lines = map(json.loads, (batch.folder / "job.events").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


@pytest.mark.parametrize(("status", "end"), [(0, "completed"), (3, "failed")])
def test_start_and_end_are_sent_from_the_node(
    batch: Batch, service: Service, status: int, end: str
) -> None:
    rc, _, err = run(batch, url_of(service), f"exit {status}")
    assert (rc, verbs(service)) == (status, ["start", end])
    assert [event["node"] for event in events(batch, "messages")]
    assert "messages are sent from" in err


def test_json_address_gets_json(batch: Batch, service: Service) -> None:
    run(batch, f"json+{url_of(service)}", "true")
    path, headers, body = service.received[-1]
    assert (path, headers["Content-Type"]) == (f"/{TOKEN}", "application/json")
    assert json.loads(body)["text"] == json.loads(body)["content"]


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:9/{}", "ntfy://{}", "http://[{}", "refused"])
def test_message_that_is_not_sent_harms_nothing_and_is_noted(
    batch: Batch, service: Service, wrong: str
) -> None:
    """Without the address, which may be a token. The other receiver gets it."""
    wrong = wrong.format(TOKEN)
    if wrong == "refused":
        wrong = url_of(service)
        service.status = 403
    rc, out, err = run(batch, f"{wrong} {url_of(service)}", "echo ran")
    assert (rc, out) == (0, "ran\n")
    failed = {(event["receiver"], event["about"]) for event in events(batch, "message-not-sent")}
    assert {(1, "start"), (1, "completed")} <= failed
    assert len(service.received) == (4 if service.status == 403 else 2)
    assert TOKEN not in err
    files = [path for path in batch.folder.parents[1].rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


TOLD = {"event": "signal", "signal": "SIGTERM"}


def test_end_is_sent_although_slurm_signals_all_processes(tmp_path: Path, service: Service) -> None:
    """At a time limit, Slurm sends SIGTERM also to the process that sends the messages."""
    events = tmp_path / "job.events"
    events.write_text(json.dumps({"time": 1, "event": "start", "nodes": ["n1"]}) + "\n[]\n{}\n")
    command = [sys.executable, "-IS", messages.__file__, str(tmp_path), "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.write(f"{url_of(service)}\n".encode())
        process.stdin.flush()
        assert service.has_received.wait(30)
        process.send_signal(signal.SIGTERM)
        with events.open("a") as file:
            file.write(json.dumps({**TOLD, "time": 2, "state": "TIMEOUT"}) + "\n")
            file.write(json.dumps({"time": 3, "event": "end", "status": 143}) + "\n")
            # The job has stopped restarting.
            file.write(json.dumps({"time": 4, "event": "stop"}) + "\n")
    assert verbs(service) == ["start", "cancelled"]
    assert "TIMEOUT" in service.received[-1][2]


def test_words_are_those_of_messages_from_the_users_machine() -> None:
    assert dict(_VERBS) == messages.VERBS
    assert messages.VARIABLE == NODE_RECEIVERS


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"secret": SECRET}, "messages-from-node"),
        ({"secret": SECRET, "array": "1-9"}, "no-messages-from-node"),
        ({"secret": SECRET, "array": "1-9", "pack": True}, "messages-from-node"),
        ({}, None),
    ],
)
def test_submit_notes_whether_the_node_sends(batch: Batch, fields, code: str | None) -> None:
    notice = node_messages_notice(shell_job(batch, "true", **fields))
    assert (condition(notice) if notice is not None else None) == code


def test_hang_and_restart_are_told() -> None:
    """A requeued attempt has no end: its next start is told."""
    start = {"event": "start", "nodes": ["n1", "n2"], "restarts": 1}
    assert [*messages.said_at(start)] == [("restart", "on n1, n2")]
    assert [*messages.said_at({"event": "hang", "summary": "rank 3"})] == [("hang", "rank 3")]
    assert [*messages.said_at({"event": "progress"})] == []
    end = {"event": "end", "status": 1}
    assert [*messages.said_of_end([start, end, {"event": "requeue"}])] == []
    refused = [start, end, {"event": "requeue"}, end]
    assert [*messages.said_of_end(refused)] == [("failed", "exit status 1")]
    limit = {**TOLD, "state": "TIMEOUT"}
    assert [*messages.said_of_end([start, limit, end])] == [("cancelled", "TIMEOUT")]
    resumed = {**TOLD, "state": "RUNNING"}
    assert [*messages.said_of_end([start, resumed, end])] == [("failed", "exit status 1")]
    by_slurm = {**TOLD, "state": "REQUEUED"}
    assert [*messages.said_of_end([start, by_slurm, end])] == []
