"""What the program beside a job's logs tells of their file system."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from clusterctl.scheduler.ends.remote_logs import is_full


@pytest.mark.parametrize(
    ("differs", "full"),
    [
        ({}, False),
        # Only root may use the rest.
        ({"f_bavail": 0}, True),
        ({"f_favail": 0}, True),
        # Some file systems do not count files.
        ({"f_files": 0, "f_favail": 0}, False),
    ],
)
def test_file_system_is_full_if_users_have_no_room(
    monkeypatch: pytest.MonkeyPatch, differs: dict[str, int], full: bool
) -> None:
    room = {"f_frsize": 4096, "f_bfree": 9, "f_bavail": 9, "f_files": 9, "f_favail": 9, **differs}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**room))
    assert is_full("/") is full
