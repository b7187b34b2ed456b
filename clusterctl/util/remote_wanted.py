"""The record on a host of what `up` wants there. For Ansible's modules and programs on hosts as well:
standard library only, Python 3.6.

Its part `marks` has the wanted mark of each file that clusterctl has written to the host, made from what
was to be written, never from what was found. On the controller, `cluster` has what is the same for all
hosts, as ``clusterctl.cluster.converge`` writes it, and `trial` when nodes were last tried, and what
failed.
"""

import hashlib
import json
import os
from typing import Any, Dict

WANTED = "/opt/clusterctl/wanted.json"


def content_mark(content: bytes) -> str:
    """Return the start of the checksum that Ansible's modules report of a file: SHA-1."""
    return short_checksum(hashlib.sha1(content).hexdigest())  # noqa: S324 - against accidents


def short_checksum(checksum: str) -> str:
    return checksum[:16]


def mark_of_file(content: str, mode: int, uid: int, gid: int) -> str:
    """Return the mark of a whole file. content: from ``content_mark``."""
    return f"{content} {mode:o} {uid}:{gid}"


def read_wanted(path: str = WANTED) -> Dict[str, Any]:
    """Return the record; {} without a record, or if it is damaged."""
    try:
        with open(path) as file:
            record = json.load(file)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def update_wanted(changes: Dict[str, Any], path: str = WANTED) -> bool:
    """Replace these parts; of `marks`, only the marks that are given. Return whether that changes the
    record.
    """
    before = read_wanted(path)
    marks = dict(before.get("marks") or {}, **changes.get("marks", {}))
    after = dict(before, **dict(changes, marks=marks))
    if after == before:
        return False
    new = f"{path}.new"
    if os.path.lexists(new):
        os.unlink(new)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(after, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    return True
