"""`import clusterctl`: the verbs as functions, with what they return and raise."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import polars
import pytest

import clusterctl
import clusterctl.api
from clusterctl.cluster import down as cluster_down
from clusterctl.cluster import up as cluster_up
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.down import DownOptions, DownResult
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.cluster.up import UpOptions, UpResult
from clusterctl.errors import JobFailedError, MachineError, NotUpError, SpecError, UsageError
from clusterctl.providers.base import HostChange, HostPlan
from clusterctl.runs.collect import SelectionKeywords
from clusterctl.runs.find import FIELDS
from clusterctl.scheduler.session import Session
from clusterctl.spec.job_keywords import JobKeywords, ReplayKeywords
from clusterctl.spec.job_options import JobOptions
from clusterctl.state.workspace import Workspace
from tests.support.manual import ROOT
from tests.support.messages import condition, refused
from tests.support.played.cluster import PlayedCluster
from tests.unit.runs.made import TIME, made_run

PAGE = ROOT / "docs" / "python.md"


def script(text: str, name: str = "job.sh") -> str:
    Path(name).write_text(f"#!/bin/bash\n{text}\n")
    return name


def test_importing_it_reads_no_other_module() -> None:
    program = (
        "import sys, clusterctl; print(*(m for m in sys.modules if m.startswith('clusterctl.')))"
    )
    lines = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert lines.stdout.split() == []
    assert set(clusterctl.__all__) <= {*dir(clusterctl.api), "__version__"}
    assert clusterctl.__all__ == clusterctl.api.__all__
    assert all(getattr(clusterctl, name) for name in clusterctl.__all__)
    with pytest.raises(AttributeError) as caught:
        clusterctl.cluster_of  # noqa: B018
    assert caught.value.name == "cluster_of"


def test_job_has_the_options_of_the_command_line() -> None:
    assert set(JobKeywords.__annotations__) == set(JobOptions.model_fields) - {"args"}


def public_functions() -> list[Callable[..., object]]:
    functions = [getattr(clusterctl, name) for name in clusterctl.__all__ if name.islower()]
    functions += [
        one for kind in (clusterctl.Cluster, clusterctl.Job) for one in vars(kind).values()
    ]
    return [one for one in functions if inspect.isfunction(one) and one.__name__[0] != "_"]


def test_page_names_all_functions() -> None:
    page = PAGE.read_text()
    names = {one.__name__ for one in public_functions()}
    assert names >= {"frame", "submit_file", "follow"}
    assert {name for name in names if not re.search(rf"`{name}\(", page)} == set()


KINDS = {
    f"Unpack[{kind.__name__}]": kind for kind in (JobKeywords, ReplayKeywords, SelectionKeywords)
}


def documented(function: Callable[..., object]) -> set[str]:
    """Return the names that the docstring quotes, or explains in an entry ``a, b: text``.

    The entry ``options: a, b`` is also about a and b.
    """
    text = " ".join((function.__doc__ or "").split())
    names = r"[a-z_]+(?:, [a-z_]+)*"
    entries = re.findall(rf"(?:^|[.)] )({names}):(?: ({names})[:.])?", text)
    quoted = re.findall(r"``([a-z_]+)``", text)
    return {*quoted, *(name for entry in entries for words in entry for name in words.split(", "))}


def test_docstrings_name_all_options() -> None:
    """Keyword arguments, and those of a TypedDict unless the docstring refers to another
    function's.
    """
    missing = []
    for function in public_functions():
        parameters = inspect.signature(function).parameters.values()
        words = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        for kind in (KINDS[p.annotation] for p in parameters if p.kind is p.VAR_KEYWORD):
            refers = re.search(r"options: those of `+\w|options of ``", function.__doc__ or "")
            words |= set() if refers else {*kind.__annotations__}
        missing += [(function.__name__, word) for word in words - documented(function)]
    assert missing == []


def test_api_submits_waits_and_collects_a_job(
    played_session: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    cluster = clusterctl.Cluster("cluster.yaml", report=lines.append)
    program = script('echo "got $1 $A"; echo oops >&2; echo \'{"loss": 0.5}\' >metrics.jsonl')
    job = cluster.submit(program, [1], env={"A": "a"}, tag=["first"], time=5)
    assert (job.id, job.name) == ("1", "job")
    assert "#SBATCH --time=00:05:00\n" in Path(job.dir, "job.sbatch").read_text()
    (ended,) = job.wait(timeout_s=60)
    assert (ended.id, ended.state) == ("1", "COMPLETED")
    assert job.logs() == "got 1 a\noops\n"
    assert job.logs(stream="stderr") == "oops\n"
    assert job.diagnosis() is None
    run = job.collect()
    assert run.folder == Path("runs/demo-1-job").absolute()
    assert (run.run.tags, run.metrics["loss"].last) == (("first",), 0.5)
    assert [one.id for one in cluster.jobs()] == [one.id for one in cluster.jobs("1")] == ["1"]
    assert cluster.job("1") == cluster.job(1) == cluster.job("demo/1") == job
    assert [one.id for one in cluster.jobs(1)] == ["1"]
    assert cluster.collect() == ()
    assert clusterctl.named_run("1") == run
    assert any(line.startswith("job 1 (job) COMPLETED") for line in lines)
    assert capfd.readouterr() == ("", ""), "what is told is told to the report"


def test_job_that_fails_raises_what_the_command_line_shows(
    played_session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = clusterctl.Cluster()
    job = cluster.submit(script("echo begun; printf 'no newline'; exit 3"))
    lines: list[str] = []
    with refused("job-failed", JobFailedError, "n1") as raised:
        job.follow(lines.append)
    assert raised.value.fix
    assert lines == ["begun", "no newline"]
    with refused("job-failed", clusterctl.ClusterctlError):
        job.wait()
    cause = job.diagnosis()
    assert cause is not None
    assert condition(cause) == "exit-code"
    with pytest.raises(JobFailedError):
        job.follow()
    assert capsys.readouterr().out == "begun\nno newline\n"


def test_job_is_cancelled(played_session: Session, cluster: PlayedCluster) -> None:
    job = clusterctl.Cluster().submit(script("sleep 60"))
    job.cancel()
    assert [one.state for one in job.info()] == ["CANCELLED"]


def test_run_is_replayed_with_changes(played_session: Session, cluster: PlayedCluster) -> None:
    demo = clusterctl.Cluster()
    first = demo.submit(script('echo "{\\"loss\\": 1, \\"step\\": 1}" >metrics.jsonl'), ["--lr", 1])
    first.wait()
    run = first.collect()
    again = demo.replay(run, {"lr": 0.5}, tag=["again"])
    again.wait()
    replayed = again.collect()
    assert (replayed.config, replayed.run.tags) == ({"lr": 0.5}, ("again",))
    assert replayed.run.replay_of == run.run.token
    with refused("not-found/name", UsageError, "nodes"):
        demo.replay(run, nodes=2)  # type: ignore[call-arg]


def test_sweep_and_a_job_file(played_session: Session, cluster: PlayedCluster) -> None:
    demo = clusterctl.Cluster()
    (text,) = demo.render(
        "train", ["--epochs", 1], nodes=2, sweep={"grid": {"lr": [0.1, 0.01], "seed": range(3)}}
    )
    assert "#SBATCH --array=0-5" in text
    assert "--epochs 1" in text
    args = {
        "epochs": 1,
        "profile": True,
        "amp": False,
        "save": None,
        "augment": ["a", "b"],
        "-x": 0.5,
    }
    (text,) = demo.render(script("true"), args)
    assert "job.sh --epochs 1 --profile --augment a b -x 0.5" in text
    assert played_session.ledger.entries() == (), "rendered only"
    script("true")
    Path("jobs.yaml").write_text("job: job.sh\nvariants: {a: {nodes: 1}, b: {nodes: 2}}\n")
    assert [job.name for job in demo.submit_file("jobs.yaml", note="both")] == ["job-a", "job-b"]
    (one,) = demo.submit_file("jobs.yaml", variants=["b"])
    assert (one.id, one.name) == ("3", "job-b")
    with refused("option-invalid/job-file", UsageError):
        demo.submit("jobs.yaml")


def test_api_with_wrong_arguments_raises_usage_error(played_session: Session) -> None:
    demo = clusterctl.Cluster()
    for call, code in (
        (lambda: demo.submit("train", nods=2), "not-found/name"),  # type: ignore[call-arg]
        (lambda: demo.submit("train", wait=True), "not-found/name"),  # type: ignore[call-arg]
        (lambda: demo.submit("train", nodes=0), "option-invalid/out-of-range"),
        (lambda: demo.submit("train", env={"B": "x", "A": 1}), "option-invalid/wrong-type"),  # type: ignore[dict-item]
        (
            lambda: demo.submit("train", sweep={"grid": {"lr": [0.1]}}, array="1-2"),
            "option-invalid/sweep-with-array",
        ),
        (lambda: demo.rehearse("train", faults="rank-kiled"), "not-found/name"),
        (demo.down, "confirmation-needed"),
        (lambda: clusterctl.list_runs("lr ? 2"), "option-invalid/condition"),
        (lambda: clusterctl.named_run("nowhere"), "not-found/run"),
    ):
        with pytest.raises(UsageError) as raised:
            call()
        assert condition(raised.value) == code
    with pytest.raises(NotUpError):
        clusterctl.Cluster(name="other").status()
    Path("wrong.yaml").write_text("version: 1\nname: demo\npartitons: []\n")
    with refused("unknown-key", SpecError):
        clusterctl.Cluster("wrong.yaml").validate()


def test_api_up_and_down_need_yes_if_they_destroy(
    played_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    removal = HostChange(name="demo-train-2", action="remove", what="", why="")
    given: list[object] = []

    def up(session: ClusterContext, options: UpOptions) -> UpResult:
        given.append(options)
        session.reporter.step("provision")
        plan = cluster_up.Plan(hosts=HostPlan((removal,)))
        options.approve(plan)
        raise MachineError("yes", code="approved")

    def down(runner: PhaseRunner, options: DownOptions) -> DownResult:
        given.append((runner.workspace, options.discard_runs))
        return DownResult()

    monkeypatch.setattr(cluster_up, "up", up)
    monkeypatch.setattr(cluster_down, "down", down)
    lines: list[str] = []
    demo = clusterctl.Cluster("cluster.yaml", report=lines.append)
    with refused("confirmation-needed", UsageError, "demo-train-2"):
        demo.up(reconfigure=True)
    assert any("provision" in line for line in lines)
    with refused("approved", MachineError):
        demo.up(yes=True, limit=["gpu[1-2]"])
    assert [(one.reconfigure, one.limit) for one in given] == [
        (True, None),
        (False, ("gpu1", "gpu2")),
    ]
    assert demo.down(yes=True, discard_run=["1"]) == DownResult()
    assert given[2] == (Workspace.of("demo"), ["1"])


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for number, lr in enumerate(("0.1", "0.01"), 1):
        metrics = [{"loss": 1 / step} for step in (1, number + 1)]
        made_run(tmp_path / "runs", number, args=["--lr", lr], metrics=metrics, tags=["base"])
    return tmp_path / "runs"


def test_runs_are_chosen_and_compared(runs: Path) -> None:
    assert [run.shown for run in clusterctl.list_runs()] == ["demo-2-train", "demo-1-train"]
    (first, second) = clusterctl.list_runs("lr>=1e-3", sort="lr", folders=[runs])
    assert (first.config, first.value("loss")) == ({"lr": 0.01}, 1 / 3)
    assert clusterctl.list_runs(["lr>0.05", "loss<1"], tags=["base"]) == [second]
    assert next((one.key, one.a, one.b) for one in clusterctl.compare(second, first)) == (
        "lr",
        0.1,
        0.01,
    )


def test_runs_are_reported(runs: Path) -> None:
    first, second = clusterctl.list_runs()
    assert clusterctl.report(first).title == "demo-2-train"
    page = clusterctl.report([first, second])
    assert "lr" in " ".join(page.verdict)
    assert page.as_html().startswith("<!doctype html>")


def test_runs_are_a_data_frame(runs: Path) -> None:
    table = clusterctl.frame(clusterctl.list_runs())
    varying = [*"run lr loss loss.min job submitted started ended".split()]
    assert table.columns[: len(varying)] == varying
    assert {*table.columns} == {*FIELDS, "lr", "loss", "loss.min", "loss.max"}
    shown = repr(clusterctl.named_run("demo/2"))
    assert len(shown) < 80
    assert all(word in shown for word in ("demo-2-train", "COMPLETED", "loss", "0.3333"))
    best = table.filter(polars.col("loss.min") < 0.4).row(0, named=True)
    assert (best["run"], best["lr"], best["loss.max"], best["nodes"]) == (
        "demo-2-train",
        0.01,
        1.0,
        1,
    )
    assert best["submitted"] == datetime.fromtimestamp(TIME + 2, UTC)
    assert table.schema["lr"] == polars.Float64
    assert table.schema["job"] == polars.String
    empty = clusterctl.frame([])
    assert (empty.height, empty.columns) == (0, [*FIELDS])
    assert [empty.schema[name] for name in FIELDS] == [table.schema[name] for name in FIELDS]


def test_columns_of_one_name_and_of_several_kinds(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    config = {"nodes": 3, "loss": "mse", "lr": 0.1, "depth": 2, "amp": True, "huge": 10**400}
    made_run(out, 1, config=config, metrics=[{"loss": 0.5}])
    other = {"lr": 1, "depth": "auto", "loss": "l1", "huge": 1, "amp": None}
    made_run(
        out,
        2,
        config=other,
        metrics=[{"nodes": 4.0, "loss.min": 7.0}],
        submit_time=1 << 40,
        elapsed_s=None,
    )
    second, first = clusterctl.frame(clusterctl.list_runs(folders=[out])).to_dicts()
    assert (first["nodes"], first["config.nodes"], second["metric.nodes"]) == (1, 3, 4.0)
    assert (first["loss"], first["metric.loss"], second["loss"]) == ("mse", 0.5, "l1")
    assert (first["lr"], second["lr"]) == (0.1, 1.0)
    assert (first["depth"], second["depth"]) == ("2", "auto")
    assert (first["amp"], second["amp"], first["huge"], second["huge"]) == (True, None, None, 1.0)
    assert (second["submitted"], second["elapsed"]) == (None, None)


def test_data_frame_without_polars_names_the_extra(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MachineError) as raised:
        clusterctl.frame([])
    assert raised.value.fix == "pip install 'clusterctl[frame]'"
