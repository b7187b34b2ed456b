"""The answers of the double of Google's API, from the cloud's JSON file: lists in pages, operations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.google.provider import world
from tests.support.google.refusals import NUMBER, REFUSALS

if TYPE_CHECKING:
    from tests.support.google.api import Google

LINK = "https://www.googleapis.com/compute/v1/"
PAGE = 2
WAITED_S = 120.0  # then a wait ends, and the operation "might be `DONE` or still in progress": its document
HOST_KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIKeyOfTheDouble"
Row = dict[str, Any]
# Gets the values in the path, and the query.
Handler = Callable[["Google", Mapping[str, str], Mapping[str, str]], Any]
# Collection -> Terraform's type, and the word of its scope.
COMPUTE = {
    "instances": ("google_compute_instance", "zone"),
    "disks": ("google_compute_disk", "zone"),
    "addresses": ("google_compute_address", "region"),
    "firewalls": ("google_compute_firewall", ""),
    "networks": ("google_compute_network", ""),
    "subnetworks": ("google_compute_subnetwork", "region"),
    "routers": ("google_compute_router", "region"),
    "resourcePolicies": ("google_compute_resource_policy", "region"),
    "images": ("google_compute_image", ""),
}
# The parameter that names one resource, where it is not the collection's name without its s.
_PARAMETER = {"addresses": "address", "resourcePolicies": "resourcePolicy"}
_FILTER = re.compile(r"labels\.([a-z0-9_-]+)(?:\s*=\s*|:)(\"?[a-z0-9_-]+\"?|\*)|name eq (\S+)")


class RefusedError(Exception):
    """The request is understood and refused."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass
class Operation:
    """Something that takes time: ``Google.lasts``, or until it is asked for twice, or waited
    for.
    """

    name: str
    effect: Callable[[], None]
    error: Mapping[str, str] | None = None
    begun: float = 0
    asked: int = 0


def answer(
    google: Google,
    method: str,
    values: Mapping[str, str],
    query: Mapping[str, str],
    body: Any = None,
) -> Any:
    """The JSON that a well-formed request gets.

    Raises:
        RefusedError: not found, or in use.
    """
    said = _answer(google, method, values, query, body)
    service, *_, verb = method.split(".")
    if service in google.silent and verb in _WITH_UNREACHABLE.get(service, ()):
        key = "unreachable" if service == "file" else "unreachables"
        said = said | {key: [google.silent[service]]}
    return said


# The lists that say which places did not answer. Source: Google's discovery documents compute.v1 and
# file.v1 of 2026-11-06.
_WITH_UNREACHABLE = {"compute": ("aggregatedList",), "file": ("list",)}


def _answer(
    google: Google,
    method: str,
    values: Mapping[str, str],
    query: Mapping[str, str],
    body: Any = None,
) -> Any:
    service, *_, collection, verb = method.split(".")
    if collection.endswith("perations"):
        return _operation(google, service, list(values.values())[-1], waited=verb == "wait")
    if method == "compute.images.insert":
        return _new_image(google, query, body)
    if service == "compute":
        return _compute(google, collection, verb, values, query)
    return _OTHERS[method](google, values, query)


def _compute(
    google: Google, collection: str, verb: str, values: Mapping[str, str], query: Mapping[str, str]
) -> Any:
    kind, scope = COMPUTE[collection]
    if verb in {"list", "aggregatedList"}:
        here = [row for row in _rows(google, kind) if _is_in(row, values["project"])]
        rows, token = _page([_shown(google, collection, row) for row in here], query)
        if verb == "list":
            return {"items": rows, "kind": f"compute#{collection}List"} | token
        items: dict[str, Any] = {"zones/empty-a": {"warning": {"code": "NO_RESULTS_ON_PAGE"}}}
        for row in rows:
            where = row[scope].split("/projects/")[1].split("/", 1)[1]
            items.setdefault(where, {}).setdefault(collection, []).append(row)
        return {"items": items} | token
    key = values[_PARAMETER.get(collection, collection[:-1])]
    row = _row(google, kind, key, scope and values[scope])
    match verb:
        case "get":
            return _shown(google, collection, row)
        case "getGuestAttributes":
            return _guest_attributes(google, row, query)
        case "delete":
            if users := _users(google, kind, row):
                what = f"The {kind.rpartition('_')[2]} resource '{row['id']}'"
                result = f"{what} is already being used by '{users[0][1]}'"
                raise RefusedError(400, result, "resourceInUseByAnotherResource")
            return _begin(google, lambda: _remove(google, kind, row["id"]), row)
        case "stop":
            if row.get("scratch_disk") and "discardLocalSsd" not in query:
                raise RefusedError(400, REFUSALS["local_ssd_stop"].message, "badRequest")
            return _begin(google, lambda: _stop(google, row["id"]), row)
    raise RefusedError(501, f"the double has no {verb}")


def _stop(google: Google, path: str) -> None:
    for name in ("desired_status", "current_status"):
        _set(google, "google_compute_instance", path, name, "TERMINATED")


def _new_image(google: Google, query: Mapping[str, str], body: Any) -> Row:
    """An image of an instance's boot disk, PENDING until its operation is done.

    Refused: a name that is there (409); a disk of a running instance, unless forced, as "Create
    custom images" of Compute Engine's documentation has it (its words:
    github.com/ansible/ansible/issues/61634).
    """
    project = google.id
    name = body["name"]
    disk = body["sourceDisk"].rpartition("/")[2]
    path = f"projects/{project}/global/images/{name}"
    there = google.world.read()["resources"]
    if path in there.get("google_compute_image", {}):
        raise RefusedError(409, f"The resource '{path}' already exists", "alreadyExists")
    instance = next(
        (r for r in there.get("google_compute_instance", {}).values() if r["name"] == disk), None
    )
    if instance is None:
        raise RefusedError(404, f"The resource '{body['sourceDisk']}' was not found", "notFound")
    if instance["current_status"] != "TERMINATED" and query.get("forceCreate") != "true":
        result = (
            f"The disk resource '{body['sourceDisk']}' is already being used by '{instance['id']}'"
        )
        raise RefusedError(400, result, "resourceInUseByAnotherResource")
    size = str(instance["boot_disk"][0]["initialize_params"][0]["size"])
    facts = {
        "labels": body.get("labels", {}),
        "family": body.get("family"),
        "size": size,
        "made_of": disk,
    }
    google.world.put("google_compute_image", path, status="PENDING", project=project, **facts)
    row = _row(google, "google_compute_image", name)
    return _begin(
        google, lambda: _set(google, "google_compute_image", path, "status", "READY"), row
    )


def _shown(google: Google, collection: str, row: Row) -> Row:
    """A resource as it is shown; a disk with the instances that it is attached to, a router with
    its NATs.
    """
    result = _shape(collection, row)
    if collection == "routers":
        nats = _rows(google, "google_compute_router_nat")
        result["nats"] = [{"name": nat["name"]} for nat in nats if nat["router"] == row["name"]]
    if collection == "disks":
        users = _users(google, "google_compute_disk", row)
        result["users"] = [f"{LINK}{path}" for kind, path in users if kind.endswith("instance")]
    return result


def _shape(collection: str, row: Row) -> Row:
    """A resource of Terraform's as the REST API has it."""
    project = row.get("project") or "demo-project"
    base = f"{LINK}projects/{project}"
    result: Row = {
        "name": row["name"],
        "creationTimestamp": "2026-11-01T10:00:00.000-07:00",
        "description": row.get("description") or "",
    }
    for scope in ("zone", "region"):
        if row.get(scope):
            result[scope] = f"{base}/{scope}s/{row[scope].rpartition('/')[2]}"
    if collection in {"instances", "disks", "addresses", "images"}:
        result["labels"] = _labels(row)
    if row.get("network"):
        result["network"] = f"{base}/global/networks/{row['network'].rpartition('/')[2]}"
    if row.get("ip_cidr_range"):
        result["ipCidrRange"] = row["ip_cidr_range"]
    match collection:
        case "instances":
            result |= _instance(row, result["zone"])
        case "images":
            sizes = {"archiveSizeBytes": str(2 << 30), "diskSizeGb": row["size"]}
            result |= {"status": row["status"], "family": row["family"], **sizes}
        case "disks":
            of_type = f"{result['zone']}/diskTypes/{row.get('type', 'pd-standard')}"
            result |= {"sizeGb": str(row.get("size", 10)), "type": of_type}
    return result


def _instance(row: Row, zone: str) -> Row:
    scheduling = (row.get("scheduling") or [{}])[0]
    return {
        "status": row.get("desired_status") or "RUNNING",
        "machineType": f"{zone}/machineTypes/{row.get('machine_type', 'e2-standard-4')}",
        "scheduling": {"provisioningModel": scheduling.get("provisioning_model") or "STANDARD"},
        "guestAccelerators": [
            {
                "acceleratorType": f"{zone}/acceleratorTypes/{gpu['type'].rpartition('/')[2]}",
                "acceleratorCount": gpu["count"],
            }
            for gpu in row.get("guest_accelerator") or ()
        ],
    }


def _guest_attributes(google: Google, row: Row, query: Mapping[str, str]) -> Row:
    """The host keys that an instance has published."""
    keys = (
        google.world.read().get("guest_attributes", {}).get(row["name"], {"ssh-ed25519": HOST_KEY})
    )
    path = query.get("queryPath", "")
    entries = [{"namespace": "hostkeys", "key": kind, "value": key} for kind, key in keys.items()]
    found = [e for e in entries if f"hostkeys/{e['key']}".startswith(path)]
    if not found:
        raise RefusedError(
            404, f"The resource '{path}' of type 'Guest Attribute' was not found.", "notFound"
        )
    return {"kind": "compute#guestAttributes", "queryPath": path, "queryValue": {"items": found}}


def _list(key: str, kind: str, shown: Callable[[Row, str], Row]) -> Handler:
    """What lists the resources of a type: ``shown`` gets each, and the project that is asked
    about.
    """

    def answer(google: Google, values: Mapping[str, str], query: Mapping[str, str]) -> Row:
        found, token = _page(
            [shown(row, values.get("projectsId", "")) for row in _rows(google, kind)], query
        )
        return {key: found} | token

    return answer


def _filestore(row: Row, project: str) -> Row:
    return {
        "name": f"projects/{project}/locations/{row['location']}/instances/{row['name']}",
        "labels": _labels(row),
        "tier": row.get("tier", "BASIC_HDD"),
        "fileShares": [
            {"name": share.get("name", "share"), "capacityGb": str(share["capacity_gb"])}
            for share in row["file_shares"]
        ],
        "networks": [
            {"ipAddresses": network.get("ip_addresses") or []}
            for network in row.get("networks") or ()
        ],
    }


def _account_shown(row: Row, project: str) -> Row:
    return {
        "name": f"projects/{project}/serviceAccounts/{row['email']}",
        "email": row["email"],
        "description": row.get("description") or "",
    }


def _bucket(row: Row, _: str) -> Row:
    return {"kind": "storage#bucket", "name": row["name"], "labels": _labels(row)}


def _labels(row: Row) -> Row:
    return row.get("effective_labels") or row.get("labels") or {}


def _objects(google: Google, values: Mapping[str, str], query: Mapping[str, str]) -> Row:
    holds = values["bucket"] in google.world.read()["filled"]
    return {"kind": "storage#objects", "items": [{"name": "runs/1/run.json"}] if holds else []}


def _delete_plain(kind: str, parameter: str) -> Handler:
    def delete(google: Google, values: Mapping[str, str], query: Mapping[str, str]) -> Any:
        row = _row(google, kind, values[parameter])
        if row["name"] in google.world.read()["filled"]:
            # Source: github.com/crossplane-contrib/provider-gcp/issues/295 (2021-01-05).
            raise RefusedError(409, "The bucket you tried to delete was not empty.", "conflict")
        if kind == "google_filestore_instance":
            return _begin(google, lambda: _remove(google, kind, row["id"]), row)
        _remove(google, kind, row["id"])
        return {}

    return delete


def _service(google: Google, values: Mapping[str, str], query: Mapping[str, str]) -> Row:
    name = values["servicesId"]
    state = "DISABLED" if name.partition(".")[0] in google.off else "ENABLED"
    return {
        "name": f"projects/{NUMBER}/services/{name}",
        "parent": f"projects/{NUMBER}",
        "state": state,
    }


_OTHERS: dict[str, Handler] = {
    "file.projects.locations.instances.list": _list(
        "instances", "google_filestore_instance", _filestore
    ),
    "file.projects.locations.instances.delete": _delete_plain(
        "google_filestore_instance", "instancesId"
    ),
    "iam.projects.serviceAccounts.list": _list(
        "accounts", "google_service_account", _account_shown
    ),
    "iam.projects.serviceAccounts.delete": _delete_plain(
        "google_service_account", "serviceAccountsId"
    ),
    "storage.buckets.list": _list("items", "google_storage_bucket", _bucket),
    "storage.buckets.delete": _delete_plain("google_storage_bucket", "bucket"),
    "storage.objects.list": _objects,
    "serviceusage.services.get": _service,
}


def _begin(google: Google, effect: Callable[[], None], row: Row) -> Row:
    name = f"operation-{len(google.operations) + 1}"
    error = google.failing.pop(0) if google.failing else None
    google.operations[name] = Operation(name, effect, error, google.clock.now())
    if "/locations/" in row["id"]:  # Filestore's kind of operation
        return {
            "name": f"projects/demo-project/locations/{row['location']}/operations/{name}",
            "done": False,
        }
    return _told(google.operations[name], "RUNNING")


def _operation(google: Google, service: str, name: str, *, waited: bool) -> Row:
    operation = google.operations.get(name)
    if operation is None:
        raise RefusedError(404, f"no operation {name}", "notFound")
    operation.asked += 1
    done = _is_done(google, operation, waited=waited)
    if done and not operation.error:
        operation.effect()
    if service == "file":
        error = operation.error or {}
        ended = {"error": {**error, "code": int(error["code"])}} if done and error else {}
        return {"name": name, "done": done, **ended}
    return _told(operation, "DONE" if done else "RUNNING")


def _is_done(google: Google, operation: Operation, *, waited: bool) -> bool:
    if not google.lasts:
        return waited or operation.asked > 1
    left = operation.begun + google.lasts - google.clock.now()
    if waited and left > 0:
        google.clock.sleep(min(left, WAITED_S))
        left -= WAITED_S
    return left <= 0


def _told(operation: Operation, status: str) -> Row:
    result: Row = {"kind": "compute#operation", "name": operation.name, "status": status}
    if status == "DONE" and operation.error:
        result["error"] = {"errors": [operation.error]}
    return result


def _rows(google: Google, kind: str) -> list[Row]:
    return list(google.world.read()["resources"].get(kind, {}).values())


def _is_in(row: Row, project: str) -> bool:
    """Whether a resource is in this project, by its path; a path may lack it."""
    path = str(row["id"])
    return path.startswith(f"projects/{project}/") or not path.startswith("projects/")


def _row(google: Google, kind: str, name: str, place: str = "") -> Row:
    for row in _rows(google, kind):
        here = str(row.get("zone") or row.get("region") or "").rpartition("/")[2]
        if name in {row["name"], row.get("email")} and place in {"", here}:
            return row
    raise RefusedError(404, f"The resource '{name}' was not found", "notFound")


def _remove(google: Google, kind: str, path: str) -> None:
    with google.world.change() as state:
        world.delete(state, kind, path)


def _set(google: Google, kind: str, path: str, name: str, value: str) -> None:
    with google.world.change() as state:
        state["resources"][kind][path][name] = value


def _users(google: Google, kind: str, row: Row) -> list[tuple[str, str]]:
    """The other compute resources that name this one: their types and paths."""
    mention = re.compile(rf'["/]{re.escape(row["name"])}"')
    everything = google.world.read()["resources"]
    others = (
        (k, r)
        for k, _ in COMPUTE.values()
        for r in everything.get(k, {}).values()
        if (k, r["id"]) != (kind, row["id"])
    )
    return [(k, r["id"]) for k, r in others if mention.search(json.dumps(r))]


def _page(rows: list[Row], query: Mapping[str, str]) -> tuple[list[Row], Row]:
    """The rows that a filter leaves, a page of them, and the token of the next page."""
    rows = [
        row for row in rows if all(_fits(row, *test) for test in _tests(query.get("filter", "")))
    ]
    start = int(query.get("pageToken") or 0)
    more = {"nextPageToken": str(start + PAGE)} if start + PAGE < len(rows) else {}
    return rows[start : start + PAGE], more


def _tests(text: str) -> Iterator[tuple[str, str, str]]:
    for part in filter(None, (p.strip(" ()") for p in re.split(r"\) *\(| AND ", text))):
        match = _FILTER.fullmatch(part)
        if match is None:
            raise RefusedError(400, f"Invalid value for field 'filter': {part!r}", "invalid")
        yield match[1] or "", match[2] or "", (match[3] or "").strip("\"'")


def _fits(row: Row, label: str, value: str, name: str) -> bool:
    """Whether it passes; a word of digits without quotes is a number, which no label's text is."""
    if value.isdigit():
        return False
    value = value.strip('"')
    if value == "*":
        return label in row.get("labels", {})
    return (
        row.get("labels", {}).get(label) == value
        if label
        else re.fullmatch(name, row["name"]) is not None
    )
