"""What killed test runs left is told from what others have on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.conditions import without_autogroup
from tests.support.processes import ends_within_a_minute
from tests.support.remains import RUN, is_over, marked, orphaned, remove_clusters

ROOT = Path(__file__).resolve().parents[3]
STARTS = """
import subprocess
from tests.support.remains import begin
begin()
print(subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, start_new_session=True).pid, flush=True)
input()
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """The temporary folder of a run that has ended; tmp_path is in that of this one."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "pytest-of-somebody" / "pytest-3"
        (base / "popen-gw0" / "home0" / "mine").mkdir(parents=True)
        yield base


def test_a_run_lasts_as_long_as_its_pytest(base: Path, tmp_path: Path) -> None:
    workspace = str(base / "popen-gw0" / "home0" / "mine")
    lock = base / ".lock"
    assert is_over(workspace)
    argv = ["sh", "-c", "echo; read word", "pytest"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as playing:
        assert playing.stdout
        assert playing.stdout.readline()  # the kernel shows its arguments by then
        lock.write_text(str(playing.pid))
        assert not is_over(workspace)
        assert playing.stdin
        playing.stdin.close()
    assert is_over(workspace)
    lock.write_text("")
    # It is about to be written.
    assert not is_over(workspace)


def test_other_workspaces_are_no_run_s(tmp_path: Path) -> None:
    assert not is_over("/root/.local/state/clusterctl/mine")
    assert not is_over("/tmp/pytest/pytest-3/home/mine")
    assert not is_over("/home/somebody/ctltest-1-1-x/mine")
    assert not is_over(str(tmp_path / "mine")), "this run's own"


def test_only_clusters_of_ended_runs_are_removed(base: Path, tmp_path: Path) -> None:
    def state(cluster_id: str, workspace: Path, owner: int) -> dict[str, Any]:
        return {"id": cluster_id, "name": "x", "workspace": str(workspace), "owner": owner}

    ours = os.getuid()
    states = [
        state("aaaaaa", base / "home" / "x", ours),
        state("bbbbbb", Path(tempfile.gettempdir(), "home of ctltest-1-1-x", "y"), 1234),
        state("eeeeee", Path(tempfile.gettempdir(), f"{marked('reader-')}abc", "y"), 1234),
        state("cccccc", tmp_path / "home" / "x", ours),
        state("dddddd", Path.home() / ".local/state/clusterctl/x", ours),
    ]
    down = []

    def call(verb: str, request: dict[str, Any], **_: object) -> dict[str, Any]:
        if verb == "down":
            down.append(request["id"])
        return {"clusters": states}

    assert [line.split()[3] for line in remove_clusters(call)] == ["(aaaaaa)", "(bbbbbb)"]
    assert down == ["aaaaaa", "bbbbbb"]


def test_processes_are_a_run_s_as_long_as_its_first_one_lives() -> None:
    environ = {name: value for name, value in os.environ.items() if name != RUN}
    argv = [sys.executable, "-c", STARTS]
    with subprocess.Popen(
        argv, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout
        started = int(run.stdout.readline())
        assert started not in set(orphaned())
        run.kill()
        run.wait()
    assert started in set(orphaned())
    os.kill(started, 9)
    assert ends_within_a_minute(started)


ROOT = Path(__file__).resolve().parents[3]
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support.conditions import without_autogroup
with without_autogroup(*map(Path, sys.argv[1:])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def setting(tmp_path: Path) -> Path:
    (setting := tmp_path / "sched_autogroup_enabled").write_text("1\n")
    return setting


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "record"


def test_the_next_run_puts_back_what_a_killed_one_left(setting: Path, record: Path) -> None:
    argv = [sys.executable, "-c", KILLED, str(setting), str(record)]
    assert subprocess.run(argv, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert setting.read_text() == "0"
    with without_autogroup(setting, record):
        assert setting.read_text() == "0"
    assert setting.read_text() == "1"


def test_the_last_of_several_runs_puts_it_back(setting: Path, record: Path) -> None:
    with without_autogroup(setting, record):
        with without_autogroup(setting, record):
            pass
        assert setting.read_text() == "0"
    assert setting.read_text() == "1"


def test_a_kernel_without_autogroups_is_left_alone(tmp_path: Path, record: Path) -> None:
    with without_autogroup(tmp_path / "none", record):
        pass
    assert not list(tmp_path.iterdir())
