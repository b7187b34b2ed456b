"""Apply Terraform's plans on Google Cloud, and describe their changes and errors in a user's terms.

Google's provider retries most temporary errors itself, for 2 to 21 minutes. Only errors that pass by
themselves and that it does not retry are retried here. Errors of quota and stock-out are not
retried, because the user has to decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import ClusterctlError, Failure, ProvisionError, TerraformError, UsageError
from clusterctl.providers.base import Action, HostChange
from clusterctl.providers.gcp import fixed
from clusterctl.providers.gcp.api import rules
from clusterctl.providers.gcp.costs import INSTANCE, OFF, HostPrices, provisioning_model
from clusterctl.providers.gcp.orphans import cluster_id_of
from clusterctl.providers.gcp.terraform import TAINTED, ResourceChange, Terraform, TerraformPlan
from clusterctl.providers.gcp.terraform import Action as TerraformAction
from clusterctl.providers.gcp.terraform_run import Diagnostic, Resource
from clusterctl.spec.names import first_few
from clusterctl.spec.providers import gcp_machines
from clusterctl.util.assets import first_rule, read_table
from clusterctl.util.progress import Clock

WAITS_S: Final = (5, 10, 20, 40, 60, 60)
_DATA: Final = Path(__file__).with_name("data")
_CLOCK: Final = Clock()


def apply_plan(terraform: Terraform, plan: TerraformPlan, *, clock: Clock = _CLOCK) -> None:
    """Apply a plan. After a transient error, apply those of its changes that are not done yet."""
    waits = iter(WAITS_S)
    remaining: TerraformPlan | None = plan
    while True:
        try:
            return terraform.apply(remaining or terraform.plan_remaining(plan))
        except TerraformError as error:
            if not error.transient or (seconds := next(waits, None)) is None:
                raise
            causes = "; ".join(dict.fromkeys(failure.cause for failure in error.failures))
            terraform.reporter.progress(f"{causes}; retrying in {seconds} s")
            clock.sleep(seconds)
            remaining = None


def reject_foreign_state(plan: TerraformPlan, cluster_id: str) -> None:
    """Raise a ProvisionError if Terraform's state belongs to another cluster, as where two clusters
    keep theirs in one place.
    """
    existing = (change.before for change in plan.changes if change.type.startswith("google_"))
    ids = {cluster_id_of(resource) for resource in existing if resource} - {None, cluster_id}
    if ids:
        raise ProvisionError(
            f"Terraform's state belongs to another cluster: {', '.join(sorted(map(str, ids)))}",
            code="exists",
            about="state",
            why=f"this cluster has the id {cluster_id}; applying its plan would delete the other "
            "cluster",
            fix="name another place in the `backend` of your `*_override.tf` in the cluster's folder "
            "terraform; if the other cluster was yours and its workspace was lost, remove it first: "
            "`clusterctl orphans remove`",
        )


def reject_loss_of_files(plan: TerraformPlan) -> None:
    """Raise a UsageError if the plan would recreate the controller, or delete or recreate a shared
    folder.

    These have the users' files. The settings of the spec that ask for it are refused before
    (fixed.py); this refuses what an override of the module asks for.
    """
    for change in plan.real_changes:
        is_controller = change.type == INSTANCE and change.address.startswith(_CONTROLLER)
        # What was created half-way has no files yet.
        is_lost = change.action in _DELETING and TAINTED not in change.why_replaced
        if is_lost and (is_controller or change.type == _FILESTORE):
            setting = "provider.controller" if is_controller else "provider.filestore"
            name = (change.before or {}).get("name")
            reason = ", ".join(change.why_replaced)
            raise fixed.error([setting], f"{name} would be recreated or deleted: {reason}")


def reject_smaller_disks(plan: TerraformPlan) -> None:
    """Raise a UsageError if a disk of an existing host would have to shrink.

    Terraform's provider grows disks in place. It also asks Google to shrink a boot disk
    (resource_compute_instance.go, boot_disk.0.initialize_params.0.size), which Google refuses.
    """
    smaller = [
        str(change.before["name"])
        for change in plan.real_changes
        # A host that is recreated has a new boot disk.
        if change.before and change.after and change.type == INSTANCE and change.action == "update"
        if _disk_gib(change.after) < _disk_gib(change.before)
    ]
    if smaller:
        raise UsageError(
            f"the disk of {first_few(smaller)} can't shrink",
            code="fixed-while-up",
            about="disk",
            where="size of the disk",
            why="Google only grows disks",
            fix="restore its size; or take the cluster down first: `clusterctl down`",
        )


def _disk_gib(instance: Mapping[str, Any]) -> int:
    """Return the size of an instance's boot disk."""
    (disk,) = instance["boot_disk"]
    return int(disk["initialize_params"][0].get("size") or 0)


# The modules that nodes need without referring to them.
_BENEATH_NODES: Final = ("module.network", "module.iam")

# The firewall rules that let a Filestore instance call hosts, by its address.
RULES_OF_FILESTORE: Final = "module.network.google_compute_firewall.filestore"


# The partition of the machine that an image is made of. No partition of a spec has this name.
IMAGE_PARTITION: Final = "(image)"
_IMAGE_NODE: Final = f'module.nodes.module.partition["{IMAGE_PARTITION}"]'


def has_image_node(plan: TerraformPlan) -> bool:
    """Return whether Terraform's state contained the machine of an image when the plan was made."""
    return any(change.before and change.address.startswith(_IMAGE_NODE) for change in plan.changes)


def remove_image_node(terraform: Terraform) -> None:
    """Delete the machine of an image. Other resources are not changed."""
    plan = terraform.plan(destroy=True, targets=[_IMAGE_NODE])
    if not plan.is_empty:
        apply_plan(terraform, plan)


@contextmanager
def image_node(terraform: Terraform, name: str, shown: TerraformPlan | None) -> Iterator[None]:
    """Create the machine ``name`` of an image, with the network and accounts that it needs. After
    the body, delete the machine.

    Terraform's variables must already contain it. shown: the plan that the user has seen, if any.
    Raise a StalePlanError if changes that ``shown`` lacks are necessary, other than changes of the
    machine.
    """
    # An interrupted earlier run may not have deleted the machine.
    remove_image_node(terraform)
    error: BaseException | None = None
    try:
        plan = terraform.plan(targets=[*_BENEATH_NODES, _IMAGE_NODE])
        if shown:
            shown.reject_additions(plan, except_for=_IMAGE_NODE)
        apply_plan(terraform, plan)
        yield
    except BaseException as exc:
        error = exc
        raise
    finally:
        terraform.reporter.progress(f"deleting {name}, which is billed while it exists")
        try:
            remove_image_node(terraform)
        except ClusterctlError as exc:
            message = f"the temporary machine {name} was not deleted and is still billed"
            fix = "run `clusterctl up` or `clusterctl down`, which deletes it"
            failed = error or exc
            if isinstance(failed, ClusterctlError):
                failed.also(
                    Failure(
                        "leftovers",
                        message,
                        name,
                        "provision",
                        fix,
                        retryable=True,
                        about="machine",
                    )
                )
                failed.fix = "\n".join(filter(None, (failed.fix, f"{message}: {fix}")))
            else:
                # The message of an interrupt, for example, does not mention the machine.
                terraform.reporter.note(f"{message}: {fix}")
            if error is None:
                raise


# Resources of a node have its name as the key.
_NODE: Final = re.compile(r'^module\.nodes\.module\.partition\["[^"]+"\]\.\w+\.\w+\["([^"]+)')
_CONTROLLER: Final = "module.controller."
# The maximum number of host names in a message with the same cause.
_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class ProjectZone:
    """The project and zone of a cluster. ``controller``: the name of its controller host.

    enables_apis: whether `up` enables APIs. This takes time, so errors about disabled APIs are
        retried.
    """

    project: str
    zone: str
    controller: str
    enables_apis: bool = False

    @property
    def region(self) -> str:
        return self.zone.rsplit("-", 1)[0]

    def host_of(self, address: str) -> str | None:
        """Return the host that the resource at this Terraform address belongs to. None: it has no
        host.
        """
        if node := _NODE.match(address):
            return node.group(1)
        return self.controller if address.startswith(_CONTROLLER) else None

    def explain(self, action: str, diagnostics: tuple[Diagnostic, ...]) -> TerraformError:
        """Return an error that starts with ``action`` ("Terraform could not make a plan") and says
        why.
        """
        findings = [diagnose(diagnostic, self) for diagnostic in diagnostics]
        failures = tuple(dict.fromkeys(finding.failure for finding in findings))
        first, *other_causes = _causes(failures) or [""]
        error = TerraformError(
            f"{action}: {first}" if first else action,
            where=f"project {self.project}, {self.zone}",
            why="; ".join(other_causes),
            fix="; ".join(dict.fromkeys(failure.fix for failure in failures)),
            failures=failures,
        )
        error.transient = bool(findings) and all(finding.transient for finding in findings)
        return error

    def name(self, resource: Resource) -> str:
        """Return a resource's name for users: `demo-1` or `disk (demo-1)`. Empty: don't show the
        resource.
        """
        host = self.host_of(resource.address)
        word = label_for(resource.type)
        if resource.type == INSTANCE and host:
            return host
        owner = host or (resource.key if isinstance(resource.key, str) else "")
        return f"{word} ({owner})" if word and owner else word


@dataclass(frozen=True, slots=True)
class ApplyFinding:
    """An explained Terraform error. ``transient``: it passes, and Google's provider does not
    retry it.
    """

    failure: Failure
    transient: bool = False


def diagnose(diagnostic: Diagnostic, place: ProjectZone) -> ApplyFinding:
    """Explain a Terraform error by the rules of diagnoses.yaml. If no rule matches, quote the
    error.
    """
    host = place.host_of(diagnostic.address)
    if (match := first_rule(rules(), " ".join(diagnostic.text.split()))) is None:
        location = f" ({diagnostic.address})" if diagnostic.address else ""
        fix = (
            "look up this message of Terraform's Google provider, then run the command again, "
            "which continues"
        )
        return ApplyFinding(
            Failure(
                TerraformError.code,
                f"{diagnostic.text.strip()}{location}",
                host,
                "provision",
                fix,
                about=TerraformError.about,
            )
        )
    rule, groups = match
    words = {"project": place.project, "zone": place.zone, "region": place.region, **groups}
    transient = rule.transient or (rule.code == "api-off" and place.enables_apis)
    failure = rule.failure(words, host=host, phase="provision")
    failure = replace(failure, retryable=transient or rule.retryable)
    return ApplyFinding(failure, transient)


def _causes(failures: Iterable[Failure]) -> list[str]:
    hosts: dict[str, list[str]] = {}
    for failure in failures:
        hosts.setdefault(failure.cause, []).extend([failure.host] if failure.host else [])
    return [
        f"{first_few(named, _NAMED)}: {cause}" if named else cause for cause, named in hosts.items()
    ]


_SHAPE: Final = "terraform_data.shape"
_ACTIONS: Final[Mapping[TerraformAction, Action]] = {
    "create": "make",
    "update": "change",
    "replace": "replace",
    "delete": "remove",
    "no-op": "keep",
}
_MODELS: Final = {"SPOT": "spot", "FLEX_START": "flex-start"}
_STOPPED_FOR: Final = frozenset({"machine_type", "service_account", "shielded_instance_config"})
_FILESTORE: Final = "google_filestore_instance"
_DELETING: Final = frozenset({"replace", "delete"})
# Copies of `labels`, and attributes that are shown as "it is off".
_UNTOLD: Final = frozenset(
    {"effective_labels", "terraform_labels", "desired_status", "current_status"}
)


def host_changes(plan: TerraformPlan, prices: HostPrices | None = None) -> tuple[HostChange, ...]:
    """Return the planned change of each host, sorted by name. ``prices``: to add costs; None: no
    costs.
    """
    instances = [change for change in plan.changes if change.type == INSTANCE]
    shapes = {change.address: change for change in plan.changes}
    changes = (_host(change, shapes, prices) for change in instances)
    return tuple(sorted(changes, key=lambda change: change.name))


def other_changes(plan: TerraformPlan) -> tuple[str, ...]:
    """Return texts about changes of resources that are not hosts: `make a network, 2 service
    accounts`.
    """
    lines = []
    for action, verb in _ACTIONS.items():
        changes = (change for change in plan.real_changes if change.action == action != "no-op")
        counts = Counter(change.type for change in changes if change.type != INSTANCE)
        if words := [label_for(kind, count) for kind, count in counts.items() if label_for(kind)]:
            lines.append(f"{verb} {', '.join(words)}")
    return tuple(lines)


def label_for(kind: str, count: int = 1) -> str:
    """Return words for ``count`` resources of a Terraform type: `disk`, `2 disks`. "": not shown to
    users.
    """
    plain = kind.removeprefix("google_").replace("_", " ")
    labels = read_table(_DATA / "resources.yaml", dict[str, tuple[str, str]])
    singular, plural = labels.get(kind, (plain, f"{plain}s"))
    return singular if count == 1 else f"{count} {plural}"


def _host(
    change: ResourceChange, shapes: Mapping[str, ResourceChange], prices: HostPrices | None
) -> HostChange:
    """Return the change of a host. ``shapes``: address -> change of each resource."""
    attributes = change.after or change.before or {}
    partition = change.address.partition(f".{INSTANCE}.")[0]
    reason = _reason(change, shapes.get(f"{partition}.{_SHAPE}"))
    # Somebody attached these disks at Google.
    others = {*_attached(change.before)} - {*_attached(change.after)}
    names = tuple(sorted(path.rpartition("/")[2] for path in others))
    detached = names if change.action == "update" else ()
    off = change.action == "update" and (change.before or {}).get("current_status") in OFF
    is_running = change.action == "update" and not off
    stops = is_running and not _STOPPED_FOR.isdisjoint(_differing(change))
    old_cost = prices.of(change.before) if prices and change.before else None
    cost = (
        prices.of({**attributes, "current_status": "RUNNING"})
        if prices and change.after
        else old_cost
    )
    return HostChange(
        name=str(attributes["name"]),
        action=_ACTIONS[change.action],
        what=_describe(attributes),
        why="; ".join(
            filter(
                None,
                (
                    "it is off" if off else "",
                    reason,
                    f"detaches {', '.join(detached)}" if detached else "",
                ),
            )
        ),
        usd_per_hour=cost,
        was_usd_per_hour=old_cost
        if change.action in ("update", "replace") and old_cost != cost
        else None,
        ends_jobs=stops or (is_running and bool(detached)),
        stops=stops,
        off=off,
        detached_disks=detached,
    )


def _attached(instance: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the paths of the disks beside an instance's boot disk, as far as they are known."""
    for disk in (instance or {}).get("attached_disk") or ():
        if isinstance(disk, Mapping):
            yield _path(str(disk.get("source")))


def _path(link: str) -> str:
    """Return the part of a link that names a resource: Google gives links with and without host."""
    return link[max(0, link.find("projects/")) :]


def _describe(instance: Mapping[str, Any]) -> str:
    words = [str(instance.get("machine_type"))]
    machine = gcp_machines.machines().get(words[0])
    added = instance.get("guest_accelerator") or ()
    # Google lists the GPUs of a GPU machine type among the added accelerators.
    if machine is not None and machine.gpu is not None:
        words.append(f"{machine.gpu.count} x {machine.gpu.type}")
        added = ()
    for gpu in added:
        words.append(f"{gpu.get('count')} x {str(gpu.get('type')).rpartition('/')[2]}")
    if model := _MODELS.get(provisioning_model(instance)):
        words.append(model)
    return ", ".join(words)


def _reason(change: ResourceChange, shape: ResourceChange | None) -> str:
    if change.action == "update":
        return _describe_changes(_differing(change))
    if change.action != "replace":
        return ", ".join(change.why_replaced)
    changed_inputs = (
        _differing(shape, "input") if shape is not None and shape.action != "no-op" else ()
    )
    paths = [path.split(".")[0] for path in change.why_replaced if " " not in path]
    return _describe_changes([*changed_inputs, *paths]) or ", ".join(change.why_replaced)


def _differing(change: ResourceChange, key: str | None = None) -> tuple[str, ...]:
    before: Mapping[str, Any] = change.before or {}
    after: Mapping[str, Any] = change.after or {}
    if key is not None:
        before = before.get(key) or {}
        after = after.get(key) or {}
    return tuple(name for name in after if before.get(name) != after[name] and name not in _UNTOLD)


def _describe_changes(attributes: Iterable[str]) -> str:
    words = list(dict.fromkeys(name.replace("_", " ") for name in attributes))
    several = len(words) > 1 or (words[-1:] and words[-1].endswith("s"))
    return f"{' and '.join(words)} change{'' if several else 's'}" if words else ""
