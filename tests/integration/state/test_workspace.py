"""Keys and locks of the state folder, with ssh-keygen and a second process."""

from __future__ import annotations

import os
import re
import subprocess

from clusterctl.errors import LockedError
from clusterctl.state.workspace import Workspace
from tests.support.messages import refused
from tests.support.processes import holding_lock
from tests.unit.state.test_workspace import workspace_fixture  # noqa: F401


def test_create_secrets_twice_keeps_keys_and_id(workspace: Workspace) -> None:
    workspace.create()
    workspace.create_secrets()
    before = workspace.key.read_bytes(), workspace.munge_key.read_bytes(), workspace.cluster_id()
    workspace.create_secrets()
    assert (
        workspace.key.read_bytes(),
        workspace.munge_key.read_bytes(),
        workspace.cluster_id(),
    ) == before
    shown = subprocess.run(
        ["ssh-keygen", "-y", "-f", workspace.key], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split()[:2] == workspace.public_key.read_text().split()[:2]


def silent(_: str) -> None:
    return None


def test_lock_held_by_another_process_is_an_error_that_names_it(workspace: Workspace) -> None:
    with holding_lock(workspace.root) as process:
        with (
            refused("in-use/cluster", LockedError) as caught,
            workspace.lock("down", wait_s=0, waiting=silent),
        ):
            pass
        assert re.match(
            rf"'clusterctl up' of \S+ \(pid {process.pid}\) has been running since ",
            caught.value.why,
        )
        assert str(workspace.lock_holder()) == caught.value.why


def test_lock_with_wait_names_the_holder_and_what_is_locked_once(workspace: Workspace) -> None:
    notes: list[str] = []
    with holding_lock(workspace.root) as process:

        def end_it(text: str) -> None:
            notes.append(text)
            process.communicate("")

        with workspace.lock("down", wait_s=60, waiting=end_it):
            worker = workspace.lock_holder()
            assert worker is not None
            assert (worker.verb, worker.pid) == ("down", os.getpid())
    locked, free = notes
    assert f" (pid {process.pid}) " in locked
    assert all(repr(workspace.root.name) in note for note in (locked, free))
    assert workspace.lock_holder() is None


def test_lock_file_of_a_killed_process_is_ignored(workspace: Workspace) -> None:
    with holding_lock(workspace.root) as process:
        process.kill()
        process.wait()
        assert workspace.lock_holder() is None
        with workspace.lock("down", wait_s=0, waiting=silent):
            pass
    # Nor does a pid that lives again, or a file that says nothing, make a worker.
    for text in (f'{{"verb": "up", "pid": {os.getpid()}, "since": 0}}', "", "{", "[]"):
        workspace.lock_file.write_text(text)
        assert workspace.lock_holder() is None
        with workspace.lock("down", wait_s=0, waiting=silent):
            pass
