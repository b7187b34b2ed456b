"""The console script as it is installed, run in an empty folder with a state folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli.main import app
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.sites import kinds as sites
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.state.inventory import applied_spec, job_settings
from clusterctl.state.ledger import Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport import ssh
from clusterctl.util.progress import Clock
from tests.support.agent_project import Project
from tests.support.inventories import host_of, inventory_of
from tests.support.local_transport import LocalTransport
from tests.support.played.cluster import SPEC, PlayedCluster
from tests.support.verbs import Clusterctl
from tests.unit.runs.made import made_run

Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def cli(tmp_path: Path) -> Clusterctl:
    """`cli("validate")`."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    return Clusterctl(tmp_path / "home", cwd)


@pytest.fixture
def played_session(
    cluster: PlayedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Session:
    """The played cluster as verbs find it: it is noted as up, and what would go over SSH is run
    here.
    """
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TERM", "xterm-256color")
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "cluster.yaml").write_text(SPEC)
    workspace = Workspace.of("demo")
    workspace.create()
    workspace.spec.write_text(SPEC)
    hosts = (host_of("demo-ctl", "controller"), host_of("demo-train-1", partition="train"))
    settings = job_settings(applied_spec(workspace))
    inventory = inventory_of(cluster="demo", hosts=hosts, **settings)
    workspace.inventory.write_text(inventory.text)
    monkeypatch.setattr(ssh, "SSHTransport", lambda *_, **__: LocalTransport())
    return Session(cluster.session().site, SlurmClient(LocalTransport()), Ledger(workspace.jobs))


@pytest.fixture
def answer(played_session: Session, capsys: pytest.CaptureFixture[str]) -> Answer:
    """`answer("submit", "a.sh", rc=2)`: what a verb answers with `-o json`, on the played cluster."""

    def run(*words: str, rc: int = 0) -> dict[str, Any]:
        found = app(["-o", "json", *words], prog_name="clusterctl", standalone_mode=False) or 0
        output = capsys.readouterr()
        assert found == rc, output
        return dict(json.loads(output.out))

    return run


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], None]:
    """`set_clock(Clock(sleep=...))`: the clock of the Slurm that verbs find."""

    def set_clock(clock: Clock) -> None:
        class Clocked(SlurmClient):
            def __init__(self, *given: Any, **more: Any) -> None:
                super().__init__(*given, clock=clock, **more)

        monkeypatch.setattr(sites, "SlurmClient", Clocked)

    return set_clock


@pytest.fixture
def project(
    cluster: PlayedCluster, tmp_path: Path, played_session: Session, monkeypatch: pytest.MonkeyPatch
) -> Project:
    project = Project(cluster, tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(project.config.parents[1]))
    monkeypatch.setenv("PYTHONPATH", str(project.custom))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2hunter2")
    return project


@pytest.fixture
def cli_with_seeds(cli: Clusterctl) -> Clusterctl:
    """Two rates with three seeds each; the last run diverged."""
    for number in range(6):
        last = float("nan") if number == 5 else (number + 1) / 8
        lines = [{"step": step, "loss": 2.0 if step == 1 else last} for step in (1, 2)]
        args = ["--lr", f"1e-{number // 3 + 4}", "--seed", str(number % 3)]
        made_run(cli.cwd / "runs", number + 1, args=args, metrics=lines)
    (cli.cwd / "cluster.yaml").write_text(
        "version: 1\nname: demo\nprovider: {type: local}\npartitions: [{name: a, nodes: 1}]\n"
    )
    return cli
