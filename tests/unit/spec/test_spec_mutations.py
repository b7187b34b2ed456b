"""Malformed specs, each one mutation of a spec that validates: place, key and words of every
message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from clusterctl.errors import SpecError
from clusterctl.spec.load import json_schema, parse_spec

HERE = Path(__file__).parent
BASES = {
    name: (HERE / name).read_text() for name in ("base.yaml", "gcp-base.yaml", "onprem-base.yaml")
}


@dataclass(frozen=True)
class Mutation:
    """``old`` of a ``base`` becomes ``new``; what must be said about it.

    ``in_schema``: whether the JSON Schema refuses it too; None where the text is no YAML mapping at
        all.
    ``problems``: how many come out; the one described is among them.
    """

    base: str
    old: str
    new: str
    line: int
    column: int
    key: str
    message: str
    hint: str
    in_schema: bool | None
    problems: int

    @property
    def text(self) -> str:
        return BASES[self.base].replace(self.old, self.new)


MUTATIONS = [
    Mutation(base, **json.loads(line))
    for base in BASES
    for line in (HERE / base.replace("base.yaml", "mutations.jsonl")).read_text().splitlines()
]


@pytest.mark.parametrize("base", BASES)
def test_base_is_valid(base: str) -> None:
    assert parse_spec(BASES[base], base).name in {"demo", "lab"}


def test_mutations_are_many_and_distinct() -> None:
    assert len(MUTATIONS) >= 200
    assert len({m.text for m in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: repr(m.new)[:40])
def test_mutation_is_reported_at_its_position(mutation: Mutation) -> None:
    base = BASES[mutation.base]
    assert base.count(mutation.old) == 1
    assert mutation.text != base
    with pytest.raises(SpecError) as caught:
        parse_spec(mutation.text, "cluster.yaml")
    assert caught.value.exit_code == 2
    found = {(p.line, p.column, p.key, p.message, p.hint) for p in caught.value.problems}
    assert (mutation.line, mutation.column, mutation.key, mutation.message, mutation.hint) in found
    assert len(found) == mutation.problems
    assert "Input should" not in str(caught.value)


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema())


# The schema does not know the short form of a host, which onprem-base.yaml has.
IN_SCHEMA = ("base.yaml", "gcp-base.yaml")


@pytest.mark.parametrize(
    "mutation", [m for m in MUTATIONS if m.base in IN_SCHEMA], ids=lambda m: repr(m.new)[:40]
)
def test_schema_refuses_what_it_can_express(
    schema: jsonschema.Draft202012Validator, mutation: Mutation
) -> None:
    if mutation.in_schema is None:
        with pytest.raises(YAMLError):
            YAML(typ="safe", pure=True).load(mutation.text)
        return
    values = YAML(typ="safe", pure=True).load(mutation.text)
    assert schema.is_valid(values) is not mutation.in_schema


@pytest.mark.parametrize("base", IN_SCHEMA)
def test_schema_accepts_the_base_spec(base: str) -> None:
    jsonschema.Draft202012Validator(json_schema()).validate(
        YAML(typ="safe", pure=True).load(BASES[base])
    )
