"""The fields of requests to Google that attributes of Terraform resources become.

Google's provider is not here: a field has the name of its attribute in camel case, or the plural of
that, or the name that tests/support/google/requests.toml gives. The discovery documents decide
which of them there is.
"""

from __future__ import annotations

import datetime as dt
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from tests.support.google import discovery
from tests.support.processes import ROOT


@dataclass(frozen=True)
class Recorded:
    """Recordings of a method."""

    files: tuple[str, ...]
    fields: frozenset[str]


@dataclass(frozen=True)
class Sent:
    """How the attributes of a resource type are sent to Google."""

    method: str
    within: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    unsent: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Order:
    """The order of creation in a recording: types of resources before the types that refer to
    them.
    """

    file: str
    before: tuple[str, ...]
    after: str


@dataclass(frozen=True)
class Requests:
    """All of requests.toml; see there."""

    repository: str
    commit: str
    date: dt.date
    path: str
    recorded: Mapping[str, Recorded]
    sent: Mapping[str, Sent]
    without: Mapping[str, frozenset[str]]
    order: tuple[Order, ...]


REQUESTS = TypeAdapter(Requests).validate_python(
    tomllib.loads((ROOT / "tests" / "support" / "google" / "requests.toml").read_text())
)


def unrecorded(kind: str, attributes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Return each field that no recording has, with Google's description of the field.

    Raises:
        AssertionError: Google has no such field, or one that cannot be set.
    """
    rules = REQUESTS.sent[kind]
    recorded = REQUESTS.recorded[rules.method].fields
    for attribute in sorted(set(attributes) - rules.unsent):
        path, *_ = [*_known(rules, attribute), None]
        assert path, f"{rules.method} has no field for {kind}.{attribute}"
        if path not in recorded:
            description = _schema(rules.method, path).get(
                "description", "Google says nothing of it."
            )
            assert "[Output Only]" not in description, (path, description)
            first, *_ = re.split(r"(?<=[.:])\s", description)
            yield f"{rules.method} {path}", " ".join(first.split())


def _known(rules: Sent, attribute: str) -> Iterator[str]:
    """Return the names in Google's API that an attribute may have."""
    if attribute in rules.renamed:
        named = [rules.renamed[attribute]]
    else:
        block, _, own = attribute.rpartition(".")
        above = next(_known(rules, block)) if block else rules.within
        camel = re.sub("_(.)", lambda part: part[1].upper(), own)
        named = [f"{above}.{each}".removeprefix(".") for each in (camel, f"{camel}s")]
    yield from (each for each in named if _schema(rules.method, each))


def _schema(method: str, path: str) -> Mapping[str, Any]:
    """Return the entry of a field in the discovery document. Empty if it has none."""
    service = method.partition(".")[0]
    (found,) = (one for one in discovery.methods(service) if one.id == method)
    schemas = discovery.document(service)["schemas"]
    schema: Mapping[str, Any] = found.document["request"]
    for name in path.split("."):
        schema = schemas[schema["$ref"]] if "$ref" in schema else schema
        schema = schema.get("properties", {}).get(name, {})
        said = {key: value for key, value in schema.items() if key == "description"}
        schema = {**schema.get("items", schema), **said}
    return schema
