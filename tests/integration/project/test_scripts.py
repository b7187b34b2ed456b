"""The scripts behind `make`, with clusterctl played by an executable that notes how it was
called.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PLAYED = """\
#!/bin/sh
echo "$*" >>"$CALLS"
case " $FAILING " in *" $1 "*) echo "$1 failed" >&2; exit 1;; esac
case $1 in
    up) echo 'provision  12.0 s';;
    collect)
        [ -n "$ACCURACY" ] || exit 0
        mkdir -p runs/demo-1-train && cp "$ACCURACY" runs/demo-1-train/metrics.jsonl;;
esac
"""


@dataclass
class Demo:
    """A checkout with the demo in it, and a stage for it to play on."""

    root: Path

    @property
    def calls(self) -> list[str]:
        return (self.root / "calls").read_text().splitlines()

    def run(
        self, *, failing: str = "", accuracy: float | None = 0.97
    ) -> subprocess.CompletedProcess[str]:
        environ = {"CALLS": str(self.root / "calls"), "FAILING": failing, "ACCURACY": ""}
        if accuracy is not None:
            metrics = self.root / "metrics"
            metrics.write_text(
                "".join(
                    json.dumps(r) + "\n"
                    for r in ({"kind": "step"}, {"kind": "result", "accuracy": accuracy})
                )
            )
            environ["ACCURACY"] = str(metrics)
        argv = [self.root / "scripts" / "demo"]
        return subprocess.run(
            argv,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "clusterctl").write_text(PLAYED)
    (programs / "clusterctl").chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo", tmp_path / "scripts")
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "digits.csv", tmp_path / "examples")
    return Demo(tmp_path)


def test_demo_prints_its_results_at_the_end(demo: Demo) -> None:
    done = demo.run()
    assert done.returncode == 0, done.stderr
    submit = "submit train --nodes 2 --follow"
    predict = "submit predict --run demo-1-train --local -- digits.csv"
    assert demo.calls == ["up", submit, "collect", "down --yes", predict]
    run = demo.root / ".clusterctl" / "demo" / "runs" / "demo-1-train"
    last_part = done.stdout.partition("What clusterctl up said")[2]
    assert all(
        part in last_part
        for part in ("provision  12.0 s", f"run            {run}", "test accuracy  0.9700")
    )
    assert f"$ clusterctl {submit}" in done.stdout


@pytest.mark.parametrize("failing", ["up", "submit", "collect", "down"])
def test_demo_that_fails_at_any_step_removes_the_cluster(demo: Demo, failing: str) -> None:
    done = demo.run(failing=failing)
    assert done.returncode == 1
    assert demo.calls[-1] == ("down --yes --discard" if failing == "down" else "down --yes")


@pytest.mark.parametrize(
    ("accuracy", "why"),
    [(0.9, "the test accuracy is 0.9000, less than 0.95"), (None, "one run was to be collected")],
)
def test_demo_that_learned_nothing_fails(demo: Demo, accuracy: float | None, why: str) -> None:
    done = demo.run(accuracy=accuracy)
    assert done.returncode == 1
    assert why in done.stderr
    assert demo.calls[-1] == "down --yes"


def test_second_demo_reports_its_own_run(demo: Demo) -> None:
    assert demo.run().returncode == 0
    done = demo.run(accuracy=None)
    assert done.returncode == 1, done.stdout


def test_bootstrap_refuses_unknown_arguments() -> None:
    argv = [str(ROOT / "scripts" / "bootstrap"), "--what"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "unknown option: --what" in done.stderr


def bootstrap(root: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a checkout that has only this script."""
    (root / "scripts").mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "scripts" / "bootstrap", root / "scripts")
    return subprocess.run(
        [root / "scripts" / "bootstrap", *argv],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("argv", [(), ("--runtime",), ("--check",)])
def test_bootstrap_refuses_the_environment_of_another_checkout(
    tmp_path: Path, argv: tuple[str, ...]
) -> None:
    """It would install this checkout's program there."""
    other = tmp_path / "other" / ".venv"
    other.mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / ".venv").symlink_to(other)
    done = bootstrap(tmp_path / "here", *argv)
    assert done.returncode == 1
    assert str(other) in done.stderr
    assert list(other.iterdir()) == []


def test_bootstrap_check_makes_no_environment(tmp_path: Path) -> None:
    done = bootstrap(tmp_path, "--check")
    assert done.returncode == 1
    assert "fix: scripts/bootstrap" in done.stderr
    assert not (tmp_path / ".venv").exists()
