"""Many copies of the module in one run of Terraform: ten plans cost little more than one.

The copies share one provider, so they come without their own `providers.tf`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.util.assets import asset
from tests.support.google.module import Module

Variables = Mapping[str, Any]
ROOT = {
    "terraform": {"required_providers": {"google": {"source": "hashicorp/google"}}},
    "provider": {"google": {"project": "my-project"}},
}


@dataclass(frozen=True)
class Edit:
    """A change of one file of the module: ``old``, which is there once, becomes ``new``."""

    file: str
    old: str
    new: str

    def __call__(self, module: Path) -> None:
        path = module / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.file} has {self.old!r} {text.count(self.old)} times"
        path.write_text(text.replace(self.old, self.new))


def copies(folder: Path, asked: Mapping[str, Variables], edits: Mapping[str, Edit] | None = None) -> Module:
    """A configuration that has the module once for each name, with these variables and that edit."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in asked:
        shutil.copytree(asset("terraform") / "gcp", source / name)
        (source / name / "providers.tf").unlink()
        if edits and name in edits:
            edits[name](source / name)
    calls = {name: {"source": f"./{name}", **values} for name, values in asked.items()}
    (source / "main.tf.json").write_text(json.dumps({**ROOT, "module": calls}))
    return Module(folder, source=source)


def planned(plan: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Address -> the planned values of the resources of one copy, without what is known after apply only."""
    modules = {each["address"]: each for each in plan["planned_values"]["root_module"]["child_modules"]}
    prefix = f"module.{name}."
    return {
        each["address"].removeprefix(prefix): each["values"]
        for each in sorted(_all_in(modules[prefix[:-1]]), key=lambda each: str(each["address"]))
    }


def _all_in(module: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from module.get("resources", ())
    for child in module.get("child_modules", ()):
        yield from _all_in(child)
