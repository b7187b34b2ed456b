"""Tokens: a dry run gives one, and with it exactly that call is carried out, once.

They are files in the state folder, so that neither another server nor a restart carries one out
again. A file has the hash of its token as its name.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from clusterctl.agent.journal import CallBound
from clusterctl.errors import UsageError
from clusterctl.state.workspace import write_atomic
from clusterctl.util.disk import translating_write_errors

VALID_S: Final = 600
# Files of tokens are removed after this time. Until then, a replay gets its own error.
_KEPT_S: Final = 2 * 86400
_FOLDER: Final = "tokens"
_AGAIN: Final = "call the command without a token: its dry run gives a new one"


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """The call that a token carries out.

    digest: that of the dry run. cluster: the name and the id of the cluster then.
    accounts: the Slurm accounts that its jobs name.
    """

    verb: str
    arguments: Mapping[str, Any]
    project: str
    cluster: str
    digest: str
    bound: CallBound
    accounts: tuple[str, ...] = ()


class Tokens:
    """The tokens in a folder. The caller holds the journal's lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER

    def give(self, planned: PlannedCall) -> str:
        """Return a new token that carries out this call."""
        self._remove_old()
        token = secrets.token_urlsafe(18)
        with translating_write_errors(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        row = {"expires": time.time() + VALID_S, **asdict(planned)}
        write_atomic(self._path(token), json.dumps(row))
        return token

    def take(
        self, token: str, verb: str, arguments: Mapping[str, Any], project: str
    ) -> PlannedCall:
        """Return the call of a token, and let nobody use the token again.

        Raises:
            UsageError: the token is unknown, used, expired, or for another call. The token of
                another call stays valid.
        """
        row: Any = None
        with suppress(OSError, ValueError):
            row = json.loads(self._path(token).read_bytes())
        if not isinstance(row, dict):
            raise UsageError(
                "the token is unknown",
                code="agent-token-unknown",
                why="no dry run on this machine gave it in the last days",
                fix=_AGAIN,
            )
        if row.get("used"):
            raise UsageError(
                "the token was used",
                code="agent-token-used",
                why="a token carries out its call once, even if the answer was lost",
                fix=f"look at what it did with `jobs` or `status`; {_AGAIN}",
            )
        if time.time() > row["expires"]:
            raise UsageError(
                "the token has expired",
                code="agent-token-expired",
                why=f"it was valid for {VALID_S // 60} minutes",
                fix=_AGAIN,
            )
        asked = (verb, json.loads(json.dumps(dict(arguments))), project)
        if asked != (row["verb"], row["arguments"], row["project"]):
            raise UsageError(
                "the token is for another call",
                code="agent-token-other",
                why=f"its dry run was of `{row['verb']}` with other arguments, or in another folder",
                fix=f"pass the arguments of its dry run unchanged, or {_AGAIN}",
            )
        write_atomic(self._path(token), json.dumps({**row, "used": time.time()}))
        return PlannedCall(
            verb=row["verb"],
            arguments=row["arguments"],
            project=row["project"],
            cluster=row["cluster"],
            digest=row["digest"],
            bound=CallBound(**row["bound"]),
            accounts=tuple(row["accounts"]),
        )

    def _path(self, token: str) -> Path:
        name = hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
        return self._folder / f"{name}.json"

    def _remove_old(self) -> None:
        with suppress(OSError):
            for path in self._folder.glob("*.json"):
                if time.time() - path.stat().st_mtime > _KEPT_S:
                    path.unlink(missing_ok=True)
