"""What a node is told of its health: what it must have, and from where on it is sick (role health)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from clusterctl.inventory import Inventory
from clusterctl.slurm.facts import NodeFacts
from clusterctl.spec import ClusterSpec

HEALTH_PROGRAM: Final = "/opt/clusterctl/health"
HEALTH_SETTINGS: Final = "/opt/clusterctl/health.json"
HEALTH_REASON: Final = "clusterctl health:"

_DISKS: Final = ("/", "/tmp", "/var", "/var/tmp", "/run", "/var/log")  # noqa: S108
# XIDs that tell of hardware, not of a program: in NVIDIA's "XID Errors", those to reset or report.
_GRAVE_XIDS: Final = (
    *(48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110),
    *(119, 120, 136, 140, 143, 154, 155, 156, 158),
)


def health_file(spec: ClusterSpec, inventory: Inventory, facts: Mapping[str, NodeFacts]) -> str:
    """JSON: host -> the settings of its check. A host that was not seen is taken to have no GPUs."""
    settings = {host.name: _of(host.name, spec, facts.get(host.name)) for host in inventory.compute}
    return json.dumps(settings, indent=1, sort_keys=True) + "\n"


def _of(name: str, spec: ClusterSpec, facts: NodeFacts | None) -> dict[str, Any]:
    limits, gpus = spec.monitoring.health, facts.gpus if facts else ()
    return {
        "node": name,
        "gpus": {"cards": facts.cards if facts else 0, "parts": sum(bool(gpu.caps) for gpu in gpus)},
        "gpu_temperature_c": limits.gpu_temperature,
        "xids": _GRAVE_XIDS,
        "disks": _DISKS,
        "disk_free_mib": limits.disk_free,
        "clock_offset_s": limits.clock_offset,
    }
