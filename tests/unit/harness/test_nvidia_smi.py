"""The stand-in of nvidia-smi says what an nvidia-smi says: this machine's own, where it has GPUs, and itself.

`make test-gpu` runs this on machines that have some.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from clusterctl.hosts.gpus import Driver
from clusterctl.hosts.probe import NODE_ARGV, read_node
from payload.device import choose
from payload.node.nvml import Gpus
from tests.support.nvidia import machines
from tests.support.nvidia.nvidia_smi import ROWS, fields_of
from tests.support.plays import load_module
from tests.support.sweeps import in_sweep
from tests.unit.harness.described import LASTING, Environment, ask, described, rows

# What this machine's own nvidia-smi lists, where there is one whose driver answers.
_LISTED = ask({}, "--list-gpus")[1] if shutil.which("nvidia-smi") else ""
_OWN = _LISTED if "UUID: " in _LISTED else ""
_SHOWN: dict[str, machines.Machine | None] = {
    "t4": machines.t4(),
    "rtx-4070": machines.rtx_4070(),
    "h100": machines.h100_node(parts=3),
    "h100, driver 535": machines.with_driver(machines.h100_node(), machines.DRIVERS["535"]),
    **({"this machine": None} if _OWN else {}),
}
FORM = "--format=csv,noheader,nounits"


@pytest.fixture(
    scope="module",
    params=[*in_sweep("t4", "rtx-4070"), *(name for name in _SHOWN if name not in {"t4", "rtx-4070"})],
)
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Where an nvidia-smi is first on PATH."""
    machine = _SHOWN[request.param]
    return {} if machine is None else stand_in(tmp_path_factory.mktemp("shown"), machine)


@pytest.fixture(scope="module")
def double(shown: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Where the stand-in shows what that one does."""
    return stand_in(tmp_path_factory.mktemp("double"), described(shown))


def stand_in(folder: Path, machine: machines.Machine) -> Environment:
    return {**machines.install(folder, machine), "PATH": f"{folder}:{os.environ['PATH']}"}


def driver(environment: Environment) -> Driver:
    """What our own script makes of it."""
    argv = ["sh", "-c", NODE_ARGV[-1]]
    done = subprocess.run(
        argv, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    return read_node(done.stdout)[1]


def test_cards_are_listed_alike(shown: Environment, double: Environment) -> None:
    assert ask(double, "--list-gpus") == ask(shown, "--list-gpus")


@pytest.mark.parametrize("form", [FORM, "--format=csv,noheader", "--format=csv"])
def test_fields_are_told_alike(shown: Environment, double: Environment, form: str) -> None:
    query = f"--query-gpu={','.join(LASTING)}"
    assert ask(double, query, form) == ask(shown, query, form)


def test_a_field_that_there_is_not_is_refused_alike(shown: Environment, double: Environment) -> None:
    assert ask(double, "--query-gpu=name,weight", FORM) == ask(shown, "--query-gpu=name,weight", FORM)


def test_slurm_is_told_the_same(shown: Environment, double: Environment) -> None:
    seen = driver(shown)
    assert driver(double) == seen
    assert driver(double).uuids == seen.uuids
    assert (seen.cards, seen.fault) == (len(rows(shown, "name")), "")


def test_the_health_check_finds_all_its_fields(shown: Environment) -> None:
    """Those of remapped rows, where the driver is older than 570, under another switch."""
    health = load_module("health", "roles/health/files")
    known = fields_of(int(rows(shown, "driver_version")[0][0].split(".")[0]))
    assert rows(shown, *(field for field in health.FIELDS if field in known or field not in ROWS))
    assert rows(shown, *health.ROWS, switch="--query-remapped-rows")


def test_nvml_knows_the_cards_of_nvidia_smi() -> None:
    """On a machine without any, neither does."""
    listed = rows({}, "index", "name", "uuid", "memory.total") if _OWN else []
    told = [[str(value) for value in card.values()] for card in Gpus().describe()]
    assert told == listed or (not told and not importlib.util.find_spec("pynvml"))


def test_cupy_computes_on_a_card_of_nvidia_smi() -> None:
    gpu = choose("auto", 0).gpu
    uuid = str(gpu["uuid"]).removeprefix("GPU-") if gpu else ""  # of a part, CUDA says it likewise
    assert uuid in _OWN
    assert uuid or not (_OWN and importlib.util.find_spec("cupy"))
