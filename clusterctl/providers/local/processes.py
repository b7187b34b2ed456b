"""The processes of local nodes, as root of this machine sees them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.providers.local import layout
from clusterctl.providers.local.machine import cgroup_members

# Programs that start a rank, and wait for it.
_STARTERS = re.compile(
    r"(?:srun|orted|prted|prterun|mpirun|mpiexec|slurmstepd|payload/node/(?:job|task)\.py)$"
)


@dataclass(frozen=True)
class Process:
    """A process of a node, with its pid on this machine. machine: the name of the node's machine."""

    pid: int
    name: str
    words: tuple[str, ...]
    variables: dict[str, str]
    machine: str = ""

    @classmethod
    def read(cls, pid: int, machine: str = "") -> Process:
        """Raises OSError if the process has ended."""
        folder = Path(f"/proc/{pid}")
        texts = [(folder / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ")]
        words, variables = ([text for text in file.split("\0") if text] for file in texts)
        pairs = (variable.partition("=") for variable in variables)
        name = (folder / "comm").read_text().strip()
        return cls(pid, name, tuple(words), {key: value for key, _, value in pairs}, machine)

    @property
    def parents(self) -> Iterator[Process]:
        """Yield the parent, its parent, and so on."""
        process = self
        while True:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            parent = int(stat.rpartition(")")[2].split()[1])
            if parent <= 1:
                return
            process = self.read(parent)
            yield process


def processes(machines: Collection[str]) -> list[Process]:
    """Return the processes of these machines."""
    running = []
    for pid, name in cgroup_members():
        if name in machines:
            with suppress(OSError):
                running.append(Process.read(pid, name))
    return running


def first_process(machine: str) -> int:
    """Return the pid of a machine's first process, or 0 if the machine is off."""
    for process in processes([machine]):
        with suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            if status.partition("NSpid:")[2].partition("\n")[0].split()[1:] == ["1"]:
                return process.pid
    return 0


def kill_host(message: dict[str, Any]) -> dict[str, Any]:
    """Kill a node at once, as a loss of its power would."""
    query = layout.HostQuery.model_validate(message)
    machines = [machine for machine, host in _hosts(query.id).items() if host == query.host]
    for pid in filter(None, map(first_process, machines)):
        os.kill(pid, signal.SIGKILL)
    return {}


def signal_ranks(message: dict[str, Any]) -> dict[str, Any]:
    """Send a signal to ranks of a job. Return the hosts of these ranks, by rank."""
    request = layout.SignalRequest.model_validate(message)
    hosts = _hosts(request.id)
    main = ranks(request.job, processes(hosts))
    signalled = []
    for process in main[-1:] if request.last else main:
        # The rank may have ended.
        with suppress(ProcessLookupError):
            os.kill(process.pid, request.number)
            signalled.append(hosts[process.machine])
    return {"hosts": signalled}


def _hosts(cluster_id: str) -> dict[str, str]:
    """Map the name of each machine of a cluster to the name of the node."""
    return layout.ClusterState.model_validate_json(layout.state_file(cluster_id).read_bytes()).hosts


def ranks(job: str, running: Collection[Process]) -> list[Process]:
    """Return the main process of each rank of a job, by rank. running: the processes of the job's nodes."""
    of_job = [process for process in running if process.variables.get("SLURM_JOB_ID") == job]
    programs = [process for process in of_job if not _is_ours(process)]
    main: dict[int, Process] = {}
    for name in ("RANK", "SLURM_PROCID"):
        named = {process.pid: process for process in programs if process.variables.get(name, "").isdigit()}
        for process in () if main else sorted(named.values(), key=lambda process: process.pid):
            # The program may have started more processes, and any of them may have ended.
            with suppress(OSError):
                if named.keys().isdisjoint(parent.pid for parent in process.parents):
                    main.setdefault(int(process.variables[name]), process)
    return [main[number] for number in sorted(main)]


def _is_ours(process: Process) -> bool:
    """Return whether a process belongs to clusterctl, to a launcher or to the batch script."""
    variables = process.variables
    is_starter = any(map(_STARTERS.search, process.words[:3]))
    return is_starter or "CLUSTERCTL_WATCHER" in variables or "SLURM_STEP_ID" not in variables
