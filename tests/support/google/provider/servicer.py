"""Terraform's provider protocol, answered from Google's schema and the cloud's JSON file."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Network
from typing import Any

import grpc
from tf.gen import tfplugin_pb2 as pb
from tf.gen import tfplugin_pb2_grpc as rpc
from tf.types import Unknown
from tf.utils import read_dynamic_value, to_dynamic_value

from tests.support.google import refusals
from tests.support.google.provider import limits, schema, world
from tests.support.google.provider.store import Store

INSTANCE = "google_compute_instance"
DISK = "google_compute_disk"
# Of which Google's servers hear one by one.
UNSETTLED = {
    "google_service_account",
    "google_project_service",
}
GIVEN_OFTEN = ("_iam_member", "_project_service")  # there already is as good as made


class RefusedError(Exception):
    """Google says no; the text is what its provider prints."""


class CrashedError(Exception):
    """The provider is dead, and answers no more."""


class Google(rpc.ProviderServicer):  # type: ignore[misc]
    """Google's provider, whose cloud is in ``store``."""

    def __init__(self, store: Store) -> None:
        self.known = schema.load()
        self.store = store
        self.stopping = threading.Event()
        self.crashed = threading.Event()
        self.settings: Mapping[str, Any] = {}
        self.given: dict[str, set[str]] = {}  # type -> all attributes that configurations set
        self.counted: str | None = None  # the project of X-Goog-User-Project, if that is sent

    def GetProviderSchema(self, request: Any, context: Any) -> Any:
        return schema.answer()

    def ValidateProviderConfig(self, request: Any, context: Any) -> Any:
        return pb.ValidateProviderConfig.Response()

    def ValidateResourceConfig(self, request: Any, context: Any) -> Any:
        wrong = world.refused_by_validate(request.type_name, read_dynamic_value(request.config))
        return pb.ValidateResourceConfig.Response(diagnostics=[_error(text) for text in wrong])

    def ConfigureProvider(self, request: Any, context: Any) -> Any:
        self.settings = read_dynamic_value(request.config)
        self.counted = _counted(self.settings)
        # The Terraform of before was interrupted, or its provider has crashed.
        self.stopping.clear()
        self.crashed.clear()
        with self.store.change() as cloud:
            if refusals.due(cloud, "configure", "provider", "google"):
                return pb.ConfigureProvider.Response(
                    diagnostics=[_error(**refusals.TEXTS["no_credentials"])]
                )
        return pb.ConfigureProvider.Response()

    def StopProvider(self, request: Any, context: Any) -> Any:
        self.stopping.set()
        return pb.StopProvider.Response()

    def UpgradeResourceState(self, request: Any, context: Any) -> Any:
        state = to_dynamic_value(json.loads(request.raw_state.json))
        return pb.UpgradeResourceState.Response(upgraded_state=state)

    def PlanResourceChange(self, request: Any, context: Any) -> Any:
        kind = request.type_name
        prior = read_dynamic_value(request.prior_state)
        proposed = read_dynamic_value(request.proposed_new_state)
        for default in ("project", "region", "zone"):
            if default in proposed and proposed[default] is None:
                proposed[default] = self.settings.get(default)
        proposed = world.with_defaults(kind, proposed)
        if prior:
            proposed = world.kept(kind, proposed, prior)
        else:
            self.given.setdefault(kind, set()).update(
                set(_given(read_dynamic_value(request.config)))
            )
        planned = self._with_labels(schema.with_unknowns(self._block(kind), proposed, prior))
        planned = world.foreseen(kind, planned, prior or {})
        changed = schema.differences(prior, planned) if prior else ()
        shrinking = _shrinking(kind, prior, planned) if prior else None
        replaced = [
            schema.path(trail)
            for trail in changed
            if world.forces_new(kind, trail) or trail[0] == shrinking
        ]
        return pb.PlanResourceChange.Response(
            planned_state=to_dynamic_value(planned),
            requires_replace=replaced,
            legacy_type_system=True,
        )

    def _with_labels(self, planned: dict[str, Any]) -> dict[str, Any]:
        """Google's provider shows all labels beside those of the configuration, its own mark among
        them.
        """
        if "effective_labels" not in planned:
            return planned
        marked = self.settings.get("add_terraform_attribution_label") is not False
        own = {"goog-terraform-provisioned": "true"} if marked else {}
        labels = planned["labels"]
        every = (
            labels
            if labels is Unknown
            else own | (self.settings.get("default_labels") or {}) | (labels or {})
        )
        return planned | {"effective_labels": every, "terraform_labels": every}

    def ApplyResourceChange(self, request: Any, context: Any) -> Any:
        kind = request.type_name
        prior = read_dynamic_value(request.prior_state)
        planned = read_dynamic_value(request.planned_state)
        errors = []
        try:
            after = None
            where = (planned or prior).get("project")
            # A project that has the API may change what it shares with others.
            shares = self.store.read().get("host_projects", ())
            if where and self.counted not in {None, where} and where not in shares:
                text = refusals.text_of(
                    "api_off_by_id", kind, planned or prior, project=str(self.counted)
                )
                raise RefusedError(text)
            if planned is None:
                self._delete(kind, prior)
            elif prior is None:
                after = self._create(kind, planned)
            else:
                after = self._update(kind, prior, planned)
        except RefusedError as refused:
            after = prior
            errors = [_error(str(refused))]
        except CrashedError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "error reading from server: EOF")
        return pb.ApplyResourceChange.Response(
            new_state=to_dynamic_value(after), diagnostics=errors, legacy_type_system=True
        )

    def _create(self, kind: str, planned: Mapping[str, Any]) -> Mapping[str, Any]:
        """Create a resource, which Google shows from the first moment.

        An interrupt ends the provider's wait for it, and a crash the provider: the state then lacks
        it, and Google makes it all the same.
        """
        if self.crashed.is_set():
            raise CrashedError
        name = world.name_of(kind, planned)
        identifier = world.id_of(kind, planned)
        fault = self._fault("create", kind, planned)
        with _logged(self.store, "create", kind, name, identifier) as cloud:
            there = cloud["resources"].setdefault(kind, {})
            if identifier in there and not kind.endswith(GIVEN_OFTEN):
                raise RefusedError(
                    refusals.text_of("name_taken", kind, planned, id=identifier, name=name)
                )
            refused = fault["kind"] if fault and fault["kind"] not in refusals.DEEDS else None
            text = refused and refusals.text_of(refused, kind, planned, id=identifier, name=name)
            if text and refused not in refusals.MADE:
                raise RefusedError(text)
            _refuse_unsettled(cloud, kind, planned)
            _refuse_settings(kind, planned)
            if kind == INSTANCE:
                _refuse_disks(cloud, planned, identifier)
            if kind in UNSETTLED and identifier not in there:
                cloud["unsettled"][identifier.rpartition("/")[2]] = cloud["lag"]
            made = schema.filled(self._block(kind), planned, world.computer(cloud, kind, planned))
            made = there[identifier] = world.shown(kind, made)
            if text:
                raise RefusedError(text)
        if fault and fault["kind"] == "crash":
            self.crashed.set()
        self._wait(fault)
        if self.crashed.is_set():
            raise CrashedError
        if fault and self.stopping.is_set():
            raise RefusedError(refusals.text_of("interrupted", kind, planned))
        return world.read(kind, made, planned)

    def _update(
        self, kind: str, prior: Mapping[str, Any], planned: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        with _logged(
            self.store, "update", kind, world.name_of(kind, planned), prior["id"]
        ) as cloud:
            stops = any(
                world.needs_a_stop(kind, trail) for trail in schema.differences(prior, planned)
            )
            if stops and not planned["allow_stopping_for_update"]:
                raise RefusedError(refusals.text_of("not_stopped", kind, planned))
            if stops and prior.get("scratch_disk"):  # its stop has no discardLocalSsd: issue 26173
                raise RefusedError(refusals.text_of("local_ssd_stop", kind, planned))
            _refuse_settings(kind, planned)
            if said := limits.refused_update(kind, prior, planned):
                raise RefusedError(said)
            if kind == INSTANCE:
                _refuse_disks(cloud, planned, prior["id"])
            made = schema.filled(self._block(kind), planned, world.computer(cloud, kind, planned))
            made = cloud["resources"].setdefault(kind, {})[prior["id"]] = world.shown(kind, made)
        return world.read(kind, made, planned)

    def _delete(self, kind: str, prior: Mapping[str, Any]) -> None:
        name = world.name_of(kind, prior)
        identifier = prior["id"]
        fault = self._fault("delete", kind, prior)
        self._wait(fault)
        with _logged(self.store, "delete", kind, name, identifier) as cloud:
            if user := world.user_of(cloud, kind, prior):
                raise RefusedError(
                    refusals.text_of("in_use", kind, prior, id=identifier, user=user)
                )
            if fault and fault["kind"] not in refusals.DEEDS:
                raise RefusedError(
                    refusals.text_of(fault["kind"], kind, prior, id=identifier, name=name)
                )
            # The resource then only leaves the state.
            if prior.get("deletion_policy") != "ABANDON":
                world.delete(cloud, kind, identifier)

    def _fault(self, op: str, kind: str, value: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The fault that plays."""
        with self.store.change() as cloud:
            return refusals.due(cloud, op, kind, world.name_of(kind, value))

    def _wait(self, fault: Mapping[str, Any] | None) -> None:
        """Wait as long as the fault lasts, or until the provider is interrupted or has crashed."""
        until = time.monotonic() + (fault["seconds"] if fault else 0)
        while time.monotonic() < until and not (self.stopping.is_set() or self.crashed.is_set()):
            time.sleep(0.05)

    def ReadResource(self, request: Any, context: Any) -> Any:
        state = read_dynamic_value(request.current_state)
        found = self.store.read()["resources"].get(request.type_name, {}).get(state["id"])
        found = found and world.read(request.type_name, found, state)
        return pb.ReadResource.Response(new_state=to_dynamic_value(found))

    def ImportResourceState(self, request: Any, context: Any) -> Any:
        kind = request.type_name
        identifier = request.id
        there = self.store.read()["resources"].get(kind, {}).values()
        found = next((row for row in there if world.import_id_of(kind, row) == identifier), None)
        if found is None:
            missing = _error(
                "Cannot import non-existent remote object", f"there is no {identifier}"
            )
            return pb.ImportResourceState.Response(diagnostics=[missing])
        state = to_dynamic_value(world.imported(kind, found))
        imported = pb.ImportResourceState.ImportedResource(type_name=kind, state=state)
        return pb.ImportResourceState.Response(imported_resources=[imported])

    def _block(self, kind: str) -> schema.Block:
        block: schema.Block = self.known["resource_schemas"][kind]["block"]
        return block


@contextmanager
def _logged(
    store: Store, op: str, kind: str, name: str, identifier: str
) -> Iterator[dict[str, Any]]:
    """The cloud under its lock, and a line of its log with the error that ended the operation, if
    one did.
    """
    entry = {
        "at": time.time(),
        "op": op,
        "type": kind,
        "name": name,
        "id": identifier,
        "error": None,
    }
    with store.change() as cloud:
        try:
            yield cloud
        except RefusedError as error:
            entry["error"] = str(error)
            raise
        finally:
            cloud["log"].append(entry)


def _given(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The paths of all that a configuration sets; those of blocks have their names with dots."""
    for name, value in config.items():
        match value:
            case None | []:
                continue
            case dict() if not value:
                continue
            case [{}, *_]:
                for block in value:
                    yield from _given(block, f"{above}{name}.")
            case _:
                yield f"{above}{name}"


def _counted(settings: Mapping[str, Any]) -> str | None:
    """The project of X-Goog-User-Project, as LoadAndValidate of the provider's transport/config.go
    has it.
    """
    override = settings.get("user_project_override")
    project = settings.get("billing_project")
    override = os.environ.get("USER_PROJECT_OVERRIDE") == "true" if override is None else override
    project = project or os.environ.get("GOOGLE_BILLING_PROJECT")
    return project if override and project else None


def _shrinking(kind: str, prior: Mapping[str, Any], planned: Mapping[str, Any]) -> str | None:
    """The attribute of a disk or a subnetwork that shrinks. They grow in place; where they shrink,
    Google's provider forces a new one (IsDiskShrinkage, IsShrinkageIpCidr).
    """
    if kind == DISK and _size(planned) < _size(prior):
        return "size"
    key = "ip_cidr_range"
    if kind == "google_compute_subnetwork" and not IPv4Network(prior[key]).subnet_of(
        IPv4Network(planned[key])
    ):
        return key
    return None


def _size(disk: Mapping[str, Any]) -> int:
    return int(disk["size"]) if isinstance(disk.get("size"), int | float | str) else 0


def _refuse_unsettled(cloud: dict[str, Any], kind: str, planned: Mapping[str, Any]) -> None:
    """A new account is unknown to the next calls that grant or use it, an API to those that call
    it.
    """
    account = str(planned.get("member") or "").removeprefix("serviceAccount:")
    needed = {account: "account_unknown_yet"}
    if kind == INSTANCE:
        accounts = (one["email"] for one in _listed(planned, "service_account"))
        needed = dict.fromkeys(accounts, "account_not_found_yet")
    if kind == "google_compute_firewall":
        sides = (planned[f"{side}_service_accounts"] or () for side in ("source", "target"))
        needed = dict.fromkeys(itertools.chain(*sides), "account_field_yet")
    if kind.startswith("google_compute_"):
        needed["compute.googleapis.com"] = "api_off_by_id"
    for what, refusal in needed.items():
        if cloud["unsettled"].get(what):
            cloud["unsettled"][what] -= 1
            raise RefusedError(refusals.text_of(refusal, kind, planned, email=what))


def _refuse_settings(kind: str, planned: Mapping[str, Any]) -> None:
    if text := limits.refused_by_google(kind, planned):
        raise RefusedError(text)


def _refuse_disks(cloud: Mapping[str, Any], planned: Mapping[str, Any], identifier: str) -> None:
    """A disk that an instance writes to is attached to no other; an image of the same project is
    READY.

    Sources: Google's resourceInUseByAnotherResource, and ResolveImage in the provider's
    services/compute/image.go.
    """
    wanted = _sources(planned)
    for other, each in cloud["resources"].get(INSTANCE, {}).items():
        if other != identifier and (taken := wanted & _sources(each)):
            raise RefusedError(
                refusals.text_of("attached", INSTANCE, planned, id=taken.pop(), user=other)
            )
    images = cloud["resources"].get("google_compute_image", {})
    own = f"projects/{planned['project']}/global/images/"
    asked = (
        one for disk in _listed(planned, "boot_disk") for one in _listed(disk, "initialize_params")
    )
    for path in (str(one["image"]).removeprefix(world.COMPUTE) for one in asked):
        if not path.startswith(own) or "/family/" in path:
            continue
        if path not in images:
            raise RefusedError(
                f"Error resolving image name '{path}': Could not find image or family {path}"
            )
        if images[path]["status"] != "READY":
            what = f"googleapi: Error 400: The resource '{path}' is not ready, resourceNotReady"
            raise RefusedError(what)


def _listed(value: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    return value.get(key) or () if isinstance(value.get(key), list) else ()


def _sources(instance: Mapping[str, Any]) -> set[str]:
    """The ids of the disks that are attached to an instance."""
    sources = (disk["source"] for disk in instance.get("attached_disk") or ())
    return {each.removeprefix(world.COMPUTE) for each in sources if isinstance(each, str)}


def _error(summary: str, detail: str = "") -> Any:
    return pb.Diagnostic(severity=pb.Diagnostic.ERROR, summary=summary, detail=detail)
