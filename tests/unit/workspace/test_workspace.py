"""The state folder: private, locked, written whole or not at all."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.errors import LockedError, MachineError
from clusterctl.journal import Journal
from clusterctl.workspace import Workspace, write_atomic

HOLD = """
import sys
from pathlib import Path
from clusterctl.workspace import Workspace
with Workspace(Path(sys.argv[1])).lock("up"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "demo")


def test_folders_and_files_are_for_this_user_only(workspace: Workspace) -> None:
    workspace.create()
    workspace.create_secrets()
    workspace.cluster_id()
    for path in [workspace.root, *workspace.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_secrets_and_id_are_drawn_once(workspace: Workspace) -> None:
    workspace.create()
    workspace.create_secrets()
    before = workspace.key.read_bytes(), workspace.munge_key.read_bytes(), workspace.cluster_id()
    workspace.create_secrets()
    assert (workspace.key.read_bytes(), workspace.munge_key.read_bytes(), workspace.cluster_id()) == before
    shown = subprocess.run(
        ["ssh-keygen", "-y", "-f", workspace.key], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split()[:2] == workspace.public_key.read_text().split()[:2]


def test_a_second_clusterctl_is_told_who_holds_the_lock(workspace: Workspace) -> None:
    workspace.create()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(workspace.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match="is being worked on") as caught, workspace.lock("down"):
        pass
    assert f"pid {holder.pid}" in caught.value.why
    assert "`clusterctl up`" in caught.value.why
    holder.kill()
    holder.communicate()
    with workspace.lock("down"):  # the kernel dropped the dead one's lock
        pass


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    with pytest.raises(TypeError):
        write_atomic(path, 7)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208 - hidden ones too


def test_a_state_folder_that_became_unwritable_is_one_clear_error(workspace: Workspace) -> None:
    workspace.create()
    full = f"mount -t tmpfs -o ro none {workspace.root} && exec {sys.executable} -c "
    script = (
        "from pathlib import Path; from clusterctl.errors import MachineError; "
        f"from clusterctl.workspace import Workspace\ntry: Workspace(Path('{workspace.root}')).create()\n"
        "except MachineError as exc: print(exc)"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{full}"$1"', "sh", script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the state folder can't be written" in done.stdout
    assert "CLUSTERCTL_HOME" in done.stdout


def test_a_state_folder_below_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="can't be written"):
        Workspace(tmp_path / "file" / "demo").create()


def test_the_journal_times_phases_and_survives_a_torn_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    with journal.phase("up", "reach", inputs="abc") as step:
        step.note = "3 hosts"
    with pytest.raises(ZeroDivisionError), journal.phase("up", "configure"):
        _ = 1 / 0
    with journal.path.open("a") as file:
        file.write('{"verb": "up", "pha')
    first, second = journal.entries()
    assert (first.phase, first.inputs, first.ok, first.note) == ("reach", "abc", True, "3 hosts")
    assert (second.phase, second.ok) == ("configure", False)
    assert step.seconds == first.seconds >= 0
