"""What git shows of a project's folder is sent, and what --include and --exclude change."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.jobs.prepare import read_jobs
from clusterctl.jobs.source import Reason, Source, source_of
from clusterctl.scheduler.request.request import Request
from clusterctl.spec.program import named_job
from clusterctl.state.ledger import REPORT_MARK, note_copied_folder
from clusterctl.transport.tree import ItemKind, literal_pattern
from tests.support.messages import condition, refused
from tests.unit.jobs.test_source import (
    files,
    found,
    project_fixture,  # noqa: F401
    write,
)
from tests.unit.runs.made import record


def git(folder: Path, *argv: str) -> bytes:
    options = [
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "core.excludesFile=/dev/null",
    ]
    return subprocess.run(
        ["git", *options, *argv], cwd=folder, check=True, capture_output=True
    ).stdout


TREE = """a.log keep.log top.txt sub/top.txt data/x sub/data/x out/a out/sub/b out/sub/a.log q/deep/x deep/x
    sub/a.log sub/only.txt sub/q/only.txt sub/data2/x sub/data2/keep sub/more/me sub/more/not""".split()
RULES = {
    ".gitignore": "*.log\n!keep.log\n/top.txt\ndata/\nout/*\n!out/sub/\n**/deep/x\n",
    "sub/.gitignore": "!*.log\n/only.txt\ndata2/**\n!data2/keep\n",
    "sub/more/.gitignore": "*\n!me\n",
}


@pytest.mark.parametrize("where", ["", "experiments/one/"])
def test_source_has_the_files_that_git_shows(project, where):
    """Also in a folder of a repository, and with the file of the user that excludes files."""
    root = project / where
    write(root, *TREE, "train.py", "x.swp")
    for name, text in RULES.items():
        (root / name).write_text(text)
    git(project, "init", "-q")
    (project / ".git" / "info" / "exclude").write_text("sub/q\n")
    (project.parent / "home" / ".config" / "git").mkdir(parents=True)
    (project.parent / "home" / ".config" / "git" / "ignore").write_text("*.swp\n")
    sent = files(root)
    assert {"keep.log", "sub/a.log", "out/sub/b", "sub/more/me", "sub/data2/x"} - sent == {
        "sub/data2/x"
    }
    assert sent.isdisjoint({"a.log", "top.txt", "data/x", "out/a", "deep/x", "x.swp"})


def test_deleted_files_and_files_below_a_new_link_are_left_out(project, tmp_path):
    write(project, "gone", "data/x", "kept")
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "x")
    (project / "gone").unlink()
    (project / "data" / "x").rename(tmp_path / "x")
    (project / "data").rmdir()
    (project / "new").mkdir()
    (project / "new" / "x").symlink_to("../kept")
    (project / "data").symlink_to("new")
    items = {item.path: item.kind for item in found(project).items}
    assert items == {
        "train.py": ItemKind.FILE,
        "kept": ItemKind.FILE,
        "new": ItemKind.FOLDER,
        "new/x": ItemKind.LINK,
        "data": ItemKind.LINK,
    }


def test_files_outside_of_a_sparse_checkout_are_left_out(project):
    write(project, "a/x", "b/x")
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "x")
    git(project, "sparse-checkout", "set", "a")
    assert files(project) == {"train.py", "a/x"}


def test_files_of_submodules_and_other_repositories_in_it_are_sent(project, tmp_path):
    """Each has its own ignored files. An empty submodule has none."""
    for name in ("one", "two"):
        write(tmp_path / name, "lib.py", "ignored")
        (tmp_path / name / ".gitignore").write_text("ignored\n")
        git(tmp_path / name, "init", "-q")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "-qm", "x")
    git(project, "init", "-q")
    add = ("-c", "protocol.file.allow=always", "submodule", "--quiet", "add")
    git(project, *add, str(tmp_path / "one"), "deps/one")
    git(project, *add, str(tmp_path / "one"), "deps/empty")
    git(project, "commit", "-qm", "x")
    git(project, "submodule", "--quiet", "deinit", "-f", "deps/empty")
    (tmp_path / "two").rename(project / "deps" / "two")
    write(project, "deps/one/ignored", "deps/one/new")
    own = {"train.py", ".gitmodules"}
    one = {f"deps/one/{name}" for name in ("lib.py", ".gitignore", "new")}
    two = {f"deps/two/{name}" for name in ("lib.py", ".gitignore")}
    assert files(project) == own | one | two
    assert "deps/one/ignored" in files(project, include=("deps/one/ignored",))
    (project / ".git").rename(tmp_path / "git")
    (project / "deps" / "one" / ".git").unlink()
    # Without git, a repository in the folder is still listed by git.
    assert files(project) == own | one | two | {"deps/one/ignored"}


def test_worktree_of_gits_knows_its_exclude(project, tmp_path):
    git(project, "init", "-q")
    git(project, "add", "train.py")
    git(project, "commit", "-qm", "x")
    git(project, "worktree", "add", "-q", str(tmp_path / "tree"))
    (project / ".git" / "info" / "exclude").write_text("secret\n")
    write(tmp_path / "tree", "secret", "known")
    assert files(tmp_path / "tree") == {"train.py", "known"}


def test_script_that_git_ignores_is_sent_with_its_ignored_folder(project):
    git(project, "init", "-q")
    (project / ".gitignore").write_text("scratch\n*.csv\n")
    write(
        project, "scratch/train.py", "scratch/utils.py", "scratch/a.csv", "scratch/sub/x", "b.csv"
    )
    assert files(project / "scratch") == {"train.py", "utils.py", "a.csv", "sub/x"}
    (job,) = read_jobs(str(project / "scratch" / "train.py"), {})
    source = source_of(Request.read(job))
    assert source is not None
    assert {item.path for item in source.files} == {
        "train.py",
        ".gitignore",
        *(f"scratch/{name}" for name in ("train.py", "utils.py", "a.csv", "sub/x")),
    }
    write(project, "scratch/deep/run.py")
    (project / ".gitignore").write_text("run.py\n*.csv\n")
    # The other files of its folder are not ignored as a folder.
    assert "scratch/a.csv" not in files(project)


def test_start_folder_is_sent_even_if_ignored(project, monkeypatch):
    git(project, "init", "-q")
    (project / ".gitignore").write_text("build\n")
    write(project, "build/x")
    monkeypatch.chdir(project / "build")
    (job,) = read_jobs("../train.py", {})
    source = source_of(Request.read(job))
    assert source is not None
    assert sorted(item.path for item in source.items) == [".gitignore", "build", "train.py"]


def test_hook_of_git_sends_the_project_and_not_its_repository(project, tmp_path, monkeypatch):
    git(project, "init", "-q")
    write(project, "data/x")
    write(tmp_path / "other", "y")
    git(tmp_path / "other", "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    assert files(project) == {"train.py", "data/x"}


def test_repository_runs_no_program(project, tmp_path):
    git(project, "init", "-q")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    git(project, "config", "core.fsmonitor", str(program))
    assert files(project) == {"train.py"}
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("fault", ["damaged", "missing", "owner"])
def test_work_tree_that_git_does_not_list_is_refused(project, tmp_path, monkeypatch, fault):
    """A user has been told by ignored files that these are not sent."""
    git(project, "init", "-q")
    if fault == "damaged":
        (project / ".git" / "HEAD").unlink()
    elif fault == "missing":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        # As git's own tests do.
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with refused("tool-failed/git", UsageError, str(project)):
        found(project)
    assert {item.path for item in found(project, folder=False).items} == {"train.py"}


def test_warning_of_git_is_shown(project):
    git(project, "init", "-q")
    (project / ".gitignore").symlink_to("other")
    (note,) = found(project).notes
    assert condition(note) == "git-warning"
    assert ".gitignore" in note


def test_files_left_out_have_their_reasons(project):
    git(project, "init", "-q")
    write(project, ".env", "env/pyvenv.cfg", "pkg/__pycache__/x", "no/x", "data/x", "sub/.env")
    (project / ".gitignore").write_text("data\nsub/.env\n")
    assert found(project, exclude=("no",)).left_out == {
        ".env": Reason.PRIVATE,
        "env/": Reason.NO_SOURCE,
        "pkg/__pycache__/": Reason.NO_SOURCE,
    }


def test_script_has_the_ignore_rules_of_its_own_folder(project, tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    git(tmp_path, "init", "-q", str(repository))
    write(repository, "sub/x")
    (repository / ".gitignore").write_text("*.txt\n")
    write(project, "data.txt")
    (tmp_path / "link").symlink_to(repository / "sub")  # behind it, `..` is the repository
    monkeypatch.chdir(repository)
    _, script = named_job(f"../{project.name}/train.py", Path())
    assert script is not None
    assert files(script.parent) == {"data.txt", "train.py"}
    write(repository, "own.py")
    assert named_job("../link/../own.py", Path()) == (None, repository / "own.py")


def test_include_and_exclude_patterns_select_files(project):
    git(project, "init", "-q")
    (project / ".gitignore").write_text("data/\n*.bin\ntrain.py\n")
    write(project, "data/a", "data/sub/b.bin", "weights.bin", "notes.txt", "big/x", "__pycache__/c")
    # The script always goes.
    assert files(project) == {
        "train.py",
        ".gitignore",
        "notes.txt",
        "big/x",
    }
    assert files(project, include=("data/sub/",)) == files(project) | {"data/sub/b.bin"}
    assert files(project, include=("*.bin",)) == files(project) | {"data/sub/b.bin", "weights.bin"}
    assert files(project, include=("/*.bin",)) == files(project) | {"weights.bin"}
    assert files(project, exclude=("big", "*.txt")) == {"train.py", ".gitignore"}
    assert files(project, include=("data/",), exclude=("data/sub",)) == files(project) | {"data/a"}
    assert files(project, include=("__pycache__",)) == files(project) | {"__pycache__/c"}
    assert "train.py" in files(project, exclude=("*",))
    alone = found(project, folder=False)
    assert ([item.path for item in alone.items], alone.notes) == (["train.py"], ())
    # Folders that hold what is included come, too.
    folders = [
        item.path
        for item in found(project, include=("*.bin",)).items
        if item.kind is ItemKind.FOLDER
    ]
    assert folders == ["big", "data", "data/sub"]


def collect_into(run: Path, sent: Source) -> None:
    """Make the folder of a collected run, with all files that were sent, as `collect` does."""
    for item in sent.files:
        write(run, item.path)
    write(run, "model/heat", "SHA256SUMS", "environment.json", "job.sbatch", "report.html")
    (run / "run.json").write_text(json.dumps(record()))
    (run / "report.html").write_bytes(REPORT_MARK)


@pytest.fixture
def used_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an ignored binary, ``heat``, and files of that name in folders that are no
    source.
    """
    monkeypatch.setenv("CLUSTERCTL_HOME", str(project / "state"))
    git(project, "init", "-q")
    (project / ".gitignore").write_text("heat\n.venv\n*.html\n")
    write(project, "heat", "src/heat", ".venv/pyvenv.cfg", ".venv/bin/heat", "node_modules/a/heat")
    write(project, "state/demo/heat", "state/demo/id_ed25519", "runs/.demo-3.incomplete/tree/heat")
    for name in ("demo-1", "demo-2"):
        collect_into(project / "runs" / name, found(project, include=("/heat",)))
    (project / "runs" / "demo-2" / "run.json").write_text("{")
    write(project, "runs/demo-home-ada/jobs/heat")
    note_copied_folder(project / "runs" / "demo-home-ada")
    write(project, "paper.html")
    (project / "report.html").write_bytes(b"<!doctype html>" + REPORT_MARK)
    return project


SOURCE = {"train.py", ".gitignore"}


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("heat", {"heat", "src/heat"}),
        ("/heat", {"heat"}),
        ("**/heat", {"heat", "src/heat"}),
        ("he?t", {"heat", "src/heat"}),
        ("[gh]eat", {"heat", "src/heat"}),
        ("*", {"heat", "src/heat", "paper.html"}),
        ("*.html", {"paper.html"}),
        ("runs/*/heat", set()),
        ("runs/", set()),
        ("demo-*", set()),
        ("model/", set()),
        ("bin/", set()),
        ("run.json", set()),
        ("id_ed25519", set()),
        ("*.sbatch", set()),
        (".*", set()),
    ],
)
def test_include_pattern_never_selects_runs_reports_and_environments(
    used_project, pattern, selected
):
    assert files(used_project, include=(pattern,)) == SOURCE | selected


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("/runs/demo-1/heat", {"runs/demo-1/heat"}),
        ("runs/demo-2/model/", {"runs/demo-2/model/heat"}),
        ("runs/demo-home-ada", {"runs/demo-home-ada/jobs/heat"}),
        (".venv/", {".venv/pyvenv.cfg", ".venv/bin/heat"}),
        ("/node_modules", {"node_modules/a/heat"}),
        ("/report.html", {"report.html"}),
    ],
)
def test_include_selects_the_path_that_it_names(used_project, pattern, selected):
    assert files(used_project, include=(pattern,)) == SOURCE | selected
    # A second pattern, for a name that files of these folders have, does not reach into them.
    both = files(used_project, include=(pattern, "heat"))
    assert both == SOURCE | selected | {"heat", "src/heat"}


def test_include_pattern_with_exclamation_mark_holds_in_a_named_run(used_project):
    named = files(used_project, include=("/runs/demo-1", "!model/"))
    assert "runs/demo-1/heat" in named
    assert "runs/demo-1/model/heat" not in named


@pytest.mark.parametrize("pattern", ["/heat", "heat"])
def test_thirty_rounds_of_submit_and_collect_send_the_same_files(project, pattern):
    git(project, "init", "-q")
    (project / ".gitignore").write_text("heat\n")
    write(project, "heat")
    for number in range(30):
        sent = found(project, include=(pattern,))
        assert {item.path for item in sent.files} == {"train.py", ".gitignore", "heat"}
        collect_into(project / "runs" / f"demo-{number}", sent)


@pytest.mark.parametrize(
    "name",
    [
        "a[1].csv",
        "!x",
        "#x",
        "x*y",
        "w?y",
        "back\\slash",
        "it's $HOME",
        "end ",
        "d/a b",
        "-x",
        "{a,b}",
    ],
)
def test_pattern_of_a_path_selects_only_that_path(project, name):
    git(project, "init", "-q")
    (project / ".gitignore").write_text("*\n")
    write(project, name, f"sub/{name}", "a1.csv", "xzy", "wzy")
    assert files(project, include=(literal_pattern(name),)) == {"train.py", name}


def test_include_pattern_that_selects_nothing_is_noted(used_project):
    assert not found(used_project, include=("heat", "!x")).notes
    for pattern in ("demo-*", "typo.csv", "bin/"):
        (note,) = found(used_project, include=("heat", pattern)).notes
        assert condition(note) == "include-selects-nothing"
        assert pattern in note


def test_argument_that_exists_here_and_is_not_sent_is_noted(project, monkeypatch):
    git(project, "init", "-q")
    write(project, "data/x", "run/conf.json", ".env", "env/pyvenv.cfg")
    (project / ".gitignore").write_text("data\n")
    monkeypatch.chdir(project / "run")
    args = (
        "--in=../data/x",
        "../data",
        "conf.json",
        "none.txt",
        "../.env",
        "..",
        "/etc",
        "../../x",
    )
    (job,) = read_jobs("../train.py", {"args": args})
    source = source_of(Request.read(job))
    assert source is not None
    notes = [note for note in source.notes if condition(note) == "argument-not-sent"]
    options = [shlex.split(note.partition("--include ")[2])[0] for note in notes]
    assert options == ["/data/x", "/data"]
