"""A job's program and clusterctl have the same file names, and nothing of either is lost."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.jobs.replay import ReplayRequest, replay_job
from clusterctl.jobs.submit import SubmittedJob
from clusterctl.runs.collect import collect
from clusterctl.runs.only_copies import Search
from clusterctl.scheduler.ends.remote_logs import ENDS_FILE
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec
from clusterctl.state.inventory import CONTROLLER
from clusterctl.state.ledger import (
    FROM_JOB,
    PROGRAM_FOLDER,
    SENT_FILES,
    Ledger,
    job_paths,
    run_path,
)
from clusterctl.state.run_record import RunRecord
from clusterctl.state.workspace import Workspace
from clusterctl.transport.remote_copies import digest
from tests.support.inventories import host_of, inventory_of
from tests.support.played.cluster import PlayedCluster, submit

# Files that a project has, and that clusterctl writes as well.
CARRIED = (
    "hostfile",
    "telemetry/__init__.py",
    "telemetry.from-job/x",
    "job.sbatch",
    "spec.yaml",
    "run.json",
    "metrics.jsonl",
    "task-1/rank-logs/0.log",
    "rank-logs/0.log",
    "heartbeat",
    "files/x",
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in CARRIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}\n")
    return folder


def run_job(
    session: Session, cluster: PlayedCluster, project: Path, body: str, **job: object
) -> SubmittedJob:
    script = project / "own.sh"
    script.write_text(f"#!/bin/bash\n{body}\n")
    done = submit(session, JobSpec(name="mine", script=script, **job))
    cluster.wait_until_ended(done.job_id)
    return done


def run_of(session: Session, done: SubmittedJob, out: Path) -> RunRecord:
    """The collected run. Its checksums hold, and `down` knows of all files of the job that they are
    here.

    Of links, which `down` does not count, the run has the link or its target.
    """
    (run,) = collect(session, [done.job_id], out=out)
    subprocess.run(
        ["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=run.directory, check=True
    )
    inventory = inventory_of(cluster="demo", hosts=(host_of("demo-ctl", CONTROLLER),))
    known = Search(inventory, session.workspace, lambda _: session.transport, (), shared=True).known
    folder = Path(done.remote_dir)
    targets = {one.path: one.target for one in run.skipped}
    for path in folder.rglob("*"):
        if path.is_symlink() and path.readlink() != Path("..", path.name):
            here = run.directory / path.relative_to(folder / PROGRAM_FOLDER)
            assert here.is_symlink() or targets.get(str(path.relative_to(folder))) == str(
                path.readlink()
            )
        status = path.lstat()
        is_counted = path.is_file() and not path.is_symlink() and status.st_size
        if is_counted and not (path.parent == folder and path.name in {*SENT_FILES, ENDS_FILE}):
            assert digest(b"", os.fsencode(path), status.st_size, status.st_mtime_ns) in known, path
    return run


@pytest.mark.parametrize(
    ("path", "placed"),
    [
        ("train.py", "train.py"),
        ("telemetry/a.py", "telemetry.from-job/a.py"),
        ("stdout-3.log", "stdout-3.log.from-job"),
        ("task-1/rank-logs/0.log", "task-1/rank-logs.from-job/0.log"),
        ("sub/rank-logs/0.log", "sub/rank-logs/0.log"),
        ("task-1", "task-1"),
        ("notes.from-job", "notes.from-job"),
    ],
)
def test_path_in_the_run_leads_back_to_the_programs_file(path: str, placed: str) -> None:
    assert run_path(path.encode()) == placed.encode()
    assert f"{PROGRAM_FOLDER}/{path}".encode() in set(job_paths(placed.encode(), b"files"))


def test_name_that_the_suffix_makes_may_be_taken() -> None:
    paths = {b"telemetry", b"telemetry/x", b"telemetry.from-job", b"telemetry.from-job/x"}
    placed = {run_path(path, paths) for path in paths}
    assert len(placed) == len(paths)
    assert b"telemetry.from-job.from-job/x" in placed
    assert {*job_paths(b"stdout.log", b"files")} == {b"stdout.log"}


def test_files_named_like_ours_are_collected_and_sent_again(
    session: Session, cluster: PlayedCluster, project: Path, tmp_path: Path
) -> None:
    done = run_job(session, cluster, project, "cat hostfile job.sbatch telemetry/__init__.py")
    run = run_of(session, done, tmp_path / "runs")
    names = CARRIED[0], CARRIED[3], CARRIED[1]
    text = "".join(f"mine: {name}\n" for name in names)
    assert (run.directory / "stdout.log").read_text() == text
    assert run.skipped == ()
    listed = json.loads((run.directory / "source.json").read_bytes())["files"]
    sent = {os.fsencode(item["path"]) for item in listed}
    parents = {path.rpartition(b"/")[0] for path in sent}
    for name in CARRIED:
        path = run.directory / os.fsdecode(run_path(name.encode(), sent | parents))
        assert path.read_text() == f"mine: {name}\n"
    assert (run.directory / "job.sbatch").read_text() == done.script
    assert run.metrics == {}
    # Without the project, the replay has all files but those that are not unmistakably in the run.
    project.rename(tmp_path / "moved")
    (tmp_path / "project").mkdir()
    (tmp_path / "moved" / "telemetry").rename(tmp_path / "project" / "telemetry")
    source = replay_job(run.directory, ReplayRequest(run.token)).source
    assert source is not None
    assert {os.fsencode(item.path) for item in source.files} == sent


BEHAVIOURS = {
    "removes": "rm -rf -- * .[!.]*; echo x >result",
    "redirects": (
        "echo mine >stdout.log; echo mine >stderr.log; mkdir -p rank-logs; echo 1 >rank-logs/0.log"
    ),
    "records": (
        "echo junk >job.events; echo junk >hang.json; mkdir telemetry; echo x >telemetry/n1.jsonl"
    ),
    "goes up": "echo junk >../run.json; mkdir ../sacct.json; echo x >../sacct.json/x; echo y >../new",
    "links": (
        "ln -s /etc etc; ln -s nowhere gone; ln -s own.sh mine; echo x >1.ckpt; ln -s 1.ckpt "
        "last.ckpt"
    ),
    "goes back": 'cd "$SLURM_SUBMIT_DIR" && cat own.sh >copy',
}


@pytest.fixture(params=[None, "3"])
def array(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The number of an array task, as Slurm tells it to the script."""
    number: str | None = request.param
    if number:
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", number)
    return number


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_program_changes_no_file_of_clusterctl(
    session: Session, cluster: PlayedCluster, tmp_path: Path, behaviour: str, array: str | None
) -> None:
    (tmp_path / "project").mkdir()
    body = f"echo hello\n{BEHAVIOURS[behaviour]}\necho end"
    done = run_job(session, cluster, tmp_path / "project", body, array=array)
    run = run_of(session, done, tmp_path / "runs")
    ours = run.directory / (f"task-{array}" if array else "")
    events = [json.loads(line)["event"] for line in (ours / "job.events").read_text().splitlines()]
    assert (events, run.state) == (["start", "end"], "COMPLETED")
    (log,) = run.directory.glob("stdout*.log")
    assert log.read_text().splitlines() == ["hello", "end"]
    written = {path.name for path in ours.rglob("*") if FROM_JOB.decode() in str(path)}
    expected = {
        "redirects": {"stdout.log.from-job", "0.log"},
        "records": {"job.events.from-job", "n1.jsonl"},
    }
    assert written >= expected.get(behaviour, set())


def test_job_of_an_earlier_version_is_collected_as_it_was_sent(
    session: Session, cluster: PlayedCluster, tmp_path: Path
) -> None:
    """Its program and clusterctl shared the job's folder."""
    (tmp_path / "project").mkdir()
    body = "cd ..; echo x >result; echo y >run.json"
    done = run_job(session, cluster, tmp_path / "project", body)
    entry = cluster.ledger.find(done.job_id)
    assert entry is not None
    program = Path(done.remote_dir) / PROGRAM_FOLDER
    for path in program.iterdir():
        path.rename(Path(done.remote_dir) / path.name)
    program.rmdir()
    rows = cluster.ledger._path.read_text().replace(f',"files":"{PROGRAM_FOLDER}"', "")
    cluster.ledger._path.write_text(rows)
    assert cluster.ledger.find(done.job_id) == replace(entry, files=None)
    run = run_of(session, done, tmp_path / "runs")
    assert (run.directory / "result").read_text() == "x\n"
    assert (run.directory / "run.json.from-job").read_text() == "y\n"
    assert (run.directory / "own.sh").is_file()
    assert not (run.directory / "own.sh.from-job").exists()


@pytest.mark.parametrize("is_flat", [False, True])
def test_job_of_another_machine_has_its_layout_in_its_script(
    session: Session, cluster: PlayedCluster, tmp_path: Path, is_flat: bool
) -> None:
    (tmp_path / "project").mkdir()
    done = run_job(session, cluster, tmp_path / "project", "echo x >stdout.log")
    if is_flat:
        (Path(done.remote_dir) / "job.sbatch").write_text("#!/bin/bash\n")
    (tmp_path / "other").mkdir()
    elsewhere = replace(session, ledger=Ledger(Workspace(tmp_path / "other").jobs))
    elsewhere.workspace.spec.write_bytes(session.workspace.spec.read_bytes())
    run = run_of(elsewhere, done, tmp_path / "runs")
    assert (run.directory / "stdout.log.from-job").exists() is not is_flat
    assert (run.directory / "files" / "stdout.log").exists() is is_flat
