"""Answers for agents: compact JSON, of which long ones are read in parts."""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from clusterctl.errors import UsageError

# An answer's part is at most this long: about 4,000 tokens.
PART: Final = 16_000  # letters
_KEPT: Final = 16


def compact(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False, default=str)


@dataclass
class Answers:
    """The rests of long answers. The last few are kept while the server runs."""

    _rests: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def first(self, text: str) -> str:
        """Return an answer, or its first part with the cursor of the rest."""
        if len(text) <= PART:
            return text
        cursor = secrets.token_hex(4)
        self._rests[cursor] = text[PART:]
        while len(self._rests) > _KEPT:
            self._rests.popitem(last=False)
        rest = len(text) - PART
        return f"{text[:PART]}\n[cut: {rest} more letters; read on with more(cursor={cursor!r})]"

    def more(self, cursor: Any) -> str:
        """Return the next part of an answer. The same cursor always returns the same part.

        Raises UsageError: there is no such rest.
        """
        rest = self._rests.get(cursor) if isinstance(cursor, str) else None
        if rest is None:
            raise UsageError(
                "the cursor is unknown",
                code="agent-cursor",
                why=f"the rests of the last {_KEPT} long answers of this server are kept",
                fix="call the command again",
            )
        return self.first(rest)
