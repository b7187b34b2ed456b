"""Compute Engine's metadata server: what it answers about an instance and its project.

    answer(read, "/computeMetadata/v1/instance/attributes/?recursive=true", headers)

``read`` gives {"instance": {"attributes": {KEY: TEXT}, ...}, "project": {"attributes": {}, ...}} as it is
now, or {} where there is no such instance. Sources: cloud.google.com/compute/docs/metadata/querying-metadata,
of the header, X-Forwarded-For, `recursive`, ETags, `wait_for_change`, `last_etag` and `timeout_sec`;
cloud.google.com/compute/docs/troubleshooting/troubleshoot-metadata-server, of 403 and 404 (2026-11);
metadata/metadata.go of GoogleCloudPlatform/guest-agent, of how an agent watches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from clusterctl.util.progress import Clock

ROOT = "/computeMetadata/v1/"
Answer = tuple[int, bytes, Mapping[str, str]]  # status, body, headers
_FLAVOR = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
_LOOK_EVERY_S = 0.2


def answer(
    read: Callable[[], Mapping[str, Any]],
    target: str,
    headers: Mapping[str, str],
    clock: Clock | None = None,
) -> Answer:
    """What a GET of ``target``, a path with its query, gets; ``headers`` by their names in small letters."""
    if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
        return _error(403, "Missing Metadata-Flavor:Google header, or it came through a proxy.")
    path, query = urlsplit(target).path, dict(parse_qsl(urlsplit(target).query))
    found = _entry(read(), path)
    if query.get("wait_for_change") == "true" and found is not None:
        before, timeout_s = query["last_etag"], float(query["timeout_sec"])
        for _ in (clock or Clock()).polls(timeout_s, first_s=_LOOK_EVERY_S, longest_s=_LOOK_EVERY_S):
            found = _entry(read(), path)
            if found is None or _etag(found) != before:
                break
    if found is None:
        return _error(404, f"{path} is not here.")
    if isinstance(found, str):
        return 200, found.encode(), {**_FLAVOR, "ETag": _etag(found), "Content-Type": "application/text"}
    if query.get("recursive") != "true" or query.get("alt", "json") != "json":
        return _error(501, "The stand-in shows folders as JSON, with all that is below them.")
    shown = json.dumps(found).encode()
    return 200, shown, {**_FLAVOR, "ETag": _etag(found), "Content-Type": "application/json"}


def _entry(tree: Mapping[str, Any], path: str) -> Any:
    """The text or the folder at a path; None where there is none."""
    if not path.startswith(ROOT):
        return None
    found: Any = tree or None
    for name in filter(None, path.removeprefix(ROOT).split("/")):
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if isinstance(found, str) and path.endswith("/") else found


def _etag(found: Any) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _error(status: int, why: str) -> Answer:
    return status, why.encode(), {**_FLAVOR, "Content-Type": "text/html; charset=UTF-8"}
