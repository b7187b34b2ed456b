"""What a node is told of its health: what it must have, and from where on it is sick (role health)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from clusterctl.hosts.gpus import Driver
from clusterctl.spec import ClusterSpec
from clusterctl.state.inventory import Inventory

HEALTH_REASON: Final = "clusterctl health:"

_DISKS: Final = ("/", "/tmp", "/var", "/var/tmp", "/run", "/var/log")  # noqa: S108
# XIDs that tell of hardware, not of a program: in NVIDIA's "XID Errors", those to reset or report.
_GRAVE_XIDS: Final = (
    *(48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110),
    *(119, 120, 136, 140, 143, 154, 155, 156, 158),
)


def health_file(spec: ClusterSpec, inventory: Inventory, drivers: Mapping[str, Driver]) -> str:
    """JSON: host -> the settings of its check. A host that was not seen is taken to have no GPUs."""
    settings = {
        host.name: _of(host.name, spec, drivers.get(host.name, Driver())) for host in inventory.compute
    }
    return json.dumps(settings, indent=1, sort_keys=True) + "\n"


def _of(name: str, spec: ClusterSpec, driver: Driver) -> dict[str, Any]:
    limits = spec.monitoring.health
    return {
        "node": name,
        "gpus": {"cards": driver.cards, "parts": sum(bool(gpu.caps) for gpu in driver.gpus)},
        "gpu_temperature_c": limits.gpu_temperature,
        "xids": _GRAVE_XIDS,
        "disks": _DISKS,
        "disk_free_mib": limits.disk_free,
        "clock_offset_s": limits.clock_offset,
    }
