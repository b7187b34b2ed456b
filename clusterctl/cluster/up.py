"""The story of `up`: plan → image → provision → probe → converge → verify.

A phase is a function of the session and typed values that returns one; its name is its name in the journal.
Killed anywhere and run again, `up` converges: every phase looks at the world and makes only what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.cluster.converge import converge, inputs_of, packages_lost_on
from clusterctl.cluster.hardware import link_wheels
from clusterctl.cluster.look import all_answer, clear_removal
from clusterctl.cluster.node_class import node_files, prepare_class
from clusterctl.cluster.nodes import limited, replacing
from clusterctl.cluster.plan import Plan, plan_changes, reject, review
from clusterctl.cluster.session import ClusterSession, Drift, Phase, PhaseRunner, write_inventory
from clusterctl.cluster.verify import Verification, verify
from clusterctl.configure import ansible, inventory_file
from clusterctl.errors import ConfigureError, Failure, ProvisionError, UsageError
from clusterctl.hosts.checks import failures, other_numbers
from clusterctl.hosts.probe import (
    HostReport,
    ProbeRequest,
    probe_hosts,
    reject_full_disks,
    reject_taken_numbers,
    with_distributions,
)
from clusterctl.hosts.roles import probe_requests, wanted_accounts
from clusterctl.jobs.environment import build, environment_of
from clusterctl.packages.bundle import Bundle
from clusterctl.packages.bundle_checks import cluster_bundle, missing_bundle, use_bundle
from clusterctl.packages.wheelhouse import NodePlatform, wheelhouse
from clusterctl.providers.base import Provisioned, Size
from clusterctl.providers.node_class import NodeClass, NodeFiles, SharedFiles
from clusterctl.providers.storage import record as record_storage
from clusterctl.scheduler.script import PLAIN, Environment
from clusterctl.spec.common import ADMIN_ID
from clusterctl.spec.distributions import Distribution, distribution_of
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import ADMIN_USER
from clusterctl.state.inventory import (
    COMPUTE,
    CONTROLLER,
    Host,
    Inventory,
    applied_if_known,
    distribution_ahead,
)
from clusterctl.state.workspace import write_atomic
from clusterctl.transport.multiplex import end_all
from clusterctl.util.assets import job_lock
from clusterctl.util.process import parallel_map


@dataclass(frozen=True, slots=True)
class UpOptions:
    """How `up` goes about it.

    ``approve`` is shown the plan before anything is changed; what it raises ends `up` there. Hosts that are
    configured and have not drifted are not configured again, unless ``reconfigure``. Jobs that a changed spec
    has no place for are cancelled under ``force``; what exists only on hosts that leave is lost under
    ``discard``. Hosts get their packages from ``bundle``, with ``own_repositories`` from their own again,
    else as before. ``limit`` names the only hosts to touch; ``replaced`` ones are other machines now, and
    those that had the names are released, or, where the provider makes them, gone.
    """

    approve: Callable[[Plan], None] = lambda _: None
    reconfigure: bool = False
    force: bool = False
    discard: bool = False
    bundle: Path | None = None
    own_repositories: bool = False
    limit: Collection[str] = ()
    replaced: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class UpResult:
    """A cluster that is up and verified."""

    inventory: Inventory
    verification: Verification
    phases: tuple[Phase, ...]
    notes: tuple[str, ...]


def up(session: ClusterSession, options: UpOptions) -> UpResult:
    """Create the cluster, or repair it; returns only after an MPI job ran right across every idle node.

    Nodes that are busy with jobs, or drained by a person, are named in the result.

    Raises:
        UsageError: the change would cancel jobs; nothing was changed.
        ClusterctlError: a phase failed; what was done stays, and the next `up` goes on from there.
    """
    session.provider.check(session.spec)
    own = session.spec.provider.user_owned
    session.provider.anew = () if own else options.replaced
    replacement = replacing(session.workspace, options.replaced if own else ())
    with session.locked("up"), session.provider.working(), replacement as commit_replacement:
        if session.workspace.removing.exists() and all_answer(session.workspace):
            clear_removal(session.workspace)  # with what it was to discard
        session.workspace.removing.unlink(missing_ok=True)
        session.workspace.baking.unlink(missing_ok=True)  # what is there is a cluster's from now on
        session.spec = limited(session.spec, session.workspace, options.limit)
        file = bundle_file(session, options)
        packages = session.phase(open_bundle, file) if file else None
        expected = distribution_ahead(session.spec, session.workspace)  # what can't be had is said first
        environment = environment_for(session, expected) if expected else None
        if session.spec.provider.is_cloud:  # machines of the user's own are looked at as they are planned
            session.phase(preflight)
        session.workspace.create_secrets()

        plan = session.phase(plan_changes)
        if not options.force:
            reject(plan.jobs)
        options.approve(plan)
        keep = review(
            session, plan.hosts, force=options.force, discard=options.discard, replaced=options.replaced
        )
        commit_replacement()
        applied = applied_if_known(session.workspace)
        if applied is None or applied.users != session.spec.users:
            end_all(session.workspace.ssh_config)  # an account that is connected can't get another uid
        write_atomic(session.workspace.spec, dump_spec(session.spec))

        session.phase(prepare_image)
        groups = _groups_to_make(session, plan) if expected else ()
        shared = session.phase(prepare_class, expected, groups) if expected and groups else {}
        provisioned = session.phase(provision, plan, keep, shared)
        inventory = provisioned.inventory
        if environment is None or inventory.distribution != expected:
            environment = environment_for(session, inventory.distribution)
        reports = session.phase(probe, inventory, keep)
        if session.workspace.bundle.exists() and not inventory.baked:
            session.phase(send_packages, packages, inventory, reports)
        converged = session.phase(converge, provisioned, reports, options.limit, again=options.reconfigure)
        if environment.lock is not None:
            session.phase(build_environment, environment, inventory)
        verification = session.phase(verify, converged, options.limit)
    return UpResult(inventory, verification, tuple(session.phases), tuple(session.notes))


def bake_ahead(session: ClusterSession, approve: Callable[[tuple[str, ...]], None] = lambda _: None) -> str:
    """Have the image made that new nodes start from; what became of it: `made`, or it was `cached`.

    ``approve`` is shown what it takes before anything is made; what it raises ends it there. Where no cluster
    is there yet, all else that it took goes again.

    Raises:
        UsageError: no image of these nodes can be made.
        ClusterctlError: a phase failed.
    """
    session.provider.check(session.spec)
    spec, workspace = session.spec, session.workspace
    distribution = distribution_ahead(spec, workspace)
    if distribution is None or session.provider.known_shared is None:
        raise UsageError(
            "no image of these nodes can be made",
            code="no-image-possible",
            fix="write an image that says what it has",
        )
    with session.locked("bake"):
        if not (workspace.spec.exists() or workspace.inventory.exists()):  # else a cluster is there, or begun
            write_atomic(workspace.baking, "")
        try:
            if spec.provider.is_cloud:
                session.phase(preflight)
            workspace.create_secrets()
            plan = session.phase(plan_changes)
            if plan.hosts.images:
                approve(plan.hosts.images)
            if workspace.baking.exists():
                write_atomic(workspace.spec, dump_spec(spec))
            session.phase(prepare_class, distribution, session.provider.class_groups)
        finally:
            if workspace.baking.exists() and workspace.spec.exists():  # without a spec nothing was made
                from clusterctl.cluster.down import DownOptions, down_locked  # noqa: PLC0415 - only to bake

                runner = PhaseRunner(workspace=workspace, reporter=session.reporter, phases=session.phases)
                down_locked(runner, DownOptions(discard=True))
    return next(phase.note for phase in session.phases if phase.name == prepare_class.__name__)


def preflight(session: ClusterSession) -> None:
    """Refuse to begin where something stands in the way: all of it at once, before anything is billed."""
    report = session.provider.preflight(session.spec, session.workspace)
    findings = report.findings if report else ()
    errors = [one for one in findings if one.level == "error"]
    if errors:
        then = "nothing was made; `clusterctl plan --preflight` looks again"
        what = "this stands in the way: {hosts}"
        raise ProvisionError.of_hosts(
            what, failures(errors, phase="preflight"), code="preflight-failed", then=then
        )
    session.notes += map(str, findings)
    session.note = "nothing stands in the way"


def reject_bundles(spec: ClusterSpec, *, fix: str) -> None:
    """Raise UsageError where the provider creates the hosts of a spec: they install nothing from bundles."""
    if not spec.provider.user_owned:
        raise UsageError(
            f"a bundle is for machines of your own, and the provider is {spec.provider.type}",
            code="bundle-needs-own-machines",
            fix=fix,
        )


def bundle_file(session: ClusterSession, options: UpOptions) -> Path | None:
    """The bundle that is given, or that the cluster was installed from."""
    if options.bundle is not None:
        reject_bundles(session.spec, fix="leave --bundle out")
        return options.bundle
    if options.own_repositories:
        session.workspace.bundle.unlink(missing_ok=True)
    known = cluster_bundle(session.workspace)
    return known.file if known and known.file.exists() else None


def open_bundle(session: ClusterSession, file: Path) -> Bundle:
    opened = use_bundle(file, session.spec, session.workspace, report=session.report)
    session.note = f"{file.name}, for {', '.join(opened.manifest.systems)}"
    return opened


def environment_for(session: ClusterSession, distribution: Distribution) -> Environment:
    """The Python environment of the spec on this distribution; a phase only where the spec asks for one."""
    if session.spec.software.python.requirements is None:
        return PLAIN
    return session.phase(resolve_environment, distribution)


def resolve_environment(session: ClusterSession, distribution: Distribution) -> Environment:
    environment = environment_of(
        session.spec, distribution=lambda: distribution, report=session.report, heard=session.report
    )
    session.note = f"{len(environment.lock.wheels) if environment.lock else 0} Python packages"
    return environment


def prepare_image(session: ClusterSession) -> None:
    """Bake the image of the nodes, where the provider has one to bake."""

    def bake(image: Host) -> None:
        session.report("downloading the wheels of the job environment")
        lock = job_lock()
        wheels = wheelhouse(lock, NodePlatform.of(distribution_of(image.distribution)))
        session.report("installing Slurm, Open MPI and the job environment")
        ansible.install_image(
            session.spec,
            image,
            wheels=wheels,
            lock=lock,
            workspace=session.workspace,
            progress=lambda task: session.report(task.step(1)),
        )

    session.provider.prepare(session.spec, session.workspace, bake=bake, report=session.report)


def _groups_to_make(session: ClusterSession, plan: Plan) -> tuple[str, ...]:
    """The groups of new hosts that can share what is configured."""
    if session.provider.known_shared is None or not inventory_file.has_classes(session.spec):
        return ()
    new = {one.name for one in plan.hosts.hosts if one.action in {"make", "replace"}}
    lead = session.spec.controller_host
    there = {CONTROLLER: lead in new, COMPUTE: bool(new - {lead})}
    return tuple(group for group in session.provider.class_groups if there[group])


def provision(
    session: ClusterSession, plan: Plan, keep: Mapping[str, Size], shared: Mapping[str, SharedFiles]
) -> Provisioned:
    """Create, start and remove hosts; nodes in ``keep`` keep their size.

    New ones have what is ``shared`` by those of their group.
    """
    spec, workspace = session.spec, session.workspace

    def completed(inventory: Inventory) -> Inventory:
        return inventory.model_copy(
            update={
                "usd_per_hour": plan.hosts.usd_per_hour,
                "scheduler": spec.scheduler,
                "job_user": spec.job_user.name,
            }
        )

    def files(inventory: Inventory) -> NodeFiles:
        whole = completed(inventory)
        return node_files(spec, whole, workspace, inputs_of(spec, whole, workspace, {})[1])

    node_class = NodeClass({group: one.key for group, one in shared.items()}, files) if shared else None
    made = session.provider.apply(spec, workspace, keep=keep, report=session.report, node_class=node_class)
    known = with_distributions(made.inventory, workspace, session.connections.to, report=session.report)
    inventory = completed(known)
    if not inventory.baked:  # its hosts need not reach an index
        session.report("downloading the wheels of the job environment")
        link_wheels(job_lock(), workspace.wheels, inventory.distribution)
    write_inventory(spec, inventory, workspace)
    if spec.storage.keep:  # it is the cluster's again
        record_storage(spec.name, None)
    session.notes += made.notes
    _report_started(session, made)
    session.note = f"{len(inventory.hosts)} hosts on {inventory.network}"
    class_marks = {group: one.marks for group, one in shared.items()}
    return replace(made, inventory=inventory, class_marks=class_marks)


def _report_started(session: ClusterSession, made: Provisioned) -> None:
    session.repaired(Drift(host, "was powered off", "started") for host in made.started)


def probe(
    session: ClusterSession, inventory: Inventory, keep: Mapping[str, Size]
) -> Mapping[str, HostReport]:
    """Ask all hosts for their facts; hosts that went down meanwhile are started again."""

    def revive() -> None:
        made = session.provider.apply(session.spec, session.workspace, keep=keep, report=session.report)
        _report_started(session, made)

    asked = probe_requests(session.spec, inventory, session.workspace)
    reports = probe_hosts(asked, session.connections.to, revive=revive, report=session.report)
    reject_full_disks(reports)
    reject_taken_numbers(reports, wanted_accounts(session.spec))
    if lost := packages_lost_on(session.workspace, reports):
        if inventory.baked:
            raise _not_reinstalled(inventory, lost)
        # Else Ansible would take it that all is there.
        parallel_map([*lost], lambda host: session.connections.to(host).run(_NOT_INSTALLED))
    if session.spec.provider.is_cloud:
        reports = _with_one_uid(session, asked, reports)
    accounts = {host: one.accounts for host, one in reports.items()}
    session.notes += map(str, other_numbers(accounts, inventory.controller.name))
    session.note = f"{len(reports)} hosts answer"
    return reports


def _not_reinstalled(inventory: Inventory, lost: Mapping[str, str]) -> ConfigureError:
    """Nodes have no route to a repository: what was removed there comes with a new one alone."""
    name = inventory.controller.name
    anew = f"`clusterctl node replace {' '.join(host for host in lost if host != name)}` makes it anew"
    if name in lost:
        anew = "`clusterctl down`, then `clusterctl up`: a controller is not replaced alone"
    failures = [
        Failure("package-missing", f"removed there: {packages}", host, "reach", anew)
        for host, packages in lost.items()
    ]
    return ConfigureError.of_hosts("packages are missing on {hosts}", failures, code="packages-missing")


_NOT_INSTALLED = ("sudo", "-n", "sh", "-c", "rm -f /opt/clusterctl/installed-*")
# usermod renumbers no account that has processes, as the shell that starts it; here it sees none.
_RENUMBER = (
    *("sudo", "-n", "unshare", "--pid", "--fork", "--mount-proc"),
    *("usermod", "--uid", str(ADMIN_ID), ADMIN_USER),
)


def _with_one_uid(
    session: ClusterSession, asked: Mapping[str, ProbeRequest], reports: Mapping[str, HostReport]
) -> Mapping[str, HostReport]:
    """Renumber our account to ADMIN_ID on all hosts where it has several uids: the proof job needs one.

    Rented hosts make it with the next uid that their image has free. Where it can't be done, it stays.
    """
    uids = {host: one.accounts[ADMIN_USER] for host, one in reports.items() if ADMIN_USER in one.accounts}
    if len({*uids.values()}) <= 1:
        return reports

    def renumber(host: str) -> None:
        connection = session.connections.to(host)
        connection.run(_RENUMBER, check=False)
        connection.close()  # its processes have the old uid

    others = [host for host, uid in uids.items() if uid != ADMIN_ID]
    end_all(session.workspace.ssh_config)
    parallel_map(others, renumber)
    again = {host: asked[host] for host in others}
    return {**reports, **probe_hosts(again, session.connections.to, report=session.report)}


def send_packages(
    session: ClusterSession, packages: Bundle | None, inventory: Inventory, reports: Mapping[str, HostReport]
) -> None:
    """Send the bundle's repository to the hosts that have something to install."""
    to = session.connections.to
    hosts = inventory_file.hosts_to_install(inventory, session.spec.software, reports, to)
    if hosts and packages is None:
        raise missing_bundle(session.workspace)
    sent = (
        inventory_file.send_repository(packages, hosts, to, report=session.report)
        if packages and hosts
        else ()
    )
    session.note = f"sent to {len(sent)} hosts" if sent else "nothing to send"


def build_environment(session: ClusterSession, environment: Environment, inventory: Inventory) -> None:
    """Build the environment of the spec's requirements on the cluster, unless it is there."""
    controller = session.connections.to(inventory.controller.name, session.spec.job_user.name)
    rented = session.spec.provider.is_cloud
    built = build(controller, environment, report=session.report, rented=rented)
    session.note = "built" if built else "unchanged"
