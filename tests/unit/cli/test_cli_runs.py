"""What `collect` and `down` say of files that stay behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.cli.collect import not_brought_home
from clusterctl.cli.run import app
from clusterctl.scheduler import slurm
from clusterctl.scheduler.session import Session
from clusterctl.state.ledger import RunRecord
from clusterctl.util.progress import Clock
from tests.support.played.cluster import PlayedCluster, submitted


def run(*skipped: tuple[str, str]) -> RunRecord:
    return RunRecord.model_validate(
        {
            "token": "25857b14",
            "cluster": "demo",
            "job_id": "42",
            "name": "train",
            "user": "ada",
            "partition": "train",
            "account": "default",
            "state": "COMPLETED",
            "final": True,
            "tasks": (),
            "nodes": ("demo-train-1",),
            "submit_time": 1,
            "start_time": 2,
            "end_time": 3,
            "elapsed_s": 1,
            "collected_at": 4.0,
            "remote_dir": "/shared/home/ada/clusterctl/jobs/train-25857b14",
            "files": 1,
            "bytes": 1,
            "skipped": [{"path": path, "reason": reason} for path, reason in skipped],
        }
    )


def test_a_whole_run_needs_no_word() -> None:
    assert not_brought_home(run()) == ""


def test_each_reason_is_named_with_its_first_file_and_how_many_more() -> None:
    assert not_brought_home(
        run(
            ("checkpoints", "checkpoints stay on the cluster"),
            ("d/best.pt", "a symbolic link"),
            ("d/last.pt", "a symbolic link"),
            ("weights", "Permission denied"),
            ("d/first.pt", "a symbolic link"),
        )
    ) == (
        "of job 42 (train) was not collected: checkpoints (checkpoints stay on the cluster), "
        "d/best.pt and 2 more (a symbolic link), weights (Permission denied)"
    )


@pytest.mark.parametrize(("words", "seconds"), [("collect --all", 5), ("jobs", 10), ("cancel 1", 10)])
def test_a_stopped_slurmctld_is_waited_for_once_and_not_for_long(
    here: Session,
    cluster: PlayedCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    words: str,
    seconds: int,
) -> None:
    submitted(here, tmp_path, "true")
    with cluster.state() as state:
        state["away"] = 1000
    slept: list[float] = []
    monkeypatch.setattr(slurm, "Clock", lambda: Clock(lambda: sum(slept), slept.append))
    app(words.split(), prog_name="clusterctl", standalone_mode=False)
    assert sum(slept) == pytest.approx(seconds)
    said = capsys.readouterr().err
    assert f"error: Slurm's controller has not answered squeue for {seconds} s" in said
    assert "fix: `clusterctl up` starts slurmctld" in said
