"""Tests of facts, parsed from recorded output of real hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import SlurmError
from clusterctl.hosts.probe import NodeFacts, read_node

CAPTURES = Path(__file__).parent / "captures"


def test_facts_of_a_recorded_node_are_parsed() -> None:
    facts, _ = read_node((CAPTURES / "node-without-gpu.txt").read_text())
    assert facts == NodeFacts(
        cpus=2,
        boards=1,
        sockets=1,
        cores_per_socket=2,
        threads_per_core=1,
        memory_mib=24105,
        gpus=(),
        mpi=("cray_shasta", "none", "pmi2", "pmix", "pmix_v4"),
    )


def test_read_node_ignores_output_around_the_answer() -> None:
    text = (
        "a login banner\n@node\nslurmd: error: something\n"
        "NodeName=n CPUs=128 Boards=1 SocketsPerBoard=2 CoresPerSocket=32 ThreadsPerCore=2 "
        "RealMemory=1031000 Gres=gpu:x:2\nUpTime=1-02:03:04\n@gpus\n@mpi\n"
    )
    facts, _ = read_node(text)
    assert facts is not None
    assert (facts.sockets, facts.cores_per_socket, facts.threads_per_core) == (2, 32, 2)


@pytest.mark.parametrize(
    "text", ["", "@node\n@gpus\n@mpi\n", "@node\nsh: 1: slurmd: not found\n", "@node\nCPUs=x\n"]
)
def test_read_node_of_a_host_without_slurmd_is_an_error(text: str) -> None:
    with pytest.raises(SlurmError) as raised:
        read_node(text)
    assert "slurmd" in raised.value.fix
