"""Fetching from a cluster that says or sends what can't be."""

from __future__ import annotations

import base64
import hashlib
import os
import struct
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.errors import CollectError, TransferError
from clusterctl.runs.fetch import ALL, RunSource, Selection, choose_entries, shown_path
from clusterctl.runs.places import choose_links
from clusterctl.transport.get import fetch as get_paths
from clusterctl.transport.get import parse_listing
from clusterctl.transport.remote_incoming import SMALL
from clusterctl.transport.tree import ItemKind
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.unit.runs.fetched import Talk, content, fetch, fetch_source, get


def row(
    path: bytes, size: object = 1, kind: str = "file", space: object = 1, mtime: object = 1
) -> str:
    return f"{kind} {base64.b64encode(path).decode()} {0o644} {mtime} {size} {space} \n"


def link(path: bytes, target: bytes) -> str:
    return row(path, kind="link").rstrip("\n") + base64.b64encode(target).decode() + "\n"


class Lying(LocalTransport):
    """A cluster that says and sends what it likes."""

    def __init__(self, listing: str, sent: bytes) -> None:
        self._listing = listing
        self._sent = sent

    @contextmanager
    def converse(self, argv, **options):
        rest = [self._sent, self._listing.encode(errors="surrogateescape") + b"\n"]
        with super().converse(["true", *argv], **options) as real:
            lying = Talk(real, lambda _: rest.pop() if rest else b"", lambda _: None)
            lying.finish = lambda *_: None
            yield lying


BOTH = pytest.mark.parametrize(("verb", "error"), [(fetch, CollectError), (get, TransferError)])


@BOTH
@pytest.mark.parametrize(
    "path",
    [
        b"/etc/passwd",
        b"../x",
        b"a/../../x",
        b"a/..",
        b".",
        b"",
        b"a//b",
        b"a/",
        b"a\0b",
        b"./a",
        b"b" * 256,
    ],
)
def test_paths_that_lead_elsewhere_are_refused(path, remote, tree, verb, error):
    around = row(b"a", kind="folder")
    with refused("internal/answer", error) as caught:
        verb(remote, tree, Lying(around + row(path), b""))
    assert caught.value.why.isprintable()
    assert content(tree) == {}


@BOTH
@pytest.mark.parametrize(
    "listing",
    [
        row(b"a") + row(b"a"),
        row(b"a") + row(b"a/b"),
        row(b"a", kind="link") + row(b"a/b"),
        row(b"a/b"),  # in a folder that nobody told of
        row(b"a", kind="device"),
        row(b"a", size=-1),
        row(b"a", size=10**400, space=10**400),
        row(b"a/../../x", kind="left"),
        row(b"", kind="left"),
        row(b"a", space=-1),
        row(b"a", size="many"),
        row(b"a", size=float("inf")),
        row(b"a", mtime=1 << 70),
        "[" * 60_000 + "\n",
        "file not-base64! 0 0 0 0 \n",
        "file YQ== 0 0 0 0\n",
        "ours YQ== 0 0 0 0 YQ==\n",
        "left YQ== 0 0 0 0 \udcff\n",
        '["file", "YQ==", 0, 0, 0, "", 0]\n',
        "\x1b[31m\n",
        row(b"a", kind="folder") + row(b"a"),
        row(b"a", kind="folder") + link(b"a", b"x"),
        row(b"a", kind="archive"),  # which only uploads have
        row(b"a", kind="File"),
        row(b"a", size=1 << 63),
        row(b"a", space=1 << 63),
        row(b"a", mtime=-1 << 63) + row(b"a"),
        row(b"a", mtime=0.5),
        row(b"a", kind="left", size=-1),
        row(b"a", kind="left", space=1 << 63),
        row(b"a\0", kind="left"),
        "file YQ== 0x1ff 0 0 0 \n",
        "file\n",
        "\0\n",
    ],
)
def test_listings_that_contradict_themselves_are_refused(listing, remote, tree, verb, error):
    with refused("internal/answer", error):
        verb(remote, tree, Lying(listing, b""))
    assert content(tree) == {}


def test_fetch_keeps_a_file_named_like_a_partial_one(remote, tree):
    """A partial file of another transfer would replace the job's file."""
    name = f".clusterctl-{'0' * 32}.part"
    (remote / name).write_text("a job's")
    (left,) = fetch(remote, tree, LocalTransport()).skipped
    assert left.path == name
    assert left.reason.endswith("files in transfer")
    assert content(tree) == {}


@pytest.mark.parametrize(
    "target",
    [
        *(
            b"",
            b"/",
            b".",
            b"..",
            b"../../x",
            b"/etc/passwd",
            b"e/../../x",
            b"../x/../x",
            b"a",
            b"../b",
            b"../c",
        ),
        *(
            b"./..",
            b"/f/../x",
            b"/f/./../x",
            b"/f",
            b"/fx",
            b"/x",
            b"../x\0",
            b"./" * 2049 + b"../x",
            b"missing",
        ),
    ],
)
def test_links_that_the_cluster_lists_never_lead_out(target):
    rows = row(b"x", kind="folder") + row(b"d", kind="folder") + link(b"d/a", target)
    listing = rows + link(b"c", b"/etc") + link(b"b", b"c")
    entries, left = parse_listing(listing.encode().splitlines())
    chosen, links, skipped = choose_entries(entries, left, RunSource("/f"), Path())
    assert links == {}
    assert {(one.path, one.reason) for one in skipped} == {
        (path, "a symbolic link") for path in (b"d/a", b"b", b"c")
    }
    assert [entry.path for entry in chosen if entry.kind == ItemKind.LINK] == []


def test_fetch_refuses_files_below_a_listed_link(remote, tree):
    listing = row(b"x", kind="folder") + link(b"a", b"x") + row(b"a/b")
    with refused("internal/answer", CollectError):
        fetch(remote, tree, Lying(listing, b""))


def test_chain_of_links_is_followed_once():
    """A million of them, each to the next, took hours if each was followed to its end."""
    count = 20_000
    names = [b"%d" % number for number in range(count)]
    for last, made in ((b"x", count), (b"nowhere", 0), (b"0", 0)):
        rows = [link(name, to) for name, to in zip(names, [*names[1:], last], strict=True)]
        entries, _ = parse_listing("".join([*rows, row(b"x", kind="folder")]).encode().splitlines())
        chain = [entry for entry in entries if entry.kind == ItemKind.LINK]
        assert len(choose_links(chain, {b"x"}, "/f")) == made


def header(size: int) -> bytes:
    return struct.pack(">q", size)


def file_of(data: bytes, *, changed_to: bytes = b"") -> bytes:
    """A file as it is sent; ``changed_to`` is the hash of what it is afterwards, if it changed
    meanwhile.
    """
    piece = header(len(data)) + data
    return header(len(data)) + piece + header(len(changed_to)) + changed_to


END = header(0)
LARGE = b"x" * (SMALL + 1)
LARGE_ONE = header(len(LARGE))


@BOTH
@pytest.mark.parametrize(
    "lie",
    [
        (1, file_of(b"x") + b"more", "transfer-failed/answer"),
        (1, header(10**12) + b"x", "transfer-failed/answer"),
        (1, header(-2), "transfer-failed/answer"),
        (1, header(1), "transfer-failed/short"),
        (1, file_of(b"x")[:-1], "transfer-failed/short"),
        (1, b"", "transfer-failed/short"),
        (1, header(1)[:4], "transfer-failed/short"),
        (1, header(1) + header(1) + b"x" + header(34), "transfer-failed/answer"),
        (1, header(1) + header(1) + b"x" + header(-4), "transfer-failed/answer"),
        (1, header(1) + header(0) + header(1) + b"x" + header(0), "transfer-failed/answer"),
        (1, header(1) + header(-2), "transfer-failed/answer"),
        (1, header(-4), "transfer-failed/answer"),
        (1, header(0), "transfer-failed/answer"),
        (0, header(0) + header(0) + header(0), "transfer-failed/answer"),
        (2, header(2) + header(1) + b"x", "transfer-failed/short"),
        (len(LARGE), file_of(LARGE)[:-1], "transfer-failed/short"),
        (len(LARGE), LARGE_ONE + header(-len(LARGE) - 1), "transfer-failed/answer"),
        (len(LARGE), LARGE_ONE + header(len(LARGE) + 1) + LARGE + b"x", "transfer-failed/answer"),
        (len(LARGE), LARGE_ONE + LARGE_ONE + LARGE + header(34), "transfer-failed/answer"),
    ],
)
def test_fetch_refuses_files_that_differ_from_the_listing(lie, remote, tree, verb, error):
    size, sent, code = lie
    with refused(code, error):
        verb(remote, tree, Lying(row(b"a", size=size), sent))


@BOTH
@pytest.mark.parametrize("data", [b"y", LARGE])
def test_fetch_skips_a_file_that_changed_meanwhile(data, remote, tree, verb, error):
    listing = row(b"a", size=len(data))
    with refused("transfer-failed/changing" if verb is fetch else "transfer-failed/changed", error):
        verb(remote, tree, Lying(listing, file_of(data, changed_to=hashlib.sha256(b"z").digest())))
    assert content(tree) == {}
    verb(remote, tree, Lying(listing, file_of(data, changed_to=hashlib.sha256(data).digest())))
    assert content(tree) == {b"a": data}


def test_fetch_of_a_run_larger_than_the_disk_is_refused(remote, tree):
    with refused("disk-full/host", CollectError):
        fetch_source(
            RunSource(str(remote), selection=Selection(max_file=10**18)),
            tree,
            Lying(row(b"a", size=10**18, space=10**18), b""),
        )


@pytest.mark.parametrize(
    "listing",
    [
        row(b".bashrc"),
        row(b"A"),
        row(b"a "),
        row(b"b", kind="folder") + row(b"b/a"),
        row(b".ssh", kind="folder") + row(b".ssh/authorized_keys"),
        row(b"a", kind="folder") + row(b"a/b") + row(b"c"),
        row(b"a") + link(b".profile", b"a"),
        row(b"\x1b[31m"),
    ],
)
def test_get_refuses_names_that_were_not_requested(listing, remote, tree):
    """The names could be those of any file in the folder, such as .bashrc in the user's home."""
    tree.mkdir(parents=True)
    (tree / ".bashrc").write_text("the user's")
    with refused("internal/answer", TransferError) as caught:
        get(remote, tree, Lying(listing, file_of(b"x") * 2))
    assert caught.value.why.isprintable()
    assert content(tree) == {b".bashrc": b"the user's"}


def test_get_of_a_folder_accepts_a_single_name(remote, tree):
    home = row(b"ada", kind="folder") + row(b"ada/a")
    get_paths(Lying(home, file_of(b"x")), ["."], tree)
    assert content(tree) == {b"ada/a": b"x"}
    with refused("internal/answer", TransferError):
        get_paths(Lying(home + row(b"b"), file_of(b"x") * 2), ["."], tree)


@BOTH
@pytest.mark.parametrize("mode", [0o6777, 0o7000, -1, 1 << 80])
def test_modes_that_the_cluster_lists_never_set_more_than_permissions(
    mode, remote, tree, verb, error
):
    rows = [
        row(path, kind=kind).replace(f" {0o644} ", f" {mode} ")
        for path, kind in ((b"a", "folder"), (b"a/b", "file"))
    ]
    verb(remote, tree, Lying("".join(rows), file_of(b"x")))
    assert [path.stat().st_mode & 0o7000 for path in tree.rglob("*")] == [0, 0]


@pytest.mark.parametrize("target", [b"", b"x\0y", b"x" * 5000])
def test_get_refuses_targets_that_no_link_can_have(target, remote, tree):
    with refused("file-unwritable/here", TransferError):
        get(remote, tree, Lying(link(b"a", target), b""))
    assert list(tree.iterdir()) == []


@BOTH
@pytest.mark.parametrize("mtime", [-(1 << 63), (1 << 63) - 1])
def test_fetch_accepts_times_out_of_range(mtime, remote, tree, verb, error):
    verb(remote, tree, Lying(row(b"a", mtime=mtime), file_of(b"x")))
    assert content(tree) == {b"a": b"x"}


@pytest.mark.timeout(120)
def test_get_of_an_endless_hole_ends(remote, tree):
    """The hole takes no space on the disk, but reading its zeros would take years."""
    size = 1 << 62
    with suppress(TransferError):  # the file systems that can't hold such a file
        get(remote, tree, Lying(row(b"a", size=size, space=0), header(size) + header(-size) + END))
    assert {path.name for path in tree.iterdir() if not path.name.endswith(".part")} <= {"a"}


@BOTH
def test_folders_nested_deeper_than_a_path_may_be_are_refused(remote, tree, verb, error):
    name = b"a" + b"/" + b"d" * 200
    rows = [row(b"a", kind="folder"), row(name, kind="folder")]
    for _ in range(30):
        name += b"/" + b"d" * 200
        rows.append(row(name, kind="folder"))
    with refused("file-unwritable/here", TransferError) if verb is get else nullcontext():
        skipped = verb(remote, tree, Lying("".join(rows), b"")).skipped
        assert any("longer than" in left.reason for left in skipped)


@BOTH
def test_names_of_files_that_can_not_be_read_are_shown_as_text(remote, tree, verb, error):
    listing = row(b"a", kind="folder") + row(b"a/\x1b]0;title\x07\n")
    with pytest.raises(error) as caught:
        verb(remote, tree, Lying(listing, header(-1) * 4))
    assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize("verb", [fetch, get, "all"])
def test_list_without_end_is_refused_by_every_verb(monkeypatch, verb, remote, tree):
    monkeypatch.setattr("clusterctl.transport.get._MOST_BYTES", 1 << 12)
    rows = "".join(row(b"%d" % number) for number in range(10_000))
    endless = Lying(rows, b"")
    with refused("internal/answer"):
        if verb == "all":
            fetch_source(RunSource(str(remote), selection=ALL), tree, endless)
        else:
            verb(remote, tree, endless)
    assert content(tree) == {}


def test_fetch_of_an_endless_listing_is_refused(monkeypatch, remote, tree):
    lists = [(1 << 28, "x" * (2 << 20)), (1 << 28, "alive\n" * 1_300_000), (999, "alive\n" * 200)]
    for most, listing in lists:
        monkeypatch.setattr("clusterctl.transport.get._MOST_BYTES", most)
        with refused("internal/answer", CollectError):
            fetch(remote, tree, Lying(listing, b""))


def test_fetch_names_the_first_of_many_skipped_files(remote, tree):
    listing = "".join(
        f"left {base64.b64encode(b'%d' % i).decode()} 0 0 0 0 a pipe\n" for i in range(3000)
    )
    manifest = fetch(remote, tree, Lying(listing, b""))
    assert len(manifest.skipped) == 1001
    assert manifest.skipped[-1].reason.startswith("2,000 more")


@given(st.binary(min_size=1, max_size=40))
def test_fetch_refuses_a_path_outside_the_folder(path):
    above = [
        row(b"/".join(path.split(b"/")[:n]), kind="folder") for n in range(1, path.count(b"/") + 1)
    ]
    try:
        entries, left = parse_listing([*(line.encode() for line in above), row(path).encode()])
    except TransferError:
        return
    entry = choose_entries(entries, left, RunSource("/f"), Path())[0][-1]
    place = os.path.normpath(b"/out/tree/" + entry.local)
    assert place == b"/out/tree/" + entry.local
    assert shown_path(path).isprintable()
