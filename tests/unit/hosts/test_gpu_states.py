"""`doctor`: findings on NVIDIA drivers, fabric manager and GPUs, from recorded states."""

from __future__ import annotations

import pytest

from clusterctl.hosts.gpus import fault_of, faults, flags
from tests.support.nvidia.nvidia_smi import FIELDS, ROWS
from tests.unit.hosts.test_doctor import found

pytestmark = pytest.mark.platform("stand-in", "nvidia-smi")


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
def test_unsuitable_driver_is_a_finding(
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


@pytest.mark.parametrize(("switches", "names_manager"), [(0, False), (4, True)])
def test_fix_of_a_missing_driver_names_the_fabric_manager(
    switches: int, names_manager: bool
) -> None:
    (finding,) = found({"gpus.cards": 8, "gpus.switches": switches})
    assert ("nvidia-fabricmanager of" in finding.fix) is names_manager
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
def test_stopped_fabric_manager_has_its_cause(
    manager: str, units: list[str], code: str | None, why: str
) -> None:
    linked = {
        "gpus.cards": 8,
        "gpus.shown": ["H100"] * 8,
        "gpus.driver": "580.95.05",
        "gpus.switches": 4,
    }
    findings = found({**linked, "gpus.manager": manager, "units": units}, gpus=8)
    assert [(finding.code, finding.level) for finding in findings] == (
        [(code, "error")] if code else []
    )
    assert all(why in finding.why for finding in findings)


def test_table_of_gpu_faults_is_complete() -> None:
    assert len({one.says for one in faults()}) == len(faults())
    assert all((one.code, one.what, one.means, one.fix) for one in faults())
    assert fault_of("something else") is None
    assert {one.field for one in flags()} <= {*FIELDS, *ROWS}
