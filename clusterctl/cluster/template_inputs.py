"""The inputs of node templates, the configuration that all hosts of a group start with.

A template is built once, and found in the provider's cache by a hash of its inputs. Names,
addresses, sizes and secrets are in files specific to a host (``host_files``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from clusterctl.cluster.context import ClusterContext
from clusterctl.configure import inventory_file
from clusterctl.hosts.roles import can_share_configuration
from clusterctl.scheduler.slurm.conf import takes_nodes_by_reconfigure
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Inventory, planned_distribution
from clusterctl.util.assets import ansible_hash, digest


def has_templates(cluster: ClusterContext) -> bool:
    """Return whether new hosts can start with a configuration that is built once per group."""
    return cluster.provider.known_shared is not None and can_share_configuration(cluster.spec)


def template_hash(roles: str, variables: Mapping[str, Any]) -> str:
    """Return the hash under which a configuration is cached. ``roles``: the hash of all roles."""
    return digest(roles, json.dumps(variables, sort_keys=True, default=str))


def inputs_of_node_template(cluster: ClusterContext) -> str:
    """Return the hash under which new nodes' configuration is cached. "" if it can't be built in
    advance.
    """
    distribution = planned_distribution(cluster.spec, cluster.workspace)
    if distribution is None or not has_templates(cluster):
        return ""
    shared = str(cluster.provider.known_shared)
    variables = inventory_file.class_variables(cluster.spec, distribution, shared)
    return template_hash(ansible_hash(), variables)


def inputs_of_templates(cluster: ClusterContext, inventory: Inventory) -> Mapping[str, str]:
    """Return group of hosts -> hash of all configuration except the host-specific files.

    The result lacks a group if its hosts differ in more than these files. It also lacks the
    controller's group if slurmctld must be restarted to learn about new nodes.
    """
    spec = cluster.spec
    # Hosts that are not baked also differ in their firewall or a mount.
    if not has_templates(cluster) or not inventory.baked:
        return {}
    inputs = {
        COMPUTE: inventory_file.class_variables(spec, inventory.distribution, inventory.shared)
    }
    if takes_nodes_by_reconfigure(inventory):
        controller = {"host": asdict(inventory.controller)}
        values = inventory_file.role_variables(spec, inventory, cluster.workspace)
        inputs[CONTROLLER] = controller | values
    return {group: template_hash(ansible_hash(), variables) for group, variables in inputs.items()}
