"""The nodes of a local cluster as root of this machine sees them: processes, links, files, Slurm's
states.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.support.clusters import Cluster
from clusterctl.providers.local import layout
from clusterctl.providers.local.processes import NodeProcess, first_process, processes
from clusterctl.providers.local.system import NETNS_DIR

# systemd(1), SIGNALS: what these signals make a container's systemd do.
POWER_OFF = signal.SIGRTMIN + 4
REBOOT = signal.SIGRTMIN + 5
# Folders of a node in which a job may leave files.
_LEFT_IN = ("tmp", "dev/shm", "run/clusterctl", "var/spool/clusterctl-slurmd")
# PyTorch leaves such folders in /tmp after every job.
_OF_PYTORCH = ("torchelastic_", "torchinductor_")
_ANSWER_S = 10


@dataclass(frozen=True)
class Nodes:
    """All hosts of a cluster, the controller too."""

    cluster: Cluster

    @cached_property
    def id(self) -> str:
        return (self.cluster.workspace / "id").read_text().strip()

    @cached_property
    def machines(self) -> dict[str, str]:
        """Map each host to the name of its machine."""
        numbers = json.loads(layout.state_file(self.id).read_text())["numbers"]
        return {host: layout.machine_name(self.id, number) for host, number in numbers.items()}

    @property
    def compute(self) -> list[str]:
        return [host for host in self.machines if host != self.cluster.controller]

    @cached_property
    def shared(self) -> Path:
        """The folder that is /shared on all hosts."""
        return layout.shared_folder(self.id)

    def processes(self, *hosts: str) -> list[NodeProcess]:
        return processes({self.machines[host] for host in hosts})

    def init(self, host: str) -> int:
        """Return the pid of a host's first process, or 0 if the host is off."""
        return first_process(self.machines[host])

    def signal_init(self, number: int, *hosts: str) -> None:
        for pid in [self.init(host) for host in hosts]:
            os.kill(pid, number)

    def kill(self, name: str, *hosts: str) -> None:
        """Kill all processes of this name on the hosts."""
        killed = [process for process in self.processes(*hosts) if process.name == name]
        assert killed, f"no {name} on {', '.join(hosts)}"
        for process in killed:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def link(self, host: str, state: str) -> None:
        """Connect a host to the cluster's network, or cut it off. state: up or down."""
        inside = ["nsenter", f"--net={NETNS_DIR / layout.netns_name(self.id)}"]
        subprocess.run(
            [*inside, "ip", "link", "set", f"vb-{self.machines[host]}", state], check=True
        )

    def on_controller(self, command: str) -> str:
        """Run a command as root on the controller, without SSH; "" if that fails."""
        pid = self.init(self.cluster.controller)
        argv = [
            "nsenter",
            f"--target={pid}",
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "sh",
            "-c",
            command,
        ]
        with suppress(subprocess.TimeoutExpired):
            if pid:
                return subprocess.run(
                    argv, capture_output=True, text=True, timeout=_ANSWER_S, check=False
                ).stdout
        return ""

    def states(self) -> dict[str, str]:
        """Map each compute node to its state in Slurm's words, such as idle or down*. Empty: no
        answer.
        """
        return dict(
            line.split() for line in self.on_controller("sinfo -h -N -o '%N %T'").splitlines()
        )

    def files(self) -> set[str]:
        """List the files in which a job may leave something behind, on hosts that are on."""
        found = set()
        for host in self.compute:
            if pid := self.init(host):
                for folder in _LEFT_IN:
                    found |= {
                        f"{host}:/{folder}/{name}"
                        for name in _names(Path(f"/proc/{pid}/root/{folder}"))
                    }
        return found


def _names(folder: Path) -> list[str]:
    with suppress(OSError):
        return [path.name for path in folder.iterdir() if not path.name.startswith(_OF_PYTORCH)]
    return []
