"""The stand-in of nvidia-smi answers as an nvidia-smi does: this machine's own, if it has GPUs.

`make test-gpu` runs this on machines that have some.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from clusterctl.hosts.gpus import Driver
from clusterctl.hosts.probe import NODE_ARGV, read_node
from payload.device import choose
from payload.node.nvml import GpuSensor
from tests.support.nvidia import machines
from tests.support.nvidia.nvidia_smi import ROWS, fields_of
from tests.support.plays import load_module

Environment = Mapping[str, str]
_SHOWN = {
    "h100": machines.h100_node(parts=3),
    "h100, driver 535": machines.with_driver(machines.h100_node(), machines.DRIVERS["535"]),
}
CSV = "--format=csv,noheader,nounits"


def ask(environment: Environment, *argv: str) -> tuple[int, str]:
    """Return the exit status of the nvidia-smi on PATH, and what it prints."""
    done = subprocess.run(
        ["nvidia-smi", *argv],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


# What this machine's own nvidia-smi lists, if there is one whose driver answers.
_LISTED = ask({}, "--list-gpus")[1] if shutil.which("nvidia-smi") else ""
_OWN = _LISTED if "UUID: " in _LISTED else ""


def rows(environment: Environment, *fields: str, switch: str = "--query-gpu") -> list[list[str]]:
    rc, said = ask(environment, f"{switch}={','.join(fields)}", CSV)
    assert rc == 0, said
    return [line.split(", ") for line in said.splitlines()]


@pytest.fixture(params=[*_SHOWN, *(["this machine"] if _OWN else [])])
def shown(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    """The environment in which an nvidia-smi is first on PATH."""
    if request.param == "this machine":
        return {}
    environment = machines.install(tmp_path, _SHOWN[request.param])
    return {**environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def driver(environment: Environment) -> Driver:
    """Return what our own probe makes of it."""
    argv = ["sh", "-c", NODE_ARGV[-1]]
    done = subprocess.run(
        argv, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    return read_node(done.stdout)[1]


def test_the_probe_finds_every_card(shown: Environment) -> None:
    seen = driver(shown)
    _, listed = ask(shown, "--list-gpus")
    assert (seen.cards, seen.fault) == (listed.count("GPU "), "")
    assert [gpu.uuid in listed for gpu in seen.gpus] == [True] * len(seen.gpus)


def test_fields_and_refusals_are_worded_alike(shown: Environment) -> None:
    rc, head = ask(shown, "--query-gpu=index,name,memory.total", "--format=csv")
    assert (rc, head.splitlines()[0]) == (0, "index, name, memory.total [MiB]")
    rc, said = ask(shown, "--query-gpu=name,weight", CSV)
    assert (rc, said.startswith('Field "weight"')) == (2, True)


def test_the_health_check_finds_all_its_fields(shown: Environment) -> None:
    """Those of remapped rows have another switch if the driver is older than 570."""
    health = load_module("health", "roles/health/files")
    known = fields_of(int(rows(shown, "driver_version")[0][0].split(".")[0]))
    assert rows(shown, *(field for field in health.FIELDS if field in known or field not in ROWS))
    assert rows(shown, *health.REMAPPED_ROWS, switch="--query-remapped-rows")


def test_nvml_knows_the_cards_of_nvidia_smi() -> None:
    """On a machine without any, neither does."""
    listed = rows({}, "index", "name", "uuid", "memory.total") if _OWN else []
    keys = ("index", "name", "uuid", "memory_total_mib")
    told = [[str(card[key]) for key in keys] for card in GpuSensor().describe()]
    assert told == listed or (not told and not importlib.util.find_spec("pynvml"))


def test_cupy_computes_on_a_card_of_nvidia_smi() -> None:
    gpu = choose("auto", 0).gpu
    uuid = str(gpu["uuid"]).removeprefix("GPU-") if gpu else ""  # of a part, CUDA says it likewise
    assert uuid in _OWN
    assert uuid or not (_OWN and importlib.util.find_spec("cupy"))
