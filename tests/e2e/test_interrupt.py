"""Ctrl-C, `kill` and SIGKILL while a cluster comes up: nothing runs on, and `up` goes on from there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.verbs import SCRIPT, Clusterctl

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
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:
            said += line
            if line.rstrip().endswith(f"s] {phase}"):
                break
        # Somewhere within the phase: wherever that is, the outcome is the same.
        assert at_work(clusterctl.home), said
        os.killpg(process.pid, number)
        _, rest = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, said + rest


def at_work(home: Path) -> list[str]:
    """Processes of that home's clusterctl, by their environment or arguments. The nodes have neither."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            argv = (proc / "cmdline").read_bytes()
            environ = (proc / "environ").read_bytes().split(b"\0")
            if os.fsencode(home) in argv or b"CLUSTERCTL_HOME=" + os.fsencode(home) in environ:
                found.append(f"{proc.name}: {argv.replace(bytes(1), b' ').decode(errors='replace')}")
    return found


def eventually_none(home: Path, *, patience_s: float = 20) -> list[str]:
    deadline = time.monotonic() + patience_s
    while (left := at_work(home)) and time.monotonic() < deadline:
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
    assert at_work(clusterctl.home) == []


def test_kill_ends_it_as_cleanly(clusterctl: Clusterctl, spec: Path) -> None:
    code, said = interrupted(clusterctl, "configure", signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
    assert at_work(clusterctl.home) == []


def test_even_a_sudden_death_leaves_nothing_at_work(clusterctl: Clusterctl, spec: Path) -> None:
    code, _ = interrupted(clusterctl, "configure", signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert eventually_none(clusterctl.home) == []


def test_up_goes_on_from_there(clusterctl: Clusterctl, spec: Path) -> None:
    """No lock is held by the dead, and the half-made cluster becomes whole."""
    assert clusterctl("-o", "json", "up").json["ready"]
    assert clusterctl("-o", "json", "status").json["ready"]
