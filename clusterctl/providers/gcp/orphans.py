"""The cluster's resources at Google, found through the API itself by labels, not from any state.

What can't carry labels has them as words in its description, and a name that begins with `<cluster>-<id>`.
All else is left alone.
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
_TERRAFORMS: Final = ("effective_labels", "terraform_labels")
_WORDS = re.compile(rf"\b({CLUSTER_LABEL}|{ID_LABEL})=([a-z0-9-]+)")


def read_labels(resource: Mapping[str, Any]) -> dict[str, str]:
    """The labels of a resource of the REST API, or what its description says instead."""
    return resource.get("labels") or dict(_WORDS.findall(resource.get("description") or ""))


def cluster_id_of(resource: Mapping[str, Any]) -> str | None:
    """Whose a resource of Terraform's is, by label or description; None where it bears neither."""
    for found in [*(resource.get(name) for name in _TERRAFORMS), read_labels(resource)]:
        if found and ID_LABEL in found:
            return str(found[ID_LABEL])
    return None


WAIT_S = 600.0
_ID = "[0-9a-f]{6}"
_CLUSTER = "[a-z][a-z0-9-]*"
_ROWS = {"file": "instances", "iam": "accounts"}
_PLACE = re.compile(r"/(?:zones|regions|locations)/([^/]+)/")


@dataclass(frozen=True, slots=True)
class Found:
    """Something of a cluster. ``path`` is its REST path; ``usd_per_hour`` is None where it is not known.

    ``kept`` says why `down` leaves it where it is; "" for what has to go.
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
        """In words: `instance demo-train-1 in us-central1-a`."""
        return f"{self.kind} {self.name}" + (f" in {self.where}" if self.where else "")

    @property
    def priced(self) -> Leftover:
        """What `down` tells of it: with its cost."""
        return Leftover(self.what, self.usd_per_hour)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One label and its value, and how the names of what can't carry it look."""

    label: str
    value: str
    name: str

    def is_on(self, resource: Json) -> bool:
        return read_labels(resource).get(self.label) == self.value


@dataclass(frozen=True, slots=True)
class _Kind:
    """What one list of an API has; what is ``named`` can't carry labels."""

    word: str
    service: str
    path: str
    named: bool = False


_KINDS: Final = (  # in the order in which they can be deleted
    _Kind("instance", "compute", "aggregated/instances"),
    _Kind("disk", "compute", "aggregated/disks"),
    _Kind("shared folder", "file", "locations/-/instances"),
    _Kind("address", "compute", "aggregated/addresses"),
    _Kind("placement policy", "compute", "aggregated/resourcePolicies", named=True),
    _Kind("firewall rule", "compute", "global/firewalls", named=True),
    _Kind("router", "compute", "aggregated/routers", named=True),
    _Kind("subnetwork", "compute", "aggregated/subnetworks", named=True),
    _Kind("network", "compute", "global/networks", named=True),
    _Kind("service account", "iam", "serviceAccounts"),
    _Kind("bucket", "storage", "b"),
)


def _of_cluster(cluster_id: str) -> _Wanted:
    return _Wanted(ID_LABEL, cluster_id, f"{_CLUSTER}-{cluster_id}(-.*)?")


def find_resources(api: Api, cluster_id: str) -> tuple[Found, ...]:
    """Everything of this cluster, in the order in which it can be deleted."""
    return tuple(_look(api, _of_cluster(cluster_id)))


def labelled(api: Api, label: str, value: str, kinds: Collection[str]) -> Iterator[tuple[str, str, Json]]:
    """Whatever of these kinds bears a label: its kind, its path, and the resource."""
    wanted = _Wanted(label, value, "")
    for kind in (one for one in _KINDS if one.word in kinds):
        found = ((f"{folder}{row['name']}", row) for folder, row in _rows(api, kind, wanted))
        yield from ((kind.word, path, row) for path, row in found if wanted.is_on(row))


def any_runs(api: Api, cluster_id: str) -> bool:
    """Whether an instance of this cluster runs, in whichever zone."""
    wanted = _of_cluster(cluster_id)
    rows = (row for _, row in _rows(api, _KINDS[0], wanted) if wanted.is_on(row))
    return any(row["status"] not in costs.OFF for row in rows)


def orphan_ids(api: Api, cluster: str) -> tuple[str, ...]:
    """The ids of all clusters of that name in the project, whoever made them."""
    found = _look(api, _Wanted(CLUSTER_LABEL, cluster, f"{cluster}-{_ID}(-.*)?"))
    return tuple(sorted({one.cluster_id for one in found if one.cluster_id}))


def remove_resources(api: Api, found: Iterable[Found], *, timeout_s: float = WAIT_S) -> None:
    """Delete what was found; what is gone already is fine. One kind after the other, each waited for."""
    going = [one for one in found if not one.kept]
    failures: list[Failure] = []
    for kind in _KINDS:
        if stage := [one for one in going if one.kind == kind.word]:
            api.reporter.progress(f"deleting {len(stage)} x {kind.word}")
            failures += _delete(api, stage, timeout_s)
    if failures:
        what = f"{len(failures)} of {len(going)} things of the cluster could not be deleted"
        why = "; ".join(failure.cause for failure in failures)
        fix = failures[0].fix or "run `clusterctl down` again"
        raise ProvisionError(what, code="orphans-not-deleted", why=why, fix=fix, failures=tuple(failures))


def _delete(api: Api, stage: Iterable[Found], timeout_s: float) -> Iterator[Failure]:
    """Delete things of one kind, all at once, and wait for each."""
    begun: list[tuple[Found, Json]] = []
    until = api.clock.now() + timeout_s
    for one in stage:
        try:
            begun.append((one, api.delete(one.service, one.path) or {}))
        except CloudError as exc:
            yield _failure(one, exc)
    for one, operation in begun:
        try:
            rest_s = max(0.0, until - api.clock.now())
            api.finish(one.service, one.path.rsplit("/", 2)[0], operation, timeout_s=rest_s)
        except CloudError as exc:
            yield _failure(one, exc)


def _failure(one: Found, exc: CloudError) -> Failure:
    return Failure(exc.failures[0].code, f"{one.priced}: {exc.why}", fix=exc.fix, retryable=True)


def _look(api: Api, wanted: _Wanted) -> list[Found]:
    return [one for kind in _KINDS for one in sorted(_of_kind(api, kind, wanted), key=lambda one: one.name)]


def _of_kind(api: Api, kind: _Kind, wanted: _Wanted) -> Iterator[Found]:
    for folder, row in _rows(api, kind, wanted):
        # Looked at again here: a filter that Google reads in another way must not cost a stranger's disk.
        if not wanted.is_on(row) or (kind.named and not re.fullmatch(wanted.name, row["name"])):
            continue
        path = f"{folder}{row['name']}"
        holds = kind.service == "storage" and api.get("storage", f"{path}/o", maxResults="1").get("items")
        yield Found(
            kind=kind.word,
            name=path.rpartition("/")[2].partition("@")[0],
            where=place[1] if (place := _PLACE.search(path)) else "",
            service=kind.service,
            path=path,
            cluster_id=read_labels(row).get(ID_LABEL, ""),
            usd_per_hour=costs.of_row(kind.word, row),
            kept="it holds something" if holds else "",
        )


def _rows(api: Api, kind: _Kind, wanted: _Wanted) -> Iterator[tuple[str, Json]]:
    """The rows of all pages, and what is before their names in their paths; none where the API is off."""
    project, collection = f"projects/{api.project}", kind.path.rpartition("/")[2]
    try:
        if kind.service == "storage":
            pages = api.pages("storage", kind.path, project=api.project)
            yield from (("b/", row) for page in pages for row in page.get("items", ()))
        elif kind.service != "compute":  # there a name is a path
            pages, key = api.pages(kind.service, f"{project}/{kind.path}"), _ROWS[kind.service]
            yield from (("", row) for page in pages for row in page.get(key, ()))
        else:
            query = {} if kind.named else {"filter": f'labels.{wanted.label}="{wanted.value}"'}
            for page in api.pages("compute", f"{project}/{kind.path}", **query):
                items: Any = page.get("items", ())
                scopes = items if isinstance(items, dict) else {"global": {collection: items}}
                for scope, found in scopes.items():  # an aggregated list, or one of what is global
                    yield from (
                        (f"{project}/{scope}/{collection}/", row) for row in found.get(collection, ())
                    )
    except ApiOffError:
        if not api.is_off(kind.service):  # of another project: what is there could not be looked at
            raise
