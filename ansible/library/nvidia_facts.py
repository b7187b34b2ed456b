#!/usr/bin/python
"""Ansible module: which of NVIDIA's devices a host has, and the driver that is there for them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: nvidia_facts
short_description: Which of NVIDIA's devices a host has, and the driver that is there for them
description:
  - Cards and switches are counted on the PCI bus, so no driver is needed for that.
options:
  devices:
    description: Where the kernel shows the devices of the PCI bus.
    type: path
    default: /sys/bus/pci/devices
  driver:
    description: Where a driver that is loaded says its version.
    type: path
    default: /proc/driver/nvidia/version
  units:
    description: Folders in which packages put units.
    type: list
    elements: path
    default: [/usr/lib/systemd/system, /lib/systemd/system, /etc/systemd/system]
"""

NVIDIA = "0x10de"
DISPLAY, BRIDGE = 0x03, 0x06  # classes of PCI devices: a card is the one, an NVSwitch the other
VERSION = re.compile(r"\b\d{3}\.\d+(?:\.\d+)?\b")


def classes(devices: Path) -> Iterator[int]:
    """The classes of NVIDIA's devices."""
    for device in sorted(devices.glob("*")):
        if read(device / "vendor") == NVIDIA:
            yield int(read(device / "class") or "0", 16) >> 16


def read(path: Path) -> str:
    """What a file of the kernel says; "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def version(text: str) -> str:
    """The driver's version in what it says of itself."""
    match = VERSION.search(text)
    return match[0] if match else ""


def built(module: AnsibleModule) -> Iterator[str]:
    """Versions of the driver's modules, those for the kernel that runs first."""
    modinfo = module.get_bin_path("modinfo")
    kernels = [os.uname().release, *sorted(path.name for path in Path("/lib/modules").glob("*"))]
    for kernel in dict.fromkeys(kernels) if modinfo else ():
        _, said, _ = module.run_command([modinfo, "-F", "version", "-k", kernel, "nvidia"])
        if found := version(said):
            yield found


def facts(module: AnsibleModule) -> dict[str, Any]:
    """All of it."""
    found = list(classes(Path(module.params["devices"])))
    loaded = version(read(Path(module.params["driver"])))
    units = {path.name for folder in module.params["units"] for path in Path(folder).glob("nvidia-*.service")}
    return {
        "cards": found.count(DISPLAY),
        "switches": found.count(BRIDGE),
        "loaded": loaded,
        "installed": next(built(module), loaded),
        "units": sorted(units),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "devices": {"type": "path", "default": "/sys/bus/pci/devices"},
            "driver": {"type": "path", "default": "/proc/driver/nvidia/version"},
            "units": {
                "type": "list",
                "elements": "path",
                "default": ["/usr/lib/systemd/system", "/lib/systemd/system", "/etc/systemd/system"],
            },
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **facts(module))


if __name__ == "__main__":
    main()
