"""Which fault plays when, and what Google's provider says then.

A fault is ``{"kind", "type", "name", "on", "times", "seconds", "played"}`` in the file: it plays when a
resource of ``type`` whose name matches is made or deleted, as ``on`` says, ``times`` times (null: for ever).
Its kind is a refusal of the rule book, ``../refusals.toml``, or another deed: ``slow`` waits;
``no_credentials`` is told when the provider is configured.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.support.google.refusals import REFUSALS

NUMBER = "123456789012"  # of every project
TEXTS: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
DEEDS = frozenset({"slow", "no_credentials"})
MADE = frozenset(name for name, each in REFUSALS.items() if each.made)
KINDS = DEEDS | {*REFUSALS}


def due(world: dict[str, Any], op: str, kind: str, name: str) -> Mapping[str, Any] | None:
    """The fault that plays now, counted as played."""
    for fault in world["faults"]:
        plays = (fault["on"], fault["type"]) == (op, kind) and fnmatch(name, fault["name"])
        if plays and (fault["times"] is None or fault["played"] < fault["times"]):
            fault["played"] += 1
            return dict(fault)
    return None


def text_of(fault: str, kind: str, value: Mapping[str, Any], **more: str) -> str:
    """The message of a fault about this resource."""
    word = kind.removeprefix("google_compute_")
    zone = value.get("zone") or "us-central1-a"
    facts = {
        "thing": word if word == "instance" else word.title(),
        "word": word,
        "number": NUMBER,
        "project": value.get("project"),
        "zone": zone,
        "region": value.get("region") or zone.rsplit("-", 1)[0],
        "metric": "NVIDIA_L4_GPUS" if str(value.get("machine_type")).startswith("g2-") else "CPUS",
        "name": value.get("name"),
        "email": (value.get("service_account") or [{}])[0].get("email"),
        **more,
    }
    if fault in REFUSALS:
        return REFUSALS[fault].said({name: str(fact) for name, fact in facts.items()})
    return TEXTS["rules"][fault].format_map(facts)
