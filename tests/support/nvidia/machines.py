"""Descriptions of machines with GPUs for the stand-in of nvidia-smi, and a stand-in of dmesg for XIDs.

``install`` puts them into a folder for PATH; ``furnish`` makes a host look as if it had NVIDIA's
driver.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

PROGRAM = Path(__file__).with_name("nvidia_smi.py")

Machine = dict[str, Any]

DRIVERS = {"535": "535.261.03", "570": "570.124.06", "580": "580.173.02", "590": "590.48.01"}
"""Branches of drivers whose nvidia-smi was looked at: what each knows is in nvidia_smi.py."""

_WELL: Machine = {
    "driver": "580.95.05",
    "temperature": 41,
    "pstate": "P0",
    "compute_mode": "Default",
    "persistence_mode": "Enabled",
    "mig_mode": None,
    "ecc": 0,
    "pcie_gen": 4,
    "pcie_gen_max": 4,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "throttle": "0x0000000000000000",
    "cpus": "0-15",
    "numa": 0,
    "nvlinks": 0,
    "retired_pending": None,
    "remap_pending": "No",
    "remap_failure": "No",
    "fabric_state": None,
    "fabric_status": None,
}


def gpu(index: int, name: str, **differs: Any) -> Machine:
    """A card that is well, but for what differs."""
    own = {
        "index": index,
        "minor": index,
        "name": name,
        "uuid": f"GPU-{index:08x}-1111-2222-3333-444444444444",
        "bus_id": f"00000000:{0x10 + index:02X}:00.0",
        "memory_mib": 81559,
    }
    card = {**_WELL, **own, **differs}
    return {"mig_pending": card["mig_mode"], **card}


def with_driver(machine: Machine, version: str) -> Machine:
    """The same cards under another driver."""
    return {**machine, "gpus": [{**card, "driver": version} for card in machine["gpus"]]}


def t4() -> Machine:
    return {"gpus": [gpu(0, "Tesla T4", memory_mib=15360, pcie_gen=3, pcie_gen_max=3)]}


def rtx_4070(**differs: Any) -> Machine:
    """A workstation: no ECC, no MIG; it sleeps with a slow link."""
    idle = {
        "pstate": "P8",
        "pcie_gen": 1,
        "ecc": None,
        "memory_mib": 12282,
        "persistence_mode": "Disabled",
    }
    return {"gpus": [gpu(0, "NVIDIA GeForce RTX 4070", **{**idle, **differs})]}


def awake(**differs: Any) -> Machine:
    """The workstation at full clock, which has its whole link then."""
    return rtx_4070(**{"pstate": "P0", "pcie_gen": 4, **differs})


def h100_node(*, parts: int = 0, **differs: Any) -> Machine:
    """Eight H100 on two sockets, all linked, the last two cut into ``parts``. Minors are
    swapped.
    """
    cards = []
    for index in range(8):
        numa = index // 4
        cpus = "0-3,16-19" if numa == 0 else "4-7,20-23"
        cut = parts and index >= 6
        own: Machine = {
            "minor": index ^ 1,
            "cpus": cpus,
            "numa": numa,
            "nvlinks": 18,
            "mig_mode": "Enabled" if cut else "Disabled",
            "parts": [_part(index, number) for number in range(parts)] if cut else [],
            "pcie_gen": 5,
            "pcie_gen_max": 5,
        }
        cards.append(gpu(index, "NVIDIA H100 80GB HBM3", **{**own, **differs}))
    return {"gpus": cards}


def hot() -> Machine:
    return awake(temperature=96)


STATES: dict[str, Machine] = tomllib.loads(Path(__file__).with_name("states.toml").read_text())
"""What is recorded of machines that are not well."""


def unwell(name: str) -> Machine:
    """A workstation in one of these states."""
    state = STATES[name]
    fault = {"fault": state["says"].lstrip()} if "says" in state else {}
    more = {key: state[key] for key in ("manager",) if key in state}
    return {**rtx_4070(**state.get("cells", {})), **fault, **more, "exit": state.get("exit", 0)}


def kernel_log(name: str) -> tuple[str, ...]:
    """What the kernel's log has of it: a line that begins with spaces goes on with the one
    before.
    """
    lines = STATES[name]["kernel"]
    stamped = (f"[{1843 + i:12.6f}] {line}" for i, line in enumerate(lines))
    return tuple(line if line[0] == " " else own for line, own in zip(lines, stamped, strict=True))


def lost() -> Machine:
    """A card that has fallen off the bus."""
    return unwell("off-the-bus")


def no_driver() -> Machine:
    return unwell("no-module")


def xid(number: int, seconds: float = 1234.5) -> str:
    """A line of the kernel's log."""
    return (
        f"[{seconds:12.6f}] NVRM: Xid (PCI:0000:10:00): {number}, pid=4711, name=python3, it "
        "went wrong"
    )


def mig_minors() -> str:
    """/proc/driver/nvidia-caps/mig-minors of eight cards."""
    lines = ["config 1", "monitor 2"]
    minor = 3
    for card in range(8):
        for instance in range(15):
            lines.append(f"gpu{card}/gi{instance}/access {minor}")
            minor += 1
            for compute in range(8):
                lines.append(f"gpu{card}/gi{instance}/ci{compute}/access {minor}")
                minor += 1
    return "\n".join(lines) + "\n"


def lscpu(sockets: int = 2, cores: int = 8, threads: int = 2) -> str:
    """``lscpu --parse=CPU,SOCKET,CORE``: threads of a core are far from each other, as on most
    machines.
    """
    total = sockets * cores
    rows = [f"{cpu},{cpu % total // cores},{cpu % total}" for cpu in range(total * threads)]
    return "# CPU,Socket,Core\n" + "\n".join(rows) + "\n"


def install(
    folder: Path, machine: Machine, *, kernel_log: str = "", cpus: str | None = None
) -> dict[str, str]:
    """Put the stand-ins into a folder for PATH; the environment that they want."""
    folder.mkdir(parents=True, exist_ok=True)
    describe(folder / "machine.json", machine)
    (folder / "kernel.log").write_text(kernel_log)
    _program(folder / "nvidia-smi", PROGRAM.read_text())
    _program(folder / "dmesg", f"#!/bin/sh\nexec cat '{folder}/kernel.log'\n")
    if cpus is not None:
        (folder / "cpus").write_text(cpus)
        _program(folder / "lscpu", f"#!/bin/sh\nexec cat '{folder}/cpus'\n")
    return {"NVIDIA_STAND_IN": str(folder / "machine.json")}


def describe(file: Path, machine: Machine) -> None:
    """What the stand-ins in the same folder show from now on."""
    file.write_text(json.dumps(machine))
    manager = file.with_name("nv-fabricmanager")
    manager.unlink(missing_ok=True)
    if "manager" in machine:  # said by Ubuntu's nvidia-fabricmanager-570 570.172.08, 2026-11-24
        _program(manager, f"#!/bin/sh\necho 'Fabric Manager version is : {machine['manager']}'\n")


def _part(card: int, number: int) -> Machine:
    return {
        "index": number,
        "profile": "1g.10gb",
        "instance": 7 + number,
        "compute": 0,
        "uuid": f"MIG-{card:08x}-{number:04x}-2222-3333-444444444444",
    }


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


Sh = Callable[[str], object]  # runs a shell command on the host, as a user who may use sudo


def put(sh: Sh, path: str, content: str) -> None:
    """A program, or any other file."""
    quoted = content.replace("'", "'\\''")
    folder = PurePosixPath(path).parent
    place = f"sudo mkdir -p {folder} && sudo tee {path} >/dev/null && sudo chmod 0755 {path}"
    sh(f"printf %s '{quoted}' | ({place})")


def becomes(sh: Sh, machine: Machine) -> None:
    """What its nvidia-smi shows from now on. It makes the device files of cards."""
    put(sh, "/etc/nvidia-stand-in.json", json.dumps({**machine, "has_devices": True}))


def furnish(sh: Sh, machine: Machine) -> None:
    """Give a host the driver's programs, a kernel's log, and device files."""
    put(sh, "/usr/local/bin/nvidia-smi", PROGRAM.read_text())
    put(sh, "/usr/local/bin/dmesg", "#!/bin/sh\ncat /etc/kernel.log\n")
    put(sh, "/etc/kernel.log", "")
    becomes(sh, machine)
    minors = mig_minors()
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
