"""The program on the controller that takes down an idle cluster."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from clusterctl.util.assets import data_folder
from tests.support.google.api import PROJECT, Google
from tests.unit.gcp.module import labels

PROGRAM = data_folder("ansible") / "roles/auto_down/files/auto_down.py"
ZONE = "us-central1-a"
AFTER_S = 3600
NODES = ("demo-train-1", "demo-train-2")
TOOLS = ("squeue", "sacct", "ss", "wall")


@dataclass
class Controller:
    """The controller: played Slurm and system commands, and the files of the program."""

    google: Google
    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir()
        for tool in TOOLS:
            self.plays(tool, "")
        self.up_for(10 * AFTER_S)
        self.settings = {
            "project": PROJECT,
            "zone": ZONE,
            "cluster": "demo",
            "cluster_id": "aaaaaa",
            "controller": "demo-ctl",
            "hosts": list(NODES),
            "after_s": AFTER_S,
            "state": str(self.folder / "state.json"),
            "log": str(self.folder / "auto-down.log"),
        }
        for name in ("demo-ctl", *NODES):
            self.has(name, labels("demo", "aaaaaa"))
        self.has("other-train-1", labels("other", "bbbbbb"))

    def has(self, name: str, marked: dict[str, str]) -> None:
        """Have an instance, with local SSDs: Google stops it only if told what becomes of their
        data.
        """
        path = f"projects/{PROJECT}/zones/{ZONE}/instances/{name}"
        ssds = [{"interface": "NVME", "size": 375}]
        self.google.world.put(
            "google_compute_instance", path, zone=ZONE, labels=marked, scratch_disk=ssds
        )

    def plays(self, tool: str, prints: str, code: int = 0) -> None:
        """Let a command print this from now on. Its arguments are recorded in a file."""
        path = self.folder / "bin" / tool
        said = f"cat <<'END'\n{prints}\nEND" if prints else ":"
        path.write_text(
            f'#!/bin/sh\necho "$*" >> {self.folder}/{tool}.calls\n{said}\nexit {code}\n'
        )
        path.chmod(0o755)

    def up_for(self, seconds: float) -> None:
        (self.folder / "uptime").write_text(f"{seconds} 0.0\n")

    def last_alive(self, seconds_ago: float, *, warned: bool = False) -> None:
        alive = time.time() - seconds_ago
        state = {"alive": alive, "warned": alive if warned else None}
        Path(self.settings["state"]).write_text(json.dumps(state))

    def ticks(self, *options: str) -> str:
        """Run the program once. Return its output."""
        settings = self.folder / "settings.json"
        settings.write_text(json.dumps(self.settings))
        argv = [str(PROGRAM), str(settings), f"--uptime={self.folder}/uptime", *options]
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
            for name, value in self.google.environment.items():
                patch.setenv(name, value)
            patch.setenv("PATH", f"{self.folder}/bin", prepend=":")
            patch.setattr(sys, "argv", argv)
            with pytest.raises(SystemExit, check=lambda ended: ended.code == 0):
                runpy.run_path(str(PROGRAM), run_name="__main__")
        return said.getvalue()

    @property
    def there(self) -> list[str]:
        return self.google.world.names("google_compute_instance")

    def status(self, name: str) -> str:
        rows = self.google.world.read()["resources"]["google_compute_instance"].values()
        return next(row.get("desired_status", "RUNNING") for row in rows if row["name"] == name)

    def settle(self) -> None:
        """Let what was begun at Google come to its end."""
        for operation in self.google.operations.values():
            operation.effect()


@pytest.fixture
def controller(google: Google, tmp_path: Path) -> Controller:
    return Controller(google, tmp_path)


def idle(controller: Controller, *, warned: bool = True) -> Controller:
    controller.last_alive(2 * AFTER_S, warned=warned)
    return controller


def test_auto_down_of_an_idle_cluster_warns_deletes_nodes_and_stops(controller: Controller) -> None:
    idle(controller, warned=False)
    assert "takes itself down" in controller.ticks()
    assert "takes itself down" in (controller.folder / "wall.calls").read_text()
    controller.ticks()  # at once, as by hand
    assert not controller.google.calls

    controller.last_alive(2 * AFTER_S, warned=True)
    assert controller.ticks().splitlines() == [f"deleting {name}" for name in NODES]
    assert not controller.google.called("compute.instances.stop")
    controller.settle()
    assert controller.there == ["demo-ctl", "other-train-1"]

    assert "stopping demo-ctl" in controller.ticks()
    controller.settle()
    assert controller.there == ["demo-ctl", "other-train-1"]
    assert len(controller.google.called("compute.instances.stop")) == 1
    assert controller.status("demo-ctl") == "TERMINATED"
    assert controller.status("other-train-1") == "RUNNING"
    log = (controller.folder / "auto-down.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in log][1:3] == [f"deleting {name}" for name in NODES]


BUSY: dict[str, Callable[[Controller], Any]] = {
    "a job": lambda c: c.plays("squeue", "12"),
    "somebody is connected": lambda c: c.plays("ss", "0 0 10.80.0.2:22 35.235.240.1:4711"),
    "a job has just ended": lambda c: c.plays("sacct", f"{int(time.time()) - 60}\nUnknown"),
    "it has just been started": lambda c: c.up_for(60),
    "squeue fails": lambda c: c.plays("squeue", "", 1),
    "sacct fails": lambda c: c.plays("sacct", "slurmdbd is away", 1),
    "ss fails": lambda c: c.plays("ss", "", 1),
    "squeue is not there": lambda c: (c.folder / "bin" / "squeue").unlink(),
}


@pytest.mark.parametrize("how", BUSY)
def test_auto_down_keeps_a_busy_cluster(controller: Controller, how: str) -> None:
    idle(controller)
    BUSY[how](controller)
    controller.ticks()
    assert len(controller.there) == 4
    assert not controller.google.calls
    state = json.loads(Path(controller.settings["state"]).read_text())
    assert state["warned"] is None
    assert time.time() - state["alive"] < AFTER_S


def test_auto_down_waits_its_time_in_a_new_cluster(controller: Controller) -> None:
    """Slurm is asked for the jobs of all users, and of hidden partitions."""
    controller.ticks()
    assert not controller.google.calls
    assert "--all" in (controller.folder / "squeue.calls").read_text()
    fields = f"--noheader --parsable2 --format=End --starttime=now-{AFTER_S}seconds"
    assert f"--allusers --allocations {fields}" in (controller.folder / "sacct.calls").read_text()


def test_auto_down_warns_again_after_a_stop(controller: Controller) -> None:
    controller.settings["after_s"] = 60
    controller.up_for(120)
    controller.last_alive(2 * AFTER_S, warned=True)
    assert "takes itself down" in controller.ticks()
    assert not controller.google.calls


def test_auto_down_is_cancelled_by_a_job_after_the_warning(controller: Controller) -> None:
    idle(controller)
    controller.plays("squeue", "13")
    controller.ticks()
    controller.plays("squeue", "")
    controller.ticks()
    assert not controller.google.calls


def test_auto_down_keeps_instances_without_its_labels(controller: Controller) -> None:
    idle(controller)
    controller.has("demo-train-2", labels("demo", "bbbbbb"))
    said = controller.ticks()
    assert "demo-train-2 does not carry" in said
    controller.settle()
    assert controller.there == ["demo-ctl", "demo-train-2", "other-train-1"]


def test_auto_down_does_not_stop_a_controller_without_its_labels(controller: Controller) -> None:
    idle(controller)
    controller.settings |= {"hosts": [], "controller": "other-train-1"}
    assert "not stopped" in controller.ticks()
    assert not controller.google.called("compute.instances.stop")


@pytest.mark.parametrize(("verb", "status"), [("delete", 403), ("delete", 429), ("get", 503)])
def test_auto_down_retries_a_refusal_before_the_controller(
    controller: Controller, verb: str, status: int
) -> None:
    idle(controller)
    controller.settings["hosts"] = ["demo-train-1"]
    controller.google.fail(f"compute.instances.{verb}", status, message="not now")
    said = controller.ticks()
    assert f"{verb.upper()} demo-train-1: {status}" in said
    assert not controller.google.called("compute.instances.stop")
    assert "deleting demo-train-1" in controller.ticks()
    controller.settle()
    assert "stopping demo-ctl" in controller.ticks()


def test_auto_down_retries_a_refused_stop(controller: Controller) -> None:
    idle(controller)
    controller.settings["hosts"] = []
    controller.google.fail("compute.instances.stop", 403, message="not now")
    assert "retrying" in controller.ticks()
    controller.ticks()
    assert len(controller.google.called("compute.instances.stop")) == 2


def test_auto_down_without_a_token_does_nothing(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle(controller)
    nowhere = controller.google.environment | {"GCE_METADATA_HOST": "127.0.0.1:9"}
    monkeypatch.setattr(Google, "environment", nowhere)
    before = Path(controller.settings["state"]).read_text()
    assert "no token" in controller.ticks()
    assert not controller.google.calls
    assert Path(controller.settings["state"]).read_text() == before


def test_auto_down_dry_run_changes_nothing(controller: Controller) -> None:
    idle(controller, warned=False)
    before = Path(controller.settings["state"]).read_text()
    said = controller.ticks("--dry-run")
    assert [line.split(";")[0] for line in said.splitlines()] == [
        *(f"would delete {name}" for name in NODES),
        "would stop demo-ctl",
    ]
    assert {method for method, _ in controller.google.calls} == {"compute.instances.get"}
    assert Path(controller.settings["state"]).read_text() == before
    assert not (controller.folder / "wall.calls").exists()


def test_auto_down_starts_without_installed_packages() -> None:
    subprocess.run([sys.executable, "-IS", PROGRAM, "--help"], check=True, capture_output=True)
