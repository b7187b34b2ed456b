"""The description of a Slurm site by its login node, in the file `site.json` of an attached
cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from clusterctl.errors import UsageError
from clusterctl.providers.attached import ProofJob, SiteFact
from clusterctl.spec.names import Launcher
from clusterctl.state.workspace import Workspace, write_atomic

_NAME: Final = "site.json"
# Pattern of names of environment modules, for Python and for grep -E: modules with an MPI library
# that programs of the wheel mpi4py can load. Sites put folders before a name, and versions after.
MPI_MODULE: Final = (
    "(.*/)?(openmpi[0-9]*|ompi|hpcx|mpich|intel-?mpi|intel-oneapi-mpi|impi|mvapich2?|cray-mpich)"
    "([-/].*)?"
)


def is_mpi_module(name: str) -> bool:
    return re.fullmatch(MPI_MODULE, name, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class SitePartition:
    """A partition of the site.

    max_time_s: the time limit of its jobs in seconds. None: no limit.
    default_time_s: the time limit of jobs without a request. None: the partition's limit.
    nodes: the names of its nodes as Slurm writes them, such as `gpu[01-40]`.
    gpus: the generic resources of its nodes, such as `gpu:a100:4`. Different nodes: separated by a
        comma.
    state: `up`, `down`, `drain` or `inact`.
    in_service: how many of its nodes Slurm would start a job on. None: unknown.
    """

    name: str
    is_default: bool
    max_time_s: int | None
    nodes: str
    node_count: int
    gpus: str = ""
    state: str = "up"
    default_time_s: int | None = None
    in_service: int | None = None


@dataclass(frozen=True, slots=True)
class SiteDescription:
    """A Slurm site, as its login node describes it to an ordinary account.

    account: the user's account name on the login node. home: the home folder.
    slurm_path: the folder of Slurm's commands.
    accounting: why sacct gives no answer, in its own words. Empty: it answers.
    pythons: path on the login node -> version, such as `3.11.2`.
    modules: environment modules of MPI and Python, by name.
    max_submit: how many jobs of the chosen account the user may have in the queue. None: no limit
        is known.
    needs_time: whether Slurm refuses jobs without a time limit of their own.
    mpi_types: the values that `srun --mpi` accepts.
    quotas: lines of `quota`. glibc, arch: of the login node, such as `2.36` and `x86_64`.
    variables: those that the chosen modules and a login shell set for Slurm's commands.
    facts: those that `doctor` does not ask for again. proof: the job that proves MPI. None: none has
        proven it, and none waits.
    """

    slurm_version: str
    cluster_name: str
    account: str
    home: str
    slurm_path: str
    host: str = ""
    accounting: str = ""
    pythons: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    partitions: tuple[SitePartition, ...] = ()
    max_array: int = 1001
    max_submit: int | None = None
    needs_time: bool = False
    mpi_types: tuple[str, ...] = ()
    quotas: tuple[str, ...] = ()
    glibc: str = ""
    arch: str = "x86_64"
    variables: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[SiteFact, ...] = ()
    proof: ProofJob | None = None

    @property
    def may_have_pmix(self) -> bool:
        """Whether srun can start MPI programs by PMIx, or has not told."""
        return not self.mpi_types or any(name.startswith("pmix") for name in self.mpi_types)

    def save(self, workspace: Workspace) -> None:
        write_atomic(workspace.root / _NAME, json.dumps(asdict(self), indent=1) + "\n")


def load_site(workspace: Workspace) -> SiteDescription:
    """Read `site.json`. Raise UsageError if it is missing or damaged."""
    path = workspace.root / _NAME
    try:
        return site_of_record(json.loads(path.read_bytes()))
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise UsageError(
            f"the description of the site of cluster {workspace.root.name!r} can't be read",
            code="record-damaged",
            about="site",
            where=str(path),
            why=str(exc),
            fix="run `clusterctl attach` again, which writes the file",
        ) from exc


def site_of_record(record: Mapping[str, Any]) -> SiteDescription:
    """Return the site that ``dataclasses.asdict`` has turned into JSON, also of an earlier
    version.
    """
    lists = {key: tuple(value) for key, value in record.items() if isinstance(value, list)}
    lists["partitions"] = tuple(
        SitePartition(**_known(SitePartition, row)) for row in record["partitions"]
    )
    lists["facts"] = tuple(SiteFact(**row) for row in record["facts"])
    job = record.get("proof")
    proof = job and ProofJob(
        **{**job, "launcher": Launcher(job["launcher"]), "modules": tuple(job["modules"])}
    )
    return SiteDescription(**_known(SiteDescription, {**record, **lists, "proof": proof}))


def _known(
    kind: type[SiteDescription | SitePartition], record: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of a record that are fields of ``kind``."""
    return {field.name: record[field.name] for field in fields(kind) if field.name in record}
