"""The story of a cluster: image → provision → probe → configure → verify, and down again.

Each phase is journaled with its inputs and its seconds; killed anywhere and run again, `up` converges,
because every phase looks at the world and makes only what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl import runs as collect
from clusterctl.cluster.converge import Mended, fetch_wheels, mend, questions
from clusterctl.cluster.environments import build_environment, fitting_environment, resolve_environment
from clusterctl.cluster.impact import refuse, review
from clusterctl.cluster.membership import forget, limited, replacing
from clusterctl.cluster.offline import AS_BEFORE, Packages, bring_packages, take_bundle
from clusterctl.cluster.phases import Phase, Run, TellMended, untold
from clusterctl.cluster.plan import Plan, ahead, copied
from clusterctl.cluster.proving import prove
from clusterctl.cluster.teardown import Orphan, bring_home, destroy, destroy_lost, find_orphans, to_discard
from clusterctl.cluster.verify import Proof
from clusterctl.configure import ansible, events, inventory_file
from clusterctl.errors import DiskError, NotUpError, UsageError
from clusterctl.hosts.probe import probe_hosts, reject_full_disks, with_distributions
from clusterctl.packages.wheels import Node, wheelhouse
from clusterctl.providers.base import BakeTarget, Provider, Provisioned, Size
from clusterctl.providers.local.provider import LocalProvider
from clusterctl.providers.onprem import left_behind
from clusterctl.providers.onprem.hands import NO_HANDS, Hands
from clusterctl.providers.onprem.provider import OnpremProvider
from clusterctl.scheduler.session import applied_spec, distribution_ahead
from clusterctl.spec import ClusterSpec
from clusterctl.spec import GcpProvider as GcpSettings
from clusterctl.spec import LocalProvider as LocalSettings
from clusterctl.spec import OnpremProvider as OnpremSettings
from clusterctl.spec import Provider as ProviderSettings
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.load import dump_spec
from clusterctl.state.inventory import Inventory
from clusterctl.state.journal import Journal, digest
from clusterctl.state.ledger import JobEntry, RunRecord
from clusterctl.state.lock import WAIT_S as LOCK_WAIT_S
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.connections import Connections
from clusterctl.transport.ssh_files import write_ssh_files
from clusterctl.util.assets import job_lock
from clusterctl.util.lifetime import roomiest, sweep
from clusterctl.util.progress import WAITING, HostStep, PhaseReporter, Reporter

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
    """A cluster that is gone, and the runs that were brought home before, and those that were not.

    ``looked``: whether there was anything to look for.
    """

    runs: tuple[RunRecord, ...]
    phases: tuple[Phase, ...]
    provider: str = LocalSettings().type
    looked: bool = True
    discarded: tuple[JobEntry, ...] = ()


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
    hands: Hands = NO_HANDS,
    wait_s: float = LOCK_WAIT_S,
) -> Up:
    """Raise the cluster, or mend it; returns only after an MPI job ran right across every node.

    ``agree`` is shown what becomes of the hosts before anything is done; what it raises ends it there.
    What is configured already and as it was left is not configured again, unless ``reconfigure``. Jobs that
    a changed spec has no place for are ended under ``force``. ``packages`` says where hosts get theirs from,
    ``hands`` see to host keys and passwords.
    ``limit`` names the only hosts to touch: all others stay as they are, and so do the jobs on them.
    ``replaced`` ones are other machines now; what they were is given back.
    ``wait_s`` bounds how long another clusterctl that works on the cluster is waited for.

    Raises:
        LockedError: it was still at work then.
        UsageError: the change would end jobs; nothing was changed.
        ClusterctlError: a phase failed; what was done stays, and the next `up` goes on from there.
    """
    provider = provider_of(spec.provider, hands)
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


def down(
    workspace: Workspace,
    *,
    name: str,
    reporter: PhaseReporter,
    discard_runs: bool = False,
    discard: Collection[str] = (),
    out: Path | None = None,
    gone: Collection[str] = (),
    hands: Hands = NO_HANDS,
    wait_s: float = LOCK_WAIT_S,
) -> Down:
    """Bring home what was not collected, then remove the cluster and prove that nothing is left.

    The runs of the jobs to ``discard`` are not brought home, nor is any with ``discard_runs``.
    Machines of the user's own that are ``gone`` for good are not waited for.
    ``wait_s`` bounds how long another clusterctl that works on the cluster is waited for.

    Raises:
        CollectError: a run could not be brought home; the cluster stays.
        DiskError: all is removed but the workspace, which stands on a read-only file system.
        LeftoversError: an independent look found something of the cluster.
        LockedError: another clusterctl was still at work after ``wait_s``.
        UsageError: there is no such cluster, it knows nothing of a machine that is gone, or a job to discard
            was not submitted from here.
    """
    with workspace.lock("down", wait_s=wait_s, waiting=lambda text: reporter(WAITING, text)):
        sweep()
        discarded = to_discard(workspace, discard, everything=discard_runs)
        if not workspace.root.is_dir():
            return _down_lost(name, reporter)
        with _writable(workspace, lambda text: reporter(WAITING, text)) as records:
            done = _taken_down(
                records, name=name, reporter=reporter, discarded=discarded, out=out, gone=gone, hands=hands
            )
        workspace.remove()
    return done


@contextmanager
def _writable(workspace: Workspace, report: Callable[[str], None]) -> Iterator[Workspace]:
    """The workspace, or a copy elsewhere where its disk takes nothing more: `down` must not need it."""
    try:
        workspace.create()
    except DiskError as exc:
        report(f"{workspace.root} takes nothing more ({exc.why}); working on a copy of it")
        with copied(workspace, without=["logs"], place=roomiest()) as copy:
            yield copy
    else:
        yield workspace


def _taken_down(
    workspace: Workspace,
    *,
    name: str,
    reporter: PhaseReporter,
    discarded: Collection[JobEntry],
    out: Path | None,
    gone: Collection[str],
    hands: Hands,
) -> Down:
    if _has_made_nothing(workspace):
        forget(workspace, gone)
        return Down((), (), "", looked=False)
    settings = _settings(workspace)
    provider = provider_of(settings, hands)
    run = Run("down", Journal(workspace.journal), reporter)
    runs: tuple[RunRecord, ...] = ()
    if set(collect.uncollected(workspace)) - set(discarded):
        with run.phase("collect") as (step, _):
            runs = bring_home(workspace, out, discarded)
            step.note = f"{len(runs)} runs"
    if discarded:
        with run.phase("discard") as (step, _):
            step.note = f"runs of {', '.join(entry.shown for entry in discarded)}"
    if forgotten := forget(workspace, gone):
        hands.told(f"forgotten: {'; '.join(forgotten)}")
    with run.phase("destroy") as (_, report):
        if looked := not _has_taken_none(workspace):
            destroy(provider, workspace.cluster_id(), workspace, report)
        if isinstance(settings, LocalSettings) and not workspace.hosts.exists():
            destroy_lost(provider, name, workspace, report)
    return Down(runs, tuple(run.phases), settings.type, looked, tuple(discarded))


def _settings(workspace: Workspace) -> ProviderSettings:
    """The provider of the cluster as it was raised. Of a local one, that may be damaged or missing.

    Raises:
        UsageError: it can't be read, and what Terraform has made would be forgotten.
    """
    try:
        return applied_spec(workspace).provider
    except UsageError:
        states = [*workspace.terraform.glob("*.tfstate*")]
        if (
            states
            or is_of_own_machines(workspace)
            or (workspace.terraform.is_dir() and (workspace.spec.exists() or workspace.hosts.exists()))
        ):
            raise
        return LocalSettings()  # the spec is written before anything is made at Google


def is_of_own_machines(workspace: Workspace) -> bool:
    """Whether what stands in it is of machines of the user's own."""
    return workspace.access_config.exists()


def _has_made_nothing(workspace: Workspace) -> bool:
    """Whether `up` ended before any host was made or joined."""
    records = (workspace.spec, workspace.hosts, workspace.joining, workspace.terraform)
    return _has_taken_none(workspace) or not (
        workspace.known_id() or left_behind.found(workspace) or any(path.exists() for path in records)
    )


def _has_taken_none(workspace: Workspace) -> bool:
    """Whether it is of machines of the user's own, and none of them was joined to the cluster yet."""
    return is_of_own_machines(workspace) and not (
        workspace.joining.exists() or workspace.hosts.exists() or left_behind.found(workspace)
    )


def orphans(settings: ProviderSettings, name: str, hands: Hands = NO_HANDS) -> tuple[Orphan, ...]:
    """The clusters of that name that have no workspace here, found by looking at them."""
    return find_orphans(provider_of(settings, hands), name, known=Workspace.of(name).known_id())


def down_orphans(
    settings: ProviderSettings, found: Sequence[Orphan], *, reporter: PhaseReporter, hands: Hands = NO_HANDS
) -> None:
    """Remove them, and prove that nothing is left.

    Raises:
        LeftoversError: an independent look found something of one.
    """
    provider = provider_of(settings, hands)
    for orphan in found:
        destroy(provider, orphan.cluster_id, None, lambda text: reporter("destroy", text))


def _down_lost(name: str, reporter: PhaseReporter) -> Down:
    """Remove local clusters whose workspace was lost."""
    local = LocalSettings()
    found = orphans(local, name)
    if not found:
        raise NotUpError(
            f"there is no cluster {name!r}",
            fix="name another with --cluster (`clusterctl list` shows them); one on Google Cloud or "
            "on machines of your own whose workspace was lost is found with --orphans",
        )
    down_orphans(local, found, reporter=reporter)
    return Down((), ())


def write_inventory(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> None:
    """Put the inventory where ordinary tools find it: `ssh -F`, `ansible-playbook -i`."""
    write_ssh_files(inventory, workspace)
    inventory_file.write_inventory(spec, inventory, workspace)
    write_atomic(workspace.hosts, inventory.model_dump_json(indent=2) + "\n")
    workspace.joining.unlink(missing_ok=True)  # all of it stands there now


def _give_back(
    inventory: Inventory, hosts: Collection[str], workspace: Workspace, report: Reporter
) -> Mapping[str, tuple[str, ...]]:
    """Have Ansible put back what was on these; what was left on each, and why."""
    write_inventory(applied_spec(workspace), inventory, workspace)

    def progress(task: events.TaskProgress) -> None:
        report(HostStep(task.host, task.what, len(hosts), task.status, task.failed))

    return ansible.restore(inventory, workspace, limit=hosts, progress=progress)


def bake(target: BakeTarget, report: Reporter, workspace: Workspace) -> None:
    """Run the install half of every role on an image that answers SSH."""
    report("downloading the wheels of the job environment")
    lock = job_lock()
    wheels = wheelhouse(lock, Node.of(distribution_of(target.distribution)))
    report("installing Slurm, Open MPI and the job environment")
    ansible.install(
        target,
        wheels=wheels,
        lock=lock,
        workspace=workspace,
        progress=lambda p: report(HostStep(p.host, p.what, 1, p.status, p.failed)),
    )
