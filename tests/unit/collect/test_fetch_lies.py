"""Fetching from a cluster that says or sends what can't be."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.collect.manifest import parse_manifest, shown_path
from clusterctl.errors import CollectError
from clusterctl.transport.base import Result
from clusterctl.transport.local import LocalTransport
from tests.support.fetched import Talk, content, fetch


def row(path: bytes, data: bytes = b"x", **fields) -> str:
    told = {"path": base64.b64encode(path).decode(), "size": len(data)}
    return json.dumps(told | fields) + "\n"


class Lying(LocalTransport):
    """A cluster that says and sends what it likes."""

    def __init__(self, listing: str, sent: bytes) -> None:
        self._listing = listing
        self._sent = sent

    def run(self, *_argv, **_options) -> Result:
        return Result(0, self._listing, "")

    @contextmanager
    def converse(self, argv, *, bulk=False):
        rest = [self._sent]
        with super().converse(["true", *argv], bulk=bulk) as real:
            lying = Talk(real, lambda _: rest.pop() if rest else b"")
            lying.send = lying.finish = lambda *_: None
            yield lying


@pytest.mark.parametrize(
    "path",
    [b"/etc/passwd", b"../x", b"a/../../x", b"a/..", b".", b"", b"a//b", b"a/", b"a\0b", b"./a", b"b" * 256],
)
def test_paths_that_lead_elsewhere_are_refused(path, remote, tree):
    with pytest.raises(CollectError, match="makes no sense") as caught:
        fetch(remote, tree, Lying(row(path), b""))
    assert caught.value.why.isprintable()
    assert content(tree) == {}


@pytest.mark.parametrize(
    "listing",
    [
        row(b"a") + row(b"a"),
        row(b"a") + row(b"a/b"),
        row(b"a", size=-1),
        row(b"a", size="many"),
        row(b"a", size=float("inf")),
        "[" * 60_000 + "\n",
        '{"path": "not base64!"}\n',
        "[]\n",
        "\x1b[31m\n",
    ],
)
def test_listings_that_contradict_themselves_are_refused(listing, remote, tree):
    with pytest.raises(CollectError, match="makes no sense"):
        fetch(remote, tree, Lying(listing, b""))


def header(size: int) -> bytes:
    return struct.pack(">q", size)


def file_of(data: bytes, *, sha256: bytes | None = None, still: bytes = b"\1") -> bytes:
    return header(len(data)) + data + still + (sha256 or hashlib.sha256(data).digest())


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (file_of(b"x") + b"more", "other data than it said"),
        (header(10**12) + b"x", "other data than it said"),
        (header(-2), "other data than it said"),
        (header(1), "less than it said"),
        (file_of(b"x")[:-1], "less than it said"),
        (b"", "less than it said"),
        (header(1)[:4], "less than it said"),
    ],
)
def test_a_cluster_that_sends_other_than_it_said(sent, message, remote, tree):
    with pytest.raises(CollectError, match=message):
        fetch(remote, tree, Lying(row(b"a"), sent))


@pytest.mark.parametrize("sent", [file_of(b"y", sha256=bytes(32)), file_of(b"y", still=b"\0")])
def test_a_wrong_content_is_never_taken(sent, remote, tree):
    with pytest.raises(CollectError, match="keep changing"):
        fetch(remote, tree, Lying(row(b"a"), sent))
    assert content(tree) == {}


def test_a_run_that_does_not_fit_the_disk(remote, tree):
    with pytest.raises(CollectError, match="MiB are free"):
        fetch(remote, tree, Lying(row(b"a", size=10**18), b""))


@given(st.binary(min_size=1, max_size=40))
def test_no_path_gets_out_of_the_folder(path):
    try:
        manifest = parse_manifest(row(path), "/f")
    except CollectError:
        return
    (file,) = manifest.files.values()
    place = os.path.normpath(b"/out/tree/" + file.local)
    assert place == b"/out/tree/" + file.local
    assert shown_path(path).isprintable()
