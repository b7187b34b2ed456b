"""Folders of jobs that mean harm, or were unlucky: each costs itself, is named, and the others come
home.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import CollectError
from clusterctl.jobs.watch import LogReader
from clusterctl.runs import fetch as fetching
from clusterctl.runs.collect import collect
from clusterctl.runs.fetch import RunSource, Selection
from clusterctl.runs.places import make_links
from clusterctl.runs.remote_files import DEEPEST, RunFolderListing
from clusterctl.scheduler.ends import remote_logs
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.state.ledger import METRICS_FILE, SENT_FILES, WRITTEN_FILES
from clusterctl.transport.base import no_answer_error
from clusterctl.transport.get import parse_listing
from clusterctl.transport.tree import ItemKind
from tests.support.local_transport import LocalTransport
from tests.support.messages import condition, refused
from tests.support.played.cluster import finished
from tests.unit.runs.fetched import Talk, content, fetch, fetch_source

TIB = 1 << 40
OURS = (
    *(
        "source.json",
        "outputs.json",
        "environment.client.json",
        "run.json",
        "sacct.json",
        "environment.json",
    ),
    *("spec.yaml", "job.sbatch", "stdout.log", "metrics.jsonl", "telemetry"),
)


PUT: Mapping[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "dangling": lambda path: path.symlink_to("/nowhere"),
    "folder": Path.mkdir,
    "sparse": lambda path: (path.touch(), os.truncate(path, TIB)),
    "nested": lambda path: path.write_text("[" * (4 << 20)),
    "list": lambda path: path.write_text("[]"),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(path.name),
}


@pytest.mark.parametrize(
    "kind",
    ["pipe", "sparse", "nested", "list", "endless", "dangling", "folder", "socket"],
)
def test_fetch_skips_pipes_and_links_named_like_our_files(remote, tree, monkeypatch, kind):
    monkeypatch.chdir(remote)  # a socket's path may have at most 108 bytes
    for name in OURS:
        PUT[kind](remote / name)
    (remote / "result").write_text("x")
    manifest = fetch(remote, tree)
    assert content(tree)[b"result"] == b"x"
    if kind not in {"folder", "nested", "list"}:
        assert {one.path for one in manifest.skipped} == set(OURS)
    else:
        assert manifest.skipped == ()


def test_fetch_does_not_follow_a_link_in_place_of_the_folder(remote, tree):
    (remote / "stdout.log").write_text("said")
    swapped = remote.with_name("swapped")
    swapped.symlink_to(remote)
    manifest = fetch(swapped, tree)
    assert ["symbolic link" in one.reason for one in manifest.skipped] == [True]
    assert content(tree) == {}
    assert list(LogReader(LocalTransport(), str(swapped)).read("once")) == []
    assert remote_logs.ends(str(swapped), "")["stdout"] == ""
    assert len(list(LogReader(LocalTransport(), str(remote)).read("once"))) == 1


# Link -> target as the job wrote it, and as it comes home; "" if the link does not.
LINKS = {
    "latest": ("steps/2", "steps/2"),
    "steps/up": ("../b.txt", "../b.txt"),
    "steps/dots": (".././steps//2/", "2"),
    "absolute": ("{remote}/b.txt", "b.txt"),
    "chain": ("latest", "latest"),
    "only/link": ("../steps/2/a", "../steps/2/a"),
    "to-ours": ("spec.yaml", "spec.yaml.from-job"),
    "out": ("../../etc", ""),
    "of-the-machine": ("/b.txt", ""),
    "gone": ("nowhere", ""),
    "itself": ("itself", ""),
    "here": (".", ""),
    "steps/above": ("..", ""),
    "steps/here": (".", ""),
    "loop": ("pool", ""),
    "pool": ("loop", ""),
    "over": ("latest/../b.txt", ""),
    "below": ("latest/a", ""),
    "to-out": ("out-again", ""),
    "out-again": ("/etc", ""),
    "left": ("checkpoints/step-1", ""),
    "stdout.log": ("b.txt", ""),
    "run.json": ("b.txt", ""),
    f".clusterctl-{'0' * 32}.part": ("b.txt", ""),
}


def with_links(remote: Path) -> None:
    for name in ("steps/2/a", "b.txt", "spec.yaml", "checkpoints/step-1/w", "checkpoints/step-2/w"):
        (remote / name).parent.mkdir(parents=True, exist_ok=True)
        (remote / name).write_text(name)
    (remote / "only").mkdir()
    for name, (target, _) in LINKS.items():
        (remote / name).symlink_to(target.format(remote=remote))


def test_fetch_takes_links_inside_a_job_and_records_others(remote, tree):
    with_links(remote)
    manifest = fetch(remote, tree)
    assert b"link" not in content(tree).values()
    make_links(tree, manifest.links)
    made = {
        str(path.relative_to(tree)): str(path.readlink())
        for path in tree.rglob("*")
        if path.is_symlink()
    }
    assert made == {name: home for name, (_, home) in LINKS.items() if home}
    assert (tree / "chain/a").read_text() == "steps/2/a"
    described = {
        one.path: one.target for one in manifest.skipped if one.reason == "a symbolic link"
    }
    wanted = {name: target for name, (target, home) in LINKS.items() if not home}
    assert described == wanted


def test_fetch_creates_links_over_no_file_and_through_no_link(tree, tmp_path):
    """The user, or another host's copy, may have put other things into the run's folder."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key").write_text("secret")
    (tree / "sub").mkdir(parents=True)
    (tree / "file").write_text("mine")
    (tree / "mine").symlink_to(outside)
    links = {b"file": b"sub", b"mine/x": b"sub", b"file/x": b"sub", b"none/x": b"sub"}
    make_links(tree, {**links, b"a": b"mine/key", b"b": b"mine", b"c": b"gone", b"sub/d": b"file"})
    assert [path.name for path in outside.iterdir()] == ["key"]
    assert content(tree) == {b"file": b"mine", b"mine": b"link", b"sub/d": b"link"}
    assert (tree / "sub/d").read_text() == "mine"


def test_links_survive_a_second_collection_and_are_not_hashed(session, cluster, tmp_path):
    body = "mkdir out checkpoints; echo 1 >out/a; ln -s out/a best; ln -s out here; "
    body += (
        "echo w >checkpoints/step-1.ckpt; echo w >checkpoints/step-2.ckpt; ln -s step-2.ckpt "
        "checkpoints/last"
    )
    job_id = finished(session, cluster, tmp_path, body)
    for selection in (Selection(), fetching.ALL):
        (run,) = collect(session, [job_id], out=tmp_path / "runs", selection=selection)
        places = {
            name: str((run.directory / name).readlink())
            for name in ("best", "here", "checkpoints/last")
        }
        assert places == {"best": "out/a", "here": "out", "checkpoints/last": "step-2.ckpt"}
        sums = (run.directory / "SHA256SUMS").read_text()
        assert re.findall(r"  (best|here.*|.*/last)$", sums, re.MULTILINE) == []
    assert (run.directory / "checkpoints/step-1.ckpt").is_file()
    assert run.not_here == []


def listed(capsys, top: Path, **bounds) -> tuple[set[str], dict[str, str]]:
    """Return the files that a listing with these limits names, and skipped path -> reason."""
    ours = {os.fsencode(name) for name in (*SENT_FILES, *WRITTEN_FILES, METRICS_FILE)}
    RunFolderListing(os.fsencode(top), ours, **bounds).folder(b"")
    entries, skipped = parse_listing(capsys.readouterr().out.encode().splitlines())
    files = {os.fsdecode(entry.path) for entry in entries if entry.kind == ItemKind.FILE}
    return files, {os.fsdecode(entry.path): entry.payload for entry in skipped}


def test_fetch_skips_and_names_an_overfull_folder(remote, capsys):
    for folder, count in (("many", 60), ("few", 5), ("telemetry", 2)):
        (remote / folder).mkdir()
        for number in range(count):
            (remote / folder / f"{number}").touch()
    (remote / "stdout.log").touch()
    files, skipped = listed(capsys, remote, entries=50)
    assert files == {"stdout.log", "telemetry/0", "telemetry/1", *(f"few/{n}" for n in range(5))}
    assert list(skipped) == ["many"]
    assert skipped["many"].startswith("more than")


@pytest.mark.parametrize("files", ["", "files"])
def test_fetch_of_an_overfull_folder_takes_our_files_only(remote, capsys, files):
    program = remote / files
    program.mkdir(exist_ok=True)
    for number in range(60):
        (program / f"a{number}").touch()
    for name in ("stdout.log", "stdout-7.log", "job.sbatch", "zzz"):
        (remote / name).touch()
    (program / "metrics.jsonl").touch()
    (remote / "telemetry").mkdir()
    (remote / "telemetry" / "n1.jsonl").touch()
    found, skipped = listed(capsys, remote, entries=50, files=os.fsencode(files))
    names = {"stdout.log", "stdout-7.log", "job.sbatch", "telemetry/n1.jsonl"}
    metrics = str(Path(files) / "metrics.jsonl")
    assert found - {"zzz"} == names | {metrics}
    assert list(skipped) == [files or "."]


def test_folders_nested_without_end(remote, tree):
    there = os.open(remote, os.O_RDONLY)
    for _ in range(150):
        os.mkdir("d" * 50, dir_fd=there)
        below = os.open("d" * 50, os.O_RDONLY, dir_fd=there)
        os.close(there)
        there = below
    os.close(there)
    (remote / "stdout.log").write_text("said")
    manifest = fetch(remote, tree)
    assert content(tree) == {b"stdout.log": b"said"}
    (skipped,) = manifest.skipped
    assert f"more than {DEEPEST}" in skipped.reason


def test_fetch_skips_a_path_too_long_for_this_machine(remote, tree):
    folder = remote
    for _ in range(9):
        folder /= "x" * 240
    folder.mkdir(parents=True)
    (folder / "result").write_text("x")
    (remote / ("y" * 255)).write_text("y")
    manifest = fetch(remote, tree)
    assert content(tree) == {b"y" * 255: b"y"}
    assert ["2,048 bytes" in one.reason for one in manifest.skipped] == [True]


def test_fetch_skips_a_large_file_with_the_command_to_get_it(remote, tree, monkeypatch):
    (remote / "image").write_bytes(bytes(2048))
    (remote / "results").write_text("x")
    for most, flag in ((fetching.MAX_FILE, "--all"), (1024, "--max-file 1GiB")):
        monkeypatch.setattr(fetching, "MAX_FILE", most)
        manifest = fetch_source(
            RunSource(str(remote), "7", selection=Selection(max_file=1024)), tree
        )
        assert content(tree) == {b"results": b"x"}
        (skipped,) = manifest.skipped
        assert (skipped.path, skipped.bytes) == ("image", 2048)
        described = re.findall(r"[\d.]+ KiB|`.*`", skipped.reason)
        assert described == ["2 KiB", "1 KiB", f"`clusterctl collect 7 {flag}`"]


def test_fetch_takes_empty_folders(remote, tree):
    (remote / "results" / "empty").mkdir(parents=True)
    (remote / "run.json").mkdir()
    (remote / "new\nline").mkdir()
    fetch(remote, tree)
    (tree / "stray").mkdir()
    fetch(remote, tree)  # what came is kept, what is not there goes
    here = {str(path.relative_to(tree)) for path in tree.rglob("*")}
    assert here == {"results", "results/empty", "run.json.from-job", "new\nline"}


def test_collect_writes_its_records_whatever_a_job_writes(session, cluster, tmp_path):
    forged = "echo forged | tee spec.yaml job.sbatch source.json environment.client.json >/dev/null"
    honest = finished(session, cluster, tmp_path, "true", "honest")
    forger = finished(session, cluster, tmp_path, forged, "forger")
    right, run = collect(session, [honest, forger], out=tmp_path / "runs")
    for name in ("spec.yaml", "job.sbatch", "source.json"):
        assert (run.directory / f"{name}.from-job").read_text() == "forged\n"
        assert not (right.directory / f"{name}.from-job").exists()
    assert (run.directory / "spec.yaml").read_text() == (right.directory / "spec.yaml").read_text()
    assert (run.directory / "job.sbatch").read_text().startswith("#!/bin/bash")
    assert run.source == json.loads((run.directory / "source.json").read_text())["hash"]
    assert (
        json.loads((run.directory / "environment.json").read_text())["client"]["job"]["name"]
        == "forger"
    )


class Hanging(LocalTransport):
    """Whatever reads one job's folder hangs."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @contextmanager
    def converse(self, argv, **options):
        with super().converse(argv, **options) as talk:

            def send(data):
                if self._folder.encode() in data:
                    raise no_answer_error(self.host, argv, 0.2)
                talk.send(data)

            yield Talk(talk, lambda real: real.receive(), send)


def test_fetch_ends_a_hanging_reader_and_takes_the_other_files(session, cluster, tmp_path):
    ids = [finished(session, cluster, tmp_path, "true", name) for name in ("a", "b", "c")]
    stuck = cluster.ledger.find(ids[1])
    hanging = Hanging(str(stuck.remote_dir))
    with refused("transfer-failed/runs", CollectError) as caught:
        collect(replace(session, scheduler=SlurmClient(hanging)), out=tmp_path / "runs")
    assert condition(caught.value.failures[0]) == "file-unreadable/job-files"
    assert "no answer" in caught.value.failures[0].cause
    assert sorted(path.name for path in (tmp_path / "runs").glob("[!.]*")) == [
        "demo-1-a",
        "demo-3-c",
    ]


def test_fetch_skips_sparse_files_without_hashing(remote, tree):
    """Forty of 60 GiB, each below the limit of one file, were hashed for an hour."""
    for number in range(40):
        with (remote / f"sparse{number}").open("wb") as file:
            file.truncate(60 << 30)
    (remote / "result").write_text("x")
    manifest = fetch(remote, tree)
    assert content(tree)[b"result"] == b"x"
    assert len(manifest.skipped) == 40
    assert manifest.skipped[0].bytes == 60 << 30
    described = re.findall(r"[\d.]+ G?i?B|`.*`", manifest.skipped[0].reason)
    assert described == ["60 GiB", "0 B", "16 GiB", "`clusterctl collect --all`"]


def test_fetch_readers_import_no_modules_of_the_home(remote, tree, tmp_path, monkeypatch):
    """`clusterctl put json.py` puts it in the home, where remote programs start."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("json.py", "types.py"):
        (home / name).write_text("raise SystemExit('a module of the home')\n")
    monkeypatch.chdir(home)
    (remote / "stdout.log").write_text("said")
    fetch(remote, tree)
    assert content(tree)[b"stdout.log"] == b"said"
    assert len(list(LogReader(LocalTransport(), str(remote)).read("once"))) == 1
