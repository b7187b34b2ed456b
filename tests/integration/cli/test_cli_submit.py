"""What `submit` makes of its words before there is a cluster."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli import submit
from clusterctl.cli.options import run_names
from clusterctl.cli.output import Screen
from clusterctl.errors import (
    AnswerLostError,
    ClusterctlError,
    JobRefusedError,
    MachineError,
    SlurmError,
)
from clusterctl.jobs.prepare import Preparer, Submission, submit_prepared
from clusterctl.jobs.submit import SubmittedJob, Submitter
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import job_spec
from clusterctl.state.ledger import JobEntry, Ledger
from tests.support.messages import codes, condition, shows
from tests.support.played.cluster import PlayedCluster
from tests.support.verbs import Clusterctl

ROOT = Path(__file__).resolve().parents[3]

DRY_RUN = ("dry_run", "cluster", "at_most")
SWEEP = "job: train\nvariants: {small: {nodes: 1}, big: {nodes: 2}}\n"


@pytest.fixture
def sweep(cli: Clusterctl) -> str:
    (cli.cwd / "sweep.yaml").write_text(SWEEP)
    return "sweep.yaml"


def test_submit_of_a_job_answers_its_keys_and_a_list(cli: Clusterctl, sweep: str) -> None:
    for argv in (("train", "--nodes", "2", "--name", "train-big"), (sweep, "--variant", "big")):
        answer = cli("-o", "json", "submit", *argv, "--dry-run").json
        assert set(answer) == {"ok", "failures", "name", "script", "source", "jobs", *DRY_RUN}
        assert answer["jobs"] == [{key: answer[key] for key in ("name", "script", "source")}]
        assert "#SBATCH --nodes=2" in answer["script"]


def test_submit_of_several_jobs_answers_a_list_only(cli: Clusterctl, sweep: str) -> None:
    answer = cli("-o", "json", "submit", sweep, "--dry-run", "--env", "A=1").json
    assert set(answer) == {"ok", "failures", "jobs", *DRY_RUN}
    assert [job["name"] for job in answer["jobs"]] == ["train-small", "train-big"]
    assert all("A=1" in job["script"] for job in answer["jobs"])
    shown = cli("submit", sweep, "--dry-run").stdout.splitlines()
    assert [line for line in shown if line.startswith("### ")] == [
        "### train-small",
        "### train-big",
    ]


def test_submit_with_contradicting_options_is_refused(cli: Clusterctl, sweep: str) -> None:
    for argv, code in (
        ((sweep, "--follow"), "option-invalid/follow-one-job"),
        (("train", "--variant", "big"), "option-invalid/variant"),
        (("train", "--timeout", "5"), "option-invalid/option-missing"),
    ):
        assert codes(cli("-o", "json", "submit", *argv, rc=2)) == [code]


def test_submit_impossible_resources_refused_without_cluster(cli: Clusterctl) -> None:
    for argv, code, named, fix in (
        (("--partition", "tarin"), "not-found/partition", "'tarin'", ": train"),
        (("--nodes", "3"), "job-unfit/nodes", "train has 2", "--nodes 2 "),
    ):
        (failure,) = cli("-o", "json", "submit", "train", "--dry-run", *argv, rc=2).json["failures"]
        assert condition(failure) == code
        assert named in failure["cause"]
        assert fix in failure["fix"]
    (cli.cwd / "job.yaml").write_text("job: train\nvariants: {a: {}, b: {partition: tarin}}\n")
    result = cli("-o", "json", "submit", "job.yaml", "--dry-run", rc=2)
    assert "jobs" not in result.json
    assert codes(result) == ["not-found/partition"]
    assert "'tarin'" in result.stderr


def test_limit_of_arrays_is_that_of_the_spec(cli: Clusterctl) -> None:
    (cli.cwd / "a.sh").write_text("#SBATCH --array=0-1500%4\nhostname\n")
    more = "partitions: [{name: train, nodes: 2}]\nslurm: {extra: [MaxArraySize = %s]}\n"
    for limit, largest in ((None, 100_000), (1501, 1500), ("\u00b2", 100_000)):
        if limit is not None:
            text = f"version: 1\nname: demo\nprovider: {{type: local}}\n{more % limit}"
            (cli.cwd / "cluster.yaml").write_text(text)
        cli("submit", "a.sh", "--dry-run")
        cli("submit", "a.sh", "--array", f"{largest}", "--dry-run")
        argv = ("a.sh", "--array", f"1,{largest + 1}%3", "--dry-run")
        assert codes(cli("-o", "json", "submit", *argv, rc=2)) == ["job-unfit/array-index"]


def test_wait_is_written_as_a_time_limit_is(cli: Clusterctl) -> None:
    for text in ("30", "10m", "1:30:00"):
        assert codes(cli("-o", "json", "submit", "train", "--wait", "--timeout", text, rc=2)) == [
            "not-up"
        ]
    result = cli("-o", "json", "submit", "train", "--wait", "--timeout", "soon", rc=2)
    assert codes(result) == ["option-invalid/value"]
    assert "'soon'" in result.stderr


def test_schema_of_job_files(cli: Clusterctl) -> None:
    assert "variants" in cli("schema", "--job").stdout
    assert "partitions" in cli("schema").stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has learned the digits."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train = [sys.executable, "-m", "payload", "train", "--epochs", "2", "--out", folder]
    subprocess.run(train, cwd=ROOT, capture_output=True, check=True)
    return folder


@pytest.fixture
def run(cli: Clusterctl, trained: Path) -> Path:
    """A copy of the trained run, in ./runs."""
    folder = cli.cwd / "runs" / "demo-2-train"
    shutil.copytree(trained, folder)
    (cli.cwd / "digits.csv").write_text((ROOT / "examples" / "digits.csv").read_text())
    return folder


def test_predict_local_needs_no_cluster(cli: Clusterctl, run: Path) -> None:
    use = ("submit", "predict", "--run", run.name, "--local")
    output = cli(*use, "--", "digits.csv")
    assert output.stderr == ""
    classes = [line.split(": ")[1].split()[0] for line in output.stdout.splitlines()]
    assert sum(str(digit) == found for digit, found in enumerate(classes)) >= 8
    answer = cli("-o", "json", *use, "--weights", "final", "--", "digits.csv").json
    assert answer["ok"]
    assert len(answer["predictions"]) == 10
    judged = cli("-o", "json", "submit", "eval", "--run", run, "--local").json
    assert judged["accuracy"] > 0.8
    assert judged["samples"] == 359
    export = ("submit", "export", "--run", run, "--local")
    assert cli("-o", "json", *export).json["tensors"] > 0
    assert (cli.cwd / "model.safetensors").stat().st_size
    assert shows(cli(*export, rc=2).stderr, "file-exists")
    assert not (cli.home / "local").exists()


def test_local_commands_refuse_unusable_runs_with_one_error(cli: Clusterctl, run: Path) -> None:
    for argv, code, named in (
        (("sample", "--run", run), "option-invalid/model-unfit-for-command", "which takes images"),
        (
            ("predict", "--run", run, "--", "nowhere.csv"),
            "option-invalid/file-unreadable",
            "nowhere.csv cannot be",
        ),
        (("predict", "--run", "demo-2-trian", "--", "x"), "not-found/run", "mean demo-2-train?"),
        (("predict", "--run", "7", "--", "x"), "not-found/job", "7"),
        (("predict", "--run", run, "--time", "5m", "--", "x"), "options-exclusive", "--time"),
        (("predict",), "option-invalid/option-missing", "--local"),
        (
            ("predict", "--run", run, "--", "--output", "text", "digits.csv"),
            "option-invalid/output",
            "-o json",
        ),
        (("train", "--run", run), "option-invalid/option-missing", "eval, sample, predict, export"),
    ):
        output = cli("-o", "json", "submit", "--local", *argv, rc=2)
        (failure,) = output.json["failures"]
        assert condition(failure) == code, output
        assert named in f"{failure['cause']} {failure['fix']}"
        # It reads files of this machine.
        assert "put" not in output.stderr
    weights = run / "model" / "best.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert (
        "best.safetensors"
        in cli("submit", "predict", "--run", run, "--local", "--", "digits.csv", rc=2).stderr
    )


def test_arguments_are_checked_against_the_local_run(cli: Clusterctl, run: Path) -> None:
    (run / "run.json").write_text('{"token": "0123abcd"}')
    for argv, part in (
        (("sample", "--run", run), "takes images"),
        (("train", "--from-run", run, "--", "--model", "cnn"), "model cnn"),
    ):
        (failure,) = cli("-o", "json", "submit", *argv[:3], "--dry-run", *argv[3:], rc=2).json[
            "failures"
        ]
        assert condition(failure) == "option-invalid/program"
        assert part in failure["cause"]


def test_submit_sends_a_local_model_with_the_job(cli: Clusterctl, run: Path) -> None:
    output = cli(
        "-o", "json", "submit", "predict", "--run", run.name, "--dry-run", "--", "digits.csv"
    ).json
    assert "payload predict --model-folder" in output["script"]
    assert " model --weights best " in output["script"]
    assert output["source"]["files"] == 3


def test_runs_are_offered(cli: Clusterctl, run: Path) -> None:
    (run / "run.json").touch()
    (run.parent / "half").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cli.cwd)
        assert run_names(None, "") == [run.name]


@pytest.mark.parametrize(
    ("error", "answers"),
    [
        (SlurmError("Slurm rejected the job"), {"jobs": []}),
        (AnswerLostError("it is unknown whether the scheduler accepted the job"), {}),
    ],
    ids=["refused", "lost"],
)
def test_submit_that_failed_answers_that_there_is_no_job_only_if_it_is_known(
    error: ClusterctlError, answers: dict[str, Any]
) -> None:
    screen = Screen(json=True, color=False)
    with pytest.raises(type(error)), submit.telling_of_no_job(screen):
        raise error
    assert screen.partial_answer == answers


def test_submit_whose_job_can_not_be_written_down_may_have_one(
    session: Session, cluster: PlayedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has the job when its list on this machine turns out to be unwritable."""
    script = tmp_path / "a.sh"
    script.write_text("#!/bin/bash\n")
    prepared = Preparer(lambda _: None).prepare(
        session, Submission.of([job_spec(str(script), {"folder": False})])
    )
    update = Ledger.update

    def refuse(ledger: Ledger, entry: JobEntry, **fields: Any) -> JobEntry:
        if "job_id" in fields:
            raise MachineError("jobs.jsonl can't be written")
        return update(ledger, entry, **fields)

    monkeypatch.setattr(Ledger, "update", refuse)
    with pytest.raises(MachineError) as caught:
        list(submit_prepared(Submitter(session), prepared))
    assert cluster.calls("sbatch") == 1
    assert caught.value.had_side_effects


def test_submit_refused_at_second_job_names_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def submit_prepared(*_: Any) -> Iterator[SubmittedJob]:
        yield SubmittedJob("7", "train-small", "", "/shared", "token", None)
        raise JobRefusedError("Slurm rejected the job")

    monkeypatch.setattr(submit, "submit_prepared", submit_prepared)
    session: Any = None
    with pytest.raises(JobRefusedError):
        submit.submit_and_note(Screen(json=False, color=False), session, [])
    assert "clusterctl cancel 7" in capsys.readouterr().err
