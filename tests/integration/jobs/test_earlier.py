"""Which earlier run `--from-run` means, and the path of its files that a program gets."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.jobs.earlier import with_after, with_from_run
from clusterctl.jobs.prepare import Preparer, Submission, submit_prepared, with_restarts
from clusterctl.jobs.submit import Submitter
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec, job_spec
from clusterctl.spec.names import AFTER, FROM_RUN
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.inventory import SharedFolder
from clusterctl.state.ledger import Ledger
from clusterctl.transport.copies import read_copies
from clusterctl.transport.remote_copies import digest
from tests.support.inventories import with_inventory
from tests.support.messages import refused
from tests.support.played.cluster import PlayedCluster, finished
from tests.unit.runs.made import record

TOKEN = "0a0a0a0a"  # noqa: S105 - of a job
SHOW = f'cat "${FROM_RUN}/state.txt"'


@pytest.fixture(autouse=True)
def local_folder(tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an array's run of another cluster in ./runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERCTL_HOME", str(session.workspace.root.parent))
    run = tmp_path / "runs" / "old-1-sum"
    (run / "task-3").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(record(901, token=TOKEN)))
    (run / "telemetry").mkdir()
    (run / "state.txt").write_text("of the array")
    (run / "task-3" / "state.txt").write_text("of task 3")
    return tmp_path


@pytest.fixture
def run_with(session: Session, cluster: PlayedCluster, local_folder: Path) -> Callable[..., str]:
    """Submits a script that prints the earlier run's file, and returns its output."""

    def run(run: str, **options: object) -> str:
        script = local_folder / "go.sh"
        script.write_text(f"#!/bin/bash\n{SHOW}\n")
        job = job_spec("go.sh", {"folder": False, "from_run": run, **options})
        chosen = ChosenCluster(name=session.ledger.cluster)
        prepared = Preparer(lambda _: None).prepare(session, Submission.of([job], chosen=chosen))
        (done,) = submit_prepared(Submitter(session), prepared)
        cluster.wait_until_ended(done.job_id)
        return "".join(
            path.read_text() for path in sorted(Path(done.remote_dir).glob("stdout*.log"))
        )

    return run


def test_from_run_of_a_job_is_its_folder(session, cluster, local_folder, run_with):
    job_id = finished(session, cluster, local_folder, "echo saved >state.txt")
    assert run_with(job_id) == "saved\n"


@pytest.mark.parametrize("has_ended", [True, False])
def test_job_finds_the_files_of_the_jobs_that_it_follows(
    session, cluster, local_folder, *, has_ended
):
    """Also if they have ended, and Slurm no longer hears of the dependency."""
    first = finished(session, cluster, local_folder, "echo one >state.txt")
    second = finished(session, cluster, local_folder, "mkdir task-3; echo two >task-3/state.txt")
    if not has_ended:
        cluster.change(second, state="RUNNING")
    (local_folder / "go.sh").write_text("#!/bin/bash\n")
    after = (f"{first}:any", "singleton", f"{second}:any")
    job = job_spec("go.sh", {"folder": False, "after": after})
    notes: list[str] = []
    (one,) = Preparer(notes.append).prepare(session, Submission.of([job]))
    paths = [Path(one.job.env[f"{AFTER}{number}"]) for number in (1, 2)]
    assert (paths[0] / "state.txt").read_text() == "one\n"
    assert (paths[1] / "task-3/state.txt").read_text() == "two\n"
    assert f"{AFTER}3" not in one.job.env
    assert f" {AFTER}1={shlex.quote(str(paths[0]))} " in one.script
    assert not [note for note in notes if AFTER in note]


def test_job_after_one_of_another_machine_or_without_a_shared_folder_has_no_variable(
    session, cluster, local_folder
):
    job_id = finished(session, cluster, local_folder, "true")
    foreign = finished(session, cluster, local_folder, "true")
    ledger = session.ledger
    ledger.update(ledger.find(foreign), job_id="")
    apart = with_inventory(session, shared_folder=SharedFolder(kind="none"))
    job = JobSpec(name="go", bundled="probe", after=(job_id, foreign))
    told, note = with_after(job, session.site, ledger.cluster)
    assert [*told.env] == [f"{AFTER}1"]
    assert foreign in note
    # The caller writes it.
    assert not note.startswith("note: ")
    told, note = with_after(job, apart.site, ledger.cluster)
    assert (told, bool(note)) == (job, True)
    task = JobSpec(name="go", bundled="probe", after=(f"{job_id}_3",))
    (path,) = with_after(task, session.site, ledger.cluster)[0].env.values()
    assert Path(path).name == "task-3"
    alone = JobSpec(name="go", bundled="probe", after=("singleton",))
    assert with_after(alone, session.site, ledger.cluster) == (alone, "")


def test_files_of_the_job_that_it_follows_are_visible_in_a_container(
    session, cluster, local_folder
):
    job_id = finished(session, cluster, local_folder, "true")
    (local_folder / "train.py").write_text("")
    options = {"folder": False, "container": "/shared/x.sif", "after": (job_id,)}
    (one,) = Preparer(lambda _: None).prepare(
        session, Submission.of([job_spec("train.py", options)])
    )
    path = shlex.quote(one.job.env[f"{AFTER}1"])
    assert f"""--bind="$SLURM_SUBMIT_DIR",{path} """ in one.script


def test_from_run_of_a_job_submitted_on_another_machine_is_found_by_slurm(
    session, cluster, local_folder, monkeypatch
):
    job_id = finished(session, cluster, local_folder, "echo saved >state.txt")
    state = local_folder / "other"
    monkeypatch.setenv("CLUSTERCTL_HOME", str(state))
    ledger = Ledger(state / session.ledger.cluster / "jobs.jsonl")
    other_machine = replace(session, ledger=ledger)
    job = JobSpec(
        name="go", script=local_folder / "job.sh", from_run=f"{session.ledger.cluster}/{job_id}"
    )
    folder = with_from_run(job, other_machine.ledger.cluster, other_machine)[0].env[FROM_RUN]
    assert Path(folder, "state.txt").read_text() == "saved\n"


@pytest.mark.parametrize(
    ("run", "output"),
    [
        ("old-1-sum", "of the array"),
        ("runs/old-1-sum", "of the array"),
        ("runs/old-1-sum/task-3", "of task 3"),
    ],
)
def test_from_run_of_a_collected_run_sends_it_and_records_the_copy(
    session, local_folder, run_with, run, output
):
    assert run_with(run) == output
    known = {number for copies in read_copies(session.workspace) for number in copies.numbers()}
    (sent,) = Path.home().glob(f"clusterctl/runs/*-{TOKEN}")
    assert not (sent / "run.json").exists()
    assert not (sent / "telemetry").exists()
    status = (sent / "state.txt").stat()
    assert digest(b"", os.fsencode(sent / "state.txt"), status.st_size, status.st_mtime_ns) in known


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({"sweep": ["lr=1,2"], "nodes": 2}, f"env {FROM_RUN}="),
        ({"array": "0-3", "nodes": 2}, f"env {FROM_RUN}="),
        ({"nodes": 2, "launcher": "mpirun"}, f" -x {FROM_RUN}"),
        ({"container": "/shared/x.sif", "nodes": 2}, f"--env={FROM_RUN}"),
    ],
)
def test_from_run_is_passed_to_the_ranks_of_every_launcher(session, local_folder, options, passed):
    (local_folder / "train.py").write_text("")
    job = job_spec("train.py", {"from_run": "old-1-sum", "folder": False, **options})
    (prepared,) = Preparer(lambda _: None).prepare(session, Submission.of([job]))
    assert passed in prepared.script


def test_from_run_is_visible_in_a_container(session, local_folder):
    """Also a run outside the job user's home, which the container shows by default."""
    (local_folder / "train.py").write_text("")
    options = {"folder": False, "container": "/shared/x.sif", "env": [f"{FROM_RUN}=/other/a run"]}
    (prepared,) = Preparer(lambda _: None).prepare(
        session, Submission.of([job_spec("train.py", options)])
    )
    assert """ --bind="$SLURM_SUBMIT_DIR",'/other/a run' """ in prepared.script


def test_dry_run_does_not_look_for_a_run_of_another_machine(session):
    job = job_spec("train", {"from_run": f"{session.ledger.cluster}/999"})
    with refused("not-found/run-files", UsageError) as found:
        with_from_run(job, session.ledger.cluster, None)
    assert found.value.why.startswith("--dry-run")


def test_from_run_of_an_uncollected_job_is_refused_without_a_shared_folder(
    session, cluster, local_folder
):
    apart = replace(
        with_inventory(session, shared_folder=SharedFolder(kind="none")),
        nodes={"n1": session.transport},
    )
    job_id = finished(session, cluster, local_folder, "echo saved >state.txt")
    job = JobSpec(
        name="go", script=local_folder / "job.sh", from_run=f"{session.ledger.cluster}/{job_id}"
    )
    with refused("not-found/run-files", UsageError, f"clusterctl collect workspace/{job_id}"):
        with_from_run(job, apart.ledger.cluster, apart)


def test_from_run_of_a_collected_run_is_sent_to_nodes_without_a_shared_folder(
    session, local_folder
):
    apart = replace(
        with_inventory(session, shared_folder=SharedFolder(kind="none")),
        nodes={"n1": session.transport},
    )
    job = JobSpec(name="go", script=local_folder / "job.sh", from_run="old-1-sum")
    folder = with_from_run(job, apart.ledger.cluster, apart)[0].env[FROM_RUN]
    assert Path(folder, "state.txt").is_file()


def test_from_run_that_does_not_exist_is_refused(session, cluster, local_folder, run_with):
    (local_folder / "data").mkdir()
    gone = finished(session, cluster, local_folder, "true")
    entry = session.ledger.find(gone)
    Path(entry.remote_dir).rename(local_folder / "gone")
    foreign = finished(session, cluster, local_folder, "true")
    cluster.change(foreign, comment="")
    other_machine = Ledger(session.workspace.jobs)
    entry = other_machine.find(foreign)
    other_machine.update(entry, job_id="")
    calls = cluster.calls("sbatch")
    for run, code in (
        ("nothing", "not-found/run"),
        ("999", "not-found/job"),
        ("data", "file-invalid/run"),
        (gone, "not-found/run-files"),
        (foreign, "not-yours/job"),
    ):
        with refused(code, UsageError):
            run_with(run)
    assert cluster.calls("sbatch") == calls


def test_from_run_continues_train_from_its_checkpoints(session):
    job = job_spec("train", {"from_run": "old-1-sum"})
    assert with_restarts(session.site, job).args == ("--resume", "auto")
    own = job.model_copy(update={"args": ("--resume", "never")})
    assert with_restarts(session.site, own).args == ("--resume", "never")
    with refused("option-invalid/from-run", ClusterctlError, "--run RUN"):
        with_from_run(job_spec("bench", {"from_run": "old-1-sum"}), session.ledger.cluster, None)
