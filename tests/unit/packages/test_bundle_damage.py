"""Whatever is wrong with a bundle is said by its name, and nothing of it is used."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from clusterctl.errors import BundleError, MachineError
from clusterctl.packages.bundle import BLOCK, Bundle, Defect, damages, open_bundle
from clusterctl.packages.bundle_checks import reject_defects
from tests.support.disks import small_disk
from tests.unit.packages.bundles import FILES, a_bundle

PATHS = sorted(FILES)
MUNGE = "systems/debian-12/pool/munge_1%3a0.5_amd64.deb"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(a_bundle(tmp_path / "one.tar"))


def wrong(path: Path) -> list[tuple[str, str]]:
    return [(one.kind, one.what) for one in damages(open_bundle(path))]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_full_disk_has_no_part_of_a_bundle() -> None:
    with small_disk() as disk:
        disk.fill(but=4096)
        with pytest.raises(MachineError, match="the bundle can't be written") as caught:
            a_bundle(disk.path / "one.tar", {"wheels/large": bytes(1 << 20), **FILES})
        assert "No space left on device" in caught.value.why
        assert [path.name for path in disk.path.iterdir()] == [".fill"]


def test_a_bundle_is_the_same_bytes_each_time_and_a_plain_tar(tmp_path: Path, bundle: Bundle) -> None:
    again = a_bundle(tmp_path / "two.tar")
    assert again.read_bytes() == bundle.file.read_bytes()
    with tarfile.open(bundle.file) as tar:
        assert tar.getnames() == ["manifest.json", "manifest.sha256", *PATHS]
    assert damages(bundle) == ()


@pytest.mark.parametrize("path", [path for path in PATHS if FILES[path]])
def test_a_flipped_byte_in_any_file_is_named(bundle: Bundle, path: str) -> None:
    place = bundle.places[path]
    for at in (place.content, place.content + place.entry.size - 1):
        flip(bundle.file, at)
        assert wrong(bundle.file) == [("corrupted", path)]
        flip(bundle.file, at)
    assert wrong(bundle.file) == []


@pytest.mark.parametrize("path", PATHS)
def test_a_flipped_byte_in_a_header_is_named(bundle: Bundle, path: str) -> None:
    for within in (0, 100, 124, 150, 156, 257, 500):  # name, mode, size, checksum, kind, magic, nothing
        flip(bundle.file, bundle.places[path].offset + within)
        ((kind, what),) = {(kind, what) for kind, what in wrong(bundle.file) if what == path}
        assert (kind, what) == ("corrupted", path)
        flip(bundle.file, bundle.places[path].offset + within)


def test_no_byte_can_change_unseen(tmp_path: Path, bundle: Bundle) -> None:
    size = bundle.file.stat().st_size
    for at in range(0, size, 97):
        flip(bundle.file, at)
        if at >= bundle.begin:
            assert wrong(bundle.file), at
        else:
            with pytest.raises(BundleError):
                open_bundle(bundle.file)
        flip(bundle.file, at)


def test_two_damaged_files_are_both_named(bundle: Bundle) -> None:
    for path in (MUNGE, "wheels/numpy-2.0-py3-none-any.whl"):
        flip(bundle.file, bundle.places[path].content)
    with pytest.raises(BundleError) as caught:
        reject_defects(bundle.file, damages(bundle))
    assert caught.value.exit_code == 2
    assert [failure.cause.split(": ")[1] for failure in caught.value.failures] == [
        MUNGE,
        "wheels/numpy-2.0-py3-none-any.whl",
    ]


@pytest.mark.parametrize("path", PATHS)
def test_a_cut_bundle_names_the_file_that_it_ends_in(bundle: Bundle, path: str) -> None:
    place = bundle.places[path]
    with bundle.file.open("r+b") as file:
        file.truncate(place.content + max(0, place.entry.size - 1) - (0 if place.entry.size else 1))
    assert wrong(bundle.file) == [("truncated", path)]


def test_a_bundle_that_lost_its_end_only_is_not_whole(bundle: Bundle) -> None:
    with bundle.file.open("r+b") as file:
        file.truncate(bundle.file.stat().st_size - BLOCK)
    assert wrong(bundle.file) == [("corrupted", "the end of the bundle")]


@pytest.mark.parametrize("path", PATHS)
def test_a_missing_file_is_named(bundle: Bundle, path: str) -> None:
    raw, place = bundle.file.read_bytes(), bundle.places[path]
    bundle.file.write_bytes(raw[: place.offset] + raw[place.end :])
    assert wrong(bundle.file) == [("missing", path)]


def test_an_extra_file_is_named(tmp_path: Path, bundle: Bundle) -> None:
    (tmp_path / "evil.sh").write_text("echo")
    subprocess.run(["tar", "-C", str(tmp_path), "-rf", str(bundle.file), "evil.sh"], check=True)
    assert wrong(bundle.file) == [("extra", "evil.sh")]


def test_files_in_another_order_are_not_that_bundle(bundle: Bundle) -> None:
    raw = bundle.file.read_bytes()
    first, second = (bundle.places[path] for path in PATHS[:2])
    swapped = raw[second.offset : second.end] + raw[first.offset : first.end]
    bundle.file.write_bytes(raw[: first.offset] + swapped + raw[second.end :])
    assert wrong(bundle.file) == [("corrupted", PATHS[0])]


def test_a_link_in_place_of_a_package_is_named(tmp_path: Path, bundle: Bundle) -> None:
    place = bundle.places[MUNGE]
    link = tarfile.TarInfo(MUNGE)
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/shadow"
    with bundle.file.open("r+b") as file:
        file.seek(place.offset)
        file.write(link.tobuf(tarfile.USTAR_FORMAT))
    assert ("corrupted", MUNGE) in wrong(bundle.file)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256"])
def test_a_damaged_manifest_is_no_manifest(bundle: Bundle, name: str) -> None:
    with tarfile.open(bundle.file) as tar:
        at = tar.getmember(name).offset_data + 10
    flip(bundle.file, at)
    with pytest.raises(BundleError, match=r"manifest\.json in the bundle is damaged"):
        open_bundle(bundle.file)


@pytest.mark.parametrize("content", [b"", b"not a tar" * 200, bytes(4096)])
def test_what_is_no_bundle_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(BundleError, match="not a bundle"):
        open_bundle(path)


def test_another_tar_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    subprocess.run(["tar", "-C", str(tmp_path), "-cf", str(tmp_path / "t.tar"), "a"], check=True)
    with pytest.raises(BundleError, match="not a bundle"):
        open_bundle(tmp_path / "t.tar")


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="can't be read"):
        open_bundle(tmp_path / "none.tar")


def test_what_is_taken_out_is_checked_once_more(tmp_path: Path, bundle: Bundle) -> None:
    bundle.copy(MUNGE, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == FILES[MUNGE]
    flip(bundle.file, bundle.places[MUNGE].content)
    with pytest.raises(BundleError, match="munge"):
        bundle.copy(MUNGE, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_sent_as_a_tar_of_its_own(tmp_path: Path, bundle: Bundle) -> None:
    raw = b"".join(bundle.stream("systems/debian-12", as_folder="repository", after={"first": b"1"}))
    (tmp_path / "r.tar").write_bytes(raw)
    with tarfile.open(tmp_path / "r.tar") as tar:
        tar.extractall(tmp_path / "r", filter="data")
    found = {p.relative_to(tmp_path / "r").as_posix() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    assert found == {"first"} | {
        "repository/" + p.split("/", 2)[2] for p in PATHS if p.startswith("systems/debian-12/")
    }


def test_a_long_list_is_told_in_short_and_whole_to_programs(bundle: Bundle) -> None:
    many = [Defect("missing", f"f{n}", "gone") for n in range(50)]
    with pytest.raises(BundleError, match="and 40 more") as caught:
        reject_defects(bundle.file, many)
    assert len(caught.value.failures) == 50
