"""Compute Engine's metadata server: what it answers about an instance and its project.

Sources: cloud.google.com/compute/docs/metadata/querying-metadata, of the header, X-Forwarded-For and
`recursive`; .../docs/troubleshooting/troubleshoot-metadata-server, of 403 and 404 (2026-11).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

ROOT = "/computeMetadata/v1/"
Answer = tuple[int, bytes, Mapping[str, str]]  # status, body, headers
_FLAVOR = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}


def answer(tree: Mapping[str, Any], target: str, headers: Mapping[str, str]) -> Answer:
    """Return the answer to a GET.

    tree: {"instance": {"attributes": {KEY: TEXT}, ...}, "project": ...}. Empty: there is no such instance.
    target: a path with its query.
    headers: by their names in small letters.
    """
    if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
        return _text(403, "Missing Metadata-Flavor:Google header, or it came through a proxy.")
    path, query = urlsplit(target).path, dict(parse_qsl(urlsplit(target).query))
    found: Any = tree or None
    for name in filter(None, path.removeprefix(ROOT).split("/")):
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None or not path.startswith(ROOT) or (isinstance(found, str) and path.endswith("/")):
        return _text(404, f"{path} is not here.")
    if isinstance(found, str):
        return _text(200, found)
    if query != {"recursive": "true"}:
        return _text(501, "The stand-in shows folders as JSON, with all that is below them.")
    return 200, json.dumps(found).encode(), {**_FLAVOR, "Content-Type": "application/json"}


def _text(status: int, text: str) -> Answer:
    return status, text.encode(), {**_FLAVOR, "Content-Type": "application/text"}
