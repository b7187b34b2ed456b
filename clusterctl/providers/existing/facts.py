"""The facts about a cluster that other people operate, and how each was learned, for `attach` and
`doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from clusterctl.errors import SlurmError, UsageError
from clusterctl.providers.attached import MpiProof, SiteFact
from clusterctl.providers.existing.detach import AttachedFolder
from clusterctl.providers.existing.place import PreparedFolder
from clusterctl.providers.existing.probe import Choices, SiteProbe, chosen_settings, probe
from clusterctl.providers.existing.site_description import load_site
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import Launcher
from clusterctl.state.inventory import applied_spec, inventory_of
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from clusterctl.transport.login import LOGIN_HOST, calls_of_last_hour
from clusterctl.transport.ssh import Connections
from clusterctl.util import formatting
from clusterctl.util.numbers import counted

_TEST: Final = "sbatch --test-only"
# The names of the facts that ``proof_facts`` yields.
OF_PROOF: Final = ("MPI", "compute nodes")


def examine_site(workspace: Workspace) -> tuple[SiteFact, ...]:
    """Ask the login node again. No job is submitted.

    Raises the errors of ``probe``, NotUpError if `attach` has not finished, and UsageError.
    """
    inventory = inventory_of(workspace)
    site = load_site(workspace)
    spec = applied_spec(workspace)
    with Connections(workspace.ssh_config, stays=LOGIN_HOST) as connections:
        transport = connections.to(LOGIN_HOST)
        probed, closed = _probed(transport, spec)
        place = AttachedFolder(transport, inventory.folder, inventory.cluster_id)
        entries = place.entries()
        damaged = place.damaged()
    count = len(calls_of_last_hour(workspace.calls))
    calls = SiteFact("remote commands", f"{count} in the last hour", "counted here")
    quotas = [SiteFact("quota", line, "quota") for line in probed.site.quotas]
    folder = [
        SiteFact(f"folder {entry.name}", str(entry).partition(": ")[2], "du") for entry in entries
    ]
    missing = (
        []
        if entries
        else [SiteFact("folder", f"{inventory.folder} is missing", "ls", is_problem=True)]
    )
    lost = [
        SiteFact(
            f"damaged {name}",
            "files were removed or changed, as by a purge; after `clusterctl attach`, it is made "
            "again, that of your own packages with the next job that uses it",
            "sha256sum",
            is_problem=True,
        )
        for name in damaged
    ]
    return (*site_facts(probed), *closed, *site.facts, calls, *quotas, *folder, *missing, *lost)


def _probed(transport: Transport, spec: ClusterSpec) -> tuple[SiteProbe, list[SiteFact]]:
    """Probe with the settings of jobs. If the default partition takes no job any more, probe the
    others, and say so.
    """
    chosen = chosen_settings(spec)
    partition = chosen.pop("partition", "")
    try:
        return probe(transport, Choices.of({**chosen, "partition": partition})), []
    except (SlurmError, UsageError) as exc:
        if not partition or exc.retryable:
            raise
    probed = probe(transport, Choices.of(chosen))
    value = f"{partition} takes no job; choose another: `clusterctl attach --partition ''`"
    return probed, [SiteFact("default partition", value, _TEST, is_problem=True)]


def site_facts(probed: SiteProbe) -> Iterator[SiteFact]:
    """Yield the facts that the login node has printed."""
    site = probed.site
    cluster = f"{site.slurm_version}, cluster {site.cluster_name}"
    yield SiteFact("Slurm", cluster, "sinfo --version")
    yield SiteFact("login node", f"{site.host}, glibc {site.glibc}", "uname, getconf")
    yield SiteFact("account", probed.account or "your default account", _TEST)
    for partition in probed.usable:
        limit = f", {formatting.duration(partition.max_time_s)}" if partition.max_time_s else ""
        if partition.default_time_s not in {None, partition.max_time_s}:
            limit += f", {formatting.duration(partition.default_time_s)} without --time"
        gpus = f", {partition.gpus}" if partition.gpus else ""
        size = counted(partition.node_count, "node")
        if partition.state == "down":
            size += ", but the partition is down: jobs wait"
        elif partition.in_service is not None and partition.in_service < partition.node_count:
            size += f", {partition.in_service or 'none'} in service"
        yield SiteFact(f"partition {partition.name}", f"{size}{limit}{gpus}", f"sinfo, {_TEST}")
    for attempt in probed.refused:
        yield SiteFact(f"partition {attempt.partition}", f"not for you: {attempt.answer}", _TEST)
    records = f"{site.accounting}; final states come from the jobs' own records"
    yield SiteFact("accounting", records if site.accounting else "yours is readable", "sacct")


def placed_facts(placed: PreparedFolder) -> Iterator[SiteFact]:
    """Yield the folder and the Python that `attach` has placed on the cluster."""
    yield SiteFact("folder", placed.folder, "written there")
    yield SiteFact("Python", f"{placed.version}, {placed.python}", "python3 --version")


def proof_facts(proof: MpiProof, modules: Sequence[str]) -> Iterator[SiteFact]:
    """Yield the facts that a job with ``modules`` has shown."""
    job = f"job {proof.job_id}" if proof.job_id else "sbatch"
    if proof.state == "pending":
        value = f"not proven yet: {job} has not ended; `clusterctl attach` again reads its result"
        yield SiteFact("MPI", value, job, is_known=False)
        return
    if proof.state != "proven":
        yield SiteFact("MPI", f"not proven: {proof.why}", job, is_problem=True)
        return
    by_job = f"{job} on {', '.join(proof.hosts)}" if proof.hosts else job
    with_modules = f", module {' '.join(modules)}" if modules else ""
    launcher = "srun with PMIx" if proof.launcher is Launcher.SRUN else proof.launcher.value
    yield SiteFact("MPI", f"{launcher}{with_modules}", by_job)
    if proof.glibc:
        yield SiteFact("compute nodes", f"glibc {proof.glibc}", by_job)
