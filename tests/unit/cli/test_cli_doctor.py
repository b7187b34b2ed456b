"""doctor's table: a line a host."""

from __future__ import annotations

import pytest

from clusterctl.cli.doctor import report_lines
from clusterctl.cli.output import Screen
from clusterctl.hosts.checks import DoctorReport
from clusterctl.hosts.probe import HostFacts
from tests.unit.hosts.test_doctor import WELL


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [
        ({"cards": 2, "shown": ["T4", "T4"], "driver": "580.95.05"}, "T4, T4 (driver 580.95.05)"),
        ({"cards": 2}, "2 without driver"),
    ],
)
def test_a_host_is_shown_with_its_gpus_and_their_driver(gpus: dict[str, object], shown: str) -> None:
    facts = HostFacts.model_validate(WELL | {"gpus": {**WELL["gpus"], **gpus}})
    table = report_lines(Screen(json=False, color=False), DoctorReport((), {"one": facts}))
    assert f"15.6GiB  {shown}  enforcing" in "\n".join(table)
