"""What `submit` makes of its words before there is a cluster."""

from __future__ import annotations

import pytest

from tests.support.verbs import Clusterctl

SWEEP = "job: train\nvariants: {small: {nodes: 1}, big: {nodes: 2}}\n"


@pytest.fixture
def sweep(cli: Clusterctl) -> str:
    (cli.cwd / "sweep.yaml").write_text(SWEEP)
    return "sweep.yaml"


def test_one_job_is_told_by_itself_and_in_the_list(cli: Clusterctl, sweep: str) -> None:
    for argv in (("train", "--nodes", "2", "--name", "train-big"), (sweep, "--variant", "big")):
        answer = cli("-o", "json", "submit", *argv, "--dry-run").json
        assert set(answer) == {"ok", "failures", "name", "script", "source", "jobs"}
        assert answer["jobs"] == [{key: answer[key] for key in ("name", "script", "source")}]
        assert "#SBATCH --nodes=2" in answer["script"]


def test_several_are_told_in_the_list_alone(cli: Clusterctl, sweep: str) -> None:
    answer = cli("-o", "json", "submit", sweep, "--dry-run", "--env", "A=1").json
    assert set(answer) == {"ok", "failures", "jobs"}
    assert [job["name"] for job in answer["jobs"]] == ["train-small", "train-big"]
    assert all("A=1" in job["script"] for job in answer["jobs"])
    shown = cli("submit", sweep, "--dry-run").stdout.splitlines()
    assert [line for line in shown if line.startswith("### ")] == ["### train-small", "### train-big"]


def test_what_contradicts_itself_is_refused(cli: Clusterctl, sweep: str) -> None:
    assert "--follow shows the output of one job" in cli("submit", sweep, "--follow", rc=2).stderr
    assert "has no variants" in cli("submit", "train", "--variant", "big", rc=2).stderr
    assert "--timeout bounds a wait" in cli("submit", "train", "--timeout", "5", rc=2).stderr


def test_what_no_partition_has_is_refused_before_there_is_a_cluster(cli: Clusterctl) -> None:
    for argv, why, fix in (
        (("--partition", "tarin"), "there is no partition 'tarin'", "--partition can be: train"),
        (("--nodes", "3"), "partition train has 2", "--nodes 2 or less"),
    ):
        said = cli("submit", "train", "--dry-run", *argv, rc=2).stderr
        assert why in said
        assert fix in said
    (cli.cwd / "job.yaml").write_text("job: train\nvariants: {a: {}, b: {partition: tarin}}\n")
    answer = cli("-o", "json", "submit", "job.yaml", "--dry-run", rc=2).json
    assert "jobs" not in answer
    assert "no partition 'tarin'" in answer["failures"][0]["cause"]


def test_a_wait_is_written_as_a_time_limit_is(cli: Clusterctl) -> None:
    for text in ("30", "10m", "1:30:00"):
        assert "is not up" in cli("submit", "train", "--wait", "--timeout", text, rc=2).stderr
    assert "is not a time" in cli("submit", "train", "--wait", "--timeout", "soon", rc=2).stderr


def test_problems_of_a_job_file_are_one_failure_each(cli: Clusterctl) -> None:
    (cli.cwd / "bad.yaml").write_text("job: train\nnodes: 0\ntiem: 5\n")
    failures = cli("-o", "json", "submit", "bad.yaml", "--dry-run", rc=2).json["failures"]
    assert [failure["cause"].split(":")[:3] for failure in failures] == [
        ["bad.yaml", "2", "8"],
        ["bad.yaml", "3", "1"],
    ]


def test_the_schema_of_job_files(cli: Clusterctl) -> None:
    assert "variants" in cli("schema", "--job").stdout
    assert "partitions" in cli("schema").stdout
