"""Packages that have only sources: fetched here, built once on the cluster, and then like a wheel of an
index.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from clusterctl.errors import MachineError, UsageError
from clusterctl.packages import wheelhouse
from clusterctl.packages.node_platform import DEFAULT_PLATFORM
from clusterctl.packages.project_files import PackageList
from clusterctl.packages.source_builds import ClusterBuilder
from clusterctl.packages.sources import SourceLine, fetch_source
from clusterctl.packages.wheelhouse import Lock, Pip, Requirements, resolve, wheel_path
from tests.support import forks
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.support.wheels import a_wheel

# Compiles a file in C, so that the wheel is not pure Python, and asserts what a build has.
BACKEND = """
import os, pathlib, subprocess, zipfile
NAME, TAG = "small", "cp313-cp313-linux_x86_64"
VERSION = os.environ.get("SETUPTOOLS_SCM_PRETEND_VERSION", "1.2")

def get_requires_for_build_wheel(settings=None):
    return {needs}

def build_wheel(folder, settings=None, metadata=None):
    assert not (pathlib.Path.home() / "clusterctl").exists()
    {more}
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", "small.so", "small.c"], check=True)
    info = f"{{NAME}}-{{VERSION}}.dist-info/"
    file = f"{{NAME}}-{{VERSION}}-{{TAG}}.whl"
    with zipfile.ZipFile(pathlib.Path(folder, file), "w") as wheel:
        wheel.write("small.so")
        head = f"Metadata-Version: 2.1\\nName: {{NAME}}\\nVersion: {{VERSION}}\\n"
        wheel.writestr(info + "METADATA", head + "Requires-Dist: first\\n")
        wheel.writestr(info + "WHEEL", f"Wheel-Version: 1.0\\nRoot-Is-Purelib: false\\nTag: {{TAG}}\\n")
        wheel.writestr(info + "RECORD", "")
    return file
"""
CODE = "int answer(void) { return 42; }\n"


def sources(code: str = CODE, needs: tuple[str, ...] = (), more: str = "") -> dict[str, str]:
    return {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\n'
        'backend-path = ["."]\n[project]\nname = "small"\nversion = "1.2"\n',
        "backend.py": BACKEND.format(needs=list(needs), more=more or "pass"),
        "small.c": code,
    }


def archive(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "small-1.2.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for name, text in files.items():
            member = tarfile.TarInfo(f"small-1.2/{name}")
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text.encode()))
    return path


def repository(folder: Path, files: dict[str, str]) -> Callable[..., str]:
    """A repository with a commit of these files, and a function that runs git in it."""
    folder.mkdir()
    identity = {
        f"GIT_{who}_{key}": "a" for who in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")
    }

    def git(*words: str) -> str:
        argv = ["git", "-C", str(folder), *words]
        done = subprocess.run(
            argv, check=True, env={**os.environ, **identity}, stdout=subprocess.PIPE, text=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    for name, text in files.items():
        (folder / name).write_text(text)
    git("add", ".")
    git("commit", "--quiet", "--message=a")
    return git


class Cluster:
    """A host of which the home is a folder here; its Python is that of the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.index = folder / "index"
        self.index.mkdir()
        a_wheel(self.index, "first")

    def resolve(
        self,
        *lines: str,
        place: str = "demo",
        builds: bool = True,
        store: str = "clusterctl/store",
        base: str = "",
    ) -> Lock:
        file = self.folder / "requirements.txt"
        file.write_text("\n".join(("--no-index", f"--find-links {self.index}", *lines, "")))
        base_lock = self.folder / "base.lock"
        base_lock.write_text(base)
        builder = ClusterBuilder(
            LocalTransport(), sys.prefix, store, place, report=self.notes.append
        )
        packages = PackageList.read(file, DEFAULT_PLATFORM)
        requirements = Requirements.of([packages], base_lock)
        return resolve(requirements, Pip(DEFAULT_PLATFORM), builder if builds else None)

    @property
    def builds(self) -> int:
        return sum(note.startswith("building") for note in self.notes)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(wheelhouse, "run_with_lines", forks.pip)
    (tmp_path / "home").mkdir()
    return Cluster(tmp_path)


def test_source_archive_of_an_index_is_built_once_on_the_cluster(cluster: Cluster) -> None:
    path = archive(cluster.index, sources())
    lock = cluster.resolve("small>1")
    small, first = sorted(lock.wheels, key=lambda wheel: wheel.name, reverse=True)
    assert (small.version, small.origin, first.name) == ("1.2", path.as_uri(), "first")
    assert wheel_path(small).is_file()
    # The host has the wheel by its hash, so that it is not sent again.
    assert (cluster.folder / "home/clusterctl/store" / small.sha256[:2] / small.sha256).is_file()
    assert list((cluster.folder / "home/clusterctl/store/partial").iterdir()) == []
    assert Lock.read(lock.text, {}).wheels == tuple(sorted(lock.wheels, key=str))
    assert cluster.resolve("small>1") == lock
    cluster.resolve("small>=1")
    assert cluster.builds == 1
    # Its libraries may differ.
    cluster.resolve("small>1", place="other")
    assert cluster.builds == 2


def test_archive_beside_the_file_is_built_and_counts_by_its_content(cluster: Cluster) -> None:
    path = archive(cluster.folder, sources())
    for _ in range(2):
        lock = cluster.resolve("./small-1.2.tar.gz")
        assert [one.origin for one in lock.wheels if one.name == "small"] == [path.as_uri()]
    assert cluster.builds == 1
    assert any(note.startswith("building small-1.2.tar.gz on ") for note in cluster.notes)
    archive(cluster.folder, sources(CODE.replace("42", "43")))
    assert cluster.resolve("./small-1.2.tar.gz") != lock


@pytest.mark.parametrize("is_constraint", [False, True])
def test_conflict_of_versions_is_no_missing_wheel(cluster: Cluster, is_constraint: bool) -> None:
    """pip says also of a package that has wheels of both versions that it has no distribution."""
    a_wheel(cluster.index, "small", "1.0")
    a_wheel(cluster.index, "small", "2.0")
    archive(cluster.index, sources())
    (cluster.folder / "limits.txt").write_text("small==2.0\n")
    if is_constraint:
        with refused("requirements-unmet", UsageError):
            cluster.resolve("-c limits.txt", "small==1.0")
    else:
        lock = cluster.resolve("small==1.0", base="small==2.0\n")
        assert [(one.name, one.version) for one in lock.wheels] == [("small", "1.0")]
    assert cluster.builds == 0


def test_store_of_an_attached_cluster_is_an_absolute_path(cluster: Cluster) -> None:
    archive(cluster.index, sources())
    store = cluster.folder / "project/store"
    (small,) = cluster.resolve("small>1", store=str(store)).wheels[-1:]
    assert (store / small.sha256[:2] / small.sha256).is_file()
    assert not (cluster.folder / "home" / "clusterctl").exists()


def test_commit_of_a_repository_is_built_and_pinned(cluster: Cluster) -> None:
    git = repository(cluster.folder / "small.git", sources())
    git("tag", "v2.0")
    commit = git("rev-parse", "HEAD")
    url = f"git+file://{cluster.folder}/small.git"
    for line in (f"small @ {url}", f"-e {url}@v2.0#egg=small", f"{url}@{commit}"):
        lock = cluster.resolve(line)
        assert [(one.name, one.version, one.origin) for one in lock.wheels if one.origin] == [
            ("small", "2.0", f"{url}@{commit}")
        ]
    assert cluster.builds == 1
    (cluster.folder / "small.git/small.c").write_text(CODE.replace("42", "43"))
    git("commit", "--quiet", "--all", "--message=b")
    # The file is unchanged, and keeps its commit; a changed file has the new one.
    unchanged = cluster.resolve(f"small @ {url}").wheels
    assert [one.version for one in unchanged if one.origin] == ["2.0"]
    after = cluster.resolve(f"small @ {url}", "# changed", "first>0").wheels
    assert [one.version for one in after if one.origin] == [
        f"2.1.dev1+g{git('rev-parse', 'HEAD')[:7]}"
    ]


def test_packages_that_a_build_asks_for_are_sent(cluster: Cluster) -> None:
    a_wheel(cluster.index, "helper", files={"helper.py": "VALUE = 1\n"})
    archive(cluster.index, sources(needs=("helper",), more="import helper"))
    assert "small" in [wheel.name for wheel in cluster.resolve("small").wheels]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (sources(code="int answer(void) { return oops; }\n"), ("small.c:1", "oops")),
        (sources(more="os.environ['CC'] = 'no-compiler'"), ("no-compiler",)),
        (sources(needs=("missing-tool",)), ("missing-tool",)),
        ({"inner/pyproject.toml": ""}, ("#subdirectory=",)),
    ],
)
def test_failed_build_has_its_last_lines_and_the_fix(
    cluster: Cluster, files: dict[str, str], words: tuple[str, ...]
) -> None:
    archive(cluster.index, files)
    # What a build without a pyproject.toml needs.
    for name in ("setuptools", "wheel"):
        a_wheel(cluster.index, name, "99.0")
    with refused("source-not-built", UsageError, *words) as caught:
        cluster.resolve("small")
    assert len(caught.value.why.splitlines()) <= 20


def test_build_has_no_network(cluster: Cluster) -> None:
    """Where the kernel lets users have a network of their own."""
    if subprocess.run(["unshare", "--user", "--net", "true"], check=False).returncode:
        pytest.skip("users can't have a network of their own here")
    look = "assert open('/proc/net/dev').read().count(':') <= 1"
    archive(cluster.index, sources(more=look))
    assert cluster.resolve("small").wheels


def test_sources_are_refused_without_a_cluster(cluster: Cluster) -> None:
    path = archive(cluster.folder, sources())
    with refused("source-needs-cluster", UsageError, "submit"):
        cluster.resolve(f"small @ {path.as_uri()}", builds=False)
    with refused("source-needs-cluster", UsageError):
        cluster.resolve("small @ git+https://example.invalid/small", builds=False)
    # On nodes that the marker excludes, nothing is built.
    line = f'small @ {path.as_uri()} ; sys_platform == "win32"'
    assert cluster.resolve(line, "first", builds=False).wheels


def test_sources_that_can_not_be_fetched(cluster: Cluster) -> None:
    path = archive(cluster.folder, sources())
    repository(cluster.folder / "small.git", sources())
    for line, words in {
        f"small @ {path.as_uri()}#sha256={64 * '0'}": ("SHA-256",),
        f"small @ file://{cluster.folder}/none.tar.gz": ("No such file",),
        f"small @ git+file://{cluster.folder}/none": ("git says",),
        f"small @ git+file://{cluster.folder}/small.git@v9": ("v9",),
    }.items():
        with refused("source-not-fetched", MachineError, *words):
            cluster.resolve(line)


def test_refused_download_is_told_without_its_password(cluster: Cluster) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        Thread(target=server.handle_request, daemon=True).start()
        url = f"http://ada:s3cret@127.0.0.1:{server.server_port}/small-1.tar.gz"
        with pytest.raises(MachineError) as refusal:
            cluster.resolve(f"small @ {url}")
    assert refusal.value.code == "source-not-fetched"
    assert "501" in refusal.value.why
    assert "s3cret" not in str(refusal.value.__dict__)


def test_repository_without_tags_has_a_version_and_no_password(cluster: Cluster) -> None:
    files = {**sources(), "sub.txt": "x"}
    git = repository(cluster.folder / "small.git", files)
    line = SourceLine.of(f"git+file://ada:pw@{cluster.folder}/small.git#subdirectory=inner")
    assert line is not None
    source = fetch_source(line)
    assert source.version == f"0.1.dev1+g{git('rev-parse', 'HEAD')[:9]}"
    assert "pw" not in source.origin
    assert source.subfolder == "inner"
    # A replay for another Python fetches the same again.
    again = SourceLine.of(f"small @ {source.origin}")
    assert again is not None
    assert fetch_source(again).archive == source.archive
    assert fetch_source(again).subfolder == "inner"
    assert fetch_source(line) == source
