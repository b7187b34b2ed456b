"""Ctrl-C, `kill` and SIGKILL while a cluster comes up: nothing runs on, and `up` goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.residue import Machine, look_as_root
from tests.support.verbs import SCRIPT, Clusterctl

pytestmark = pytest.mark.e2e

SPEC = "version: 1\nname: {name}\nprovider: {{type: local}}\npartitions:\n  - {{name: train, nodes: 2}}\n"


@pytest.fixture(scope="module")
def spec(clusterctl: Clusterctl, cluster_name: str) -> Iterator[Path]:
    """A spec whose cluster is down in the end."""
    path = clusterctl.cwd / "cluster.yaml"
    path.write_text(SPEC.format(name=cluster_name))
    yield path
    clusterctl("-f", path, "down", "--yes", "--discard-runs", rc=None)


def interrupted(clusterctl: Clusterctl, phase: str, number: signal.Signals) -> tuple[int, str]:
    """Start `up`, signal it once it has said that phase, and return its exit code and stderr."""
    # A test run in the background of a shell has Ctrl-C ignored, and would hand that on.
    env = Clusterctl(clusterctl.home, clusterctl.cwd, clusterctl.environ, Path("/usr/bin/env"))
    process = env.start("--default-signal=INT", SCRIPT, "up")
    said = ""
    assert process.stderr is not None
    for line in process.stderr:
        said += line
        if line.rstrip().endswith(f"s] {phase}"):
            break
    assert process.poll() is None, said
    # Somewhere within the phase: wherever that is, the outcome is the same.
    assert running_on(clusterctl.home), "we would not see what is left at work"
    os.killpg(process.pid, number)
    try:
        _, rest = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, said + rest


def running_on(home: Path) -> list[str]:
    """Processes of that home's clusterctl that are not the nodes themselves."""
    found = (line for line in look_as_root(Machine(home)) if line.startswith("process "))
    told = [line for line in found if f"{home}" in line and "systemd-nspawn" not in line]
    return [line for line in told if " (in /" not in line]


def eventually_none(home: Path, *, patience_s: float = 20) -> list[str]:
    deadline = time.monotonic() + patience_s
    while (left := running_on(home)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


@pytest.mark.parametrize("phase", ["provision", "reach", "configure", "verify"])
def test_ctrl_c_ends_up_cleanly(clusterctl: Clusterctl, spec: Path, phase: str) -> None:
    code, said = interrupted(clusterctl, phase, signal.SIGINT)
    assert code == 130, said
    assert "interrupted" in said
    assert "`clusterctl up` goes on from here" in said
    assert "Traceback" not in said
    assert "error" not in said
    assert running_on(clusterctl.home) == []


def test_kill_ends_it_as_cleanly(clusterctl: Clusterctl, spec: Path) -> None:
    code, said = interrupted(clusterctl, "configure", signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
    assert running_on(clusterctl.home) == []


def test_even_a_sudden_death_leaves_nothing_at_work(clusterctl: Clusterctl, spec: Path) -> None:
    code, _ = interrupted(clusterctl, "configure", signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert eventually_none(clusterctl.home) == []


def test_up_goes_on_from_there(clusterctl: Clusterctl, spec: Path) -> None:
    """No lock is held by the dead, and the half-made cluster becomes whole."""
    assert clusterctl("-o", "json", "up").json["ready"]
    assert clusterctl("-o", "json", "status").json["ready"]
