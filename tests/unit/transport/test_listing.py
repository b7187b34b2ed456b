"""Lists of files that no honest host sends: all are refused before anything is written."""

from __future__ import annotations

import base64

import pytest

from clusterctl.errors import TransferError
from clusterctl.transport import get
from clusterctl.transport.get import parse_listing
from tests.support.messages import refused


def row(path: bytes, kind: str = "file", size: object = 1, mtime: object = 1) -> bytes:
    return f"{kind} {base64.b64encode(path).decode()} {0o644} {mtime} {size} 1 ".encode()


FOLDER = row(b"a", "folder")


@pytest.mark.parametrize(
    "lines",
    [
        [FOLDER, row(b"a/../b")],
        [FOLDER, row(b"a/./b")],
        [FOLDER, row(b"a/.")],
        [row(b"/")],
        [row(b"//a")],
        [FOLDER, row(b"a/\0")],
        [row(b"a", "left"), row(b"a/b")],
        [row(b"a/b"), FOLDER],
        [row(b"a", "link"), FOLDER],
        [row(b"a", "link"), row(b"a", "link")],
        [FOLDER, row(b"a/b", "folder"), row(b"a/b/c"), row(b"a/b/c", "folder")],
        [row(b"x" * 256, "folder"), row(b"x" * 256 + b"/a")],
        [row(b"/etc", "left")],
        [row(b"a//b", "left")],
        [row(b"a", "LEFT")],
        [row(b"a", mtime=1 << 63)],
        [row(b"a", mtime=(-1 << 63) - 1)],
        [row(b"a", size="1e3")],
        [b"file YQ 0 0 0 0 "],  # base64 that ends too early
        [b"alive "],
        [b" YQ== 0 0 0 0 "],
    ],
)
def test_listing_that_no_honest_host_sends_is_refused(lines: list[bytes]) -> None:
    with refused("internal/answer", TransferError) as caught:
        parse_listing(lines)
    assert caught.value.why.isprintable()


def test_listing_of_long_names_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of 255 bytes in deep folders would fill the memory long before the list has too many
    lines.
    """
    monkeypatch.setattr(get, "_MOST_BYTES", 100)
    with refused("internal/answer", TransferError):
        parse_listing([row(b"%03d" % number * 80) for number in range(4)])


def test_listing_of_an_honest_host_is_accepted() -> None:
    lines = [b"alive", FOLDER, row(b"a/b"), row(b"a/c", "left"), row(b"...")]
    entries, left = parse_listing(lines)
    assert [entry.path for entry in entries] == [b"a", b"a/b", b"..."]
    assert [entry.path for entry in left] == [b"a/c"]
