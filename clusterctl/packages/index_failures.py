"""What pip and uv print about an index that they could not read: pip itself then says that there is
no such version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from clusterctl.errors import MachineError

_PAGE: Final = re.compile(r"^ *Could not fetch URL (.*) - skipping$", re.MULTILINE)
_NO_PACKAGE: Final = re.compile(r": 404 Client Error")
# Some indexes, such as PyTorch's, answer 403 for packages that they lack.
_AMBIGUOUS: Final = re.compile(r": 403 Client Error")
_REFUSED: Final = re.compile(r": 401 Client Error")
_NO_VERSION: Final = "(from versions: none)"
# Other lines about an index, or about a file of it that could not be downloaded.
_OTHERS: Final = (
    re.compile(r"^ *WARNING: (Skipping page .* got Content-Type: [^.\s]+)", re.MULTILINE),
    re.compile(r"^ *WARNING: (The repository located at .* is being ignored)", re.MULTILINE),
    re.compile(r"^ *ERROR: (HTTP error (?:40[137]|5\d\d) while getting \S+)", re.MULTILINE),
    re.compile(r"^pip\._vendor\.(?:requests|urllib3)\.exceptions\.\w+: (.*)", re.MULTILINE),
    re.compile(
        r"^error: (?:connection|proxy|ssl|incomplete)-\S+\n+\N{MULTIPLICATION SIGN} (.*\n.*)$",
        re.MULTILINE,
    ),
)
_OF_UV: Final = re.compile(r"^error: (Failed to (?:download|fetch)\b.*(?:\n +\S.*)*)", re.MULTILINE)
_MOST: Final = 3


def index_error(output: str, where: str) -> MachineError | None:
    """Return the error that an index could not be read. None: pip read all of them.

    output: the lines of a pip that failed. where: the requirements, for the message.
    """
    pages = [page for page in _PAGE.findall(output) if not _NO_PACKAGE.search(page)]
    if _NO_VERSION not in output or _NO_PACKAGE.search(output):
        pages = [page for page in pages if not _AMBIGUOUS.search(page)]
    others = [reason for pattern in _OTHERS for reason in pattern.findall(output)]
    return _error([*pages, *others], where)


def refusal(output: str, where: str) -> MachineError | None:
    """Return the error that an index refused the login, or was given none. None: no index did.

    output: the lines of a pip that succeeded. Another index may have a foreign package of the same
        name, which pip then takes.
    """
    return _error([page for page in _PAGE.findall(output) if _REFUSED.search(page)], where)


def uv_index_error(output: str, where: str) -> MachineError | None:
    """Return the error that an index could not be read. None: uv failed for another reason.

    output: what uv printed. where: the lock that uv read.
    """
    return _error(_OF_UV.findall(output), where, tool="uv")


def _error(lines: Iterable[str], where: str, tool: str = "pip") -> MachineError | None:
    reasons = list(dict.fromkeys(lines))[:_MOST]
    if not reasons:
        return None
    return MachineError(
        "a package index can't be read",
        code="index-unreadable",
        where=where,
        why=f"{tool} says: " + "; ".join(" ".join(reason.split()) for reason in reasons),
        fix=f"check the network, and the index's address and password ({tool}'s settings, the file's "
        "options and ~/.netrc), and run the command again",
    )
