#!/usr/bin/python
"""Ansible module: the NVIDIA devices of a host and their driver."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: nvidia_facts
short_description: The NVIDIA devices of a host and their driver
description:
  - Counts cards and switches on the PCI bus, which works without a driver.
options:
  devices:
    description: Folder in which the kernel shows the devices of the PCI bus.
    type: path
    default: /sys/bus/pci/devices
  driver:
    description: File with the version of the loaded driver.
    type: path
    default: /proc/driver/nvidia/version
  units:
    description: Folders in which packages install units.
    type: list
    elements: path
    default: [/usr/lib/systemd/system, /lib/systemd/system, /etc/systemd/system]
"""

NVIDIA = "0x10de"
# PCI classes of a card and of an NVSwitch.
DISPLAY = 0x03
BRIDGE = 0x06
VERSION = re.compile(r"\b\d{3}\.\d+(?:\.\d+)?\b")


def classes(devices: Path) -> Iterator[int]:
    """Yield the PCI class (0x03: GPU, 0x06: NVSwitch) of each NVIDIA device. devices: a folder in
    sysfs.
    """
    for device in sorted(devices.glob("*")):
        if read(device / "vendor") == NVIDIA:
            yield int(read(device / "class") or "0", 16) >> 16


def read(path: Path) -> str:
    """Return the text of a file in /proc or /sys; "" if it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def version(text: str) -> str:
    """Return the first driver version in a text, such as 550.54.15; "" if the text has no
    version.
    """
    match = VERSION.search(text)
    return match[0] if match else ""


def built(module: AnsibleModule) -> Iterator[str]:
    """Yield the versions of the installed nvidia kernel modules, for the running kernel first."""
    modinfo = module.get_bin_path("modinfo")
    kernels = [os.uname().release, *sorted(path.name for path in Path("/lib/modules").glob("*"))]
    for kernel in dict.fromkeys(kernels) if modinfo else ():
        _, stdout, _ = module.run_command([modinfo, "-F", "version", "-k", kernel, "nvidia"])
        if module_version := version(stdout):
            yield module_version


def facts(module: AnsibleModule) -> dict[str, Any]:
    device_classes = list(classes(Path(module.params["devices"])))
    loaded = version(read(Path(module.params["driver"])))
    units = {
        path.name
        for folder in module.params["units"]
        for path in Path(folder).glob("nvidia-*.service")
    }
    return {
        "cards": device_classes.count(DISPLAY),
        "switches": device_classes.count(BRIDGE),
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
                "default": [
                    "/usr/lib/systemd/system",
                    "/lib/systemd/system",
                    "/etc/systemd/system",
                ],
            },
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **facts(module))


if __name__ == "__main__":
    main()
