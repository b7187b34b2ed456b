"""A plan of Terraform's in a user's terms: what becomes of each host, and of what is no host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

from clusterctl.providers.base import Action, HostChange
from clusterctl.providers.gcp.apply import Place
from clusterctl.providers.gcp.costs import OFF
from clusterctl.providers.gcp.terraform.client import Action as TerraformAction
from clusterctl.providers.gcp.terraform.client import Plan, ResourceChange
from clusterctl.providers.gcp.terraform.run import Resource
from clusterctl.spec import gcp

INSTANCE: Final = "google_compute_instance"
_SHAPE: Final = "terraform_data.shape"
_WORDS: Final = Path(__file__).parent / "data" / "resources.yaml"
_ACTIONS: Final[Mapping[TerraformAction, Action]] = {
    "create": "make",
    "update": "change",
    "replace": "replace",
    "delete": "remove",
    "no-op": "keep",
}
_VERBS: Final = {"create": "make", "update": "change", "replace": "make anew", "delete": "remove"}
_STOPPED_FOR: Final = frozenset({"machine_type", "service_account", "shielded_instance_config"})
_HOLDING: Final = frozenset({"google_filestore_instance", "google_compute_disk"})  # users' files
_UNTOLD: Final = frozenset(
    {"effective_labels", "terraform_labels"}  # labels, said once
    | {"desired_status", "current_status"}  # "it is off"
)


def host_changes(
    plan: Plan, price: Callable[[Mapping[str, Any]], float | None] = lambda _: None
) -> tuple[HostChange, ...]:
    """What becomes of each host, in the order of their names; ``price`` takes an instance's attributes."""
    shapes = {change.address: change for change in plan.changes}
    instances = [change for change in plan.changes if change.type == INSTANCE]
    changes = (_host(change, shapes, price) for change in instances)
    return tuple(sorted(changes, key=lambda change: change.name))


def other_changes(plan: Plan) -> tuple[str, ...]:
    """What is done to all else, in few words: `make a network, 2 service accounts`."""
    lines = []
    for action, verb in _VERBS.items():
        found = Counter(
            word
            for change in plan.real_changes
            if change.action == action and change.type != INSTANCE and (word := word_for(change.type))
        )
        if found:
            lines.append(f"{verb} {', '.join(_counted(word, count) for word, count in found.items())}")
    return tuple(lines)


def lost(plan: Plan) -> tuple[str, ...]:
    """What holds files, is no host, and goes or is made anew: `a Filestore instance (demo-shared)`."""
    gone = (c for c in plan.changes if c.type in _HOLDING and c.action in ("delete", "replace"))
    return tuple(f"{word_for(change.type)} ({(change.before or {}).get('name')})" for change in gone)


def names(place: Place) -> Callable[[Resource], str]:
    """For ``Terraform(names=…)``: a host by its name, what is of one after it; some things not at all."""

    def name(resource: Resource) -> str:
        host = place.host_of(resource.address)
        if resource.type == INSTANCE and host:
            return host
        word = word_for(resource.type)
        of = host or (resource.key if isinstance(resource.key, str) else "")
        return f"{word} ({of})" if word and of else word

    return name


@cache
def _words() -> Mapping[str, str]:
    words: Mapping[str, str] = YAML(typ="safe").load(_WORDS)
    return words


def word_for(kind: str) -> str:
    """What a person calls a type of resource."""
    return _words().get(kind, kind.removeprefix("google_").replace("_", " "))


def _host(
    change: ResourceChange,
    by_address: Mapping[str, ResourceChange],
    price: Callable[[Mapping[str, Any]], float | None],
) -> HostChange:
    there = change.after or change.before or {}
    why = _why(change, by_address.get(change.address.replace(f"{INSTANCE}.host", _SHAPE)))
    off = change.action == "update" and (change.before or {}).get("current_status") in OFF
    was = price(change.before) if change.before else None
    cost = price({**there, "current_status": "RUNNING"}) if change.after else was
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
    machine = gcp.machine(words[0])
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
    """What makes it change, in words."""
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


def _counted(word: str, count: int) -> str:
    """`2 service accounts`."""
    if count == 1:
        return word
    noun = word.removeprefix("an ").removeprefix("a ")
    head, of, tail = noun.partition(" of ")
    return f"{count} {_plural(head)}{of}{tail}"


def _plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("cy") else f"{noun}es" if noun.endswith("ss") else f"{noun}s"
