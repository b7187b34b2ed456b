"""What is written down of jobs, and which of them are not home."""

from __future__ import annotations

import pytest

from clusterctl.runs.collect import uncollected
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.util.disk import append_line


def entry(token: str, **fields) -> JobEntry:
    return JobEntry(token=token, name="n", user="u", submitted_at=0.0, **fields)


def test_uncollected_lists_jobs_whose_files_are_not_here(tmp_path):
    workspace = Workspace(tmp_path)
    ledger = Ledger(workspace.jobs)
    assert uncollected(workspace) == ()
    ledger.add(entry("never-answered"))
    ledger.add(entry("refused", refused=True))
    ledger.add(entry("out", job_id="1"))
    ledger.add(entry("snapshot", job_id="2", run_dir="/r", run_state="RUNNING"))
    ledger.add(entry("stopped", job_id="4", run_dir="/r", run_state="STOPPED"))
    ledger.add(entry("home", job_id="3", run_dir="/r", run_state="FAILED"))
    assert [e.token for e in uncollected(workspace)] == [
        "never-answered",
        "out",
        "snapshot",
        "stopped",
    ]


def test_ledger_survives_a_torn_line(tmp_path):
    ledger = Ledger(tmp_path / "jobs.jsonl")
    ledger.add(entry("a", job_id="1"))
    with (tmp_path / "jobs.jsonl").open("a") as file:
        file.write('{"token": "b", "na')
    assert [e.token for e in ledger.entries()] == ["a"]
    ledger.add(entry("c", job_id="3"))
    assert [e.token for e in ledger.entries()] == ["a", "c"]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff{]",
        b"\0" * 100,
        b'{"token": "b", "na',
        b"[1]",
        b"null",
        b"[" * 100_000,
        b'{"token": 5, "name": "n"}',
        b'{"token": ["b"]}',
        b'{"token": "a", "job_id": 7}',
        b'{"token": "a", "run_dir": ["/r"]}',
        b'{"token": "a", "submitted_at": "yesterday"}',
        b'{"job_id": "7"}',
        b'{"token": "\xe9"}',
    ],
)
def test_damaged_line_of_the_ledger_spoils_only_itself_and_is_named(tmp_path, line):
    ledger = Ledger(tmp_path / "jobs.jsonl")
    ledger.add(entry("a", job_id="1"))
    assert ledger.damage == ""
    with (tmp_path / "jobs.jsonl").open("ab") as file:
        file.write(line)
    ledger.add(entry("c", job_id="3"))
    assert ledger.entries() == (entry("a", job_id="1"), entry("c", job_id="3"))
    assert "line 2 " in ledger.damage
    assert [e.token for e in uncollected(Workspace(tmp_path))] == ["a", "c"]


def test_job_without_its_first_line_is_named_until_it_is_added_again(tmp_path):
    ledger = Ledger(tmp_path / "jobs.jsonl")
    ledger.add(entry("a", job_id="1"))
    append_line(tmp_path / "jobs.jsonl", '{"token": "b", "job_id": "9", "run_dir": "/r"}')
    assert [e.token for e in ledger.entries()] == ["a"]
    assert ledger.find("9") is None
    assert "clusterctl collect 9" in ledger.damage
    ledger.add(entry("b", job_id="9"))
    assert ledger.find("9") == entry("b", job_id="9", run_dir="/r")
    assert ledger.damage == ""


def test_keys_of_a_later_version_are_no_damage(tmp_path):
    ledger = Ledger(tmp_path / "jobs.jsonl")
    append_line(tmp_path / "jobs.jsonl", '{"kind": "header", "version": 2}')
    ledger.add(entry("a"))
    append_line(tmp_path / "jobs.jsonl", '{"token": "a", "colour": ["red"]}')
    assert ledger.entries() == (entry("a"),)
    assert ledger.damage == ""


def test_entry_is_superseded_by_a_later_job_with_its_id(tmp_path):
    ledger = Ledger(tmp_path / "jobs.jsonl")
    old, other, new = (
        ledger.add(entry(token, job_id=number))
        for token, number in (("a", "2"), ("b", "3"), ("c", "2"))
    )
    ledger.add(entry("d", job_id="3", refused=True))
    assert [ledger.is_superseded(e) for e in (old, other, new)] == [True, False, False]


def test_ledger_is_read_again_only_after_a_change(tmp_path):
    ledger, other = (Ledger(tmp_path / "jobs.jsonl") for _ in range(2))
    assert ledger.entries() == ()
    other.add(entry("a"))
    entries = ledger.entries()
    assert ledger.entries() is entries
    other.update(entries[0], job_id="1")
    assert [e.job_id for e in ledger.entries()] == ["1"]


def test_ledger_files_are_private(tmp_path):
    ledger = Ledger(tmp_path / "jobs.jsonl")
    ledger.add(entry("a"))
    ledger.keep("a" * 8, {"job.sbatch": b"x"})
    assert ledger.kept("a" * 8) == {"job.sbatch": b"x"}
    modes = {
        str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")
    }
    ours = {
        "jobs": 0o700,
        "jobs/aaaaaaaa": 0o700,
        "jobs/aaaaaaaa/job.sbatch": 0o600,
        "jobs.jsonl": 0o600,
    }
    assert modes == ours
