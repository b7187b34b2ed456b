"""The story of a cluster: image → provision → reach → configure → verify, and down again.

Each phase is journaled with its inputs and its seconds; killed anywhere and run again, `up` converges,
because every phase looks at the world and makes only what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, overload

from clusterctl.cluster.converge import Mended, fetch_wheels, mend, questions
from clusterctl.cluster.impact import refuse, review
from clusterctl.cluster.nodes import limited, replacing
from clusterctl.cluster.plan import Plan, ahead
from clusterctl.cluster.session import Phase, Run, TellMended, provider_of, untold, write_inventory
from clusterctl.cluster.verify import Proof, prove
from clusterctl.configure import ansible, inventory_file, ship
from clusterctl.errors import UsageError
from clusterctl.hosts.probe import probe_hosts, reject_full_disks, with_distributions
from clusterctl.hosts.report import HostReport
from clusterctl.jobs.environment import PLAIN, Environment, build, environment_of
from clusterctl.packages.bundle.archive import Bundle
from clusterctl.packages.bundle.use import cluster_bundle, forget, missing_bundle, use_bundle
from clusterctl.packages.wheelhouse import NodePlatform, wheelhouse
from clusterctl.providers.base import BakeTarget, Provider, Provisioned, Size
from clusterctl.providers.prompts import NO_PROMPTS, Prompts
from clusterctl.scheduler.session import distribution_ahead
from clusterctl.spec.distributions import Distribution, distribution_of
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.software import Software
from clusterctl.state.inventory import Inventory
from clusterctl.state.journal import Journal, digest
from clusterctl.state.lock import WAIT_S as LOCK_WAIT_S
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.connections import Connections
from clusterctl.transport.ssh import SSHTransport
from clusterctl.util.assets import job_lock
from clusterctl.util.progress import WAITING, HostStep, PhaseReporter, Reporter

Agree = Callable[[Plan], None]


@dataclass(frozen=True, slots=True)
class Packages:
    """Where hosts get their packages from: a ``bundle``, or ``own`` repositories; else as before."""

    bundle: Path | None = None
    own: bool = False


AS_BEFORE: Final = Packages()


@dataclass(frozen=True, slots=True)
class Up:
    """A cluster that has proven itself."""

    inventory: Inventory
    proof: Proof
    phases: tuple[Phase, ...]
    notes: tuple[str, ...]
    mended: tuple[Mended, ...] = ()


def up(
    spec: ClusterSpec,
    workspace: Workspace,
    *,
    reporter: PhaseReporter,
    tell_mended: TellMended = untold,
    agree: Agree = lambda _: None,
    reconfigure: bool = False,
    force: bool = False,
    packages: Packages = AS_BEFORE,
    limit: Collection[str] = (),
    replaced: Collection[str] = (),
    prompts: Prompts = NO_PROMPTS,
    wait_s: float = LOCK_WAIT_S,
) -> Up:
    """Raise the cluster, or mend it; returns only after an MPI job ran right across every node.

    ``agree`` is shown what becomes of the hosts before anything is done; what it raises ends it there.
    What is configured already and as it was left is not configured again, unless ``reconfigure``. Jobs that
    a changed spec has no place for are ended under ``force``. ``packages`` says where hosts get theirs from,
    ``prompts`` see to host keys and passwords.
    ``limit`` names the only hosts to touch: all others stay as they are, and so do the jobs on them.
    ``replaced`` ones are other machines now; what they were is given back.
    ``wait_s`` bounds how long another clusterctl that works on the cluster is waited for.

    Raises:
        LockedError: it was still at work then.
        UsageError: the change would end jobs; nothing was changed.
        ClusterctlError: a phase failed; what was done stays, and the next `up` goes on from there.
    """
    provider = provider_of(spec.provider, prompts)
    provider.check(spec)
    with (
        workspace.lock("up", wait_s=wait_s, waiting=lambda text: reporter(WAITING, text)),
        workspace.begun(),
        Connections(workspace.ssh_config) as connections,
        replacing(workspace, replaced) as replace_them,
    ):
        spec = limited(spec, workspace, limit)
        run = Run("up", Journal(workspace.journal), reporter, tell_mended=tell_mended)
        packed = take_bundle(packages, spec, workspace, run)
        # What can't be had is said before anything is made, unless only the hosts tell what it must fit.
        expected = distribution_ahead(spec, workspace)
        environment = resolve_environment(spec, expected, run)
        workspace.create_secrets()
        with run.phase("plan") as (step, report):
            plan = ahead(spec, workspace, provider, connections, report=report)
            step.note = plan.summary
        _settle(plan, agree, force=force)
        change = review(spec, workspace, provider, plan.hosts, connections, force=force)
        run.notes += change.notes
        replace_them()
        write_atomic(workspace.spec, text := dump_spec(spec))

        with run.phase("image") as (_, report):
            provider.prepare(
                spec, workspace, bake=lambda target: bake(target, report, workspace), report=report
            )

        with run.phase("provision", inputs=digest(text)) as (step, report):
            made = _provisioned(
                provider, spec, workspace, plan, keep=change.keep, connections=connections, report=report
            )
            inventory = made.inventory
            fetch_wheels(inventory, workspace, report)
            write_inventory(spec, inventory, workspace)
            run.notes += made.notes
            started = list(made.started)
            step.note = f"{len(inventory.hosts)} hosts on {inventory.network}"
        environment = fitting_environment(environment, expected, spec, inventory.distribution, run)

        with run.phase("reach") as (step, report):

            def revive() -> None:  # hosts that went down since they were last looked at
                started.extend(provider.apply(spec, workspace, keep=change.keep, report=report).started)

            asked = questions(spec, inventory, workspace)
            views = probe_hosts(asked, connections.to, revive=revive, report=report)
            reject_full_disks(views)
            step.note = f"{len(views)} hosts answer"

        bring_packages(packed, inventory, workspace, connections, run, software=spec.software, views=views)

        with run.phase("configure") as (step, report):
            run.has_mended(Mended(host, "was powered off", "started") for host in started)
            configured = mend(
                spec, made, workspace, connections, views, anew=reconfigure, limit=limit, report=report
            )
            run.has_mended(configured.mended)
            step.note = configured.summary

        build_environment(environment, spec, inventory, workspace, run)

        proof = prove(spec, inventory, configured, connections, limit=limit, run=run)

    return Up(inventory, proof, tuple(run.phases), tuple(run.notes), tuple(run.mended))


def _settle(plan: Plan, agree: Agree, *, force: bool) -> None:
    """Have it agreed to, unless jobs are in its way."""
    if not force:
        refuse(plan.jobs)
    agree(plan)


def _provisioned(
    provider: Provider,
    spec: ClusterSpec,
    workspace: Workspace,
    plan: Plan,
    *,
    keep: Mapping[str, Size],
    connections: Connections,
    report: Reporter,
) -> Provisioned:
    """The hosts, with what they have, and what the spec says of them beyond."""
    made = provider.apply(spec, workspace, keep=keep, report=report)
    said = {
        "usd_per_hour": plan.hosts.usd_per_hour,
        "scheduler": spec.scheduler,
        "job_user": spec.job_user.name,
    }
    known = with_distributions(made.inventory, workspace, connections.to, report=report)
    return replace(made, inventory=known.model_copy(update=said))


def bake(target: BakeTarget, report: Reporter, workspace: Workspace) -> None:
    """Run the install half of every role on an image that answers SSH."""
    report("downloading the wheels of the job environment")
    lock = job_lock()
    wheels = wheelhouse(lock, NodePlatform.of(distribution_of(target.distribution)))
    report("installing Slurm, Open MPI and the job environment")
    ansible.install(
        target,
        wheels=wheels,
        lock=lock,
        workspace=workspace,
        progress=lambda p: report(HostStep(p.host, p.what, 1, p.status, p.failed)),
    )


@overload
def resolve_environment(spec: ClusterSpec, distribution: Distribution, run: Run) -> Environment: ...
@overload
def resolve_environment(
    spec: ClusterSpec, distribution: Distribution | None, run: Run
) -> Environment | None: ...
def resolve_environment(spec: ClusterSpec, distribution: Distribution | None, run: Run) -> Environment | None:
    """What the spec's requirements come to; a phase only where it has any. None if it can't be told yet."""
    if distribution is None:
        return None
    if spec.software.python.requirements is None:
        return PLAIN
    with run.phase("resolve") as (step, report):
        environment = environment_of(spec, distribution=distribution, report=report, heard=report)
        step.note = f"{len(environment.lock.wheels) if environment.lock else 0} Python packages"
    return environment


def fitting_environment(
    environment: Environment | None,
    expected: Distribution | None,
    spec: ClusterSpec,
    distribution: Distribution,
    run: Run,
) -> Environment:
    """What was resolved ahead; resolved anew where the hosts have something else than was expected."""
    if environment is not None and distribution == expected:
        return environment
    return resolve_environment(spec, distribution, run)


def build_environment(
    environment: Environment, spec: ClusterSpec, inventory: Inventory, workspace: Workspace, run: Run
) -> None:
    """Have the environment of the spec's requirements on the cluster; a phase only where it has any."""
    if environment.lock is None:
        return
    with run.phase("environment") as (step, report):
        transport = SSHTransport(inventory.controller.name, workspace.ssh_config, user=spec.job_user.name)
        try:
            built = build(transport, environment, report=report)
        finally:
            transport.close()
        step.note = "built" if built else "as it was"


def refuse_made_hosts(spec: ClusterSpec, *, fix: str) -> None:
    """That a spec's hosts are those that are installed from bundles.

    Raises:
        UsageError: its provider makes them.
    """
    if not spec.provider.user_owned:
        raise UsageError(
            f"a bundle is for machines of your own, and the provider is {spec.provider.type}", fix=fix
        )


def take_bundle(packages: Packages, spec: ClusterSpec, workspace: Workspace, run: Run) -> Bundle | None:
    """The bundle that is given, or that was; a phase only where there is one.

    Raises:
        BundleError: it is damaged, or not for this.
        UsageError: the provider's hosts are not installed from bundles.
    """
    if packages.bundle is not None:
        refuse_made_hosts(spec, fix="leave --bundle out")
    if packages.own:
        forget(workspace)
    known = cluster_bundle(workspace)
    file = packages.bundle or (known.file if known else None)
    if file is None or (packages.bundle is None and not file.exists()):
        return None
    with run.phase("bundle") as (step, report):
        taken = use_bundle(file, spec, workspace, report=report)
        step.note = f"{file.name}, for {', '.join(taken.manifest.systems)}"
    return taken


def bring_packages(
    packed: Bundle | None,
    inventory: Inventory,
    workspace: Workspace,
    connections: Connections,
    run: Run,
    *,
    software: Software,
    views: Mapping[str, HostReport],
) -> None:
    """Have the bundle's repository on the hosts that have something to install.

    Raises:
        BundleError: the bundle is gone, or has nothing for some host's distribution.
        TransportError: it could not be sent to some hosts.
    """
    if not workspace.bundle.exists() or inventory.baked:
        return
    with run.phase("packages") as (step, report):
        counted = inventory.compute if software.nvidia.installs else ()
        with_cards = [host.name for host in counted if views[host.name].cards]
        mark = inventory_file.install_mark(inventory, software)
        hosts = ship.lacking(inventory, mark, connections.to, with_cards=with_cards)
        if hosts and packed is None:
            raise missing_bundle(workspace)
        sent = ship.ship(packed, hosts, connections.to, report=report) if packed and hosts else ()
        step.note = f"sent to {len(sent)} hosts" if sent else "nothing to send"
