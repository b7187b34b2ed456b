"""Which file lists a project's packages, and what is said about it; uv reads the packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.package_files import find_package_file
from clusterctl.packages.project_files import (
    PackageList,
    content_hash,
    member_roots,
    unsupported_packages,
)
from clusterctl.packages.pure_builds import is_of_sources
from clusterctl.packages.wheelhouse import Wheel
from tests.support.messages import refused

NODE = NodePlatform("3.13", 36)
PROJECT = """
[project]
name = "textnet"
version = "0.1"
requires-python = ">=3.11"
dependencies = ["six>=1", "tomli-w; python_version < '3.14'"]
[project.optional-dependencies]
plot = ["matplotlib"]
all = ["textnet[plot]", "rich"]
[dependency-groups]
dev = ["pytest"]
train = ["toolz", {include-group = "log"}]
log = ["loguru"]
"""
LOCK = """
lock-version = "1.0"
created-by = "a test"
requires-python = ">=3.11"
extras = ["plot"]
dependency-groups = ["train"]
default-groups = []
[[packages]]
name = "first"
version = "1.0"
wheels = [
 {url = "https://f.example.org/first-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", hashes = {sha256 = "aa"}},
 {url = "https://f.example.org/first-1.0-cp313-cp313-manylinux_2_28_x86_64.whl", hashes = {sha256 = "bb"}},
 {url = "https://f.example.org/first-1.0-cp313-cp313-manylinux_2_40_x86_64.whl", hashes = {sha256 = "cc"}},
]
[[packages]]
name = "windows-only"
version = "1.0"
marker = "sys_platform == 'win32'"
wheels = [{url = "https://f.example.org/windows_only-1.0-py3-none-any.whl", hashes = {sha256 = "dd"}}]
[[packages]]
name = "drawing"
version = "2.0"
marker = "'plot' in extras"
wheels = [{path = "wheels/drawing-2.0-py3-none-any.whl", hashes = {sha256 = "ee"}}]
[[packages]]
name = "logging"
version = "3.0"
marker = "'train' in dependency_groups"
sdist = {url = "https://f.example.org/logging-3.0.tar.gz", hashes = {sha256 = "ff"}}
[[packages]]
name = "member"
directory = {path = "packages/member", editable = true}
"""
SCRIPT = '# /// script\n# dependencies = ["six"]\n# ///\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def listed(folder: Path, name: str, text: str, names: str = "") -> PackageList:
    """What is read of a file with this text."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return PackageList.read(folder / f"{name}{names}", NODE)


@pytest.mark.parametrize(
    ("names", "words", "shown"),
    [
        ("", [], "2 packages"),
        ("[plot]", ["--extra", "plot"], "2 packages, extra plot"),
        (
            "[train, plot]",
            ["--extra", "plot", "--group", "{file}:train"],
            "extra plot, group train",
        ),
    ],
)
def test_extras_and_groups_of_pyproject_are_asked_of_uv(
    tmp_path: Path, names: str, words: list[str], shown: str
) -> None:
    packages = listed(tmp_path, "pyproject.toml", PROJECT, names)
    file = tmp_path / "pyproject.toml"
    assert packages.words(tmp_path) == [str(file), *(word.format(file=file) for word in words)]
    assert packages.summary.startswith("pyproject.toml: ")
    assert shown in packages.summary
    assert not packages.is_locked


def test_default_groups_of_uv_are_installed(tmp_path: Path) -> None:
    text = f'{PROJECT}[tool.uv]\ndefault-groups = ["log"]\n'
    assert listed(tmp_path, "pyproject.toml", text).groups == ("log",)


def test_project_whose_packages_are_in_a_file_has_those_of_that_file(tmp_path: Path) -> None:
    text = (
        '[project]\nname = "a"\ndynamic = ["dependencies"]\n'
        '[tool.setuptools.dynamic]\ndependencies = {file = ["needs.txt"]}\n'
    )
    (tmp_path / "needs.txt").write_text("six\n")
    packages = listed(tmp_path, "pyproject.toml", text)
    assert packages.words(tmp_path) == [str(tmp_path / "needs.txt")]
    before = list(packages.contents)
    (tmp_path / "needs.txt").write_text("rich\n")
    assert list(packages.contents) != before


@pytest.mark.parametrize(
    ("name", "text", "code", "fix"),
    [
        (
            "pyproject.toml",
            "[tool.poetry.dependencies]\nsix='*'\n",
            "packages-unmet/project-table",
            "poetry",
        ),
        ("pyproject.toml", "[tool.ruff]\n", "packages-unmet/project-table", "uv pip compile"),
        (
            "pyproject.toml",
            '[project]\nname="a"\ndynamic=["dependencies"]\n',
            "packages-unmet/computed",
            "uv pip compile",
        ),
        ("pyproject.toml", "[project\n", "file-invalid/packages", ""),
        ("pyproject.toml", "[project]\ndependencies = [1]\n", "file-invalid/packages", ""),
        # A text is not the list of its letters.
        ("pyproject.toml", '[project]\ndependencies = "numpy"\n', "file-invalid/packages", ""),
        ("pyproject.toml", '[project]\ndynamic = "dependencies"\n', "file-invalid/packages", ""),
        ("pyproject.toml", "[project]\ndynamic = true\n", "file-invalid/packages", ""),
        (
            "pyproject.toml",
            '[project]\n[dependency-groups]\na = []\n[tool.uv]\ndefault-groups = "a"\n',
            "file-invalid/packages",
            "",
        ),
        (
            "pyproject.toml",
            '[project]\nrequires-python = "==3.11.*"\n',
            "packages-unmet/python",
            "--env-path",
        ),
        (
            "train.py",
            f"{SCRIPT.removesuffix('# ///' + chr(10))}# [[tool.uv.index]]\n# url = 'https://x'\n# ///\n",
            "packages-unmet/lock-missing",
            "uv lock --script",
        ),
        ("train.py", "import torch\n", "packages-unmet/script-block", "requirements.txt"),
        ("train.py", "# /// script\n# x\n# ///\n", "file-invalid/packages", ""),
        ("train.py", f"{SCRIPT}\nimport six\n{SCRIPT}", "file-invalid/script-blocks", "join"),
        (
            "train.py",
            '# /// script\n# dependencies = "numpy"\n# ///\n',
            "file-invalid/packages",
            "",
        ),
        ("environment.yml", "dependencies: [{pip: [six]}]\n", "packages-unmet/conda", "--env-path"),
        ("pylock.toml", "lock-version = '1.0'\n", "file-invalid/packages", ""),
        (
            "pylock.toml",
            LOCK.replace('requires-python = ">=3.11"', 'requires-python = "<3.12"'),
            "packages-unmet/lock",
            "",
        ),
        ("pylock.toml", LOCK.replace("cp313-cp313", "cp311-cp311"), "packages-unmet/lock", ""),
    ],
)
def test_file_that_pip_can_not_use_is_rejected_with_the_way_that_works(
    tmp_path: Path, name: str, text: str, code: str, fix: str
) -> None:
    with refused(code, UsageError) as caught:
        listed(tmp_path, name, text)
    assert fix in caught.value.fix
    assert caught.value.where == str(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", PROJECT),
        ("pylock.toml", LOCK),
        ("train.py.lock", LOCK),
        ("a.txt", "six\n"),
    ],
)
def test_unknown_extra_is_rejected(tmp_path: Path, name: str, text: str) -> None:
    code = "option-invalid/extra" if name == "a.txt" else "not-found/extra"
    with refused(code, UsageError):
        listed(tmp_path, name, text, "[plto]")


def test_lock_gives_the_wheels_for_the_nodes_with_their_hashes(tmp_path: Path) -> None:
    packages = listed(tmp_path, "pylock.toml", LOCK)
    assert packages.lines == (
        "first @ https://f.example.org/first-1.0-cp313-cp313-manylinux_2_28_x86_64.whl#sha256=bb",
    )
    other = listed(tmp_path, "pylock.toml", LOCK.replace("sha256", "sha512"))
    assert [line.rpartition("#")[2] for line in other.lines or ()] == ["sha512=bb"]


def test_wheel_of_a_url_with_a_query_is_one(tmp_path: Path) -> None:
    packages = listed(tmp_path, "pylock.toml", LOCK.replace('64.whl"', '64.whl?token=a%2Fb"'))
    (line,) = packages.lines or ()
    assert not is_of_sources(line)
    assert Wheel.of_line(line) == Wheel.of("first-1.0-cp313-cp313-manylinux_2_28_x86_64.whl", "bb")


def test_lock_gives_extras_groups_and_local_wheels(tmp_path: Path) -> None:
    packages = listed(tmp_path, "pylock.toml", LOCK, "[plot,train]")
    assert packages.lines is not None
    assert packages.lines[0].startswith(f"drawing @ file://{tmp_path}/wheels/drawing-2.0-py3-none")
    assert packages.lines[2] == "logging @ https://f.example.org/logging-3.0.tar.gz#sha256=ff"


def test_folder_of_a_lock_outside_of_the_project_is_refused(tmp_path: Path) -> None:
    with refused("packages-unmet/wheel", UsageError, "pip wheel"):
        listed(tmp_path, "pylock.toml", LOCK.replace("packages/member", "../member"))


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("requirements.txt", b"six  # caf\xe9\n"),
        ("requirements.txt", b"\xff\xfes\0i"),
        ("pyproject.toml", b'[project]\ndependencies = ["a @ https://x/caf\xe9.whl"]\n'),
        ("train.py", b'# /// script\n# dependencies = ["caf\xe9"]\n# ///\n'),
        ("pylock.toml", b"\xe9"),
    ],
)
def test_file_that_is_not_text_is_refused(tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    with refused("file-invalid/not-text", UsageError, "UTF-8") as caught:
        content_hash([tmp_path / name])
    assert caught.value.where == str(tmp_path / name)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"requirements.txt": "six\n", "pyproject.toml": PROJECT}, "requirements.txt"),
        ({"requirements.txt": "# none\n", "pyproject.toml": PROJECT}, "pyproject.toml"),
        ({"pyproject.toml": PROJECT, "uv.lock": "version = 1\n"}, "uv.lock"),
        (
            {"pyproject.toml": "[tool.ruff]\n", "../requirements.txt": "six\n"},
            "../requirements.txt",
        ),
        ({"pyproject.toml": PROJECT, "../requirements.txt": "six\n"}, "pyproject.toml"),
        ({"pyproject.toml": "[tool.ruff]\n", "../../requirements.txt": "six\n"}, None),
        ({"environment.yml": "dependencies: [gdal]\n"}, "environment.yml"),
        ({"Pipfile": "[packages]\nsix = '*'\n"}, "Pipfile"),
        ({"Pipfile": "[dev-packages]\nsix = '*'\n"}, None),
        ({"setup.cfg": "[options]\ninstall_requires =\n  six\n"}, "setup.cfg"),
        ({"setup.cfg": "[flake8]\n# install_requires = x\n"}, None),
        ({"setup.py": "setup(install_requires=['six'])\n"}, "setup.py"),
        ({"setup.py": "setup()\n", "../requirements.txt": "x\n"}, "../requirements.txt"),
        # Files of other programs with this name.
        ({"environment.yaml": "stage: prod\n"}, None),
        ({"environment.yml": "- a\n"}, None),
        ({"environment.yml": "a: !Ref b\n", "../requirements.txt": "x\n"}, "../requirements.txt"),
        ({"pyproject.toml": "[project\n", "../requirements.txt": "x\n"}, "pyproject.toml"),
        ({"a.py": "# /// script\n# dependencies = []\n# ///\n", "requirements.txt": "x\n"}, "a.py"),
        ({"requirements-dev.txt": "six\n"}, None),
    ],
)
def test_file_of_a_program_is_that_of_the_nearest_folder(
    tmp_path: Path, files: dict[str, str], found: str | None
) -> None:
    folder = tmp_path / "above" / "top" / "scripts"
    folder.mkdir(parents=True)
    (folder / "a.py").touch()
    for name, text in files.items():
        (folder / name).write_text(text)
    file = find_package_file(folder / "a.py", folder.parent)
    assert file == (None if found is None else (folder / found).resolve())


def test_file_above_the_folder_that_is_sent_is_not_found_through_a_link(tmp_path: Path) -> None:
    top = tmp_path / "above" / "top"
    top.mkdir(parents=True)
    (tmp_path / "above" / "requirements.txt").write_text("six\n")
    (tmp_path / "link").symlink_to(top)
    for script, sent in ((top, tmp_path / "link"), (tmp_path / "link", top)):
        assert find_package_file(script / "a.py", sent) is None
    (top / "requirements.txt").write_text("six\n")
    assert find_package_file(tmp_path / "link/a.py", top) == top / "requirements.txt"


@pytest.mark.parametrize("name", ["Pipfile", "setup.cfg", "setup.py"])
def test_file_that_only_another_tool_reads_is_refused_with_the_command(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("install_requires = x\n")
    error = unsupported_packages(tmp_path / name)
    assert error is not None
    with refused("file-invalid/requirements", UsageError) as caught:
        list(PackageList.read(tmp_path / name, NODE).contents)
    command = error.fix.split("`")[1]
    assert command in caught.value.fix


def test_packages_of_a_workspace_are_imported_from_their_folders(tmp_path: Path) -> None:
    sources = ('registry = "https://x"', 'editable = "."', 'editable = "libs/a"', 'directory = "b"')
    text = "".join(f'[[package]]\nname = "p"\nsource = {{ {source} }}\n' for source in sources)
    (tmp_path / "uv.lock").write_text(text)
    (tmp_path / "libs/a/src").mkdir(parents=True)
    for choice in ("uv.lock", "uv.lock[train]"):
        assert [*member_roots(tmp_path / choice)] == [
            tmp_path,
            tmp_path / "libs/a/src",
            tmp_path / "b",
        ]


@pytest.mark.parametrize("text", ["package = 3\n", "package = [3]\n"])
def test_malformed_lock_of_uv_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "uv.lock").write_text(text)
    with refused("file-invalid/packages", UsageError):
        [*member_roots(tmp_path / "uv.lock")]


def test_content_hash_depends_on_the_chosen_extras(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    choices = ("pyproject.toml", "pyproject.toml[plot]")
    first, second = (content_hash([tmp_path / name]) for name in choices)
    assert first != second
