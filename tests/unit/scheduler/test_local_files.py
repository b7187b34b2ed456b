"""Advice on files and modules that a job did not find, for many layouts of the user's folders."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterctl.scheduler.ends.diagnose import diagnose
from clusterctl.scheduler.ends.diagnosis import Diagnosis
from clusterctl.scheduler.ends.facts import Evidence
from clusterctl.scheduler.ends.local_files import LocalFiles
from tests.unit.scheduler.test_diagnosis import JOB, TRACEBACK, names

REMOTE = "/home/ada/clusterctl/jobs/train-1"


def diagnosed(top: Path, place: str, log: str, sent: tuple[str, ...], **request: Any) -> Diagnosis:
    """Diagnose the failure of the script train.py in the folder ``place`` below ``top``."""
    facts = {
        "folder": str(top / place),
        "job": {"script": str(top / place / "train.py"), **request},
    }
    source = {"files": [{"path": path} for path in (*sent, "train.py")]}
    files = LocalFiles.of(facts, source, REMOTE)
    return diagnose(Evidence(job=JOB, log=log, left_here=files.find, packages=files.packages))


def advice(found: Diagnosis) -> str:
    """Return what the diagnosis and its hints propose."""
    return "\n".join([found.fix, *(hint.fix for hint in found.hints)])


def write(top: Path, *names: str) -> None:
    for name in names:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text("six\n")


def no_module(name: str) -> str:
    return TRACEBACK + f"ModuleNotFoundError: No module named '{name}'\n"


def no_file(name: str) -> str:
    return TRACEBACK + f"FileNotFoundError: [Errno 2] No such file or directory: '{name}'\n"


@pytest.mark.parametrize(
    "case",
    [
        (["mypkg/__init__.py"], "mypkg", "mypkg", (), "module-stayed-at-home", "--folder {top}"),
        (["lib.py"], "a/b", "lib", (), "module-stayed-at-home", "--folder {top}"),
        (["src/pkg/x.py"], "scripts", "pkg.x", (), "module-stayed-at-home", "--folder {top}"),
        (["a/utils.py"], "a", "utils", (), "module-stayed-at-home", "--include /utils.py"),
        (
            ["libs/common/x.py"],
            "apps/a",
            "common",
            (),
            "module-stayed-at-home",
            "{top}/libs/common",
        ),
        (
            ["libs/common/x.py"],
            "",
            "common",
            ("libs/common/x.py",),
            "own-module-not-found",
            "PYTHONPATH=libs",
        ),
        (["pkg/a.py"], "", "pkg.b", ("pkg/a.py",), "own-module-not-found", "pkg"),
        (
            ["requirements.txt"],
            "",
            "torch",
            (),
            "missing-module",
            "--requirements {top}/requirements.txt",
        ),
        (["torch/notes.md"], "a", "torch", (), "missing-module", "add torch"),
        (
            [".venv/pyvenv.cfg", ".venv/lib/torch/x.py"],
            "a",
            "torch",
            (),
            "missing-module",
            "add torch",
        ),
    ],
)
def test_module_of_the_user_is_never_to_be_installed(tmp_path, case):
    files, folder, module, sent, code, words = case
    write(tmp_path, ".git/HEAD", f"{folder}/train.py" if folder else "train.py", *files)
    found = diagnosed(tmp_path, folder, no_module(module), sent)
    assert code in names(found)
    assert words.format(top=tmp_path) in advice(found)
    if code != "missing-module":
        assert "requirements" not in advice(found)


def test_requirements_of_the_job_are_named(tmp_path):
    write(tmp_path, "train.py", "requirements.txt")
    found = diagnosed(tmp_path, "", no_module("torch"), (), requirements="other.txt")
    assert "--requirements other.txt" in advice(found)


PROJECT = """
[project]
name = "p"
dependencies = ["six"]
optional-dependencies = {plot = ["Matplotlib>=3"]}
[dependency-groups]
train = ["torch", {include-group = "dev"}]
"""


@pytest.mark.parametrize(
    ("files", "request_", "words"),
    [
        ({"pyproject.toml": PROJECT, "uv.lock": ""}, {}, "--requirements {top}/uv.lock"),
        ({"pyproject.toml": "[tool.poetry.dependencies]\nsix = '1'\n"}, {}, "poetry export"),
        ({"Pipfile": "[packages]\nsix = '*'\n"}, {}, "pipenv requirements"),
        ({"setup.py": "setup(install_requires=['six'])\n"}, {}, "pip compile setup.py"),
        ({"setup.cfg": "[options]\ninstall_requires =\n  six\n"}, {}, "pip compile setup.cfg"),
        ({"environment.yml": "dependencies: [gdal]\n"}, {}, "--env-path"),
        ({"pyproject.toml": "[project\n"}, {}, "--requirements requirements.txt"),
        ({"setup.py": "setup()\n"}, {}, "--requirements requirements.txt"),
        ({"requirements.txt": "six\n"}, {"container": "docker://a/b"}, "image"),
        ({"requirements.txt": "six\n"}, {"env_path": "/shared/env"}, "environment /shared/env"),
    ],
)
@pytest.mark.parametrize("log", [no_module("humanize"), no_file(".venv/bin/activate")])
def test_way_to_the_packages_is_that_of_the_users_files(tmp_path, files, request_, words, log):
    write(tmp_path, "train.py", ".venv/pyvenv.cfg")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = diagnosed(tmp_path, "", log, (), **request_)
    if request_ and "virtual-environment-not-sent" in names(found):
        words = "--env-path"
    assert words.format(top=tmp_path) in advice(found)


@pytest.mark.parametrize("file", ["uv.lock", "pyproject.toml"])
@pytest.mark.parametrize(
    ("module", "chosen", "words"),
    [
        ("torch", "", "[train]'"),
        ("matplotlib.pyplot", "[train]", "[train,plot]'"),
        ("torch", "[train]", "[train]'; if"),
        ("jax", "", "; if"),
    ],
)
def test_group_that_lists_the_package_is_named(tmp_path, file, module, chosen, words):
    write(tmp_path, "train.py", "uv.lock")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    requirements = f"{tmp_path}/{file}{chosen}"
    found = diagnosed(tmp_path, "", no_module(module), (), requirements=requirements)
    assert f"{file}{words}" in advice(found)


@pytest.mark.parametrize(
    "case",
    [
        (["configs/a.json"], "scripts", "configs/a.json", "file-stayed-at-home", "--folder {top}"),
        (["conf/a.json"], "scripts", "../conf/a.json", "file-stayed-at-home", "--folder {top}"),
        (
            ["conf/a.json"],
            "p/q",
            f"{REMOTE}/../../conf/a.json",
            "file-stayed-at-home",
            "--folder {top}",
        ),
        (
            ["p/a.json"],
            "p/q",
            "/home/ada/clusterctl/jobs/a.json",
            "file-stayed-at-home",
            "--folder {top}/p",
        ),
        (["b/x"], "a", "../c/x", "missing-file", "put"),
        (["a/data/x"], "a", "data/x", "file-stayed-at-home", "--include /data/x"),
        (["a/data/x"], "a", f"{REMOTE}/data/x", "file-stayed-at-home", "--include /data/x"),
        (
            ["a/.venv/pyvenv.cfg"],
            "a",
            ".venv/bin/activate",
            "virtual-environment-not-sent",
            "--requirements",
        ),
        (
            ["env/pyvenv.cfg"],
            "a",
            "{top}/env/bin/python",
            "virtual-environment-not-sent",
            "--requirements",
        ),
        (["b/x"], "a", "x", "missing-file", "put"),
    ],
)
def test_file_of_the_user_is_named(tmp_path, case):
    files, folder, path, code, words = case
    write(tmp_path, ".git/HEAD", f"{folder}/train.py", *files)
    found = diagnosed(tmp_path, folder, no_file(path.format(top=tmp_path)), ())
    assert code in names(found)
    assert words.format(top=tmp_path) in advice(found)
    assert ("--include" in advice(found)) is ("--include" in words or code == "missing-file")


UNSENT = "data/waves/a.txt"


def program_error(message: str) -> str:
    return TRACEBACK.replace("main()", "load()") + f"{message}\n"


@pytest.mark.parametrize(
    ("log", "home"),
    [
        (program_error("FileNotFoundError: [Errno 2] No such file or directory: 'data/waves/a.txt'"), UNSENT),
        (program_error("FileNotFoundError: [Errno 2] No such file or directory: 'data'"), "data"),
        ("cat: data/waves/a.txt: No such file or directory\n", UNSENT),
        ("head: cannot open 'data/waves/a.txt' for reading: No such file or directory\n", UNSENT),
        ("sh: 0: cannot open data/waves/a.txt: No such file\n", UNSENT),
        ("job.sh: 2: data/waves/a.txt: not found\n", UNSENT),
        ('In file(con, "r") :\n  cannot open file \'data/waves/a.txt\': No such file or directory\n', UNSENT),
        ("cannot open file 'data/waves/a.txt': No such file or directory\nExecution halted\n", UNSENT),
        ("Error: ENOENT: no such file or directory, open 'data/waves/a.txt'\n", UNSENT),
        ("panic: open data/waves/a.txt: no such file or directory\n", UNSENT),
        ("java.nio.file.NoSuchFileException: data/waves/a.txt\n", UNSENT),
        ('ERROR: SystemError: opening file "data/waves/a.txt": No such file or directory\n', UNSENT),
        ("Can't open 'data/waves/a.txt': No such file or directory at a.pl line 3.\n", UNSENT),
        ("in `open': No such file or directory @ rb_sysopen - data/waves/a.txt (Errno::ENOENT)\n", UNSENT),
        ("filesystem error: cannot open file: No such file or directory [data/waves/a.txt]\n", UNSENT),
        ("Error: Os { code: 2, message: \"No such file or directory\" }: data/waves/a.txt\n", UNSENT),
        ("cannot open 'data/waves/a.txt', probable reason 'No such file or directory'\n", UNSENT),
        # Near misses: it was sent, this machine does not have it either, or the message has no path
        # that does not exist.
        ("cat: sent/waves: No such file or directory\n", ""),
        ("cat: data/other: No such file or directory\n", ""),
        (program_error("AttributeError: 'NoneType' object has no attribute 'data'"), ""),
        (program_error('UndefinedTable: relation "data" does not exist'), ""),
        (program_error("ImportError: cannot import name 'f' from 'data'"), ""),
        (program_error("ValueError: split 'data' is empty after filtering"), ""),
        (program_error("KeyError: \"no column 'data' in data/waves/a.txt\""), ""),
        (program_error("FileNotFoundError: no samples in data/waves/*.txt."), ""),
        ("warning: data/waves is empty, falling back to zeros\nepoch 1\nbad loss\n", ""),
        ("data/waves/a.txt: line 3: nosuch: command not found\n", ""),
        ("mkdir: cannot create directory 'data/waves': No such file or directory\n", ""),
        ("job.sh: 2: a.txt: not found\n", ""),
        ("ValueError: data/waves/a.txt: no such file format\n", ""),
        ("data/waves/a.txt:3: cannot open 'other': No such file or directory\n", ""),
        ("No such file or directory: 'other' (from data/waves/a.txt)\n", ""),
        ("data/waves/a.txt: line 3: other: No such file or directory\n", ""),
    ],
)  # fmt: skip
def test_error_about_a_path_that_was_not_sent_names_the_path(tmp_path, log: str, home: str) -> None:
    write(tmp_path, "train.py", UNSENT, "sent/waves/readme")
    found = diagnosed(tmp_path, "", log, ("sent/waves/readme",))
    assert ("file-stayed-at-home" in names(found)) == bool(home), found
    assert (f"--include /{home}" in advice(found)) == bool(home), found


@pytest.mark.parametrize("name", ["runs", "utils/a.py"])
def test_name_alone_is_not_searched_in_folders_above(tmp_path, name):
    """Another folder there may have it by chance."""
    write(tmp_path, ".git/HEAD", "a/train.py", "runs/x", "utils/a.py")
    found = diagnosed(tmp_path, "a", no_file(name), ())
    assert ("file-stayed-at-home" in names(found)) == ("/" in name)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("/home/ada/clusterctl/jobs/train-1/lib/util.sh", "file-in-program-folder"),
        ("/home/ada/clusterctl/jobs/train-1/lib/other.sh", "missing-file"),
        ("/home/ada/clusterctl/jobs/train-1/files/lib/util.sh", "missing-file"),
    ],
)
def test_file_that_was_sent_is_found_in_the_programs_folder(tmp_path, name, code):
    write(tmp_path, "train.py", "lib/util.sh")
    log = f"/x/run.sh: line 3: {name}: No such file or directory\n"
    facts = {"folder": str(tmp_path), "job": {"script": str(tmp_path / "train.py")}}
    source = {"files": [{"path": "train.py"}, {"path": "lib/util.sh"}]}
    files = LocalFiles.of(facts, source, f"{REMOTE}/files")
    assert code in names(diagnose(Evidence(job=JOB, log=log, left_here=files.find)))


def test_script_changed_since_submission_is_not_read(tmp_path):
    write(tmp_path, "train.py")
    text = "#!/bin/bash\nset -e\nread a\n"
    (tmp_path / "train.py").write_text(text)
    facts = {"folder": str(tmp_path), "job": {"script": str(tmp_path / "train.py")}}
    source = {"files": [{"path": "train.py", "sha256": hashlib.sha256(text.encode()).hexdigest()}]}
    files = LocalFiles.of(facts, source, REMOTE)
    assert files.script_text(source) == text
    (tmp_path / "train.py").write_text("#!/bin/bash\n")
    assert files.script_text(source) == ""


@pytest.mark.parametrize(
    ("project", "path", "words"),
    [
        ({"start": "sub"}, "x.csv", "--include /sub/x.csv"),
        ({"start": "."}, "sub/x.csv", "sub/x.csv"),
    ],
)
def test_paths_begin_where_the_program_starts(tmp_path, project: Mapping[str, str], path, words):
    write(tmp_path, "train.py", "sub/x.csv")
    assert words in advice(diagnosed(tmp_path, "", no_file(path), (), project=project))


def test_fix_for_a_script_sent_without_its_folder_is_folder(tmp_path):
    write(tmp_path, "train.py", "utils.py")
    found = diagnosed(tmp_path, "", no_module("utils"), (), folder=False)
    assert f"--folder {tmp_path}" in advice(found)


@pytest.mark.parametrize("command", ["conda", "module", "ml"])
def test_commands_of_other_clusters_are_to_be_removed(tmp_path, command):
    found = diagnosed(tmp_path, "", f"/x/run.sh: line 3: {command}: command not found\n", ())
    assert "modules-of-another-site" in names(found)
