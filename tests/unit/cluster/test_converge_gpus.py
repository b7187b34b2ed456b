"""Which hosts get CuPy, and the errors of `up` for nodes that lack the GPUs of their partition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.converge import render
from clusterctl.cluster.hardware import (
    cgroup_notes,
    fetch_gpu_wheels,
    gpus_file,
    reject_missing_gpus,
)
from clusterctl.cluster.verify import verify
from clusterctl.errors import Failure, UnreachableError, VerifyError
from clusterctl.hosts.checks import Finding
from clusterctl.hosts.gpus import Driver, Gpu
from clusterctl.hosts.probe import HostReport, NodeFacts
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.wheelhouse import new_wheelhouse
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, Transport
from clusterctl.transport.ssh import Connections
from clusterctl.util.assets import gpu_lock
from clusterctl.util.process import Result
from tests.support.inventories import CTL, INVENTORY, ONE, TWO
from tests.support.messages import condition, refused, shows
from tests.support.scripted import ScriptedTransport, Step, without_sudo
from tests.unit.cluster.specs import spec_of
from tests.unit.cluster.test_impact import sinfo
from tests.unit.hosts.test_doctor import WELL, answer

T4 = Driver(1, (Gpu("t4", 0, uuid="GPU-1"),))
PARTS = Driver(
    1, (Gpu("1g.10gb", 0, caps=(1, 2), uuid="MIG-1"), Gpu("1g.10gb", 0, caps=(3, 4), uuid="MIG-2"))
)


def spec(*, rented: bool = False, **software: Any) -> ClusterSpec:
    hosts = {CTL: "10.0.0.2", ONE: "10.0.0.3", TWO: "10.0.0.4"}
    partition = {"name": "train", "gpus": {"type": "t4", "count": 1}}
    provider = {"type": "onprem", "controller": CTL, "hosts": hosts}
    if rented:
        provider = {"type": "gcp", "project": "my-project", "zone": "us-central1-a"}
    partition["nodes" if rented else "hosts"] = 2 if rented else "gpu[01-02]"
    return spec_of(partition, provider=provider, software=software)


def views(one: Driver, two: Driver) -> dict[str, HostReport]:
    return {
        CTL: HostReport(None, {}),
        ONE: HostReport(None, {}, driver=one),
        TWO: HostReport(None, {}, driver=two),
    }


@pytest.mark.parametrize(("has", "tracks"), [(True, "cgroup"), (False, "linuxproc")])
def test_slurm_without_cgroup_plugin_uses_no_cgroups(
    workspace: Workspace, has: bool, tracks: str
) -> None:
    """With cgroups, slurmd would start on no node, because some builds of Slurm lack the plugin."""
    facts = NodeFacts(4, 1, 1, 4, 1, 64000)
    reports = {**views(Driver(), Driver()), ONE: HostReport(facts, {})}
    reports[TWO] = HostReport(replace(facts, cgroups=has), {})
    render(spec(), INVENTORY, workspace, reports)
    conf = (workspace.rendered / "slurm.conf").read_text().splitlines()
    assert f"ProctrackType=proctrack/{tracks}" in conf
    constrains = (workspace.rendered / "cgroup.conf").read_text().splitlines()
    assert ("ConstrainDevices=yes" in constrains) is has
    notes = cgroup_notes(INVENTORY, reports)
    assert [note.partition(":")[0] for note in notes] == ([] if has else [TWO])
    shares = tuple(replace(host, cpus=1, memory_mib=900) for host in INVENTORY.hosts)
    assert cgroup_notes(replace(INVENTORY, hosts=shares), reports) == ()


@pytest.fixture(name="workspace")
def workspace_fixture(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Workspace:
    """A workspace with its own wheel cache, and without a package index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return workspace


def plant() -> None:
    with new_wheelhouse(gpu_lock(), NodePlatform.of(INVENTORY.distribution)) as folder:
        (folder / "cupy.whl").write_text("a wheel")


def no_host(name: str) -> Transport:
    raise AssertionError(f"{name} is asked")


def fetched(
    workspace: Workspace, spec: ClusterSpec, views: dict[str, HostReport], to: Connect = no_host
) -> None:
    cluster: Any = ClusterContext.of(spec, workspace=workspace)
    cluster.connections.to = to
    fetch_gpu_wheels(cluster, INVENTORY, views)


def test_hosts_with_gpus_get_cupy(workspace: Workspace) -> None:
    plant()
    shown = views(PARTS, Driver())
    fetched(workspace, spec(), shown)
    assert [wheel.name for wheel in workspace.gpu_wheels.iterdir()] == ["cupy.whl"]
    assert json.loads(gpus_file(spec(), INVENTORY, shown)) == {
        ONE: {"cupy": True, "uuids": ["MIG-1", "MIG-2"]},
        TWO: {"cupy": False, "uuids": []},
    }


def test_cupy_is_not_downloaded_without_gpus_or_if_disabled(workspace: Workspace) -> None:
    fetched(workspace, spec(), views(Driver(), Driver()))
    fetched(workspace, spec(cupy=False), views(T4, T4))
    assert not workspace.gpu_wheels.is_symlink()
    assert '"cupy": true' not in gpus_file(spec(cupy=False), INVENTORY, views(T4, T4))


def test_cloud_node_without_answer_raises(workspace: Workspace) -> None:
    plant()
    lost = ScriptedTransport([Step(("...",), error=UnreachableError("no SSH connection"))])
    with pytest.raises(UnreachableError):
        fetched(workspace, spec(rented=True), views(T4, Driver()), lambda _: lost)


def failure_of_two(driver: Driver, needs: Sequence[Finding] = ()) -> Failure:
    """Return the failure of the second node, which has this driver and should show a T4."""
    with refused("host-unfit/gpus", VerifyError, TWO, exit_code=1) as caught:
        reject_missing_gpus(spec(), INVENTORY, views(T4, driver), INVENTORY.names, needs=needs)
    (failure,) = caught.value.failures
    assert failure.host == TWO
    return cast(Failure, failure)


@pytest.mark.parametrize(
    ("driver", "why", "fix"),
    [
        (Driver(), "nvidia-smi shows 0", "check NVIDIA's driver on the host"),
        (
            Driver(fault="NVIDIA-SMI has failed"),
            "nvidia-smi says: NVIDIA-SMI has failed",
            "nvidia-smi",
        ),
    ],
    ids=["no driver", "fault"],
)
def test_host_without_the_gpus_of_its_partition_is_named(
    driver: Driver, why: str, fix: str
) -> None:
    failure = failure_of_two(driver)
    assert failure.cause.endswith(why)
    assert "1 x t4" in failure.cause
    assert fix in failure.fix
    reject_missing_gpus(spec(), INVENTORY, views(T4, driver), (ONE,))


def test_gpu_in_mig_mode_counts_as_one_gpu(workspace: Workspace) -> None:
    reject_missing_gpus(spec(), INVENTORY, views(T4, PARTS), INVENTORY.names)


def test_gpus_without_fabric_manager_are_a_failure() -> None:
    code = "fabric-manager"
    needs = [
        Finding(TWO, "warning", code, "NVSwitches are not set up", "it does not run", "install it")
    ]
    with refused("host-unfit/hardware", VerifyError, f"{TWO}") as caught:
        reject_missing_gpus(spec(), INVENTORY, views(T4, T4), INVENTORY.names, needs=needs)
    (failure,) = caught.value.failures
    assert (failure.about, failure.host, failure.fix) == (code, TWO, "install it")
    reject_missing_gpus(spec(), INVENTORY, views(T4, T4), (ONE,), needs=needs)


@pytest.mark.parametrize("runs", [True, False])
def test_up_fails_if_the_fabric_manager_does_not_run(workspace: Workspace, runs: bool) -> None:
    """Without fabric manager the GPUs are listed, and the verification job, which uses none, works."""
    cards = {
        "cards": 3,
        "shown": ["T4"] * 2,
        "driver": "580.95.05",
        "nouveau": False,
        "secure_boot": False,
    }
    linked = {"gpus": {**cards, "switches": 4}, "units": ["nvidia-fabricmanager"] if runs else []}

    busy = sinfo(ONE, TWO, state="allocated").stdout

    def transport_to(host: str) -> Any:
        facts = answer(**WELL | (linked if host == TWO else {}))

        def run(argv: Sequence[str], **_: object) -> Result:
            answers = {"sinfo": busy, "squeue": "", "date": "1000"}
            stdout = answers.get(without_sudo(argv)[0], facts)
            text = stdout(argv) if callable(stdout) else stdout
            return Result(0, text if isinstance(text, str) else text.decode(), "")

        return SimpleNamespace(run=run)

    session: Any = ClusterContext.of(spec(), workspace=workspace)
    session.connections = cast(Connections, SimpleNamespace(to=transport_to))
    if runs:
        notes = verify(session, INVENTORY, views(T4, T4)).notes
        assert [note.partition(": ")[0] for note in notes if shows(note, "gpu-lost")] == [TWO]
    else:
        with refused("host-unfit/hardware", VerifyError, f"{TWO}") as caught:
            verify(session, INVENTORY, views(T4, T4))
        assert [(failure.host, condition(failure)) for failure in caught.value.failures] == [
            (TWO, "host-unfit/fabric-manager")
        ]


def test_missing_gpus_with_a_pending_reboot_advise_the_reboot() -> None:
    why = "NVIDIA's driver 575.57 is there, and it is not loaded"
    fix = f"`clusterctl node reboot {TWO}`"
    needs = [Finding(TWO, "warning", "reboot-needed", "a reboot is needed", why, fix)]
    failure = failure_of_two(Driver(), needs)
    assert (failure.cause.endswith(f", but {why}"), failure.fix) == (True, fix)
