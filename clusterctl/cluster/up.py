"""The story of `up`: plan → image → provision → probe → converge → verify.

Killed anywhere and run again, `up` converges: every phase looks at the world and makes only what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.cluster.bake import prepare_image, share_configuration
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.converge import converge, inputs_of, packages_lost_on
from clusterctl.cluster.hardware import link_wheels
from clusterctl.cluster.impact import make_way, reject
from clusterctl.cluster.node_class import node_files
from clusterctl.cluster.nodes import limited, replacing
from clusterctl.cluster.phases import Drift, Outcome, Phase
from clusterctl.cluster.plan import Plan, plan_changes, preflight
from clusterctl.cluster.verify import Verification, verify
from clusterctl.configure import inventory_file
from clusterctl.configure.ansible import record_inventory
from clusterctl.errors import ConfigureError, Failure, UsageError
from clusterctl.hosts.checks import other_numbers, reject_full_disks, reject_taken_numbers
from clusterctl.hosts.probe import (
    HostReport,
    ask_hosts,
    reports_of,
    with_distributions,
)
from clusterctl.hosts.roles import probe_requests, wanted_accounts
from clusterctl.jobs.environment import Environments
from clusterctl.packages.bundle import Bundle, cluster_bundle, missing_bundle, use_bundle
from clusterctl.providers.base import Provisioned, Size
from clusterctl.providers.node_class import NodeClass, NodeFiles
from clusterctl.providers.storage import record as record_storage
from clusterctl.scheduler.script import PLAIN, Environment
from clusterctl.spec.common import ADMIN_ID
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import ADMIN_USER
from clusterctl.state.facts import facts_of_spec, job_settings
from clusterctl.state.inventory import (
    Inventory,
    distribution_ahead,
)
from clusterctl.state.workspace import write_atomic
from clusterctl.transport.ssh import end_all
from clusterctl.util.assets import job_lock
from clusterctl.util.process import parallel_map
from clusterctl.util.progress import follow


@dataclass(frozen=True, slots=True)
class UpOptions:
    """How `up` goes about it.

    approve: called with the plan before anything changes. Raise to abort.
    reconfigure: configure hosts that are configured and have not drifted, too.
    force: cancel the jobs that a changed spec has no nodes for.
    discard: lose what exists only on hosts that leave.
    bundle: the bundle that hosts install packages from. Default: as before.
    own_repositories: have hosts install packages from their own repositories again.
    limit: the only hosts to configure, besides the controller. Default: all hosts.
    replaced: hosts that are other machines now. The former machines are released; a provider that creates
        hosts removes them.
    """

    approve: Callable[[Plan], None] = lambda _: None
    reconfigure: bool = False
    force: bool = False
    discard: bool = False
    bundle: Path | None = None
    own_repositories: bool = False
    limit: Collection[str] | None = None
    replaced: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class UpResult:
    """A cluster that is up and verified."""

    inventory: Inventory
    verification: Verification
    phases: tuple[Phase, ...]
    notes: tuple[str, ...]


def up(cluster: ClusterContext, options: UpOptions) -> UpResult:
    """Create, change or repair the cluster. Return after an MPI job has run on all idle nodes.

    Raises:
        UsageError: the change would cancel jobs; nothing was changed.
        ClusterctlError: a phase failed; what was done stays, and the next `up` continues from there.
    """
    cluster.provider.check(cluster.spec)
    with cluster.locked():
        if options.limit is not None:
            cluster = replace(cluster, spec=limited(cluster.spec, cluster.workspace, options.limit))
        decision = decide(cluster, options)
        cluster.run("prepare_image", prepare_image)
        keys = share_configuration(cluster, decision.plan.hosts, decision.distribution)
        provisioned = cluster.run("provision", provision, decision, keys)
        inventory = provisioned.inventory
        environment = resolve_environment(cluster, inventory.distribution, decision)
        reports = cluster.run("probe", probe, inventory, decision.keep)
        if cluster.workspace.bundle.exists() and not inventory.baked:
            cluster.run("send_packages", send_packages, decision.bundle, inventory, reports)
        reports = cluster.run(
            "converge", converge, provisioned, reports, limit=options.limit, again=options.reconfigure
        )
        if environment.lock is not None:
            cluster.run("build_environment", build_environment, environment, inventory)
        verification = cluster.run("verify", verify, inventory, reports, options.limit)
    return UpResult(inventory, verification, tuple(cluster.phases), tuple(cluster.notes))


def decide(cluster: ClusterContext, options: UpOptions) -> Decision:
    """Plan, have the plan approved, and clear the hosts that leave of jobs. Record the spec.

    If the plan is rejected, the hosts that were replaced are members of the cluster again.

    Raises:
        UsageError: the change would cancel jobs.
        OnlyCopyError: something exists only on hosts that leave.
    """
    workspace, spec = cluster.workspace, cluster.spec
    with replacing(workspace, options.replaced if spec.provider.user_owned else ()):
        # From now on the hosts are a cluster's: an unfinished `down` or `image bake` is forgotten.
        workspace.removing.unlink(missing_ok=True)
        workspace.baking.unlink(missing_ok=True)
        bundle = open_bundle(cluster, options)
        distribution = distribution_ahead(spec, workspace)
        environment = resolve_environment(cluster, distribution) if distribution else None
        if spec.provider.is_cloud:  # machines of the user's own are examined when they are planned
            cluster.run("preflight", preflight)
        workspace.create_secrets()
        recreated = () if spec.provider.user_owned else tuple(options.replaced)
        plan = cluster.run("plan_changes", plan_changes, recreated)
        if not options.force:
            reject(plan.jobs)
        options.approve(plan)
        keep = make_way(
            cluster, plan.hosts, force=options.force, discard=options.discard, replaced=options.replaced
        )
    if cluster.applied is None or cluster.applied.users != spec.users:
        end_all(workspace.ssh_config)  # an account that is connected can't get another uid
    write_atomic(workspace.spec, dump_spec(spec))
    return Decision(plan, keep, recreated, distribution, environment, bundle)


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan that `up` carries out.

    keep: the nodes that keep their size, because jobs run there.
    recreated: the hosts that the provider removes and creates again.
    distribution: of new hosts, if it is known before they exist.
    environment: the Python environment of the spec, resolved for this distribution.
    """

    plan: Plan
    keep: Mapping[str, Size]
    recreated: tuple[str, ...] = ()
    distribution: Distribution | None = None
    environment: Environment | None = None
    bundle: Bundle | None = None


def reject_bundles(spec: ClusterSpec, *, fix: str) -> None:
    """Raise UsageError where the provider creates the hosts of a spec: they install nothing from bundles."""
    if not spec.provider.user_owned:
        raise UsageError(
            f"a bundle is for machines of your own, and the provider is {spec.provider.type}",
            code="bundle-needs-own-machines",
            fix=fix,
        )


def open_bundle(cluster: ClusterContext, options: UpOptions) -> Bundle | None:
    """Open the bundle that is given, or that the cluster was installed from, as a phase; None without one."""
    if options.bundle is not None:
        reject_bundles(cluster.spec, fix="leave --bundle out")
        return cluster.run("open_bundle", _open_bundle, options.bundle)
    if options.own_repositories:
        cluster.workspace.bundle.unlink(missing_ok=True)
    known = cluster_bundle(cluster.workspace)
    return cluster.run("open_bundle", _open_bundle, known.file) if known and known.file.exists() else None


def _open_bundle(cluster: ClusterContext, file: Path) -> Outcome[Bundle]:
    bundle = use_bundle(file, cluster.spec, cluster.workspace)
    return Outcome(bundle, f"{file.name}, for {', '.join(bundle.manifest.systems)}")


def resolve_environment(
    cluster: ClusterContext, distribution: Distribution, decision: Decision | None = None
) -> Environment:
    """Resolve the spec's Python requirements for this distribution, as a phase, unless that is decided."""
    if decision and decision.environment and decision.distribution == distribution:
        return decision.environment
    if cluster.spec.software.python.requirements is None:
        return PLAIN
    return cluster.run("resolve_environment", _resolve_environment, distribution)


def _resolve_environment(cluster: ClusterContext, distribution: Distribution) -> Outcome[Environment]:
    progress = cluster.reporter.progress
    facts = facts_of_spec(cluster.spec)
    environment = Environments(progress, progress).resolve(facts, distribution)
    packages = len(environment.lock.wheels) if environment.lock else 0
    return Outcome(environment, f"{packages} Python packages")


def provision(cluster: ClusterContext, decision: Decision, keys: Mapping[str, str]) -> Outcome[Provisioned]:
    """Create, start and remove hosts. New hosts have what their group shares, by its key."""
    spec, workspace, progress = cluster.spec, cluster.workspace, cluster.reporter.progress

    def completed(inventory: Inventory) -> Inventory:
        known = {"usd_per_hour": decision.plan.hosts.usd_per_hour, **job_settings(spec)}
        return inventory.model_copy(update=known)

    def files(inventory: Inventory) -> NodeFiles:
        whole = completed(inventory)
        inputs_of(spec, whole, workspace, {}).write(workspace)
        return node_files(spec, whole, workspace)

    made = cluster.provider.apply(
        spec,
        workspace,
        keep=decision.keep,
        node_class=NodeClass(keys, files) if keys else None,
        recreated=decision.recreated,
    )
    known = follow(with_distributions(made.inventory, workspace, cluster.connections.to), cluster.reporter)
    inventory = completed(known)
    if not inventory.baked:  # its hosts need not reach an index
        progress("downloading the wheels of the job environment")
        link_wheels(job_lock(), workspace.wheels, inventory.distribution)
    inventory_file.write_ansible_inventory(spec, inventory, workspace)
    record_inventory(inventory, workspace)
    if spec.storage.keep:  # it is the cluster's again
        record_storage(spec.name, None)
    _report_started(cluster, made)
    provisioned = replace(made, inventory=inventory)
    return Outcome(provisioned, f"{len(inventory.hosts)} hosts on {inventory.network}", made.notes)


def _report_started(cluster: ClusterContext, made: Provisioned) -> None:
    cluster.repaired(Drift(host, "was powered off", "started") for host in made.started)


def probe(
    cluster: ClusterContext, inventory: Inventory, keep: Mapping[str, Size]
) -> Outcome[Mapping[str, HostReport]]:
    """Ask all hosts for their facts. Hosts that have gone down since they were created are started again."""
    asked = probe_requests(cluster.spec, inventory, cluster.workspace)
    answers = []
    with closing(ask_hosts(asked, cluster.connections.to)) as asking:
        for answer in asking:
            if answer is None:
                made = cluster.provider.apply(cluster.spec, cluster.workspace, keep=keep)
                _report_started(cluster, made)
            else:
                answers.append(answer)
                cluster.reporter.progress(answer.step)
    reports = reports_of(asked, answers)
    reject_full_disks(reports)
    reject_taken_numbers(reports, wanted_accounts(cluster.spec))
    if lost := packages_lost_on(cluster.workspace, reports):
        if inventory.baked:
            raise _not_reinstalled(inventory, lost)
        # Else Ansible would take it that all is there.
        parallel_map([*lost], lambda host: cluster.connections.to(host).run(_NOT_INSTALLED))
    if cluster.spec.provider.is_cloud:
        reports = _with_one_uid(cluster, inventory, reports)
    accounts = {host: one.accounts for host, one in reports.items()}
    notes = tuple(map(str, other_numbers(accounts, inventory.controller.name)))
    return Outcome(reports, f"{len(reports)} hosts answer", notes)


def _not_reinstalled(inventory: Inventory, lost: Mapping[str, str]) -> ConfigureError:
    """Nodes have no route to a repository: what was removed there comes with a new one alone."""
    fixes = {host: f"`clusterctl node replace {host}` makes it anew" for host in lost}
    fixes[inventory.controller.name] = "a controller is made anew by `clusterctl down` and `clusterctl up`"
    failures = [
        Failure("package-missing", f"removed there: {packages}", host, "reach", fixes[host])
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
    cluster: ClusterContext, inventory: Inventory, reports: Mapping[str, HostReport]
) -> Mapping[str, HostReport]:
    """Renumber our account to ADMIN_ID on all hosts where it has several uids: the proof job needs one.

    Rented hosts make it with the next uid that their image has free. Where it can't be done, it stays.
    """
    uids = {host: one.accounts[ADMIN_USER] for host, one in reports.items() if ADMIN_USER in one.accounts}
    if len({*uids.values()}) <= 1:
        return reports

    def renumber(host: str) -> None:
        connection = cluster.connections.to(host)
        connection.run(_RENUMBER, check=False)
        connection.close()  # its processes have the old uid

    others = [host for host, uid in uids.items() if uid != ADMIN_ID]
    end_all(cluster.workspace.ssh_config)
    parallel_map(others, renumber)
    return {**reports, **cluster.probe(inventory, others)}


def send_packages(
    cluster: ClusterContext, bundle: Bundle | None, inventory: Inventory, reports: Mapping[str, HostReport]
) -> Outcome[None]:
    """Send the bundle's repository to the hosts that have something to install.

    Raises:
        BundleError: the file of the bundle is missing.
    """
    to = cluster.connections.to
    hosts = inventory_file.hosts_to_install(inventory, cluster.spec.software, reports, to)
    if not hosts:
        return Outcome(None, "nothing to send")
    if bundle is None:
        raise missing_bundle(cluster.workspace)
    sent = inventory_file.send_repository(bundle, hosts, to)
    return Outcome(None, f"sent to {len(sent)} hosts" if sent else "nothing to send")


def build_environment(
    cluster: ClusterContext, environment: Environment, inventory: Inventory
) -> Outcome[None]:
    """Build the environment of the spec's requirements on the cluster."""
    controller = cluster.connections.to(inventory.controller.name, cluster.spec.job_user.name)
    rented = cluster.spec.provider.is_cloud
    built = Environments(cluster.reporter.progress).build(controller, environment, rented=rented)
    return Outcome(None, "built" if built else "unchanged")
