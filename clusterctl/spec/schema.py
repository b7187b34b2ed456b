"""The spec's JSON Schema, for editors, and the reference that docs/spec.md holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from clusterctl.spec.job_file import JobFile
from clusterctl.spec.models import ClusterSpec

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_DEFINITIONS: Final = "#/$defs/"

Schema = Mapping[str, Any]


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a spec file. What it can't express, `validate` still refuses."""
    return {
        "$schema": DIALECT,
        **ClusterSpec.model_json_schema(),
        "title": "clusterctl cluster spec",
        "description": "One typed file describes a cluster.",
    }


def job_schema() -> dict[str, Any]:
    """The JSON Schema of a job file. What it can't express, `submit` still refuses."""
    return {
        "$schema": DIALECT,
        **JobFile.model_json_schema(),
        "title": "clusterctl job file",
        "description": "One job for `clusterctl submit`, or several variants of it.",
    }


def reference(schema: Schema) -> str:
    """Markdown tables of every field, one table a mapping, in the order of the schema."""
    return "\n".join(_section("", schema, schema["$defs"])).strip() + "\n"


def _section(path: str, model: Schema, definitions: Schema) -> Iterator[str]:
    """The table of one mapping, then those of the mappings in it."""
    yield f"### {f'`{path}`' if path else 'The file'}"
    yield ""
    if path:
        yield f"{_prose(model['description'])}"
        yield ""
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    inner: list[tuple[str, Schema]] = []
    for name, field in model["properties"].items():
        below = _model_of(field, definitions)
        if below is not None:
            suffix = "[]" if field.get("type") == "array" else ""
            inner.append((f"{path}.{name}{suffix}".removeprefix("."), below))
        default = _default(name, field, model, is_mapping="$ref" in field)
        yield f"| `{name}` | {_value(field)} | {default} | {_prose(field['description'])} |"
    yield ""
    for inner_path, below in inner:
        yield from _section(inner_path, below, definitions)


def _model_of(field: Schema, definitions: Schema) -> Schema | None:
    reference = field.get("$ref") or field.get("items", {}).get("$ref")
    found: Schema | None = definitions[reference.removeprefix(_DEFINITIONS)] if reference else None
    return found


def _default(name: str, field: Schema, model: Schema, *, is_mapping: bool) -> str:
    if name in model.get("required", ()):
        return "required"
    default = field.get("default")
    if default in (None, []) or is_mapping:
        return "none"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _value(field: Schema) -> str:
    """What may stand there, in a few words."""
    kind = next((s for s in field.get("anyOf", ()) if s["type"] != "null"), field)
    if "const" in kind:
        return f"`{kind['const']}`"
    if "$ref" in kind:
        return "mapping"
    if kind["type"] == "array":
        return f"list of {'mappings' if '$ref' in kind['items'] else 'text'}"
    if kind["type"] == "integer":
        low, high = kind["minimum"], kind.get("maximum")
        return f"whole number, {low} to {high}" if high is not None else f"whole number, at least {low}"
    if examples := kind.get("examples") or field.get("examples"):
        return f"text such as `{examples[0]}`"
    return f"text, `{kind['pattern']}`" if "pattern" in kind else "text"


def _prose(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")
