"""What a name of a job or run says by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.state.ledger import Ledger
from clusterctl.state.run_names import cluster_of, is_id, job_id_of
from tests.support.messages import refused


@pytest.fixture(autouse=True)
def _no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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
    (tmp_path / name).mkdir(parents=True)
    assert (cluster_of(name), is_id(name)) == (cluster, cluster is None)
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
    assert not is_id(name)
    for find in (cluster_of, lambda text: job_id_of(text, Ledger(tmp_path / "d" / "jobs.jsonl"))):
        with refused("not-found/run", UsageError, "12_3", "CLUSTER/12", "12_[1-3]"):
            find(name)
