"""The story of a cluster: image → provision → reach → configure → verify, and down again.

Each phase is journaled with its inputs and its seconds; killed anywhere and run again, `up` converges,
because every phase looks at the world and makes only what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from clusterctl import collect, configure, jobs
from clusterctl.access import distribution_ahead, spec_as_raised
from clusterctl.assets import asset
from clusterctl.change import refuse, review
from clusterctl.distributions import Distribution
from clusterctl.errors import NotUpError, UsageError
from clusterctl.inventory import Inventory
from clusterctl.journal import Journal, digest
from clusterctl.lock import WAIT_S as LOCK_WAIT_S
from clusterctl.membership import limited
from clusterctl.mend import Mended, mend, questions
from clusterctl.mortal import sweep, temporary_folder
from clusterctl.offline import AS_BEFORE, Packages, bring_packages, take_bundle
from clusterctl.phases import Phase, Run, TellMended, untold
from clusterctl.planning import Plan, ahead
from clusterctl.providers.base import BakeTarget, Provider, Provisioned
from clusterctl.providers.local.provider import LocalProvider
from clusterctl.providers.onprem.hands import NO_HANDS, Hands
from clusterctl.providers.onprem.provider import OnpremProvider
from clusterctl.reach import reach, refuse_full_disks
from clusterctl.records import RunRecord
from clusterctl.spec import ClusterSpec
from clusterctl.spec import GcpProvider as GcpSettings
from clusterctl.spec import LocalProvider as LocalSettings
from clusterctl.spec import OnpremProvider as OnpremSettings
from clusterctl.spec import Provider as ProviderSettings
from clusterctl.spec.load import dump_spec
from clusterctl.teardown import Orphan, bring_home, destroy, find_orphans
from clusterctl.telling import WAITING, HostStep, Say, Tell
from clusterctl.transport.connections import Connections
from clusterctl.transport.ssh import SSHTransport
from clusterctl.verify import Proof, verify
from clusterctl.wheels import Node, wheelhouse
from clusterctl.workspace import Workspace, write_atomic

Agree = Callable[[Plan], None]


def provider_of(settings: ProviderSettings, hands: Hands = NO_HANDS) -> Provider:
    """Who makes and removes the hosts of a spec whose `provider` says this; ``hands`` are for machines of the
    user's own."""
    match settings:
        case LocalSettings():
            return LocalProvider(settings)
        case GcpSettings():
            # Here: most runs are of other providers, and Google's libraries take their time.
            from clusterctl.providers.gcp.provider import GcpProvider  # noqa: PLC0415

            return GcpProvider(settings)
        case OnpremSettings():
            return OnpremProvider(settings, replace(hands, restore=_give_back))


@dataclass(frozen=True, slots=True)
class Up:
    """A cluster that has proven itself."""

    inventory: Inventory
    proof: Proof
    phases: tuple[Phase, ...]
    notes: tuple[str, ...]
    mended: tuple[Mended, ...] = ()


@dataclass(frozen=True, slots=True)
class Down:
    """A cluster that is gone, and the runs that were brought home before."""

    runs: tuple[RunRecord, ...]
    phases: tuple[Phase, ...]
    provider: str = LocalSettings().type


def up(
    spec: ClusterSpec,
    workspace: Workspace,
    *,
    tell: Tell,
    tell_mended: TellMended = untold,
    agree: Agree = lambda _: None,
    reconfigure: bool = False,
    force: bool = False,
    packages: Packages = AS_BEFORE,
    limit: Collection[str] = (),
    hands: Hands = NO_HANDS,
    wait_s: float = LOCK_WAIT_S,
) -> Up:
    """Raise the cluster, or mend it; returns only after an MPI job ran right across every node.

    ``agree`` is shown what becomes of the hosts before anything is done; what it raises ends it there.
    What is configured already and as it was left is not configured again, unless ``reconfigure``. Jobs that
    a changed spec has no place for are ended under ``force``. ``packages`` says where hosts get theirs from,
    ``hands`` see to host keys and passwords.
    ``limit`` names the only hosts to touch: all others stay as they are, and so do the jobs on them.
    ``wait_s`` bounds how long another clusterctl that works on the cluster is waited for.

    Raises:
        LockedError: it was still at work then.
        UsageError: the change would end jobs; nothing was changed.
        ClusterctlError: a phase failed; what was done stays, and the next `up` goes on from there.
    """
    provider = provider_of(spec.provider, hands)
    provider.check(spec)
    with (
        workspace.lock("up", wait_s=wait_s, waiting=lambda text: tell(WAITING, text)),
        Connections(workspace.ssh_config) as connections,
    ):
        spec = limited(spec, workspace, limit)
        workspace.create()
        run = Run("up", Journal(workspace.journal), tell, tell_mended=tell_mended)
        packed = take_bundle(packages, spec, workspace, run)
        # What can't be had is said before anything is made, unless only the hosts tell what it must fit.
        environment = _resolve_environment(spec, distribution_ahead(spec, workspace), run)
        workspace.create_secrets()
        with run.phase("plan") as (step, say):
            plan = ahead(spec, workspace, provider, connections, say=say)
            step.note = plan.summary
        if not force:
            refuse(plan.jobs)
        agree(plan)
        change = review(spec, workspace, provider, plan.hosts, connections, force=force)
        run.notes += change.notes
        write_atomic(workspace.spec, text := dump_spec(spec))

        with run.phase("image") as (_, say):
            provider.prepare(spec, workspace, bake=lambda target: bake(target, say, workspace), say=say)

        with run.phase("provision", inputs=digest(text)) as (step, say):
            made = _as_asked(spec, plan, provider.apply(spec, workspace, keep=change.keep, say=say))
            inventory = made.inventory
            if not inventory.baked:
                _fetch_wheels(workspace, inventory.distribution, say)
            write_inventory(spec, inventory, workspace)
            run.notes += made.notes
            started = list(made.started)
            step.note = f"{len(inventory.hosts)} hosts on {inventory.network}"
        environment = environment or _resolve_environment(spec, inventory.distribution, run)

        with run.phase("reach") as (step, say):

            def revive() -> None:  # hosts that went down since they were last looked at
                started.extend(provider.apply(spec, workspace, keep=change.keep, say=say).started)

            asked = questions(spec, inventory, workspace)
            views = reach(asked, connections.to, revive=revive, say=say)
            refuse_full_disks(views)
            step.note = f"{len(views)} hosts answer"

        bring_packages(packed, inventory, workspace, connections, run)

        with run.phase("configure") as (step, say):
            run.has_mended(Mended(host, "was powered off", "started") for host in started)
            configured = mend(
                spec, made, workspace, connections, views, anew=reconfigure, limit=limit, say=say
            )
            run.has_mended(configured.mended)
            step.note = configured.summary

        _build_environment(environment, spec, inventory, workspace, run)

        with run.phase("verify") as (step, _):
            proof = verify(inventory, connections.to, only=_concerned(inventory, limit))
            run.has_mended(Mended(host, f"was {was}", "resumed") for host, was in proof.resumed.items())
            step.note = f"MPI across {len(proof.probed)} of {len(inventory.compute)} nodes"
            run.notes += _unprobed(proof)

    return Up(inventory, proof, tuple(run.phases), tuple(run.notes), tuple(run.mended))


def _concerned(inventory: Inventory, limit: Collection[str]) -> tuple[str, ...]:
    """The nodes that are to be proven: a sick one elsewhere is not what was asked about."""
    if not limit:
        return ()
    lead = inventory.controller.name
    return (lead, *(host.name for host in inventory.compute if host.name in limit and host.name != lead))


def _unprobed(proof: Proof) -> tuple[str, ...]:
    """What to say of nodes that the proof left out."""
    busy = (f"not probed, busy with jobs: {', '.join(proof.busy)}",) if proof.busy else ()
    return (*busy, *(f"not probed, and left as it is: {node}" for node in proof.aside))


def _as_asked(spec: ClusterSpec, plan: Plan, made: Provisioned) -> Provisioned:
    """What was made, with what the spec says of it beyond its hosts."""
    said = {
        "usd_per_hour": plan.hosts.usd_per_hour,
        "scheduler": spec.scheduler,
        "job_user": spec.job_user.name,
    }
    return replace(made, inventory=made.inventory.model_copy(update=said))


@overload
def _resolve_environment(spec: ClusterSpec, distribution: Distribution, run: Run) -> jobs.Environment: ...
@overload
def _resolve_environment(
    spec: ClusterSpec, distribution: Distribution | None, run: Run
) -> jobs.Environment | None: ...
def _resolve_environment(
    spec: ClusterSpec, distribution: Distribution | None, run: Run
) -> jobs.Environment | None:
    """What the spec's requirements come to; a phase only where it has any. None if it can't be told yet."""
    if distribution is None:
        return None
    if spec.software.python.requirements is None:
        return jobs.PLAIN
    with run.phase("resolve") as (step, say):
        environment = jobs.environment_of(spec, distribution=distribution, say=say, heard=say)
        step.note = f"{len(environment.lock.wheels) if environment.lock else 0} Python packages"
    return environment


def _build_environment(
    environment: jobs.Environment, spec: ClusterSpec, inventory: Inventory, workspace: Workspace, run: Run
) -> None:
    """Have the environment of the spec's requirements on the cluster; a phase only where it has any."""
    if environment.lock is None:
        return
    with run.phase("environment") as (step, say):
        transport = SSHTransport(inventory.controller.name, workspace.ssh_config, user=spec.job_user.name)
        try:
            built = jobs.build(transport, environment, say=say)
        finally:
            transport.close()
        step.note = "built" if built else "as it was"


def down(
    workspace: Workspace,
    *,
    name: str,
    tell: Tell,
    discard_runs: bool = False,
    out: Path | None = None,
    hands: Hands = NO_HANDS,
    wait_s: float = LOCK_WAIT_S,
) -> Down:
    """Bring home what was not collected, then remove the cluster and prove that nothing is left.

    ``wait_s`` bounds how long another clusterctl that works on the cluster is waited for.

    Raises:
        CollectError: a run could not be brought home; the cluster stays.
        LeftoversError: an independent look found something of the cluster.
        LockedError: another clusterctl was still at work after ``wait_s``.
        UsageError: there is no such cluster.
    """
    with workspace.lock("down", wait_s=wait_s, waiting=lambda text: tell(WAITING, text)):
        sweep()
        if not workspace.root.is_dir():
            return _down_lost(name, tell)
        if _has_taken_none(workspace):
            workspace.remove()
            return Down((), (), "onprem")
        settings = _settings(workspace)
        provider = provider_of(settings, hands)
        run = Run("down", Journal(workspace.journal), tell)
        runs: tuple[RunRecord, ...] = ()
        if not discard_runs and collect.uncollected(workspace):
            with run.phase("collect") as (step, _):
                runs = bring_home(workspace, out)
                step.note = f"{len(runs)} runs"
        with run.phase("destroy") as (_, say):
            destroy(provider, workspace.cluster_id(), workspace, say)
        workspace.remove()
    return Down(runs, tuple(run.phases), settings.type)


def _settings(workspace: Workspace) -> ProviderSettings:
    """The provider of the cluster as it was raised. Of a local one, that may be damaged or missing.

    Raises:
        UsageError: it can't be read, and what Terraform has made would be forgotten.
    """
    try:
        return spec_as_raised(workspace).provider
    except UsageError:
        states = [*workspace.terraform.glob("*.tfstate*")]
        if (
            states
            or _is_of_own_machines(workspace)
            or (workspace.terraform.is_dir() and (workspace.spec.exists() or workspace.hosts.exists()))
        ):
            raise
        return LocalSettings()  # the spec is written before anything is made at Google


def _is_of_own_machines(workspace: Workspace) -> bool:
    """Whether what stands in it is of machines of the user's own."""
    return workspace.access_config.exists()


def _has_taken_none(workspace: Workspace) -> bool:
    """Whether it is of machines of the user's own, and none of them was joined to the cluster yet."""
    return _is_of_own_machines(workspace) and not (workspace.joining.exists() or workspace.hosts.exists())


def orphans(settings: ProviderSettings, name: str, hands: Hands = NO_HANDS) -> tuple[Orphan, ...]:
    """The clusters of that name that have no workspace here, found by looking at them."""
    return find_orphans(provider_of(settings, hands), name, known=Workspace.of(name).known_id())


def down_orphans(
    settings: ProviderSettings, found: Sequence[Orphan], *, tell: Tell, hands: Hands = NO_HANDS
) -> None:
    """Remove them, and prove that nothing is left.

    Raises:
        LeftoversError: an independent look found something of one.
    """
    provider = provider_of(settings, hands)
    for orphan in found:
        destroy(provider, orphan.cluster_id, None, lambda text: tell("destroy", text))


def _down_lost(name: str, tell: Tell) -> Down:
    """Remove local clusters whose workspace was lost."""
    local = LocalSettings()
    found = orphans(local, name)
    if not found:
        raise NotUpError(
            f"there is no cluster {name!r}",
            fix="name another with --cluster (`clusterctl list` shows them); one on Google Cloud whose "
            "workspace was lost is found with --orphans",
        )
    down_orphans(local, found, tell=tell)
    return Down((), ())


def write_inventory(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> None:
    """Put the inventory where ordinary tools find it: `ssh -F`, `ansible-playbook -i`."""
    write_atomic(workspace.known_hosts, inventory.known_hosts())
    ssh_config = inventory.ssh_config(key=workspace.key, known_hosts=workspace.known_hosts)
    write_atomic(workspace.ssh_config, ssh_config)
    configure.write_inventory(spec, inventory, workspace)
    write_atomic(workspace.hosts, inventory.model_dump_json(indent=2) + "\n")
    workspace.joining.unlink(missing_ok=True)  # all of it stands there now


def _give_back(
    inventory: Inventory, hosts: Collection[str], workspace: Workspace, say: Say
) -> Mapping[str, tuple[str, ...]]:
    """Have Ansible put back what was on these; what was left on each, and why."""
    write_inventory(spec_as_raised(workspace), inventory, workspace)

    def progress(task: configure.Progress) -> None:
        say(HostStep(task.host, task.what, len(hosts), task.status, task.failed))

    return configure.restore(inventory, workspace, limit=hosts, progress=progress)


def _fetch_wheels(workspace: Workspace, distribution: Distribution, say: Say) -> None:
    """Have the wheels of the job environment here, for hosts that need not reach an index."""
    say("downloading the wheels of the job environment")
    wheels = wheelhouse(asset("payload") / "requirements.lock", Node.of(distribution))
    with temporary_folder(workspace.root) as folder:  # so that there is one at any time
        link = folder / "wheels"
        link.symlink_to(wheels)
        link.replace(workspace.wheels)


def bake(target: BakeTarget, say: Say, workspace: Workspace) -> None:
    """Run the install half of every role on an image that answers SSH."""
    say("downloading the wheels of the job environment")
    lock = asset("payload") / "requirements.lock"
    wheels = wheelhouse(lock)
    say("installing Slurm, Open MPI and the job environment")
    configure.install(
        target,
        wheels=wheels,
        lock=lock,
        workspace=workspace,
        progress=lambda p: say(HostStep(p.host, p.what, 1, p.status, p.failed)),
    )
