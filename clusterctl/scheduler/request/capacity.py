"""The free capacity of a partition: nodes, CPUs, GPUs by type, and nodes that a job fits.

A node counts as free only if Slurm reports the use of its CPUs, memory and GPUs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from clusterctl.scheduler.slurm.values import gpus_by_type
from clusterctl.spec.units import parse_slurm_memory_mib

if TYPE_CHECKING:
    from clusterctl.scheduler.base import NodeInfo
    from clusterctl.scheduler.request.request import Request

# A node with another flag, such as PLANNED or COMPLETING, may be kept for another job.
_FREE_STATES: Final = frozenset({"IDLE", "MIXED"})
_FREE_FLAGS: Final = frozenset({"CLOUD", "DYNAMIC_NORM"})
# The quantities, as in ``Directive.quantities``, that decide a Shape, some in ways that depend on the
# nodes.
_QUANTITIES: Final = frozenset(
    (
        "--nodes --ntasks --ntasks-per-node --cpus-per-task --exclusive --ntasks-per-socket "
        "--ntasks-per-core --ntasks-per-gpu --cores-per-socket --sockets-per-node "
        "--threads-per-core --overcommit --mem --gpus-per-node"
    ).split()
)
_TYPED_GPUS: Final = re.compile(r"(?:gpu:)?(?:(?P<type>[^:,\d][^:,]*):)?(?P<count>\d+)")


@dataclass(frozen=True, slots=True)
class Shape:
    """The resources that a job requests on each of its nodes.

    memory_mib: 0: the job names no memory. gpu_type: "": any.
    """

    nodes: int = 1
    cpus: int = 1
    memory_mib: int = 0
    gpus: int = 0
    gpu_type: str = ""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The nodes of a partition.

    free_nodes: nodes without jobs on which Slurm starts jobs. unknown_nodes: nodes for which Slurm
        does not report the resources in use, so none of these nodes counts as free.
    gpus, free_gpus: type of GPU ("": Slurm reports no type) -> number.
    fitting: the number of nodes with room for a job's part of a node now, by the scarcest of its
        CPUs, memory and GPUs. None: the job's request for a node is unknown.
    """

    nodes: int = 0
    usable_nodes: int = 0
    free_nodes: int = 0
    unknown_nodes: int = 0
    cpus: int = 0
    free_cpus: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)
    free_gpus: Mapping[str, int] = field(default_factory=dict)
    fitting: int | None = None


@dataclass(frozen=True, slots=True)
class _Free:
    cpus: int = 0
    memory_mib: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)

    def fits(self, shape: Shape) -> bool:
        gpus = self.gpus.get(shape.gpu_type, 0) if shape.gpu_type else sum(self.gpus.values())
        # Without a number, Slurm gives a job at least some memory.
        has_memory = self.memory_mib >= max(shape.memory_mib, 1)
        return self.cpus >= shape.cpus and has_memory and gpus >= shape.gpus


def capacity_of(nodes: Iterable[NodeInfo], shape: Shape | None) -> Capacity:
    """Return the free capacity of a partition's nodes. shape: the job's request. None: unknown."""
    listed = [*nodes]
    free = [_free_of(node) for node in listed]
    total: Counter[str] = Counter()
    free_gpus: Counter[str] = Counter()
    for node in listed:
        total.update(gpus_by_type(node.gres))
    for each in free:
        free_gpus.update(each.gpus if each is not None else {})
    known = [each for each in free if each is not None]
    return Capacity(
        nodes=len(listed),
        usable_nodes=sum(node.usable for node in listed),
        free_nodes=sum(
            node.state == "IDLE" and each is not None and each.cpus > 0
            for node, each in zip(listed, free, strict=True)
        ),
        unknown_nodes=len(listed) - len(known),
        cpus=sum(node.cpus for node in listed),
        free_cpus=sum(each.cpus for each in known),
        gpus=dict(total),
        free_gpus={name: free_gpus[name] for name in total},
        fitting=None if shape is None else sum(each.fits(shape) for each in known),
    )


def _free_of(node: NodeInfo) -> _Free | None:
    """Return the free resources of a node. None: Slurm does not report the resources in use."""
    is_open = node.usable and node.state in _FREE_STATES and {*node.flags} <= _FREE_FLAGS
    if not is_open:
        return _Free()
    gpus = gpus_by_type(node.gres)
    used = gpus_by_type(node.gres_used)
    is_unknown = not node.cpus or node.allocated_cpus is None or node.allocated_mib is None
    # Slurm lists every type of GPU of a node in GresUsed, with the number 0 for unused types.
    if is_unknown or not gpus.keys() <= used.keys():
        return None
    return _Free(
        max(node.cpus - (node.allocated_cpus or 0), 0),
        max(node.memory_mib - (node.allocated_mib or 0), 0),
        {name: max(count - used[name], 0) for name, count in gpus.items()},
    )


def shape_of(request: Request) -> Shape | None:
    """Return the resources that a job requests on each node. None: they depend on the nodes."""
    given = {one.own_name: one for one in request.options if one.quantities & _QUANTITIES}
    if given.keys() - _READ.keys():
        return None
    values: dict[str, int] = {}
    gpu_type = ""
    for name, directive in given.items():
        with suppress(ValueError):
            values[name] = _READ[name](directive.value or "")
        if name not in values:
            return None
        if name in {"--gres", "--gpus-per-node"} and (
            typed := _TYPED_GPUS.match(directive.value or "")
        ):
            gpu_type = typed["type"] or ""
    nodes = values.get("--nodes", 1)
    tasks = values.get("--ntasks-per-node", 1)
    if all_tasks := values.get("--ntasks"):
        if all_tasks > 1 and "--nodes" not in values:
            # Slurm chooses the number of nodes.
            return None
        tasks = -(-all_tasks // nodes)
    return Shape(
        nodes=nodes,
        cpus=tasks * values.get("--cpus-per-task", 1),
        memory_mib=values.get("--mem", 0),
        gpus=values.get("--gpus-per-node", values.get("--gres", 0)),
        gpu_type=gpu_type,
    )


def _gpus(value: str) -> int:
    match = _TYPED_GPUS.fullmatch(value)
    if match is None:
        raise ValueError(value)
    return int(match["count"])


_READ: Final[Mapping[str, Callable[[str], int]]] = {
    "--nodes": int,
    "--ntasks": int,
    "--ntasks-per-node": int,
    "--cpus-per-task": int,
    "--mem": parse_slurm_memory_mib,
    "--gpus-per-node": _gpus,
    "--gres": _gpus,
}
