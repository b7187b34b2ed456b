"""The journal of agents."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from clusterctl.agent.journal import Journal
from tests.support.messages import condition, refused


def begin(journal: Journal, node_hours: float | None = 3.0) -> str:
    call = journal.begin("submit", {"target": "train.py"}, project="/p")
    with journal.lock():
        journal.reserve(call, node_hours)
    return call


def test_journal_is_shared_by_two_servers(tmp_path: Path) -> None:
    first, second = Journal(tmp_path), Journal(tmp_path)
    call = begin(first)
    assert (second.calls()[call].node_hours, second.calls()[call].code) == (3.0, "")
    first.end(call, "ok", jobs=["7"], seconds=1.0, free=False)
    seen = second.calls()[call]
    assert (seen.node_hours, condition(seen), [*seen.jobs]) == (3.0, "ok", ["7"])


def test_journal_end_without_effect_frees_the_node_hours(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    call = begin(journal)
    journal.end(call, "option-invalid/value", jobs=[], seconds=0.1, free=True)
    assert journal.calls()[call].node_hours == 0


def test_journal_skips_torn_and_foreign_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first = begin(journal)
    with journal.path.open("a") as file:
        file.write('[]\n{"event": "end", "call": "other"}\n\0\n{"event": "be')
    assert [*journal.calls()] == [first]
    # The torn line takes the next one with it, and no other.
    second, third = begin(journal), begin(journal)
    assert {first, third} <= journal.calls().keys() <= {first, second, third}


def test_journal_that_can_not_be_read_is_an_error_of_the_machine(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.path.mkdir()
    with refused("file-unwritable"):
        journal.calls()


def test_journal_lock_is_one_of_the_operating_system(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with journal.lock(), (tmp_path / "lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_journal_is_private(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new" / "folder")
    begin(journal)
    assert journal.folder.stat().st_mode & 0o777 == 0o700
    assert journal.path.stat().st_mode & 0o777 == 0o600
