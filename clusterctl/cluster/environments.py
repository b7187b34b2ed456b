"""The Python of the spec's requirements: what it comes to, and that the cluster has it."""

from __future__ import annotations

from typing import overload

from clusterctl import jobs
from clusterctl.cluster.phases import Run
from clusterctl.spec import ClusterSpec
from clusterctl.spec.distributions import Distribution
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.ssh import SSHTransport


@overload
def resolve_environment(spec: ClusterSpec, distribution: Distribution, run: Run) -> jobs.Environment: ...
@overload
def resolve_environment(
    spec: ClusterSpec, distribution: Distribution | None, run: Run
) -> jobs.Environment | None: ...
def resolve_environment(
    spec: ClusterSpec, distribution: Distribution | None, run: Run
) -> jobs.Environment | None:
    """What the spec's requirements come to; a phase only where it has any. None if it can't be told yet."""
    if distribution is None:
        return None
    if spec.software.python.requirements is None:
        return jobs.PLAIN
    with run.phase("resolve") as (step, report):
        environment = jobs.environment_of(spec, distribution=distribution, report=report, heard=report)
        step.note = f"{len(environment.lock.wheels) if environment.lock else 0} Python packages"
    return environment


def fitting_environment(
    environment: jobs.Environment | None,
    expected: Distribution | None,
    spec: ClusterSpec,
    distribution: Distribution,
    run: Run,
) -> jobs.Environment:
    """What was resolved ahead; resolved anew where the hosts have something else than was expected."""
    if environment is not None and distribution == expected:
        return environment
    return resolve_environment(spec, distribution, run)


def build_environment(
    environment: jobs.Environment, spec: ClusterSpec, inventory: Inventory, workspace: Workspace, run: Run
) -> None:
    """Have the environment of the spec's requirements on the cluster; a phase only where it has any."""
    if environment.lock is None:
        return
    with run.phase("environment") as (step, report):
        transport = SSHTransport(inventory.controller.name, workspace.ssh_config, user=spec.job_user.name)
        try:
            built = jobs.build(transport, environment, report=report)
        finally:
            transport.close()
        step.note = "built" if built else "as it was"
