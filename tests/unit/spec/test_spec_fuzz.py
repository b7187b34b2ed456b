"""Whatever a file holds, the answer is a spec or a SpecError whose problems have places in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterctl.errors import Problem, SpecError, UsageError
from clusterctl.spec.load import CurrentUser, load_spec, parse_spec
from clusterctl.spec.providers.gcp import GcpSettings
from clusterctl.spec.providers.gcp_nodes import GcpNodes

BASE = (Path(__file__).parent / "base.yaml").read_text()
PROVIDER = (
    "provider:\n  type: local\n  subnet: 10.77.0.0/24\n  mirror: http://deb.debian.org/debian\n"
)
assert PROVIDER in BASE
YAML_BITS = [
    *list("\n\t :-[]{},&*!|>'\"#%@`~?=<.0159ax\\"),
    "<<: ",
    "*a",
    "&a ",
    "!!int ",
    "---\n",
    "  - ",
    "0o",
    "0x",
]
KEYS = st.sampled_from([*GcpSettings.model_fields, *GcpNodes.model_fields, "train", "typ", "gcp"])
WORDS = st.sampled_from(
    ["gcp", "local", "us-central1-a", "a2-highgpu-1g", "n1-standard-8", "50GiB", "10.0.0.0/8"]
)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)
fuzz = settings(
    max_examples=3 * settings.default.max_examples, suppress_health_check=[HealthCheck.too_slow]
)


def problems(text: str) -> tuple[Problem, ...]:
    try:
        parse_spec(text, "c.yaml")
    except SpecError as exc:
        return exc.problems
    return ()


def read(text: str) -> None:
    for problem in problems(text):
        assert problem.line >= 1
        assert problem.column >= 1
        assert problem.key
        assert "\n" not in str(problem)
        assert len(str(problem)) < 600


@given(st.lists(st.sampled_from(YAML_BITS), max_size=40).map("".join))
@fuzz
def test_text_of_yaml_characters(text: str) -> None:
    read(text)


@given(
    st.integers(0, len(BASE)),
    st.integers(0, 12),
    st.lists(st.sampled_from(YAML_BITS), max_size=4).map("".join) | st.text(max_size=5),
)
@fuzz
def test_load_of_a_mutated_spec_returns_a_spec_or_spec_error(
    start: int, removed: int, inserted: str
) -> None:
    read(BASE[:start] + inserted + BASE[start + removed :])


@given(PLAIN)
@fuzz
def test_load_of_any_provider_section_returns_a_spec_or_spec_error(provider: object) -> None:
    read(BASE.replace(PROVIDER, f"provider: {json.dumps(provider)}\n"))


@given(st.dictionaries(KEYS, PLAIN, max_size=6))
@fuzz
def test_load_of_any_gcp_field_returns_a_spec_or_spec_error(fields: dict[str, object]) -> None:
    provider = {"type": "gcp", "project": "my-project", "zone": "us-central1-a", **fields}
    read(BASE.replace(PROVIDER, f"provider: {json.dumps(provider)}\n"))


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_load_of_any_bytes_raises_usage_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(raw)
    with pytest.raises(UsageError):
        load_spec(path, current_user=CurrentUser("ada", 1001))
