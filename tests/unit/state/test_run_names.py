"""The job or run that a name means: in three projects, with four clusters and equal numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import NotUpError, UsageError
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.ledger import JobEntry, Ledger, note_runs_folder
from clusterctl.state.run_names import (
    cluster_of_jobs,
    find_run,
    full_name,
    is_number,
    job_id_of,
    newest_job,
)
from clusterctl.state.workspace import Workspace
from tests.support.messages import refused
from tests.unit.runs.made import made_run

ANY = ChosenCluster()


@pytest.fixture(autouse=True)
def _no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "state").mkdir()
    monkeypatch.chdir(tmp_path / "p")
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize(
    ("name", "cluster", "job_id"),
    [
        ("12", None, "12"),
        ("m12", None, "m12"),
        ("12_3", None, "12_3"),
        ("12_[1-3,7]", None, "12_[1-3,7]"),
        ("12_[6-10%2]", None, "12_[6-10%2]"),
        ("d/12_3", "d", "12_3"),
        ("d/12_[1-3:2]", "d", "12_[1-3:2]"),
    ],
)
def test_id_is_of_the_cluster_that_it_names(
    tmp_path: Path, name: str, cluster: str | None, job_id: str
) -> None:
    Path(name).mkdir(parents=True)
    assert cluster_of_jobs([name], ANY).name == cluster
    assert is_number(name) == (cluster is None)
    assert job_id_of(name, Ledger(tmp_path / "state" / "d" / "jobs.jsonl")) == job_id
    if cluster:
        with refused("not-found/run-of-cluster", UsageError):
            job_id_of(name.replace("d/", "other/"), Ledger(tmp_path / "d" / "jobs.jsonl"))


@pytest.mark.parametrize(
    "name",
    [
        *"12_ _3 12.0 12_3_4 12-14 12,13 12_[1-3 12_[a] d/e/12 D/12 latest d/ /12 x12".split(),
        *("", "12 ", "\u0661\u0662"),
    ],
)
def test_name_that_is_no_id_and_no_folder_is_refused_with_the_right_forms(
    tmp_path: Path, name: str
) -> None:
    assert not is_number(name)
    for find in (
        lambda text: cluster_of_jobs([text], ANY),
        lambda text: job_id_of(text, Ledger(tmp_path / "d" / "jobs.jsonl")),
        find_run,
    ):
        with refused("not-found/run", UsageError, "12_3", "CLUSTER/12", "12_[1-3]"):
            find(name)


def submitted(cluster: str, job_id: str, folder: Path, token: str = "") -> JobEntry:
    """A job that was submitted from a folder to a cluster, and not collected."""
    workspace = Workspace.of(cluster)
    workspace.create()
    token = token or f"{ord(cluster[0]):04x}{int(job_id):04x}"
    entry = JobEntry(
        token=token,
        name="fit",
        user="u",
        submitted_at=float(len(job_id)),
        job_id=job_id,
        remote_dir=f"/shared/{cluster}/{job_id}",
        folder=str(folder),
    )
    return Ledger(workspace.jobs).add(entry)


SPEC = "version: 1\nname: {}\nprovider: {{type: local}}\npartitions: [{{name: a, nodes: 1}}]\n"


@pytest.fixture
def projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders p, q and r. Clusters: `lab` (cluster.yaml of q), `own`, `site`, and `old`, which
    is down.

    Job 1: of p on lab, of q on own, of r on site, and a run of old in p.
    Job 2: a run of old in p, and a job of q on site. Job 3: of r on lab. Job 4: of p on own.
    Job 5: of q on lab, and a run of lab in q with that number from before it was created again.
    """
    folders = [tmp_path / name for name in ("p", "q", "r")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    p, q, r = folders
    (q / "cluster.yaml").write_text(SPEC.format("lab"))
    for cluster, job_id, folder in (
        ("lab", "1", p),
        ("own", "1", q),
        ("site", "1", r),
        ("site", "2", q),
        ("lab", "3", r),
        ("own", "4", p),
        ("lab", "5", q),
    ):
        submitted(cluster, job_id, folder)
    made_run(p / "runs", 1, cluster="old", token="a" * 8)
    made_run(p / "runs", 2, cluster="old", token="b" * 8)
    made_run(q / "runs", 5, cluster="lab", token="c" * 8)
    for folder in (p, q):
        note_runs_folder(folder / "runs")
    return tmp_path


# Folder, name -> what it means: CLUSTER/ID, or the error. With "certain", for `cancel` (the first) and
# `runs rm` (the second), where that differs.
CASES = [
    ("p", "1", "ambiguous/job", None),
    ("p", "2", "old/2", None),
    ("p", "4", "own/4", None),
    ("p", "3", None, ("ambiguous/job", "ambiguous/job")),
    ("p", "5", None, ("ambiguous/job", "ambiguous/job")),
    ("p", "9", None, ("not-found/job", "not-found/job")),
    ("q", "1", "ambiguous/job", None),
    ("q", "2", "site/2", None),
    # cluster.yaml chooses lab, but the job is another project's.
    ("q", "3", "lab/3", ("lab/3", "ambiguous/job")),
    ("q", "4", "lab/4", ("lab/4", "ambiguous/job")),
    ("q", "5", "lab/5", None),
    ("q", "9", "lab/9", ("lab/9", "not-found/job")),
    ("r", "1", "site/1", None),
    ("r", "2", None, ("ambiguous/job", "ambiguous/job")),
    ("r", "3", "lab/3", None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_number_is_of_this_project_first_then_of_the_chosen_cluster(
    projects: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, str, str | None, tuple[str, str] | None],
) -> None:
    folder, name, meaning, certainly = case
    monkeypatch.chdir(projects / folder)

    def chosen(*, certain: bool) -> str | None:
        if meaning and meaning.startswith("old/"):
            # Its cluster is down, but its run is here.
            with refused("not-up", NotUpError, f"clusterctl runs show {meaning}"):
                cluster_of_jobs([name], ANY, certain=certain)
            return meaning
        cluster = cluster_of_jobs([name], ANY, certain=certain).name
        # ./cluster.yaml chooses it, as without a name.
        cluster = cluster or ("lab" if Path("cluster.yaml").exists() else None)
        return cluster and f"{cluster}/{name}"

    def found(*, certain: bool) -> str:
        return find_run(name, ANY, certain=certain).full_name

    def check(expected: str | None, *, certain: bool, run: str | None) -> None:
        if expected is not None and expected.endswith("/job"):
            with refused(expected, UsageError):
                chosen(certain=certain)
        else:
            assert chosen(certain=certain) == expected
        if run is None or run.endswith("/job"):
            with refused(run or "/job", UsageError) if run else pytest.raises(UsageError):
                found(certain=certain)
        else:
            assert found(certain=certain) == run

    check(meaning, certain=False, run=meaning)
    to_cancel, to_remove = certainly or (meaning, meaning)
    check(to_cancel, certain=True, run=to_remove)


def test_cluster_that_the_user_names_has_the_number(
    projects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a run of this project, and for commands that remove."""
    monkeypatch.chdir(projects / "p")
    spec = projects / "q" / "cluster.yaml"
    for chosen, cluster in ((ChosenCluster(name="site"), "site"), (ChosenCluster(spec), "lab")):
        assert cluster_of_jobs(["1"], chosen, certain=True) == chosen
        run = find_run("1", chosen, certain=True)
        assert (run.full_name, run.remote_on(cluster)) == (
            f"{cluster}/1",
            f"/shared/{cluster}/1",
        )
        assert run.remote_on("own") is None
        assert full_name("1_3", chosen) == f"{cluster}/1_3"
        assert full_name("own/1", chosen) == "own/1"
        for other in ("own/1", "demo-2-train"):
            with refused("not-found/run-of-cluster", UsageError):
                find_run(other, chosen)


def test_number_without_a_project_is_of_the_only_cluster_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else can be meant, so `cancel` takes it."""
    submitted("lab", "7", tmp_path / "q")
    assert cluster_of_jobs(["7"], ANY, certain=True).name is None
    # A command on runs says which it would be.
    with refused("ambiguous/job", UsageError, "lab/7"):
        find_run("7", ANY)


def test_number_of_an_earlier_cluster_of_that_name_is_not_cancelled(
    projects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster was created again, and its job of that number is another project's."""
    monkeypatch.chdir(projects / "p")
    made_run(projects / "p" / "runs", 3, cluster="lab", token="d" * 8)
    assert find_run("3", ANY).token == "d" * 8
    with refused("ambiguous/job", UsageError, "lab/3"):
        cluster_of_jobs(["3"], ANY, certain=True)


def test_jobs_of_several_clusters_are_refused(
    projects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(projects / "p")
    for names, cluster in (
        (["site/5"], "site"),
        (["site/5_[1-3]", "site/6"], "site"),
        (["9_1", "9_[2-3]"], None),
        ([], None),
    ):
        assert cluster_of_jobs(names, ANY).name == cluster, names
    for names in (["9", "site/5"], ["site/5", "lab/7"], ["4", "demo-5-train"]):
        with refused("ambiguous/jobs", UsageError, f"{names[0]} is of"):
            cluster_of_jobs(names, ANY)


def test_newest_job_is_of_this_project_or_of_the_named_cluster(
    projects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(projects / "p")
    submitted("own", "12", projects / "p")
    submitted("site", "123", projects / "r")
    assert newest_job(ANY).full_name == "own/12"
    assert newest_job(ChosenCluster(name="lab")).full_name == "lab/1"
    assert newest_job(ChosenCluster(name="site")).full_name == "site/123"
    monkeypatch.chdir(projects)
    with refused("not-found/job", UsageError):
        newest_job(replace(ANY))
