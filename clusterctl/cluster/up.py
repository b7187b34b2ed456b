"""The steps of `up`: plan → image → provision → probe → converge → verify.

If `up` is killed at any point and run again, it converges: every phase checks the actual state and
creates only missing parts.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from clusterctl.cluster.bake import prepare_image, share_configuration
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.converge import converge, inputs_of, packages_lost_on
from clusterctl.cluster.hardware import link_wheels
from clusterctl.cluster.host_files import node_files
from clusterctl.cluster.impact import free_changed_hosts, reject_jobs
from clusterctl.cluster.nodes import replacing
from clusterctl.cluster.phases import Drift, Phase, PhaseResult
from clusterctl.cluster.plan import Plan, plan_changes, preflight
from clusterctl.cluster.verify import Verification, verify
from clusterctl.configure import inventory_file
from clusterctl.configure.ansible import record_inventory
from clusterctl.errors import ConfigureError, Failure, Notice
from clusterctl.hosts.checks import (
    reject_full_disks,
    reject_silent_folders,
    reject_taken_numbers,
)
from clusterctl.hosts.probe import (
    TIMEOUT_S,
    HostAnswer,
    HostReport,
    ask_hosts,
    reports_of,
    with_distributions,
)
from clusterctl.hosts.roles import probe_requests, required_accounts
from clusterctl.jobs.environment import Environments
from clusterctl.providers.base import HostOptions, Provisioned
from clusterctl.providers.templates import NodeFiles, NodeTemplates
from clusterctl.scheduler.sites.script import PLAIN, Environment
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.load import dump_spec
from clusterctl.state.inventory import (
    Inventory,
    folder_of_jobs,
    inventory_if_known,
    job_settings,
    planned_distribution,
    planned_inventory,
)
from clusterctl.state.workspace import MUNGE_KEY_BYTES, write_atomic
from clusterctl.transport.master import end_all_connections
from clusterctl.util.assets import job_lock
from clusterctl.util.numbers import counted
from clusterctl.util.process import call_on_hosts, parallel_map
from clusterctl.util.progress import LockMessage, report_steps


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of `up`.

    approve: called with the plan before anything changes; may raise an exception to abort.
    reconfigure: also configure hosts that need no change.
    discard: delete data that exists only on hosts that are removed.
    limit: configure only these hosts and the controller. Default: all hosts.
    replaced: names of hosts that are replaced by different machines. The old machines are removed,
        or released if the user owns them.
    """

    approve: Callable[[Plan], None] = lambda _: None
    reconfigure: bool = False
    discard: bool = False
    limit: Collection[str] | None = None
    replaced: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class UpResult:
    inventory: Inventory
    verification: Verification
    phases: tuple[Phase, ...]
    notes: tuple[str, ...]


def up(cluster: ClusterContext, options: UpOptions) -> UpResult:
    """Create, change or repair the cluster. Return after an MPI job has run on all idle nodes.

    Raise UsageError if the change would cancel jobs, OnlyCopyError if data exists only on hosts
    that leave; then nothing is changed. Raise ClusterctlError if a phase fails; the next `up`
    continues after the phases that finished.
    """
    cluster.provider.check(cluster.spec)
    with cluster.locked():
        if options.limit is not None:
            limited = cluster.provider.limited(cluster.spec, cluster.workspace, options.limit)
            cluster = replace(cluster, spec=limited)
        recreates = cluster.provider.recreates_hosts
        # If the plan is rejected, replaced machines stay in the cluster.
        with replacing(cluster.workspace, () if recreates else options.replaced):
            prepared = prepare(cluster)
            recreated = tuple(options.replaced) if recreates else ()
            plan = cluster.run("plan_changes", plan_changes, recreated)
            reject_jobs(cluster, plan.hosts)
            options.approve(plan)
            free_changed_hosts(
                cluster, plan.hosts, discard=options.discard, replaced=options.replaced
            )
        # From the first record on, the cluster is listed, and `down` needs the same rights.
        cluster.provider.require_rights()
        record_spec(cluster)
        cluster.run("prepare_image", prepare_image)
        keys = share_configuration(cluster, plan.hosts, prepared.distribution)
        provisioned = cluster.run("provision", provision, plan, recreated, keys)
        inventory = provisioned.inventory
        environment = resolve_environment(cluster, inventory.distribution, prepared)
        reports = cluster.run("probe", probe, inventory)
        reports = cluster.run(
            "converge",
            converge,
            provisioned,
            reports,
            limit=options.limit,
            again=options.reconfigure,
        )
        if environment.lock is not None:
            cluster.run("build_environment", build_environment, environment, inventory)
        verification = cluster.run("verify", verify, inventory, reports, options.limit)
    return UpResult(inventory, verification, tuple(cluster.phases), tuple(cluster.notes))


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Inputs of later phases of `up` that are known before the plan.

    distribution: the distribution of new hosts, if it is known before they exist.
    environment: the spec's Python requirements, resolved to exact versions for this distribution.
    """

    distribution: Distribution | None
    environment: Environment | None


def prepare(cluster: ClusterContext) -> PlanInputs:
    """Find everything that would stop `up` before hosts change, and restore lost secrets."""
    workspace = cluster.workspace
    spec = cluster.spec
    distribution = planned_distribution(spec, workspace)
    environment = resolve_environment(cluster, distribution) if distribution else None
    # Machines that exist already are examined later, by the plan.
    if spec.provider.is_cloud:
        cluster.run("preflight", preflight)
    restore_munge_key(cluster)
    workspace.create_secrets()
    return PlanInputs(distribution, environment)


def record_spec(cluster: ClusterContext) -> None:
    """Write the approved spec to the workspace."""
    workspace = cluster.workspace
    if cluster.applied is not None and cluster.applied.users != cluster.spec.users:
        # usermod can't change the uid of an account while it is logged in.
        end_all_connections(workspace.ssh_config)
    # From now on the hosts belong to a cluster, so nothing must resume a `down` or `image bake`.
    workspace.removing.unlink(missing_ok=True)
    workspace.baking.unlink(missing_ok=True)
    write_atomic(workspace.spec, dump_spec(cluster.spec))


def restore_munge_key(cluster: ClusterContext) -> None:
    """Fetch the munge key from a host if the file on this machine is missing or damaged."""
    workspace = cluster.workspace
    inventory = inventory_if_known(cluster.workspace)
    if inventory is None or workspace.has_munge_key:
        return
    argv = ["sudo", "-n", "base64", "/etc/munge/munge.key"]
    answers, _ = call_on_hosts(
        inventory.names,
        lambda host: cluster.connections.to(host).run(argv, check=False).stdout,
    )
    for host, answer in answers.items():
        with suppress(ValueError):
            key = base64.b64decode(answer)
            if len(key) == MUNGE_KEY_BYTES:
                write_atomic(workspace.munge_key, key)
                text = f"{workspace.munge_key} was missing or damaged, and is restored from {host}"
                cluster.reporter.note(Notice("munge-key-restored", text))
                return


def resolve_environment(
    cluster: ClusterContext, distribution: Distribution, prepared: PlanInputs | None = None
) -> Environment:
    """Return exact versions for the spec's Python requirements, from ``prepared`` if it has them
    already.
    """
    if prepared and prepared.environment and prepared.distribution == distribution:
        return prepared.environment
    if cluster.spec.software.python.requirements is None:
        return PLAIN
    return cluster.run("resolve_environment", _resolve_environment, distribution)


def _resolve_environment(
    cluster: ClusterContext, distribution: Distribution
) -> PhaseResult[Environment]:
    progress = cluster.reporter.progress
    inventory = planned_inventory(cluster.spec)
    environment = Environments(progress, progress).resolve(inventory, distribution)
    packages = len(environment.lock.wheels) if environment.lock else 0
    return PhaseResult(environment, f"{packages} Python packages")


def provision(
    cluster: ClusterContext, plan: Plan, recreated: Collection[str], keys: Mapping[str, str]
) -> PhaseResult[Provisioned]:
    """Create, start and remove hosts.

    recreated: hosts to delete and create again. keys: group -> cache key of its built configuration.
    """
    spec = cluster.spec
    workspace = cluster.workspace
    progress = cluster.reporter.progress

    def completed(inventory: Inventory) -> Inventory:
        updates = {
            "usd_per_hour": plan.hosts.usd_per_hour,
            "folder": folder_of_jobs(inventory.shared, spec.job_user.name),
            **job_settings(spec),
        }
        return replace(inventory, **updates)

    def files(inventory: Inventory) -> NodeFiles:
        complete = completed(inventory)
        rendered = inputs_of(spec, complete, workspace, {})
        return node_files(spec, complete, workspace, rendered.files, {})

    templates = NodeTemplates(keys, files) if keys else None
    made = cluster.provider.apply(
        spec, workspace, HostOptions(recreated=recreated, templates=templates)
    )
    probed = report_steps(
        with_distributions(made.inventory, workspace, cluster.connections.to), cluster.reporter
    )
    inventory = completed(probed)
    # Hosts that install packages may have no access to a package index.
    if not inventory.baked:
        progress("downloading the wheels of the job environment")
        link_wheels(job_lock(), workspace.wheels, inventory.distribution)
    variables = inventory_file.cluster_variables(spec, inventory, workspace)
    inventory_file.write_inventory(inventory, workspace, variables)
    record_inventory(inventory, workspace)
    _report_started(cluster, made)
    provisioned = replace(made, inventory=inventory)
    return PhaseResult(
        provisioned, f"{counted(len(inventory.hosts), 'host')} on {inventory.network}", made.notes
    )


def _report_started(cluster: ClusterContext, provisioned: Provisioned) -> None:
    cluster.report_repairs(
        Drift(host, "was powered off", "started") for host in provisioned.started
    )


def probe(cluster: ClusterContext, inventory: Inventory) -> PhaseResult[Mapping[str, HostReport]]:
    """Probe hosts, and start powered-off hosts. Return host -> facts."""
    requests = probe_requests(cluster.spec, inventory, cluster.workspace)
    answers: list[HostAnswer] = []
    waiting_for: set[str] = set()
    with closing(ask_hosts(requests, cluster.connections.to)) as steps:
        for answer in steps:
            if answer is None:
                provisioned = cluster.provider.apply(cluster.spec, cluster.workspace)
                _report_started(cluster, provisioned)
                silent = requests.keys() - {each.host for each in answers}
                if silent != waiting_for:
                    waiting_for = silent
                    names = ", ".join(sorted(silent))
                    text = f"{names}: no answer yet, waiting up to {TIMEOUT_S:.0f} s"
                    cluster.reporter.progress(LockMessage(text))
            else:
                answers.append(answer)
                cluster.reporter.progress(answer.step)
    reports = reports_of(requests, answers, are_local=cluster.spec.provider.shares_kernel)
    reject_silent_folders(reports)
    reject_full_disks(reports)
    reject_taken_numbers(reports, required_accounts(cluster.spec))
    if lost := packages_lost_on(inventory, reports):
        if inventory.baked:
            raise _not_reinstalled(inventory, lost)
        # Without the mark of a finished installation, Ansible installs the packages again.
        parallel_map([*lost], lambda host: cluster.connections.to(host).run(_NOT_INSTALLED))
    return PhaseResult(
        reports, f"{counted(len(reports), 'host')} answer{'s' if len(reports) == 1 else ''}"
    )


def _not_reinstalled(inventory: Inventory, lost: Mapping[str, str]) -> ConfigureError:
    """Return the error for hosts that lost packages, can't reinstall, and must be recreated."""
    fixes = {host: f"recreate the node: `clusterctl node replace {host}`" for host in lost}
    fixes[inventory.controller.name] = (
        "recreate the controller: `clusterctl down`, then `clusterctl up`"
    )
    failures = [
        Failure(
            "host-unfit",
            f"packages were uninstalled: {packages}",
            host,
            "reach",
            fixes[host],
            about="package",
        )
        for host, packages in lost.items()
    ]
    return ConfigureError.of_hosts(
        "packages are missing on {hosts}", failures, code="host-unfit", about="packages"
    )


_NOT_INSTALLED = ("sudo", "-n", "sh", "-c", "rm -f /opt/clusterctl/installed-*")


def build_environment(
    cluster: ClusterContext, environment: Environment, inventory: Inventory
) -> PhaseResult[None]:
    """Build the Python environment of the spec's requirements on the cluster."""
    controller = cluster.connections.to(inventory.controller.name, cluster.spec.job_user.name)
    rented = cluster.spec.provider.is_cloud
    built = Environments(cluster.reporter.progress).build(controller, environment, rented=rented)
    return PhaseResult(None, "built" if built else "unchanged")
