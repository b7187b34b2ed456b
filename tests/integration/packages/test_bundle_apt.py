"""Bundles of Debian packages, made and read by real apt, from a small archive that is signed."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from clusterctl.packages import repository
from clusterctl.packages.os_packages import Upstream
from clusterctl.packages.repository import RepositoryRequest
from clusterctl.spec.distributions import distribution_of
from clusterctl.util.assets import tree_files
from tests.support.messages import refused
from tests.support.plays import run_tasks
from tests.support.served import served

Packed = Callable[..., dict[str, bytes]]
KEY = """
gpg --batch --quiet --passphrase '' --quick-generate-key "$1" ed25519 sign never
gpg --yes --output ../keyring.gpg --export "$1"
"""
ADD = """
mkdir -p "../$1/DEBIAN"
printf 'Package: %s\\nVersion: %s\\nDepends: %s\\n' "$1" "$2" "$3" >"../$1/DEBIAN/control"
printf 'Architecture: amd64\\nMaintainer: a <a@example.org>\\nDescription: it\\n' >>"../$1/DEBIAN/control"
seq 1000 >"../$1/content"
dpkg-deb --build -Znone "../$1" .
"""
SIGN = """
apt-ftparchive packages . >Packages
apt-ftparchive release . >Release
gpg --batch --yes --clearsign --output InRelease Release
"""


@dataclass(frozen=True)
class Archive:
    """A flat archive of packages; the key that it is signed with is in ``keyring.gpg`` beside
    it.
    """

    root: Path

    def run(self, script: str, *words: str) -> None:
        env = {**os.environ, "GNUPGHOME": str(self.root.parent / "keys")}
        argv = ["bash", "-euc", script, "bash", *words]
        done = subprocess.run(
            argv, cwd=self.root, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    """``munge`` needs ``libmunge2``, which needs ``libc6``; nobody needs ``other``."""
    one = Archive(tmp_path / "archive")
    one.root.mkdir()
    (tmp_path / "keys").mkdir(mode=0o700)
    one.run(KEY, "Archive")
    one.run(ADD, "munge", "1:0.5~a+b", "libmunge2 (>= 1)")
    one.run(ADD, "libmunge2", "1.0", "libc6")
    one.run(ADD, "libc6", "1.0", "")
    one.run(ADD, "other", "1.0", "")
    one.run(SIGN)
    yield one
    one.run("gpgconf --kill gpg-agent")


@pytest.fixture
def pack(archive: Archive, tmp_path: Path) -> Packed:
    """Return the files of a repository with these packages."""

    def call(
        *names: str, scheme: str = "copy", upstream: tuple[Upstream, ...] = ()
    ) -> dict[str, bytes]:
        sources = tmp_path / "mine.list"
        sources.write_text(
            f"deb [signed-by={tmp_path / 'keyring.gpg'}] {scheme}:{archive.root} ./\n"
        )
        root = tmp_path / "bundle/debian-12"
        request = RepositoryRequest(
            distribution_of("debian-12"), root, print, sources, upstream=upstream
        )
        with TemporaryDirectory(dir=tmp_path) as scratch:
            number = repository.pack(request, names, Path(scratch))
        files = {path.relative_to(root).as_posix(): path.read_bytes() for path in tree_files(root)}
        assert number == len(files) - 1
        return files

    return call


def packages(index: bytes) -> dict[str, str]:
    """Return file -> SHA-256 in the index of a repository."""
    files, hashes = (
        re.findall(rf"^{name}: (.*)", index.decode(), re.MULTILINE)
        for name in ("Filename", "SHA256")
    )
    return dict(zip(files, hashes, strict=True))


@pytest.mark.parametrize("scheme", ["copy", "file"])
def test_packed_package_has_its_dependencies(pack: Packed, scheme: str) -> None:
    made = pack("munge", scheme=scheme)
    index = made.pop("Packages")
    assert [*made] == [
        "pool/libc6_1.0_amd64.deb",
        "pool/libmunge2_1.0_amd64.deb",
        "pool/munge_1%3a0.5~a+b_amd64.deb",
    ]
    assert packages(index) == {path: hashlib.sha256(raw).hexdigest() for path, raw in made.items()}
    assert pack("other", "munge", scheme=scheme) != made
    # The same archive gives the same bytes.
    assert pack("munge", scheme=scheme) == {"Packages": index, **made}


def test_upstream_package_comes_with_its_dependencies(
    pack: Packed, archive: Archive, tmp_path: Path
) -> None:
    archive.run(ADD, "apptainer", "1.3", "libmunge2")
    (deb,) = archive.root.glob("apptainer*.deb")
    own = deb.rename(tmp_path / deb.name)
    raw = own.read_bytes()
    one = Upstream(own.as_uri(), hashlib.sha256(raw).hexdigest())
    made = pack("other", upstream=(one,))
    names = [path.partition("_")[0] for path in packages(made["Packages"])]
    assert names == ["pool/apptainer", "pool/libc6", "pool/libmunge2", "pool/other"]
    own.write_bytes(raw + b"more")
    with refused("transfer-failed/package"):
        pack("other", upstream=(one,))


def test_pack_names_a_missing_package(pack: Packed) -> None:
    with refused("tool-failed/package-manager") as caught:
        pack("munge", "slurmd")
    assert "slurmd" in caught.value.why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (KEY.replace("$1", "Another"), "signature"),
        ("rm InRelease", "not signed"),
        ("sed -i 's/libmunge2 (>= 1)/libmunge2 (>= 0)/' Packages", "hash sum mismatch"),
        ("sed -i 's/^999$/998/' libmunge2*.deb", "hash sum mismatch"),
    ],
)
def test_archive_changed_after_signing_is_rejected(
    pack: Packed, archive: Archive, change: str, why: str
) -> None:
    archive.run(change)
    with refused("tool-failed/package-manager") as caught:
        pack("munge")
    assert why in caught.value.why.lower()


def test_damaged_or_incomplete_bundle_is_repaired(pack: Packed, archive: Archive) -> None:
    made = pack("munge")
    archive.run("cd ../bundle/debian-12/pool; sed -i 's/^999$/998/' libc6*.deb; rm munge*.deb")
    assert pack("munge") == made


def test_old_packages_stay_until_there_is_a_new_index(
    pack: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pack("munge", "other")
    program = tmp_path / "bin" / "apt-ftparchive"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        with refused("tool-failed/package-manager"):
            pack("munge")
    folder = tmp_path / "bundle/debian-12"
    assert {path: (folder / path).read_bytes() for path in made} == made
    pack("munge")
    assert not [*folder.glob("pool/other*")]


def downloaded(tmp_path: Path, address: str) -> subprocess.CompletedProcess[str]:
    """Download munge as the role packages does, on a host without packages whose own settings prefer
    another release.
    """
    settings = tmp_path / "settings"
    host = {"packages_bundle": f"{address}/debian-12", "packages_bundle_settings": str(settings)}
    done = run_tasks(tmp_path, "repositories", "install", facts={"os_family": "Debian"}, **host)
    assert done.returncode == 0, done.stdout
    parts = tmp_path / "parts"
    (parts / "archives/partial").mkdir(parents=True)
    (parts / "50release").write_text('APT::Default-Release "stable";\n')
    (tmp_path / "status").touch()
    config = tmp_path / "apt.conf"
    config.write_text(
        f'Dir::Etc::Parts "{parts}";\nDir::State::status "{tmp_path}/status";\n'
        f'Dir::Cache::archives "{parts}/archives";\n#include "{settings}/apt.conf";\n'
    )
    return subprocess.run(
        ["apt-get", "install", "--yes", "--download-only", "munge"],
        env={**os.environ, "APT_CONFIG": str(config)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_host_reads_only_the_bundle_and_checks_hashes(
    pack: Packed, archive: Archive, tmp_path: Path, scheme: str
) -> None:
    """apt reads a host's own settings after those of APT_CONFIG, and refuses to install anything if
    they prefer a release that the bundle does not have.
    """
    pack("munge")
    bundle = tmp_path / "bundle"
    with served(bundle) if scheme == "http" else nullcontext(bundle.as_uri()) as address:
        done = downloaded(tmp_path, address)
        assert done.returncode == 0, done.stderr
        assert "libc6 libmunge2 munge" in done.stdout
        archive.run("sed -i 's/^999$/998/' ../bundle/debian-12/pool/libc6*.deb; rm -r ../parts")
        done = downloaded(tmp_path, address)
    assert done.returncode != 0
    assert "hash sum mismatch" in done.stderr.lower()


@pytest.mark.parametrize(
    ("release", "package"),
    [("debian-12", "apt-utils"), ("rocky-9", "createrepo_c"), ("rocky-9", "dnf")],
)
def test_missing_tool_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, package: str
) -> None:
    for name in {"apt-get", "dnf", "rpmkeys"} - {package}:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("tool-missing") as caught:
        repository.check(RepositoryRequest(distribution_of(release), tmp_path, print))
    assert package in caught.value.fix
