"""Google's rules for resources: ids, computed attributes, changes that need a new resource, users."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from tf.types import Unknown

from tests.support.google.provider.schema import Trail

COMPUTE = "https://www.googleapis.com/compute/v1/"

KNOWN: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("google.toml").read_text()
)


def id_of(kind: str, value: Mapping[str, Any]) -> str:
    """The id that Google's provider gives the resource."""
    return str(KNOWN["ids"][kind]).format_map({k: v for k, v in value.items() if v is not None})


def import_id_of(kind: str, value: Mapping[str, Any]) -> str:
    """The id by which an import finds the resource."""
    template = KNOWN["imported_by"].get(kind)
    return str(template.format_map(value) if template else value["id"])


def name_of(kind: str, value: Mapping[str, Any]) -> str:
    """What a person would call it."""
    for key in ("name", "account_id", "service", "role"):
        if value.get(key):
            return str(value[key])
    return kind


def forces_new(kind: str, trail: Trail) -> bool:
    """Whether Google can't change this in place."""
    return _name(trail) in KNOWN["forces_new"].get(kind, {}) or kind.endswith("_iam_member")


def needs_a_stop(kind: str, trail: Trail) -> bool:
    """Whether an instance must be stopped for this change."""
    return _under(trail, KNOWN["stops"].get(kind, []))


def _under(trail: Trail, names: Sequence[str]) -> bool:
    words = _name(trail).split(".")
    return any(".".join(words[:length]) in names for length in range(1, len(words) + 1))


def _name(trail: Trail) -> str:
    return ".".join(step for step in trail if isinstance(step, str))


def user_of(world: Mapping[str, Any], kind: str, value: Mapping[str, Any]) -> str | None:
    """The id of something that the resource is still used by."""
    names = {f'"{name}"' for name in (value["id"], value.get("self_link"), COMPUTE + value["id"])}
    for other in KNOWN["used_by"].get(kind, []):
        for identifier, attributes in world["resources"].get(other, {}).items():
            text = json.dumps(attributes)
            if any(name in text for name in names):
                return str(identifier)
    return None


def delete(world: Mapping[str, Any], kind: str, identifier: str) -> None:
    """Remove a resource, and what can't be without it. A disk is first detached, as by Google's
    provider.
    """
    world["resources"].get(kind, {}).pop(identifier, None)
    if kind == "google_compute_disk":
        for each in world["resources"].get("google_compute_instance", {}).values():
            disks = each.get("attached_disk") or ()
            each["attached_disk"] = [
                disk for disk in disks if disk["source"] not in {identifier, COMPUTE + identifier}
            ]
    for other in KNOWN["takes_along"].get(kind, []):
        there = world["resources"].get(other, {})
        parts = [
            k for k, row in there.items() if import_id_of(other, row).startswith(f"{identifier}/")
        ]
        for each in parts:
            del there[each]


def computer(
    world: dict[str, Any], kind: str, value: Mapping[str, Any]
) -> Callable[[str, Any], Any]:
    """What gives the unknown attributes of a new resource their values."""
    number = world["next"]
    world["next"] = number + 1
    made = _known(world, kind, value, number)

    def compute(words: str, of_type: Any) -> Any:
        if words in made:
            return made[words]
        if of_type == "string":
            return _text(words, kind, value)
        if of_type == "number":
            return number
        if of_type == "bool":
            return False
        return {} if of_type[0] == "map" else []

    return compute


def shown(kind: str, made: dict[str, Any]) -> dict[str, Any]:
    """What Google shows of what was made so: links in full, and what it filled in."""
    if brings := KNOWN["brings"].get(made.get("machine_type", "")):
        gpu = {"type": brings["gpu"], "count": brings["count"]}
        made["guest_accelerator"] = made["guest_accelerator"] or [gpu]
        disk = {"device_name": "", "interface": "NVME", "size": 375}
        made["scratch_disk"] = made["scratch_disk"] or [disk] * brings.get("ssds", 0)
    if kind == "google_compute_instance" and not made["reservation_affinity"]:
        made["reservation_affinity"] = [{"type": "ANY_RESERVATION", "specific_reservation": []}]
    zone = f"projects/{made.get('project')}/zones/{made.get('zone')}"
    for words, how in KNOWN["shown"].get(kind, {}).items():
        made = at(made, words.split("."), partial(_as_shown, how, zone))
    return made


def read(kind: str, there: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What Google's provider makes of what Google shows: some of it is as the state has it."""
    found = {**there, **{name: state[name] for name in KNOWN["unread"].get(kind, ())}}
    if kind == "google_compute_instance":  # its status is read if one is desired
        found["desired_status"] = state["desired_status"] and there["current_status"]
    return found


def imported(kind: str, there: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an import knows: nothing of what only the configuration says."""
    return read(kind, there, {**dict.fromkeys(there), "id": there["id"]})


def at(value: Any, words: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """The value with what is below these names changed."""
    if isinstance(value, list):
        return [at(each, words, change) for each in value]
    if not words:
        return change(value)
    if isinstance(value, Mapping) and words[0] in value:
        return {**value, words[0]: at(value[words[0]], words[1:], change)}
    return value


def _as_shown(how: str, zone: str, text: Any) -> Any:
    if not isinstance(text, str):
        return text
    if how == "upper":
        return text.upper()
    path = text if "/" in text else f"{zone}/acceleratorTypes/{text}"
    return COMPUTE + re.sub(
        r"/images/family/(.*)", r"/images/\1-v20261101", path.removeprefix(COMPUTE)
    )


def with_defaults(kind: str, proposed: Any) -> Any:
    """What is asked for, with the defaults of the provider's schema."""
    for words, default in KNOWN["default"].get(kind, {}).items():
        proposed = at(proposed, words.split("."), partial(_or, default))
    return proposed


def _or(default: Any, value: Any) -> Any:
    return default if value is None else value


def kept(kind: str, planned: dict[str, Any], prior: Mapping[str, Any]) -> dict[str, Any]:
    """What is planned, with what Google's provider takes for the same as it is left as it is."""
    for name in KNOWN["filled_in"].get(kind, ()):
        planned[name] = planned[name] or prior[name]
    for words in KNOWN["same"].get(kind, ()):
        planned = _same(planned, prior, words.split("."))
    return planned


def foreseen(kind: str, planned: dict[str, Any], prior: Mapping[str, Any]) -> dict[str, Any]:
    """What is planned, with what Google's provider knows before it asks Google.

    Seen of the provider, version 8, on 2026-11-29: the address of a service account, and labels that
    services of Google add to a resource, which it leaves.
    """
    if kind == "google_service_account" and not prior:
        email = f"{planned['account_id']}@{planned['project']}.iam.gserviceaccount.com"
        return planned | {"email": email, "member": f"serviceAccount:{email}"}
    labels = planned.get("effective_labels")
    if isinstance(labels, dict):
        of_google = {
            key: value
            for key, value in (prior.get("effective_labels") or {}).items()
            if key.startswith("goog-")
        }
        return planned | {"effective_labels": of_google | labels}
    return planned


def _same(new: Any, old: Any, words: Sequence[str]) -> Any:
    if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        return [_same(*pair, words) for pair in zip(new, old, strict=True)]
    if isinstance(new, dict) and isinstance(old, Mapping) and words:
        return new | {words[0]: _same(new.get(words[0]), old.get(words[0]), words[1:])}
    both = isinstance(new, str) and isinstance(old, str) and not words
    return old if both and _plain(new) == _plain(old) else new


def _plain(text: str) -> str:
    """The image of a family is the newest one of it: DiskImageDiffSuppress."""
    name = text.rpartition("/")[2].lower()
    return re.sub(r"-v\d{8}$", "", name)


def refused_by_validate(kind: str, config: Mapping[str, Any]) -> Iterator[str]:
    """What the provider's Validate does not take of a configuration, as far as it is known.

    The rules are those of terraform-plugin-sdk v2 (helper/validation, and helper/schema/schema.go)
    and of the provider's verify/validation.go, not their words. What is unknown yet is taken.
    """
    for rule, takes in _TAKES.items():
        for words, right in KNOWN[rule].get(kind, {}).items():
            given: list[Any] = []
            at(config, words.split("."), given.append)
            known = (each for each in given if isinstance(each, str | int | float))
            yield from (
                f"{words}: {each} is no `{rule}`" for each in known if not takes(each, right)
            )
    for names in KNOWN["exactly_one"].get(kind, ()):
        there = [name for name in names if config[name] not in (None, [])]
        if len(there) != 1 and Unknown not in (config[name] for name in names):
            yield f"exactly one of {', '.join(names)} is to be said"
    for name, others in KNOWN["conflicts"].get(kind, {}).items():
        yield from (
            f"{name} conflicts with {other}" for other in others if config[name] and config[other]
        )


def _is_cidr(given: str) -> bool:
    with suppress(ValueError):
        return "/" in given and bool(ip_network(given, strict=False))
    return False


_TAKES: Mapping[str, Callable[[Any, Any], bool]] = {
    "one_of": lambda given, right: given in right,
    "pattern": lambda given, right: bool(re.fullmatch(right, given)),
    "range": lambda given, right: right[0] <= given and (len(right) == 1 or given <= right[1]),
    "cidr": lambda given, _: _is_cidr(given),
}


def _known(
    world: Mapping[str, Any], kind: str, value: Mapping[str, Any], number: int
) -> dict[str, Any]:
    """The attributes that something else goes by."""
    name = name_of(kind, value)
    identifier = id_of(kind, value)
    known: dict[str, Any] = {"id": identifier, "self_link": COMPUTE + identifier}
    match kind:
        case "google_compute_instance":
            zone = f"{COMPUTE}projects/{value['project']}/zones/{value['zone']}"
            return known | {
                "network_interface.network_ip": world["addresses"].get(name)
                or _next_address(world, value),
                "network_interface.name": "nic0",
                "current_status": value["desired_status"] or "RUNNING",
                "instance_id": str(4_000_000_000_000_000_000 + number),
                "boot_disk.source": f"{zone}/disks/{name}",
                "boot_disk.device_name": "persistent-disk-0",
            }
        case "google_filestore_instance":
            # Google's range is not read: flattenFilestoreInstanceNetworksReservedIpRange of
            # filestore/resource_filestore_instance.go at e03b7622, line 1478;
            # github.com/hashicorp/terraform-provider-google/issues/15984 (2023-09-25).
            address = world["addresses"].get(name) or "10.81.0.2"
            return known | {
                "networks.ip_addresses": [address],
                "networks.reserved_ip_range": "",
            }
        case "google_service_account":
            email = f"{value['account_id']}@{value['project']}.iam.gserviceaccount.com"
            return known | {"email": email, "member": f"serviceAccount:{email}", "name": identifier}
        case "google_storage_bucket":
            return known | {
                "url": f"gs://{name}",
                "self_link": f"https://www.googleapis.com/storage/v1/b/{name}",
            }
        case "google_compute_subnetwork":
            return known | {"gateway_address": str(ip_network(value["ip_cidr_range"])[1])}
    return known


def _next_address(world: Mapping[str, Any], value: Mapping[str, Any]) -> str:
    """An address of the instance's subnetwork that no instance had before."""
    name = value["network_interface"][0]["subnetwork"]
    there = world["resources"].get("google_compute_subnetwork", {}).values()
    named = (each for each in there if name in {each["id"], each["self_link"], each["name"]})
    network = ip_network(next(named, {"ip_cidr_range": "10.128.0.0/20"})["ip_cidr_range"])
    return str(network[2 + world["next"] % (network.num_addresses - 4)])


def _text(words: str, kind: str, value: Mapping[str, Any]) -> str:
    if words.endswith(("fingerprint", "etag")):
        return hashlib.sha256(f"{id_of(kind, value)} {words}".encode()).hexdigest()[:12] + "="
    if words.endswith(("timestamp", "create_time", "time_created", "updated")):
        return datetime.now(UTC).isoformat(timespec="milliseconds")
    return ""
