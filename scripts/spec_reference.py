"""Write the tables of docs/spec.md from the JSON Schema of a spec, and of docs/agents.md from that of
the limits of agents.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterctl.spec.agent import AgentLimits
from clusterctl.spec.load import json_schema

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "spec.md"
AGENTS: Final = PAGE.with_name("agents.md")
_BEGIN = "<!-- reference: begin -->\n"
_END = "<!-- reference: end -->\n"
_DEFINITIONS: Final = "#/$defs/"

Schema = Mapping[str, Any]


def page(text: str) -> str:
    """Replace the tables in the text of the page."""
    return _with(text, reference(json_schema()))


def agents_page(text: str) -> str:
    """Replace the table in the text of the page about agents."""
    return _with(text, reference(AgentLimits.model_json_schema(), "Keys of `agent`"))


def _with(text: str, tables: str) -> str:
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{tables}{_END}{after}"


def reference(schema: Schema, heading: str = "The file") -> str:
    """Return Markdown tables of all fields, a table for each mapping, in the order of the
    schema.
    """
    definitions = schema.get("$defs", {})
    lines = _Reference(definitions).section(_Table("", heading, schema))
    return "\n".join(lines).strip() + "\n"


@dataclass(frozen=True, slots=True)
class _Table:
    """A mapping of a spec file: its path in the file, the heading of its table, and its model."""

    path: str
    heading: str
    model: Schema


class _Reference:
    """A writer of tables. The table of a model is written once, at its first place in the file."""

    def __init__(self, definitions: Schema) -> None:
        self._definitions = definitions
        self._path_of: dict[str, str] = {}

    def section(self, table: _Table) -> Iterator[str]:
        """Yield the table of a mapping, then the tables of the mappings in it."""
        yield f"### {table.heading}"
        yield ""
        if table.path:
            yield _prose(table.model["description"])
            yield ""
        yield "| key | value | default | meaning |"
        yield "|---|---|---|---|"
        inner: list[_Table] = []
        for name, field in table.model["properties"].items():
            below, value = self._below(f"{table.path}.{name}".removeprefix("."), field)
            inner += below
            default = _default(name, field, table.model)
            yield f"| `{name}` | {value} | {default} | {_prose(field['description'])} |"
        yield ""
        for below_table in inner:
            yield from self.section(below_table)

    def _below(self, path: str, field: Schema) -> tuple[list[_Table], str]:
        """Return the tables for a field's models, and a short description of its values."""
        kind = _kind(field)
        if "oneOf" in kind:
            models = [self._model(one) for one in kind["oneOf"]]
            return [_Table(path, _heading(path, model), model) for model in models], "mapping"
        holder = kind
        value = "mapping"
        if kind.get("type") == "array":
            holder = kind["items"]
            value = "list of mappings"
            path = f"{path}[]"
        elif named := [
            one
            for one in (
                kind.get("additionalProperties"),
                *kind.get("patternProperties", {}).values(),
            )
            if isinstance(one, Mapping)
        ]:
            holder = named[0]
            value = "mapping of mappings"
            path = f"{path}.NAME"
        if "$ref" not in holder:
            return [], _value({**field, **kind})
        model = self._model(holder)
        first = self._path_of.setdefault(model["title"], path)
        return (
            ([_Table(path, f"`{path}`", model)], value)
            if first == path
            else ([], f"{value}, as `{first}`")
        )

    def _model(self, holder: Schema) -> Schema:
        found: Schema = self._definitions[holder["$ref"].removeprefix(_DEFINITIONS)]
        return found


def _heading(path: str, model: Schema) -> str:
    return f"`{path}`, `type: {model['properties']['type']['const']}`"


def _kind(field: Schema) -> Schema:
    """Return the schema of a field without the alternative `null`."""
    found: Schema = next((s for s in field.get("anyOf", ()) if s.get("type") != "null"), field)
    return found


def _default(name: str, field: Schema, model: Schema) -> str:
    if name in model.get("required", ()):
        return "required"
    default = field.get("default")
    if default is None or isinstance(default, Mapping) or default == []:
        return ""
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _value(kind: Schema) -> str:
    """Describe the values of a field that is neither a mapping nor a list of mappings."""
    if "const" in kind:
        return f"`{kind['const']}`"
    if "enum" in kind:
        return ", ".join(f"`{word}`" for word in kind["enum"])
    if kind["type"] in {"integer", "number"}:
        number = "whole number" if kind["type"] == "integer" else "number"
        low = kind["minimum"]
        high = kind.get("maximum")
        return f"{number}, {low} to {high}" if high is not None else f"{number}, at least {low}"
    if examples := kind.get("examples"):
        return f"text such as `{examples[0]}`"
    below = "numbers" if "number" in json.dumps(kind.get("additionalProperties")) else "text"
    plain = {
        "array": "list of text",
        "object": f"mapping of {below}",
        "boolean": "`true` or `false`",
    }
    return plain.get(kind["type"]) or (
        f"text, `{kind['pattern']}`" if "pattern" in kind else "text"
    )


def _prose(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def main() -> int:
    """Write the pages."""
    PAGE.write_text(page(PAGE.read_text()))
    AGENTS.write_text(agents_page(AGENTS.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
