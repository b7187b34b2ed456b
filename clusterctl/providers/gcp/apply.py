"""Terraform plans on Google Cloud: what they do and why they fail in a user's terms, and their application.

Transient errors are retried; what an earlier run left there is imported.

A machine that was made while Terraform, its provider or clusterctl was killed is not in the state: making it
again says that it already exists. If it is this cluster's, by its label or by the id in its name, it is
imported into the state by the plan that goes on from there; what is somebody else's is left alone. Quota and
stock-out are not waited for: the user decides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from clusterctl.errors import (
    ClusterctlError,
    Failure,
    ProvisionError,
    TerraformError,
    UsageError,
)
from clusterctl.providers.base import Action, HostChange
from clusterctl.providers.gcp.api import rules
from clusterctl.providers.gcp.costs import INSTANCE, OFF, HostPrices
from clusterctl.providers.gcp.orphans import cluster_id_of
from clusterctl.providers.gcp.terraform import Action as TerraformAction
from clusterctl.providers.gcp.terraform import Plan, ResourceChange, Terraform
from clusterctl.providers.gcp.terraform_run import Diagnostic, Resource, first_of
from clusterctl.spec import gcp_nodes
from clusterctl.util.assets import first_rule, table
from clusterctl.util.progress import Clock

WAITS_S: Final = (5, 10, 20, 40, 60, 60)
_DATA: Final = Path(__file__).with_name("data")
_LAYERS: Final = 12  # of what depends on each other, taken over one after the other
_NAMES: Final = ("name", "account_id", "role_id")
_CLOCK: Final = Clock()


@dataclass(frozen=True, slots=True)
class Owner:
    """The cluster, by its id.

    storage: what it takes up of an earlier cluster, by the id that Terraform imports it with.
    """

    cluster_id: str
    storage: str = ""

    def owns(self, change: ResourceChange) -> bool:
        """Whether what is there is this cluster's: by label, by description, by name where it has neither."""
        there = change.before or {}
        if change.adopts and change.adopts == self.storage:
            return True
        if (marked := cluster_id_of(there)) is not None:
            return marked == self.cluster_id
        parts = {part for name in _NAMES for part in str(there.get(name)).replace("_", "-").split("-")}
        return self.cluster_id in parts


def apply_plan(
    terraform: Terraform,
    plan: Plan,
    owner: Owner,
    *,
    clock: Clock = _CLOCK,
) -> None:
    waits, layers = iter(WAITS_S), iter(range(_LAYERS))
    adopt: Mapping[str, str] = MappingProxyType({})
    failed: TerraformError | None = None
    while True:
        try:
            left = plan if failed is None else terraform.rest_of(plan, adopt=adopt)
            if all(owner.owns(change) for change in left.changes if change.adopts):
                return terraform.apply(left)
        except TerraformError as error:
            failed, adopt = error, {}
            if error.already_exists and next(layers, None) is not None:
                adopt = error.already_exists
                names = ", ".join(identity.rpartition("/")[2] for identity in adopt.values())
                terraform.reporter.progress(f"there already: {names}; looking whether it is this cluster's")
            elif error.transient and (seconds := next(waits, None)) is not None:
                terraform.reporter.progress(
                    f"{'; '.join(dict.fromkeys(f.cause for f in error.failures))}; going on in {seconds} s"
                )
                clock.sleep(seconds)
            else:
                raise
        else:
            assert failed is not None  # noqa: S101  # only then is something taken over
            raise failed  # what is there is another's


_COSTS: Final = ("google_compute_", "google_filestore_")


def refuse_another(plan: Plan, cluster_id: str) -> None:
    """That nothing in the state bears another cluster's id, as where two share a bucket for their states."""
    ids = {found for there in _there(plan) if (found := cluster_id_of(there)) not in (None, cluster_id)}
    if ids:
        raise ProvisionError(
            f"Terraform's state is that of another cluster: {', '.join(sorted(map(str, ids)))}",
            code="state-of-other-cluster",
            where="provider.state",
            why=f"this one is {cluster_id}; the other would be taken to pieces",
            fix="give this cluster another name, or its state another prefix; if the other was yours and its "
            "workspace was lost, remove it first: `clusterctl orphans remove`",
        )


def refuse_moved(plan: Plan, project: str) -> None:
    """Refuse a cluster that is in another project than the spec's: `down` looks in one project alone."""
    projects = {str(there["project"]) for there in _there(plan, _COSTS) if there.get("project")} - {project}
    if projects:
        what = f"the cluster is in the project {', '.join(sorted(projects))} already"
        fix = "put provider.project back; or take the cluster down first, which is done where it is"
        raise UsageError(what, code="cluster-in-other-project", where="provider.project", fix=fix)


def _there(plan: Plan, types: tuple[str, ...] = ("google_",)) -> Iterator[Mapping[str, Any]]:
    return (change.before for change in plan.changes if change.before and change.type.startswith(types))


_BENEATH_NODES: Final = ("module.network", "module.iam")  # with what they need that they do not name


def _address(name: str) -> str:
    return f'module.nodes.module.node["{name}"]'


def has_node(plan: Plan, name: str) -> bool:
    """Whether the state that was planned from has anything of that node."""
    return any(one.before and one.address.startswith(_address(name)) for one in plan.changes)


def remove_node(terraform: Terraform, name: str, owner: Owner) -> None:
    """Remove what the state has of a node, and nothing else."""
    plan = terraform.plan(destroy=True, targets=[_address(name)])
    if not plan.is_empty:
        apply_plan(terraform, plan, owner)


@contextmanager
def extra_node(terraform: Terraform, name: str, owner: Owner, shown: Plan | None) -> Iterator[None]:
    """A node that is there while the body runs, and what is beneath nodes; the node is then removed.

    Nothing else is done that was not ``shown``. The module names the node already.

    Raises:
        StalePlanError: something else would have to be done.
    """
    remove_node(terraform, name, owner)  # one that an earlier run has left, half made
    error: BaseException | None = None
    try:
        plan = terraform.plan(targets=[*_BENEATH_NODES, _address(name)])
        if shown:
            shown.refuse_more(plan, but=_address(name))
        apply_plan(terraform, plan, owner)
        yield
    except BaseException as exc:
        error = exc
        raise
    finally:
        terraform.reporter.progress(f"removing {name}, which costs while it is there")
        try:
            remove_node(terraform, name, owner)
        except ClusterctlError as exc:
            what = f"{name} may still be there, and is billed"
            fix = "`clusterctl up` or `clusterctl down` removes it"
            failed = error or exc
            if isinstance(failed, ClusterctlError):
                failed.also(Failure("not-removed", what, name, "provision", fix, retryable=True))
                failed.fix = "\n".join(filter(None, (failed.fix, f"{what}: {fix}")))
            else:  # such as an interrupt, which tells nothing of it
                terraform.reporter.note(f"{what}: {fix}")
            if error is None:
                raise


_NODE: Final = re.compile(r'^module\.nodes\.module\.node\["([^"]+)"\]\.')
_CONTROLLER: Final = "module.controller."
_UNKNOWN: Final = "terraform"
_TAKEN: Final = "name-taken"
_NAMED: Final = 5  # hosts of one cause
_OWN_ACCOUNT: Final = "projects/{project}/serviceAccounts/{account}@{project}.iam.gserviceaccount.com"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster is. ``enables_apis``: an API that is off is one that was just switched on."""

    project: str
    zone: str
    controller: str  # its host's name
    enables_apis: bool = False

    @property
    def region(self) -> str:
        return self.zone.rsplit("-", 1)[0]

    def host_of(self, address: str) -> str | None:
        """The host that a resource of our module belongs to."""
        if node := _NODE.match(address):
            return node.group(1)
        return self.controller if address.startswith(_CONTROLLER) else None

    def explain(self, what: str, diagnostics: tuple[Diagnostic, ...]) -> TerraformError:
        """Return the error of what was being done, by Terraform's diagnostics."""
        findings = [(diagnostic.address, diagnose(diagnostic, self)) for diagnostic in diagnostics]
        failures = tuple(dict.fromkeys(finding.failure for _, finding in findings))
        first, *others = _causes(failures) or [""]
        error = TerraformError(
            f"{what}: {first}" if first else what,
            where=f"project {self.project}, {self.zone}",
            why="; ".join(others),
            fix="; ".join(dict.fromkeys(failure.fix for failure in failures)),
            failures=failures,
        )
        error.transient = bool(findings) and all(finding.transient for _, finding in findings)
        error.already_exists = {
            address: found.import_id for address, found in findings if address and found.import_id
        }
        return error

    def name(self, resource: Resource) -> str:
        """Return a host's name, or what a person calls another resource; "" if it is not worth a word."""
        host, word = self.host_of(resource.address), words_for(resource.type)
        if resource.type == INSTANCE and host:
            return host
        of = host or (resource.key if isinstance(resource.key, str) else "")
        return f"{word} ({of})" if word and of else word


@dataclass(frozen=True, slots=True)
class Finding:
    """What one diagnostic means; ``import_id`` is that of what already exists."""

    failure: Failure
    transient: bool = False
    import_id: str = ""


def diagnose(diagnostic: Diagnostic, place: Place) -> Finding:
    """The meaning of one; what no rule knows is shown whole."""
    host = place.host_of(diagnostic.address)
    if (found := first_rule(rules(), " ".join(diagnostic.text.split()))) is None:
        where = f" ({diagnostic.address})" if diagnostic.address else ""
        fix = "look up what Google's provider says; what was made stays, and the next run goes on from there"
        return Finding(Failure(_UNKNOWN, f"{diagnostic.text.strip()}{where}", host, "provision", fix))
    rule, groups = found
    words = {"project": place.project, "zone": place.zone, "region": place.region, **groups}
    transient = rule.transient or (rule.code == "api-off" and place.enables_apis)
    failure = rule.failure(words, host=host, phase="provision")
    failure = replace(failure, retryable=transient or rule.retryable)
    return Finding(failure, transient, _import_id(groups, place) if rule.code == _TAKEN else "")


def _import_id(groups: Mapping[str, str], place: Place) -> str:
    """The id by which Terraform imports what is there already; empty where the text does not say it."""
    if "account" in groups:
        return _OWN_ACCOUNT.format_map({"project": place.project, **groups})
    if "role" in groups:
        return f"{groups['role_in']}/roles/{groups['role']}"
    return groups.get("taken", "")


def _causes(failures: Iterable[Failure]) -> list[str]:
    """Each cause once, after the hosts that it is the cause of."""
    hosts: dict[str, list[str]] = {}
    for failure in failures:
        hosts.setdefault(failure.cause, []).extend([failure.host] if failure.host else [])
    return [f"{first_of(named, _NAMED)}: {cause}" if named else cause for cause, named in hosts.items()]


_SHAPE: Final = "terraform_data.shape"
_ACTIONS: Final[Mapping[TerraformAction, Action]] = {
    "create": "make",
    "update": "change",
    "replace": "replace",
    "delete": "remove",
    "no-op": "keep",
}
_STOPPED_FOR: Final = frozenset({"machine_type", "service_account", "shielded_instance_config"})
_HOLDING: Final = frozenset({"google_filestore_instance", "google_compute_disk"})  # users' files
_UNTOLD: Final = frozenset(
    {"effective_labels", "terraform_labels"}  # labels, said once
    | {"desired_status", "current_status"}  # "it is off"
)


def host_changes(plan: Plan, prices: HostPrices | None = None) -> tuple[HostChange, ...]:
    """What becomes of each host, in the order of their names."""
    shapes = {change.address: change for change in plan.changes}
    instances = [change for change in plan.changes if change.type == INSTANCE]
    changes = (_host(change, shapes, prices) for change in instances)
    return tuple(sorted(changes, key=lambda change: change.name))


def other_changes(plan: Plan) -> tuple[str, ...]:
    """What is done to all else, in few words: `make a network, 2 service accounts`."""
    lines = []
    for action, verb in _ACTIONS.items():
        changes = (change for change in plan.real_changes if change.action == action != "no-op")
        found = Counter(change.type for change in changes if change.type != INSTANCE)
        if words := [words_for(kind, count) for kind, count in found.items() if words_for(kind)]:
            lines.append(f"{verb} {', '.join(words)}")
    return tuple(lines)


def lost(plan: Plan) -> tuple[str, ...]:
    """What holds files, is no host, and goes or is made anew: `a Filestore instance (demo-shared)`."""
    gone = (c for c in plan.changes if c.type in _HOLDING and c.action in ("delete", "replace"))
    return tuple(f"{words_for(change.type)} ({(change.before or {}).get('name')})" for change in gone)


def words_for(kind: str, count: int = 1) -> str:
    """What a person calls so many of a type of resource; "" where it is not worth a word."""
    plain = kind.removeprefix("google_").replace("_", " ")
    one, many = table(_DATA / "resources.yaml", dict[str, tuple[str, str]]).get(kind, (plain, f"{plain}s"))
    return one if count == 1 else f"{count} {many}"


def _host(
    change: ResourceChange,
    by_address: Mapping[str, ResourceChange],
    prices: HostPrices | None,
) -> HostChange:
    there = change.after or change.before or {}
    why = _why(change, by_address.get(change.address.replace(f"{INSTANCE}.host", _SHAPE)))
    off = change.action == "update" and (change.before or {}).get("current_status") in OFF
    was = prices.of(change.before) if prices and change.before else None
    cost = prices.of({**there, "current_status": "RUNNING"}) if prices and change.after else was
    return HostChange(
        name=str(there["name"]),
        action=_ACTIONS[change.action],
        what=_what(there),
        why="; ".join(filter(None, ("it is off" if off else "", why))),
        usd_per_hour=cost,
        was_usd_per_hour=was if change.action in ("update", "replace") and was != cost else None,
        restarts=change.action == "update" and not off and bool(_STOPPED_FOR & set(_differing(change))),
        off=off,
    )


def _what(instance: Mapping[str, Any]) -> str:
    """`g2-standard-8, 1 x l4, spot`."""
    words = [str(instance.get("machine_type"))]
    machine = gcp_nodes.machines().get(words[0])
    added = instance.get("guest_accelerator") or ()
    if machine is not None and machine.gpu is not None:  # of its own, which Google names among the added, too
        words.append(f"{machine.gpu.count} x {machine.gpu.type}")
        added = ()
    for gpu in added:
        words.append(f"{gpu.get('count')} x {str(gpu.get('type')).rpartition('/')[2]}")
    if any(each.get("provisioning_model") == "SPOT" for each in instance.get("scheduling") or ()):
        words.append("spot")
    return ", ".join(words)


def _why(change: ResourceChange, shape: ResourceChange | None) -> str:
    if change.action == "update":
        return _list(_differing(change))
    if change.action != "replace":
        return ", ".join(change.why_replaced)
    asked = _differing(shape, "input") if shape is not None and shape.action != "no-op" else ()
    paths = [path.split(".")[0] for path in change.why_replaced if " " not in path]
    return _list([*asked, *paths]) or ", ".join(change.why_replaced)


def _differing(change: ResourceChange, inside: str | None = None) -> tuple[str, ...]:
    """The attributes that get another value."""
    before: Mapping[str, Any] = change.before or {}
    after: Mapping[str, Any] = change.after or {}
    if inside is not None:
        before, after = before.get(inside) or {}, after.get(inside) or {}
    return tuple(name for name in after if before.get(name) != after[name] and name not in _UNTOLD)


def _list(attributes: Iterable[str]) -> str:
    words = list(dict.fromkeys(name.replace("_", " ") for name in attributes))
    several = len(words) > 1 or (words[-1:] and words[-1].endswith("s"))
    return f"{' and '.join(words)} change{'' if several else 's'}" if words else ""
