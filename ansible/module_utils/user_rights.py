"""File access with the rights of a folder's owner, because root must not follow links that a job
created.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ansible.module_utils.remote_rights import acting_as

# Uids from here on belong to people, except the range of Debian, systemd and `nobody`.
ORDINARY = 1000
SYSTEM = range(60514, 65536)


def is_person_uid(uid: int) -> bool:
    """Return whether a uid is in the range of people's accounts, not of system accounts."""
    return uid >= ORDINARY and uid not in SYSTEM


def owner_above(path: str) -> os.stat_result | None:
    """Return the status of the first folder above ``path``, from the root, that belongs to a
    person, if any.

    Links above this folder belong to root.
    """
    for folder in reversed(Path(path).parents):
        try:
            status = folder.stat()
        except OSError:
            return None
        if is_person_uid(status.st_uid):
            return status
    return None


@contextmanager
def rights_for(path: str) -> Iterator[None]:
    """Run the body with the rights of the owner of the home that contains the path; elsewhere, as
    root.
    """
    person = owner_above(path)
    with acting_as(person.st_uid, person.st_gid) if person else acting_as(0, 0):
        yield
