"""Attach a cluster that other people operate: probe, place the folder, write the record. The caller
proves MPI by a job, whose result ``record_proof`` adds.

After `attach` was killed, the next call continues: the workspace has the login before anything is
written on the cluster, and the folder there keeps its id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from ClusterShell.NodeSet import NodeSet, NodeSetException
from pydantic import ValidationError

from clusterctl.errors import CommandError, TransportError, UsageError
from clusterctl.providers.attached import AttachedCluster, AttachRequest, MpiProof, ProofJob
from clusterctl.providers.existing.detach import AttachedFolder
from clusterctl.providers.existing.facts import OF_PROOF, placed_facts, proof_facts, site_facts
from clusterctl.providers.existing.place import (
    OLDEST_GLIBC,
    PreparedFolder,
    expanded,
    glibc_minor,
    mpi_modules,
    place,
    with_standalone_python,
)
from clusterctl.providers.existing.probe import Choices, SiteProbe, chosen_settings, probe
from clusterctl.providers.existing.site_description import SiteDescription, SitePartition, load_site
from clusterctl.spec.base import PATTERNS
from clusterctl.spec.common import MOST_GPUS, Gpus, Partition
from clusterctl.spec.job_options import wrong_flags
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import Launcher, is_cluster_name
from clusterctl.spec.providers.existing import ExistingSettings, settings_of
from clusterctl.spec.units import shown
from clusterctl.state.inventory import (
    CONTROLLER,
    Host,
    Inventory,
    PartitionFacts,
    SharedFolder,
    applied_if_known,
    inventory_if_known,
    inventory_of,
)
from clusterctl.state.workspace import WAIT_S, Workspace, state_home, write_atomic
from clusterctl.transport.base import Transport
from clusterctl.transport.login import LOGIN_HOST, checked_login, login_of, write_login_files
from clusterctl.transport.master import end_all_connections
from clusterctl.transport.ssh import Connections
from clusterctl.util import formatting
from clusterctl.util.disk import translating_write_errors
from clusterctl.util.process import temporary_folder
from clusterctl.util.progress import SILENT, Reporter

_NEW: Final = ".attach-"
# The type and the number in Slurm's `gpu:a100:4(S:0-1)`. A site may leave out the type.
_GRES: Final = re.compile(r"gpu(?::([^:,()\s]+?))?:([0-9]+)(?:\(.*\))?")
_CHOSEN: Final = (*(field.name for field in fields(Choices)), "folder", "launcher")


def attach(request: AttachRequest) -> AttachedCluster:
    """Make a cluster ready for jobs, or check it again. No job is submitted.

    Raises:
        UsageError: the site lacks the requested partition, or software that jobs need.
        SlurmError: Slurm accepts no job of this account.
        MachineError: the machine has no Slurm. TransferError: files can't be written there.
        TransportError: it can't be reached. LockedError: another `attach` is at work.
    """
    request = replace(request, login=checked_login(request.login))
    _reject_wrong_flags(request)
    earlier = _known_workspace(request)
    with ExitStack() as stack:
        if earlier is not None and login_of(earlier.ssh_config) == request.login:
            stack.enter_context(
                earlier.lock("attach", wait_s=request.wait_s, waiting=request.reporter.note)
            )
            start = _start(request, earlier)
            workspace = earlier
            probed = _probed(request, earlier, start.chosen)
        else:
            start = _start(request, earlier)
            workspace, probed = _probed_first(request, start, stack)
        write_login_files(request.login, workspace)
        workspace.removing.unlink(missing_ok=True)
        settings = _new_settings(request, start, probed)
        spec = _spec(workspace.root.name, settings, probed, start.spec)
        request.reporter.step("place")
        placed = _place(request, workspace, probed, spec)
        workspace.adopt_id(placed.cluster_id)
        found = {"folder": placed.folder, "modules": placed.modules}
        settings = _fitting({**settings.model_dump(), **found}, request)
        spec = spec.model_copy(update={"provider": settings})
        site = _site_record(start, settings, probed, placed)
        inventory = _inventory(spec, probed, placed, inventory_if_known(workspace))
        site.save(workspace)
        write_atomic(workspace.spec, dump_spec(spec))
        write_atomic(workspace.inventory, inventory.text)
        return _attached(workspace, spec, probed, placed, site)


def _attached(
    workspace: Workspace,
    spec: ClusterSpec,
    probed: SiteProbe,
    placed: PreparedFolder,
    site: SiteDescription,
) -> AttachedCluster:
    settings = settings_of(spec)
    launchers = _launchers(settings, site)
    return AttachedCluster(
        workspace=workspace,
        spec=spec,
        folder=placed.folder,
        account=probed.account,
        partitions=tuple(partition.name for partition in probed.usable),
        proof_nodes=probed.proof_nodes,
        minutes=probed.test_minutes,
        needs_time=site.needs_time,
        launchers=launchers,
        modules=settings.modules,
        other_modules=tuple(
            name for name in mpi_modules(site.modules) if name not in settings.modules
        ),
        waiting=site.proof.job_id if site.proof and not site.proof.is_proven else "",
        has_launcher=settings.launcher is not None,
        site_python="" if settings.python or placed.has_own_python else placed.python,
        facts=(*site_facts(probed), *site.facts),
        site=asdict(site),
    )


def _launchers(settings: ExistingSettings, site: SiteDescription) -> tuple[Launcher, ...]:
    """Return the launchers to prove, in this order."""
    if settings.launcher is not None:
        return (settings.launcher,)
    if site.proof is not None and site.proof.launcher is Launcher.MPIRUN:
        return (Launcher.MPIRUN,)
    return (Launcher.SRUN, Launcher.MPIRUN) if site.may_have_pmix else (Launcher.MPIRUN,)


def record_proof(attached: AttachedCluster, proof: MpiProof) -> AttachedCluster:
    """Record the result of the job that proves MPI. Return the cluster with the facts of the job."""
    workspace = attached.workspace
    with workspace.lock("attach", wait_s=WAIT_S, waiting=SILENT.note):
        site = load_site(workspace)
        inventory = inventory_of(workspace)
        settings = settings_of(attached.spec)
        earlier = site.facts
        if not (proof.state == "pending" and attached.has_launcher):
            facts = [fact for fact in earlier if fact.fact not in OF_PROOF]
            site = replace(site, facts=(*facts, *proof_facts(proof, attached.modules)))
        is_proven = proof.state == "proven"
        job = ProofJob(proof.job_id, proof.launcher, attached.modules, is_proven)
        may_work = is_proven or proof.state == "pending"
        site = replace(site, proof=job if may_work else None)
        if may_work:
            # The launchers before it have failed.
            inventory = replace(inventory, pmix=proof.launcher is Launcher.SRUN)
        if is_proven:
            found = {"launcher": proof.launcher, "python": attached.site_python or settings.python}
            settings = settings.model_copy(update=found)
            minors = [glibc_minor(text) for text in (site.glibc, proof.glibc)]
            inventory = replace(
                inventory, glibc_minor=min(filter(None, minors), default=OLDEST_GLIBC)
            )
        spec = attached.spec.model_copy(update={"provider": settings})
        site.save(workspace)
        write_atomic(workspace.spec, dump_spec(spec))
        write_atomic(workspace.inventory, inventory.text)
    live = [fact for fact in attached.facts if fact not in earlier]
    return replace(attached, spec=spec, facts=(*live, *site.facts))


def _reject_wrong_flags(request: AttachRequest) -> None:
    names = ("folder", "account", "qos", "modules", "python", "time", "slurm")
    flags = {name: value for name in names if (value := getattr(request, name))}
    try:
        ExistingSettings.model_validate({"type": "existing", "login": request.login, **flags})
    except ValidationError as exc:
        raise wrong_flags(exc, flags, {"modules": "--module"}) from exc


@dataclass(frozen=True, slots=True)
class _Start:
    """The state from which `attach` starts.

    spec: the given spec, or else that of an earlier `attach`. site: that of the earlier `attach`,
        if it has written the site.
    chosen: the settings of the earlier `attach`, replaced by those of the given spec and then by the
        options. An empty option withdraws a setting, so that `attach` finds it again.
    """

    spec: ClusterSpec | None
    site: SiteDescription | None
    chosen: Mapping[str, Any]


def _start(request: AttachRequest, workspace: Workspace | None) -> _Start:
    recorded = applied_if_known(workspace) if workspace else None
    site = None
    with suppress(UsageError):
        site = load_site(workspace) if workspace and recorded else None
    flags = {name: value for name in _CHOSEN if (value := getattr(request, name, None)) is not None}
    if not flags.get("folder"):
        flags.pop("folder", None)
    earlier = chosen_settings(recorded)
    if "modules" in flags:
        # Another MPI may need another launcher.
        earlier.pop("launcher", None)
    # Without LOGIN and a file, the command line passes the recorded spec.
    given = chosen_settings(request.spec) if request.spec != recorded else {}
    choices: dict[str, Any] = earlier
    for newer in (given, flags):
        # A partition and `routed` replace each other.
        if newer.keys() & {"partition", "routed"}:
            choices = {**choices, "partition": "", "routed": False}
        choices = {**choices, **newer}
    chosen = {name: value for name, value in choices.items() if value}
    return _Start(request.spec or recorded, site, chosen)


def _known_workspace(request: AttachRequest) -> Workspace | None:
    """Return the workspace with this name, or else with this login.

    UsageError: the name is taken, or several have this login.
    """
    if request.name:
        named = _checked_name(request.name)
        return named if named.root.exists() else None
    with_login = [
        Workspace(path.parent)
        for path in sorted(state_home().glob("[!.]*/login"))
        if login_of(path.with_name("ssh_config")) == request.login
    ]
    if len(with_login) > 1:
        names = ", ".join(workspace.root.name for workspace in with_login)
        raise UsageError(
            f"clusters {names} are attached as {request.login}",
            code="ambiguous",
            about="cluster",
            fix="choose a cluster, or a new name, with --name",
        )
    return with_login[0] if with_login else None


def _checked_name(name: str) -> Workspace:
    """Return the workspace with this name. UsageError: `clusterctl up` has created such a
    cluster.
    """
    if not is_cluster_name(name):
        raise UsageError(
            f"--name {name} can't be the name of a cluster",
            about="cluster-name",
            fix="use a lower-case letter, then at most 19 lower-case letters, digits or dashes",
        )
    workspace = Workspace.of(name)
    if workspace.root.exists() and not workspace.login.exists():
        raise _name_taken(workspace, "`clusterctl up` has created it")
    return workspace


def _name_taken(workspace: Workspace, reason: str, fix: str = "") -> UsageError:
    return UsageError(
        f"there is another cluster with the name {workspace.root.name!r}",
        code="exists",
        about="cluster",
        where=str(workspace.root),
        why=reason,
        fix=f"choose another name with --name{fix}",
    )


def _reject_other_site(
    workspace: Workspace, request: AttachRequest, start: _Start, site: SiteDescription
) -> None:
    """Raise UsageError unless the requested login leads to the cluster and account of the
    workspace.
    """
    login = login_of(workspace.ssh_config)
    name = workspace.root.name
    earlier = start.site
    if not workspace.root.exists() or login == request.login:
        return
    if not request.name:
        fix = f", or use the new login for this cluster with --name {name}"
        raise _name_taken(workspace, f"it is attached as {login}", fix)
    whose = "{0.account} on Slurm's cluster {0.cluster_name!r} with the home {0.home}"
    if earlier is None:
        raise _name_taken(workspace, f"`attach {login}` has not finished")
    if (earlier.cluster_name, earlier.account, earlier.home) != (
        site.cluster_name,
        site.account,
        site.home,
    ):
        reason = f"{login} is {whose.format(earlier)}, and {request.login} is {whose.format(site)}"
        raise _name_taken(workspace, reason)


def _probed_first(
    request: AttachRequest, start: _Start, stack: ExitStack
) -> tuple[Workspace, SiteProbe]:
    """Probe a new cluster, or a new login of a known cluster. Create and lock its workspace.

    The probe's folder becomes the workspace, with its open connection, so a second factor is asked
    only once.
    """
    home = state_home()
    with translating_write_errors(home):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with temporary_folder(home, prefix=_NEW) as folder:
        first = Workspace(folder / "new")
        try:
            probed = _probed(request, first, start.chosen)
            workspace = _checked_name(request.name or name_of(probed.site, request))
            stack.enter_context(
                workspace.lock("attach", wait_s=request.wait_s, waiting=request.reporter.note)
            )
            _reject_other_site(workspace, request, start, probed.site)
            end_all_connections(workspace.ssh_config)
            if not workspace.root.exists():
                with translating_write_errors(workspace.root):
                    first.root.rename(workspace.root)
                # Another folder may have the name. Then the next command opens a new connection.
                with suppress(OSError):
                    first.connections.rename(workspace.connections)
        except TransportError as exc:
            # The user could not open its ssh_config, which is removed.
            if exc.where == str(first.ssh_config):
                exc.where = ""
            raise
        finally:
            # A connection that the workspace does not have would stay open.
            end_all_connections(first.ssh_config)
    return workspace, probed


def name_of(site: SiteDescription, request: AttachRequest) -> str:
    """Return the site's name for the cluster, or else the login node's, as a name of a cluster
    here.
    """
    host = request.login.rpartition("@")[2].removeprefix("ssh://")
    # The first part of an IPv6 address is no name.
    host = "" if host.count(":") > 1 else host.partition(":")[0].partition(".")[0]
    for text in (site.cluster_name, host, site.host.partition(".")[0]):
        name = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:20].rstrip("-")
        if is_cluster_name(name):
            return name
    return "cluster"


def _probed(request: AttachRequest, workspace: Workspace, chosen: Mapping[str, Any]) -> SiteProbe:
    workspace.create()
    write_login_files(request.login, workspace)
    request.reporter.step("probe")
    # Otherwise, the Python of an earlier `attach` would be found as one of the site.
    with Connections(workspace.ssh_config, stays=LOGIN_HOST, path="") as connections:
        return probe(connections.to(LOGIN_HOST), Choices.of(chosen))


def _settings(spec: ClusterSpec | None) -> ExistingSettings | None:
    return (
        spec.provider if spec is not None and isinstance(spec.provider, ExistingSettings) else None
    )


def _place(
    request: AttachRequest, workspace: Workspace, probed: SiteProbe, spec: ClusterSpec
) -> PreparedFolder:
    """Write clusterctl's folder on the cluster."""
    settings = settings_of(spec)
    site = probed.site
    reporter = request.reporter
    with Connections(
        workspace.ssh_config, stays=LOGIN_HOST, path="", variables=site.variables
    ) as connections:
        transport = connections.to(LOGIN_HOST)
        if (recorded := inventory_if_known(workspace)) is not None:
            _reject_other_folder(transport, settings.folder, recorded.folder)
        else:
            earlier_spec = applied_if_known(workspace)
            _remove_earlier_folder(transport, workspace, earlier_spec, settings.folder, reporter)
            # From now on, `detach` knows the folder, even if this process is killed.
            write_atomic(workspace.spec, dump_spec(spec))
        cluster_id = workspace.cluster_id()
        if settings.python is None:
            if request.own_python:
                site = replace(site, pythons={})
            site = with_standalone_python(
                transport, site, settings.folder, cluster_id, report=reporter.note
            )
    # The login node's `python3` may be too old for clusterctl's programs.
    folders = ":".join(dict.fromkeys(str(Path(python).parent) for python in site.pythons))
    with Connections(
        workspace.ssh_config, stays=LOGIN_HOST, path=folders, variables=site.variables
    ) as connections:
        return place(
            connections.to(LOGIN_HOST),
            site,
            settings.folder,
            cluster_id,
            python=settings.python,
            modules=settings.modules,
            report=reporter.note,
        )


def _site_record(
    start: _Start, settings: ExistingSettings, probed: SiteProbe, placed: PreparedFolder
) -> SiteDescription:
    """Return the site as it is recorded, with the result of an earlier proof if jobs still have its
    modules and launcher.
    """
    site = replace(probed.site, facts=tuple(placed_facts(placed)))
    earlier = start.site
    if earlier is None or earlier.proof is None or earlier.proof.modules != settings.modules:
        return site
    if settings.launcher not in {None, earlier.proof.launcher}:
        return site
    shown = (fact for fact in earlier.facts if fact.fact in OF_PROOF)
    return replace(site, facts=(*site.facts, *shown), proof=earlier.proof)


def _reject_other_folder(transport: Transport, folder: str, recorded: str) -> None:
    """Raise UsageError unless ``folder`` leads to the recorded folder, which would else be
    forgotten.
    """
    path = folder if folder == recorded else expanded(transport, folder)
    if path != recorded:
        raise UsageError(
            "the cluster is attached with another folder",
            code="exists",
            about="folder",
            where=f"{transport.host}:{path}",
            why=f"clusterctl's files there are in {recorded}",
            fix="leave out the folder, or first remove the other with `clusterctl detach`",
        )


def _remove_earlier_folder(
    transport: Transport,
    workspace: Workspace,
    earlier: ClusterSpec | None,
    folder: str,
    reporter: Reporter,
) -> None:
    """Remove another folder that a failed `attach` has left, unless it has files of the user."""
    settings = _settings(earlier)
    if settings is None or settings.folder == folder:
        return
    # The earlier folder's variable may not be set, and the folder may have the mark of another
    # cluster.
    with suppress(CommandError, UsageError):
        path = expanded(transport, settings.folder)
        left = AttachedFolder(transport, path, workspace.cluster_id())
        if path == expanded(transport, folder):
            return
        if all(entry.is_made_by_attach for entry in left.entries()):
            left.remove()
        else:
            reporter.note(f"{path} stays, because it has files that `attach` did not create")


def _new_settings(request: AttachRequest, start: _Start, probed: SiteProbe) -> ExistingSettings:
    """Return the settings: as chosen, or else as the site says."""
    values = {
        **start.chosen,
        "type": "existing",
        "login": request.login,
        "account": probed.account or None,
        "routed": probed.is_routed,
    }
    values.pop("partition", None)
    return _fitting(values, request)


def _fitting(values: Mapping[str, Any], request: AttachRequest) -> ExistingSettings:
    """Return the settings, without those of the site that a spec can't hold: jobs get them all the
    same.
    """
    try:
        return ExistingSettings.model_validate(values)
    except ValidationError as exc:
        unfit = {str(error["loc"][0]) for error in exc.errors(include_url=False)}
        for name in sorted(unfit):
            request.reporter.note(
                f"the spec leaves out {name}: it can't hold {shown(values[name])}"
            )
        return ExistingSettings.model_validate({k: v for k, v in values.items() if k not in unfit})


def _spec(
    name: str, settings: ExistingSettings, probed: SiteProbe, previous: ClusterSpec | None
) -> ClusterSpec:
    """Return the spec, with the partitions as Slurm lists them and all other keys as before."""
    prices = {p.name: p.price_per_hour for p in previous.partitions} if previous else {}
    partitions = tuple(
        Partition(
            name=partition.name,
            nodes=max(partition.node_count, 1),
            max_time=formatting.duration(partition.max_time_s) if partition.max_time_s else None,
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
    if not PATTERNS["gpu_type"].matches(kind):
        # Slurm's type may begin with a digit, as that of a part of a GPU does: 1g.5gb.
        kind = f"gpu-{kind}"[:31].strip("-")
    return Gpus(type=kind, count=int(count)) if 1 <= int(count) <= MOST_GPUS else None


def _node_names(nodes: str) -> tuple[str, ...]:
    """Return the names of nodes that sinfo printed. (): ClusterShell can't read the text."""
    try:
        return tuple(NodeSet(nodes))
    except NodeSetException:
        return ()


def _inventory(
    spec: ClusterSpec,
    probed: SiteProbe,
    placed: PreparedFolder,
    earlier: Inventory | None = None,
) -> Inventory:
    """Return the record of the cluster. earlier: that of the last `attach`, whose job may have found
    nodes with an older C library.
    """
    site = probed.site
    settings = settings_of(spec)
    requirements = spec.software.python.requirements
    minors = [placed.node.glibc_minor, *([earlier.glibc_minor] if earlier else [])]
    return Inventory(
        cluster=spec.name,
        cluster_id=placed.cluster_id,
        provider=settings.type,
        hosts=(
            Host(
                name=LOGIN_HOST,
                address=site.host,
                user=site.account,
                roles=(CONTROLLER,),
                host_key="",
            ),
        ),
        network="",
        shared=str(Path(placed.folder).parent),
        shared_folder=SharedFolder(kind="existing"),
        job_user=site.account,
        partitions=tuple(
            PartitionFacts(
                partition.name,
                _node_names(partition.nodes),
                partition.max_time_s,
                gpus.count if (gpus := gpus_of(partition)) else None,
            )
            for partition in probed.usable
        ),
        interval_s=spec.monitoring.interval,
        requirements=None if requirements is None else str(requirements),
        max_array=site.max_array,
        max_submit=site.max_submit,
        root=placed.folder,
        folder=placed.folder,
        python=placed.node.python,
        glibc_minor=min(minors),
        pmix=_launchers(settings, site)[0] is Launcher.SRUN,
        no_accounting=site.accounting,
        is_foreign=True,
        slurm_path=site.slurm_path,
        variables=site.variables,
        slurm_options=settings.slurm,
        is_routed=settings.routed,
        account=probed.account,
        qos=settings.qos or "",
        baked=True,
    )
