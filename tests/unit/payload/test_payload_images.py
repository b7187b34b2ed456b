"""Container images on a node: which engine runs them, and what is made of them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from payload.node import images

CONFIG = {"architecture": "amd64", "config": {"Env": ["PATH=/image/bin", "HOME_OF=image=1"]}}


def layer(path: Path, *members: tuple[str, str, str], compress: str = "") -> str:
    """Write a layer. members: (path, kind of file, content or target). Return its path."""
    kinds = {"file": tarfile.REGTYPE, "folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}
    kinds |= {"hard": tarfile.LNKTYPE, "device": tarfile.CHRTYPE}
    with tarfile.open(path, f"w:{compress}") as tar:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            info.type = kinds[kind]
            info.mode = 0o555 if kind == "folder" else 0o444
            info.size = len(text) if kind == "file" else 0
            info.linkname = "" if kind == "file" else text
            tar.addfile(info, io.BytesIO(text.encode()) if kind == "file" else None)
    return str(path)


def content(root: Path) -> Mapping[str, str]:
    """Return path -> content of the files, and -> target of the links, that the layers wrote."""
    found = {}
    for path in root.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(root))] = f"-> {os.readlink(path)}"
        elif path.is_file() and path.name != "environment":
            found[str(path.relative_to(root))] = path.read_text()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Make the folder of an image of these layers, each a sequence of members."""

    def make(*layers: Sequence[tuple[str, str, str]]) -> Path:
        paths = [layer(tmp_path / f"{n}.tar", *members) for n, members in enumerate(layers)]
        images.make_folder(
            images.ImageLayers(json.dumps(CONFIG).encode(), paths), str(tmp_path / "root")
        )
        return tmp_path / "root"

    return make


def test_upper_layers_replace_and_hide_files_of_lower_ones(folder: Callable[..., Path]) -> None:
    root = folder(
        [("a", "folder", ""), ("a/1", "file", "one"), ("a/2", "file", "two"), ("b/x", "file", "x")],
        [("a/1", "file", "new"), ("a/.wh.2", "file", ""), ("b/.wh..wh..opq", "file", "")],
        [("b/y", "file", "y"), ("c", "hard", "a/1"), ("zero", "device", "")],
    )
    assert content(root) == {"a/1": "new", "b/y": "y", "c": "new"}


def test_file_replaces_a_folder_and_a_folder_a_link(folder: Callable[..., Path]) -> None:
    root = folder(
        [("a/1", "file", "one"), ("b", "link", "a")],
        [("a", "file", "now a file"), ("b", "folder", ""), ("b/2", "file", "two")],
    )
    assert content(root) == {"a": "now a file", "b/2": "two"}


@pytest.mark.parametrize("target", ["{outside}", "../outside", "/../../outside"])
@pytest.mark.parametrize("name", ["out/new", "out/.wh.kept", "out/.wh..wh..opq", "../outside/new"])
def test_layers_reach_no_file_outside(
    folder: Callable[..., Path], tmp_path: Path, target: str, name: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    folder([("out", "link", target.format(outside=outside))], [(name, "file", "theirs")])
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"kept": "mine"}


def test_absolute_link_is_followed_inside_the_image(folder: Callable[..., Path]) -> None:
    root = folder(
        [("usr/lib", "folder", ""), ("lib", "link", "/usr/lib")], [("lib/x", "file", "x")]
    )
    assert content(root) == {"lib": "-> /usr/lib", "usr/lib/x": "x"}


@pytest.mark.parametrize("name", ["..", "a/../..", ".wh...", "a/.wh...", ".wh..", ".wh."])
def test_names_of_folders_above_are_refused(folder: Callable[..., Path], name: str) -> None:
    with pytest.raises(images.ImageError):
        folder([("a/kept", "file", "")], [(name, "file", "")])


def test_links_in_a_circle_are_refused(folder: Callable[..., Path]) -> None:
    with pytest.raises(images.ImageError):
        folder([("a", "link", "b"), ("b", "link", "a")], [("a/x", "file", "x")])


def test_layers_may_be_compressed(tmp_path: Path) -> None:
    gzip = layer(tmp_path / "gzip", ("a", "file", "a"), compress="gz")
    images.make_folder(images.ImageLayers(b"{}", [gzip]), str(tmp_path / "root"))
    assert content(tmp_path / "root") == {"a": "a"}


def test_equal_layers_of_an_archive_may_be_links(
    engines: Callable[..., None], tmp_path: Path
) -> None:
    engines("ch-run")
    (tmp_path / "x").mkdir()
    layer(tmp_path / "x" / "layer.tar", ("a", "file", "a"))
    (tmp_path / "link.tar").symlink_to("x/layer.tar")
    config = {**CONFIG, "architecture": own_processor()}
    image = docker_archive(tmp_path, config, ["x/layer.tar", "link.tar"])
    images.prepare(str(image), str(tmp_path / "kept"), print)
    (made,) = (path for path in (tmp_path / "kept").iterdir() if path.is_dir())
    assert (made / "a").read_text() == "a"


def test_damaged_archive_is_named(engines: Callable[..., None], tmp_path: Path) -> None:
    engines("ch-run")
    whole = Path(layer(tmp_path / "layer.tar", ("blobs", "file", "text"))).read_bytes()
    # After a header, a block of a kind that deflate does not have.
    damaged = gzip.compress(whole[:512]) + gzip.compress(b"")[:10] + b"\xff" * 99
    (tmp_path / "x.tar.gz").write_bytes(damaged)
    with pytest.raises(images.ImageError, match="not a complete container image"):
        images.prepare(str(tmp_path / "x.tar.gz"), str(tmp_path / "kept"), print)


def test_archive_of_two_images_is_refused(engines: Callable[..., None], tmp_path: Path) -> None:
    engines("ch-run")
    config = {**CONFIG, "architecture": own_processor()}
    image = docker_archive(tmp_path, config, images=2)
    with pytest.raises(images.ImageError, match="2 images"):
        images.prepare(str(image), str(tmp_path / "kept"), print)


def oci_archive(tmp_path: Path, config: Mapping[str, object]) -> Path:
    """Write an archive as `skopeo copy` does, with a list of images for two processors."""
    files: dict[str, bytes] = {}

    def blob(data: bytes) -> dict[str, object]:
        sha = hashlib.sha256(data).hexdigest()
        files[f"blobs/sha256/{sha}"] = data
        return {"digest": f"sha256:{sha}", "size": len(data)}

    data = Path(layer(tmp_path / "layer", ("a", "file", "a"))).read_bytes()
    manifest = {"config": blob(json.dumps(config).encode()), "layers": [blob(data)]}
    own = blob(json.dumps(manifest).encode())
    other = {**blob(b"{}"), "platform": {"architecture": "sparc"}}
    entries = [{**own, "platform": {"architecture": config["architecture"]}}, other]
    listed = blob(json.dumps({"manifests": entries}).encode())
    files["index.json"] = json.dumps({"manifests": [listed]}).encode()
    path = tmp_path / "oci.tar"
    with tarfile.open(path, "w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    return path


def docker_archive(
    tmp_path: Path,
    config: Mapping[str, object],
    layers: Sequence[str] = ("layer.tar",),
    images: int = 1,
) -> Path:
    """Write an archive as `docker save` does."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer(tmp_path / "layer.tar", ("a", "file", "a"))
    listed = [{"Config": "config.json", "Layers": layers}] * images
    (tmp_path / "manifest.json").write_text(json.dumps(listed))
    path = tmp_path / "docker.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in ("config.json", *layers, "manifest.json"):
            tar.add(tmp_path / name, f"./{name}")
    return path


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let PATH have only these engines."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def have(*names: str) -> None:
        for name in names:
            (programs / name).touch(0o755)

    return have


@pytest.mark.parametrize("archive", [oci_archive, docker_archive])
def test_archive_becomes_a_folder_once(
    archive: Callable[..., Path], engines: Callable[..., None], tmp_path: Path
) -> None:
    engines("ch-run")
    image = str(archive(tmp_path, {**CONFIG, "architecture": own_processor()}))
    said: list[str] = []
    kept = tmp_path / "kept"
    for _ in range(2):
        images.prepare(image, str(kept), said.append)
    (made,) = (path for path in kept.iterdir() if path.is_dir())
    assert (made / "a").read_text() == "a"
    assert len(said) == 1
    assert {path.name[0] for path in kept.iterdir() if path != made} == {"."}


@pytest.mark.parametrize("compress", ["", "gz"])
def test_root_file_system_becomes_a_folder(
    engines: Callable[..., None], tmp_path: Path, compress: str
) -> None:
    """As `docker export` writes it."""
    engines("ch-run")
    image = layer(
        tmp_path / "x.tar", ("./", "folder", ""), ("./etc/a", "file", "a"), compress=compress
    )
    images.prepare(image, str(tmp_path / "kept"), print)
    (made,) = (path for path in (tmp_path / "kept").iterdir() if path.is_dir())
    assert (made / "etc/a").read_text() == "a"


def described(tmp_path: Path, files: Mapping[str, str]) -> str:
    """Write the description of an image from a registry, as `submit` does."""
    path = tmp_path / "container.json"
    path.write_text(json.dumps({"name": "docker://x", "digest": "sha256:1", "files": files}))
    return str(path)


def test_image_of_a_registry_is_made_of_the_sent_files(
    engines: Callable[..., None], tmp_path: Path
) -> None:
    engines("ch-run")
    archive = oci_archive(tmp_path, {**CONFIG, "architecture": own_processor()})
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "store", filter="data")
    files = {
        str(path.relative_to(tmp_path / "store")): str(path)
        for path in (tmp_path / "store").rglob("*")
        if path.is_file()
    }
    images.prepare(described(tmp_path, files), str(tmp_path / "kept"), print)
    (made,) = (path for path in (tmp_path / "kept").iterdir() if path.is_dir())
    assert (made / "a").read_text() == "a"
    # A later job gets no files if the controller has the image.
    images.prepare(described(tmp_path, {}), str(tmp_path / "kept"), print)


def test_image_that_was_pulled_and_is_gone_or_is_for_others_is_named(
    engines: Callable[..., None], tmp_path: Path
) -> None:
    engines("ch-run")
    with pytest.raises(images.ImageError, match=f"for ch-run on {own_processor()}: submit again"):
        images.prepare(described(tmp_path, {}), str(tmp_path / "kept"), print)


@pytest.mark.parametrize(
    ("kind", "source"),
    [("oci", "oci:{work}"), ("docker", "docker-archive:{image}"), ("root", "{work}/root")],
)
def test_apptainer_builds_from_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, source: str
) -> None:
    config = {**CONFIG, "architecture": own_processor()}
    image = layer(tmp_path / "root.tar", ("etc/a", "file", "a"))
    if kind != "root":
        image = str({"oci": oci_archive, "docker": docker_archive}[kind](tmp_path, config))
    work = tmp_path / "work"
    work.mkdir()
    ran: list[Sequence[str]] = []
    monkeypatch.setattr(images, "run", lambda words, _: ran.append(words))
    parts = images.unpacked(image, str(work))
    images.make_sif("apptainer", parts, str(work), "new.sif")
    expected = source.format(work=work, image=image)
    assert ran == [["apptainer", "build", "--disable-cache", "new.sif", expected]]


def own_processor() -> str:
    machine = os.uname().machine
    return images.PROCESSORS.get(machine, machine)


@pytest.mark.parametrize("archive", [oci_archive, docker_archive])
def test_image_for_another_processor_is_refused(
    archive: Callable[..., Path], engines: Callable[..., None], tmp_path: Path
) -> None:
    engines("ch-run")
    image = archive(tmp_path, {**CONFIG, "architecture": "mips"})
    with pytest.raises(images.ImageError, match="mips"):
        images.prepare(str(image), str(tmp_path / "kept"), print)
    assert not [path for path in (tmp_path / "kept").iterdir() if path.is_dir()]


def test_damaged_archives_are_refused(engines: Callable[..., None], tmp_path: Path) -> None:
    engines("ch-run")
    whole = docker_archive(tmp_path, {**CONFIG, "architecture": own_processor()}).read_bytes()
    for number, data in enumerate((whole[: len(whole) // 2], whole[:40], b"\x1f\x8b" + bytes(600))):
        image = tmp_path / f"{number}.tar.gz"
        image.write_bytes(data)
        with pytest.raises(images.ImageError):
            images.prepare(str(image), str(tmp_path / "kept"), print)


KINDS = {
    "squashfs": b"hsqs" + bytes(100),
    "file": b"#!/usr/bin/env run-singularity\n",
    "layers": b'{"digest": "sha256:1", "files": {}}',
}


@pytest.mark.parametrize(
    ("kind", "there", "chosen"),
    [
        ("squashfs", ["apptainer", "enroot", "ch-run"], "enroot"),
        ("squashfs", ["singularity", "ch-run"], "singularity"),
        ("squashfs", ["ch-run"], None),
        ("file", ["enroot", "apptainer"], "apptainer"),
        ("file", ["enroot", "ch-run"], None),
        ("layers", ["ch-run", "enroot", "singularity"], "singularity"),
        ("layers", ["ch-run", "enroot"], "enroot"),
        ("layers", ["ch-run"], "ch-run"),
        ("layers", [], None),
        ("folder", ["enroot", "ch-run"], "ch-run"),
    ],
)
def test_engine_is_chosen_by_the_kind_of_image(
    engines: Callable[..., None], tmp_path: Path, kind: str, there: list[str], chosen: str | None
) -> None:
    engines(*there)
    image = tmp_path
    if kind != "folder":
        image = tmp_path / "image"
        image.write_bytes(KINDS[kind])
    assert images.kind_of(str(image)) == kind
    if chosen is None:
        with pytest.raises(images.ImageError):
            images.engine_for(str(image), kind)
    else:
        assert images.engine_for(str(image), kind) == chosen


def test_variables_and_mounts_in_a_folder(
    engines: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines("ch-run")
    root = tmp_path / "image"
    layers = images.ImageLayers(json.dumps(CONFIG).encode(), [])
    images.make_folder(layers, str(root))
    (tmp_path / "data").mkdir()
    # An absolute link, which leads inside.
    (root / "etc/group").symlink_to("/var/group")
    monkeypatch.setenv("HOME_OF", "host")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/host")
    monkeypatch.setenv("WHERE", str(tmp_path))
    inside = images.ContainerView([str(tmp_path)], ["$WHERE/data:/in/data"], [], has_gpus=False)
    words, environment = images.command(str(root), "", inside, ["python3", "x"])
    assert words[-4:] == [str(root), "--", "python3", "x"]
    assert f"{tmp_path}/data:/in/data" in words
    assert (root / "in" / "data").is_dir()
    # Charliecloud mounts the host's on these.
    assert (root / "etc" / "passwd").is_file()
    assert (root / "var" / "group").is_file()
    assert environment["PATH"] == "/image/bin"
    assert environment["HOME_OF"] == "host"
    assert "LD_LIBRARY_PATH" not in environment
    chosen = images.ContainerView([], [], ["LD_LIBRARY_PATH"], has_gpus=False)
    monkeypatch.delenv("HOME_OF")
    with (root / images.VARIABLES).open("a") as variables:
        variables.write("LD_LIBRARY_PATH=/image/lib\n")
    assert images.command(str(root), "", inside, ["x"])[1]["LD_LIBRARY_PATH"] == "/image/lib"
    _, environment = images.command(str(root), "", chosen, ["python3"])
    assert environment["HOME_OF"] == "image=1"
    assert environment["LD_LIBRARY_PATH"] == "/host"


@pytest.mark.parametrize(
    "inside",
    [
        images.ContainerView([], [], [], has_gpus=True),
        images.ContainerView([], ["/:/data:ro"], [], has_gpus=False),
        images.ContainerView([], ["/no/such/folder:/data"], [], has_gpus=False),
    ],
)
def test_charliecloud_says_what_it_can_not_do(
    engines: Callable[..., None], tmp_path: Path, inside: images.ContainerView
) -> None:
    engines("ch-run")
    with pytest.raises(images.ImageError):
        images.command(str(tmp_path), "", inside, ["true"])


def test_values_are_on_no_command_line(
    engines: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "canary")
    inside = images.ContainerView([], [], ["TOKEN"], has_gpus=False)
    for engine, kind in (("ch-run", "folder"), ("apptainer", "file"), ("enroot", "squashfs")):
        engines(engine)
        image = tmp_path / engine
        if kind == "folder":
            image.mkdir()
        else:
            image.write_bytes(KINDS[kind])
        words, environment = images.command(str(image), str(tmp_path), inside, ["true"])
        assert words[0] == engine
        assert "canary" not in " ".join(words)
        assert "canary" in environment.values()


def test_unused_images_and_files_of_killed_jobs_are_removed(tmp_path: Path) -> None:
    for name in ("old", "new", f"{images.WORK}old", f"{images.WORK}new"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / "old", (1, 1))
    os.utime(tmp_path / f"{images.WORK}old", (1, 1))
    images.remove_killed(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(["old", "new", f"{images.WORK}new"])
    images.remove_unused(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(["new", f"{images.WORK}new"])
