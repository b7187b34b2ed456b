"""What `collect` and `down` say of files that stay behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterctl.cli import collect as collecting
from clusterctl.cli.collect import not_brought_home
from clusterctl.cli.run import app
from clusterctl.scheduler.session import Session
from clusterctl.spec.models import PROVIDERS
from clusterctl.state import inventory
from clusterctl.state.ledger import RunRecord
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Clock
from tests.support.messages import shows
from tests.support.played.cluster import PlayedCluster, submitted
from tests.unit.runs.made import made_run


def run(workspace: Workspace, *skipped: tuple[str, str]) -> RunRecord:
    passed_over = [{"path": path, "reason": reason} for path, reason in skipped]
    return made_run(workspace.root.parent / "runs", 42, skipped=passed_over)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    one = Workspace(tmp_path / "demo")
    one.create()
    return one


def test_a_whole_run_needs_no_word(workspace: Workspace) -> None:
    assert not_brought_home(run(workspace)) == ""


@pytest.mark.parametrize(
    ("provider", "keep", "said"),
    [
        ("local", False, "they are deleted with the cluster"),
        ("local", True, "they stay on the kept storage"),
        ("onprem", True, "they stay on your machines"),
    ],
)
def test_what_becomes_of_it_depends_on_the_cluster(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, provider: str, said: str, *, keep: bool
) -> None:
    monkeypatch.setattr(inventory, "inventory_of", lambda _: SimpleNamespace(traits=PROVIDERS[provider]))
    monkeypatch.setattr(inventory, "keeps_storage", lambda _: keep)
    assert collecting._what_becomes(workspace) == said


def test_uncollected_reasons_show_first_file_and_count(workspace: Workspace) -> None:
    assert not_brought_home(
        run(
            workspace,
            ("checkpoints", "checkpoints stay on the cluster"),
            ("d/best.pt", "a symbolic link"),
            ("d/last.pt", "a symbolic link"),
            ("weights", "Permission denied"),
            ("d/first.pt", "a symbolic link"),
        ),
    ) == (
        "job 42 (train): not collected: checkpoints (checkpoints stay on the cluster), "
        "d/best.pt and 2 more (a symbolic link), weights (Permission denied)"
    )


@pytest.mark.parametrize(("words", "seconds"), [("collect --all", 5), ("jobs", 10), ("cancel 1", 10)])
def test_a_stopped_slurmctld_is_waited_for_once_and_not_for_long(
    here: Session,
    cluster: PlayedCluster,
    tmp_path: Path,
    set_clock: Callable[[Clock], None],
    capsys: pytest.CaptureFixture[str],
    *,
    words: str,
    seconds: int,
) -> None:
    submitted(here, tmp_path, "true")
    with cluster.state() as state:
        state["away"] = 1000
    slept: list[float] = []
    set_clock(Clock(lambda: sum(slept), slept.append))
    app(words.split(), prog_name="clusterctl", standalone_mode=False)
    assert sum(slept) == pytest.approx(seconds)
    said = capsys.readouterr().err
    assert shows(said, "slurm-away")
    assert f"squeue for {seconds}" in said
    assert "`clusterctl up`" in said
