"""Answers for agents: compact JSON, of which long ones are read in parts, logs from their end."""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from clusterctl.errors import UsageError

# An answer's part is at most this long: about 4,000 tokens.
PART: Final = 16_000  # letters
# A job of many ranks has many long logs.
_KEPT: Final = 64 << 20  # letters


def compact(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False, default=str)


@dataclass
class Answers:
    """The rests of long answers. The last of them are kept while the server runs."""

    _rests: OrderedDict[str, tuple[str, bool]] = field(default_factory=OrderedDict)

    def answer(self, body: Mapping[str, Any]) -> str:
        """Return an answer, or its first part with the cursor of the rest. Of a job's long logs, it
        has the ends.
        """
        logs = body.get("logs")
        if isinstance(logs, list) and logs:
            body = {
                **body,
                "logs": [self._end_of(log, max(200, PART // (2 * len(logs)))) for log in logs],
            }
        return self._part(compact(body))

    def more(self, cursor: Any) -> str:
        """Return the next part of an answer, or of a log the part before. The same cursor always
        returns the same part.

        Raises UsageError: there is no such rest.
        """
        rest = self._rests.get(cursor) if isinstance(cursor, str) else None
        if rest is None:
            raise UsageError(
                "the cursor is unknown",
                code="agent-cursor",
                why=f"of the rests of long answers, this server keeps the last {_KEPT >> 20} million letters",
                fix="call the command again",
            )
        text, is_before = rest
        return self._part_before(text) if is_before else self._part(text)

    def _part(self, text: str) -> str:
        if len(text) <= PART:
            return text
        cursor = self._keep(text[PART:], is_before=False)
        rest = len(text) - PART
        return f"{text[:PART]}\n[cut: {rest} more letters; read on with more(cursor={cursor!r})]"

    def _part_before(self, text: str) -> str:
        if len(text) <= PART:
            return text
        return f"[cut: {self._words_before(text[:-PART])}]\n{text[-PART:]}"

    def _end_of(self, log: Mapping[str, Any], most: int) -> Mapping[str, Any]:
        text = log["text"]
        if len(text) <= most:
            return log
        return {**log, "cut": self._words_before(text[:-most]), "text": text[-most:]}

    def _words_before(self, text: str) -> str:
        cursor = self._keep(text, is_before=True)
        return f"{len(text)} letters before; read them with more(cursor={cursor!r})"

    def _keep(self, rest: str, *, is_before: bool) -> str:
        cursor = secrets.token_hex(4)
        self._rests[cursor] = rest, is_before
        while sum(len(text) for text, _ in self._rests.values()) > _KEPT:
            self._rests.popitem(last=False)
        return cursor
