"""A host that looks as if it had NVIDIA's driver: stand-ins of its programs, and device files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import PurePosixPath

from tests.support.nvidia import machines

Sh = Callable[[str], object]  # runs a shell command on the host, as a user who may use sudo


def put(sh: Sh, path: str, content: str) -> None:
    """A program, or any other file."""
    quoted, folder = content.replace("'", "'\\''"), PurePosixPath(path).parent
    place = f"sudo mkdir -p {folder} && sudo tee {path} >/dev/null && sudo chmod 0755 {path}"
    sh(f"printf %s '{quoted}' | ({place})")


def becomes(sh: Sh, machine: machines.Machine) -> None:
    """What its nvidia-smi shows from now on."""
    put(sh, "/etc/nvidia-stand-in.json", json.dumps(machine))


def furnish(sh: Sh, machine: machines.Machine) -> None:
    """Give a host the driver's programs, a kernel's log, and device files."""
    put(sh, "/usr/local/bin/nvidia-smi", machines.PROGRAM.read_text())
    put(sh, "/usr/local/bin/dmesg", "#!/bin/sh\ncat /etc/kernel.log\n")
    put(sh, "/etc/kernel.log", "")
    becomes(sh, machine)
    minors = machines.mig_minors()
    put(sh, "/opt/driver/nvidia-caps/mig-minors", minors)
    cut = [f"gpu{gpu['minor']}/" for gpu in machine["gpus"] if gpu.get("parts")]
    devices = [f"nvidia{gpu['minor']}" for gpu in machine["gpus"]]
    devices += [
        f"nvidia-caps/nvidia-cap{line.split()[1]}"
        for line in minors.splitlines()
        if line.startswith(tuple(cut))
    ]
    make = f"for file in {' '.join(devices)}; do sudo ln -sf /dev/null /dev/$file; done"
    sh(f"sudo mount --bind /opt/driver /proc/driver && sudo mkdir /dev/nvidia-caps && {make}")
