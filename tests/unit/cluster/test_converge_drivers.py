"""`up` installs drivers before it probes GPUs, so that the same `up` knows which hosts get CuPy."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator
from dataclasses import replace

import pytest

from clusterctl.cluster import converge
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.converge import (
    ClusterRecord,
    _install_slurmd,
    inputs_of,
    wanted_of,
)
from clusterctl.cluster.hardware import gpus_file, hardware
from clusterctl.errors import ConfigureError
from clusterctl.hosts.gpus import Driver
from clusterctl.hosts.probe import HostReport, Wanted
from clusterctl.providers.base import Provisioned
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import HostStep
from tests.support.inventories import CTL, INVENTORY, ONE, TWO
from tests.support.scripted import ScriptedTransport, Step, use_hosts
from tests.unit.cluster.test_converge_hardware import SPEC, WAS, shows
from tests.unit.cluster.test_impact import sinfo, squeue

LACKS = shows(cards=1)
Install = Callable[..., dict[str, HostReport]]
LIMITS: list[list[str]] = []  # of each installation


def installs(*_: object, hosts: Collection[str]) -> Generator[HostStep, None, None]:
    LIMITS.append([*hosts])
    yield from ()


def use_ansible(monkeypatch: pytest.MonkeyPatch, run: Callable[..., object]) -> None:
    """Call a function instead of starting a playbook."""
    monkeypatch.setattr(converge.ansible, "run", run)


@pytest.fixture
def installed(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install slurmd and drivers, and return the reports of the hosts. Each installation succeeds.

    lacking: hosts on which packages are missing.
    """
    LIMITS.clear()

    def run(
        inventory: Inventory,
        views: dict[str, HostReport],
        limit: tuple[str, ...] = (CTL, ONE, TWO),
        lacking: tuple[str, ...] = (),
    ) -> dict[str, HostReport]:
        monkeypatch.setattr(ClusterContext, "probe", lambda _, __, hosts: dict.fromkeys(hosts, WAS))
        marks = {host: "" if host in lacking else "installed" for host in inventory.names}
        use_hosts(monkeypatch, lambda host: ScriptedTransport([Step(("sh", "..."), marks[host])]))
        use_ansible(monkeypatch, installs)
        session = ClusterContext.of(SPEC, workspace=workspace)
        with session.connections:
            return {**_install_slurmd(session, inventory, views, limit)}

    return run


def record_up(workspace: Workspace, views: dict[str, HostReport]) -> Wanted:
    rendered = inputs_of(SPEC, INVENTORY, workspace, views)
    record = ClusterRecord(inputs=rendered.inputs, hardware=hardware(SPEC, INVENTORY, views))
    return Wanted(cluster=record.model_dump(mode="json"))


@pytest.mark.parametrize("scheduler", ["slurm", "none"])
def test_new_driver_shows_its_gpus_to_the_same_up(
    installed: Install, workspace: Workspace, scheduler: str
) -> None:
    inventory = replace(INVENTORY, scheduler=scheduler)
    views = installed(inventory, {CTL: HostReport(None, {}), ONE: LACKS, TWO: LACKS})
    assert [name for name, view in views.items() if view.driver.cards] == [ONE, TWO]
    assert json.loads(gpus_file(SPEC, inventory, views))[ONE]["cupy"]


def test_new_driver_beside_a_new_node_shows_its_gpus_to_the_same_up(installed: Install) -> None:
    new = replace(LACKS, facts=None)
    views = installed(INVENTORY, {CTL: HostReport(None, {}), ONE: LACKS, TWO: new})
    assert views[ONE] == views[TWO] == WAS


def test_gpu_added_is_a_change_unless_a_reboot_is_pending(
    installed: Install, workspace: Workspace
) -> None:
    before = {CTL: HostReport(None, {}), ONE: LACKS, TWO: shows()}
    ended = record_up(workspace, before)
    before[CTL] = HostReport(None, {}, wanted=ended)
    assert installed(INVENTORY, before)[ONE] == LACKS
    views = installed(INVENTORY, {**before, TWO: LACKS})
    assert (views[TWO], views[CTL].driver) == (WAS, Driver())


def test_host_outside_limit_gets_no_driver(installed: Install) -> None:
    views = installed(INVENTORY, {CTL: HostReport(None, {}), ONE: LACKS, TWO: LACKS}, limit=(ONE,))
    assert (views[ONE], views[TWO]) == (WAS, LACKS)


def test_hosts_without_the_installation_are_installed_in_one_run(installed: Install) -> None:
    new = replace(WAS, facts=None)
    ctl = HostReport(None, {})
    lacking = (CTL, ONE, TWO)
    views = installed(INVENTORY, {CTL: ctl, ONE: new, TWO: new}, lacking=lacking)
    assert (views[CTL], views[ONE], views[TWO]) == (ctl, WAS, WAS)
    installed(INVENTORY, {CTL: ctl, ONE: new, TWO: WAS}, lacking=lacking, limit=(ONE,))
    installed(INVENTORY, {CTL: ctl, ONE: new, TWO: WAS}, lacking=(ONE,))
    # Site.yml does it, nobody waits.
    installed(INVENTORY, {CTL: ctl, ONE: WAS, TWO: WAS}, lacking=(CTL,))
    installed(
        replace(INVENTORY, baked=True),
        {CTL: ctl, ONE: new, TWO: WAS},
        lacking=lacking,
    )
    assert LIMITS == [[CTL, ONE, TWO], [CTL, ONE], [ONE], [ONE]]


DRAIN = Step(("scontrol", "update", f"nodename={ONE}", "state=drain", "reason=clusterctl: *"))
RESUME = Step(("scontrol", "update", f"nodename={ONE}", "state=resume"))
RECORD = Step(("sudo", "-n", "python3", "..."))
Fails = Callable[..., tuple[str, Wanted]]


@pytest.fixture
def fails(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Run an `up` that fails in Ansible. Return the GPUs of the first node in slurm.conf, and the
    controller's record afterwards.

    The node had one GPU. now: its present report. steps: the commands to Slurm. wanted: the record
    before. Default: that of an `up` which has ended.
    """
    ended = record_up(workspace, {CTL: HostReport(None, {}), ONE: WAS, TWO: WAS})

    def fail(*_: object, **__: object) -> None:
        raise ConfigureError("tasks failed")

    def run(
        now: HostReport,
        *steps: Step,
        limit: tuple[str, ...] | None = None,
        wanted: Wanted = ended,
    ) -> tuple[str, Wanted]:
        use_ansible(monkeypatch, fail)
        views = {CTL: HostReport(None, {}, wanted=wanted), ONE: now, TWO: WAS}
        software = SPEC.software.model_copy(update={"cupy": False})
        spec = SPEC.model_copy(update={"software": software})
        session = ClusterContext.of(spec, workspace=workspace)
        slurm = ScriptedTransport([*steps, RECORD])
        use_hosts(monkeypatch, lambda _: slurm)
        with session.connections, pytest.raises(ConfigureError):
            converge.converge(session, Provisioned(INVENTORY), views, limit=limit)
        assert slurm.left == ()
        (line,) = (
            text
            for text in (workspace.rendered / "slurm.conf").read_text().splitlines()
            if text.startswith(f"NodeName={ONE} ")
        )
        (request,) = json.loads(slurm.calls[-1].argv[-1])
        left = Wanted(cluster=json.loads(request)["wanted"]["cluster"])
        return next(word for word in line.split() if word.startswith("Gres=")), left

    return run


@pytest.mark.parametrize("limit", [None, (ONE,)])
def test_failed_converge_keeps_the_gpus_of_a_running_job(
    fails: Fails, limit: tuple[str, ...] | None
) -> None:
    two = shows("t4", "t4")
    three = shows("t4", "t4", "t4")
    gpus, wanted = fails(two, sinfo(ONE), DRAIN, squeue(), limit=limit)
    assert gpus == "Gres=gpu:t4:2"
    gpus, wanted = fails(two, wanted=wanted)  # nothing to wait for
    assert gpus == "Gres=gpu:t4:2"
    for now in (WAS, three):
        at_work = sinfo(ONE, state="mixed"), DRAIN, squeue((7, "train", ONE)), RESUME
        gpus, wanted = fails(now, *at_work, limit=limit, wanted=wanted)
        assert gpus == "Gres=gpu:t4:2"


def test_hardware_of_a_recreated_host_is_forgotten(fails: Fails) -> None:
    _, left = fails(shows("t4", "t4"), sinfo(ONE), DRAIN, squeue())
    reports = {CTL: HostReport(None, {}, wanted=left)}
    wanted = wanted_of(INVENTORY, reports, recreated=[ONE])
    assert wanted.cluster.hardware == hardware(SPEC, INVENTORY, {TWO: WAS})
