"""Messages about a job from its first node, to a server on loopback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from pydantic import SecretStr

from clusterctl.jobs.messages import _VERBS
from clusterctl.jobs.prepare import node_messages_notice
from clusterctl.scheduler.job_secrets import secrets_folder
from clusterctl.spec.names import NODE_RECEIVERS
from clusterctl.transport.base import remote_argv
from payload.node import messages
from tests.support.played.batch import Batch, rendered, shell_job

TOKEN = "tk_Zq8vN3xW7pL2"  # noqa: S105
SECRET = {messages.VARIABLE: SecretStr("unused")}


class Service(ThreadingHTTPServer):
    """Keeps what it is sent: (path, kind of content, body)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[tuple[str, str, str]] = []
        self.has_received = Event()
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{TOKEN}"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.received.append((self.path, self.headers["Content-Type"], body))
        self.server.has_received.set()
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    (tmp_path / "jobs").mkdir()
    return Batch(tmp_path / "jobs")


def run(batch: Batch, addresses: str, body: str, **options: str) -> tuple[int, str, str]:
    """Run a shell script as a job with receivers."""
    argv = remote_argv("clusterctl.scheduler.remote_secrets", secrets_folder(str(batch.folder)))
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
    rc, _, err = run(batch, service.url, f"exit {status}")
    assert (rc, verbs(service)) == (status, ["start", end])
    assert [event["node"] for event in events(batch, "messages")]
    assert "messages are sent from" in err


def test_json_address_gets_json(batch: Batch, service: Service) -> None:
    run(batch, f"json+{service.url}", "true")
    path, kind, body = service.received[-1]
    assert (path, kind) == (f"/{TOKEN}", "application/json")
    assert json.loads(body)["text"] == json.loads(body)["content"]


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:9/{}", "ntfy://{}", "http://[{}", "refused"])
def test_message_that_is_not_sent_harms_nothing_and_is_noted(
    batch: Batch, service: Service, wrong: str
) -> None:
    """Without the address, which may be a token. The other receiver gets it."""
    wrong = wrong.format(TOKEN)
    if wrong == "refused":
        wrong = service.url
        service.status = 403
    rc, out, err = run(batch, f"{wrong} {service.url}", "echo ran")
    assert (rc, out) == (0, "ran\n")
    failed = {(event["receiver"], event["about"]) for event in events(batch, "message-not-sent")}
    assert {(1, "start"), (1, "completed")} <= failed
    assert len(service.received) == (4 if service.status == 403 else 2)
    assert TOKEN not in err
    files = [path for path in batch.folder.parents[1].rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_end_is_sent_although_slurm_signals_all_processes(tmp_path: Path, service: Service) -> None:
    """At a time limit, Slurm sends SIGTERM also to the process that sends the messages."""
    events = tmp_path / "job.events"
    events.write_text(json.dumps({"time": 1, "event": "start", "nodes": ["n1"]}) + "\n[]\n{}\n")
    command = [sys.executable, "-IS", messages.__file__, str(tmp_path), "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.write(f"{service.url}\n".encode())
        process.stdin.flush()
        assert service.has_received.wait(30)
        process.send_signal(signal.SIGTERM)
        with events.open("a") as file:
            file.write(json.dumps({"time": 2, "event": "signal", "state": "TIMEOUT"}) + "\n")
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
    assert (notice.code if notice is not None else None) == code


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
    limit = {"event": "signal", "state": "TIMEOUT"}
    assert [*messages.said_of_end([start, limit, end])] == [("cancelled", "TIMEOUT")]
    resumed = {"event": "signal", "state": "RUNNING"}
    assert [*messages.said_of_end([start, resumed, end])] == [("failed", "exit status 1")]
