"""What of a script's folder travels with the job, and what is refused before anything is sent."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.jobs import source as limits
from clusterctl.jobs.source import Source, manifest, source_hash, source_of
from clusterctl.scheduler.request.request import Request
from clusterctl.spec.job import JobSpec
from clusterctl.transport.tree import ItemKind, hash_items
from tests.support.hostile import HOSTILE_NAMES
from tests.support.messages import condition
from tests.support.messages import refused as rejected
from tests.unit.runs.made import record


@pytest.fixture(name="project")
def project_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script; the user's home is elsewhere."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "my project; $(x)"
    folder.mkdir()
    (folder / "train.py").write_text("import utils\n")
    return folder


def write(project: Path, *names: str) -> None:
    for name in names:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)


def found(project: Path, **words: object) -> Source:
    source = source_of(Request.read(JobSpec(name="j", script=project / "train.py", **words)))
    assert source is not None
    return source


def files(project: Path, **words: object) -> set[str]:
    return {item.path for item in found(project, **words).files}


def test_siblings_and_subfolders_travel_without_caches_and_runs(project, tmp_path, monkeypatch):
    monkeypatch.setenv("CLUSTERCTL_HOME", str(project / "state"))
    write(
        project,
        "utils.py",
        "conf/a.yaml",
        "utils.pyc",
        "__pycache__/x",
        "pkg/__pycache__/y",
    )
    write(
        project,
        "node_modules/x/y.js",
        ".ipynb_checkpoints/n",
        ".agents/skills/clusterctl/SKILL.md",
        ".claude/settings.json",
        "state/demo/id_ed25519",
    )
    write(project, "myenv/pyvenv.cfg", "myenv/bin/python", "runs/.r.incomplete/tree/x")
    write(project, "runs/1/run.json", "runs/1/big.bin", "other/run.json")
    (project / "runs" / "1" / "run.json").write_text(json.dumps(record()))
    (project / "other" / "run.json").write_text('{"token": "of somebody else"}')
    assert files(project) == {"train.py", "utils.py", "conf/a.yaml", "other/run.json"}


def test_empty_folders_modes_and_hostile_names_travel(project):
    (project / "results").mkdir()
    for name in HOSTILE_NAMES:
        (project / os.fsdecode(name)).write_bytes(name)
    (project / "train.py").chmod(0o755)
    source = found(project)
    assert {os.fsencode(item.path) for item in source.files} == {*HOSTILE_NAMES, b"train.py"}
    assert [item.path for item in source.items if item.kind is ItemKind.FOLDER] == ["results"]
    listed = json.loads(manifest(source.items, hash_items(source.files)))
    assert [one["path"] for one in listed["files"] if one["executable"]] == ["train.py"]
    assert {os.fsencode(one["path"]) for one in listed["files"]} == {*HOSTILE_NAMES, b"train.py"}


def test_image_of_the_job_is_not_sent_as_a_file_of_the_project_too(project):
    write(project, "images/a.sif", "b/a.sif")
    image = str(project / "images" / "a.sif")
    everything = files(project)
    assert everything >= {"images/a.sif", "b/a.sif"}
    assert everything - files(project, container=image) == {"images/a.sif"}
    assert files(project, container=image, include=("/images/a.sif",)) == everything


def test_file_that_vanishes_during_the_search_is_left_out(project, monkeypatch):
    write(project, "a.tmp", "b")

    listed = os.scandir

    def scandir(folder: Path) -> list[os.DirEntry[str]]:
        entries = [*listed(folder)]
        (project / "a.tmp").unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(os, "scandir", scandir)
    assert files(project) == {"train.py", "b"}


def test_unusable_patterns_are_refused(project):
    with rejected("option-invalid/pattern", UsageError, "--exclude"):
        found(project, exclude=("a\\",))
    with rejected("option-invalid/include", UsageError):
        source_of(Request.read(JobSpec(name="x", bundled="train", exclude=("x",))))


def test_gitignore_without_git_has_no_effect(project):
    write(project, "data/x")
    (project / ".gitignore").write_text("data/\n")
    assert files(project) == {"train.py", ".gitignore", "data/x"}


def test_source_keeps_links_inside_and_copies_files_linked_outside(project, tmp_path):
    write(tmp_path, "outside.txt")
    write(project, "sub/real.txt")
    links = {
        "inside": "sub/real.txt",
        "absolute": str(project / "sub" / "real.txt"),
        "sub/roundabout": f"../../{project.name}/train.py",
        "folder": "sub",
        "dangling": "/no/such/place",
        "ring": "ring",
        "null": "/dev/null",
        "out": "../outside.txt",
    }
    for name, target in links.items():
        (project / name).symlink_to(target)
    kept = {item.path: item.target for item in found(project).items if item.kind is ItemKind.LINK}
    assert kept == {
        "inside": "sub/real.txt",
        "absolute": "sub/real.txt",
        "sub/roundabout": "../train.py",
        "folder": "sub",
        "dangling": "/no/such/place",
        "ring": "ring",
    }
    assert files(project) == {"train.py", "sub/real.txt", "out"}


def test_link_to_a_folder_outside_is_refused(project, tmp_path, monkeypatch):
    """If it is in the current folder, the advice is to send that one."""
    (tmp_path / "datasets").mkdir()
    (project / "data").symlink_to(tmp_path / "datasets")
    with rejected("files-unfit/link", UsageError, f"data -> {tmp_path}/datasets", "clusterctl put"):
        found(project)
    assert files(project, exclude=("data",)) == {"train.py"}
    monkeypatch.chdir(tmp_path)
    with rejected("files-unfit/link", UsageError, f"--folder {tmp_path}"):
        found(project)


def test_hostfile_of_the_user_is_sent(project):
    """Many projects have it. clusterctl's own has another name."""
    write(project, "hostfile")
    assert "hostfile" in files(project)


def test_file_with_the_name_of_a_task_folder_is_refused_in_arrays(project):
    names = (
        "run.json",
        "stdout-3.log",
        "telemetry/x",
        "task-1/x",
        "task-2",
        "sub/task-1/x",
        "job.sbatch",
    )
    write(project, *names)
    assert files(project) == {"train.py", *names}
    with rejected("files-unfit/reserved", UsageError, "task-1, task-2", "--exclude /task-1"):
        found(project, array="0-1")
    (project / "train.py").write_text("#SBATCH --array=0-1\n")
    with rejected("files-unfit/reserved", UsageError):
        found(project)
    sent = files(project, exclude=("/task-*",))
    assert sent == {"train.py", *names} - {"task-1/x", "task-2"}


def test_unreadable_folder_is_refused_with_the_option_that_leaves_it_out(project, monkeypatch):
    write(project, "sub/x", "y")
    listed = os.scandir

    def scandir(folder: Path) -> Iterator[os.DirEntry[str]]:
        if Path(folder).name == "sub":
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with rejected("file-unreadable/here", UsageError, "sub: Permission", "--exclude /sub"):
        found(project)
    assert files(project, exclude=("/sub",)) == {"train.py", "y"}


def test_folder_of_too_many_bytes_is_refused_with_its_largest_parts(project):
    write(project, "many/a", "b")
    with (project / "many/a").open("r+b") as file:
        file.truncate(10 << 30)
    with rejected("files-unfit/size", UsageError, " 10 GiB", "many (", "--folder none"):
        found(project)


def test_folder_of_too_many_files_is_refused_with_its_largest_parts(project, monkeypatch):
    write(project, "many/a", "many/b", "many/c", "d")
    monkeypatch.setattr(limits, "MAX_FILES", 4)
    with rejected("files-unfit/size", UsageError, " 4 files", "many (", "--folder none"):
        found(project)


def test_large_folder_is_noted_with_its_largest_parts(project):
    with (project / "large.bin").open("wb") as file:
        file.truncate(limits.LARGE_BYTES + 1)
    write(project, "a/x", "b/x")
    (note,) = found(project).notes
    assert condition(note) == "folder-large"
    for words in ("100 MiB in 4 files", "large.bin (100 MiB)", "clusterctl put"):
        assert words in note


def test_pipes_are_not_sent(project):
    os.mkfifo(project / "pipe")
    assert {item.path for item in found(project).items} == {"train.py"}


@pytest.mark.parametrize("make", ["home", "sticky"])
def test_script_outside_a_project_is_sent_alone(project, monkeypatch, make):
    write(project, "private")
    if make == "home":
        monkeypatch.setenv("HOME", str(project))
    else:
        project.chmod(project.stat().st_mode | stat.S_ISVTX | stat.S_IWOTH)
    source = found(project)
    assert [item.path for item in source.items] == ["train.py"]
    assert [condition(note) for note in source.notes] == ["script-sent-alone"]
    with rejected("option-invalid/include-alone", UsageError, "--include"):
        found(project, include=("private",))


def hash_of(project: Path) -> str:
    source = found(project)
    return source_hash(source.items, hash_items(source.files))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: (p / "a").write_text("other"),
        lambda p: (p / "a").rename(p / "b"),
        lambda p: (p / "a").chmod(0o755),
        lambda p: (p / "new").mkdir(),
        lambda p: ((p / "link").unlink(), (p / "link").symlink_to("train.py")),
    ],
)
def test_hash_changes_with_every_change(project: Path, change: Callable[[Path], object]):
    write(project, "a")
    (project / "link").symlink_to("a")
    before = hash_of(project)
    os.utime(project / "a", (1, 1))
    assert hash_of(project) == before
    change(project)
    assert hash_of(project) != before
