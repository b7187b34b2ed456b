"""The spec of the cluster that a user means."""

from __future__ import annotations

from dataclasses import replace

from clusterctl.spec.load import read_spec, resolve_spec
from clusterctl.spec.models import ClusterSpec, faults
from clusterctl.state.chosen import BUILT_IN, ChosenCluster, unknown_cluster
from clusterctl.state.inventory import applied_if_known, applied_spec
from clusterctl.state.workspace import Workspace


def spec_of(chosen: ChosenCluster) -> ClusterSpec:
    """Return the spec of the chosen file, of ./cluster.yaml, or of the built-in local cluster.

    Of a cluster that is chosen by its name, it is the spec that was applied, by the rules of its day: a
    cluster that is up can be repaired. What a newer rule would refuse is noted.

    Raises:
        SpecError: the file is wrong; ``problems`` has all mistakes.
        UsageError: there is no such file or cluster.
    """
    if chosen.name is not None:
        workspace = chosen.named_workspace()
        if not workspace.spec.exists():
            raise unknown_cluster(chosen.name)
        spec = applied_spec(workspace)
        for fault in faults(spec):
            chosen.note(f"note: {fault.key}: {fault.message} (a rule newer than the cluster)")
        return spec
    path = chosen.spec_file
    if path is None:
        chosen.note(BUILT_IN)
    spec = read_spec(path)
    return resolve_spec(spec, applied_if_known(Workspace.of(spec.name)))


def spec_of_existing(chosen: ChosenCluster) -> ClusterSpec:
    """Do the same, but without a spec file return the spec of the only cluster that is up, if it is one."""
    return spec_of(replace(chosen, name=chosen.only_cluster() or chosen.name))
