"""A cluster's resources on Google Cloud, found by their labels through the API, without Terraform's
state.

Resources that can't carry labels have them as text in their description, and a name that begins
with `<cluster>-<id>`. All other resources are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from clusterctl.errors import ApiOffError, CloudError, Failure, ProvisionError
from clusterctl.providers.base import Leftover
from clusterctl.providers.gcp import costs
from clusterctl.providers.gcp.api import Api, Json

CLUSTER_LABEL: Final = "clusterctl-cluster"
ID_LABEL: Final = "clusterctl-id"
_TERRAFORM_LABELS: Final = ("effective_labels", "terraform_labels")
_WORDS = re.compile(rf"\b({CLUSTER_LABEL}|{ID_LABEL})=([a-z0-9-]+)")


def read_labels(resource: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of a REST resource, or else the labels that the resource's description
    contains.
    """
    return resource.get("labels") or dict(_WORDS.findall(resource.get("description") or ""))


def cluster_id_of(resource: Mapping[str, Any]) -> str | None:
    """Return the cluster id in the labels or description of a Terraform resource, if any."""
    for labels in [*(resource.get(name) for name in _TERRAFORM_LABELS), read_labels(resource)]:
        if labels and ID_LABEL in labels:
            return str(labels[ID_LABEL])
    return None


WAIT_S = 600.0
_ID = "[0-9a-f]{6}"
_CLUSTER = "[a-z][a-z0-9-]*"
_ROWS = {"file": "instances", "iam": "accounts"}
_PLACE = re.compile(r"/(?:zones|regions|locations)/([^/]+)/")


@dataclass(frozen=True, slots=True)
class CloudResource:
    """A resource of a cluster. ``usd_per_hour``: its cost. None: unknown.

    path: its REST path. kept: the reason why `down` does not delete the resource. Empty: `down`
        deletes it.
    """

    kind: str
    name: str
    where: str
    service: str
    path: str
    cluster_id: str
    usd_per_hour: float | None = 0.0
    kept: str = ""

    @property
    def what(self) -> str:
        """The resource's kind, name and location: `instance demo-train-1 in us-central1-a`."""
        return f"{self.kind} {self.name}" + (f" in {self.where}" if self.where else "")

    @property
    def leftover(self) -> Leftover:
        return Leftover(self.what, self.usd_per_hour)


@dataclass(frozen=True, slots=True)
class SearchArea:
    """Where a cluster's resources may be.

    region: the only region. Empty: any.
    host_project: the host project of its Shared VPC, which has its firewall rules. Empty: none.
    """

    region: str = ""
    host_project: str = ""


ANYWHERE: Final = SearchArea()


@dataclass(frozen=True, slots=True)
class _LabelQuery:
    """A search by label. ``value``: None finds any. ``name``: a regular expression for names of
    resources that can't carry labels.
    """

    label: str
    value: str | None
    name: str
    area: SearchArea = ANYWHERE

    def is_on(self, resource: Json) -> bool:
        labels = read_labels(resource)
        return self.label in labels and self.value in (None, labels[self.label])

    @property
    def filter(self) -> str:
        return f"labels.{self.label}" + (":*" if self.value is None else f'="{self.value}"')


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of resource, and the API and path that list it.

    named: recognise such resources by their names, because they can't carry labels.
    in_host_project: they are in the network's project, also if that is another project.
    """

    word: str
    service: str
    path: str
    named: bool = False
    in_host_project: bool = False


# In the order in which resources can be deleted.
_KINDS: Final = (
    _Kind("instance", "compute", "aggregated/instances"),
    _Kind("disk", "compute", "aggregated/disks"),
    _Kind("shared folder", "file", "locations/-/instances"),
    _Kind("address", "compute", "aggregated/addresses"),
    _Kind("placement policy", "compute", "aggregated/resourcePolicies", named=True),
    _Kind("firewall rule", "compute", "global/firewalls", named=True, in_host_project=True),
    _Kind("router", "compute", "aggregated/routers", named=True),
    _Kind("subnetwork", "compute", "aggregated/subnetworks", named=True),
    _Kind("network", "compute", "global/networks", named=True),
    _Kind("service account", "iam", "serviceAccounts"),
    _Kind("bucket", "storage", "b"),
)


def _query_for(cluster_id: str, area: SearchArea = ANYWHERE) -> _LabelQuery:
    return _LabelQuery(ID_LABEL, cluster_id, f"{_CLUSTER}-{cluster_id}(-.*)?", area)


def find_resources(
    api: Api, cluster_id: str, area: SearchArea = ANYWHERE
) -> tuple[CloudResource, ...]:
    """Return all resources of a cluster, in the order in which they can be deleted. Ignore zones
    and regions outside ``area`` that do not answer.
    """
    return tuple(_search(api, _query_for(cluster_id, area)))


def find_labelled(
    api: Api, label: str, value: str | None, kinds: Collection[str], area: SearchArea = ANYWHERE
) -> Iterator[tuple[str, str, Json]]:
    """Yield (kind, path, REST resource) of each resource of these kinds with this label and value.

    value: None finds any.
    """
    query = _LabelQuery(label, value, "", area)
    for kind in (candidate for candidate in _KINDS if candidate.word in kinds):
        rows = ((f"{folder}{row['name']}", row) for folder, row in _rows(api, kind, query))
        yield from ((kind.word, path, row) for path, row in rows if query.is_on(row))


def has_running_instance(api: Api, cluster_id: str) -> bool:
    query = _query_for(cluster_id)
    rows = (row for _, row in _rows(api, _KINDS[0], query) if query.is_on(row))
    return any(row["status"] not in costs.OFF for row in rows)


def orphan_ids(api: Api, cluster: str) -> tuple[str, ...]:
    """Return the ids of all clusters called ``cluster`` in the project, including those of other
    users.
    """
    resources = _search(api, _LabelQuery(CLUSTER_LABEL, cluster, f"{cluster}-{_ID}(-.*)?"))
    return tuple(sorted({resource.cluster_id for resource in resources if resource.cluster_id}))


def remove_resources(
    api: Api, resources: Iterable[CloudResource], *, timeout_s: float = WAIT_S
) -> None:
    """Delete the resources that `down` does not keep. Raise a ProvisionError that lists all
    failures.
    """
    to_delete = [resource for resource in resources if not resource.kept]
    failures: list[Failure] = []
    for kind in _KINDS:
        if batch := [resource for resource in to_delete if resource.kind == kind.word]:
            api.reporter.progress(f"deleting {len(batch)} x {kind.word}")
            failures += _delete(api, batch, timeout_s)
    if failures:
        raise ProvisionError(
            f"{len(failures)} of {len(to_delete)} resources of the cluster could not be deleted",
            code="leftovers",
            about="orphans",
            why="; ".join(failure.cause for failure in failures),
            fix=failures[0].fix or "run `clusterctl down` again",
            failures=tuple(failures),
        )


def _delete(api: Api, batch: Iterable[CloudResource], timeout_s: float) -> Iterator[Failure]:
    """Start the deletion of all resources, and wait for the end of all deletions. Yield the
    failures.
    """
    operations: list[tuple[CloudResource, Json]] = []
    deadline = api.clock.now() + timeout_s
    for resource in batch:
        try:
            operations.append((resource, api.delete(resource.service, resource.path) or {}))
        except CloudError as exc:
            yield _failure(resource, exc)
    for resource, operation in operations:
        try:
            remaining_s = max(0.0, deadline - api.clock.now())
            api.finish(
                resource.service, resource.path.rsplit("/", 2)[0], operation, timeout_s=remaining_s
            )
        except CloudError as exc:
            yield _failure(resource, exc)


def _failure(resource: CloudResource, exc: CloudError) -> Failure:
    return Failure(
        exc.failures[0].code,
        f"{resource.leftover}: {exc.why}",
        fix=exc.fix,
        retryable=True,
        about=exc.failures[0].about,
    )


def _search(api: Api, query: _LabelQuery) -> list[CloudResource]:
    by_kind = (_resources_of_kind(api, kind, query) for kind in _KINDS)
    return [r for resources in by_kind for r in sorted(resources, key=lambda r: r.name)]


def _resources_of_kind(api: Api, kind: _Kind, query: _LabelQuery) -> Iterator[CloudResource]:
    for folder, row in _rows(api, kind, query):
        # Google may interpret the filter differently. Without this check, another user's disk may
        # be deleted.
        if not query.is_on(row) or (kind.named and not re.fullmatch(query.name, row["name"])):
            continue
        path = f"{folder}{row['name']}"
        is_bucket = kind.service == "storage"
        has_objects = is_bucket and api.get("storage", f"{path}/o", maxResults="1").get("items")
        yield CloudResource(
            kind=kind.word,
            name=path.rpartition("/")[2].partition("@")[0],
            where=zone[1] if (zone := _PLACE.search(path)) else "",
            service=kind.service,
            path=path,
            cluster_id=read_labels(row).get(ID_LABEL, ""),
            usd_per_hour=costs.of_row(kind.word, row),
            kept="it contains objects" if has_objects else "",
        )


def _rows(api: Api, kind: _Kind, query: _LabelQuery) -> Iterator[tuple[str, Json]]:
    host_project = query.area.host_project if kind.in_host_project else ""
    project = f"projects/{host_project or api.project}"
    collection = kind.path.rpartition("/")[2]
    try:
        if kind.service == "storage":
            pages = api.pages("storage", kind.path, project=api.project)
            yield from (("b/", row) for page in pages for row in page.get("items", ()))
        elif kind.service != "compute":
            # In these APIs, the name of a resource is its path.
            path = f"{project}/{kind.path}"
            pages = api.pages(kind.service, path, region=query.area.region)
            key = _ROWS[kind.service]
            yield from (("", row) for page in pages for row in page.get(key, ()))
        else:
            search = {} if kind.named else {"filter": query.filter}
            path = f"{project}/{kind.path}"
            for page in api.pages("compute", path, region=query.area.region, **search):
                items: Any = page.get("items", ())
                scopes = items if isinstance(items, dict) else {"global": {collection: items}}
                for scope, collections in scopes.items():
                    yield from (
                        (f"{project}/{scope}/{collection}/", row)
                        for row in collections.get(collection, ())
                    )
    except ApiOffError:
        # If the API is disabled only in the quota project, this project may have resources.
        if not api.is_off(kind.service):
            raise
