"""Attach a cluster that other people operate: probe, place the folder, prove MPI, write the record.

After `attach` was killed, the next call continues: the workspace has the login before anything is written
on the cluster, and the folder there keeps its id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ClusterShell.NodeSet import NodeSet

from clusterctl.errors import UsageError
from clusterctl.providers.existing.first_job import leave_proof
from clusterctl.providers.existing.place import Placed
from clusterctl.providers.existing.probe import Choices, Probed, probe
from clusterctl.providers.existing.prove import Proof, ProofOptions, Unproven, place_and_prove
from clusterctl.providers.existing.provider import placed_facts, proof_facts, site_facts
from clusterctl.providers.existing.site import Fact, Site, SitePartition, save_site
from clusterctl.spec.common import MOST_GPUS, Gpus, Partition
from clusterctl.spec.existing import ExistingSettings
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import Launcher, is_cluster_name
from clusterctl.spec.units import format_duration
from clusterctl.state.facts import PartitionFacts
from clusterctl.state.inventory import CONTROLLER, Host, Inventory, SharedFolder, applied_if_known
from clusterctl.state.workspace import WAIT_S, Workspace, state_home, write_atomic
from clusterctl.transport.login import LOGIN_HOST, checked_login, login_of, write_login_files
from clusterctl.transport.master import end_all_connections
from clusterctl.transport.ssh import Connections
from clusterctl.util.disk import translating_write_errors
from clusterctl.util.process import temporary_folder
from clusterctl.util.progress import SILENT, Reporter

_NEW: Final = ".attach-"
# Of Slurm's `gpu:a100:4(S:0-1)`: the type and the number. A site may leave out the type.
_GRES: Final = re.compile(r"gpu(?::([A-Za-z0-9_.-]+?))?:([0-9]+)(?:\(.*\))?")
PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `attach`. Empty: clusterctl decides, or keeps an earlier decision.

    login: the destination for ssh. spec: a spec with the settings to start from. None: no spec.
    patience_s: longest wait for the start of the job that proves MPI. reporter: shown the progress.
    """

    login: str
    name: str = ""
    folder: str = ""
    account: str = ""
    qos: str = ""
    partition: str = ""
    modules: Sequence[str] = ()
    python: str = ""
    spec: ClusterSpec | None = None
    patience_s: float = PATIENCE_S
    wait_s: float = WAIT_S
    reporter: Reporter = SILENT


@dataclass(frozen=True, slots=True)
class Attached:
    """An attached cluster. outcome: the proof, or the reason why it failed."""

    workspace: Workspace
    spec: ClusterSpec
    probed: Probed
    placed: Placed
    outcome: Proof | Unproven

    @property
    def proof(self) -> Proof | None:
        return self.outcome if isinstance(self.outcome, Proof) else None

    @property
    def unproven(self) -> Unproven | None:
        return self.outcome if isinstance(self.outcome, Unproven) else None

    @property
    def placed_facts(self) -> tuple[Fact, ...]:
        proven = proof_facts(self.proof, "a job") if self.proof else ()
        return (*placed_facts(self.placed), *proven)

    @property
    def facts(self) -> tuple[Fact, ...]:
        return (*site_facts(self.probed), *self.placed_facts)


def attach(request: Request) -> Attached:
    """Make a cluster ready for jobs, or check it again.

    Raises:
        UsageError: the site lacks the requested partition, or software that jobs need.
        SlurmError: Slurm accepts no job of this account.
        MachineError: the machine has no Slurm. TransferError: it has too little room.
        TransportError: it can't be reached. LockedError: another `attach` is at work.
    """
    request = replace(request, login=checked_login(request.login))
    earlier = _known_workspace(request)
    with ExitStack() as stack:
        if earlier is not None:
            stack.enter_context(earlier.lock("attach", wait_s=request.wait_s, waiting=request.reporter.note))
            previous = request.spec or applied_if_known(earlier)
            workspace, probed = earlier, _probed(request, earlier, previous)
        else:
            previous = request.spec
            workspace, probed = _probed_first(request, stack)
        return _completed(request, workspace, previous, probed)


def _known_workspace(request: Request) -> Workspace | None:
    """Return the workspace with this name, or else with this login. UsageError: the name is taken."""
    with_login = [
        Workspace(path.parent)
        for path in sorted(state_home().glob("*/login"))
        if login_of(path.with_name("ssh_config")) == request.login and not path.parent.name.startswith(".")
    ]
    if not request.name:
        return with_login[0] if len(with_login) == 1 else None
    named = _checked_name(request)
    return named if named in with_login else None


def _checked_name(request: Request) -> Workspace:
    """Return the workspace of the requested name. UsageError: another cluster has this name."""
    if not is_cluster_name(request.name):
        raise UsageError(
            f"--name {request.name} can't be the name of a cluster",
            code="not-a-cluster-name",
            fix="use a lower-case letter, then at most 19 lower-case letters, digits or dashes",
        )
    workspace = Workspace.of(request.name)
    if workspace.root.exists() and (login := login_of(workspace.ssh_config)) != request.login:
        raise UsageError(
            f"there is another cluster with the name {request.name!r}",
            code="name-taken",
            where=str(workspace.root),
            why=f"it is attached as {login}" if login else "`clusterctl up` has created it",
            fix="choose another name with --name",
        )
    return workspace


def _probed_first(request: Request, stack: ExitStack) -> tuple[Workspace, Probed]:
    """Probe a new cluster, and create its workspace, which is named after the answer. Lock it.

    The probe's folder becomes the workspace, with its open connection, so a second factor is asked only once.
    """
    home = state_home()
    with translating_write_errors(home):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with temporary_folder(home, prefix=_NEW) as folder:
        first = Workspace(folder / "new")
        try:
            probed = _probed(request, first, request.spec)
            request = replace(request, name=request.name or _name_of(probed.site, request))
            workspace = _checked_name(request)
            stack.enter_context(
                workspace.lock("attach", wait_s=request.wait_s, waiting=request.reporter.note)
            )
            if not workspace.root.exists():
                with translating_write_errors(workspace.root):
                    first.root.rename(workspace.root)
        finally:
            # A connection that the workspace does not have would stay open.
            if first.root.exists():
                end_all_connections(first.ssh_config)
    return workspace, probed


def _name_of(site: Site, request: Request) -> str:
    """Return the site's name for the cluster, or else the login node's, as a name of a cluster here."""
    host = request.login.rpartition("@")[2].removeprefix("ssh://").partition(":")[0].partition(".")[0]
    for text in (site.cluster_name, host, site.host.partition(".")[0]):
        name = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:20].rstrip("-")
        if is_cluster_name(name):
            return name
    return "cluster"


def _probed(request: Request, workspace: Workspace, previous: ClusterSpec | None) -> Probed:
    workspace.create()
    write_login_files(request.login, workspace)
    settings = _settings(previous)
    kept = settings.model_dump(exclude_none=True) if settings else {}
    choices = Choices(
        request.account or kept.get("account", ""),
        request.qos or kept.get("qos", ""),
        request.partition or (previous.partitions[0].name if previous else ""),
        request.python or kept.get("python", ""),
        tuple(request.modules or kept.get("modules", ())),
        kept.get("slurm_path", ""),
    )
    request.reporter.step("probe")
    with Connections(workspace.ssh_config, stays=LOGIN_HOST) as connections:
        return probe(connections.to(LOGIN_HOST), choices)


def _settings(spec: ClusterSpec | None) -> ExistingSettings | None:
    return spec.provider if spec is not None and isinstance(spec.provider, ExistingSettings) else None


def _completed(
    request: Request, workspace: Workspace, previous: ClusterSpec | None, probed: Probed
) -> Attached:
    """Place and prove, then write the spec, the site and the hosts of a probed cluster."""
    write_login_files(request.login, workspace)
    workspace.removing.unlink(missing_ok=True)
    settings = _new_settings(request, _settings(previous), probed)
    spec = _spec(workspace.root.name, settings, probed, previous)
    # From now on, `detach` knows the folder, even if this process is killed.
    write_atomic(workspace.spec, dump_spec(spec))
    request.reporter.step("place and prove")
    options = ProofOptions(
        probed.partition,
        probed.account,
        settings.qos or "",
        settings.modules,
        settings.launcher,
        request.patience_s,
        settings.python,
        request.reporter,
    )
    # The login node's `python3` may be too old for clusterctl's programs.
    folders = ":".join(dict.fromkeys(str(Path(python).parent) for python in probed.site.pythons))
    with Connections(workspace.ssh_config, stays=LOGIN_HOST, path=folders) as connections:
        placed, outcome = place_and_prove(
            connections.to(LOGIN_HOST), probed.site, settings.folder, workspace.cluster_id(), options
        )
        is_pending = isinstance(outcome, Unproven) and outcome.code == "pending"
        if is_pending and settings.launcher is None:
            leave_proof(connections.to(LOGIN_HOST), probed.site, placed, options, probed.proof_nodes)
    workspace.adopt_id(placed.cluster_id)
    proven = outcome.settings if isinstance(outcome, Proof) else {}
    settings = settings.model_copy(update={"folder": placed.folder, **proven})
    spec = spec.model_copy(update={"provider": settings})
    write_atomic(workspace.spec, dump_spec(spec))
    attached = Attached(workspace, spec, probed, placed, outcome)
    save_site(workspace, probed.site, attached.placed_facts)
    inventory = _inventory(spec, probed, placed, outcome)
    write_atomic(workspace.inventory, inventory.model_dump_json(indent=2) + "\n")
    return attached


def _new_settings(request: Request, previous: ExistingSettings | None, probed: Probed) -> ExistingSettings:
    """Return the settings: as requested, or else as before, or else as the site says."""
    kept = previous.model_dump(exclude_none=True) if previous else {}
    folder = request.folder or (previous.folder if previous else "~/clusterctl")
    requested = {
        "folder": re.sub("^~/", f"{probed.site.home}/", folder),
        "qos": request.qos,
        "modules": tuple(request.modules),
        "python": request.python,
    }
    of_site = {
        "type": "existing",
        "login": request.login,
        "account": probed.account or None,
        "slurm_path": probed.site.slurm_path,
    }
    return ExistingSettings.model_validate(
        {**kept, **{key: value for key, value in requested.items() if value}, **of_site}
    )


def _spec(name: str, settings: ExistingSettings, probed: Probed, previous: ClusterSpec | None) -> ClusterSpec:
    """Return the spec, with the partitions as Slurm lists them and all other keys as before."""
    prices = {p.name: p.price_per_hour for p in previous.partitions} if previous else {}
    partitions = tuple(
        Partition(
            name=partition.name,
            nodes=max(partition.node_count, 1),
            max_time=format_duration(partition.max_time_s) if partition.max_time_s else None,
            gpus=gpus_of(partition),
            price_per_hour=prices.get(partition.name),
        )
        for partition in probed.usable
    )
    if previous is not None:
        kept = {"name": name, "provider": settings, "partitions": partitions}
        return previous.model_copy(update=kept)
    return ClusterSpec(version=1, name=name, provider=settings, partitions=partitions)


def gpus_of(partition: SitePartition) -> Gpus | None:
    """Return the GPUs of each node. None: the nodes have no GPUs, or different GPUs."""
    kinds = _GRES.findall(partition.gpus)
    if len(kinds) != 1 or " " in partition.gpus:
        return None
    name, count = kinds[0]
    kind = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return (
        Gpus(type=kind if len(kind) > 1 else "gpu", count=int(count))
        if 1 <= int(count) <= MOST_GPUS
        else None
    )


def _inventory(spec: ClusterSpec, probed: Probed, placed: Placed, outcome: Proof | Unproven) -> Inventory:
    site, settings = probed.site, _settings(spec)
    if settings is None:
        raise TypeError("the spec is not of an attached cluster")
    has_pmix = any(name.startswith("pmix") for name in site.mpi_types)
    requirements = spec.software.python.requirements
    return Inventory(
        cluster=spec.name,
        cluster_id=placed.cluster_id,
        provider=settings.type,
        hosts=(
            Host(name=LOGIN_HOST, address=site.host, user=site.account, roles=(CONTROLLER,), host_key=""),
        ),
        network="",
        shared=str(Path(placed.folder).parent),
        shared_folder=SharedFolder(kind="existing"),
        job_user=site.account,
        partitions=tuple(
            PartitionFacts(
                partition.name,
                tuple(NodeSet(partition.nodes)),
                partition.max_time_s,
                gpus.count if (gpus := gpus_of(partition)) else None,
            )
            for partition in probed.usable
        ),
        interval_s=spec.monitoring.interval,
        requirements=None if requirements is None else str(requirements),
        max_array=site.max_array,
        root=placed.folder,
        folder=placed.folder,
        python=placed.node.python,
        glibc_minor=outcome.nodes.oldest_glibc(placed.node.glibc_minor),
        pmix=settings.launcher is Launcher.SRUN if settings.launcher else has_pmix,
        no_accounting=site.accounting,
        is_foreign=True,
        slurm_path=site.slurm_path,
        account=settings.account or "",
        qos=settings.qos or "",
        baked=True,
    )
