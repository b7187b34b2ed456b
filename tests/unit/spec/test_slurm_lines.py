"""Lines of ``slurm.extra``: settings, partitions over other partitions' nodes, and node sets."""

from __future__ import annotations

import pytest

from clusterctl.errors import SpecError
from clusterctl.spec.load import parse_spec
from clusterctl.state.inventory import planned_inventory

SPEC = """version: 1
name: demo
partitions:
  - {name: train, nodes: 3}
  - {name: debug, nodes: 1}
slurm:
  extra:
"""


def spec_with(*lines: str) -> str:
    return SPEC + "".join(f"    - {line!r}\n" for line in lines)


def faults(*lines: str) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        parse_spec(spec_with(*lines), "c.yaml")
    return [(problem.key, problem.code) for problem in caught.value.problems]


def test_partitions_may_stand_more_than_once() -> None:
    text = spec_with(
        "PreemptType=preempt/partition_prio",
        "NodeSet=fast Nodes=demo-train-[1-2]",
        "PartitionName=low Nodes=ALL PriorityTier=0 MaxTime=30",
        "PartitionName=high Nodes=fast,demo-debug-1 PriorityTier=9",
        "PartitionName=train PriorityTier=5",
    )
    inventory = planned_inventory(parse_spec(text, "c.yaml"))
    trains = tuple(f"demo-train-{i}" for i in (1, 2, 3))
    assert [(p.name, p.nodes, p.max_time) for p in inventory.partitions] == [
        ("train", trains, None),
        ("debug", ("demo-debug-1",), None),
        ("low", (*trains, "demo-debug-1"), 1800),
        ("high", ("demo-train-1", "demo-train-2", "demo-debug-1"), None),
    ]


def test_node_set_by_feature_has_the_nodes_of_a_partition() -> None:
    text = spec_with("NodeSet=all3 Feature=train", "partitionname=low nodes=all3 prioritytier=0")
    assert planned_inventory(parse_spec(text, "c.yaml")).partitions[2].nodes == (
        "demo-train-1",
        "demo-train-2",
        "demo-train-3",
    )


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        (["PartitionName=low PriorityTier=1"], ["partition-without-nodes"]),
        (["PartitionName=low Nodes=demo-train-4"], ["unknown-node"]),
        (["PartitionName=low Nodes=demo-train-[1-"], ["hostlist-bracket"]),
        (["PartitionName=low Nodes=other"], ["unknown-node"]),
        (["NodeSet=x Nodes=gpu7"], ["unknown-node"]),
        (["PartitionName=low Nodes=ALL A=1", "PartitionName=low Nodes=ALL B=2"], ["setting-twice"]),
        (["KillWait=5", "killwait=6"], ["setting-twice"]),
        (["PartitionName=low Nodes=ALL Default=YES"], ["setting-reserved"]),
        (["PartitionName=low Nodes=ALL MaxTime=soon"], ["not-a-time"]),
        (["PartitionName=train Nodes=ALL"], ["setting-reserved"]),
        (["PartitionName=train MaxTime=5"], ["setting-reserved"]),
        (["PartitionName=low Nodes=ALL NodeName=x"], ["setting-reserved"]),
        (["PartitionName=low Nodes=ALL A=1 a=2"], ["setting-twice"]),
        (["PartitionName=DEFAULT MaxTime=5"], ["name-reserved"]),
        (["PartitionName=clusterctl-proof Nodes=ALL"], ["name-reserved"]),
        (["PartitionName=a/b Nodes=ALL"], ["bad-format"]),
        (["PartitionName=low"], ["partition-without-nodes"]),
        (["KillWait=5 PartitionName=low"], ["not-a-setting"]),
        (["PartitionName=low Nodes=ALL #x"], ["not-a-setting"]),
    ],
)
def test_contradicting_line_is_a_fault(lines: list[str], codes: list[str]) -> None:
    """Each fault stands at the last of the lines."""
    assert faults(*lines) == [(f"slurm.extra[{len(lines) - 1}]", code) for code in codes]
