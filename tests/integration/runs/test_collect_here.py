"""Which jobs `collect` brings home, and into which folder: those of the current folder's
project.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import CollectError
from clusterctl.runs.collect import collect, collect_runs, uncollected_elsewhere
from clusterctl.runs.find import find_runs
from clusterctl.runs.folder import working_folder
from clusterctl.state.ledger import is_of_project
from clusterctl.state.run_record import RunRecord
from clusterctl.transport.base import Conversation
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.support.played.cluster import finished


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    made = (tmp_path / "a", tmp_path / "b")
    for folder in made:
        folder.mkdir()
    return made


@pytest.fixture
def jobs(session, cluster, folders, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A finished job that was submitted from each folder. The current folder is b."""
    ids = []
    for folder in folders:
        monkeypatch.chdir(folder)
        ids.append(finished(session, cluster, folder, "echo x >result.txt", folder.name))
    return ids


def test_collect_leaves_the_jobs_of_other_folders(session, jobs, folders):
    a, b = folders
    (run,) = collect(session)
    assert (run.job_id, run.directory) == (jobs[1], b / "runs" / f"demo-{jobs[1]}-b")
    assert uncollected_elsewhere(session) == {str(a): 1}
    assert collect(session) == ()
    assert not (a / "runs").exists()


def test_collect_everywhere_puts_each_run_into_its_folder(session, jobs, folders):
    runs = collect(session, everywhere=True)
    assert [run.directory.parent for run in runs] == [folder / "runs" for folder in folders]
    assert uncollected_elsewhere(session) == {}
    for folder, job_id in zip(folders, jobs, strict=True):
        (found,), _ = find_runs([folder / "runs"])
        assert found.job_id == job_id


@pytest.mark.parametrize("given", [{"ids": True}, {"out": True, "everywhere": True}])
def test_collect_writes_to_the_folder_of_out(session, jobs, folders, tmp_path, given):
    out = tmp_path / "out" if given.get("out") else None
    ids = jobs if given.get("ids") else None
    runs = collect(session, ids, out=out, everywhere=bool(given.get("everywhere")))
    assert {run.directory.parent for run in runs} == {out or folders[1] / "runs"}
    assert len(runs) == 2


@pytest.mark.parametrize("fault", ["gone", "file"])
def test_collect_everywhere_uses_this_folder_if_the_other_is_unusable(
    session, jobs, folders, fault
):
    a, b = folders
    (a / "job.sh").unlink()
    a.rmdir()
    if fault == "file":
        a.write_text("")
    runs = collect(session, everywhere=True)
    assert {run.directory.parent for run in runs} == {b / "runs"}


class Counted(LocalTransport):
    """A connection that counts its conversations."""

    conversations = 0

    def converse(self, argv: Sequence[str], **more: Any) -> AbstractContextManager[Conversation]:
        self.conversations += 1
        return super().converse(argv, **more)


@pytest.mark.parametrize(("user", "conversations"), [("hpc", 0), ("former", 1)])
def test_runs_of_a_user_whom_the_spec_no_longer_has_are_fetched_as_root(
    session, cluster, tmp_path, user, conversations
):
    """One connection serves all their runs."""
    root = Counted()
    ids = [finished(session, cluster, tmp_path, "echo x >result.txt") for _ in range(2)]
    for job_id in ids:
        session.ledger.update(session.ledger.find(job_id), user=user)
        cluster.change(job_id, user=user)
    runs = collect(replace(session, roots={session.transport.host: root}), out=tmp_path / "r")
    assert [(run.directory / "result.txt").read_text() for run in runs] == ["x\n", "x\n"]
    assert ([run.user for run in runs], [run.skipped for run in runs]) == ([user] * 2, [()] * 2)
    assert root.conversations == conversations


@pytest.mark.parametrize(
    ("marks", "folder", "here", "same"),
    [
        ((), "p", "p", True),
        ((), "p", "q", False),
        ((), "p/sub", "p", False),
        (("p/cluster.yaml",), "p/sub", "p", True),
        (("p/cluster.yaml",), "p", "p/sub/deep", True),
        (("p/.git",), "p/x", "p/y", True),
        (("p/.git", "p/x/pyproject.toml"), "p/x", "p/y", False),
        (("requirements.txt",), "p", "q", True),
        ((), None, "q", True),
    ],
)
def test_folders_of_a_project_belong_together(tmp_path, marks, folder, here, same):
    for name in ("p/sub/deep", "p/x", "p/y", "q"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    for mark in marks:
        (tmp_path / mark).touch()
    assert is_of_project(folder and str(tmp_path / folder), tmp_path / here) is same


@pytest.fixture
def run(session, cluster, tmp_path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    """A collected run with files of its program, in ./runs."""
    monkeypatch.chdir(tmp_path)
    body = "mkdir -p out\nseq 100 >out/log.txt\nseq 9 >rst.500\n: >empty\n"
    finished(session, cluster, tmp_path, body)
    (collected,) = collect(session)
    return collected


def content(run: RunRecord) -> dict[str, bytes]:
    names = ("run.json", "SHA256SUMS", "report.html")
    files = (path for path in run.directory.rglob("*") if path.is_file() and path.name not in names)
    return {str(path.relative_to(run.directory)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (
            (d / "out" / "log.txt").write_bytes(b""),
            (d / "rst.500").unlink(),
            (d / "rst.500").mkdir(),
            (d / "stdout.log").unlink(),
            os.truncate(d / "stderr.log", 5),
        ),
        lambda d: (
            (d / "job.sbatch").write_bytes(b""),
            (d / "source.json").unlink(),
            (d / "sacct.json").unlink(),
            (d / "environment.json").unlink(),
        ),
        lambda d: (d / "SHA256SUMS").unlink(),
        lambda d: (d / "SHA256SUMS").write_bytes(b"\xff\0 garbage\n"),
        lambda d: (d / "run.json").unlink(),
        lambda d: (d / "run.json").write_bytes(b'{"token": "x"'),
        lambda d: os.truncate(d / "run.json", 200),
    ],
)
def test_collect_repairs_a_damaged_run_in_place(session, run, damage):
    before = content(run)
    (run.directory / "notes.md").write_text("mine")
    damage(run.directory)
    (again,) = collect(session, [run.job_id])
    assert again.directory == run.directory
    after = content(again)
    assert after.pop("notes.md") == b"mine"
    after = {name: data for name, data in after.items() if not name.endswith(".changed")}
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} <= {
        "environment.json",
        "sacct.json",
    }
    loaded = RunRecord.load(run.directory)
    assert (loaded.token, loaded.state, loaded.tasks) == (run.token, run.state, run.tasks)
    assert [path.name for path in run.directory.parent.iterdir()] == [run.directory.name]
    assert collect(session, [run.job_id])[0].collected_at == loaded.collected_at


def test_collect_keeps_a_changed_file_beside_the_repaired_one(session, run):
    before = (run.directory / "rst.500").read_bytes()
    (run.directory / "rst.500").write_text("edited")
    collect(session, [run.job_id])
    assert (run.directory / "rst.500").read_bytes() == before
    assert (run.directory / "rst.500.changed").read_text() == "edited"


def test_collect_of_a_run_without_its_record_keeps_a_changed_file(session, run):
    files = [run.directory / "rst.500", run.directory / "out" / "log.txt"]
    before = [path.read_bytes() for path in files]
    (run.directory / "run.json").write_text("{}")
    files[0].write_text("edited")
    files[1].unlink()
    collect(session, [run.job_id])
    assert [path.read_bytes() for path in files] == before
    assert (run.directory / "rst.500.changed").read_text() == "edited"
    assert [path.name for path in run.directory.rglob("*.changed")] == ["rst.500.changed"]


def test_collect_of_a_damaged_run_names_files_lost_on_the_cluster(session, cluster, run):
    (entry,) = cluster.ledger.entries()
    (Path(entry.remote_dir) / "files" / "rst.500").unlink()
    (run.directory / "rst.500").write_text("damaged")
    (run.directory / "out" / "log.txt").unlink()
    with refused("not-found/run-original", CollectError, "rst.500", str(run.directory)):
        collect(session, [run.job_id])
    assert (run.directory / "out" / "log.txt").exists()
    assert (run.directory / "rst.500").read_text() == "damaged"
    # The file stays listed with its original hash.
    with refused("not-found/run-original", CollectError, "rst.500"):
        collect(session, [run.job_id])


def test_runs_count_a_folder_without_its_record(session, run):
    (run.directory / "run.json").unlink()
    assert find_runs([run.directory.parent]) == ([], [run.directory])
    with refused(
        "record-damaged/run",
        CollectError,
        str(run.directory / "run.json"),
        "clusterctl collect",
    ):
        RunRecord.load(run.directory)


def test_second_collect_waits_and_uses_the_run_of_the_first(
    session, cluster, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    job_id = finished(session, cluster, tmp_path, "true")
    final = tmp_path / "runs" / f"demo-{job_id}-mine"
    other = cluster.session(patience_s=0)
    found: list[RunRecord] = []
    waiting = threading.Event()

    def progress(activity: str, *_: int) -> None:
        if "waiting" in activity:
            waiting.set()

    second = threading.Thread(
        target=lambda: found.extend(collect_runs(other, [job_id], progress=progress))
    )
    with working_folder(final):
        second.start()
        assert waiting.wait(60)
    second.join(60)
    assert [one.directory for one in found] == [final]
    (first,) = collect(session, [job_id])
    assert first == found[0]


def test_folder_that_can_not_be_written_is_named_once(session, cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        finished(session, cluster, tmp_path, "true")
    (tmp_path / "runs").write_text("a file")
    with refused("file-unwritable/run", CollectError, "--out") as caught:
        collect(session)
    assert caught.value.where == str(tmp_path / "runs")
    assert str(caught.value).count("can't be written") == 1
