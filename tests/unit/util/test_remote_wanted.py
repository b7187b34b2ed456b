"""The record on a host of what `up` wants there."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

import pytest

from clusterctl.util.remote_wanted import content_mark, mark_of_file, read_wanted, update_wanted


def test_content_mark_is_of_the_checksum_that_ansible_reports() -> None:
    assert hashlib.sha1(b"abc").hexdigest().startswith(content_mark(b"abc"))  # noqa: S324
    assert mark_of_file("a1", 0o640, 3, 4) == "a1 640 3:4"


def test_update_wanted_keeps_the_marks_of_other_files(tmp_path: Path) -> None:
    path = str(tmp_path / "wanted.json")
    assert read_wanted(path) == {}
    assert update_wanted(
        {"marks": {"file /a": "1", "file /b": "1"}, "cluster": {"inputs": "x", "by": "a"}}, path
    )
    assert update_wanted({"marks": {"file /b": "2"}}, path)
    assert not update_wanted({"marks": {"file /b": "2"}}, path)
    assert update_wanted({"cluster": {"inputs": "x"}}, path)
    assert read_wanted(path) == {
        "marks": {"file /a": "1", "file /b": "2"},
        "cluster": {"inputs": "x"},
    }
    assert stat.S_IMODE((tmp_path / "wanted.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "[1]", '{"marks"'])
def test_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wanted.json"
    path.write_text(text)
    assert read_wanted(str(path)) == {}
    update_wanted({"cluster": {"inputs": "x"}}, str(path))
    assert json.loads(path.read_text()) == {"marks": {}, "cluster": {"inputs": "x"}}
