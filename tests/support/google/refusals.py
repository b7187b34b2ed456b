"""Refusals of Google's APIs, from ``refusals.toml``: as JSON, and as the provider prints them.

A fault is ``{"kind", "type", "name", "on", "times", "seconds", "played"}`` in the cloud's file: it
plays when a resource of ``type`` whose name matches is made or deleted, as ``on`` says, ``times``
times (null: for ever). Its kind is a refusal of the book, or another deed: ``slow`` waits, and
``crash`` ends the provider, both when Google has begun to make it; ``no_credentials`` is told when
the provider is configured.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from string import Template
from typing import Any

_STATUS = {
    400: "INVALID_ARGUMENT",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    412: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
}


@dataclass(frozen=True)
class Refusal:
    """One entry of the book; its head says what the fields are."""

    name: str
    source: str
    date: date
    message: str
    code: str
    cause: str
    fix: str
    status: int = 0
    reason: str = ""
    details: str = "[]"
    operation: str | None = None
    type: str = "google_compute_instance"
    on: str = "create"
    before: str | None = None
    says: str = ""
    made: bool = False
    transient: bool = False
    later: bool = False

    def body(self, facts: Mapping[str, str]) -> dict[str, Any]:
        """The JSON of the answer: an error, or an operation that ended with one."""
        message = filled(self.message, facts)
        if self.operation is not None:
            errors = [{"code": self.operation, "message": message}]
            return {
                "kind": "compute#operation",
                "name": "x",
                "status": "DONE",
                "error": {"errors": errors},
            }
        return error_body(
            self.status, message, self.reason, json.loads(filled(self.details, facts))
        )

    def fill_message(self, facts: Mapping[str, str]) -> str:
        """What Google's provider prints: Error() of google-api-go-client, or an operation's."""
        if self.says:
            return filled(self.says, facts)
        word = self.type.removeprefix("google_compute_")
        thing = word if word == "instance" else word.title()
        waits = self.operation is not None
        before = f"Error waiting for {thing} to create: " if waits else f"Error creating {thing}: "
        before = before if self.before is None else filled(self.before, facts)
        if waits:
            return f"{before}{filled(self.message, facts)}"
        error = self.body(facts)["error"]
        details = ""
        if "details" in error:
            # As Go writes it.
            written = json.dumps(error["details"], indent=2, sort_keys=True)
            details = f"\nDetails:\n{written.replace('&', chr(92) + 'u0026')}\n"
        reason = f", {self.reason}" if self.reason else ""
        return f"{before}googleapi: Error {self.status}: {error['message']}{details}{reason}"


def error_body(
    status: int, message: str, reason: str = "", details: Sequence[Any] = ()
) -> dict[str, Any]:
    """The JSON of an error."""
    error: dict[str, Any] = {
        "code": status,
        "message": message,
        "status": _STATUS.get(status, "UNAVAILABLE"),
    }
    if reason:
        error["errors"] = [{"message": message, "domain": "global", "reason": reason}]
    if details:
        error["details"] = details
    return {"error": error}


def filled(text: str, facts: Mapping[str, str]) -> str:
    return Template(text).safe_substitute(facts)


_BOOK = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text())
REFUSALS: Mapping[str, Refusal] = {name: Refusal(name, **entry) for name, entry in _BOOK.items()}


NUMBER = "123456789012"  # of every project
TEXTS: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("faults.toml").read_text()
)
DEEDS = frozenset({"slow", "crash", "no_credentials"})
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
        "role": value.get("role"),
        "member": value.get("member"),
        "email": (value.get("service_account") or [{}])[0].get("email"),
        **more,
    }
    if fault in REFUSALS:
        return REFUSALS[fault].fill_message({name: str(fact) for name, fact in facts.items()})
    return TEXTS["rules"][fault].format_map(facts)
