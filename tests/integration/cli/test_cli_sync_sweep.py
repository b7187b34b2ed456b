"""`collect --sync` with the real wandb, mlflow and trackio from the package index: jobs record offline,
and receivers on this machine get it.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request
from urllib.request import urlopen as get

import pytest

from clusterctl.cli import collect as verb
from clusterctl.cli.output import Screen
from clusterctl.errors import CollectError
from tests.support.played.cluster import submitted

# ruff: noqa: S310 - addresses of loopback
pytestmark = [pytest.mark.sweep, pytest.mark.timeout(900)]

JSON = Screen(json=True, color=False)
WANDB = """\
import wandb
run = wandb.init(project="digits", name="first", mode="offline", config={"lr": 0.1})
for step in range(20):
    run.log({"loss": 1 / (step + 1)})
run.finish()
"""
# More values than a call of MLflow takes.
MLFLOW = """\
import mlflow
if {files}:
    mlflow.set_tracking_uri("file:mlruns")
mlflow.set_experiment("digits")
with mlflow.start_run(run_name="first"):
    mlflow.log_param("lr", 0.1)
    for start in (0, 700):
        steps = range(start, start + 700)
        values = [mlflow.entities.Metric("loss", 1 / (step + 1), step, step) for step in steps]
        mlflow.MlflowClient().log_batch(mlflow.active_run().info.run_id, metrics=values)
    mlflow.log_text("hello", "notes/a.txt")
"""
TRACKIO = """\
import trackio
trackio.init(project="digits", name="first", config={"lr": 0.1})
for step in range(20):
    trackio.log({"loss": 1 / (step + 1)})
trackio.finish()
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs of the real tools."""
    if given := os.environ.get("TRACKERS_BIN"):
        return Path(given)
    venv = tmp_path_factory.mktemp("trackers")
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    install = [venv / "bin" / "python", "-m", "pip", "install", "-q", "wandb", "mlflow", "trackio"]
    subprocess.run(install, check=True)
    return venv / "bin"


@pytest.fixture(autouse=True)
def user(tools: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who has the tools and no keys."""
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    (tmp_path / "me").mkdir()


def recorded(session: Any, cluster: Any, folder: Path, tools: Path, program: str) -> str:
    """The id of a job that has run a program in Python with the tools."""
    own = folder / "program"
    own.mkdir()
    (own / "program.py").write_text(program)
    settings = "TRACKIO_DIR=$PWD/trackio MLFLOW_ALLOW_FILE_STORE=true"
    job = submitted(session, own, f"{settings} {tools}/python program.py")
    # The first import of MLflow takes up to a minute.
    for _ in range(6):
        with suppress(AssertionError):
            cluster.wait_until_ended(job)
    assert cluster.job(job)["state"] == "COMPLETED"
    return job


def synced(capsys: Any, job: str, tool: str) -> list[str]:
    """The states of what was synced."""
    capsys.readouterr()
    verb.collect(JSON, [job], sync=[tool])
    return [each["state"] for each in json.loads(capsys.readouterr().out)["synced"]]


class WandbServer(ThreadingHTTPServer):
    """What `wandb sync` of 0.31 asks of W&B for a run with a history, and no more."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuses = False
        self.runs: list[str] = []
        self.history: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def graphql(self, query: str, values: dict[str, Any]) -> dict[str, Any]:
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/put"} for name in values["files"]]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        if "upsertBucket" not in query:
            return {}
        self.runs.append(values["name"])
        entity = {"id": "e", "name": "me"}
        project = {"id": "p", "name": values["project"], "entity": entity}
        bucket = {"id": "x", "name": values["name"], "displayName": "first", "project": project}
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_packed = self.headers.get("Content-Encoding") == "gzip"
        request = json.loads(gzip.decompress(body) if is_packed else body)
        if self.server.refuses:
            self._answer({"errors": [{"message": "permission denied"}]}, status=403)
        elif self.path == "/graphql":
            data = self.server.graphql(request["query"], request["variables"])
            self._answer({"data": data})
        else:
            history = request.get("files", {}).get("wandb-history.jsonl", {})
            self.server.history += history.get("content", [])
            self._answer({})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer({})

    def do_GET(self) -> None:
        self._answer({})

    def _answer(self, answer: Any, status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def test_wandb_sends_an_offline_run_once(
    *, played_session, cluster, tools, tmp_path, monkeypatch, capsys
) -> None:
    """First without a key, then refused by the server (the real program then exits with 0)."""
    job = recorded(played_session, cluster, tmp_path, tools, WANDB)
    with WandbServer() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with pytest.raises(CollectError) as caught:
            synced(capsys, job, "wandb")
        assert "wandb login" in caught.value.failures[0].cause
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        server.refuses = True
        with pytest.raises(CollectError) as caught:
            synced(capsys, job, "wandb")
        assert "permission denied" in caught.value.failures[0].cause
        server.refuses = False
        assert synced(capsys, job, "wandb") == ["sent"]
        sent = (len(server.runs), len(server.history))
        assert sent[1] == 20
        assert synced(capsys, job, "wandb") == ["before"]
        assert (len(server.runs), len(server.history)) == sent
        server.shutdown()


@pytest.fixture
def mlflow_server(tools: Path, tmp_path: Path) -> Iterator[str]:
    """The address of the real server."""
    # An address of this process's own, on which no other test takes the port meanwhile.
    host = socket.inet_ntoa((127 << 24 | os.getpid()).to_bytes(4, "big"))
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/s.db"]
    artifacts = ["--artifacts-destination", str(tmp_path / "artifacts")]
    options = ["--host", host, "--port", str(port), "--workers", "1"]
    command = [tools / "mlflow", "server", *options, *store, *artifacts]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        url = f"http://{host}:{port}"
        for _ in range(600):
            try:
                with get(f"{url}/health"):
                    break
            except OSError:
                time.sleep(0.1)
        yield url
        os.killpg(process.pid, signal.SIGKILL)


def mlflow_runs(url: str) -> list[dict[str, Any]]:
    body = json.dumps({"experiment_ids": ["1"]}).encode()
    call = Request(f"{url}/api/2.0/mlflow/runs/search", body, {"Content-Type": "application/json"})
    with get(call) as answer:
        return list(json.load(answer).get("runs", []))


@pytest.mark.parametrize("files", [False, True], ids=["database", "files"])
def test_mlflow_copies_runs_with_their_artifacts_once(
    *, files, played_session, cluster, tools, tmp_path, monkeypatch, capsys, mlflow_server
) -> None:
    """Also if the list of what was sent is lost."""
    program = MLFLOW.replace("{files}", str(files))
    job = recorded(played_session, cluster, tmp_path, tools, program)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with pytest.raises(CollectError):
        synced(capsys, job, "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    assert synced(capsys, job, "mlflow") == ["sent"]
    (run,) = mlflow_runs(mlflow_server)
    assert run["info"]["status"] == "FINISHED"
    assert run["data"]["params"] == [{"key": "lr", "value": "0.1"}]
    (metric,) = run["data"]["metrics"]
    assert metric["step"] == 1399
    query = f"run_id={run['info']['run_id']}&metric_key=loss&max_results=5000"
    with get(f"{mlflow_server}/api/2.0/mlflow/metrics/get-history?{query}") as answer:
        assert len(json.load(answer)["metrics"]) == 1400
    (artifact,) = (tmp_path / "artifacts").rglob("a.txt")
    assert artifact.read_text() == "hello"
    assert synced(capsys, job, "mlflow") == ["before"]
    (lost,) = (tmp_path / "cwd" / "runs").glob("*/synced.json")
    lost.unlink()
    assert synced(capsys, job, "mlflow") == ["sent"]
    assert len(mlflow_runs(mlflow_server)) == 1


def test_trackio_says_that_a_token_is_missing(
    *, played_session, cluster, tools, tmp_path, monkeypatch, capsys
) -> None:
    """The real program gets no further without Hugging Face. It has not changed the run."""
    job = recorded(played_session, cluster, tmp_path, tools, TRACKIO)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CollectError) as caught:
        synced(capsys, job, "trackio")
    assert "hf auth login" in caught.value.failures[0].cause
    (run,) = (tmp_path / "cwd" / "runs").iterdir()
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=run, check=True)
