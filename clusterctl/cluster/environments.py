"""The Python of the spec's requirements: what it comes to, and that the cluster has it."""

from __future__ import annotations

from typing import overload

from clusterctl.cluster.phases import Run
from clusterctl.jobs.environment import PLAIN, Environment, build, environment_of
from clusterctl.spec import ClusterSpec
from clusterctl.spec.distributions import Distribution
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.ssh import SSHTransport


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
    with run.phase("resolve") as (step, say):
        environment = environment_of(spec, distribution=distribution, say=say, heard=say)
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
    with run.phase("environment") as (step, say):
        transport = SSHTransport(inventory.controller.name, workspace.ssh_config, user=spec.job_user.name)
        try:
            built = build(transport, environment, say=say)
        finally:
            transport.close()
        step.note = "built" if built else "as it was"
