"""The messages of uv about an index that it could not read."""

from __future__ import annotations

import re
from typing import Final

from clusterctl.errors import MachineError
from clusterctl.util.process import Result

_REFUSED: Final = re.compile(
    r"status (401 Unauthorized) for: (\S+)|"
    r"index URL \((\S+)\) could not be queried .*?\((401 Unauthorized|403 Forbidden)\)"
)
_FAILED: Final = re.compile(r"(Failed to (?:fetch|download(?! and build))\b.*(?:\n +\S.*)*)")
_LONGEST_REASON: Final = 1000


def index_error(result: Result, traced: str, where: str) -> MachineError | None:
    """Return an error if uv could not read a package index; None if uv read all that it needed.

    result, traced: of ``run_uv``. where: the list of packages. An index that refuses the login is an
    error even if another one has a package of the name. A failed request is an error only if uv
    needed its answer.
    """
    output = traced + result.stderr
    reasons = [" ".join(filter(None, found)) for found in _REFUSED.findall(output)]
    if result.rc != 0:
        reasons = reasons or _FAILED.findall(output)[:1]
    if not reasons:
        return None
    text = " ".join("; ".join(dict.fromkeys(reasons)).split())
    return MachineError(
        "a package index can't be read",
        code="unreachable",
        about="index",
        where=where,
        why=f"uv says: {text[:_LONGEST_REASON]}",
        fix="check the network, and the index's address and password (settings of uv and pip, the "
        "file's options, ~/.netrc and keyring), and run the command again",
    )
