"""The state and the locks of a killed Terraform, and the next run."""

from __future__ import annotations

import datetime
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from clusterctl.errors import ProvisionError
from clusterctl.providers.gcp.terraform_program import Program
from clusterctl.providers.gcp.terraform_run import Runner, record_run
from clusterctl.util.progress import SILENT, HostStep, Reporter
from tests.support.messages import refused
from tests.support.sweeps import in_sweep
from tests.support.terraform import MODULE, Work, terraform_in

ME = f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
HELD = "Error acquiring the state lock"
APPLIES = """
import sys
from pathlib import Path
from tests.support.terraform import terraform_in
from clusterctl.util.progress import PhaseLines
terraform = terraform_in(Path(sys.argv[1]), PhaseLines(lambda line: print(line, flush=True), verbose=True))
terraform.apply(terraform.plan())
"""

# It is interrupted by itself.
WINDS_UP = """
import os, signal, sys
from pathlib import Path
from clusterctl.providers.gcp.terraform_run import Runner, record_run
from clusterctl.util.progress import SILENT
with Runner(Path(sys.argv[2]), SILENT).run(["sh", "-c", sys.argv[1]]) as run:
    for _ in run.lines():
        os.kill(os.getpid(), signal.SIGINT)
"""


class StateServer(ThreadingHTTPServer):
    """A remote state, as Terraform's `http` backend wants it, on loopback.

    broken: nothing can be written.
    """

    state = b""
    broken = False

    @property
    def backend(self) -> str:
        """The block of the module that names this server."""
        address = f"http://127.0.0.1:{self.server_port}/"
        return (
            f"terraform {{\n"
            f'  backend "http" {{\n'
            f'    address = "{address}"\n'
            f"    retry_max = 0\n"
            f"  }}\n"
            f"}}\n"
        )


class StateHandler(BaseHTTPRequestHandler):
    server: StateServer

    def do_GET(self) -> None:
        self._answer(200 if self.server.state else 204, self.server.state)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.server.broken:
            self.server.state = body
        self._answer(500 if self.server.broken else 200)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def server() -> Iterator[StateServer]:
    with StateServer(("127.0.0.1", 0), StateHandler) as serves:
        threading.Thread(target=serves.serve_forever, daemon=True).start()
        yield serves
        serves.shutdown()


@pytest.fixture
def remote(chosen: Program, server: StateServer, tmp_path: Path) -> Work:
    """A folder whose state is on the state server."""
    made = Work(tmp_path / "terraform", chosen, MODULE + server.backend)
    made.hosts(one="small")
    made.terraform.init()
    return made


def test_truncated_state_is_replaced_by_its_backup(work: Work) -> None:
    work.terraform.apply(work.terraform.plan())
    work.hosts(one="small", two="small", three="small", four="small")
    work.terraform.apply(work.terraform.plan())
    (work.folder / "terraform.tfstate").write_bytes(b"")
    plan = work.terraform.plan()
    assert [change.key for change in plan.real_changes] == ["four"]
    assert any("truncated" in line for line in work.said)
    assert len(list(work.folder.glob("terraform.tfstate.torn-*"))) == 1


def test_truncated_state_without_backup_is_set_aside(work: Work) -> None:
    work.terraform.apply(work.terraform.plan())
    path = work.folder / "terraform.tfstate"
    path.write_bytes(path.read_bytes()[:4096])
    (work.folder / "errored.tfstate").touch()  # the disk had no room for that either
    work.terraform.init()
    assert len(work.terraform.plan().real_changes) == 3
    (torn,) = work.folder.glob("terraform.tfstate.torn-*")
    assert torn.stat().st_size == 4096
    assert not (work.folder / "errored.tfstate").exists()


def test_missing_state_is_not_truncated(work: Work) -> None:
    assert len(work.terraform.plan().real_changes) == 3
    assert not any("truncated" in line for line in work.said)


def test_errored_state_is_written_by_the_next_run(remote: Work, server: StateServer) -> None:
    plan = remote.terraform.plan()
    server.broken = True
    with pytest.raises(ProvisionError):
        remote.terraform.apply(plan)
    assert (remote.folder / "errored.tfstate").is_file()
    server.broken = False
    remote.terraform.init()
    assert not (remote.folder / "errored.tfstate").exists()
    assert remote.terraform.plan().is_empty


# As the backend for buckets says it; `force-unlock` releases the lock.
PLAYED = """#!/bin/sh
case $1 in
plan)
    test -e unlocked && { touch plan.tfplan; exit 0; }
    cat lock.json
    exit 1 ;;
show) echo '{}' ;;
force-unlock) echo "$*" >unlocked ;;
esac
"""


@dataclass
class Bucket:
    """A folder with a played Terraform, which finds the state locked by ``who`` since ``ago_s``
    seconds.
    """

    folder: Path

    def plan(self, who: str, *, ago_s: float) -> None:
        created = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago_s)
        detail = (
            'Error message: writing "gs://b/clusterctl/default.tflock" failed: googleapi: Error 412: At '
            "least one of the pre-conditions you specified did not hold., conditionNotMet\nLock Info:\n"
            "  ID:        1763659988224063\n  Path:      gs://b/clusterctl/default.tflock\n"
            f"  Operation: OperationTypeApply\n  Who:       {who}\n  Version:   1.11.4\n"
            f"  Created:   {created:%Y-%m-%d %H:%M:%S.%f}123 +0000 UTC\n  Info:      \n"
        )
        said = {"severity": "error", "summary": HELD, "detail": detail}
        (self.folder / "lock.json").write_text(
            json.dumps({"type": "diagnostic", "diagnostic": said}) + "\n"
        )
        (self.folder / "terraform").write_text(PLAYED)
        (self.folder / "terraform").chmod(0o755)
        terraform_in(self.folder, chosen=Program(self.folder / "terraform", "1.11.4")).plan()

    def died(self, *ago_s: float) -> None:
        """Record runs of clusterctl that began this long ago and were killed."""
        (self.folder / ".clusterctl.runs").write_text(
            json.dumps([time.time() - ago for ago in ago_s])
        )

    @property
    def unlocked(self) -> str:
        path = self.folder / "unlocked"
        return path.read_text() if path.is_file() else ""


def test_state_lock_of_a_killed_run_is_released(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    bucket.died(3600, 60)
    bucket.plan(ME, ago_s=50)
    assert bucket.unlocked == "force-unlock -force 1763659988224063\n"


@pytest.mark.parametrize(
    ("died", "who", "ago_s"),
    [(60, ME, 70), (60, "somebody@elsewhere", 50), (60, ME, -5), (3600, ME, 50)],
    ids=[
        "older than our run",
        "another's",
        "younger than the run that it is in the way of",
        "long after it",
    ],
)
def test_state_lock_of_another_run_is_kept(
    tmp_path: Path, died: float, who: str, ago_s: float
) -> None:
    """The user may run Terraform in the same account."""
    bucket = Bucket(tmp_path)
    bucket.died(died)
    with refused("plan", ProvisionError, HELD):
        bucket.plan(who, ago_s=ago_s)
    assert not bucket.unlocked


def test_run_that_gets_the_lock_forgets_killed_runs(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    bucket.died(60)
    (tmp_path / "unlocked").touch()
    bucket.plan(ME, ago_s=50)
    (tmp_path / "unlocked").unlink()
    with refused("plan", ProvisionError, HELD):
        bucket.plan(ME, ago_s=50)


def test_finished_run_is_not_recorded_as_killed(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    with pytest.raises(ZeroDivisionError), record_run(tmp_path):
        _ = 1 / 0
    with pytest.raises(ProvisionError):
        bucket.plan(ME, ago_s=0.001)


# Killed: test_gcp_faults.py.
@pytest.mark.parametrize("sign", [signal.SIGINT, *in_sweep(signal.SIGKILL)])
def test_killed_or_interrupted_terraform_writes_its_state_first(
    work: Work, sign: signal.Signals
) -> None:
    # Five wait for the first thirty.
    work.hosts(seconds=1, **{f"host{n}": "small" for n in range(35)})
    argv = [sys.executable, "-c", APPLIES, str(work.folder)]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(": created" in line for line in process.stdout)
        process.stdout.close()  # as of a `| head` that ended
        process.send_signal(sign)
    assert len(work.existing()) >= 1  # once it has ended
    assert sign == signal.SIGKILL or not list(work.folder.glob("*.torn-*"))
    assert work.terraform.plan(destroy=True).real_changes


# It takes until it is let, a minute at most.
WRITES_ITS_STATE = """
write() {
    touch interrupted
    for _ in $(seq 600); do [ -e go ] && break; sleep 0.1; done
    touch state
    exit
}
trap write INT
echo at work
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (BrokenPipeError(), KeyboardInterrupt(), True),  # up | head
        # A shell whose window is closed sends SIGHUP twice.
        (
            SystemExit(129),
            SystemExit(129),
            True,
        ),
        (KeyboardInterrupt(), KeyboardInterrupt(), False),
    ],
)
def test_second_ctrl_c_ends_terraform_before_its_state_is_written(
    tmp_path: Path, first: BaseException, second: BaseException, kept: bool
) -> None:
    seconds = [second]

    class Impatient(Reporter):
        def progress(self, _: str | HostStep) -> None:
            while not (tmp_path / "interrupted").exists():
                time.sleep(0.05)
            if seconds:
                raise seconds.pop()
            (tmp_path / "go").touch()

    def broken_off() -> None:
        with Runner(tmp_path, Impatient()).run(["sh", "-c", WRITES_ITS_STATE]) as run:
            next(run.lines())
            raise first

    with pytest.raises(type(first)):
        broken_off()
    assert (tmp_path / "state").exists() is kept


def test_sigkill_while_terraform_writes_its_state_keeps_the_state(tmp_path: Path) -> None:
    """The kernel tells the reaper, which was told to end before and took that for a second
    signal.
    """
    with subprocess.Popen([sys.executable, "-c", WINDS_UP, WRITES_ITS_STATE, tmp_path]) as process:
        while not (tmp_path / "interrupted").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    time.sleep(0.5)  # for the kernel's word to arrive
    (tmp_path / "go").touch()
    with Runner(tmp_path, SILENT).run(["true"]):
        pass  # waits for it
    assert (tmp_path / "state").exists()
