"""What exists only on a cluster is found, however it came to be there, and brought here; nothing
else is.

This machine stands for the hosts of a cluster: the program that looks runs here, on folders of the
test.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import CollectError, TransferError, UnreachableError
from clusterctl.runs import only_copies
from clusterctl.runs.fetch import Outputs, RunSource, Selection
from clusterctl.runs.only_copies import OnlyCopies, Search
from clusterctl.spec.remote_folders import FOLDERS
from clusterctl.state.inventory import CONTROLLER
from clusterctl.state.ledger import UNCHANGED, JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport import base, remote_copies
from clusterctl.transport.base import Conversation
from clusterctl.transport.copies import LocalCopies, record_copies
from clusterctl.transport.put import Upload
from clusterctl.transport.remote_copies import NOT_IN_HOMES, SearchedFolder
from clusterctl.transport.ssh import Connections
from clusterctl.transport.tree import list_items
from clusterctl.util import formatting
from clusterctl.util.confine import Confinement
from tests.support.inventories import host_of, inventory_of
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused, shows
from tests.unit.runs.fetched import Talk, fetch_source
from tests.unit.runs.made import record

JOB = "clusterctl/jobs/mine-a1b2"


class ThisMachine(LocalTransport):
    """This machine as a host where the admin user may do what root may."""

    def converse(
        self, argv: Sequence[str], *, silence_s: float | None = None
    ) -> AbstractContextManager[Conversation]:
        assert argv[:2] == ["sudo", "-n"]
        return super().converse(argv[2:], silence_s=silence_s)


@dataclass
class Stage:
    """The home of ada on the shared folder of a cluster, and the workspace of the cluster here."""

    home: Path
    workspace: Workspace
    out: Path
    transport: LocalTransport

    @property
    def run(self) -> Path:
        return self.out / "demo-1-mine"

    @property
    def search(self) -> Search:
        controller = host_of("demo-ctl", CONTROLLER)
        shared = str(self.home.parents[1])
        inventory = inventory_of(cluster="demo", hosts=(controller,), shared=shared)
        return Search(inventory, self.workspace, lambda _: self.transport, (), shared=True)

    def bring(self, search: Search | None = None) -> tuple[Path, ...]:
        """Bring here what a search finds: the folders."""
        search = search or self.search
        return search.bring(search.find().files, self.out, progress=lambda *_: None)

    def write(self, path: str, text: str = "data\n") -> Path:
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def put(self, name: str) -> Path:
        """Send a file, or all of the folder that it is in, to the home, as `put` does."""
        here = self.out.parent / name
        here.parent.mkdir(exist_ok=True)
        here.write_text("sent\n")
        root = self.out.parent / Path(name).parts[0]
        sent = Upload(LocalTransport()).into(list_items([root])[0], str(self.home))
        record_copies(
            self.workspace,
            [LocalCopies("demo-ctl", f"{sent.folder}/{root.name}", str(root), sent=True)],
        )
        assert self.workspace.copies.stat().st_mode & 0o077 == 0
        return here

    def submitted(self, name: str) -> Path:
        """A large file that went with the job's script, and does not come back."""
        here = self.out.parent / "project" / name
        here.parent.mkdir()
        here.write_text("sent\n")
        shutil.copy2(here, self.home / JOB / name)
        record_copies(
            self.workspace,
            [LocalCopies("demo-ctl", str(self.home / JOB), str(here.parent), (name,), sent=True)],
        )
        self.leaves(name, UNCHANGED)
        return here

    def leaves(self, path: str, why: str) -> None:
        """The run says so."""
        skipped = [{"path": path, "reason": why}]
        (self.run / "run.json").write_text(
            json.dumps(record(token="a1b2", name="mine", skipped=skipped))  # noqa: S106
        )

    def collected(self) -> None:
        """The job has come home with all that is in its folder."""
        shutil.copytree(self.home / JOB, self.run, dirs_exist_ok=True)
        ledger = Ledger(self.workspace.jobs)
        ledger.update(ledger.entries()[0], run_dir=str(self.run), run_state="COMPLETED")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    home = tmp_path / "shared" / "home" / "ada"
    home.mkdir(parents=True)
    workspace = Workspace(tmp_path / "state" / "demo")
    workspace.create()
    place = {"token": JOB.partition("-")[2], "remote_dir": str(home / JOB)}
    Ledger(workspace.jobs).add(
        JobEntry(name="mine", user="ada", submitted_at=0, job_id="1", **place)
    )
    out = tmp_path / "runs"
    out.mkdir()
    one = Stage(home, workspace, out, ThisMachine())
    one.write(f"{JOB}/stdout.log", "step 1\n")
    one.write(f"{JOB}/job.sbatch", "#!/bin/bash\n")
    one.collected()
    return one


def changed(stage: Stage, path: str, text: str) -> Path:
    """Change the content and the time of a file that was sent before."""
    file = stage.write(path, text)
    os.utime(file, (1e9, 1e9))
    return file


def put_and_changed(stage: Stage) -> Path:
    stage.put("set.csv")
    return changed(stage, "set.csv", "new!\n")


def put_and_edited_here(stage: Stage) -> Path:
    changed(stage, str(stage.put("data/set.csv")), "mine\n")
    return stage.home / "data/set.csv"


def put_and_gone_here(stage: Stage) -> Path:
    stage.put("set.csv").unlink()
    return stage.home / "set.csv"


def submitted_and_edited_here(stage: Stage) -> Path:
    changed(stage, str(stage.submitted("set.bin")), "mine\n")
    return stage.home / JOB / "set.bin"


def gone_here(stage: Stage, file: str = "") -> Path:
    (shutil.rmtree if not file else Path.unlink)(stage.run / file)
    return stage.home / JOB / "stdout.log"


def edited_here(stage: Stage) -> Path:
    with (stage.run / "stdout.log").open("a") as file:
        file.write("my note\n")
    return stage.home / JOB / "stdout.log"


def closed(stage: Stage) -> Path:
    file = stage.write("secret/key")
    (stage.home / "secret").chmod(0o500)
    file.chmod(0)
    return file


def of_another_submission(stage: Stage) -> Path:
    stage.write("clusterctl/jobs/theirs-ffff/job.sbatch")
    return stage.write("clusterctl/jobs/theirs-ffff/stdout.log")


WAYS: dict[str, Callable[[Stage], Path]] = {
    "a checkpoint in a job's folder": lambda s: s.write(f"{JOB}/out/checkpoint-3/weights"),
    "a sent file that was changed": put_and_changed,
    "a sent file that is gone here": put_and_gone_here,
    "a start-up file of one's own": lambda s: s.write(".bashrc", "export MINE=1\n"),
    "names that are no text": lambda s: s.write("\udcff \x1b[2J\n/weights"),
    "a folder beside the homes": lambda s: s.write("../../datasets/imagenet.tar"),
    "the home of another user": lambda s: s.write("../bob/thesis.tex"),
    "a model in the home": lambda s: s.write("models/final.pt"),
    "written into a run's folder after it was collected": lambda s: s.write(f"{JOB}/late.txt"),
    "a log that grew after it was collected": lambda s: changed(
        s, f"{JOB}/stdout.log", "step 1\nstep 2\n"
    ),
    "a sent file that was edited here": put_and_edited_here,
    "a file sent with a job that was edited here": submitted_and_edited_here,
    "a run that is gone here": gone_here,
    "a file of a run that is gone here": lambda s: gone_here(s, "stdout.log"),
    "a file of a run that was edited here": edited_here,
    "what nobody may read": closed,
    "in many folders": lambda s: s.write("/".join(["d"] * 90) + "/weights"),
    "a job that was submitted from elsewhere": of_another_submission,
    "a name that looks like one of ours": lambda s: s.write("clusterctl/.x.incomplete/weights"),
}


@pytest.mark.parametrize("way", WAYS)
def test_only_copies_are_found_and_brought(stage: Stage, way: str) -> None:
    file = WAYS[way](stage)
    found = stage.search.find()
    assert sum(one.files for one in found.files) == 1
    assert found.files[0].bytes == file.stat().st_size
    assert all(line.isprintable() for line in found.lines)
    (folder,) = stage.bring()
    (brought,) = (path for path in folder.rglob("*") if path.is_file())
    assert brought.read_bytes() == file.read_bytes()
    assert not stage.search.find()


def submitted_by_a_link(stage: Stage) -> None:
    """Submit a script whose folder has a link to a file outside, which is sent as a file."""
    here = stage.submitted("set.bin")
    here.rename(stage.out / "set.bin")
    here.symlink_to(stage.out / "set.bin")


def put_in_a_folder(stage: Stage) -> None:
    stage.put("set.csv")
    os.utime(stage.home, (1e9, 1e9))


NOTHING = {
    "an empty home": Stage.__repr__,
    "a run that is here": lambda s: s.collected(),
    "what was sent and is as it was": put_in_a_folder,
    "a folder that was sent": lambda s: s.put("data/set.csv"),
    "what was sent with a job": lambda s: s.submitted("set.bin"),
    "what a link leads to that was sent with a job": submitted_by_a_link,
    "caches": lambda s: [
        s.write(".cache/pip/wheel"),
        s.write("code/__pycache__/a.pyc"),
        s.write(".nv/x"),
    ],
    "what ssh and shells note": lambda s: [
        s.write(".ssh/authorized_keys"),
        s.write(".bash_history"),
    ],
    "what clusterctl keeps there": lambda s: [
        s.write(f"clusterctl/{one.name}/ab/abcd")
        for one in FOLDERS
        if one.is_own and not one.has_user_files
    ],
    "files without data, and links": lambda s: [
        s.write("done", ""),
        (s.home / "l").symlink_to("/etc/passwd"),
    ],
    "a transfer on its way": lambda s: s.write(".clusterctl-0123456789abcdef0123456789abcdef.part"),
    "another of the same file": lambda s: s.write(
        ".clusterctl-0123456789abcdef0123456789abcdef.part.71"
    ),
    "logs of ranks that a session of a shell has shown": lambda s: [
        s.write("clusterctl/jobs/shell.a1b2/rank-logs/0.log"),
        s.write("clusterctl/jobs/shell.a1b2/job.hosts"),
        s.write("clusterctl/jobs/shell.a1b2/job.sbatch"),
    ],
    "the claim of a submit --first": lambda s: [
        s.write("clusterctl/jobs/.first.a1b2c3d4", "7"),
        s.write("clusterctl/jobs/.first.a1b2c3d4.7", "7"),
    ],
    "a job's folder in the making": lambda s: s.write("clusterctl/jobs/.mine-1.incomplete/big"),
    "a start-up file as created": lambda s: shutil.copy("/etc/skel/.bashrc", s.home),
}


@pytest.mark.parametrize("what", [*NOTHING])
def test_only_copies_ignore_copied_and_worthless_files(stage: Stage, what: str) -> None:
    NOTHING[what](stage)
    assert stage.search.find().lines == ()


@pytest.mark.parametrize(
    "path",
    [
        "shell.a1b2/files/rank-logs/x",
        "shell.a1b2/x",
        "shell-a1b2/rank-logs/0.log",
        ".first-a1b2/weights",
        ".first.x-a1b2/weights",
    ],
)
def test_files_of_a_session_and_of_a_job_named_alike_count(stage: Stage, path: str) -> None:
    stage.write(f"clusterctl/jobs/{path}")
    assert [one.files for one in stage.search.find().files] == [1]


def test_only_copies_ignore_files_of_attach(stage: Stage) -> None:
    """In clusterctl's folder on a cluster of other people."""
    folder = stage.home / "ours"
    inventory = replace(stage.search.inventory, is_foreign=True, folder=str(folder))
    search = Search(inventory, stage.workspace, lambda _: LocalTransport(), (), shared=True)
    for name in (".clusterctl-cluster", "job-profile.sh", "store/ab/abcd"):
        stage.write(f"ours/{name}")
    assert search.find().lines == ()
    stage.write("ours/thesis.tex")
    assert [one.files for one in search.find().files] == [1]


@pytest.mark.parametrize("folder", ["clusterctl", "clusterctl-attached", "project/cc"])
def test_only_copies_ignore_what_colleagues_have_from_clusterctl(stage: Stage, folder: str) -> None:
    """`attach` marks the folder, whose place they may choose. The values of their secrets are not
    copied.
    """
    stage.write(f"{folder}/.clusterctl-cluster")
    for one in FOLDERS:
        if one.is_attached and not one.has_user_files:
            stage.write(f"{folder}/{one.name}/ab/abcd")
    stage.write(f"{folder}/job-profile.sh")
    stage.write(f"{folder}/jobs/job-a1/job.sbatch")
    stage.write(".clusterctl-staged-2001/ab/set")
    weights = stage.write(f"{folder}/jobs/job-a1/weights")
    (found,) = stage.search.find().files
    assert (found.what, found.files) == (str(weights.parent), 1)
    (out,) = stage.bring()
    assert [path.name for path in out.rglob("*") if path.is_file()] == ["weights"]


def bound(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, socket.socket(socket.AF_UNIX) as server:
        # The path of a socket may have at most 108 bytes.
        patch.chdir(path.parent)
        server.bind(path.name)


def linked_to_a_cache(path: Path) -> None:
    (path.parents[3] / ".cache").mkdir()
    (path.parents[3] / ".cache/result").write_text("the result\n")
    path.symlink_to(path.parents[3] / ".cache/result")


def hard_linked(path: Path) -> None:
    path.write_text("data\n" * 100)
    path.with_name("second").hardlink_to(path)


def written(*names: str, size: int = 100) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(b"x" * size)

    return write


# What a job leaves in its folder under the name checkpoint-1 -> what `down` does about it.
LEFT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a large file": (lambda path: path.write_text("data\n" * 100), "refuses"),
    "a file with two names": (hard_linked, "refuses"),
    "an empty file": (Path.touch, "deletes"),
    "a pipe": (os.mkfifo, "deletes"),
    "a socket": (bound, "deletes"),
    "a link that leads nowhere": (lambda path: path.symlink_to("nowhere"), "deletes"),
    "a link to a file of a cache": (linked_to_a_cache, "deletes"),
    "a link to a folder": (lambda path: path.symlink_to("/etc"), "deletes"),
    "a folder": (written("a", "b/c"), "refuses"),
    "a folder of empty files": (written("a", "b/c", size=0), "deletes"),
    "a folder of caches": (written("__pycache__/a.pyc"), "deletes"),
    "a folder with unfinished copies": (written(f".clusterctl-{'0' * 32}.part"), "deletes"),
    "a folder with a cache and a file": (written("__pycache__/a.pyc", "b/c"), "refuses"),
}


@pytest.mark.parametrize("what", LEFT)
@pytest.mark.parametrize("is_filtered", [True, False])
def test_collect_says_of_what_it_leaves_what_down_does(
    stage: Stage, what: str, *, is_filtered: bool
) -> None:
    make, expected = LEFT[what]
    make(stage.home / JOB / "checkpoint-1")
    source = RunSource(
        str(stage.home / JOB),
        selection=Selection("none", max_file=50),
        outputs=Outputs(["results/**"]) if is_filtered else None,
    )
    says = {left.down for left in fetch_source(source, stage.out / "tree").skipped}
    does = "refuses" if stage.search.find() else "deletes"
    assert (says or {"deletes"}, does) == ({expected}, expected)


def moved(stage: Stage) -> None:
    stage.write(f"{JOB}/out/weights")
    stage.collected()
    stage.run.rename(stage.out / "elsewhere")


def edited(stage: Stage) -> None:
    edited_here(stage)
    stage.write(f"{JOB}/metrics.jsonl")
    stage.collected()
    changed(stage, f"{JOB}/metrics.jsonl", "more\n")
    changed(stage, f"{JOB}/stdout.log", "more\n")


def left_behind(stage: Stage) -> None:
    stage.write(f"{JOB}/out/checkpoint-3/weights")
    stage.leaves("out/checkpoint-3", "an older checkpoint")


def requeued(stage: Stage) -> None:
    ledger = Ledger(stage.workspace.jobs)
    ledger.update(ledger.entries()[0], run_state="RUNNING")
    changed(stage, f"{JOB}/stdout.log", "step 2\n")


@pytest.mark.parametrize(
    ("way", "files", "why"),
    [
        (moved, 2, "{run} no longer exists on this machine"),
        (edited, 2, "different from the files in {run}"),
        (requeued, 1, "the run was collected before the job ended"),
        (left_behind, 1, "an older checkpoint"),
    ],
)
def test_only_copies_have_a_line_for_each_job_with_the_reason(
    stage: Stage, way: Callable[[Stage], object], files: int, why: str
) -> None:
    way(stage)
    (line,) = stage.search.find().lines
    assert "job 1 (mine): " in line
    assert f" in {files} file" in line
    assert line.endswith(f"; {why.format(run=stage.run)}")


@pytest.mark.parametrize("how", ["", "link"])
def test_only_copies_ignore_a_copy_that_is_the_file_itself(stage: Stage, how: str) -> None:
    """This machine is a host of the cluster, or has mounted its shared folder."""
    stage.write("set/1")
    here = stage.home / "set"
    if how:
        here = stage.out.parent / "link"
        here.symlink_to(stage.home / "set")
    record_copies(
        stage.workspace, [LocalCopies("demo-ctl", str(stage.home / "set"), str(here), sent=True)]
    )
    assert [one.what for one in stage.search.find().files] == [str(stage.home / "set")]


def test_only_copies_show_both_sizes_of_sparse_files(stage: Stage) -> None:
    for number in range(2):
        os.truncate(stage.write(f"vm/disk{number}", "x"), 2 << 20)
    stage.write("whole", "x" * (3 << 20))
    sparse, whole = stage.search.find().files  # the larger first
    on_disk = sum((stage.home / f"vm/disk{number}").stat().st_blocks for number in range(2)) * 512
    assert (sparse.bytes, sparse.on_disk) == (4 << 20, on_disk)
    assert f": 4 MiB ({formatting.size(on_disk)} " in str(sparse)
    assert ": 3 MiB in 1 " in str(whole)


def test_only_copies_list_a_bounded_number_of_files(stage: Stage) -> None:
    for number in range(remote_copies.MOST_TOLD + 5):
        stage.write(f"f{number:03}", "x" * (number + 1))
    found = stage.search.find()
    assert len(found.files) == remote_copies.MOST_TOLD + 1
    assert sum(one.files for one in found.files) == remote_copies.MOST_TOLD + 5
    error = found.error("no", fix="")
    assert len(error.why.splitlines()) == 21
    assert len(error.failures) == len(found.files)


def test_bring_of_a_home_uses_the_same_folder(stage: Stage) -> None:
    (stage.out / "demo-home-ada").mkdir()
    for name in ("one", "two"):
        stage.write(name)
        (folder,) = stage.bring()
    assert folder.name == "demo-home-ada-2"
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]
    assert not list((stage.out / "demo-home-ada").iterdir())


def test_bring_never_overwrites_local_files(stage: Stage) -> None:
    """Nor is a file where a folder should go."""
    stage.write("notes/plan.txt", "first")
    (folder,) = stage.bring()
    (folder / "notes/plan.txt").write_text("edited here")
    stage.write("new")
    (second,) = stage.bring()
    assert (folder / "notes/plan.txt").read_text() == "edited here"
    assert second.name == "demo-home-ada-2"
    assert {path.name for path in second.rglob("*")} == {"notes", "plan.txt", "new"}
    shutil.rmtree(folder / "notes")
    (folder / "notes").write_text("file")
    stage.write("notes/more.txt")
    (third,) = stage.bring()
    assert (folder / "notes").read_text() == "file"
    assert third == second
    assert not stage.search.find()


def test_bring_of_no_named_file_creates_no_folder(stage: Stage) -> None:
    unnamed = OnlyCopies(
        files=(only_copies.UncopiedFiles("others", "ada", 3, 30, 0, host="demo-ctl"),)
    )
    assert stage.search.bring(unnamed.files, stage.out, progress=lambda *_: None) == ()
    assert [path.name for path in stage.out.iterdir()] == [stage.run.name]


def test_folder_that_can_not_be_written_is_named(stage: Stage) -> None:
    stage.write("weights")
    stage.out = stage.out / "file" / "below"
    stage.out.parent.write_text("no folder")
    with refused("file-unwritable/here", TransferError) as caught:
        stage.bring()
    assert str(stage.out.parent) in caught.value.where


def test_damaged_record_of_brought_files_is_skipped(stage: Stage) -> None:
    stage.write("weights")
    stage.bring()
    with stage.workspace.copies.open("a") as file:
        file.write('{"host": "", "top": "/x"}\n{"host": "", "top": 1, "directory": 2}\n')
        file.write(
            '{"top": "/x", "directory": "/\\u0000"}\n{"top": "/x", "directory": "/x", "names": 3}\n'
        )
    assert not stage.search.find()


def test_progress_lines_of_a_long_search_are_not_files(stage, monkeypatch):
    """A home with very many files takes more than a second to look through, also to list."""
    texts = base.module_texts
    monkeypatch.setattr(
        base, "module_texts", lambda name: texts(name).replace("ALIVE_S = 1.0", "ALIVE_S = 0")
    )
    stage.write("notes.txt", "mine\n")
    (folder,) = stage.bring()
    assert (folder / "notes.txt").read_text() == "mine\n"


@pytest.mark.parametrize(
    "line", ["[]", "3", '{"files": 1}', '{"unread": "/"}', "nothing", '{"alive": 1}', "[" * 100_000]
)
def test_search_with_an_invalid_answer_fails(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(
        Search, "_request", lambda *_, **__: ["sudo", "-n", "sh", "-c", 'echo "$1"', "", line]
    )
    monkeypatch.setattr(only_copies, "encode_digests", lambda _: b"")
    (why,) = stage.search.find().unknown
    assert "demo-ctl" in why
    assert shows(why, "answer-garbled")


def encoded(path: bytes) -> str:
    return base64.b64encode(path).decode("ascii")


class Lying(LocalTransport):
    """A host that reports a file with these fields, and then lists and sends what it likes."""

    def __init__(self, listing: str = "", sent: bytes = b"", count: int = 1, **fields: object):
        row = {
            "top": encoded(b"/shared/home/ada"),
            "path": encoded(b"a"),
            "owner": "ada",
            **dict.fromkeys(("files", "bytes", "on_disk", "age_s", "changed_ns"), 1),
        }
        self._rows = f"{json.dumps(row | fields)}\n" * count + '{"end": true}\n'
        self._answers = [self._rows.encode(), f"{listing}\n".encode() + sent]

    @contextmanager
    def converse(
        self, argv: Sequence[str], *, silence_s: float | None = None
    ) -> Iterator[Conversation]:
        is_transfer = '\\"most\\"' in argv[-1]
        answer = [self._answers[is_transfer]]
        with super().converse(["true"], silence_s=silence_s) as real:
            lying = Talk(real, lambda _: answer.pop() if answer else b"", lambda _: None)
            lying.finish = lambda *_: None
            yield lying


@pytest.mark.parametrize(
    "fields",
    [
        *({name: -1} for name in ("files", "bytes", "on_disk", "age_s", "changed_ns")),
        *({name: 10**400} for name in ("files", "bytes", "on_disk", "age_s", "changed_ns")),
        {"files": float("inf")},
        {"bytes": float("nan")},
        {"bytes": None},
        {"path": encoded(b"a\0b")},
        {"top": encoded(b"/shared\0")},
        {"top": 7},
        {"count": 2000},  # more lines than a host's program prints
    ],
)
def test_find_of_rows_that_can_not_be_true_reports_the_host(
    stage: Stage, fields: dict[str, Any]
) -> None:
    stage.transport = Lying(**fields)
    found = stage.search.find()
    assert found.files == ()
    (why,) = found.unknown
    assert shows(why, "answer-garbled")
    assert found.shown


def test_find_shows_names_of_a_hostile_host_as_text(stage: Stage) -> None:
    stage.transport = Lying(path=encoded(b"\x1b]0;title\x07"), owner="\x1b[31m")
    (line,) = stage.search.find().lines
    assert line.isprintable()


FILE = f"file {encoded(b'a')} {0o644} 1 1 1 \n"
SENT = struct.pack(">qq", 1, 1) + b"x" + struct.pack(">q", 0)


@pytest.mark.parametrize("top", [b"/../../etc", b"../..", b"/", b"/shared/home/../..", b"\xff"])
def test_bring_of_any_top_writes_into_one_folder_of_out(stage: Stage, top: bytes) -> None:
    stage.transport = Lying(FILE, SENT, top=encoded(top))
    before = {*stage.out.parent.rglob("*")}
    (folder,) = stage.bring()
    assert folder.parent == stage.out
    of_state = {*stage.workspace.root.parent.rglob("*")}
    assert {*stage.out.parent.rglob("*")} - before - of_state == {folder, folder / "a"}


@pytest.mark.parametrize(
    "listing",
    [FILE.replace(encoded(b"a"), encoded(path)) for path in (b"/etc/x", b"../x", b"b/x", b"a\0")],
)
def test_bring_of_paths_outside_the_folder_writes_nothing(stage: Stage, listing: str) -> None:
    stage.transport = Lying(listing, SENT)
    before = {*stage.out.parent.rglob("*")}
    with refused("internal/answer", TransferError):
        stage.bring()
    assert {*stage.out.parent.rglob("*")} == before


def test_only_copies_name_a_host_that_does_not_answer(stage: Stage) -> None:
    class Dead(ThisMachine):
        def converse(self, *_: object, **__: object) -> AbstractContextManager[Conversation]:
            raise UnreachableError("no route")

    stage.transport = Dead()
    (why,) = stage.search.find().unknown
    assert "demo-ctl" in why
    assert why.endswith("no route")


def test_homes_with_start_up_files_leave_no_file_open(stage: Stage) -> None:
    """A cluster may have more homes than a process may open files."""
    shutil.copy("/etc/skel/.bashrc", stage.home)
    top = SearchedFolder(os.fsencode(stage.home), not_here=NOT_IN_HOMES)
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        assert not top.counts(b".bashrc", (stage.home / ".bashrc").stat())
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_only_copies_of_a_name_on_two_hosts_are_two_files() -> None:
    one, two = (remote_copies.digest(host, b"/scratch/shard", 10, 0) for host in (b"n1", b"n2"))
    assert one != two


@pytest.fixture
def up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The cluster is up, as ``bring_all`` finds it; no folder of this machine itself is looked
    at.
    """
    begin = Search.__init__
    stage.workspace.inventory.write_text(stage.search.inventory.text)
    monkeypatch.setattr(Connections, "to", lambda *_: stage.transport)
    monkeypatch.setattr(
        Search, "__init__", lambda self, *of, **how: begin(self, *of[:3], (), **how)
    )
    return stage


def test_collect_all_ends_beside_a_running_job(up: Stage) -> None:
    ledger = Ledger(up.workspace.jobs)
    ledger.update(ledger.entries()[0], run_state="RUNNING")
    changed(up, f"{JOB}/stdout.log", "step 1\nstep 2\n")
    up.write("models/final.pt")
    (folder,) = only_copies.bring_all(up.workspace, up.out)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["final.pt"]
    assert [one.job_id for one in up.search.find().files] == ["1"]


def test_bring_of_a_file_that_keeps_changing_is_refused_by_name(
    up: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = up.write("grows")
    find = Search.find

    def grown(search: Search) -> OnlyCopies:
        file.write_text(file.read_text() + "more\n")
        return find(search)

    monkeypatch.setattr(Search, "find", grown)
    with refused("would-lose/not-collected", CollectError, str(file)):
        only_copies.bring_all(up.workspace, up.out)


def test_bring_all_for_an_agent_leaves_what_programs_here_obey(
    up: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up.write("clone/main.py")
    up.write("clone/.git/config")
    for name, value in Confinement((str(tmp_path),)).environ.items():
        monkeypatch.setenv(name, value)
    with refused("would-lose/not-collected", CollectError, ".git"):
        only_copies.bring_all(up.workspace, up.out)
    (copy,) = up.out.glob("demo-home-*")
    assert [path.name for path in copy.rglob("*") if path.is_file()] == ["main.py"]


def test_bring_all_of_nothing_but_what_programs_here_obey_makes_no_folder(
    up: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up.write("clone/.git/config")
    for name, value in Confinement((str(tmp_path),)).environ.items():
        monkeypatch.setenv(name, value)
    with refused("would-lose/not-collected", CollectError):
        only_copies.bring_all(up.workspace, up.out)
    assert not [*up.out.glob("demo-home-*")]


@pytest.mark.parametrize("provider", ["local", "onprem"])
def test_bring_all_skips_homes_on_machines_of_the_user(up: Stage, provider: str) -> None:
    up.write("models/final.pt")
    inventory = replace(up.search.inventory, provider=provider)
    up.workspace.inventory.write_text(inventory.text)
    folders = only_copies.bring_all(up.workspace, up.out)
    assert [folder.name for folder in folders] == ["demo-home-ada"] * (provider == "local")


def test_bring_takes_more_files_than_a_transfer(up: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(only_copies, "_MOST_FILES", 5)
    for number in range(30):
        up.write(f"f{number:03}")
    (folder,) = only_copies.bring_all(up.workspace, up.out)
    assert len([*folder.iterdir()]) == 30
