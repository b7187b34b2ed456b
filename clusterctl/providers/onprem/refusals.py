"""What ssh and sudo say when they refuse, as typed errors; the rules are data."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from clusterctl.errors import Failure, ProvisionError
from clusterctl.spec.base import Model

_RULES: Final = Path(__file__).with_name("data") / "refusals.toml"
NO_WAY_IN: Final = "no way in"
_OFFERED: Final = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


class Rule(Model):
    """One entry of refusals.toml."""

    code: str
    match: str
    cause: str
    fix: str
    retryable: bool = False


class AccessError(ProvisionError):
    """A machine does not let its owner in, or not to root."""

    def __init__(self, host: str, failure: Failure) -> None:
        super().__init__(NO_WAY_IN, why=failure.cause, fix=failure.fix, host=host, failures=(failure,))
        self.refusal = failure.code


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, in their order."""
    return TypeAdapter(tuple[Rule, ...]).validate_python(tomllib.loads(_RULES.read_text())["rule"])


def explained(stderr: str, *, host: str, user: str, address: str) -> AccessError | None:
    """What ssh or sudo means by that; None where no rule knows it."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    offered = _OFFERED.search(stderr)
    words: Mapping[str, str] = {
        "host": host,
        "user": user,
        "address": address,
        "said": lines[-1].strip() if lines else "",
        "offered": offered[0] if offered else "another",
    }
    for rule in rules():
        if re.search(rule.match, stderr):
            cause, fix = rule.cause.format(**words), rule.fix.format(**words)
            return AccessError(host, Failure(rule.code, cause, host, "access", fix, rule.retryable))
    return None
