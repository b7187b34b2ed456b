"""The declared switches -> topology.conf, by which Slurm keeps a job's nodes close to each other."""

from __future__ import annotations

from collections.abc import Mapping

from clusterctl.spec import ClusterSpec, OnpremProvider
from clusterctl.spec.fabric import Switch
from clusterctl.util.render import render


def switches_of(spec: ClusterSpec) -> Mapping[str, Switch]:
    """The switches by name; none where none are declared."""
    return spec.provider.fabric if isinstance(spec.provider, OnpremProvider) else {}


def topology_text(spec: ClusterSpec) -> str:
    """topology.conf; without lines where no switches are declared, and then Slurm does not read it."""
    lines = [f"SwitchName={name} {_below(switch)}" for name, switch in switches_of(spec).items()]
    return render("topology.conf.j2", lines=lines)


def topology_settings(spec: ClusterSpec) -> dict[str, str]:
    """What slurm.conf says of it."""
    return {"TopologyPlugin": "topology/tree"} if switches_of(spec) else {}


def _below(switch: Switch) -> str:
    return f"Nodes={switch.hosts}" if switch.hosts is not None else f"Switches={switch.switches}"
