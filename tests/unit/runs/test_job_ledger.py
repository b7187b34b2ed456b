"""What is written down of jobs, and which of them are not home."""

from __future__ import annotations

from clusterctl.runs.collect import uncollected
from clusterctl.state.submissions import JobEntry, Ledger
from clusterctl.state.workspace import Workspace


def entry(token: str, **fields) -> JobEntry:
    return JobEntry(token=token, name="n", user="u", submitted_at=0.0, **fields)


def test_what_is_not_home(tmp_path):
    workspace = Workspace(tmp_path)
    ledger = Ledger(workspace.jobs)
    assert uncollected(workspace) == ()
    ledger.add(entry("never-answered"))
    ledger.add(entry("refused", refused=True))
    ledger.add(entry("out", job_id="1"))
    ledger.add(entry("snapshot", job_id="2", run_dir="/r", run_state="RUNNING"))
    ledger.add(entry("stopped", job_id="4", run_dir="/r", run_state="STOPPED"))
    ledger.add(entry("home", job_id="3", run_dir="/r", run_state="FAILED"))
    assert [e.token for e in uncollected(workspace)] == ["never-answered", "out", "snapshot", "stopped"]


def test_the_ledger_survives_a_torn_line(tmp_path):
    ledger = Ledger(tmp_path / "jobs.jsonl")
    ledger.add(entry("a", job_id="1"))
    with (tmp_path / "jobs.jsonl").open("a") as file:
        file.write('{"token": "b", "na')
    assert [e.token for e in ledger.entries()] == ["a"]
    ledger.add(entry("c", job_id="3"))
    assert [e.token for e in ledger.entries()] == ["a", "c"]


def test_ledger_is_read_again_only_after_a_change(tmp_path):
    ledger, other = (Ledger(tmp_path / "jobs.jsonl") for _ in range(2))
    assert ledger.entries() == ()
    other.add(entry("a"))
    entries = ledger.entries_and_parts()
    assert ledger.entries_and_parts() is entries
    other.update(entries[0], job_id="1")
    assert [e.job_id for e in ledger.entries()] == ["1"]


def test_what_is_noted_and_kept_of_a_job_is_ours_alone(tmp_path):
    ledger = Ledger(tmp_path / "jobs.jsonl")
    ledger.add(entry("a"))
    ledger.keep("a" * 8, {"job.sbatch": b"x"})
    assert ledger.kept("a" * 8) == {"job.sbatch": b"x"}
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    ours = {"jobs": 0o700, "jobs/aaaaaaaa": 0o700, "jobs/aaaaaaaa/job.sbatch": 0o600, "jobs.jsonl": 0o600}
    assert modes == ours
