"""Damage to a bundle is named, and nothing of the bundle is used."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.errors import BundleError, Failure
from clusterctl.packages.bundle import (
    HASHES,
    MANIFEST,
    Bundle,
    damages,
    open_bundle,
    reject_defects,
)
from tests.support.messages import refused
from tests.unit.packages.bundles import FILES, a_bundle

PATHS = sorted(FILES)
MUNGE = "systems/debian-12/pool/munge_1%3a0.5_amd64.deb"


@pytest.fixture(name="bundle")
def bundle_fixture(tmp_path: Path) -> Bundle:
    return open_bundle(a_bundle(tmp_path / "one.tar"))


def wrong(bundle: Bundle) -> list[tuple[str, str]]:
    found = damages(open_bundle(bundle.file))
    return [
        (finding.code.removeprefix("bundle-"), finding.cause.split(": ")[0]) for finding in found
    ]


def entry(bundle: Bundle, path: str) -> tarfile.TarInfo:
    with tarfile.open(bundle.file) as tar:
        return tar.getmember(path)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def rewrite(
    bundle: Bundle, change: Callable[[dict[str, bytes]], object], *more: tuple[str, bytes]
) -> None:
    """Write the tar again with other files, whatever the list says."""
    with tarfile.open(bundle.file) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    change(files)
    with tarfile.open(bundle.file, "w") as tar:
        for name, raw in (*files.items(), *more):
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))


@pytest.mark.parametrize("path", PATHS)
def test_flipped_byte_in_any_file_is_named(bundle: Bundle, path: str) -> None:
    found = entry(bundle, path)
    within = (0, 100, 124, 150, 156, 257, 500)  # name, mode, size, checksum, kind, magic, nothing
    for at in (found.offset + number for number in within):
        flip(bundle.file, at)
        # The tar can't be read from there on.
        assert ("missing", path) in wrong(bundle), at
        flip(bundle.file, at)
    for at in (found.offset_data, found.offset_data + found.size - 1) if found.size else ():
        flip(bundle.file, at)
        assert wrong(bundle) == [("corrupted", path)], at
        flip(bundle.file, at)
    assert wrong(bundle) == []


@pytest.mark.parametrize("path", [MANIFEST, HASHES])
def test_changed_byte_of_manifest_or_checksums_is_found(bundle: Bundle, path: str) -> None:
    found = entry(bundle, path)
    for at in range(found.offset_data, found.offset_data + found.size, 7):
        flip(bundle.file, at)
        with pytest.raises(BundleError):
            reject_defects(bundle.file, damages(open_bundle(bundle.file)))
        flip(bundle.file, at)


def test_reject_defects_has_a_failure_for_each_defect(bundle: Bundle) -> None:
    many = [Failure("bundle-missing", f"f{n}: gone") for n in range(50)]
    with refused("bundle-damaged", exit_code=2) as caught:
        reject_defects(bundle.file, many)
    assert caught.value.failures == tuple(many)
    assert "f9:" in caught.value.why
    assert "f10:" not in caught.value.why


@pytest.mark.parametrize("path", PATHS)
def test_truncated_bundle_names_the_missing_files(bundle: Bundle, path: str) -> None:
    found = entry(bundle, path)
    for end in (found.offset, found.offset + 1, found.offset_data + found.size - 1):
        whole = bundle.file.read_bytes()
        bundle.file.write_bytes(whole[:end])
        assert wrong(bundle) == [("missing", one) for one in PATHS[PATHS.index(path) :]], end
        bundle.file.write_bytes(whole)


@pytest.mark.parametrize("path", PATHS)
def test_missing_extra_and_repeated_files_are_named(bundle: Bundle, path: str) -> None:
    rewrite(bundle, lambda files: files.pop(path), (PATHS[-1], b"again"), ("evil\n.sh", b"echo"))
    corrupted = [("corrupted", PATHS[-1]), ("corrupted", "evil\\n.sh")]
    assert sorted(wrong(bundle)) == sorted(
        [*corrupted, *([("missing", path)] if path != PATHS[-1] else [])]
    )


def test_symlink_in_place_of_a_package_is_corrupted(bundle: Bundle) -> None:
    link = tarfile.TarInfo(MUNGE)
    link.type = tarfile.SYMTYPE
    link.linkname = "/etc/shadow"
    with bundle.file.open("r+b") as file:
        file.seek(entry(bundle, MUNGE).offset)
        file.write(link.tobuf())
    assert ("corrupted", MUNGE) in wrong(bundle)


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/etc/passwd",
        "a/../b",
        "a//b",
        "-x",
        ".hidden",
        "a/.b",
        "a b",
        "a/",
        "",
        "a\\b",
        PATHS[0],
    ],
)
def test_bundle_with_an_escaping_or_duplicate_path_is_refused(bundle: Bundle, path: str) -> None:
    line = f"{hashlib.sha256(b'').hexdigest()}  {path}\n".encode()
    rewrite(bundle, lambda files: files.update({HASHES: files[HASHES] + line, path or "x": b""}))
    with refused("not-a-bundle"):
        open_bundle(bundle.file)


def test_copy_checks_the_hash_of_each_file(tmp_path: Path, bundle: Bundle) -> None:
    out = tmp_path / MUNGE.rpartition("/")[2]
    bundle.copy([MUNGE], tmp_path)
    assert out.read_bytes() == FILES[MUNGE]
    flip(bundle.file, entry(bundle, MUNGE).offset_data)
    with refused("bundle-damaged"):
        bundle.copy([MUNGE], tmp_path)
    assert not out.exists()
    with refused("not-a-bundle"):
        bundle.copy(["wheels/none"], tmp_path)


def test_stream_sends_a_folder_as_tar(tmp_path: Path, bundle: Bundle) -> None:
    raw = b"".join(
        bundle.stream("systems/debian-12", as_folder="repository", after={"first": b"1"})
    )
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    inner = {path: raw for path, raw in FILES.items() if path.startswith("systems/debian-12/")}
    assert found == {"first": b"1"} | {
        f"repository/{p.split('/', 2)[2]}": raw for p, raw in inner.items()
    }
