"""The program that reads the folders of running jobs on the cluster."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from clusterctl.jobs.remote_readings import OF_LOGS, OF_TELEMETRY
from clusterctl.transport.base import remote_argv
from tests.support.local_transport import LocalTransport

SAMPLE = b'{"kind": "sample"}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's folder with telemetry of a host, metrics and logs."""
    top = tmp_path / "job"
    for name in ("telemetry", "files"):
        (top / name).mkdir(parents=True)
    (top / "telemetry/n1.jsonl").write_bytes(b'{"kind": "host"}\n' + SAMPLE)
    (top / "files/metrics.jsonl").write_bytes(b'{"step": 1}\n')
    (top / "stdout.log").write_bytes(b"hello\n")
    return top


def gained(top: Path, sent: dict[str, int] | None = None, task: str = "") -> dict[str, Any]:
    """Return file -> (offset, bytes) that the program sends."""
    request = [{"top": str(top), "task": task, "files": "files", "sent": sent or {}}]
    argv = remote_argv("clusterctl.jobs.remote_readings")
    result = LocalTransport().run(argv, stdin=json.dumps(request).encode())
    (answer,) = json.loads(result.stdout)
    return {name: (at, base64.b64decode(data)) for name, (at, data) in answer.items()}


def test_first_read_has_the_beginning_of_telemetry_and_all_files(folder: Path) -> None:
    host = b'{"kind": "host"}\n'
    assert gained(folder) == {
        "host/n1": (0, host),
        "telemetry/n1": (0, host + SAMPLE),
        "metrics": (0, b'{"step": 1}\n'),
        "stdout": (0, b"hello\n"),
    }


def test_later_read_has_only_what_was_added(folder: Path) -> None:
    sent = {name: at + len(data) for name, (at, data) in gained(folder).items()}
    assert gained(folder, sent) == {}
    with (folder / "stdout.log").open("ab") as log:
        log.write(b"more\n")
    assert gained(folder, sent) == {"stdout": (6, b"more\n")}


def test_only_the_end_of_much_output_is_sent(folder: Path) -> None:
    (folder / "stdout.log").write_bytes(b"x" * 100_000 + b"end\n")
    (folder / "telemetry/n1.jsonl").write_bytes(SAMPLE * 10_000)
    answer = gained(folder, {"stdout": 6})
    assert answer["stdout"] == (100_004 - OF_LOGS, b"x" * (OF_LOGS - 4) + b"end\n")
    assert len(answer["telemetry/n1"][1]) == OF_TELEMETRY
    assert answer["host/n1"] == (0, SAMPLE)


def test_file_that_has_become_shorter_is_sent_anew(folder: Path) -> None:
    assert gained(folder, {"stdout": 50})["stdout"] == (0, b"hello\n")


def test_task_of_an_array_has_files_of_its_own(folder: Path) -> None:
    for path in ("task-3/telemetry", "files/task-3"):
        (folder / path).mkdir(parents=True)
    (folder / "task-3/telemetry/n2.jsonl").write_bytes(SAMPLE)
    (folder / "task-3/job.events").write_bytes(b'{"event": "start"}\n')
    (folder / "files/task-3/metrics.jsonl").write_bytes(b'{"step": 7}\n')
    (folder / "stdout-3.log").write_bytes(b"third\n")
    answer = gained(folder, task="3")
    assert {name: data for name, (_, data) in answer.items()} == {
        "host/n2": SAMPLE,
        "telemetry/n2": SAMPLE,
        "events": b'{"event": "start"}\n',
        "metrics": b'{"step": 7}\n',
        "stdout": b"third\n",
    }


def test_links_and_pipes_of_a_job_are_not_read(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(b"secret\n")
    for path in ("telemetry/n2.jsonl", "stderr.log"):
        (folder / path).symlink_to(secret)
    os.mkfifo(folder / "job.events")
    (folder / "files/metrics.jsonl").unlink()
    (folder / "files/metrics.jsonl").mkdir()
    (folder / "telemetry/.hidden.jsonl").write_bytes(SAMPLE)
    assert set(gained(folder)) == {"host/n1", "telemetry/n1", "stdout"}


def test_folder_that_is_gone_has_no_files(tmp_path: Path) -> None:
    assert gained(tmp_path / "nowhere") == {}
