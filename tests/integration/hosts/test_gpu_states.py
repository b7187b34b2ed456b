"""`doctor`: GPUs on the PCI bus, and findings from the double of nvidia-smi."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from clusterctl.hosts import remote_probe as remote
from clusterctl.hosts.checks import Finding
from tests.support.nvidia import machines
from tests.unit.hosts.test_doctor import found

pytestmark = pytest.mark.platform("stand-in", "nvidia-smi")


def seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: machines.Machine, **more: Any
) -> list[Finding]:
    """Return the findings of a host with one GPU, from the real probe and the double of nvidia-smi."""
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
def test_each_gpu_state_has_a_finding_with_a_fix(
    name: str, driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = seen(tmp_path, monkeypatch, machines.with_driver(machines.unwell(name), driver))
    assert finding.code == machines.STATES[name]["doctor"]
    assert finding.fix
    said = machines.STATES[name].get("says", "").strip().partition("\n")[0]
    assert said in finding.why or name == "no-module"  # which needs no quote


def test_pci_devices_counts_gpus_and_nvswitches_only(
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
def test_healthy_gpu_is_no_finding(
    driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = machines.rtx_4070(fabric_state="Completed", fabric_status="Success")
    assert seen(tmp_path, monkeypatch, machines.with_driver(machines.rtx_4070(), driver)) == []
    assert seen(tmp_path, monkeypatch, machines.with_driver(ready, driver)) == []


def test_driver_and_library_version_mismatch_advises_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = seen(tmp_path, monkeypatch, machines.unwell("driver-and-library-differ"))
    assert finding.code == machines.STATES["driver-and-library-differ"]["doctor"]
    assert "driver was updated" in finding.why
    assert "node reboot two`" in finding.fix
