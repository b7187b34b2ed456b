"""What verbs about jobs need to know of a cluster: plain values of its record, hosts.json, or of a spec.

The models of the record and of specs take 0.1 s to import.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.errors import NotUpError, UsageError
from clusterctl.spec.names import ROOT
from clusterctl.state.workspace import Workspace

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """A partition: its nodes in order, the longest time of a job in seconds, and the GPUs of each node.

    ``max_time`` and ``gpus`` are None where the spec names none.
    """

    name: str
    nodes: tuple[str, ...]
    max_time: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """A cluster as far as jobs are concerned.

    Args:
        compute: the hosts that run jobs.
        job_user: the account that jobs run as.
        is_shared: whether the hosts share a folder, with the homes.
        pmix: whether Slurm itself starts the ranks of MPI programs.
        interval_s: seconds between two samples of telemetry.
        requirements: the requirements file of the jobs' Python; None: no file.
        root: the folder on the hosts with what jobs use, such as their Python.
        provider: the type of the provider of a cluster that is up.
    """

    cluster: str
    controller: str
    compute: tuple[str, ...]
    job_user: str
    has_slurm: bool
    is_shared: bool
    pmix: bool
    partitions: tuple[PartitionFacts, ...]
    interval_s: int
    requirements: str | None = None
    root: str = ROOT
    provider: str = ""


def facts_of(workspace: Workspace) -> ClusterFacts:
    """The facts that `up` has recorded.

    Raises:
        NotUpError: the cluster is not up.
        UsageError: its record is damaged.
    """
    try:
        return _recorded(json.loads(workspace.inventory.read_bytes()))
    except FileNotFoundError as exc:
        raise not_up(workspace) from exc
    except (ValueError, LookupError, TypeError, StopIteration) as exc:
        raise damaged(workspace) from exc


def _recorded(record: dict[str, Any]) -> ClusterFacts:
    roles = {str(host["name"]): host["roles"] for host in record["hosts"]}
    partitions = (PartitionFacts(**{**row, "nodes": (*row["nodes"],)}) for row in record["partitions"])
    facts = ClusterFacts(
        cluster=record["cluster"],
        provider=record["provider"],
        controller=next(name for name, has in roles.items() if "controller" in has),
        compute=tuple(name for name, has in roles.items() if "compute" in has),
        job_user=record["job_user"],
        has_slurm=record["scheduler"] == "slurm",
        is_shared=record["shared_folder"]["kind"] != "none",
        pmix=record["pmix"],
        partitions=tuple(partitions),
        interval_s=record["interval_s"],
        requirements=record["requirements"],
        root=record["root"],
    )
    texts = (facts.cluster, facts.provider, facts.job_user, facts.root)
    if not facts.partitions or not all(isinstance(text, str) for text in texts):
        raise ValueError("a value is missing")
    return facts


def not_up(workspace: Workspace) -> NotUpError:
    """The error of a cluster that has no record."""
    what = f"cluster {workspace.root.name!r} is not up"
    fix = "run `clusterctl up` first, or name another with --cluster (`clusterctl list` shows them)"
    return NotUpError(what, code="not-up", where=str(workspace.root), fix=fix)


def damaged(workspace: Workspace) -> UsageError:
    """The error of a cluster whose record can't be understood."""
    what = f"what is noted of cluster {workspace.root.name!r} is damaged"
    fix = "run `clusterctl up`, which writes it anew"
    return UsageError(what, code="inventory-damaged", where=str(workspace.inventory), fix=fix)


def applied_text(workspace: Workspace) -> bytes:
    """The text of the spec that `up` was last given.

    Raises:
        UsageError: the record of the cluster lacks it.
    """
    try:
        return workspace.spec.read_bytes()
    except OSError as exc:
        raise damaged(workspace) from exc


def facts_of_spec(spec: ClusterSpec) -> ClusterFacts:
    """The facts of a resolved spec, whose cluster may be not up yet."""
    recorded = job_settings(spec)
    del recorded["scheduler"]
    return ClusterFacts(
        cluster=spec.name,
        controller=spec.controller_host,
        compute=tuple(node for one in recorded["partitions"] for node in one.nodes),
        has_slurm=spec.has_slurm,
        is_shared=True,
        pmix=True,
        **recorded,
    )


def job_settings(spec: ClusterSpec) -> dict[str, Any]:
    """What of a spec is recorded in hosts.json for verbs about jobs: fields of an inventory."""
    requirements = spec.software.python.requirements
    return {
        "scheduler": spec.scheduler,
        "job_user": spec.job_user.name,
        "partitions": tuple(
            PartitionFacts(one.name, spec.node_names(one), one.max_time, one.gpus.count if one.gpus else None)
            for one in spec.partitions
        ),
        "interval_s": spec.monitoring.interval,
        "requirements": None if requirements is None else str(requirements),
    }
