"""A node on which batch scripts run in bash, as under slurmd, with doubles of srun and scontrol."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from clusterctl.scheduler.history import attempts_of
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.sites.script import render_script
from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import planned_inventory
from clusterctl.util.assets import data_folder
from tests.support.hostile import HOSTILE_NAMES

APPTAINER = Path(__file__).with_name("apptainer")
HASH = "0123456789abcdef"
PARTITION = {"name": "train", "nodes": 2}
INVENTORY = planned_inventory(
    ClusterSpec.model_validate({"version": 1, "name": "demo", "partitions": [PARTITION]})
)
NODE = (
    "__init__",
    "build",
    "claim",
    "hang",
    "history",
    "images",
    "job",
    "messages",
    "output",
    "pack",
    "ports",
    "processes",
    "rank",
    "requeue",
    "restarts",
    "secret_values",
    "stacks",
    "task",
)
HOSTILE = ("$HOME", "; false", "|", *(name.decode(errors="ignore") for name in HOSTILE_NAMES))


def rendered(job: JobSpec) -> str:
    """The job's batch script."""
    return render_script(INVENTORY, Request.read(job), payload_hash=HASH)


def recorded_causes(folder: Path) -> list[str]:
    """The codes of the causes that a job recorded, if it recorded the start before and the end after
    each.
    """
    (attempt,) = attempts_of((folder / "job.events").read_text())
    assert [event["event"] for event in attempt.events][-1] == "end"
    return [*attempt.causes]


def user_script(folder: Path, name: str, text: str) -> Path:
    """A script of the user's."""
    path = folder / name
    path.write_text(text)
    return path


def play(path: Path, body: str) -> None:
    """An executable of bash."""
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def place_payload(root: Path, host: Path, telemetry: str = "true") -> None:
    """Place what supervises jobs, where ``host`` is clusterctl's folder of the host, a telemetry,
    and alarms that never ring.
    """
    node = root / "payload" / "node"
    node.mkdir(parents=True, exist_ok=True)
    for name in ("__init__.py", *(f"node/{name}.py" for name in NODE)):
        text = (data_folder("payload") / name).read_text()
        (root / "payload" / name).write_text(text.replace("/opt/clusterctl", str(host)))
    main = f"import os\nos.execv('/bin/bash', ['bash', '-c', {telemetry!r}])\n"
    (root / "payload" / "__main__.py").write_text(main)
    (node / "alarms.py").write_text("")


class Batch:
    """Runs a rendered script as slurmd would, with executables that play srun and scontrol."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "submitted from here"
        self.folder.mkdir()
        self.payload = folder / "payload"
        self.host = folder / "host"
        place_payload(self.payload / HASH, self.host)
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        play(
            bin_folder / "srun",
            'echo "$@" >>"$PLAYER_CALLS"; while [[ $1 == -* ]]; do shift; done; exec "$@"',
        )
        play(bin_folder / "scontrol", "printf '%s\\n' node-1 node-2")
        play(bin_folder / "squeue", "echo RUNNING None")
        self.calls = folder / "srun-calls"
        self.calls.touch()
        self.environment = {
            "PATH": f"{bin_folder}:/usr/bin:/bin",
            "HOME": str(folder),
            "PLAYER_CALLS": str(self.calls),
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "node-[1-2]",
            "SLURM_NTASKS": "4",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_MEM_PER_NODE": "100",
            "SLURMD_NODENAME": "node-1",
        }

    def shorten(self, module: str, name: str, seconds: float) -> None:
        """Replace a time of a module of the payload."""
        path = self.payload / HASH / "payload" / "node" / f"{module}.py"
        path.write_text(
            re.sub(rf"^{name} = .*", f"{name} = {seconds}", path.read_text(), flags=re.MULTILINE)
        )

    def has_telemetry(self, body: str) -> None:
        """Put a shell script in the place of the telemetry program."""
        place_payload(self.payload / HASH, self.host, body)

    def has_apptainer(self, name: str = "apptainer") -> None:
        """Put the stand-in for Apptainer on PATH."""
        shutil.copy(APPTAINER, self.folder.parent / "bin" / name)

    def start(self, text: str) -> subprocess.Popen[str]:
        """Start a script, with the cluster's folders replaced by the test's."""
        text = text.replace("$HOME/clusterctl/store/archives", str(self.payload))
        text = text.replace("/opt/clusterctl/env/bin/python", sys.executable)
        script = self.folder / "job.sbatch"
        script.write_text(text)
        return subprocess.Popen(
            # bash can't trap what whoever runs the tests has chosen to ignore
            ["env", "--default-signal=HUP,INT,TERM", "bash", str(script)],
            cwd="/",
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, text: str) -> tuple[int, str, str]:
        """Its exit status, stdout and stderr."""
        process = self.start(text)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err


def shell_job(batch: Batch, body: str, **fields: Any) -> JobSpec:
    """A job whose shell script has this body."""
    return JobSpec(
        name="j", script=user_script(batch.folder, "my job.sh", f"#!/bin/bash\n{body}\n"), **fields
    )
