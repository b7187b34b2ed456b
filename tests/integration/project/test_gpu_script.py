"""scripts/test_gpu, with Python, mpirun and nvidia-smi played by an executable that notes how it was
called.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]
_PLAYED = """\
#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in
    "-c import $LACKING"|*"$FAILING"*) exit 1;;
    --list-gpus) echo 'GPU 0: NVIDIA H200';;
esac
"""


@dataclass
class Stage:
    folder: Path

    def run(self, *flags: str, lacking: str = "-", failing: str = "no such word") -> int:
        environment = {
            **os.environ,
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "LACKING": lacking,
            "FAILING": failing,
        }
        command = [_ROOT / "scripts" / "test_gpu", "--python", self.folder / "python"]
        command += ["--out", self.folder / "out", *flags]
        return subprocess.run(command, env=environment, check=False).returncode

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    @property
    def parts(self) -> dict[str, int]:
        lines = (self.folder / "out" / "parts.jsonl").read_text().splitlines()
        return {one["part"]: one["rc"] for one in map(json.loads, lines)}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    for name in ("python", "mpirun", "nvidia-smi"):
        (tmp_path / name).write_text(_PLAYED)
        (tmp_path / name).chmod(0o755)
    return Stage(tmp_path)


_PARTS = [
    *("device", "fused kernels", "plain kernels", "benchmarks", "sums", "ranks on one card"),
    *("all unit tests", "integration tests"),
]


def test_gpu_script_runs_every_part(stage: Stage) -> None:
    assert stage.run() == 0
    assert stage.parts == dict.fromkeys(_PARTS, 0)
    assert not [call for call in stage.calls if " install " in call]
    for path in (word for call in stage.calls for word in call.split() if "tests/" in word):
        assert (_ROOT / path).exists()


def test_gpu_script_goes_on_after_a_failed_part(stage: Stage) -> None:
    assert stage.run(failing="test_payload_fused.py") == 1
    assert stage.parts == {**dict.fromkeys(_PARTS, 0), "fused kernels": 1}


def test_gpu_script_installs_what_is_missing_from_a_folder(stage: Stage) -> None:
    assert stage.run("--wheels", "some wheels", lacking="cudnn") == 0
    (install,) = (call for call in stage.calls if " install " in call)
    assert "--no-index --find-links some wheels --no-deps nvidia-cudnn-frontend" in install


def test_gpu_script_names_what_time_does_not_suffice_for(stage: Stage) -> None:
    assert stage.run("--budget", "0") == 1
    assert stage.parts == {}


def test_gpu_script_refuses_unknown_options_and_machines_without_gpus(stage: Stage) -> None:
    assert stage.run("--fast", "yes") == 2
    assert stage.run(failing="--list-gpus") == 2
