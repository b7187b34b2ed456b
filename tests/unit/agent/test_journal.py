"""The journal of agents."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from clusterctl.agent.journal import CallBound, Journal
from tests.support.messages import refused

BOUND = CallBound(2, 3.0, 0.0)


def _begin(journal: Journal, verb: str = "submit", bound: CallBound = BOUND) -> str:
    return journal.begin(verb, {"job": "train.py"}, project="/p", cluster="demo", bound=bound)


def test_journal_is_shared_by_two_servers(tmp_path: Path) -> None:
    first, second = Journal(tmp_path), Journal(tmp_path)
    with first.lock():
        call = _begin(first)
    with second.lock() as history:
        assert history.calls[call].bound == BOUND
        assert history.calls[call].code == ""
    first.end(call, "ok", jobs=["7"], seconds=1.0, free=False)
    seen = second.read().calls[call]
    assert (seen.code, [*seen.jobs]) == ("ok", ["7"])


def test_journal_keeps_the_bound_of_a_call_without_end(tmp_path: Path) -> None:
    """The server was killed: the call may have been carried out."""
    journal = Journal(tmp_path)
    with journal.lock():
        call = _begin(journal)
    assert Journal(tmp_path).read().calls[call].bound == BOUND


def test_journal_end_without_effect_frees_the_bound(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with journal.lock():
        call = _begin(journal)
    journal.end(call, "bad-value", jobs=[], seconds=0.1, free=True)
    assert Journal(tmp_path).read().calls[call].bound == CallBound()


def test_journal_skips_torn_and_foreign_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with journal.lock():
        first = _begin(journal)
    with journal.path.open("a") as file:
        file.write('[]\n{"event": "end", "call": "other"}\n\0\n{"event": "be')
    # It is torn: no newline yet.
    assert [*journal.read().calls] == [first]
    with journal.lock():
        second = _begin(journal)
    assert [*journal.read().calls] == [first, second]
    assert [*Journal(tmp_path).read().calls] == [first, second]


@pytest.mark.parametrize("size", [0, 1000])
def test_journal_that_is_emptied_is_read_from_its_beginning(tmp_path: Path, size: int) -> None:
    """A server that runs sees its calls of before, and those after, however long the file is again."""
    journal, other = Journal(tmp_path), Journal(tmp_path)
    with journal.lock():
        first = _begin(journal)
    journal.read()
    for text in ("", "", "\n" * size):
        journal.path.write_text(text)
        assert [*journal.read().calls] == [first]
    journal.path.write_text("")
    with other.lock():
        more = [_begin(other, "up" * (1 + size)), _begin(other)]
    assert [*journal.read().calls] == [first, *more]


def test_journal_that_can_not_be_read_is_an_error_of_the_machine(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.path.mkdir()
    with refused("file-unwritable"), journal.lock():
        pass


def test_journal_keeps_what_the_ledger_of_a_removed_cluster_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with journal.lock():
        call = _begin(journal)
        journal.keep(4, {call: (0.5, None)})
    journal.resume()
    history = Journal(tmp_path).read()
    assert [count for _, count in history.failures] == [4, 0]
    assert history.calls[call].bound == CallBound(0, 0.5, None)


def test_journal_lock_lets_one_at_a_time(tmp_path: Path) -> None:
    """Two servers that look and then write must not both see room for the last job."""
    admitted = []

    def ask() -> None:
        journal = Journal(tmp_path)
        with journal.lock() as history:
            if len(history.calls) < 3:
                admitted.append(_begin(journal))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == 3


def test_journal_lock_is_one_of_the_operating_system(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with journal.lock(), (tmp_path / "lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_journal_is_private(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new" / "folder")
    with journal.lock():
        _begin(journal)
    assert journal.folder.stat().st_mode & 0o777 == 0o700
    assert journal.path.stat().st_mode & 0o777 == 0o600
