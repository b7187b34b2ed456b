"""provider.fabric: the switches of a cluster, and what can't be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import SpecError
from clusterctl.scheduler.slurm_conf import render_files
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


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("gpu07,big", "gpu07", "big: at no switch"),
        ("gpu07,big", "gpu07,big,gpu01", "gpu01 is at leaf1 already"),
        ("gpu07,big", "gpu07,bug", "there is no node 'bug'"),
        ("leaf[1-2]", "leaf[1-3]", "there is no switch 'leaf3'"),
        ("leaf[1-2]", "leaf[1-2],spine", "spine is above itself"),
        ("{switches: ", "{hosts: gpu01, switches: ", "a switch has either hosts or switches"),
        ('{switches: "leaf[1-2]"}', "{}", "a switch has either hosts or switches"),
        ("gpu[01-03]", "gpu[01-", "gpu[01-"),
    ],
)
def test_what_is_no_tree_over_all_nodes_is_refused(old: str, new: str, said: str) -> None:
    text = with_fabric(TREE.replace(old, new, 1))
    with pytest.raises(SpecError) as caught:
        parse_spec(text, BASE)
    assert said in str(caught.value), str(caught.value)


def test_switches_in_a_ring_are_refused() -> None:
    ring = '  fabric:\n    a: {switches: b}\n    b: {switches: a}\n    c: {hosts: "gpu[01-03,07],big"}\n'
    with pytest.raises(SpecError) as caught:
        parse_spec(with_fabric(ring), BASE)
    assert [problem.code for problem in caught.value.problems][:1] == ["fabric-cycle"]
