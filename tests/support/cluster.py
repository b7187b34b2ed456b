"""A real cluster of local nodes: created by the installed `clusterctl`, inspected by ordinary tools."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ruamel.yaml import YAML

from clusterctl.cluster.bake import prepare_image
from clusterctl.cluster.context import ClusterContext
from clusterctl.providers.local.provider import LocalProvider
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.openssh import ssh_config_text
from tests.support.nvidia.machines import Machine, furnish
from tests.support.processes import eventually
from tests.support.residue import nothing_left
from tests.support.verbs import Clusterctl, CommandResult

# Clusters with other users or QOS start from other templates.
_SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
slurm: {{extra: [KillWait=5], qos: [{{name: urgent, priority: 100}}]}}
monitoring: {monitoring}
partitions: {partitions}
"""


def local_spec(
    name: str, partitions: str = "{name: train, nodes: 2}", monitoring: str = "{interval: 1s}"
) -> str:
    """Return the spec of a local cluster. Clusters with this spec share templates, so only the first
    one builds them.

    partitions: the partitions, in YAML's flow style, separated by commas.
    """
    return _SPEC.format(name=name, partitions=f"[{partitions}]", monitoring=monitoring)


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up. ``cluster("status")`` runs a verb on it, in the folder
    ``runner.cwd``.
    """

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

    def __call__(
        self, *argv: str | Path, rc: int | None = 0, timeout_s: float = 300
    ) -> CommandResult:
        # Messages repeat -f in the commands that they advise, so it is omitted as users omit it.
        is_default = self.spec == self.runner.cwd / "cluster.yaml"
        chosen = () if is_default else ("-f", self.spec)
        return self.runner(*chosen, *argv, rc=rc, timeout_s=timeout_s)

    def json(self, *argv: str | Path, rc: int = 0) -> Any:
        """A verb's answer under `-o json`."""
        return self("-o", "json", *argv, rc=rc).json

    def quoting(self, *argv: str | Path) -> subprocess.CompletedProcess[str]:
        """A verb whose output may quote a job's traceback, with any exit status."""
        words = [self.runner.script, "-f", self.spec, *argv]
        env = {**os.environ, "CLUSTERCTL_HOME": str(self.runner.home)}
        return subprocess.run(
            words,
            cwd=self.runner.cwd,
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def ssh(self, host: str, command: str, *, user: str | None = None, rc: int | None = 0) -> str:
        """Plain `ssh -F` with the file that clusterctl wrote; the command's stdout. Default user: that
        of the file.
        """
        login = ["-l", user] if user else []
        argv = ["ssh", "-F", str(self.workspace / "ssh_config"), *login, host, command]
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=120, check=False
        )
        assert rc is None or done.returncode == rc, f"{command!r} on {host}: {done}"
        return done.stdout

    def end_connection(self, host: str, *, user: str) -> None:
        """End the connection to a host that commands share, so that the next has to log in."""
        argv = ["ssh", "-F", str(self.workspace / "ssh_config"), "-l", user, "-O", "exit", host]
        subprocess.run(argv, capture_output=True, timeout=60, check=True)

    def slurm_status(self) -> str:
        """Nodes and why they are out, jobs, and the end of slurmctld's log; never raises."""
        look = "sinfo -N -o '%N %T %E'; squeue; sudo tail -n 150 /var/log/slurm/slurmctld.log"
        try:
            return self.ssh(f"{self.name}-ctl", look, rc=None)
        except (OSError, subprocess.SubprocessError) as error:
            return f"nothing: {error}"

    def sacct(self, job_id: str, fields: str) -> str:
        """What the accounting says of a job once it knows it whole; it may hear of its end
        first.
        """

        def look() -> str | None:
            output = self.ssh(f"{self.name}-ctl", f"sacct -nPX -j {job_id} -o QOS,{fields}").strip()
            qos, bar, asked = output.partition("|")
            return asked if bar and qos != "Unknown" else None

        return str(eventually(look, 30, pause_s=0.5))

    def job(self, job_id: str) -> dict[str, Any]:
        """Return a job as `jobs` lists it."""
        (found,) = self.json("jobs", job_id)["jobs"]
        return dict(found)

    def job_in(self, state: str, job_id: str) -> dict[str, Any]:
        """Wait until a job is in a state, and return the job."""

        def look() -> dict[str, Any]:
            found = self.job(job_id)
            return found if found["state"] == state else {}

        return eventually(look)

    def run_of(self, job_id: str) -> Path:
        (run,) = self.json("collect", job_id)["runs"]
        return Path(run["dir"])


@contextmanager
def raised(
    name: str, spec: str, home: Path, cwd: Path, cards: Mapping[str, Machine] = MappingProxyType({})
) -> Iterator[Cluster]:
    """Raise a cluster of a spec's text, and take it down again: nothing of it may be left.

    Nodes that are to have ``cards`` are booted and get them before `up` configures anything.
    """
    file = cwd / "cluster.yaml"
    runner = Clusterctl(home, cwd)
    file.write_text(spec)
    with nothing_left(home):
        try:
            if cards:
                provision(
                    ClusterSpec.model_validate(YAML(typ="safe").load(spec)), Workspace(home / name)
                )
                for node, machine in cards.items():
                    furnish(partial(shell, Workspace(home / name), node), machine)
            yield Cluster(name, file, runner, runner("-o", "json", "-f", file, "up").json)
        finally:
            runner("-f", file, "down", "--yes", "--discard", rc=None)


def provision(spec: ClusterSpec, workspace: Workspace) -> Inventory:
    """Boot the machines of a local cluster, as `up` does before it configures them."""
    workspace.create()
    workspace.create_secrets()
    assert isinstance(spec.provider, LocalSettings)
    provider = LocalProvider(spec.provider)
    prepare_image(ClusterContext.of(spec, workspace=workspace, provider=provider))
    inventory = provider.apply(spec, workspace).inventory
    workspace.known_hosts.write_text(inventory.known_hosts())
    workspace.ssh_config.write_text(ssh_config_text(inventory, workspace, workspace.key))
    return inventory


def shell(workspace: Workspace, node: str, command: str) -> None:
    """Run a command on a machine that was provisioned."""
    # It boots.
    argv = [
        "ssh",
        "-o",
        "ConnectionAttempts=30",
        "-F",
        str(workspace.ssh_config),
        node,
        command,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
