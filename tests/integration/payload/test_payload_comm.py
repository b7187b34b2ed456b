from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from clusterctl.scheduler.sites.script import verification_argv
from tests.integration.payload.conftest import Runner, python

# As many as divide nothing evenly.
RANKS = 3


def test_transport_gives_the_same_sums_as_the_naive_one(program: Runner) -> None:
    program(RANKS, "transports.py")


def test_compressors_lose_no_gradient_and_agree_on_all_ranks(program: Runner) -> None:
    program(RANKS, "compressors.py")


def test_probe_finds_all_ranks_in_order(mpirun: Runner) -> None:
    answer = mpirun(3, "probe", "--expect-hosts", socket.gethostname().split(".")[0])
    found = json.loads(answer.stdout)
    assert found["ok"] is True
    assert found["world_size"] == 3
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert all(rank["cores"] and rank["host"] for rank in found["ranks"])
    assert max(found["allreduce"]["bytes"]) > 1 << 20
    assert found["failures"] == []


@pytest.mark.platform("stand-in", "infiniband")
@pytest.mark.parametrize(
    ("state", "used", "port"),
    [
        ("4: ACTIVE", "port", "mlx5_0:1 InfiniBand"),
        ("4: ACTIVE", "tcp", ""),
        ("1: DOWN", "tcp", None),
        # A local node, which shows its host's adapters.
        ("4: ACTIVE", "", None),
    ],
)
def test_probe_tells_by_which_port_the_bytes_went(
    program: Runner, tmp_path: Path, state: str, used: str, port: str | None
) -> None:
    folder = tmp_path / "mlx5_0/ports/1"
    (folder / "counters").mkdir(parents=True)
    for name, text in {
        "state": state,
        "link_layer": "InfiniBand",
        "counters/port_xmit_data": "1000",
    }.items():
        (folder / name).write_text(f"{text}\n")
    devices = tmp_path if used else "/nowhere"
    found = json.loads(program(3, "measured_link.py", tmp_path, used, devices).stdout)
    if port is None:
        assert found == {}
    else:
        assert (found["hosts"], found["port"]) == (["here", "there"], port)
        assert found["gb_per_s"] > 0


def test_verification_of_many_nodes_loads_no_numpy() -> None:
    """On a local cluster of 64 nodes it took a third of the whole."""
    program = (
        "import sys, payload.commands.probe; print(*{'numpy', 'payload.cli.config'} & "
        "{*sys.modules})"
    )
    assert python("-c", program).stdout == "\n"


def test_verify_names_the_reason_if_ranks_do_not_connect() -> None:
    """It travels with its command, and is started without the command line of the other
    programs.
    """
    words = verification_argv("/none", ["a", "b"])[1:]
    (line,) = python(*words, SLURM_NTASKS="2", PYTHONPATH="", rc=1).stderr.splitlines()
    assert line.startswith("payload: error: on ")
    assert "SLURM_NTASKS=2" in line


def test_probe_names_hosts_without_a_rank(mpirun: Runner) -> None:
    answer = mpirun(2, "probe", "--expect-hosts", "elsewhere-1,elsewhere-2", rc=1)
    found = json.loads(answer.stdout)
    assert found["ok"] is False
    assert [failure["host"] for failure in found["failures"]] == ["elsewhere-1", "elsewhere-2"]
    assert [line.split(": ")[:3] for line in answer.stderr.splitlines()] == [
        ["payload", "probe failed", host] for host in ("elsewhere-1", "elsewhere-2")
    ]


@pytest.mark.parametrize(
    ("lie", "cause"),
    [
        ("sum", "allreduce of 3145736 bytes: 1 of 393217 sums are wrong"),
        ("token", "instead of the token of"),
    ],
)
def test_probe_names_the_rank_with_a_wrong_answer(program: Runner, lie: str, cause: str) -> None:
    answer = program(2, "liar.py", lie, "probe")
    found = json.loads(answer.stdout)
    assert found["ok"] is False
    assert [(failure["rank"], failure["host"]) for failure in found["failures"]] == [
        (1, socket.gethostname().split(".")[0])
    ]
    assert cause in found["failures"][0]["cause"]
