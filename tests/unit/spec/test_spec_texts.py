"""The texts made from the models: what `init` writes, the JSON Schema, the reference in the
manual.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from clusterctl.errors import SpecError, UsageError
from clusterctl.spec.base import PATTERNS
from clusterctl.spec.job_file import job_schema
from clusterctl.spec.job_options import JobOptions
from clusterctl.spec.load import json_schema, parse_spec, starter_spec
from clusterctl.spec.models import PROVIDERS
from scripts.spec_reference import page
from tests.support.manual import assert_shown
from tests.support.messages import refused

Golden = Callable[[str, str], None]
DOC = Path(__file__).parents[3] / "docs" / "spec.md"
# Fields that exclude a field which the starter shows: `flex_start` spot instances, `branch` a driver
# that is not installed, `key` a repository without an address.
ALTERNATIVES = {"GcpNodes.flex_start", "Nvidia.branch", "SlurmSource.key"}
# Fields that a provider accepts and has no use for.
UNUSED = {"local": {"Software.cupy"}, "gcp": {"Software.mirrors"}}
BEGIN = "<!-- reference: begin -->\n"
END = "<!-- reference: end -->\n"


def uncommented(text: str) -> str:
    """The text with every commented-out field in force; prose stays a comment."""
    return re.sub(r"(?m)^( *)# ( *(?:- )?[a-z0-9_-]+:|  +- )", r"\1\2", text)


def model_below(field: Mapping[str, Any], provider: str) -> str:
    """Where the schema has the model of a field, its entries or that provider; "" where it has
    none.
    """
    if "discriminator" in field:
        return str(field["discriminator"]["mapping"][provider])
    kinds = [field, *field.get("anyOf", ())]
    kinds += [
        kind[key] for kind in kinds for key in ("items", "additionalProperties") if kind.get(key)
    ]
    return next((str(kind["$ref"]) for kind in kinds if "$ref" in kind), "")


def entries(value: Any, field: Mapping[str, Any]) -> list[Any]:
    """The mappings that a field holds, be it one, a list, or a mapping by name."""
    if isinstance(value, list):
        return value
    return list(value.values()) if "additionalProperties" in field else [value]


def models(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield schema
    yield from schema["$defs"].values()


def refused_fields(provider: str, schema: Mapping[str, Any]) -> set[str]:
    """The fields that a provider refuses, as `Partition.gpus`; a section of which it refuses every
    field counts itself.
    """
    fields = set()
    sections = dict[str, set[str]]()
    for key, *_ in PROVIDERS[provider].refuses:
        top, _, name = key.partition(".")
        if name:
            model = model_below(schema["properties"][top], provider).split("/")[-1]
            fields.add(f"{model}.{name}")
            sections.setdefault(top, set()).add(f"{model}.{name}")
        else:
            fields.add(f"{schema['title']}.{top}")
    for top, of_section in sections.items():
        model = next(iter(of_section)).partition(".")[0]
        if of_section == {f"{model}.{name}" for name in schema["$defs"][model]["properties"]}:
            fields -= of_section
            fields.add(f"{schema['title']}.{top}")
    return fields


@pytest.mark.parametrize("provider", PROVIDERS)
class TestInit:
    def test_golden(self, golden: Golden, provider: str) -> None:
        golden(f"init-{provider}.yaml", starter_spec(provider))

    def test_starter_spec_is_valid_with_and_without_comments(self, provider: str) -> None:
        for text in (starter_spec(provider), uncommented(starter_spec(provider))):
            assert parse_spec(text, "cluster.yaml").provider.type == provider

    def test_starter_spec_shows_every_field(self, provider: str) -> None:
        values = YAML(typ="safe", pure=True).load(uncommented(starter_spec(provider)))
        schema = json_schema()
        shown: dict[str, set[str]] = {}

        def compare(value: Any, model: Mapping[str, Any]) -> None:
            shown.setdefault(model["title"], set()).update(value)
            for name, field in model["properties"].items():
                if name not in value:
                    continue
                if below := model_below(field, provider):
                    for entry in entries(value[name], field):
                        compare(entry, schema["$defs"][below.split("/")[-1]])
                elif field.get("default") not in (None, [], {}):
                    assert (name, value[name]) == (name, field["default"])

        compare(values, schema)
        fields = {schema["title"]: schema, **schema["$defs"]}
        missing = {
            f"{model}.{name}"
            for model in shown
            for name in fields[model]["properties"].keys() - shown[model]
        }
        unexplained = missing - ALTERNATIVES - UNUSED.get(provider, set())
        assert unexplained == refused_fields(provider, schema)


def test_init_for_a_provider_that_is_not_built() -> None:
    with refused("not-found/provider", UsageError, fix="did you mean local?"):
        starter_spec("locall")


class TestSchema:
    def test_golden(self, golden: Golden) -> None:
        golden("schema.json", json.dumps(json_schema(), indent=2) + "\n")

    def test_schema_is_valid_in_its_dialect(self) -> None:
        schema = json_schema()
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert "$id" not in schema
        jsonschema.Draft202012Validator.check_schema(schema)

    @pytest.mark.parametrize(
        ("source", "valid"), [("openhpc", True), ({"from": "openhpc"}, True), ("apt", False)]
    )
    def test_source_of_slurm_may_be_a_word(self, source: object, valid: bool) -> None:
        spec = {"version": 1, "name": "demo", "partitions": [{"name": "train", "nodes": 1}]}
        schema = jsonschema.Draft202012Validator(json_schema())
        assert schema.is_valid(spec | {"software": {"slurm": source}}) is valid

    def test_schema_describes_every_field(self) -> None:
        bare = [
            f"{model['title']}.{name}"
            for model in models(json_schema())
            for name, field in model["properties"].items()
            if not field.get("description")
        ]
        assert bare == []

    def test_schema_accepts_every_default(self) -> None:
        schema = json_schema()
        for model in models(schema):
            for name, field in model["properties"].items():
                if "default" in field:
                    rules = {**field, "$defs": schema["$defs"]}
                    errors = list(
                        jsonschema.Draft202012Validator(rules).iter_errors(field["default"])
                    )
                    assert errors == [], f"{model['title']}.{name}"

    def test_spec_models_refuse_unknown_keys(self) -> None:
        assert all(model["additionalProperties"] is False for model in models(json_schema()))


def patterns(part: Any) -> Iterator[str]:
    """Every pattern of a schema that has no examples to show, and so needs words."""
    if isinstance(part, Mapping):
        if "pattern" in part and "examples" not in part:
            yield part["pattern"]
        yield from part.get("patternProperties", ())
        for below in part.values():
            yield from patterns(below)
    elif isinstance(part, list):
        for below in part:
            yield from patterns(below)


def test_schema_patterns_have_a_description_each() -> None:
    says_so_itself = json_schema()["$defs"]["SlurmSettings"]["properties"]["extra"]["items"][
        "pattern"
    ]
    names = JobOptions.model_json_schema()["properties"]["env"]["propertyNames"]["pattern"]
    found = {*patterns(json_schema()), *patterns(job_schema())} - {says_so_itself, names}
    assert found == {pattern.regex for pattern in PATTERNS.values()}


def test_manual_holds_the_reference() -> None:
    text = DOC.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text == page(text), "run `make reference`"
    assert page(text.replace("| `version` |", "| `x` |")) == text


def test_example_of_the_manual_is_valid() -> None:
    for block in re.findall(r"```yaml\n(.*?)```", DOC.read_text(), flags=re.DOTALL):
        parse_spec(block, "docs/spec.md")


WRONG = """\
version: 1
name: demo
provider: {type: local}
partitions:
  - {name: train, nodes: 2, node: 2}
  - {name: train, nodes: 1}
users: [{name: bob, uid: 999}]
"""


def test_all_errors_of_a_spec_are_shown_as_in_the_manual() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(WRONG, "/home/ada/cluster.yaml")
    assert_shown(DOC, "clusterctl validate", f"error: {caught.value}", {})
