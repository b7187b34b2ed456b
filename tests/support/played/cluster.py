"""A cluster on this machine with doubles of Slurm's commands: a home folder and a payload folder.

`player.py` is called as sbatch, squeue, sacct, scancel, sinfo, sacctmgr and srun. Its jobs are in a
JSON file, which tests read and change. The script of a submitted job runs in bash.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clusterctl.jobs.source import source_of
from clusterctl.jobs.submit import PreparedJob, SubmittedJob, Submitter
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import Session, site_of
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.spec.job import JobSpec
from clusterctl.state.inventory import applied_spec, planned_inventory
from clusterctl.state.ledger import Ledger
from clusterctl.util.assets import payload_hash
from clusterctl.util.progress import Clock
from tests.support.local_transport import LocalTransport
from tests.support.played.batch import place_payload
from tests.support.played.player import opened

COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "sinfo", "sacctmgr", "srun", "scontrol")
SPEC = """\
version: 1
name: demo
provider: {type: local}
partitions: [{name: train, nodes: 2}]
users: [{name: hpc, uid: 10000}]
"""
# Python compiles a program at each start, and a module once.
PLAY = "import sys; sys.path.insert(0, sys.argv[1]); import player; player.main(*sys.argv[2:])"


class PlayedCluster:
    """``root`` holds the bin, the home and the state."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.ledger = Ledger(root / "workspace" / "jobs.jsonl")
        self.home.mkdir(parents=True)
        place_payload(root / "payload" / payload_hash(), root / "host")
        (root / "bin").mkdir()
        for command in COMMANDS:
            path = root / "bin" / command
            argv = [sys.executable, "-I", "-S", "-c", PLAY, str(Path(__file__).parent), command]
            path.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
            path.chmod(0o755)
        self.ledger.workspace.root.mkdir()
        self.ledger.workspace.spec.write_text(SPEC)
        self._state = root / "state.json"
        self._state.write_text(json.dumps({"next": 1, "jobs": {}}))

    def environment(self) -> dict[str, str]:
        """What makes a shell find this cluster."""
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.home), "SLURM_PLAYER_STATE": str(self._state)}

    def session(self, *, patience_s: float = 5.0, clock: Clock | None = None) -> Session:
        """A session with this cluster."""
        slurm = SlurmClient(LocalTransport(), clock or Clock(), patience_s, self.ledger)
        site = site_of(planned_inventory(applied_spec(self.ledger.workspace)))
        return Session(site, slurm, self.ledger)

    @contextmanager
    def state(self) -> Iterator[dict[str, Any]]:
        """What the player knows, to look at and to change."""
        with opened(str(self._state)) as state:
            yield state

    def job(self, job_id: str) -> dict[str, Any]:
        """What the player knows of a job."""
        with self.state() as state:
            job: dict[str, Any] = state["jobs"][job_id]
            return job

    def change(self, job_id: str, **fields: Any) -> None:
        """Change what Slurm says of a job."""
        with self.state() as state:
            state["jobs"][job_id] |= fields

    def calls(self, command: str) -> int:
        """How often a command was called."""
        with self.state() as state:
            return int(state.get("calls", {}).get(command, 0))

    def end_jobs(self) -> None:
        """End what jobs still run."""
        with self.state() as state:
            pids = [job["pid"] for job in state["jobs"].values() if job.get("pid")]
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def wait_until_ended(self, job_id: str) -> None:
        """Return when a job's script has ended."""
        for _ in range(400):
            if self.job(job_id)["state"] not in {"PENDING", "RUNNING"}:
                return
            time.sleep(0.05)
        raise AssertionError(f"job {job_id} did not end: {self.job(job_id)}")


def submit(session: Session, job: JobSpec, **prepared: Any) -> SubmittedJob:
    """Submit a job with the files of its script's folder."""
    if "source" not in prepared:
        prepared["source"] = source_of(Request.read(job))
    script = session.site.render(Request.read(job), prepared.get("environment"))
    return Submitter(session).submit(PreparedJob(Request.read(job), script, **prepared))


def submitted(session: Session, folder: Path, body: str, name: str = "mine") -> str:
    """The id of a shell script that was submitted."""
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n{body}\n")
    return submit(session, JobSpec(name=name, script=script)).job_id


def packed(session: Session, folder: Path, body: str, array: str) -> str:
    """The id of a job that runs the tasks of a shell script (`--pack`), of which none starts: the
    doubles have no steps on other nodes.
    """
    script = folder / "task.sh"
    script.write_text(f"#!/bin/bash\n{body}\n")
    job = JobSpec(name="packed", script=script, pack=True, array=array)
    logs = "#SBATCH --output=stdout.log\n#SBATCH --error=stderr.log"
    prepared = PreparedJob(
        Request.read(job), f"#!/bin/bash\n{logs}\nsleep 300\n", source=source_of(Request.read(job))
    )
    return Submitter(session).submit(prepared).job_id


def finished(
    session: Session, cluster: PlayedCluster, folder: Path, body: str, name: str = "mine"
) -> str:
    """The id of a shell script that was submitted and has ended."""
    job_id = submitted(session, folder, body, name)
    cluster.wait_until_ended(job_id)
    return job_id


def node_record(name: str, partition: str, state: str = "idle", **fields: str) -> dict[str, str]:
    """A node of 4 CPUs and 1000 MiB, as sinfo prints it. ``fields`` replace those of the same name."""
    return {
        "NodeList": name,
        "Partition": partition,
        "StateComplete": state,
        "StateLong": state,
        "Reason": "none",
        "CPUs": "4",
        "Memory": "1000",
        "Gres": "(null)",
        "User": "root",
        "AllocMem": "0",
        "CPUsState": "0/4/0/4",
        "CPUsLoad": "0.1",
        "GresUsed": "(null)",
        **fields,
    }
