"""The facts about a cluster that other people operate, and how each was learned, for `attach` and
`doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from clusterctl.errors import SlurmError, UsageError
from clusterctl.providers.attached import SiteFact
from clusterctl.providers.existing.detach import AttachedFolder
from clusterctl.providers.existing.place import Placed, write_profile
from clusterctl.providers.existing.probe import Choices, Probed, chosen_settings, probe
from clusterctl.providers.existing.prove import Proof, Unproven, read_first_proof
from clusterctl.providers.existing.site_description import SiteDescription, load_site
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import Launcher
from clusterctl.spec.providers.existing import settings_of
from clusterctl.state.inventory import Inventory, applied_spec, inventory_of
from clusterctl.state.workspace import WAIT_S, Workspace, write_atomic
from clusterctl.transport.base import Transport
from clusterctl.transport.login import LOGIN_HOST, calls_of_last_hour
from clusterctl.transport.ssh import Connections
from clusterctl.util import formatting
from clusterctl.util.numbers import counted
from clusterctl.util.progress import SILENT

_TEST: Final = "sbatch --test-only"
_YES: Final = {True: "yes", False: "no"}


def examine_site(workspace: Workspace) -> tuple[SiteFact, ...]:
    """Ask the login node again. No job is submitted. A proof by the user's first job is recorded.

    Raises the errors of ``probe``, NotUpError if `attach` has not finished, and UsageError.
    """
    inventory = inventory_of(workspace)
    site = load_site(workspace)
    spec = applied_spec(workspace)
    with Connections(workspace.ssh_config, stays=LOGIN_HOST) as connections:
        transport = connections.to(LOGIN_HOST)
        probed, closed = _probed(transport, spec)
        saved = site.facts
        if not any(fact.fact == "MPI" for fact in saved):
            saved += tuple(facts_of_first_job(transport, probed.site, spec, inventory, workspace))
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
    return (*site_facts(probed), *closed, *saved, calls, *quotas, *folder, *missing, *lost)


def _probed(transport: Transport, spec: ClusterSpec) -> tuple[Probed, list[SiteFact]]:
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


def facts_of_first_job(
    transport: Transport,
    site: SiteDescription,
    spec: ClusterSpec,
    inventory: Inventory,
    workspace: Workspace,
) -> Iterator[SiteFact]:
    """Yield the facts that the user's first job has found. Record a proof as `attach` does."""
    settings = settings_of(spec)
    if settings.launcher is not None:
        modules = f", module {' '.join(settings.modules)}" if settings.modules else ""
        yield SiteFact("MPI", f"{settings.launcher}{modules}", "the spec, or an earlier proof")
        return
    first = read_first_proof(transport, inventory.folder)
    if first is None:
        yield SiteFact("MPI", "not proven yet", "no job has run the proof", is_known=False)
        return
    job_id, outcome = first
    facts = tuple(proof_facts(outcome, f"job {job_id}"))
    if isinstance(outcome, Unproven):
        yield from facts
        return
    settings = settings.model_copy(update=outcome.settings)
    glibc_minor = outcome.nodes.oldest_glibc(inventory.glibc_minor)
    with workspace.lock("doctor", wait_s=WAIT_S, waiting=SILENT.note):
        write_profile(transport, inventory.folder, outcome.modules, site.slurm_path)
        record = replace(
            inventory, pmix=settings.launcher is Launcher.SRUN, glibc_minor=glibc_minor
        )
        write_atomic(workspace.inventory, record.text)
        write_atomic(workspace.spec, dump_spec(spec.model_copy(update={"provider": settings})))
        earlier = load_site(workspace)
        replace(earlier, facts=(*earlier.facts, *facts)).save(workspace)
    yield from facts


def site_facts(probed: Probed) -> Iterator[SiteFact]:
    """Yield the facts that the login node has printed."""
    site = probed.site
    learned = probed.site.learned
    yield SiteFact(
        "Slurm", f"{site.slurm_version}, cluster {site.cluster_name}", learned["slurm_version"]
    )
    internet = f"internet: {_YES[site.internet]}"
    clock = f"clock {site.clock_ahead_s:+.1f} s"
    yield SiteFact(
        "login node",
        f"{site.host}, glibc {site.glibc}, {internet}, {clock}",
        "uname, getconf, date",
    )
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
    yield SiteFact(
        "accounting", records if site.accounting else "yours is readable", learned["accounting"]
    )


def placed_facts(placed: Placed) -> Iterator[SiteFact]:
    """Yield the folder and the Python that `attach` has placed on the cluster."""
    yield SiteFact("folder", placed.folder, "written there")
    yield SiteFact("Python", f"{placed.version}, {placed.python}", "python3 --version")


def proof_facts(proof: Proof | Unproven, job: str) -> Iterator[SiteFact]:
    """Yield the facts that the proof has found, if it is not pending. job: the job that ran the
    proof.
    """
    if isinstance(proof, Unproven):
        if proof.code != "pending":
            yield SiteFact("MPI", f"not proven: {proof.why}", job, is_problem=True)
        return
    nodes = proof.nodes
    by_job = f"{job} on {', '.join(proof.nodes.names)}"
    modules = f", module {' '.join(proof.modules)}" if proof.modules else ""
    yield SiteFact(
        "MPI",
        f"{'srun with PMIx' if proof.launcher == 'pmix' else proof.launcher}{modules}",
        by_job,
    )
    software = f"Python {nodes.version}, glibc {nodes.glibc}"
    yield SiteFact("compute nodes", f"{software}, internet: {_YES[nodes.internet]}", by_job)
    folders = [
        f"{name} ({'in memory' if kind == 'tmpfs' else kind}, {formatting.size(kib << 10)} free)"
        for name, (kind, kib) in nodes.scratch.items()
    ]
    yield SiteFact("local folders", "; ".join(folders) or "none of the usual ones", by_job)
    engines = [f"{name} ({version})" for name, version in nodes.engines.items()]
    yield SiteFact("containers", ", ".join(engines) or "no engine", by_job)
    for host, names in nodes.gpus.items():
        yield SiteFact(f"GPUs of {host}", ", ".join(names), by_job)
