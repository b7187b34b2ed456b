"""uv resolves lists of packages to a lock of wheels for the nodes; conflicts are one error."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.packages import wheelhouse
from clusterctl.packages.node_platform import DEFAULT_PLATFORM
from clusterctl.packages.project_files import PackageList, content_hash
from clusterctl.packages.resolution import Requirements, resolve
from clusterctl.packages.wheelhouse import Pip, WheelLock, wheel_path
from tests.support import forks
from tests.support.messages import refused, shows
from tests.support.wheels import a_wheel

Resolve = Callable[..., WheelLock]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "in dex"
    folder.mkdir()
    return folder


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def choose(tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Resolve files that list packages, beside a job environment that has basepart 2.0."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(wheelhouse, "run_with_lines", forks.pip)
    base = tmp_path / "base.lock"
    base.write_text("basepart==2.0 \\\n    --hash=sha256:" + 64 * "0" + "\n")

    def call(
        *choices: Path, held: dict[str, str] | None = None, gpus: bool | None = None
    ) -> WheelLock:
        lists = tuple(PackageList.read(choice, DEFAULT_PLATFORM) for choice in choices)
        requirements = Requirements(lists, base, held or {}, gpus=gpus)
        return resolve(requirements, Pip(DEFAULT_PLATFORM, notes.append))

    return call


@pytest.fixture
def solve(tmp_path: Path, index: Path, choose: Resolve) -> Resolve:
    """Resolve lines of a requirements file."""

    def call(
        *lines: str, held: dict[str, str] | None = None, gpus: bool | None = None
    ) -> WheelLock:
        file = tmp_path / "my requirements.txt"
        file.write_text("\n".join(("--no-index", "--find-links 'in dex'", *lines, "")))
        return choose(file, held=held, gpus=gpus)

    return call


def versions(lock: WheelLock) -> list[str]:
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


def test_hashes_in_the_file_are_checked(solve: Resolve, index: Path) -> None:
    good = a_wheel(index, "first")
    line = good.removesuffix("\n")
    # The better wheel has no hash in the file.
    a_wheel(index, "first", tag="cp313-cp313-manylinux_2_28_x86_64")
    lock = solve(line)
    assert versions(lock) == ["first==1.0"]
    assert line in lock.text
    for wrong in (
        "first==1.0 --hash=sha256:" + 64 * "0",
        "first==1.0 --hash=sha512:" + 128 * "0",
    ):
        with refused("packages-unmet", UsageError, "first"):
            solve(wrong)
    # A file with hashes has them for all packages.
    a_wheel(index, "second")
    with refused("packages-unmet", UsageError, "second"):
        solve(line, "second")


def test_list_without_hashes_beside_one_with_hashes_is_named(
    solve: Resolve, choose: Resolve, index: Path, tmp_path: Path
) -> None:
    line = a_wheel(index, "first").removesuffix("\n")
    a_wheel(index, "second")
    solve(line)
    bare = tmp_path / "bare.txt"
    bare.write_text("second\n")
    with refused("packages-unmet", UsageError, "second", where=str(bare)):
        choose(bare, tmp_path / "my requirements.txt")


def test_unmet_requirements_have_the_message_of_uv(
    solve: Resolve, index: Path, tmp_path: Path
) -> None:
    a_wheel(index, "second", "1.0", tag="cp312-cp312-manylinux_2_28_x86_64")
    a_wheel(index, "third", requires=("fourth<2",))
    a_wheel(index, "fourth", "1.0")
    a_wheel(index, "fourth", "2.0")
    for lines, why in (
        (("missing>3",), "missing"),
        (("second",), "cp312"),
        (("third", "fourth==2.0"), "fourth<2"),
        (("not a requirement",), "not a requirement"),
    ):
        with refused("packages-unmet", UsageError) as caught:
            solve(*lines)
        assert why in caught.value.why
        assert caught.value.where == str(tmp_path / "my requirements.txt")
        assert "Python 3.13" in caught.value.fix
    assert list((tmp_path / "cache/clusterctl/python/locks").iterdir()) == []


def test_settings_of_pip_are_given_to_uv(
    choose: Resolve, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1.0", "2.0"):
        a_wheel(index, "first", version)
    (tmp_path / "limits.txt").write_text("first<2\n")
    file = tmp_path / "r.txt"
    file.write_text("first\n")
    (tmp_path / "pip.conf").write_text(
        f"[global]\nindex-url = {(tmp_path / 'none').as_uri()}\n[download]\nno-index = true\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", index.as_uri())
    # As pip does, from the folder of the caller.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_CONSTRAINT", "limits.txt")
    monkeypatch.setenv("PIP_QUIET", "1")
    assert versions(choose(file)) == ["first==1.0"]
    # The file's own index has precedence.
    (tmp_path / "simple" / "first").mkdir(parents=True)
    a_wheel(tmp_path / "simple" / "first", "first", "1.5")
    links = '<a href="first-1.5-py3-none-any.whl">first-1.5-py3-none-any.whl</a>'
    (tmp_path / "simple/first/index.html").write_text(links)
    file.write_text(f"--index-url {(tmp_path / 'simple').as_uri()}\nfirst\n")
    monkeypatch.delenv("PIP_FIND_LINKS")
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {(tmp_path / 'none').as_uri()}\n")
    assert versions(choose(file)) == ["first==1.5"]
    (tmp_path / "pip.conf").write_text("index-url\n")
    file.write_text("first  # changed\n")
    with refused("tool-failed/pip", UsageError, "pip.conf"):
        choose(file)


PROJECT = """\
[project]
name = "mine"
version = "1"
dependencies = ["first"]
[project.optional-dependencies]
plot = ["mine[more]"]
more = ["second<2"]
[dependency-groups]
train = ["third", {include-group = "log"}]
log = ["fourth"]
[tool.uv]
no-index = true
find-links = ["../in dex"]
[tool.uv.sources]
member = {workspace = true}
[tool.uv.workspace]
members = ["member"]
"""


def test_project_gives_its_extras_groups_and_members_by_uv(
    choose: Resolve, index: Path, tmp_path: Path
) -> None:
    for name, version in {"first": "1", "second": "1", "third": "1", "fourth": "1"}.items():
        a_wheel(index, name, version)
    a_wheel(index, "second", "2")
    file = tmp_path / "project" / "pyproject.toml"
    member = file.parent / "member"
    member.mkdir(parents=True)
    member.joinpath("pyproject.toml").write_text(
        '[project]\nname = "member"\nversion = "1"\ndependencies = ["fifth"]\n'
    )
    a_wheel(index, "fifth", "1")
    file.write_text(PROJECT.replace('["first"]', '["first", "member"]'))
    assert versions(choose(file)) == ["fifth==1", "first==1"]
    more = choose(file.with_name("pyproject.toml[plot,train]"))
    assert versions(more) == ["fifth==1", "first==1", "fourth==1", "second==1", "third==1"]
    file.write_text(
        '[dependency-groups]\na = ["first"]\n' + PROJECT[PROJECT.index("[tool.uv]\n") :]
    )
    assert versions(choose(file.with_name("pyproject.toml[a]"))) == ["first==1"]


def test_project_of_a_requirements_file_is_sent_and_not_installed(
    solve: Resolve, choose: Resolve, index: Path, tmp_path: Path
) -> None:
    a_wheel(index, "first")
    a_wheel(index, "second")
    project = tmp_path / "pyproject.toml"
    text = '[project]\nname = "mine"\nversion = "1"\ndependencies = ["{}"]\n'
    project.write_text(text.format("first"))
    assert versions(solve("-e .")) == ["first==1.0"]
    project.write_text(text.format("second"))
    assert versions(solve("-e .")) == ["second==1.0"]
    (tmp_path / "sub").mkdir()
    outside = tmp_path / "sub" / "r.txt"
    outside.write_text("--no-index\n--find-links '../in dex'\n..\n")
    with refused("packages-unmet/wheel", UsageError, "pip wheel"):
        choose(outside)


# Of a package that has only sources. It counts its builds.
BACKEND = """
import os, pathlib, subprocess, zipfile

def build_wheel(folder, settings=None, metadata=None):
    with open({log!r}, "a") as file: file.write("built ")
    {more}
    name = "small-{version}-{tag}.whl"
    info = "small-{version}.dist-info/"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as wheel:
        text = "Metadata-Version: 2.1\\nName: small\\nVersion: {version}\\nRequires-Dist: first\\n"
        wheel.writestr(info + "METADATA", text)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: {tag}\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""


@pytest.fixture
def log(tmp_path: Path, index: Path) -> Path:
    """The file that has a word for each build."""
    a_wheel(index, "first")
    (tmp_path / "log").touch()
    return tmp_path / "log"


def sources(
    log: Path, version: str = "1.2", tag: str = "py3-none-any", more: str = "pass"
) -> Mapping[str, str]:
    return {
        "pyproject.toml": f'[project]\nname = "small"\nversion = "{version}"\ndynamic = '
        '["dependencies"]\n[build-system]\nrequires = []\nbuild-backend = "backend"\n'
        'backend-path = ["."]\n',
        "backend.py": BACKEND.format(log=str(log), version=version, tag=tag, more=more),
    }


def archive(folder: Path, texts: Mapping[str, str], version: str = "1.2") -> Path:
    path = folder / f"small-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for file, text in texts.items():
            member = tarfile.TarInfo(f"small-{version}/{file}")
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text.encode()))
    return path


def test_sources_of_pure_python_become_a_wheel_here_once(
    solve: Resolve, index: Path, log: Path, notes: list[str]
) -> None:
    archive(index, sources(log))
    archive(index, sources(log, "2.0"), "2.0")
    a_wheel(index, "user", requires=["small<2"])
    lock = solve("user")
    assert versions(lock) == ["first==1.0", "small==1.2", "user==1.0"]
    assert all(wheel_path(wheel).is_file() for wheel in lock.wheels)
    assert any(shows(line, "built-from-source") for line in notes)
    built = log.read_text()
    assert solve("user", "# changed").wheels == lock.wheels
    assert log.read_text() == built
    assert WheelLock.read(lock.text, {}).wheels == tuple(sorted(lock.wheels, key=str))


@pytest.mark.parametrize(
    ("tag", "more"),
    [
        ("cp313-cp313-linux_x86_64", "pass"),
        ("py3-none-any", 'subprocess.run([os.environ.get("CC", "cc"), "-v"], check=True)'),
    ],
)
def test_sources_that_must_be_compiled_are_refused_with_the_ways(
    solve: Resolve, index: Path, log: Path, tag: str, more: str
) -> None:
    archive(index, sources(log, tag=tag, more=more))
    with refused("packages-unmet/source", UsageError, "--build", "--env-path", "--container"):
        solve("small")


def test_older_wheel_takes_the_place_of_newer_sources_only_if_they_must_be_compiled(
    solve: Resolve, index: Path, log: Path, notes: list[str]
) -> None:
    a_wheel(index, "user", "1.0")
    a_wheel(index, "user", "2.0", requires=["small"])
    a_wheel(index, "small", "1.0")
    archive(index, sources(log))
    assert versions(solve("user")) == ["first==1.0", "small==1.2", "user==2.0"]
    assert not any(shows(line, "older-version-chosen") for line in notes)
    archive(index, sources(log, "1.3", more="raise SystemExit(1)"), "1.3")
    # Builds for GPUs are chosen in a second round.
    a_wheel(index, "jax")
    lock = solve("user # changed", "jax", gpus=True)
    assert versions(lock) == ["jax==1.0", "small==1.0", "user==2.0"]
    assert sum(shows(line, "older-version-chosen") for line in notes) == 1
    # Nothing is told of a package that the result lacks.
    notes.clear()
    (index / "small-1.0-py3-none-any.whl").unlink()
    assert versions(solve("user # without small")) == ["user==1.0"]
    assert not any(shows(line, "older-version-chosen") for line in notes)


def test_sources_in_a_list_with_hashes_are_not_built(
    solve: Resolve, index: Path, log: Path
) -> None:
    """Code of which the hash is not checked must not run."""
    archive(index, sources(log))
    with refused("packages-unmet", UsageError):
        solve(f"small==1.2 --hash=sha256:{64 * '0'}")
    assert log.read_text() == ""


def test_archive_beside_the_file_counts_by_its_content(
    solve: Resolve, tmp_path: Path, log: Path
) -> None:
    archive(tmp_path, sources(log))
    line = "./small-1.2.tar.gz"
    assert versions(solve(line)) == ["first==1.0", "small==1.2"]
    built = log.read_text()
    solve(line)
    assert log.read_text() == built
    archive(tmp_path, {**sources(log), "more.py": ""})
    solve(line)
    assert log.read_text() != built


def test_commit_of_a_repository_becomes_a_wheel_and_stays(
    solve: Resolve, tmp_path: Path, log: Path
) -> None:
    folder = tmp_path / "small.git"
    folder.mkdir()
    who = {f"GIT_{who}_{key}": "a" for who in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}

    def commit(version: str) -> None:
        for name, text in sources(log, version).items():
            (folder / name).write_text(text)
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
            subprocess.run(["git", *words], cwd=folder, check=True, env={**os.environ, **who})

    commit("1.2")
    line = f"small @ git+{folder.as_uri()}"
    (tmp_path / "more.txt").write_text(f"{line}\n")
    assert versions(solve("-r more.txt")) == ["first==1.0", "small==1.2"]
    commit("1.3")
    # The unchanged file keeps its commit.
    assert "small==1.2" in versions(solve("-r more.txt"))
    assert "small==1.3" in versions(solve(f"{line}  # changed"))


def test_file_without_requirements_adds_nothing(solve: Resolve) -> None:
    assert solve("# nothing").wheels == ()


def test_lock_key_depends_on_the_base() -> None:
    assert WheelLock((), {"numpy": "1.0"}).key != WheelLock((), {"numpy": "2.0"}).key


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        (
            "r.txt",
            "six\ncertifi @ file:///croot/certifi_170722/work/certifi\n",
            "packages-unmet/conda-line",
        ),
        ("r.txt", "torch[extra]@file:///home/ada/torch-2.0.tar.gz\n", "packages-unmet/conda-line"),
        ("poetry.json", "{}", "file-invalid/requirements"),
        *(
            (name, "x", "file-invalid/requirements")
            for name in ("poetry.lock", "Pipfile", "Pipfile.lock")
        ),
    ],
)
def test_requirements_of_other_tools_are_rejected(
    tmp_path: Path, name: str, text: str, code: str
) -> None:
    """They are rejected on this machine, with the line, before pip runs."""
    (tmp_path / name).write_text(text)
    with refused(code, UsageError) as caught:
        content_hash([tmp_path / name])
    assert code == "file-invalid/requirements" or caught.value.where.startswith(
        f"{tmp_path / name}:"
    )


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
    with refused("file-invalid/requirements", UsageError) as caught:
        content_hash([tmp_path / "r.txt"])
    assert command in caught.value.fix


def test_requirements_of_existing_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "r.lock").write_text(f"six @ file://{tmp_path}\n")
    assert content_hash([tmp_path / "r.lock"])
