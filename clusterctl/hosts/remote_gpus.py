"""A host's NVIDIA cards: those on the PCI bus, and what their driver says of them. Also for Python 3.6."""

import platform
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from clusterctl.hosts.remote_run import read, run

PCI_DEVICES = "/sys/bus/pci/devices"
PCI_DISPLAY, PCI_BRIDGE, PCI_NVIDIA = 0x03, 0x06, "0x10de"  # a bridge of NVIDIA's is an NVSwitch
# Known to `--query-gpu` from driver 535 on; older ones answer nothing of it. Rows have a switch of their own.
STATES = "fabric.state,fabric.status,mig.mode.current,mig.mode.pending,retired_pages.pending"
ROWS = "remapped_rows.pending,remapped_rows.failure"
MANAGER = re.compile(r"Fabric Manager version is\s*:\s*(\S+)")
SHOWN = re.compile(r", \d{3}\.\d+[\d.]*$")  # a card's name and its driver's version
EFI_VARIABLES = "/sys/firmware/efi/efivars"


def nvidia_devices() -> List[Tuple[int, int]]:
    """The PCI classes of NVIDIA's devices and their numbers, whether a driver knows them or not."""
    found = []
    for path in Path(PCI_DEVICES).glob("*"):
        kind = read(f"{path}/class").strip()
        if read(f"{path}/vendor").strip() == PCI_NVIDIA and kind:
            found.append((int(kind, 16) >> 16, int(read(f"{path}/device").strip() or "0", 16)))
    return found


def gpus() -> Dict[str, Any]:
    devices = nvidia_devices()
    kinds = [kind for kind, _ in devices]
    lines = (nvidia_smi("name,driver_version") or "").splitlines()
    shown = [line.rsplit(", ", 1) for line in lines if SHOWN.search(line)]
    manager = MANAGER.search(run(["sh", "-c", "exec nv-fabricmanager --version 2>&1"], any_exit=True) or "")
    secure = Path(EFI_VARIABLES).glob("SecureBoot-*")
    return {
        "cards": kinds.count(PCI_DISPLAY),
        "switches": kinds.count(PCI_BRIDGE),
        "shown": [name for name, _ in shown],
        "driver": shown[0][1] if shown else None,
        "fault": next((line for line in lines if line.strip() and not SHOWN.search(line)), ""),
        "states": states() if shown else [],
        "manager": manager.group(1) if manager else "",
        "oldest": min((number for kind, number in devices if kind == PCI_DISPLAY and number), default=None),
        "installed": driver_on_disk(),
        "nouveau": Path("/sys/module/nouveau").is_dir(),
        "secure_boot": any(path.read_bytes()[-1:] == b"\1" for path in secure),
    }


def states() -> List[Dict[str, str]]:
    """Of each card the fields that tell of its links, its memory and its parts, as far as they are known."""
    none = {}  # type: Dict[str, str]
    told = zip_longest(cells(STATES), cells(ROWS, "remapped-rows"), fillvalue=none)
    return [dict(own, **rows) for own, rows in told]


def cells(fields: str, switch: str = "gpu") -> List[Dict[str, str]]:
    names = fields.split(",")
    rows = [line.split(", ") for line in (nvidia_smi(fields, switch) or "").splitlines()]
    return [dict(zip(names, row)) for row in rows if len(row) == len(names)]  # noqa: B905 - 3.6 has no strict


def nvidia_smi(fields: str, switch: str = "gpu") -> Optional[str]:
    """What it says of these fields of each card, or in their place."""
    asked = "exec nvidia-smi --query-{}={} --format=csv,noheader 2>&1".format(switch, fields)
    return run(["sh", "-c", "command -v nvidia-smi >/dev/null && " + asked], any_exit=True)


def driver_on_disk() -> str:
    """The version of NVIDIA's kernel module, for this kernel or another one; "" if there is none."""
    kernels = [platform.release(), *sorted(path.name for path in Path("/lib/modules").glob("*"))]
    said = (run(["modinfo", "-F", "version", "-k", kernel, "nvidia"]) for kernel in kernels)
    return next((text.strip() for text in said if text and text.strip()), "")
