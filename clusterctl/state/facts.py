"""Properties of a cluster that commands for jobs need, read from its file hosts.json or from a
spec.

This module does not import the pydantic models of hosts.json and of specs, because that takes 0.1
s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from clusterctl.errors import NotUpError, UsageError
from clusterctl.spec.names import FOLDER, MAX_ARRAY_SIZE, ROOT, did_you_mean
from clusterctl.state.workspace import Workspace, clusters_up

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """A Slurm partition of the cluster.

    nodes: the names of its nodes, in order.
    max_time: the time limit of jobs in seconds. None: the spec sets no limit.
    gpus: number of GPUs of each node. None: the spec does not set it.
    """

    name: str
    nodes: tuple[str, ...]
    max_time: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Properties of a cluster that commands for jobs need.

    Args:
        compute: names of the hosts that run jobs. job_user: the account that jobs run as.
        is_shared: whether the hosts have a shared folder, with the home folders.
        pmix: whether Slurm itself starts the ranks of MPI programs.
        interval_s: seconds between two samples of telemetry.
        requirements: the pip requirements file for the Python of all jobs. None: the spec has no
            such file.
        root: the folder on the hosts with the software of jobs, such as their Python.
        folder: the folder with the job user's files of clusterctl. A relative path starts at the
            home.
        python, glibc_minor: release of the Python of jobs, such as 3.11, and glibc
            2.``glibc_minor`` of the nodes. "": those of the hosts' distribution.
        max_array: Slurm's MaxArraySize; indices of job arrays are lower.
        max_submit: how many jobs of ``account`` Slurm's queue takes. None: unknown, or any number.
        provider: the type of provider in the spec. "" if these properties were read from a spec.
        no_accounting: why Slurm has no accounting that the job user may read. "": it has.
        account, qos: of jobs that name none. "": Slurm's defaults.
        is_foreign: whether other people run the cluster, so that clusterctl should ask their Slurm
            rarely.
        slurm_path: the folder of Slurm's commands, if PATH may lack it. "": PATH has it.
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
    folder: str = FOLDER
    python: str = ""
    glibc_minor: int = 0
    max_array: int = MAX_ARRAY_SIZE
    max_submit: int | None = None
    provider: str = ""
    no_accounting: str = ""
    is_foreign: bool = False
    account: str = ""
    qos: str = ""
    slurm_path: str = ""

    @property
    def path(self) -> str:
        """The folders that PATH on the controller may lack: Slurm's, and that of the Python of
        jobs.
        """
        return f"{self.slurm_path}:{self.root}/env/bin" if self.is_foreign else self.slurm_path


def facts_of(workspace: Workspace) -> ClusterFacts:
    """Read the properties from hosts.json. NotUpError: there is no hosts.json. UsageError: it is
    damaged.
    """
    try:
        return _facts_of_record(json.loads(workspace.inventory.read_bytes()))
    except FileNotFoundError as exc:
        raise not_up(workspace) from exc
    except (ValueError, LookupError, TypeError, StopIteration) as exc:
        raise damaged(workspace) from exc


def _facts_of_record(record: dict[str, Any]) -> ClusterFacts:
    roles = {str(host["name"]): host["roles"] for host in record["hosts"]}
    partitions = (
        PartitionFacts(**{**row, "nodes": (*row["nodes"],)}) for row in record["partitions"]
    )
    same = {
        field.name: record[field.name] for field in fields(ClusterFacts) if field.name in record
    }
    derived = {
        "controller": next(
            name for name, host_roles in roles.items() if "controller" in host_roles
        ),
        "compute": tuple(name for name, host_roles in roles.items() if "compute" in host_roles),
        "has_slurm": record["scheduler"] == "slurm",
        "is_shared": record["shared_folder"]["kind"] != "none",
        "partitions": tuple(partitions),
        **{name: record[name] for name in ("requirements", "root", "provider")},
    }
    facts = ClusterFacts(**{**same, **derived})
    texts = (facts.cluster, facts.provider, facts.job_user, facts.root, facts.folder, facts.python)
    if not facts.partitions or not all(isinstance(text, str) for text in texts):
        raise ValueError("a value is missing")
    return facts


def not_up(workspace: Workspace) -> NotUpError:
    """Return the error for a cluster that is not up."""
    message = f"cluster {workspace.root.name!r} is not up"
    command = workspace.update
    if not workspace.root.exists():
        command += " (`clusterctl attach` if other people operate the cluster)"
    fix = f"run {command} first, or choose another cluster with --cluster"
    fix += " (`clusterctl list` shows all)"
    error = NotUpError(message, code="not-up", where=str(workspace.root), fix=fix)
    near = did_you_mean(workspace.root.name, clusters_up())
    error.fix = " Otherwise ".join(filter(None, (near, error.fix)))
    return error


def damaged(workspace: Workspace) -> UsageError:
    """Return the error for a cluster with a damaged hosts.json."""
    message = f"the record of cluster {workspace.root.name!r} is damaged"
    fix = f"run {workspace.update}, which writes the record again"
    return UsageError(message, code="inventory-damaged", where=str(workspace.inventory), fix=fix)


def applied_text(workspace: Workspace) -> bytes:
    """Return the text of the spec of the last `clusterctl up`. Raise UsageError if it can't be
    read.
    """
    try:
        return workspace.spec.read_bytes()
    except OSError as exc:
        raise no_spec(workspace, exc.strerror or str(exc)) from exc


def no_spec(workspace: Workspace, reason: str = "") -> UsageError:
    """Return the error for a cluster without the spec of its last `up`."""
    name = workspace.root.name
    return UsageError(
        f"the recorded spec of cluster {name!r} can't be read",
        code="spec-not-recorded",
        where=str(workspace.spec),
        why=reason,
        fix="run `clusterctl up -f FILE` with the cluster's spec file, which records it again; "
        f"`clusterctl down --cluster {name}` removes the cluster without it",
    )


def facts_of_spec(spec: ClusterSpec) -> ClusterFacts:
    """Return the properties that the cluster of a spec has or will have; the cluster need not be
    up.
    """
    recorded = job_settings(spec)
    del recorded["scheduler"]
    return ClusterFacts(
        cluster=spec.name,
        controller=spec.controller_host,
        compute=tuple(node for partition in recorded["partitions"] for node in partition.nodes),
        has_slurm=spec.has_slurm,
        is_shared=True,
        pmix=True,
        **recorded,
    )


def _partitions(spec: ClusterSpec) -> Iterator[PartitionFacts]:
    gpus: dict[str, int | None] = {}
    for partition in spec.partitions:
        count = partition.gpus.count if partition.gpus else None
        names = spec.node_names(partition)
        gpus |= dict.fromkeys(names, count)
        yield PartitionFacts(partition.name, names, partition.max_time, count)
    for line, names in spec.more_partitions.items():
        counts = {gpus[name] for name in names}
        yield PartitionFacts(
            line.value, names, line.max_time_s, counts.pop() if len(counts) == 1 else None
        )


def job_settings(spec: ClusterSpec) -> dict[str, Any]:
    """Return the fields of ``Inventory`` that job commands need, from a spec: name of the field ->
    value.
    """
    requirements = spec.software.python.requirements
    return {
        "scheduler": spec.scheduler,
        "job_user": spec.users[0].name if spec.users else "",
        "partitions": tuple(_partitions(spec)),
        "interval_s": spec.monitoring.interval,
        "requirements": None if requirements is None else str(requirements),
        "max_array": spec.slurm.max_array,
    }
