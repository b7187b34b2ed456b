"""What `doctor` makes of states of NVIDIA's driver and cards that nvidia-smi was seen to tell
of.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from clusterctl.hosts import remote_probe as remote
from clusterctl.hosts.checks import Finding
from clusterctl.hosts.gpus import fault_of, faults, flags
from tests.support.nvidia import machines
from tests.support.nvidia.nvidia_smi import FIELDS, ROWS
from tests.unit.hosts.test_doctor import found

pytestmark = pytest.mark.platform("stand-in", "nvidia-smi")


def seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: machines.Machine, **more: Any
) -> list[Finding]:
    """What is found of a host with one card, whose nvidia-smi is the stand-in, by the real
    probe.
    """
    for name, value in machines.install(tmp_path / "bin", machine).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(remote, "nvidia_devices", lambda: [(remote.PCI_DISPLAY, 0x2786)])
    monkeypatch.setattr(remote, "driver_on_disk", lambda: "580.126.18")
    return found({"gpus": {**remote.gpus(), "secure_boot": False, "nouveau": False}}, **more)


@pytest.mark.parametrize("driver", machines.DRIVERS.values())
@pytest.mark.parametrize(
    "name", [name for name, state in machines.STATES.items() if "doctor" in state]
)
def test_each_state_is_named_with_what_to_do(
    name: str, driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = seen(tmp_path, monkeypatch, machines.with_driver(machines.unwell(name), driver))
    assert finding.code == machines.STATES[name]["doctor"]
    assert finding.fix
    said = machines.STATES[name].get("says", "").strip().partition("\n")[0]
    assert said in finding.why or name == "no-module"  # which needs no quote


def test_cards_are_told_from_what_else_is_on_the_bus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PCI_DEVICES", str(tmp_path))
    bus = [
        ("0x10de", "0x030200", "0x2330"),
        ("0x10de", "0x030000", "0x1db4"),
        ("0x10de", "0x068000", "0x22a3"),
    ]
    for number, said in enumerate(
        [*bus, ("0x8086", "0x030000", "0x0001"), ("0x10de", "0x040300", "0x0002")]
    ):
        device = tmp_path / f"0000:0{number}:00.0"
        device.mkdir()
        for name, value in zip(("vendor", "class", "device"), said, strict=True):
            (device / name).write_text(f"{value}\n")
    found = remote.gpus()
    assert (found["cards"], found["switches"], found["oldest"]) == (2, 1, 0x1DB4)


@pytest.mark.parametrize("driver", ["470.182.03", *machines.DRIVERS.values()])
def test_a_card_that_is_well_is_no_finding(
    driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = machines.rtx_4070(fabric_state="Completed", fabric_status="Success")
    assert seen(tmp_path, monkeypatch, machines.with_driver(machines.rtx_4070(), driver)) == []
    assert seen(tmp_path, monkeypatch, machines.with_driver(ready, driver)) == []


def test_a_driver_and_a_library_of_two_versions_want_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = seen(tmp_path, monkeypatch, machines.unwell("driver-and-library-differ"))
    assert finding.code == machines.STATES["driver-and-library-differ"]["doctor"]
    assert "driver was updated" in finding.why
    assert "node reboot two`" in finding.fix


@pytest.mark.parametrize(
    ("driver", "branch", "oldest", "code"),
    [
        ("open", None, 0x1DB4, "driver-unfit"),  # V100
        ("open", "580", 0x15F8, "driver-unfit"),  # P100
        ("proprietary", "590", 0x1DB4, "driver-unfit"),
        ("proprietary", "580", 0x1DB4, "no-driver"),
        ("open", None, 0x1EB8, "no-driver"),  # T4, which is Turing
        ("", None, 0x1DB4, "no-driver"),
    ],
)
def test_unsuitable_driver_is_rejected_before_installation(
    driver: str, branch: str | None, oldest: int, code: str
) -> None:
    gpus = {"gpus.cards": 1, "gpus.oldest": oldest}
    (finding,) = found(gpus, driver=driver, branch=branch)
    assert (finding.code, finding.level) == (code, "error" if code == "driver-unfit" else "warning")


@pytest.mark.parametrize(
    ("gpus", "driver", "level"), [(8, "", "error"), (8, "open", "warning"), (None, "", "warning")]
)
def test_gpus_of_a_partition_need_their_fabric_manager(
    gpus: int | None, driver: str, level: str
) -> None:
    linked = {
        "gpus.cards": 8,
        "gpus.shown": ["H100"] * 8,
        "gpus.driver": "580.95.05",
        "gpus.switches": 4,
    }
    (finding,) = found(linked, gpus=gpus, driver=driver)
    assert (finding.code, finding.level) == ("fabric-manager", level)
    assert "install version 580.95.05" in finding.fix


@pytest.mark.parametrize(("switches", "said"), [(0, False), (4, True)])
def test_who_installs_a_driver_is_told_of_the_fabric_manager(switches: int, said: bool) -> None:
    (finding,) = found({"gpus.cards": 8, "gpus.switches": switches})
    assert ("nvidia-fabricmanager of" in finding.fix) is said
    (finding,) = found({"gpus.cards": 8, "gpus.switches": switches}, driver="open")
    assert "fabricmanager" not in finding.fix


@pytest.mark.parametrize(
    ("manager", "units", "code", "why"),
    [
        ("", [], "fabric-manager", "not installed; driver 580.95.05"),
        ("580.82.07", [], "fabric-manager", "version 580.82.07; driver 580.95.05"),
        ("580.82.07", ["nvidia-fabricmanager"], None, ""),  # NVIDIA lets some versions go together
    ],
)
def test_what_a_fabric_manager_that_does_not_run_lacks(
    manager: str, units: list[str], code: str | None, why: str
) -> None:
    linked = {
        "gpus.cards": 8,
        "gpus.shown": ["H100"] * 8,
        "gpus.driver": "580.95.05",
        "gpus.switches": 4,
    }
    findings = found({**linked, "gpus.manager": manager, "units": units}, gpus=8)
    assert [(one.code, one.level) for one in findings] == ([(code, "error")] if code else [])
    assert all(why in one.why for one in findings)


def test_cards_of_one_state_are_one_finding() -> None:
    pending = {
        "retired_pages.pending": "Yes",
        "mig.mode.current": "Enabled",
        "mig.mode.pending": "Disabled",
    }
    well = {
        "retired_pages.pending": "No",
        "mig.mode.current": "Disabled",
        "mig.mode.pending": "Disabled",
    }
    cards = {"gpus.cards": 3, "gpus.shown": ["A100"] * 3, "gpus.driver": "535.261.03"}
    memory, mig = found({**cards, "gpus.states": [pending, well, pending]})
    assert (memory.code, memory.why.partition(": ")[0]) == ("gpu-memory", "GPUs 0, 2")
    assert (mig.code, mig.why.partition(",")[0]) == ("mig-pending", "GPUs 0")
    assert all("node reboot two`" in one.fix for one in (memory, mig))


def test_what_is_known_of_faults_is_whole() -> None:
    assert len({one.says for one in faults()}) == len(faults())
    assert all((one.code, one.what, one.means, one.fix) for one in faults())
    assert fault_of("something else") is None
    asked = {*remote.STATES.split(","), *remote.ROWS.split(",")}
    assert {one.field for one in flags()} <= asked & {*FIELDS, *ROWS}
