"""Google's discovery documents: find the method of a request, check request and answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

VERSIONS = {
    **dict.fromkeys(
        ("cloudresourcemanager", "compute", "file", "iam", "serviceusage", "storage"), "v1"
    ),
}
_SCALARS: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
_IN_QUERY = {"integer": r"-?[0-9]+", "boolean": "true|false", "number": r"-?[0-9.]+"}


@dataclass(frozen=True)
class Method:
    """One method of an API; ``path`` has its parameters as named groups."""

    service: str
    id: str
    verb: str
    path: re.Pattern[str]
    document: Mapping[str, Any]


@cache
def methods(service: str) -> tuple[Method, ...]:
    """All methods of a service."""
    doc = document(service)
    return tuple(
        Method(
            service,
            m["id"],
            m["httpMethod"],
            _pattern(doc["servicePath"] + m.get("flatPath", m["path"])),
            m,
        )
        for m in _flat(doc)
    )


@cache
def document(service: str) -> dict[str, Any]:
    """The document that google-api-python-client ships."""
    folder = files("googleapiclient.discovery_cache.documents")
    doc: dict[str, Any] = json.loads((folder / f"{service}.{VERSIONS[service]}.json").read_text())
    return doc


def find(service: str, verb: str, path: str) -> tuple[Method, dict[str, str]] | None:
    """The method that a request means, and the values in its path; the longest path that fits."""
    if service not in VERSIONS:
        return None
    fitting = [
        (m, hit) for m in methods(service) if m.verb == verb and (hit := m.path.fullmatch(path))
    ]
    if not fitting:
        return None
    method, hit = max(fitting, key=lambda found: len(found[0].path.pattern))
    return method, hit.groupdict()


def wrong_request(
    method: Method, values: Mapping[str, str], query: Mapping[str, str], body: Any
) -> list[str]:
    """What of a request is not as the document says."""
    declared = method.document.get("parameters", {})
    known = {**document(method.service).get("parameters", {}), **declared}
    found = [f"unknown query parameter {name}" for name in query if name not in known]
    for name, rule in declared.items():
        given = values if rule["location"] == "path" else query
        if name in given:
            found += _wrong_text(name, given[name], rule)
        elif rule.get("required") and rule["location"] == "query":
            found.append(f"{name} is required")
    schema = method.document.get("request")
    if schema is None:
        return found + (["a body where none belongs"] if body is not None else [])
    return found + list(differs(method.service, schema, body if body is not None else {}))


def differs(service: str, schema: Mapping[str, Any], value: Any, where: str = "$") -> Iterator[str]:
    """Where a value is not what a schema says."""
    if "$ref" in schema:
        schema = document(service)["schemas"][schema["$ref"]]
    match schema.get("type"):
        case "object" if isinstance(value, dict):
            properties = schema.get("properties", {})
            more = schema.get("additionalProperties")
            for key, below in value.items():
                rule = properties.get(key, more)
                if rule is None:
                    yield f"{where}.{key} is unknown"
                else:
                    yield from differs(service, rule, below, f"{where}.{key}")
        case "array" if isinstance(value, list):
            for index, below in enumerate(value):
                yield from differs(service, schema["items"], below, f"{where}[{index}]")
        case "any":
            return
        case str(kind) if kind in _SCALARS and isinstance(value, _SCALARS[kind]):
            if "enum" in schema and value not in schema["enum"]:
                yield f"{where}: {value!r} is none of its values"
        case kind:
            yield f"{where} is no {kind}"


def _wrong_text(name: str, text: str, rule: Mapping[str, Any]) -> Iterator[str]:
    pattern = rule.get("pattern") or _IN_QUERY.get(rule["type"])
    if pattern and not re.fullmatch(pattern, text):
        yield f"{name}: {text!r} does not match {pattern}"
    if "enum" in rule and text not in rule["enum"]:
        yield f"{name}: {text!r} is none of its values"


def _flat(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for resource in node.get("resources", {}).values():
        yield from resource.get("methods", {}).values()
        yield from _flat(resource)


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{\+?([A-Za-z0-9]+)\}", path)
    return re.compile(
        "/"
        + "".join(re.escape(p) if i % 2 == 0 else f"(?P<{p}>[^/]+)" for i, p in enumerate(parts))
    )
