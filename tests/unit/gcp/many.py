"""Many copies of the Terraform module in one plan, because ten plans cost little more than one.

The copies share one provider, so they come without their own `providers.tf`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterctl.util.assets import data_folder
from tests.unit.gcp.module import Module

Variables = Mapping[str, Any]
ROOT = {
    "terraform": {"required_providers": {"google": {"source": "hashicorp/google"}}},
    "provider": {"google": {"project": "my-project"}},
}


def copies(
    folder: Path,
    asked: Mapping[str, Variables],
    *,
    files: str = "**/*.tf",
) -> Module:
    """Write a configuration with a copy of the module for each name and its variables. Default
    files: the whole module.
    """
    source = folder / "source"
    module = data_folder("terraform") / "gcp"
    for name in asked:
        for path in module.glob(files):
            copy = source / name / path.relative_to(module)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        (source / name / "providers.tf").unlink(missing_ok=True)
    calls = {name: {"source": f"./{name}", **values} for name, values in asked.items()}
    (source / "main.tf.json").write_text(json.dumps({**ROOT, "module": calls}))
    return Module(folder, source=source)


def planned(plan: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return address -> planned values of the resources of a copy, without values that are known
    only after apply.
    """
    modules = {
        each["address"]: each for each in plan["planned_values"]["root_module"]["child_modules"]
    }
    prefix = f"module.{name}."
    return {
        each["address"].removeprefix(prefix): each["values"]
        for each in sorted(_all_in(modules[prefix[:-1]]), key=lambda each: str(each["address"]))
    }


def changes(plan: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the changes of the resources of a copy, as if it were the only copy."""
    prefix = f"module.{name}."
    own = [each for each in plan["resource_changes"] if each["address"].startswith(prefix)]
    alone: list[dict[str, Any]] = json.loads(json.dumps(own).replace(prefix, ""))
    return alone


def _all_in(module: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from module.get("resources", ())
    for child in module.get("child_modules", ()):
        yield from _all_in(child)
