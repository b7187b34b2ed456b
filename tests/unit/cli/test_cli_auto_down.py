"""What `status` says of a cluster that may take itself down."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.cluster.status import auto_down
from clusterctl.spec.models import ClusterSpec
from tests.support.scripted import ScriptedTransport, Step
from tests.unit.cluster.specs import spec_of


def spec(**provider: Any) -> ClusterSpec:
    return spec_of(
        provider={"type": "gcp", "project": "my-project", "zone": "us-central1-a", **provider}
    )


ASKED = ("systemctl", "is-active", "clusterctl-auto-down.timer")


@pytest.mark.parametrize(
    ("answer", "rc", "armed"), [("active\n", 0, True), ("inactive\n", 3, False), ("", 4, False)]
)
def test_auto_down_reports_whether_the_timer_is_active(answer: str, rc: int, armed: bool) -> None:
    controller = ScriptedTransport([Step(ASKED, stdout=answer, rc=rc)])
    assert auto_down(spec(auto_down="8h"), controller) == {"after": "8h", "armed": armed}


def test_auto_down_without_the_setting_runs_no_command() -> None:
    assert auto_down(spec(), ScriptedTransport()) is None
