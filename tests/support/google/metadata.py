"""Compute Engine's metadata server: what it answers about an instance and its project.

    answer(read, "/computeMetadata/v1/instance/attributes/?recursive=true", headers)

``read`` gives {"instance": {"attributes": {KEY: TEXT}, ...}, "project": {"attributes": {}, ...}} as it is
now, or {} where there is no such instance. Sources: cloud.google.com/compute/docs/metadata/querying-metadata,
of the header, X-Forwarded-For, `recursive`, `alt`, ETags, `wait_for_change`, `last_etag` and `timeout_sec`;
cloud.google.com/compute/docs/troubleshooting/troubleshoot-metadata-server, of 400, 403 and 404 (2026-11);
metadata/metadata.go of GoogleCloudPlatform/guest-agent, of how an agent watches.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
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
    if path == "/":
        return _text("computeMetadata/\n")
    form = query.get("alt", "json" if query.get("recursive") == "true" else "text")
    if form not in ("json", "text"):
        return _error(400, f"alt={form} is no format.")
    found = _entry(read(), path)
    if query.get("wait_for_change") == "true" and found is not None:
        before = query.get("last_etag") or _etag(found)
        timeout_s = float(query["timeout_sec"]) if "timeout_sec" in query else None
        for _ in (clock or Clock()).polls(timeout_s, first_s=_LOOK_EVERY_S, longest_s=_LOOK_EVERY_S):
            found = _entry(read(), path)
            if found is None or _etag(found) != before:
                break
    if found is None:
        return _error(404, f"{path} is not here.")
    if not isinstance(found, str) and not path.endswith("/"):
        return 301, b"", {**_FLAVOR, "Location": f"{path}/"}
    return _shown(found, path, form, recursive=query.get("recursive") == "true")


def _entry(tree: Mapping[str, Any], path: str) -> Any:
    """The text or the folder at a path; None where there is none."""
    if not path.startswith(ROOT):
        return None
    found: Any = tree or None
    for name in filter(None, path.removeprefix(ROOT).split("/")):
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if isinstance(found, str) and path.endswith("/") else found


def _shown(found: Any, path: str, form: str, *, recursive: bool) -> Answer:
    etag = {"ETag": _etag(found)}
    if isinstance(found, str):
        if found[:1] == "{":  # such as a token, which is JSON
            return _json(found, etag)
        return _json(json.dumps(found), etag) if form == "json" else _text(found, etag)
    if recursive and form == "json":
        return _json(json.dumps(found if path.endswith("/attributes/") else _camel(found)), etag)
    folder = (f"{name}{'' if isinstance(one, str) else '/'}" for name, one in found.items())
    return _text("".join(f"{line}\n" for line in (_flat(found) if recursive else folder)), etag)


def _flat(found: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for name, one in found.items():
        if isinstance(one, str):
            yield f"{place}{name} {one}"
        else:
            yield from _flat(one, f"{place}{name}/")


def _camel(found: Any) -> Any:
    """As it is in JSON: `project-id` is `projectId` there; keys of attributes are as somebody made them."""
    if not isinstance(found, Mapping):
        return found
    return {
        re.sub("-(.)", lambda letter: letter[1].upper(), name): one if name == "attributes" else _camel(one)
        for name, one in found.items()
    }


def _etag(found: Any) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _text(text: str, more: Mapping[str, str] | None = None) -> Answer:
    return 200, text.encode(), {**_FLAVOR, **(more or {}), "Content-Type": "application/text"}


def _json(text: str, more: Mapping[str, str]) -> Answer:
    return 200, text.encode(), {**_FLAVOR, **more, "Content-Type": "application/json"}


def _error(status: int, why: str) -> Answer:
    return status, why.encode(), {**_FLAVOR, "Content-Type": "text/html; charset=UTF-8"}
