"""Reading files of accounts and of the kernel."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from clusterctl.util.remote_rights import MOST_BYTES, read_regular


def test_read_regular_reads_a_kernel_setting() -> None:
    """The kernel refuses a single large read of it."""
    assert int(read_regular("/proc/sys/vm/overcommit_memory")) in {0, 1, 2}


@pytest.mark.parametrize("size", [0, 1, (1 << 16) + 1, MOST_BYTES])
def test_read_regular_returns_the_whole_file(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert read_regular(str(tmp_path / "file")) == content


def test_read_regular_rejects_a_larger_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(MOST_BYTES + 1))
    with pytest.raises(OSError, match="regular file") as caught:
        read_regular(str(tmp_path / "file"))
    assert caught.value.errno == errno.EINVAL


def test_read_regular_rejects_a_pipe_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="regular file"):
        read_regular(str(tmp_path / "pipe"))


def test_read_regular_follows_a_link_only_if_it_may(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(str(tmp_path / "link")) == b"x"
    with pytest.raises(OSError, match="link") as caught:
        read_regular(str(tmp_path / "link"), follow=False)
    assert caught.value.errno == errno.ELOOP
