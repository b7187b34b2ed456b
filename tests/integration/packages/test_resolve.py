"""pip resolves requirements to a lock of wheels for the nodes; conflicts are one error."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.packages import pip_for_node, wheelhouse
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.project_files import content_hash
from clusterctl.packages.source_archives import passed_over
from clusterctl.packages.wheelhouse import Lock, Pip, Requirements, resolve, wheel_path
from clusterctl.util.process import run_with_lines
from tests.support import forks
from tests.support.messages import refused, shows
from tests.support.wheels import a_wheel

Resolve = Callable[..., Lock]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "in dex"
    folder.mkdir()
    return folder


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def solve(
    tmp_path: Path, index: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> Resolve:
    """Resolve lines of a requirements file, beside a job environment that has basepart 2.0."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(wheelhouse, "run_with_lines", forks.pip)
    base = tmp_path / "base.lock"
    base.write_text("basepart==2.0 \\\n    --hash=sha256:" + 64 * "0" + "\n")

    def call(
        *lines: str,
        held: dict[str, str] | None = None,
        heard: Callable[[str], None] = lambda _line: None,
    ) -> Lock:
        file = tmp_path / "my requirements.txt"
        file.write_text("\n".join(("--no-index", "--find-links 'in dex'", *lines, "")))
        asked = Requirements((file,), base, held or {})
        return resolve(asked, Pip(asked.node, notes.append, heard))

    return call


def versions(lock: Lock) -> list[str]:
    return sorted(f"{wheel.name}=={wheel.version}" for wheel in lock.wheels)


def test_lock_has_dependencies_that_nodes_lack(solve: Resolve, index: Path) -> None:
    for version in ("2.0", "3.0"):
        a_wheel(index, "basepart", version)
    locked = a_wheel(index, "Second_Part").removesuffix("\n")
    a_wheel(index, "first", requires=("second-part", "basepart"))
    lock = solve("first")
    assert versions(lock) == ["first==1.0", "second-part==1.0"]
    assert locked.replace("Second_Part", "second-part") in lock.text
    assert all(wheel_path(wheel).is_file() for wheel in lock.wheels)


def test_requirement_of_the_user_overrides_the_version_of_nodes(
    solve: Resolve, index: Path
) -> None:
    for version in ("1.0", "2.0"):
        a_wheel(index, "basepart", version)
    assert versions(solve("basepart<2")) == ["basepart==1.0"]
    assert solve("basepart").wheels == ()


def test_held_versions_are_kept(solve: Resolve, index: Path) -> None:
    for version in ("1.0", "1.1"):
        a_wheel(index, "first", version)
    assert versions(solve("first")) == ["first==1.1"]
    assert versions(solve("first", held={"first": "1.0"})) == ["first==1.0"]


def test_only_conflicting_held_versions_change(solve: Resolve, index: Path) -> None:
    for version in ("1.0", "2.0"):
        a_wheel(index, "basepart", version)
        a_wheel(index, "first", version)
        a_wheel(index, "Torch_x", version, requires=("basepart==" + version,))
    held = {"first": "1.0", "torch-x": "2.0"}
    lock = solve("basepart<2", "first", "torch-x", held=held)
    assert versions(lock) == ["basepart==1.0", "first==1.0", "torch-x==1.0"]


def test_failure_that_is_no_conflict_is_not_tried_again(
    solve: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, pip is started as it is for users."""
    monkeypatch.setattr(wheelhouse, "run_with_lines", run_with_lines)
    heard: list[str] = []
    with refused("requirements-unmet", UsageError):
        solve("missing", heard=heard.append)
    assert sum("No matching distribution" in line for line in heard) == 1


def test_wheels_and_markers_are_those_of_a_node(solve: Resolve, index: Path) -> None:
    a_wheel(index, "first", "1.0", tag="cp313-cp313-manylinux_2_28_x86_64")
    a_wheel(index, "first", "2.0", tag="cp314-cp314-manylinux_2_28_x86_64")
    a_wheel(index, "first", "3.0", tag="cp313-cp313-manylinux_2_42_x86_64")
    a_wheel(index, "first", "4.0", tag="cp313-cp313-win_amd64")
    a_wheel(index, "early")
    here = (
        'early; python_version < "3.14" and sys_platform == "linux" and platform_machine == '
        '"x86_64"'
    )
    elsewhere = 'missing; python_version >= "3.14" or sys_platform == "win32"'
    assert versions(solve("first", here, elsewhere)) == ["early==1.0", "first==1.0"]


def test_markers_are_not_those_of_the_python_that_pip_runs_on(index: Path, tmp_path: Path) -> None:
    a_wheel(index, "late")
    lines = (
        'late; python_full_version == "3.19.0"',
        'missing; python_version < "3.19" or platform_machine != "sparc"',
    )
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    pip = Path(wheelhouse.__file__).with_name("pip_for_node.py")
    argv = [
        sys.executable,
        "-P",
        pip,
        json.dumps(NodePlatform("3.19", 36).markers | {"platform_machine": "sparc"}),
        "download",
        "--no-index",
        "--find-links",
        index,
    ]
    done = subprocess.run(
        [*argv, "-d", tmp_path / "to", "-r", "requirements.txt"], cwd=tmp_path, check=False
    )
    assert done.returncode == 0
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["late-1.0-py3-none-any.whl"]


def test_same_requirement_files_give_the_same_lock(
    solve: Resolve, index: Path, notes: list[str]
) -> None:
    a_wheel(index, "first", "1.0")
    lock = solve("first")
    a_wheel(index, "first", "1.1")
    assert (solve("first"), len(notes)) == (lock, 1)
    assert versions(solve("first", "# changed")) == ["first==1.1"]
    for wheel in lock.wheels:
        wheel_path(wheel).unlink()
    assert versions(solve("first")) == ["first==1.1"]


def test_included_requirement_files_are_read(solve: Resolve, index: Path, tmp_path: Path) -> None:
    for version in ("1.0", "1.1"):
        a_wheel(index, "first", version)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "more.txt").write_text("-c limits.txt\nfirst\n")
    limits = tmp_path / "sub" / "limits.txt"
    limits.write_text("first<1.1\n")
    assert versions(solve("-r sub/more.txt")) == ["first==1.0"]
    limits.write_text("first<2\n")
    assert versions(solve("-r sub/more.txt")) == ["first==1.1"]
    limits.unlink()
    with refused("file-unreadable", UsageError) as caught:
        solve("-r sub/more.txt")
    assert caught.value.where == f"{tmp_path}/sub/more.txt:1"


def test_wheel_on_this_machine_counts_by_its_content(solve: Resolve, tmp_path: Path) -> None:
    a_wheel(tmp_path, "mine")
    line = "./mine-1.0-py3-none-any.whl  # my own"
    before = solve(line)
    a_wheel(tmp_path, "mine", files={"mine.py": "changed = True\n"})
    assert versions(solve(line)) == versions(before) == ["mine==1.0"]
    assert solve(line).key != before.key


def test_wheel_on_this_machine_that_cannot_be_read(solve: Resolve, tmp_path: Path) -> None:
    (tmp_path / "mine-1.0-py3-none-any.whl").symlink_to("/proc/self/mem")  # whoever reads it: EIO
    with refused("file-unreadable", UsageError, "mine-1.0-py3-none-any.whl") as caught:
        solve("first", "./mine-1.0-py3-none-any.whl")
    assert caught.value.where == f"{tmp_path}/my requirements.txt:4"
    with refused("requirements-unmet", UsageError):  # too long to be a file's name: pip's affair
        solve(f"./{'x' * 300}.whl")


def test_hashes_in_the_file_are_checked(solve: Resolve, index: Path) -> None:
    good = a_wheel(index, "first")
    assert versions(solve(good)) == ["first==1.0"]
    with refused("requirements-unmet", UsageError) as caught:
        solve("first==1.0 --hash=sha256:" + 64 * "0")
    assert "hash" in caught.value.why.lower()


def test_unmet_requirements_have_the_message_of_pip(
    solve: Resolve, index: Path, tmp_path: Path
) -> None:
    a_wheel(index, "second", "1.0", tag="cp312-cp312-manylinux_2_28_x86_64")
    a_wheel(index, "third", requires=("fourth<2",))
    a_wheel(index, "fourth", "1.0")
    a_wheel(index, "fourth", "2.0")
    for lines, why in (
        (("first>3",), "No matching distribution found for first>3"),
        (("second",), "No matching distribution found for second"),
        (("third", "fourth==2.0"), "third 1.0 depends on fourth<2"),
        (("not a requirement",), "Invalid requirement"),
    ):
        with refused("requirements-unmet", UsageError) as caught:
            solve(*lines)
        assert why in caught.value.why
        assert caught.value.where == str(tmp_path / "my requirements.txt")
        assert "Python 3.13" in caught.value.fix
    assert list((tmp_path / "cache/clusterctl/python/locks").iterdir()) == []


def test_sources_are_refused(solve: Resolve, index: Path, tmp_path: Path) -> None:
    a_wheel(index, "first")
    project = tmp_path / "project"
    (project / "backend").mkdir(parents=True)
    (project / "pyproject.toml").write_text(
        '[project]\nname = "project"\nversion = "1"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["backend"]\n'
    )
    (project / "backend" / "backend.py").write_text(
        "import pathlib\n"
        "def prepare_metadata_for_build_wheel(folder, settings=None):\n"
        "    info = pathlib.Path(folder, 'project-1.dist-info')\n"
        "    info.mkdir()\n"
        "    info.joinpath('METADATA').write_text('Metadata-Version: 2.1\\nName: "
        "project\\nVersion: 1\\n')\n"
        "    return info.name\n"
        "def build_wheel(*_arguments): raise SystemExit('not asked for')\n"
    )
    with refused("no-wheel", UsageError) as caught:
        solve("first", "./project")
    assert "pip wheel" in caught.value.fix


BACKEND = """
import os, pathlib, zipfile

def build_wheel(folder, settings=None, metadata=None):
    assert "SECRET" not in os.environ
    assert not list(pathlib.Path.home().glob(".ssh*"))
    name = "{name}-{version}-{tag}.whl"
    info = "{name}-{version}.dist-info/"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as wheel:
        text = "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
        wheel.writestr(info + "METADATA", text)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: {tag}\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""


def a_source(index: Path, name: str, version: str, tag: str = "py3-none-any") -> None:
    """Put a source archive into the index. Its build needs no other package."""
    texts = {
        "pyproject.toml": f'[project]\nname = "{name}"\nversion = "{version}"\n[build-system]\n'
        'requires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND.format(name=name, version=version, tag=tag),
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }
    with tarfile.open(index / f"{name}-{version}.tar.gz", "w:gz") as archive:
        for file, text in texts.items():
            member = tarfile.TarInfo(f"{name}-{version}/{file}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture
def allowed(solve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow the build of `small`. It comes after `solve`, which removes variables of pip."""
    monkeypatch.setenv("PIP_NO_BINARY", "other,Small")


def test_source_archive_is_built_only_if_allowed(
    solve: Resolve, index: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build runs code of the package on the user's machine. Once there is a wheel, nothing is
    built.
    """
    a_source(index, "small", "1.2")
    monkeypatch.setenv("PIP_NO_BINARY", "other")
    with refused("requirements-unmet", UsageError, "PIP_NO_BINARY=other,small"):
        solve("small")
    assert not any(shows(line, "built-from-source") for line in notes)
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")
    lock = solve("small")
    monkeypatch.delenv("PIP_NO_BINARY")
    assert solve("small") == lock


@pytest.mark.usefixtures("allowed")
def test_source_archive_of_pure_python_becomes_a_wheel(
    solve: Resolve, index: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    a_source(index, "small", "1.2")
    a_source(index, "small", "2.0")
    a_wheel(index, "user", requires=["small<2"])
    lock = solve("user")
    assert versions(lock) == ["small==1.2", "user==1.0"]
    assert all(wheel_path(wheel).is_file() for wheel in lock.wheels)
    assert any(shows(line, "built-from-source") for line in notes)


def test_passed_over_compares_versions_of_wheels() -> None:
    output = """
    Downloading https://x/torch-2.13.0%2Bcpu-cp313-cp313-linux_x86_64.whl (9 MB)
    Processing ./in dex/odd_name-2021.08.1-py3-none-any.whl
    Using cached a-3.0-py3-none-any.whl.metadata (1 kB)
    Downloading a-2.0rc1-py3-none-any.whl (1 kB)
    Downloading b-x.whl (1 kB)
    """
    chosen = {"torch": "2.13.0+cpu", "odd-name": "2021.8.1", "a": "2.0rc1", "b": "1"}
    assert passed_over(output, chosen, chosen) == {"a": "3.0"}


@pytest.mark.usefixtures("allowed")
def test_source_archive_is_not_built_for_a_newer_version(
    solve: Resolve, index: Path, notes: list[str]
) -> None:
    """Pip has met the requirements without it, so no foreign code needs to run."""
    a_wheel(index, "user", "1.0")
    a_wheel(index, "user", "2.0", requires=["small"])
    a_source(index, "small", "1.2")
    assert versions(solve("user")) == ["user==1.0"]
    assert any(shows(line, "other-version-chosen") for line in notes)
    assert not any(shows(line, "built-from-source") for line in notes)


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("tag", "only_wheels"),
    [("cp313-cp313-linux_x86_64", False), ("damaged", False), ("py3-none-any", True)],
)
def test_source_archive_that_is_not_pure_is_refused(
    solve: Resolve, index: Path, monkeypatch: pytest.MonkeyPatch, tag: str, only_wheels: bool
) -> None:
    a_source(index, "small", "1.2", tag)
    if only_wheels:
        monkeypatch.setenv("PIP_ONLY_BINARY", "small")
    with refused("requirements-unmet" if only_wheels else "source-not-built", UsageError):
        solve("small")


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("place", ["requirements", "constraints", "environment"])
def test_source_archive_with_a_hash_is_not_built(
    solve: Resolve, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The code of an archive that pip has not verified must not run."""
    a_source(index, "small", "1.2", "damaged")
    hashed = f"small==1.2 --hash=sha256:{64 * '0'}"
    (tmp_path / "limits.txt").write_text(hashed if place == "constraints" else "")
    if place == "environment":
        monkeypatch.setenv("PIP_REQUIRE_HASHES", "1")
    with refused("requirements-unmet", UsageError):
        solve("-c limits.txt", hashed if place == "requirements" else "small==1.2")


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    "line", ["-c sub/limits.txt  # why", "--constraint='sub/limits.txt'", "-csub/limits.txt"]
)
def test_source_archive_is_of_a_version_in_constraints(
    solve: Resolve, index: Path, tmp_path: Path, line: str
) -> None:
    a_source(index, "small", "1.0")
    a_source(index, "small", "2.0")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "limits.txt").write_text("small==1.0\n")
    assert versions(solve(line, "small")) == ["small==1.0"]


@pytest.mark.usefixtures("allowed")
def test_source_archive_beside_the_file_that_names_its_folder(
    solve: Resolve, index: Path, tmp_path: Path
) -> None:
    a_source(index, "small", "1.0")
    (tmp_path / "job").mkdir()
    own = tmp_path / "own.txt"
    job = tmp_path / "job" / "job.txt"
    own.write_text("--no-index\n--find-links 'in dex'\n")
    job.write_text("small\n")
    solve("# This line only prepares the job environment.")
    requirements = Requirements((own, job), tmp_path / "base.lock")
    assert versions(resolve(requirements, Pip(requirements.node))) == ["small==1.0"]


def test_file_without_requirements_adds_nothing(solve: Resolve) -> None:
    assert solve("# nothing").wheels == ()


def test_lock_key_depends_on_the_base() -> None:
    assert Lock((), {"numpy": "1.0"}).key != Lock((), {"numpy": "2.0"}).key


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        (
            "r.txt",
            "six\ncertifi @ file:///croot/certifi_170722/work/certifi\n",
            "requirement-of-conda",
        ),
        ("r.txt", "torch[extra]@file:///home/ada/torch-2.0.tar.gz\n", "requirement-of-conda"),
        ("poetry.json", "{}", "not-requirements"),
        *((name, "x", "not-requirements") for name in ("poetry.lock", "Pipfile", "Pipfile.lock")),
        ("r.txt", "-e .\ntomli-w==1.2.0 --hash=sha256:00\n", "no-wheel"),
        ("r.txt", "six\n--editable=./here\n", "no-wheel"),
        ("r.txt", "./here[extra]\n", "no-wheel"),
        ("r.txt", ".\n", "no-wheel"),
        ("r.txt", "a @ git+https://example.org/me/a.git@v1\n", "no-wheel"),
        ("r.txt", "git+ssh://git@example.org/a.git\n", "no-wheel"),
        ("r.txt", "-e git+https://example.org/a.git#egg=a\n", "no-wheel"),
        ("r.txt", "a[x]@hg+https://example.org/a ; python_version > '3'\n", "no-wheel"),
    ],
)
def test_requirements_of_other_tools_are_rejected(
    tmp_path: Path, name: str, text: str, code: str
) -> None:
    """They are rejected on this machine, with the line, before pip runs."""
    (tmp_path / name).write_text(text)
    (tmp_path / "here").mkdir()
    with refused(code, UsageError) as caught:
        content_hash([tmp_path / name])
    assert code == "not-requirements" or caught.value.where.startswith(f"{tmp_path / name}:")


@pytest.mark.parametrize(
    "line", ["./a-1.tar.gz", "a @ https://example.org/a-1.zip#sha256=00", "a @ git+https://x.org/a"]
)
def test_sources_in_an_included_file_are_rejected_with_their_line(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "a-1.tar.gz").touch()
    (tmp_path / "base.txt").write_text(f"six\n{line}\n")
    (tmp_path / "r.txt").write_text("-r base.txt\n")
    with refused("no-wheel", UsageError, "--requirements") as caught:
        content_hash([tmp_path / "r.txt"])
    assert caught.value.where == f"{tmp_path}/base.txt:2"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("uv.lock", "uv export --no-emit-project"),
        ("pyproject.toml", "uv export --no-emit-project"),
        ("poetry.lock", "poetry export"),
        ("Pipfile.lock", "pipenv requirements"),
        ("setup.cfg", "uv pip compile setup.cfg"),
        ("tox.cfg", "pip list --format=freeze --exclude-editable"),
    ],
)
def test_fix_for_a_file_of_another_tool_is_the_command_of_that_tool(
    tmp_path: Path, name: str, command: str
) -> None:
    (tmp_path / name).write_text("x")
    (tmp_path / "r.txt").write_text(f"-r {name}\n")
    with refused("not-requirements", UsageError) as caught:
        content_hash([tmp_path / "r.txt"])
    assert command in caught.value.fix


def test_lines_that_pip_downloads_as_wheels_are_left_to_pip(tmp_path: Path) -> None:
    text = "a-git\ngit\nhg==1\na @ https://example.org/a-1-py3-none-any.whl\n-f ./here\n./none\n"
    (tmp_path / "requirements.lock").write_text(text)
    (tmp_path / "here").mkdir()
    content_hash([tmp_path / "requirements.lock"])


def test_requirements_of_existing_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "r.lock").write_text(f"six @ file://{tmp_path}\n")
    assert content_hash([tmp_path / "r.lock"])


def test_wrapper_of_pip_reads_an_index_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Other tests run it in a process that has imported pip before."""
    page = tmp_path / "demo" / "index.html"
    page.parent.mkdir()
    page.write_text('<a href="demo-1-py3-none-any.whl" data-requires-python="&lt;3">demo</a>')
    argv = [
        sys.executable,
        "-P",
        pip_for_node.__file__,
        json.dumps(NodePlatform("3.13", 36).markers),
        "download",
        "--quiet",
        "--no-deps",
    ]
    argv += ["--isolated", "--index-url", tmp_path.as_uri(), "--dest", str(tmp_path), "demo"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No matching distribution" in done.stderr
