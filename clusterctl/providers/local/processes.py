"""The processes of local nodes, as root of this machine sees them."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.providers.local import bind_mount, layout
from clusterctl.providers.local.machine import cgroup_members
from clusterctl.providers.local.system import run

# Programs that start a rank, and wait for it.
_STARTERS = re.compile(
    r"(?:srun|orted|prted|prterun|mpirun|mpiexec|slurmstepd|slurm_script|payload/node/(?:job|task)\.py)$"
)
# Parts of a rank that start its program, and wait for it.
_WRAPPERS = re.compile(r"(?:^|/)(?:bash|sh|dash|env|time|apptainer|singularity|starter[^/]*)$")


@dataclass(frozen=True)
class NodeProcess:
    """A process of a node, with pids on this machine.

    machine: the name of the node's machine. started: clock ticks since this machine's start.
    """

    pid: int
    name: str
    words: tuple[str, ...]
    variables: dict[str, str]
    machine: str = ""
    parent: int = 0
    started: int = 0

    @classmethod
    def read(cls, pid: int, machine: str = "") -> NodeProcess:
        """Read a process. Raise OSError if it has ended."""
        folder = Path(f"/proc/{pid}")
        texts = [
            (folder / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ")
        ]
        words, variables = ([text for text in file.split("\0") if text] for file in texts)
        pairs = (variable.partition("=") for variable in variables)
        name = (folder / "comm").read_text().strip()
        # Fields 4 and 22 of proc_pid_stat(5).
        status = (folder / "stat").read_text().rpartition(")")[2].split()
        return cls(
            pid,
            name,
            tuple(words),
            {key: value for key, _, value in pairs},
            machine,
            parent=int(status[1]),
            started=int(status[19]),
        )

    @property
    def age(self) -> tuple[int, int]:
        """A key by which older processes come first. The numbers of processes begin again."""
        return self.started, self.pid

    @property
    def parents(self) -> Iterator[NodeProcess]:
        """Yield the parent, its parent, and so on."""
        process = self
        while process.parent > 1:
            process = self.read(process.parent)
            yield process


def processes(machines: Collection[str]) -> list[NodeProcess]:
    """Return the processes of these machines."""
    running = []
    for pid, name in cgroup_members():
        if name in machines:
            with suppress(OSError):
                running.append(NodeProcess.read(pid, name))
    return running


def first_process(machine: str) -> int:
    """Return the pid of a machine's first process, or 0 if the machine is off."""
    return _first_of(process.pid for process in processes([machine]))


def _first_of(pids: Iterable[int]) -> int:
    for pid in pids:
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            if status.partition("NSpid:")[2].partition("\n")[0].split()[1:] == ["1"]:
                return pid
    return 0


def mount_again(pids: Iterable[int], folder: Path, target: str) -> bool:
    """Mount a folder of this machine in a running machine with these processes, unless ``target`` is
    that folder there. Return whether it was not.
    """
    pid = _first_of(pids)
    try:
        found = Path(f"/proc/{pid}/root{target}").lstat()
    except OSError:
        # The machine has just ended, or has no such folder.
        return False
    if os.path.samestat(found, folder.stat()):
        return False
    argv = [sys.executable, "-IS", bind_mount.__file__, str(folder), str(pid), target]
    run(argv, action=f"mounting {target} again")
    return True


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


def ranks(job: str, running: Collection[NodeProcess]) -> list[NodeProcess]:
    """Return the main process of each rank of a job, by rank. running: the processes of the job's
    nodes.
    """
    of_job = [process for process in running if process.variables.get("SLURM_JOB_ID") == job]
    programs = [process for process in of_job if not _is_ours(process)]
    in_step = [process for process in programs if "SLURM_STEP_ID" in process.variables]
    main: dict[int, NodeProcess] = {}
    # A program that no launcher started has the variables of the batch script, and is the only
    # rank. A script that calls a launcher also has these variables, but its ranks have more.
    for name, among in (
        ("RANK", programs),
        ("OMPI_COMM_WORLD_RANK", programs),
        ("SLURM_PROCID", in_step),
        ("SLURM_PROCID", programs),
    ):
        named = {
            process.pid: process for process in among if process.variables.get(name, "").isdigit()
        }
        for process in () if main else sorted(named.values(), key=lambda process: process.age):
            # The program may have started more processes, and any of them may have ended.
            with suppress(OSError):
                if named.keys().isdisjoint(parent.pid for parent in process.parents):
                    main.setdefault(int(process.variables[name]), _program(process, named.values()))
    return [main[number] for number in sorted(main)]


def _program(process: NodeProcess, among: Collection[NodeProcess]) -> NodeProcess:
    """Return the program for which a process waits, if the process is a shell or container."""
    while _WRAPPERS.search(next(iter(process.words), "")):
        children = [each for each in among if each.parent == process.pid]
        if not children:
            break
        process = min(children, key=lambda child: child.age)
    return process


def _is_ours(process: NodeProcess) -> bool:
    """Return whether a process belongs to clusterctl, to a launcher or to the batch script."""
    is_starter = any(map(_STARTERS.search, process.words[:3]))
    return is_starter or "CLUSTERCTL_WATCHER" in process.variables
