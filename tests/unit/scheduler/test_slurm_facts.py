"""Tests of facts, parsed from recorded output of real hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import SlurmError
from clusterctl.hosts.probe import NODE_ARGV, NodeFacts, read_node
from tests.support.here import LocalTransport

CAPTURES = Path(__file__).parent / "captures"


def test_a_captured_node() -> None:
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


def test_noise_around_the_answer() -> None:
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
def test_a_host_without_slurm_is_one_clear_error(text: str) -> None:
    with pytest.raises(SlurmError) as raised:
        read_node(text)
    assert "slurmd" in raised.value.fix


def test_the_script_runs_in_any_shell_and_survives_missing_tools() -> None:
    result = LocalTransport().run(NODE_ARGV)
    sections = [line for line in result.stdout.splitlines() if line.startswith("@")]
    assert sections == ["@node", "@gpus", "@mpi"]
    assert result.stderr == ""


def test_slurmd_is_not_asked_for_a_size_that_is_known(tmp_path: Path) -> None:
    (tmp_path / "slurmd").write_text("#!/bin/sh\necho CPUs=2\n")
    (tmp_path / "slurmd").chmod(0o755)
    with_slurmd = [NODE_ARGV[0], "-c", f"PATH={tmp_path}:$PATH; {NODE_ARGV[-1]}"]
    for words, first in (((), "CPUs=2"), (("sh", "known"), "absent")):
        said = LocalTransport().run([*with_slurmd, *words]).stdout.splitlines()
        assert said[:2] == ["@node", first]
