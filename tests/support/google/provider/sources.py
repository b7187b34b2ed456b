"""Data sources: what Google would tell of an image, zones, the project, the caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.google.provider import faults, schema, world

EMPTY: Mapping[str, Any] = {"string": "", "number": 0, "bool": False, "map": {}, "list": [], "set": []}


def look_up(block: schema.Block, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data source's attributes, from what it was asked with."""
    project = config.get("project") or settings.get("project")
    region = config.get("region") or settings.get("region")
    name = config.get("name") or f"{config.get('family')}-v20250101"
    identifier = f"projects/{project}/global/images/{name}" if "family" in config else f"projects/{project}"
    known = {
        "id": identifier,
        "self_link": world.COMPUTE + identifier,
        "project": project,
        "region": region,
        "zone": settings.get("zone"),
        "number": faults.NUMBER,
        "name": name,
        "names": [f"{region}-{letter}" for letter in "abcf"],
    }

    def compute(trail: schema.Trail, of_type: Any) -> Any:
        kind = of_type if isinstance(of_type, str) else of_type[0]
        return known.get(str(trail[-1]), EMPTY[kind])

    return schema.filled(block, schema.with_unknowns(block, config, None), compute)
