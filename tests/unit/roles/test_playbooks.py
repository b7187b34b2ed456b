"""The playbooks contain every role; a forgotten role would drift on every `up`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

from clusterctl.util.assets import data_folder

ANSIBLE = data_folder("ansible")


def named(value: Any) -> Iterator[str]:
    """Each role that a playbook includes."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key.rpartition(".")[2] in {"include_role", "import_role"}:
                # A loop is a list, or an expression that makes one of the names in it.
                several = re.findall(r"\w+", str(value.get("loop")))
                yield from several if "{{" in inner["name"] else [inner["name"]]
            yield from named(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from named(inner)


@pytest.mark.parametrize("part", ["install", "configure"])
def test_every_role_with_a_part_is_in_the_playbook_of_that_part(part: str) -> None:
    have = {path.parts[-3] for path in ANSIBLE.glob(f"roles/*/tasks/{part}.yml")}
    playbook = YAML(typ="safe").load(ANSIBLE / f"{part}.yml")
    assert have - set(named(playbook)) == set()
