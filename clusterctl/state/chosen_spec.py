"""The spec (content of the YAML file) of the cluster that a command is about."""

from __future__ import annotations

from dataclasses import replace

from clusterctl.errors import ClusterctlError
from clusterctl.spec.load import read_spec, resolve_spec
from clusterctl.spec.models import ClusterSpec, faults
from clusterctl.state.chosen import ChosenCluster, unknown_cluster
from clusterctl.state.inventory import applied_if_known, applied_spec, inventory_if_known, no_spec
from clusterctl.state.workspace import Workspace
from clusterctl.util.confine import reject_read
from clusterctl.util.progress import SILENT


def spec_of(chosen: ChosenCluster) -> ClusterSpec:
    """Return the spec in the chosen file, in ./cluster.yaml, or of the built-in local cluster.

    For a cluster chosen by its name, return the spec of its last `clusterctl up`. If that spec
    breaks a rule of a newer clusterctl, report this as a note, not as an error, so that the cluster
    can still be repaired. Raise SpecError if the file has errors, UsageError if the file or cluster
    does not exist.
    """
    if chosen.name is not None:
        workspace = chosen.named_workspace()
        if not workspace.spec.exists():
            known = workspace.inventory.exists() or workspace.jobs.exists()
            raise (
                no_spec(workspace, "the file is missing") if known else unknown_cluster(chosen.name)
            )
        spec = applied_spec(workspace)
        for fault in faults(spec):
            chosen.note(f"note: {fault.key}: {fault.message} (a rule newer than the cluster)")
        return spec
    path = chosen.spec_file
    if path is None:
        chosen.note_built_in()
    spec = read_spec(path)
    if (packages := spec.software.python.requirements) is not None:
        reject_read(packages)
    return resolve_spec(spec, applied_if_known(Workspace.of(spec.name)))


def spec_of_existing(chosen: ChosenCluster) -> ClusterSpec:
    """Like `spec_of`, but if no file or name is chosen, return the spec of the only cluster that is
    up.
    """
    return spec_of(replace(chosen, name=chosen.only_cluster() or chosen.name))


def reject_foreign(chosen: ChosenCluster) -> None:
    """Raise UsageError if other people operate the chosen cluster, for commands that only they may
    use.

    A wrong choice of the cluster is reported by the command itself.
    """
    quiet = replace(chosen, note=SILENT.note)
    try:
        workspace = quiet.workspace()
        inventory = inventory_if_known(workspace)
        provider = inventory.traits if inventory else type(spec_of(quiet).provider)
    except ClusterctlError:
        return
    provider.reject_operation(workspace.root.name)
