"""The health check of nodes: the real program, with stand-ins of nvidia-smi, dmesg, chronyc and
scontrol.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from clusterctl.hosts.gpus import Driver, Gpu
from clusterctl.scheduler.slurm_conf import render_health_file
from clusterctl.util.assets import data_folder
from tests.support.nvidia import machines
from tests.support.nvidia.nvidia_smi import SINCE
from tests.support.sweeps import in_sweep
from tests.unit.scheduler.test_slurm_config import make_inventory, make_spec

pytestmark = pytest.mark.platform("stand-in", "nvidia-smi")

# What the check says.
HOT = "GPU 0: 96 C, the limit is 90 C"
LOST_LANES = "GPU 0: PCIe x4 instead of x16"
XID = "XID {} at PCI:0000:10:00 in the kernel's log"
HANGS = "nvidia-smi did not end"

OLD_DRIVER = "470.182.03"  # the last branch before those of today

_FILE = data_folder("ansible") / "roles" / "health" / "files" / "health.py"
_PROGRAM = compile(_FILE.read_text(), _FILE, "exec")

# It keeps the node's state and reason in files, and notes what it was told.
_SCONTROL = """#!/bin/sh
cd '{folder}' || exit 1
if [ -e away ]; then echo 'Unable to contact slurm controller' >&2; exit 1; fi
echo "$@" >>calls
case "$*" in
*show*)
    by='[root@2026-11-20T20:00:00]'
    echo "NodeName=n1 CoresPerSocket=1 State=$(cat state) ThreadsPerCore=1 Reason=$(cat reason) $by Comment=x"
    ;;
*State=DRAIN*)
    for word in "$@"; do case "$word" in Reason=*) printf %s "${{word#Reason=}}" >reason ;; esac; done
    echo IDLE+DRAIN >state
    ;;
*State=UNDRAIN*) echo IDLE >state; : >reason ;;
esac
"""


@dataclass
class Host:
    """A node, as its check sees it."""

    folder: Path

    def look(self, driver_s: int = 20) -> list[str]:
        """Run the check anew; the problems that it names."""
        health: Any = ModuleType("health")
        sys.modules[health.__name__] = health  # dataclasses look there
        exec(_PROGRAM, health.__dict__)  # noqa: S102 - to start a Python for each look takes five times as long
        health.CONFIG = self.folder / "health.json"
        health.STATE = self.folder / "state.json"
        health.PATH = f"{self.folder}:{health.PATH}"
        health.DRIVER_S = driver_s
        said = io.StringIO()
        with redirect_stdout(said):
            status = health.main()
        assert status == (1 if said.getvalue() else 0)
        return said.getvalue().splitlines()

    def becomes(self, machine: machines.Machine) -> None:
        machines.describe(self.folder / "machine.json", machine)

    def has(self, problem: Problem) -> None:
        """Have this problem alone."""
        self.becomes(problem.machine)
        self.kernel_says(*problem.kernel)
        self.set(disk_free_mib=problem.disk_free_mib, disks=["/"])
        self.chrony_says(problem.clock_offset_s)

    def chrony_says(self, offset_s: float, leap: str = "Normal") -> None:
        said = (
            f"0A000001,10.0.0.1,3,1763668800.1,{offset_s},0.1,0.2,-1.0,0.0,0.1,0.0,0.0,64.0,{leap}"
        )
        chronyc = self.folder / "chronyc"
        chronyc.write_text(f"#!/bin/sh\necho {said}\n")
        chronyc.chmod(0o755)

    def kernel_says(self, *lines: str) -> None:
        (self.folder / "kernel.log").write_text("".join(f"{line}\n" for line in lines))

    def set(self, **settings: Any) -> None:
        file = self.folder / "health.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))

    def resumed_by_a_person(self) -> None:
        (self.folder / "state").write_text("IDLE")
        (self.folder / "reason").write_text("")

    @property
    def reason(self) -> str:
        """Why it is drained; "" if it is not."""
        drained = "DRAIN" in (self.folder / "state").read_text()
        return (self.folder / "reason").read_text() if drained else ""

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


def _host(folder: Path, machine: machines.Machine, cards: int = 1) -> Host:
    machines.install(folder, machine)
    smi = folder / "nvidia-smi"
    smi.write_text(
        smi.read_text().replace("/etc/nvidia-stand-in.json", str(folder / "machine.json"))
    )
    for name, content in (("state", "IDLE"), ("reason", ""), ("calls", "")):
        (folder / name).write_text(content)
    program = folder / "scontrol"
    program.write_text(_SCONTROL.format(folder=folder))
    program.chmod(0o755)
    spec = make_spec({"name": "train", "nodes": 1})
    inventory = make_inventory(spec)
    driver = Driver(cards, tuple(Gpu("x", i) for i in range(cards)))
    settings = json.loads(
        render_health_file(spec, inventory, {host.name: driver for host in inventory.compute})
    )
    (folder / "health.json").write_text(json.dumps(next(iter(settings.values()))))
    host = Host(folder)
    host.set(disk_free_mib=0)
    return host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A workstation with an RTX 4070 that is well."""
    return _host(tmp_path / "host", machines.rtx_4070())


def test_healthy_node_is_left_alone_and_queried_once(host: Host) -> None:
    assert host.look() == []
    assert host.look() == []
    assert len(host.calls) == 1
    assert host.reason == ""


@dataclass(frozen=True)
class Problem:
    """What makes a node unhealthy, and what is said of it; ``lasting``: only once seen twice
    running.
    """

    says: str
    machine: machines.Machine = field(default_factory=machines.rtx_4070)
    kernel: tuple[str, ...] = ()
    disk_free_mib: int = 0
    clock_offset_s: float = 0.0
    lasting: bool = False


_PROBLEMS: Mapping[str, Problem] = {
    "too hot": Problem(HOT, machines.hot()),
    "an older driver": Problem(
        "GPU 0: slowed down (hardware slowdown)",
        machines.with_driver(machines.awake(throttle="0x08"), OLD_DRIVER),
        lasting=True,
    ),
    "memory errors": Problem(
        "GPU 0: 3 memory errors that ECC could not correct", machines.rtx_4070(ecc=3)
    ),
    "narrow link": Problem(
        "GPU 0: PCIe x4 instead of x16", machines.awake(pcie_width=4), lasting=True
    ),
    "slow link": Problem(
        "GPU 0: PCIe generation 2 instead of 4", machines.awake(pcie_gen=2), lasting=True
    ),
    "slowed down": Problem(
        "GPU 0: slowed down (hardware slowdown)", machines.awake(throttle="0x08"), lasting=True
    ),
    "no driver": Problem(
        "nvidia-smi: NVIDIA-SMI has failed because it couldn't communicate", machines.no_driver()
    ),
    "off the bus": Problem(
        "nvidia-smi: Unable to determine the device handle for GPU", machines.lost()
    ),
    "none": Problem("0 GPUs respond instead of 1", {"gpus": []}),
    "forbidden": Problem(
        "GPU 0: its compute mode forbids all work", machines.rtx_4070(compute_mode="Prohibited")
    ),
    **{
        name: Problem(
            state["health"],
            machines.unwell(name) if "says" in state or "cells" in state else machines.rtx_4070(),
            lasting=name.startswith(("fabric", "mig")),
        )
        for name, state in machines.STATES.items()
        if "says" in state or "cells" in state
    },
    "off the bus, without an XID": Problem(
        machines.STATES["off-the-bus-without-an-xid"]["health"],
        kernel=machines.kernel_log("off-the-bus-without-an-xid"),
    ),
    "an XID as drivers of 575 write it": Problem(
        XID.format(154), kernel=machines.kernel_log("off-the-bus")
    ),
    "an XID as drivers of 535 write it": Problem(
        XID.format(79), kernel=machines.kernel_log("off-the-bus-535")
    ),
    "grave XID": Problem(XID.format(79), kernel=(machines.xid(79),)),
    "full disk": Problem("/ has ", disk_free_mib=1 << 40),
    "clock": Problem("the clock is wrong by 61.5 s", clock_offset_s=-61.5),
}


# `test_what_is_told_of_cards_is_seen_under_every_driver` finds these too.
_SEEN = [name for name, state in machines.STATES.items() if "cells" in state]


@pytest.mark.parametrize(
    "name", [*(name for name in _PROBLEMS if name not in _SEEN), *in_sweep(*_SEEN)]
)
def test_unhealthy_node_is_drained_with_reason_then_resumed(host: Host, name: str) -> None:
    problem = _PROBLEMS[name]
    host.has(problem)
    if problem.lasting:
        assert (host.look(), host.reason) == ([], "")
    (found,) = host.look()
    assert found.startswith(problem.says)
    assert host.reason.startswith(f"clusterctl health: {problem.says}")
    assert len(host.look()) == 1
    assert sum("State=DRAIN" in call for call in host.calls) == 1
    host.has(Problem("nothing", machines.awake()))
    assert (host.look(), host.reason) == ([], "")


@pytest.mark.parametrize("name", ["driver-and-library-differ", "off-the-bus-while-asked"])
def test_what_is_to_be_done_is_said(host: Host, name: str) -> None:
    host.becomes(machines.unwell(name))
    assert host.look()[0].endswith("boot the node")


@pytest.mark.parametrize("version", [OLD_DRIVER, machines.DRIVERS["535"]])
def test_fields_unknown_to_an_old_driver_are_queried_once(host: Host, version: str) -> None:
    host.becomes(machines.with_driver(machines.hot(), version))
    assert host.look() == [HOT]
    unknown = {field for field, branch in SINCE.items() if branch > int(version[:3])}
    assert set(json.loads((host.folder / "state.json").read_text())["gone"]) == unknown
    assert host.look() == [HOT]


@pytest.mark.parametrize("branch", ["535", "580", *in_sweep("570", "590")])
@pytest.mark.parametrize("name", _SEEN)
def test_what_is_told_of_cards_is_seen_under_every_driver(
    host: Host, name: str, branch: str
) -> None:
    host.becomes(machines.with_driver(machines.unwell(name), machines.DRIVERS[branch]))
    found = [*host.look(), *host.look()]  # what lasts is said at the second look
    assert machines.STATES[name]["health"] in found[-1]
    host.becomes(machines.with_driver(machines.rtx_4070(), machines.DRIVERS[branch]))
    assert host.look() == []


def test_a_card_that_is_lost_hides_no_other(tmp_path: Path) -> None:
    host = _host(
        tmp_path / "node",
        machines.h100_node(fabric_state="Completed", fabric_status="Success"),
        cards=8,
    )
    host.set(gpus={"cards": 8})
    assert host.look() == []
    node = machines.h100_node(fabric_state="Completed", fabric_status="Success")
    node["gpus"][3]["lost"], node["gpus"][5]["temperature"] = "[GPU is lost]", 97
    host.becomes({**node, "exit": 15})
    assert [said[:11] for said in host.look()] == ["GPU 3: GPU ", "GPU 5: 97 C"]


@pytest.mark.parametrize("link", [{"pcie_gen": 1}, {"pcie_width": 4}])
def test_a_gpu_that_sleeps_with_less_of_its_link_is_well(host: Host, link: dict[str, int]) -> None:
    host.becomes(machines.rtx_4070(**link))
    assert [host.look(), host.look()] == [[], []]


@pytest.fixture
def without_lanes(host: Host) -> Host:
    """Drained, for its card was at work with a part of its link, and now asleep."""
    host.becomes(machines.awake(pcie_width=4))
    assert [host.look(), host.look()] == [[], [LOST_LANES]]
    host.becomes(machines.rtx_4070(pcie_width=4))
    return host


def test_narrow_link_keeps_an_idle_node_drained(without_lanes: Host) -> None:
    for _ in range(3):
        assert without_lanes.look() == [LOST_LANES]
    without_lanes.becomes(machines.awake(pcie_width=4))
    assert without_lanes.look() == [LOST_LANES]
    assert LOST_LANES in without_lanes.reason
    without_lanes.becomes(machines.awake())
    assert (without_lanes.look(), without_lanes.reason) == ([], "")
    without_lanes.becomes(machines.rtx_4070(pcie_width=4))
    assert (without_lanes.look(), without_lanes.reason) == ([], "")


def test_narrow_link_is_forgotten_after_a_manual_resume(without_lanes: Host) -> None:
    without_lanes.look()
    without_lanes.resumed_by_a_person()
    assert [without_lanes.look(), without_lanes.look(), without_lanes.reason] == [[], [], ""]
    without_lanes.becomes(machines.awake(pcie_width=4))
    assert [without_lanes.look(), without_lanes.look()] == [[], [LOST_LANES]]


def test_a_link_that_lagged_for_a_moment_keeps_no_node_out(host: Host) -> None:
    host.becomes(machines.awake(pcie_width=4, temperature=96))
    assert host.look() == [HOT]
    host.becomes(machines.rtx_4070(pcie_width=4))
    assert (host.look(), host.reason) == ([], "")


def test_a_gpu_that_was_too_hot_must_cool_down_for_good(host: Host) -> None:
    host.becomes(machines.hot())
    host.look()
    host.becomes(machines.rtx_4070(temperature=88))
    assert host.look()
    assert host.reason
    host.becomes(machines.rtx_4070(temperature=85))
    assert host.look() == []
    assert host.reason == ""


def test_a_grave_xid_is_a_reason_and_a_programs_own_is_none(host: Host) -> None:
    host.kernel_says("[    1.000000] NVRM: loading NVIDIA UNIX", machines.xid(31), machines.xid(13))
    assert host.look() == []
    host.kernel_says(machines.xid(31), machines.xid(79, 2000.0))
    assert host.look() == [XID.format(79)]
    assert host.look()


def test_manually_resumed_node_stays_until_the_next_xid(host: Host) -> None:
    host.look()
    host.kernel_says(machines.xid(79))
    host.look()
    host.resumed_by_a_person()
    assert [host.look(), host.look(), host.reason] == [[], [], ""]
    host.kernel_says(machines.xid(79), machines.xid(94, 5000.0))
    assert host.look() == [XID.format(94)]
    assert host.reason


def test_what_somebody_else_drained_is_theirs(host: Host) -> None:
    (host.folder / "state").write_text("IDLE+DRAIN")
    (host.folder / "reason").write_text("new fans")
    host.becomes(machines.hot())
    assert host.look()
    assert host.reason == "new fans"
    host.becomes(machines.rtx_4070())
    assert host.look() == []
    assert host.reason == "new fans"


def test_a_controller_that_is_away_is_asked_again(host: Host) -> None:
    (host.folder / "away").touch()
    host.becomes(machines.hot())
    assert host.look()
    assert host.reason == ""
    (host.folder / "away").unlink()
    host.look()
    assert "96 C" in host.reason


def test_a_driver_that_hangs_is_not_waited_for_nor_asked_again(host: Host) -> None:
    host.becomes({**machines.rtx_4070(), "hangs_s": 50})
    assert host.look(driver_s=1) == [f"{HANGS} within 1 s"]
    assert HANGS in host.reason
    state = host.folder / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "stuck": os.getpid()}))
    host.becomes(machines.rtx_4070())
    (found,) = host.look()
    assert "still hangs" in found


def test_disks_checks_each_file_system_once(host: Host) -> None:
    host.set(disk_free_mib=1 << 40, disks=["/", "/..", "/no/such"])
    (found,) = host.look()
    assert found.startswith("/ has ")


def test_disks_checks_shared_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is smaller than the limit is healthy while half of it is free."""
    room = SimpleNamespace(f_frsize=1 << 20, f_blocks=64, f_bavail=40, f_files=0)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    host.set(disk_free_mib=1 << 10, disks=["/dev/shm"])
    assert host.look() == []
    room.f_bavail = 20
    assert host.look() == ["/dev/shm has 20 MiB free, but needs 32"]


def test_eight_cards_two_in_parts(tmp_path: Path) -> None:
    host = _host(tmp_path / "node", machines.h100_node(parts=2), cards=8)
    host.set(gpus={"cards": 8, "parts": 4})
    assert host.look() == []
    host.becomes(machines.h100_node(parts=1))
    assert [said.split()[:2] for said in host.look()] == [["2", "MIG"]]
    host.becomes({"gpus": machines.h100_node(parts=2)["gpus"][:7]})
    assert host.look()[0].startswith("7 GPUs respond")
