"""Which model `--run` means, where it lies, and what is sent of it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.jobs.bundled import (
    ChosenModel,
    reject_unless_fitting,
    run_on_this_machine,
    with_model,
)
from clusterctl.jobs.source import Source
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec, job_spec
from clusterctl.spec.program import Weights
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.inventory import SharedFolder
from clusterctl.state.ledger import PROGRAM_FOLDER, note_runs_folder
from clusterctl.state.run_names import find_run, full_name, job_id_of
from clusterctl.state.workspace import state_home
from clusterctl.transport.copies import read_copies
from clusterctl.transport.remote_copies import digest
from tests.support.inventories import with_inventory
from tests.support.messages import refused as rejected
from tests.support.played.cluster import submit
from tests.unit.runs.made import record

PREDICT = JobSpec(name="predict", bundled="predict", args=("a.png",))


@pytest.fixture(autouse=True)
def local_folder(tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a run of another cluster in ./runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERCTL_HOME", str(session.workspace.root.parent))
    model(Path("runs/old-1-train"))
    return tmp_path


def model(run: Path, *, best: str = "best") -> Path:
    """A run's folder with a model of this content."""
    folder = run / "model"
    folder.mkdir(parents=True)
    for which, content in (("best", best), ("final", "final")):
        (folder / f"{which}.safetensors").write_text(content)
    files = {which: {"file": f"{which}.safetensors"} for which in ("best", "final")}
    (folder / "model.json").write_text(json.dumps({"format": 1, "files": files, "about": best}))
    (run / "config.toml").write_text("[data]\n")
    return run


def trained(session: Session, run: Path | None = None) -> tuple[str, Path]:
    """A job that has left a model in its folder, and maybe was brought home: its id and that
    folder.
    """
    done = submit(session, JobSpec(name="train", bundled="train"))
    folder = model(Path(done.remote_dir) / PROGRAM_FOLDER)
    if run is not None:
        bring_home(session, done.job_id, Path(done.remote_dir), run)
    return done.job_id, folder


def bring_home(session: Session, job_id: str, folder: Path, run: Path) -> None:
    entry = session.ledger.find(job_id)
    assert entry is not None
    model(run)
    named = {"token": entry.token, "cluster": session.ledger.cluster}
    known = record(int(job_id), **named, remote_dir=str(folder))
    (run / "run.json").write_text(json.dumps(known))
    session.ledger.update(entry, run_dir=str(run.absolute()))
    state_home().mkdir(parents=True, exist_ok=True)
    note_runs_folder(run.absolute().parent)


def chosen(
    run: str, session: Session, weights: Weights = Weights.BEST, *, look: bool = True
) -> tuple[list[str], Source | None]:
    """What a job is called with, and what is sent."""
    cluster = session.ledger.cluster
    model = ChosenModel(full_name(run, ChosenCluster(name=cluster)), weights)
    (job,), sent = with_model([PREDICT], model, cluster, session if look else None)
    assert job.args[2:] == ("--weights", weights.value, "a.png")
    assert job.args[0] == "--model-folder"
    return job.args[1], sent


def sent_with(weights: Weights) -> set[str]:
    return {"model", "model/model.json", f"model/{weights.value}.safetensors", "config.toml"}


def test_model_on_shared_storage_is_used_in_place(session: Session, local_folder: Path) -> None:
    job_id, folder = trained(session)
    for look in (True, False):
        assert chosen(job_id, session, look=look) == (f"{folder}/model", None)
    second, remote_path = trained(session, local_folder / "elsewhere" / "demo-2-train")
    for name in (second, "demo-2-train", "elsewhere/demo-2-train"):
        assert chosen(name, session) == (f"{remote_path}/model", None)


def test_task_of_an_array(session: Session) -> None:
    job_id, folder = trained(session)
    model(folder / "task-3")
    assert chosen(f"{job_id}_3", session)[0] == f"{folder}/task-3/model"


@pytest.mark.parametrize("weights", Weights)
def test_local_model_is_sent_with_the_chosen_weights_only(
    session: Session, weights: Weights
) -> None:
    for run in ("old-1-train", "runs/old-1-train", "runs/old-1-train/model"):
        folder, sent = chosen(run, session, weights)
        assert folder == "model"
        assert sent is not None
        assert {item.path for item in sent.items} == sent_with(weights)
    done = submit(session, PREDICT, source=sent)
    arrived = Path(done.remote_dir) / PROGRAM_FOLDER / "model" / f"{weights.value}.safetensors"
    assert arrived.read_text() == weights.value


@pytest.mark.parametrize("name", ["model", "my-model"])
def test_sent_model_files_are_recorded_as_copies(
    session: Session, local_folder: Path, name: str
) -> None:
    (local_folder / "runs/old-1-train/model").rename(local_folder / "runs/old-1-train" / name)
    _, sent = chosen(f"runs/old-1-train/{name}", session)
    done = submit(session, PREDICT, source=sent)
    known = {
        number for copies in read_copies(session.ledger.workspace) for number in copies.numbers()
    }
    for path in ("model/model.json", "model/best.safetensors", "config.toml"):
        remote_path = Path(done.remote_dir) / PROGRAM_FOLDER / path
        status = remote_path.stat()
        assert digest(b"", os.fsencode(remote_path), status.st_size, status.st_mtime_ns) in known


@pytest.mark.parametrize("run", [".", "..", "../."])
def test_run_is_found_from_inside_of_it(
    session: Session, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    monkeypatch.chdir("runs/old-1-train/model")
    _, sent = chosen(run, session)
    assert sent is not None
    assert {item.path for item in sent.items} == sent_with(Weights.BEST)


def test_changed_model_on_the_cluster_is_not_used_for_the_local_run(
    session: Session, local_folder: Path
) -> None:
    job_id, folder = trained(session, local_folder / "runs" / "demo-1-train")
    (folder / "model" / "model.json").write_text("{}")
    for run in (job_id, "demo-1-train"):
        where, sent = chosen(run, session)
        assert where == "model"
        assert sent is not None


def test_hosts_without_shared_folder_get_the_local_model(
    session: Session, local_folder: Path
) -> None:
    apart = replace(
        with_inventory(session, shared_folder=SharedFolder(kind="none")),
        nodes={"n1": session.transport},
    )
    job_id, _ = trained(session, local_folder / "runs" / "demo-1-train")
    assert chosen(job_id, apart)[0] == "model"
    other, _ = trained(session)
    with rejected("not-found/collected-run", UsageError, f"clusterctl collect workspace/{other}"):
        chosen(other, apart)


def test_run_option_with_an_unknown_run_is_refused(session: Session, local_folder: Path) -> None:
    plain = submit(session, JobSpec(name="train", bundled="train"))
    (local_folder / "runs" / "empty").mkdir()
    for run, code, shown, fix in (
        ("old-1-trian", "not-found/run", "'old-1-trian'", "did you mean old-1-train?"),
        ("nothing", "not-found/run", "'nothing'", "CLUSTER/12"),
        ("", "not-found/run", "''", "CLUSTER/12"),
        ("nowhere/3", "not-found/collected-run", "nowhere/3", "clusterctl collect nowhere/3"),
        ("a" * 300, "not-found/run", "'aaa", "CLUSTER/12"),
        ("empty", "option-invalid/model", "empty", "use a run of `train`"),
        ("99", "not-found/job", "99", "clusterctl jobs"),
        (plain.job_id, "option-invalid/model", plain.job_id, "use a run of `train`"),
    ):
        with rejected(code, UsageError, shown, fix):
            chosen(run, session)


def test_run_option_is_for_jobs_that_use_a_model() -> None:
    choice = ChosenModel("runs/a", Weights.BEST)
    with rejected("option-invalid/one-rank", UsageError):
        job_spec("sample", {"nodes": 2, "tasks_per_node": 2})
    with rejected("option-invalid/option-missing", UsageError, "--run"):
        reject_unless_fitting([JobSpec(name="t", bundled="train")], choice)
    with rejected("option-invalid/trained-model", UsageError, "predict"):
        reject_unless_fitting([PREDICT], None)
    reject_unless_fitting([PREDICT], choice)
    own = PREDICT.model_copy(update={"args": ("--model-folder=/shared/m", "a.png")})
    reject_unless_fitting([own], None)
    for program, flag in (("eval", "--resume"), ("eval", "--out"), ("export", "--checkpoint")):
        job = JobSpec(name=program, bundled=program)
        with rejected("option-invalid/trained-model", UsageError):
            reject_unless_fitting([job], None)
        reject_unless_fitting([job.model_copy(update={"args": (flag, "/shared/c")})], None)


def saved(
    local_folder: Path, name: str, job_id: str, cluster: str = "old", token: str = "0" * 8
) -> Path:
    """A collected run of a cluster that is down."""
    run = model(local_folder / "runs" / name)
    (run / "run.json").write_text(json.dumps(record(int(job_id), cluster=cluster, token=token)))
    return run


def test_find_run_of_a_former_cluster(local_folder: Path) -> None:
    run = saved(local_folder, "demo-14-train", "14")
    (run / "task-2").mkdir()
    saved(local_folder, "my-14-3-train", "3", token="1" * 8)
    for name in ("old/14", "demo-14-train", "runs/demo-14-train", str(run)):
        assert find_run(name).folder == run, name
    for name in ("old/14_2", "demo-14-train/task-2"):
        found = find_run(name)
        assert (found.folder, found.run_folder) == (run / "task-2", run)
    assert find_run("old/4").folder is None
    (local_folder / "exp" / "4").mkdir(parents=True)
    assert find_run("./exp/4").folder == local_folder / "exp" / "4"


def test_find_run_takes_a_job_id_of_the_chosen_cluster(
    session: Session, local_folder: Path
) -> None:
    """A former cluster has a run of the same job id, and earlier jobs of this cluster had it."""
    job_id, folder = trained(session)
    former = saved(local_folder, f"former-{job_id}-train", job_id)
    cluster = session.ledger.cluster
    saved(local_folder, f"earlier-{job_id}-train", job_id, cluster=cluster, token="1" * 8)
    for name in (job_id, f"{cluster}/{job_id}"):
        assert chosen(name, session) == (f"{folder}/model", None)
    for name in (f"old/{job_id}", former.name):
        assert chosen(name, session)[0] == "model"
    saved(local_folder, "old-9-train", "9", token="9" * 8)
    for name in ("9", f"{cluster}/9"):
        with rejected("not-found/job", UsageError, "9"):
            chosen(name, session)


def test_job_id_of_finds_the_job_of_a_runs_folder(session: Session, local_folder: Path) -> None:
    job_id, _ = trained(session, local_folder / "runs" / "demo-1-train")
    saved(local_folder, f"former-{job_id}-train", job_id)
    cluster = session.workspace.root.name
    for name in ("demo-1-train", "runs/demo-1-train"):
        assert job_id_of(name, session.ledger) == job_id
    # The commands that ask the cluster mean its own job, if they are given an id.
    assert job_id_of(job_id, session.ledger) == job_id
    assert job_id_of(f"{job_id}_2", session.ledger) == f"{job_id}_2"
    former = f"former-{job_id}-train"
    for name, where in ((former, str(local_folder / "runs" / former)), (f"old/{job_id}", "")):
        with rejected("not-found/run-of-cluster", UsageError, where):
            job_id_of(name, session.ledger)
    assert job_id_of(f"{job_id}_[1-3,7]", session.ledger) == f"{job_id}_[1-3,7]"
    assert job_id_of(f"{cluster}/{job_id}", session.ledger) == job_id
    # Another machine may have submitted the job.
    assert job_id_of(f"{cluster}/99_2", session.ledger) == "99_2"
    with rejected("file-invalid/run", UsageError, str(local_folder / "runs")):
        job_id_of("runs/", session.ledger)


def test_local_command_needs_a_collected_run(session: Session, local_folder: Path) -> None:
    """A run that has no model is not a run that was not collected."""
    job_id, _ = trained(session)
    run = local_folder / "runs" / "old-14-train"
    run.mkdir()
    (run / "run.json").write_text(json.dumps(record(14, cluster=session.ledger.cluster)))
    for name, code, shown in (
        (job_id, "not-found/collected-run", f"clusterctl collect workspace/{job_id}"),
        ("14", "option-invalid/model", "runs/old-14-train"),
    ):
        with rejected(code, UsageError, shown):
            list(run_on_this_machine(PREDICT, ChosenModel(name, Weights.BEST)))


def test_local_command_names_the_extra_with_its_packages(
    session: Session, local_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    job_id, _ = trained(session, local_folder / "runs" / "demo-1-train")
    with rejected("tool-missing/local", UsageError, "ml_dtypes", "'clusterctl[local]'"):
        list(run_on_this_machine(PREDICT, ChosenModel(job_id, Weights.BEST)))
