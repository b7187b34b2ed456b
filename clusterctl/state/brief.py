"""What verbs about jobs need of a cluster's record and spec, without models, which take 0.1 s to import."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl import __version__
from clusterctl.errors import MachineError
from clusterctl.state.workspace import Workspace, write_atomic

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec


@dataclass(frozen=True, slots=True)
class Brief:
    """A cluster with Slurm and a shared folder: its controller, its nodes, the account of its jobs."""

    cluster: str
    provider: str
    controller: str
    compute: tuple[str, ...]
    job_user: str
    pmix: bool


def brief_of(workspace: Workspace) -> Brief | None:
    """None where the cluster is another one, or not up, or its record is not as `up` writes it."""
    try:
        of: dict[str, Any] = json.loads(workspace.inventory.read_bytes())
        roles = {str(host["name"]): host["roles"] for host in of["hosts"]}
        found = Brief(
            cluster=of["cluster"],
            provider=of["provider"],
            controller=next(name for name, has in roles.items() if "controller" in has),
            compute=tuple(name for name, has in roles.items() if "compute" in has),
            job_user=of["job_user"],
            pmix=of["pmix"],
        )
        is_one = of["scheduler"] == "slurm" and of["shared_folder"]["kind"] != "none"
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return None
    texts = (found.cluster, found.provider, found.job_user)
    is_right = all(isinstance(text, str) for text in texts) and isinstance(found.pmix, bool)
    return found if is_one and is_right else None


@dataclass(frozen=True, slots=True)
class _Gpus:
    count: int


@dataclass(frozen=True, slots=True)
class _User:
    name: str


@dataclass(frozen=True, slots=True)
class _Monitoring:
    interval: int


@dataclass(frozen=True, slots=True)
class PartitionBrief:
    """A partition as far as jobs are concerned; ``max_time`` in seconds."""

    name: str
    nodes: int
    max_time: int | None
    gpus: _Gpus | None


@dataclass(frozen=True, slots=True)
class SpecBrief:
    """The applied spec as far as jobs are concerned; of a cluster with Slurm whose spec has no requirements.

    Its attributes are those of ClusterSpec; ``text`` is the whole spec as YAML.
    """

    partitions: tuple[PartitionBrief, ...]
    job_user: _User
    monitoring: _Monitoring
    text: str
    has_slurm: bool = True

    def count_of(self, partition: str) -> int:
        return sum(one.nodes for one in self.partitions if one.name == partition)


def spec_brief_of(workspace: Workspace) -> SpecBrief | None:
    """What was noted of the applied spec; None unless that was of this very text, by this clusterctl."""
    try:
        of: dict[str, Any] = json.loads(workspace.spec_brief.read_bytes())
        if of["of"] != _digest(workspace):
            return None
        partitions = tuple(
            PartitionBrief(**{**row, "gpus": _Gpus(row["gpus"]) if row["gpus"] else None})
            for row in of["partitions"]
        )
        return SpecBrief(partitions, _User(of["job_user"]), _Monitoring(of["interval"]), of["text"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def note_spec(workspace: Workspace, spec: ClusterSpec) -> None:
    """Note the applied spec for the next verbs, where it can be noted."""
    if not spec.has_slurm or spec.software.python.requirements is not None:
        return
    from clusterctl.spec.load import dump_spec  # noqa: PLC0415 - read as a model only now

    rows: list[Mapping[str, Any]] = [
        {
            "name": one.name,
            "nodes": spec.count_of(one.name),
            "max_time": one.max_time,
            "gpus": one.gpus.count if one.gpus is not None else None,
        }
        for one in spec.partitions
    ]
    with suppress(OSError, MachineError):
        said = {
            "of": _digest(workspace),
            "partitions": rows,
            "job_user": spec.job_user.name,
            "interval": spec.monitoring.interval,
            "text": dump_spec(spec),
        }
        if not workspace.removing.exists():
            write_atomic(workspace.spec_brief, json.dumps(said))


def _digest(workspace: Workspace) -> str:
    """Of all that the applied spec is made of: its text, the rules, and who is the default user."""
    mark = f"{__version__} {os.geteuid()}\0".encode()
    return hashlib.sha256(mark + workspace.spec.read_bytes()).hexdigest()
