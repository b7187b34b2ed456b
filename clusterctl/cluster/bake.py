"""Builds node images, and the configuration that all hosts of a group have in common."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.down import DownOptions, down_locked
from clusterctl.cluster.hardware import link_wheels
from clusterctl.cluster.phases import PhaseResult, workspace_copy
from clusterctl.cluster.plan import plan_changes, preflight
from clusterctl.cluster.template_inputs import has_templates, template_hash
from clusterctl.configure import ansible, inventory_file
from clusterctl.errors import UsageError
from clusterctl.hosts.probe import with_distributions
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.wheelhouse import wheelhouse
from clusterctl.providers.base import HostPlan
from clusterctl.scheduler.slurm.conf import accounting_files
from clusterctl.spec.distributions import Distribution, distribution_of
from clusterctl.spec.load import dump_spec
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory, planned_distribution
from clusterctl.state.workspace import write_atomic
from clusterctl.transport.ssh import Connections
from clusterctl.util.assets import ansible_hash, job_lock
from clusterctl.util.progress import report_steps


def bake_image(
    cluster: ClusterContext, approve: Callable[[tuple[str, ...]], None] = lambda _: None
) -> Literal["made", "cached"]:
    """Build the image that new nodes start from. Return "cached" if it existed, else "made".

    If there is no cluster yet, afterwards remove all else that the build created.

    approve: called before the build with a line about each image and its price; may raise to abort.
    Raise UsageError if the provider can't build an image for these nodes.
    """
    cluster.provider.check(cluster.spec)
    spec = cluster.spec
    workspace = cluster.workspace
    distribution = planned_distribution(spec, workspace)
    if distribution is None or cluster.provider.known_shared is None:
        raise UsageError(
            "no image can be built for these nodes",
            code="unsupported",
            about="image",
            why="the provider does not build images, or the distribution of the nodes is unknown",
            fix="set an image in the spec whose distribution is known",
        )
    with cluster.locked():
        # This file marks that no cluster exists, so its remains can be removed after the build.
        if not (workspace.spec.exists() or workspace.inventory.exists()):
            write_atomic(workspace.baking, "")
        try:
            if spec.provider.is_cloud:
                cluster.run("preflight", preflight)
            workspace.create_secrets()
            plan = cluster.run("plan_changes", plan_changes)
            if plan.hosts.images:
                approve(plan.hosts.images)
            if workspace.baking.exists():
                write_atomic(workspace.spec, dump_spec(spec))
            groups = cluster.provider.template_groups
            return cluster.run("prepare_template", prepare_templates, distribution, groups).origin
        finally:
            # If the workspace has no spec, nothing was created.
            if workspace.baking.exists() and workspace.spec.exists():
                down_locked(cluster, DownOptions(discard=True))


def prepare_image(cluster: ClusterContext) -> PhaseResult[None]:
    """Build the image that nodes start from, if the provider needs an image."""
    progress = cluster.reporter.progress

    def bake(image: Host) -> None:
        progress("downloading the wheels of the job environment")
        lock = job_lock()
        wheels = wheelhouse(lock, NodePlatform.of(distribution_of(image.distribution)))
        progress("installing Slurm, Open MPI and the job environment")
        results = ansible.install_image(
            cluster.spec, image, wheels=wheels, lock=lock, workspace=cluster.workspace
        )
        report_steps(results, cluster.reporter)

    cluster.provider.prepare(cluster.spec, cluster.workspace, bake=bake)
    return PhaseResult(None)


def share_configuration(
    cluster: ClusterContext, plan: HostPlan, distribution: Distribution | None
) -> Mapping[str, str]:
    """Build the configuration that hosts of a group start with, for each group that gets new hosts.

    distribution: of new hosts; if unknown, build nothing. Return group -> key in the provider's
        cache.
    """
    if distribution is None or not has_templates(cluster):
        return {}
    lead = cluster.spec.controller_host
    new = {change.name for change in plan.hosts if change.action in {"make", "replace"}}
    has_new = {CONTROLLER: lead in new, COMPUTE: bool(new - {lead})}
    groups = tuple(group for group in cluster.provider.template_groups if has_new[group])
    if not groups:
        return {}
    return cluster.run("prepare_template", prepare_templates, distribution, groups).keys


@dataclass(frozen=True, slots=True)
class SharedConfiguration:
    """Configurations that hosts start with. keys: group (controller, compute) -> key in the cache.

    origin: "made" if this command built any of these configurations, "cached" if all existed
        already.
    """

    keys: Mapping[str, str]
    origin: Literal["made", "cached"]


def prepare_templates(
    cluster: ClusterContext, distribution: Distribution, groups: Collection[str]
) -> PhaseResult[SharedConfiguration]:
    """Build the configuration that a group's hosts start with, for each group not in the cache."""
    spec = cluster.spec
    workspace = cluster.workspace
    shared = str(cluster.provider.known_shared)
    variables = {
        group: inventory_file.class_variables(spec, distribution, shared, group) for group in groups
    }
    all_variables = {name: value for values in variables.values() for name, value in values.items()}
    baked: list[Inventory] = []

    def bake(image: Inventory) -> None:
        if image.baked:
            cluster.reporter.progress("building the configuration that hosts share")
            slurm = accounting_files(inventory_file.TEMPLATE_CLUSTER, _free_port())
            results = ansible.configure_class(
                image.hosts, all_variables, slurm, workspace=workspace
            )
            report_steps(results, cluster.reporter)
        else:
            _bake_machine(cluster, image, distribution, variables[COMPUTE])
        baked.append(image)

    inputs = {group: template_hash(ansible_hash(), values) for group, values in variables.items()}
    keys = cluster.provider.prepare_templates(spec, workspace, inputs, bake=bake)
    result = SharedConfiguration(keys, "made" if baked else "cached")
    return PhaseResult(result, result.origin)


def _free_port() -> int:
    """Return a free TCP port of this machine for slurmdbd, which runs while an image is built."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _bake_machine(
    cluster: ClusterContext,
    image: Inventory,
    distribution: Distribution,
    variables: inventory_file.Variables,
) -> None:
    spec = cluster.spec
    workspace = cluster.workspace
    report_progress = cluster.reporter.progress
    expected = replace(image.controller, distribution=distribution.release)
    image = replace(image, hosts=(expected, *image.compute))
    with (
        workspace_copy(workspace, without=[workspace.logs.name]) as copy,
        Connections(copy.ssh_config) as connections,
    ):
        probed_image = report_steps(
            with_distributions(image, copy, connections.to), cluster.reporter
        )
        report_progress("downloading the wheels of the job environment")
        link_wheels(job_lock(), copy.wheels, probed_image.distribution)
        results = ansible.make_image(spec, probed_image, variables, workspace=copy, logs=workspace)
        report_steps(results, cluster.reporter)
