"""What git ignores, beside what git itself says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterctl.jobs.source import source_of
from clusterctl.spec.job import JobSpec
from clusterctl.spec.program import named_job
from tests.unit.jobs.test_source import (
    files,
    git,
    project_fixture,  # noqa: F401
    write,
)

RULES = {
    ".gitignore": (
        "*.log\n!keep.log\n/top.txt\ndata/\nout/*\n!out/sub/\n**/deep/x\n!\n[z-a]\na\\ b \n\\#h\n"
    ),
    "sub/.gitignore": "!*.log\n/only.txt\ndata2/**\n!data2/keep\n",
    "sub/more/.gitignore": "*\n!me\n",
}


TREE = """a.log keep.log top.txt sub/top.txt data/x sub/data/x out/a out/sub/b out/sub/a.log q/deep/x deep/x
    sub/a.log sub/only.txt sub/q/only.txt sub/data2/x sub/data2/keep sub/more/me sub/more/not #h h""".split()


@pytest.mark.parametrize("where", ["", "experiments/one/"])
def test_source_omits_files_that_git_ignores(project, where):
    """The same files as git lists, from the root of a repository and from a folder in it."""
    root = project / where
    write(root, *TREE, "a b", "train.py")
    for name, text in RULES.items():
        (root / name).write_text(text)
    git(project, "init", "-q")
    (project / ".git" / "info" / "exclude").write_text("sub/q\n")
    (project / ".gitignore").write_text((RULES[".gitignore"] if not where else "") + "h\n")
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split(b"\0")
    assert files(root) == {os.fsdecode(name) for name in listed if name}
    assert "a.log" not in files(root)
    assert {"keep.log", "sub/a.log"} <= files(root)


def test_worktree_of_gits_knows_its_exclude(project, tmp_path):
    git(project, "init", "-q")
    git(project, "add", "train.py")
    git(project, "commit", "-qm", "x")
    git(project, "worktree", "add", "-q", str(tmp_path / "tree"))
    (project / ".git" / "info" / "exclude").write_text("secret\n")
    write(tmp_path / "tree", "secret", "known")
    assert files(tmp_path / "tree") == {"train.py", "known"}


def test_folder_that_its_repository_ignores_is_sent(project):
    git(project, "init", "-q")
    (project / ".gitignore").write_text("scratch\n*.csv\n")
    write(project, "scratch/train.py", "scratch/utils.py", "scratch/a.csv")
    assert files(project / "scratch") == {"train.py", "utils.py", "a.csv"}


def test_script_has_the_ignore_rules_of_its_own_folder(project, tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    git(tmp_path, "init", "-q", str(repository))
    write(repository, "sub/x")
    (repository / ".gitignore").write_text("*.txt\n")
    write(project, "data.txt")
    (tmp_path / "link").symlink_to(repository / "sub")  # behind it, `..` is the repository
    monkeypatch.chdir(repository)
    _, script = named_job(f"../{project.name}/train.py", Path())
    source = source_of(JobSpec(name="j", script=script))
    assert source is not None
    assert {item.path for item in source.files} == {"data.txt", "train.py"}
    write(repository, "own.py")
    assert named_job("../link/../own.py", Path()) == (None, repository / "own.py")
