"""Digests of the effect of a command, so that a later command has this effect and no other."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from clusterctl.errors import UsageError


def digest_of(value: Any) -> str:
    """Return the SHA-256, in hex, of a value of dicts, lists and plain values.

    It is the same in every process. Other values, such as paths, count as their text.
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def require_digest(found: str, wanted: str | None) -> None:
    """Raise UsageError if the digest of what a command would do now is not the wanted one.

    wanted: None: any.
    """
    if wanted is not None and wanted != found:
        raise plan_changed(f"the digest of its dry run is now {found}")


def plan_changed(reason: str) -> UsageError:
    """Return the error of a command that would do something else than its dry run has shown."""
    return UsageError(
        "the command would now do something else than its dry run has shown",
        code="plan-changed",
        where="--if-digest",
        why=reason,
        fix="pass --dry-run in place of --if-digest (to a tool of `mcp`: no token), and read what would "
        "happen now",
    )
