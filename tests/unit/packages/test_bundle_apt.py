"""Packing Debian's packages: real apt on a small archive; what is not signed or not whole stays out."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clusterctl.errors import MachineError
from clusterctl.packages import repository
from clusterctl.packages.os_packages import Upstream
from clusterctl.packages.repository import Repository, RepositoryRequest
from clusterctl.spec.distributions import distribution_of

KEY = "Test Archive"


@dataclass(frozen=True)
class Archive:
    """A flat archive of packages: ``root``, and the key it is signed with."""

    root: Path
    home: Path

    @property
    def keyring(self) -> Path:
        return self.home / "archive.gpg"

    def add(self, name: str, version: str = "1.0", depends: str = "") -> None:
        tree = self.home / name
        (tree / "DEBIAN").mkdir(parents=True)
        needs = f"Depends: {depends}\n" if depends else ""
        (tree / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: {version}\nArchitecture: amd64\n"
            f"Maintainer: a <a@example.org>\nDescription: {name}\n{needs}"
        )
        (tree / "content").write_text(name * 1000)
        self._run("dpkg-deb", "--build", "-Znone", tree, self.root)

    def sign(self) -> None:
        """Write its index and sign that."""
        packages = self._run("dpkg-scanpackages", "--multiversion", ".", cwd=self.root)
        (self.root / "Packages").write_text(packages)
        digest = self._run("sha256sum", self.root / "Packages").split()[0]
        size = (self.root / "Packages").stat().st_size
        release = f"Suite: test\nDate: Fri, 20 Nov 2026 00:00:00 UTC\nSHA256:\n {digest} {size} Packages\n"
        (self.root / "Release").write_text(release)
        (self.root / "InRelease").unlink(missing_ok=True)
        argv = ("gpg", "--homedir", self.home, "--batch", "--clearsign")
        self._run(*argv, "--output", self.root / "InRelease", self.root / "Release")

    def make_key(self) -> None:
        gpg = ("gpg", "--homedir", self.home, "--batch", "--quiet")
        self._run(*gpg, "--passphrase", "", "--quick-generate-key", KEY, "ed25519", "sign", "never")
        self._run(*gpg, "--output", self.keyring, "--export", KEY)

    def _run(self, *argv: str | Path, cwd: Path | None = None) -> str:
        done = subprocess.run(list(map(str, argv)), cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    """``munge`` needs ``libmunge2``, which needs ``libc6``; nobody needs ``other``."""
    one = Archive(tmp_path / "archive", tmp_path / "keys")
    one.root.mkdir()
    one.home.mkdir(mode=0o700)
    one.make_key()
    one.add("munge", "1:0.5~a+b", "libmunge2 (>= 1)")
    one.add("libmunge2", depends="libc6")
    one.add("libc6")
    one.add("other")
    one.sign()
    yield one
    for home in (one.home, one.home / "second"):
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "gpg-agent"], check=False)


@pytest.fixture
def pack(archive: Archive, tmp_path: Path) -> Callable[..., Repository]:
    def call(*names: str, scheme: str = "copy", upstream: tuple[Upstream, ...] = ()) -> Repository:
        sources = tmp_path / "mine.list"
        sources.write_text(f"deb [signed-by={archive.keyring}] {scheme}:{archive.root} ./\n")
        folder = tmp_path / "kept"
        folder.mkdir(exist_ok=True)
        packer = RepositoryRequest(distribution_of("debian-12"), folder, sources, upstream=upstream)
        return repository.pack(packer, names, report=lambda _: None)

    return call


@pytest.mark.parametrize("scheme", ["copy", "file"])
def test_a_package_comes_with_all_that_it_needs(pack: Callable[..., Repository], scheme: str) -> None:
    made = pack("munge", scheme=scheme)
    assert [name for name, _, _ in made.versions] == ["libc6", "libmunge2", "munge"]
    assert set(made.files) == {
        "Packages",
        "Release",
        "pool/libc6_1.0_amd64.deb",
        "pool/libmunge2_1.0_amd64.deb",
        "pool/munge_1%3a0.5~a+b_amd64.deb",
    }
    index = made.files["Packages"]
    assert isinstance(index, bytes)
    assert b"Filename: pool/munge_1%3a0.5~a+b_amd64.deb\n" in index


def test_what_only_its_makers_release_comes_with_what_it_needs_of_the_archive(
    pack: Callable[..., Repository], archive: Archive, tmp_path: Path
) -> None:
    archive.add("apptainer", "1.3", "libmunge2")
    (deb,) = archive.root.glob("apptainer*.deb")
    own = deb.rename(tmp_path / deb.name)
    raw = own.read_bytes()
    one = Upstream(own.as_uri(), hashlib.sha256(raw).hexdigest())
    made = pack("other", upstream=(one,))
    assert [name for name, _, _ in made.versions] == ["apptainer", "libc6", "libmunge2", "other"]
    index = made.files["Packages"]
    assert isinstance(index, bytes)
    assert f"Filename: pool/{own.name}\n".encode() in index
    assert f"SHA256: {one.sha256}\n".encode() in index
    own.write_bytes(raw + b"more")
    assert pack("other", upstream=(one,)).versions == made.versions, "what was downloaded is kept"
    with pytest.raises(MachineError, match="is another"):
        pack("other", upstream=(Upstream(own.as_uri(), "0" * 64),))


def test_the_same_archive_gives_the_same_repository(pack: Callable[..., Repository]) -> None:
    first, second = pack("munge"), pack("munge")
    assert first.files["Packages"] == second.files["Packages"]
    assert first.versions == second.versions


def test_what_the_archive_lacks_is_named(pack: Callable[..., Repository]) -> None:
    with pytest.raises(MachineError, match="slurmd"):
        pack("munge", "slurmd")


def test_an_archive_that_another_signed_is_refused(pack: Callable[..., Repository], archive: Archive) -> None:
    archive.keyring.unlink()
    (archive.home / "second").mkdir(mode=0o700)
    other = Archive(archive.root, archive.home / "second")
    other.make_key()
    other.keyring.rename(archive.keyring)
    with pytest.raises(MachineError, match=r"signature|not signed"):
        pack("munge")


def test_an_archive_without_a_signature_is_refused(pack: Callable[..., Repository], archive: Archive) -> None:
    (archive.root / "InRelease").unlink()
    with pytest.raises(MachineError, match="not signed"):
        pack("munge")


def test_a_list_that_was_changed_after_it_was_signed_is_refused(
    pack: Callable[..., Repository], archive: Archive
) -> None:
    path = archive.root / "Packages"
    path.write_text(path.read_text().replace("libmunge2 (>= 1)", "libmunge2 (>= 0)"))
    with pytest.raises(MachineError, match=r"(?i)hash sum mismatch"):
        pack("munge")


def test_a_package_that_is_not_what_the_list_says_is_refused(
    pack: Callable[..., Repository], archive: Archive
) -> None:
    (path,) = archive.root.glob("libmunge2*.deb")
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(MachineError, match=r"(?i)hash sum mismatch"):
        pack("munge")


def test_a_package_that_was_damaged_in_the_cache_is_fetched_anew(
    pack: Callable[..., Repository], tmp_path: Path
) -> None:
    pack("munge")
    (path,) = (tmp_path / "kept/cache/archives").glob("libc6*.deb")
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(MachineError, match="run it again"):
        pack("munge")
    assert [name for name, _, _ in pack("munge").versions] == ["libc6", "libmunge2", "munge"]
