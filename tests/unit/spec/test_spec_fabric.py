"""provider.fabric: the switches of a cluster."""

from __future__ import annotations

from pathlib import Path

from clusterctl.scheduler.slurm.conf import render_files
from clusterctl.spec.load import parse_spec
from clusterctl.spec.models import ClusterSpec
from tests.unit.scheduler.test_slurm_config import make_inventory

BASE = Path(__file__).with_name("onprem-base.yaml")
TREE = """\
  fabric:
    leaf1: {hosts: "gpu[01-03]"}
    leaf2: {hosts: "gpu07,big"}
    spine: {switches: "leaf[1-2]"}
"""


def with_fabric(fabric: str) -> str:
    return BASE.read_text().replace("partitions:", fabric + "partitions:", 1)


def rendered(spec: ClusterSpec) -> dict[str, str]:
    return render_files(spec, make_inventory(spec, cpus=1, memory_mib=2000), {})


def test_switches_become_slurms_topology() -> None:
    files = rendered(parse_spec(with_fabric(TREE), BASE))
    lines = [line for line in files["topology.conf"].splitlines() if not line.startswith("#")]
    assert lines == [
        "SwitchName=leaf1 Nodes=gpu[01-03]",
        "SwitchName=leaf2 Nodes=gpu07,big",
        "SwitchName=spine Switches=leaf[1-2]",
    ]
    assert "TopologyPlugin=topology/tree\n" in files["slurm.conf"]
