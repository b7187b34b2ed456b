"""The folder that is sent with a script, and where the program starts, for many layouts of a
project.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.jobs.prepare import read_jobs
from clusterctl.jobs.source import source_of
from clusterctl.scheduler.request.request import Request
from clusterctl.spec.job import JobSpec
from tests.support.messages import refused


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is no home, for a project."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "work; $(x)"
    folder.mkdir()
    return folder


def write(top: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)


def job_from(
    here: Path, target: str, monkeypatch: pytest.MonkeyPatch, *args: str, **options: Any
) -> JobSpec:
    monkeypatch.chdir(here)
    (job,) = read_jobs(target, {"args": list(args), **options} if args else options)
    return job


def sent(job: JobSpec) -> set[str]:
    source = source_of(Request.read(job))
    assert source is not None
    return {item.path for item in source.files}


PACKAGE = {
    "pyproject.toml": "",
    "mypkg/__init__.py": "",
    "mypkg/train.py": "from mypkg.model import fit\n",
    "scripts/train.sh": "#!/bin/bash\nexport PYTHONPATH=$PWD\npython mypkg/train.py\n",
    "train.py": "",
}
SRC = {
    "src/pkg/__init__.py": "",
    "src/pkg/train.py": "",
    "go.sh": "#!/bin/bash\nsrun python -m pkg.train\n",
}
MONOREPO = {
    ".git/HEAD": "",
    "apps/train/setup.cfg": "",
    "apps/train/app/main.py": "",
    "apps/serve/big.bin": "x",
    "apps/own/run.py": "import helper\n",
}
PLAIN = {"a/t.py": "import lib\n", "lib.py": "", "conf.json": ""}
# Layout, the user's folder, JOB, arguments -> the sent folder, the program's folder in it, import
# roots.
Case = tuple[Mapping[str, str], str, str, tuple[str, ...], str, str, tuple[str, ...]]
CASES: tuple[Case, ...] = (
    # The nearest folder with a project file.
    (PACKAGE, ".", "train.py", (), ".", ".", ()),
    (PACKAGE, ".", "mypkg/train.py", (), ".", ".", (".",)),
    (PACKAGE, ".", "scripts/train.sh", (), ".", ".", (".",)),
    (PACKAGE, "mypkg", "train.py", (), ".", "mypkg", (".",)),
    (PACKAGE, "..", "work; $(x)/mypkg/train.py", (), ".", ".", (".",)),
    (SRC | {"setup.py": ""}, ".", "src/pkg/train.py", (), ".", ".", (".", "src")),
    (SRC | {"setup.py": ""}, ".", "go.sh", (), ".", ".", ("src",)),
    (SRC | {"requirements.txt": ""}, "src", "pkg/train.py", (), ".", "src", (".", "src")),
    (SRC | {"environment.yml": ""}, "src", "pkg/train.py", (), ".", "src", (".", "src")),
    (MONOREPO, ".", "apps/train/app/main.py", (), "apps/train", ".", (".",)),
    (MONOREPO, "apps/own", "run.py", (), ".", "apps/own", (".",)),
    (PACKAGE | {"sub/setup.py": "", "sub/p/t.py": ""}, ".", "sub/p/t.py", (), "sub", ".", (".",)),
    # Without a project file, the script's folder, whatever the script and its arguments name.
    (PLAIN, ".", "a/t.py", ("conf.json",), "a", ".", ()),
    (SRC, ".", "src/pkg/train.py", (), "src/pkg", ".", ()),
    ({"train.py": "", "out/old": ""}, "out", "../train.py", (), ".", "out", ()),
    # A module: the folder from which it is imported, or a project above.
    (PACKAGE, ".", "-m mypkg.train", (), ".", ".", (".",)),
    (PACKAGE | {".git/HEAD": ""}, "mypkg", "-m mypkg.train", (), ".", "mypkg", (".",)),
    (SRC | {"setup.py": ""}, ".", "-m pkg.train", (), ".", ".", ("src", ".")),
    (SRC, ".", "-m pkg.train", (), "src", ".", (".",)),
    # The package contains a module of its own name, or has the name of a module of Python.
    ({"p/__init__.py": "", "p/t.py": "", "p/p.py": ""}, ".", "-m p.t", (), ".", ".", (".",)),
    ({"code/__init__.py": "", "code/t.py": ""}, ".", "-m code.t", (), ".", ".", (".",)),
    ({"src/p/q/__main__.py": ""}, ".", "-m p.q", (), "src", ".", (".",)),
)


@pytest.mark.parametrize("case", CASES)
def test_project_of_layout_is_sent(top: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    files, here, target, args, folder, start, roots = case
    write(top, files)
    place = job_from((top / here).resolve(), target, monkeypatch, *args).place
    assert (place.folder, place.start, place.roots) == ((top / folder).resolve(), start, roots)
    assert (place.folder / place.script).is_file()


def test_folder_option_selects_the_project(top, monkeypatch):
    write(top, PLAIN | {"pyproject.toml": "", "a/b/u.py": "", "a/setup.py": ""})
    job = job_from(top / "a", "b/u.py", monkeypatch, folder=Path(".."))
    assert (job.place.folder, job.place.start, job.place.roots) == (top, "a", (".",))
    assert job.place.script == "a/b/u.py"
    assert {"lib.py", "a/t.py"} <= sent(job)
    job = job_from(top, "a/b/u.py", monkeypatch, folder=Path("a/b"))
    assert (job.place.script, job.place.start, job.place.roots) == ("u.py", ".", ())


@pytest.mark.parametrize("folder", ["nowhere", "x" * 300, "b", "a/t.py", "/"])
def test_folder_option_without_the_script_is_refused(top, monkeypatch, folder):
    write(top, {"a/t.py": "", "b/x": ""})
    with refused("files-unfit/folder", UsageError):
        job_from(top, "a/t.py", monkeypatch, folder=Path(folder))


def test_module_that_does_not_exist_is_refused(top, monkeypatch):
    write(top, SRC)
    for module in ("pkg.nope", "pkg/train", "..pkg", "pkg.train; rm"):
        with refused("not-found/module", UsageError):
            job_from(top, f"-m {module}", monkeypatch)
    with refused("options-exclusive", UsageError):
        job_from(top, "-m pkg.train", monkeypatch, folder=False)


@pytest.mark.parametrize("make", ["home", "link", "folder"])
def test_module_without_its_package_is_refused(top, monkeypatch, make):
    write(top, {"real/train.py": ""})
    (top / "pkg").symlink_to("real") if make == "link" else (top / "real").rename(top / "pkg")
    if make == "home":
        monkeypatch.setenv("HOME", str(top))
    with refused("files-unfit/module", UsageError):
        job_from(top, "-m pkg.train", monkeypatch, folder=Path("pkg") if make == "folder" else True)


def test_package_with_main_is_a_module(top, monkeypatch):
    write(top, SRC | {"setup.py": "", "src/pkg/__main__.py": ""})
    job = job_from(top, "-m pkg", monkeypatch)
    assert (job.run_module, job.place.script, job.name) == ("pkg", "src/pkg/__main__.py", "pkg")


def test_home_folder_is_never_a_project(top, monkeypatch):
    monkeypatch.setenv("HOME", str(top))
    write(top, PACKAGE | {".git/HEAD": ""})
    job = job_from(top, "mypkg/train.py", monkeypatch)
    assert job.place.folder == top / "mypkg"


def test_script_of_the_home_folder_starts_where_it_is_sent(top, monkeypatch):
    monkeypatch.setenv("HOME", str(top))
    write(top, {"train.py": "", "work/a.yaml": "job: ../train.py\n"})
    for here, target in (("work", "../train.py"), (".", "work/a.yaml")):
        job = job_from(top / here, target, monkeypatch)
        assert (job.place.script, job.place.start, sent(job)) == ("train.py", ".", {"train.py"})


@contextmanager
def as_another_user() -> Iterator[None]:
    """Root can search every folder."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("target", "locked"),
    [("../t.py", "pkg"), ("u.py", "a/src"), ("u.py", "lib"), ("-m t", "a/src")],
)
def test_folder_that_can_not_be_searched_is_passed_over(monkeypatch, target, locked):
    with TemporaryDirectory() as name:
        top = Path(name).resolve()
        files = (".git/HEAD", "t.py", "a/u.py", "pkg/x.py", "a/src/x.py", "lib/x/__init__.py")
        write(top, dict.fromkeys(files, ""))
        top.chmod(0o755)
        # The names in the folder can be listed.
        (top / locked).chmod(0o444)
        monkeypatch.chdir(top / "a")
        with as_another_user():
            (job,) = read_jobs(target, {})
        monkeypatch.chdir("/")
        (top / locked).chmod(0o755)
    assert job.place.folder == top


def test_script_behind_a_link_is_sent_from_there(top, monkeypatch):
    write(top, {"pyproject.toml": "", "lib.py": "", "real/t.py": "import lib\n"})
    (top / "link").symlink_to("real")
    job = job_from(top, "link/t.py", monkeypatch)
    assert job.place.folder == top / "link"
    assert sent(job) == {"t.py"}


def test_job_file_behind_a_link_starts_in_the_folder_itself(top, monkeypatch):
    write(top, {"top.py": "", "scripts/j.yaml": "job: ../top.py\n"})
    (top / "lk").symlink_to("scripts")
    job = job_from(top, "lk/j.yaml", monkeypatch)
    source = source_of(Request.read(job))
    assert source is not None
    assert sorted(item.path for item in source.items) == [
        "lk",
        "scripts",
        "scripts/j.yaml",
        "top.py",
    ]
    assert (job.place.folder, job.place.start) == (top, "scripts")


def test_metrics_of_a_local_run_are_sent(top, monkeypatch):
    names = {"train.py", "exps/metrics.jsonl", "exps/a/metrics.jsonl"}
    write(top, dict.fromkeys(names, ""))
    for array in (None, "0-1"):
        assert sent(job_from(top / "exps", "../train.py", monkeypatch, array=array)) == names


def test_job_file_is_the_current_folder(top, monkeypatch):
    write(top, SRC | {"job.yaml": "job: go.sh\n", "mod.yaml": "job: -m pkg.train\nfolder: .\n"})
    for file, roots in (("job.yaml", ("src",)), ("mod.yaml", ("src", "."))):
        job = job_from(top.parent, f"{top.name}/{file}", monkeypatch)
        assert (job.place.folder, job.place.start, job.place.roots) == (top, ".", roots)
