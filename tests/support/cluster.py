"""A real cluster that tests use: raised by the console script, looked at with ordinary tools."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.support.residue import nothing_left
from tests.support.verbs import Clusterctl, Ran


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up. ``cluster("status")`` runs a verb on it, in the folder ``runner.cwd``."""

    name: str
    spec: Path
    runner: Clusterctl
    raised: dict[str, Any]  # what `up -o json` said

    @property
    def workspace(self) -> Path:
        return self.runner.home / self.name

    @property
    def user(self) -> str:
        """The account that jobs run as."""
        return str(YAML(typ="safe").load(self.workspace / "spec.yaml")["users"][0]["name"])

    def __call__(self, *argv: str | Path, rc: int | None = 0, timeout_s: float = 300) -> Ran:
        return self.runner("-f", self.spec, *argv, rc=rc, timeout_s=timeout_s)

    def json(self, *argv: str | Path, rc: int = 0) -> Any:
        """A verb's answer under `-o json`."""
        return self("-o", "json", *argv, rc=rc).json

    def ssh(self, host: str, command: str, *, user: str = "clusterctl", rc: int | None = 0) -> str:
        """Plain `ssh -F` with the file that clusterctl wrote; the command's stdout."""
        argv = ["ssh", "-F", str(self.workspace / "ssh_config"), "-l", user, host, command]
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=120, check=False
        )
        assert rc is None or done.returncode == rc, f"{command!r} on {host}: {done}"
        return done.stdout

    def told(self) -> str:
        """Nodes and why they are out, jobs, and the end of slurmctld's log; never raises."""
        look = "sinfo -N -o '%N %T %E'; squeue; sudo tail -n 150 /var/log/slurm/slurmctld.log"
        try:
            return self.ssh(f"{self.name}-ctl", look, rc=None)
        except (OSError, subprocess.SubprocessError) as error:
            return f"nothing: {error}"

    def sacct(self, job_id: str, fields: str) -> str:
        """What the accounting says of a job once it knows it whole; it may hear of its end first."""
        deadline = time.monotonic() + 30
        while True:
            said = self.ssh(f"{self.name}-ctl", f"sacct -nPX -j {job_id} -o QOS,{fields}").strip()
            qos, _, asked = said.partition("|")
            if said and qos != "Unknown":
                return asked
            assert time.monotonic() < deadline, f"no accounting of job {job_id}: {said!r}"
            time.sleep(0.5)

    def run_of(self, job_id: str) -> Path:
        """Collect a job and return its run folder."""
        (run,) = self.json("collect", job_id)["runs"]
        return Path(run["dir"])


@contextmanager
def raised(name: str, spec: str, home: Path, cwd: Path) -> Iterator[Cluster]:
    """Raise a cluster of a spec's text, and take it down again: nothing of it may be left."""
    file, runner = cwd / f"{name}.yaml", Clusterctl(home, cwd)
    file.write_text(spec)
    with nothing_left(home):
        try:
            yield Cluster(name, file, runner, runner("-o", "json", "-f", file, "up").json)
        finally:
            runner("-f", file, "down", "--yes", "--discard-runs", rc=None)


def records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
