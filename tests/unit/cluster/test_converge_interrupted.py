"""An `up` that did not end after Slurm was told of other hardware: the next one keeps what jobs may hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clusterctl.cluster import converge
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.converge import _read
from clusterctl.cluster.hardware import hardware
from clusterctl.errors import ConfigureError
from clusterctl.hosts.probe import HostReport
from clusterctl.providers.base import Provisioned
from clusterctl.state.workspace import Workspace
from tests.support.inventories import CTL, INVENTORY, ONE, TWO
from tests.support.scripted import Step
from tests.unit.cluster.test_converge_drivers import noted
from tests.unit.cluster.test_converge_hardware import SPEC, WAS, shows
from tests.unit.cluster.test_impact import asked_in_order, sinfo, squeue

DRAIN = Step(("scontrol", "update", f"nodename={ONE}", "state=drain", "reason=clusterctl: *"))
RESUME = Step(("scontrol", "update", f"nodename={ONE}", "state=resume"))
Fails = Callable[..., str]


@pytest.fixture
def workspace(workspace: Workspace) -> Workspace:
    """Of a cluster whose nodes were configured with a card each."""
    noted(workspace, {CTL: HostReport(None, {}), ONE: WAS, TWO: WAS})
    return workspace


@pytest.fixture
def fails(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Fails:
    """What it would have of the first node in slurm.conf. Ansible fails; Slurm is asked these steps."""

    def fail(*_: object, **__: object) -> None:
        raise ConfigureError("tasks failed")

    def run(now: HostReport, *steps: Step, limit: tuple[str, ...] | None = None) -> str:
        monkeypatch.setattr(converge, "fetch_gpu_wheels", lambda *_, **__: ())
        monkeypatch.setattr(converge.ansible, "run", fail)
        views = {CTL: HostReport(None, {}), ONE: now, TWO: WAS}
        session = ClusterContext.of(SPEC, workspace=workspace)
        with asked_in_order(*steps) as slurm, session.connections:
            monkeypatch.setattr(ClusterContext, "scheduler", lambda *_, **__: slurm)
            with pytest.raises(ConfigureError):
                converge.converge(session, Provisioned(INVENTORY), views, limit=limit)
        (line,) = (
            text
            for text in (workspace.rendered / "slurm.conf").read_text().splitlines()
            if text.startswith(f"NodeName={ONE} ")
        )
        return next(word for word in line.split() if word.startswith("Gres="))

    return run


@pytest.mark.parametrize("limit", [None, (ONE,)])
def test_a_job_keeps_the_cards_that_it_was_given_meanwhile(
    fails: Fails, limit: tuple[str, ...] | None
) -> None:
    two, three = shows("t4", "t4"), shows("t4", "t4", "t4")
    assert fails(two, sinfo(ONE), DRAIN, squeue(), limit=limit) == "Gres=gpu:t4:2"
    assert fails(two) == "Gres=gpu:t4:2"  # nothing to wait for
    for now in (WAS, three):
        at_work = sinfo(ONE, state="mixed"), DRAIN, squeue((7, "train", ONE)), RESUME
        assert fails(now, *at_work, limit=limit) == "Gres=gpu:t4:2"


def test_the_hardware_of_a_host_that_was_recreated_is_forgotten(fails: Fails, workspace: Workspace) -> None:
    fails(shows("t4", "t4"), sinfo(ONE), DRAIN, squeue())
    assert _read(workspace, without=[ONE]).hardware == hardware(SPEC, INVENTORY, {TWO: WAS})
