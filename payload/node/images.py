"""Runs programs in a container image, with the engine that the node has (`submit --container`).

job.py calls ``prepare`` on each node before the program starts. An image in an archive, or one from a
registry that the controller's engine has not pulled, is converted for the engine once, to a file or
a folder where later jobs find it. ``command`` is then the command line for each rank. Uses only the
standard library of Python 3.8 or newer.

The engines and their formats: Apptainer and Singularity (.sif, squashfs, a folder), Enroot, the
engine of Pyxis (squashfs), Charliecloud (a folder).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from payload.node import task

APPTAINER = ("apptainer", "singularity")
ENROOT = "enroot"
CHARLIECLOUD = "ch-run"
# Kind of an image -> the engines that run it, the preferred one first.
ENGINES = {
    "layers": (*APPTAINER, ENROOT, CHARLIECLOUD),
    "archive": (*APPTAINER, ENROOT, CHARLIECLOUD),
    "squashfs": (ENROOT, *APPTAINER),
    "folder": (*APPTAINER, CHARLIECLOUD),
    "file": APPTAINER,
}
# Kinds that no engine runs as they are.
RAW = ("layers", "archive")
SUFFIXES = {"apptainer": ".sif", "singularity": ".sif", ENROOT: ".sqsh", CHARLIECLOUD: ""}
# A converted image that no job has used for this time is removed when another is converted.
UNUSED_S = 30 * 86400.0
# The engine's temporary files need about this many times the bytes of the layers.
ROOM = 5
ERROR_LINES = 3
# Folders in which images are converted have names that begin so.
WORK = "clusterctl-image-"
KILLED_S = 86400.0
# The names of processors in images, by those of the kernel.
PROCESSORS = {"x86_64": "amd64", "aarch64": "arm64"}
FUSE = "/dev/fuse"
# MPI libraries keep sockets here.
TEMPORARY = "/tmp"  # noqa: S108
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Charliecloud, and other programs that make such folders, read an image's variables here.
VARIABLES = "ch/environment"
# Variables of the host that would lead programs of the image to files that it does not have.
OF_IMAGE = ("PATH", "LD_LIBRARY_PATH")
# Charliecloud mounts the host's, and images of other makers may lack them.
ACCOUNTS = ("etc/passwd", "etc/group")
# Names at the top of a root file system, which `docker export` writes.
OF_ROOT = (".dockerenv", "bin", "dev", "etc", "home", "lib", "root", "usr", "var")
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
# Raised for an archive that is cut or damaged.
DAMAGED = (tarfile.TarError, EOFError, zlib.error)
# As for the kernel.
MOST_LINKS = 40


class ImageError(Exception):
    """A program can't run in its image on this node. The text is for the user."""


class ImageLayers(NamedTuple):
    """A container image in parts. settings: its configuration, such as variables. layers: paths of
    tar files, the lowest first. source: the image from which Apptainer builds. Empty: a folder of
    the layers.
    """

    settings: bytes
    layers: Sequence[str]
    source: str = ""

    @property
    def variables(self) -> Mapping[str, str]:
        listed = (json.loads(self.settings).get("config") or {}).get("Env") or []
        return dict(text.partition("=")[::2] for text in listed)


def prepare(image: str, kept: str, report: Callable[[str], None]) -> None:
    """Convert an image for this node's engine, unless that was done before. An image that the engine
    runs as it is is left alone.

    image: a path; container.json describes an image from a registry. kept: the folder of images that
        engines run. report: called with a text before something takes long.

    Raises:
        ImageError: no engine can run the image, or it can't be converted.
    """
    kind = kind_of(image)
    engine = engine_for(image, kind)
    if kind not in RAW:
        return
    path = made_path(image, kind, kept, engine)
    try:
        os.makedirs(kept, exist_ok=True)
        with locked(f"{kept}/.{os.path.basename(path)}.lock"):
            if os.path.exists(path):
                os.utime(path)
                return
            report(f"converting the container image for {engine}, once for all jobs")
            make(image, kind, path, engine)
        remove_unused(kept)
    except OSError as exc:
        raise ImageError(f"{exc.filename or kept}: {exc.strerror or exc}") from exc


def kind_of(image: str) -> str:
    """Return the kind of an image, a key of ``ENGINES``. Raise ImageError if it can't be read."""
    if os.path.isdir(image):
        return "folder"
    try:
        with open(image, "rb") as file:
            start = file.read(512)
    except FileNotFoundError:
        raise ImageError(
            f"there is no image {image}: copy it to a folder that all nodes share"
        ) from None
    except OSError as exc:
        raise ImageError(f"the image {image} can't be read: {exc.strerror}") from exc
    if start[:4] == b"hsqs":
        return "squashfs"
    if start[257:262] == b"ustar" or start[:2] == b"\x1f\x8b":
        return "archive"
    return "layers" if start[:1] == b"{" else "file"


def engine_for(image: str, kind: str) -> str:
    """Return the name of the engine of this node that runs an image. ImageError: the node has no
    such engine.
    """
    found = [name for name in ENGINES[kind] if shutil.which(name)]
    if found:
        return found[0]
    others = [name for names in ENGINES.values() for name in names if shutil.which(name)]
    if others:
        raise ImageError(f"{others[0]} can't run {image}, only {', '.join(ENGINES[kind])} can")
    raise ImageError(
        f"no container engine ({', '.join(ENGINES['layers'])}): install Apptainer, or submit "
        "without --container"
    )


def made_path(image: str, kind: str, kept: str, engine: str) -> str:
    """Return the path of the file or folder into which an image is converted."""
    if kind == "layers":
        key = str(described(image)["digest"])
    else:
        status = os.stat(image)
        key = f"{os.path.realpath(image)}\0{status.st_size}\0{status.st_mtime_ns}"
    parts = "\0".join((key, platform.machine()))
    name = hashlib.sha256(parts.encode(errors="surrogateescape")).hexdigest()[:32]
    return f"{kept}/{name}{SUFFIXES[engine]}"


def described(image: str) -> Mapping[str, Any]:
    """Return the content of container.json: digest, and files (path in the image's OCI layout ->
    path), none if the controller has pulled the image. ImageError: it is damaged.
    """
    try:
        with open(image) as file:
            content = json.load(file)
        return {name: content[name] for name in ("digest", "files")}
    except (ValueError, LookupError, TypeError) as exc:
        raise ImageError(f"{image} can't be read: {exc!r}") from exc


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold a lock between jobs and nodes, in a file system that has locks."""
    with open(path, "a") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(path)
        yield


def make(image: str, kind: str, path: str, engine: str) -> None:
    """Convert an image to ``path``, which appears when it is complete. OSError, ImageError: it can't
    be converted.
    """
    new = f"{os.path.dirname(path)}/.{task.host_name()}.{os.getpid()}{SUFFIXES[engine]}"
    size = os.path.getsize(image)
    if kind == "layers":
        files = described(image)["files"]
        if not files:
            raise ImageError(
                f"{os.path.dirname(path)} has no image for {engine} on {processor()}: submit again; "
                "if the controller has another engine or processor, submit an archive of `docker save`"
            )
        size = sum(map(os.path.getsize, files.values()))
    place = roomy_folder(ROOM * size, os.path.dirname(path))
    remove_killed(place)
    work = tempfile.mkdtemp(prefix=WORK, dir=place)
    try:
        parts = unpacked(image, work) if kind == "archive" else linked(image, work)
        wanted = json.loads(parts.settings).get("architecture")
        if wanted not in (None, processor()):
            raise ImageError(f"the image is for processors {wanted}, this node has {processor()}")
        if engine in APPTAINER:
            make_sif(engine, parts, work, new)
        elif engine == ENROOT:
            make_squashfs(parts, work, new)
        else:
            make_folder(parts, new)
        try:
            os.rename(new, path)
        except OSError:
            # In a file system without locks, another node may have been first.
            if not os.path.isdir(path):
                raise
    except (*DAMAGED, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ImageError(f"{image} is not a complete container image: {exc!r}") from exc
    finally:
        for left in (work, new):
            remove(left)


def roomy_folder(size: int, otherwise: str) -> str:
    """Return a folder on a disk of this node with this many free bytes; if there is none,
    ``otherwise``.
    """
    for folder in (os.environ.get("TMPDIR"), "/var/tmp", TEMPORARY):  # noqa: S108
        with suppress(OSError):
            if folder and os.access(folder, os.W_OK):
                free = os.statvfs(folder)
                if free.f_bavail * free.f_frsize > size:
                    return folder
    return otherwise


def remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)


def remove_killed(place: str) -> None:
    """Remove the files of jobs that were killed while they converted an image."""
    for name in os.listdir(place):
        with suppress(OSError):
            path = f"{place}/{name}"
            age = time.time() - os.stat(path).st_mtime
            if name.startswith(WORK) and os.stat(path).st_uid == os.getuid() and age > KILLED_S:
                remove(path)


def remove_unused(kept: str) -> None:
    """Remove converted images, locks and leftovers that no job has used for long."""
    for name in os.listdir(kept):
        path = f"{kept}/{name}"
        with suppress(OSError):
            if time.time() - os.stat(path).st_mtime > UNUSED_S:
                # Another job must not find half of an image.
                gone = f"{kept}/.gone.{name}.{task.host_name()}.{os.getpid()}"
                os.rename(path, gone)
                remove(gone)


def linked(image: str, work: str) -> ImageLayers:
    """Link the files that container.json lists to an OCI layout in ``work``, and return its parts."""
    for name, path in described(image)["files"].items():
        place = f"{work}/{name}"
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.symlink(os.path.abspath(path), place)
    return of_layout(work)


def unpacked(archive: str, work: str) -> ImageLayers:
    """Unpack an archive of `docker save` or `podman save`, or an OCI archive, in ``work``, and return
    its parts. An archive of a root file system is not unpacked: it is the only layer.
    """
    with tarfile.open(archive) as tar:
        for member in tar:
            if pieces(member.name)[:1] and pieces(member.name)[0] in OF_ROOT:
                return ImageLayers(b"{}", [archive])
            place = inside(work, member.name)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if member.isfile():
                write(tar, member, place)
            # `docker save` writes equal layers once.
            elif member.issym():
                os.symlink(member.linkname, place)
    with suppress(FileNotFoundError), open(f"{work}/manifest.json") as file:
        listed = json.load(file)
        if len(listed) != 1:
            raise ImageError(f"{archive} has {len(listed)} images: save one")
        config, *layers = (
            inside(work, path) for path in (listed[0]["Config"], *listed[0]["Layers"])
        )
        with open(config, "rb") as settings:
            return ImageLayers(settings.read(), layers, f"docker-archive:{archive}")
    return of_layout(work)


def of_layout(folder: str) -> ImageLayers:
    """Return the parts of an OCI image layout (image-spec, image-layout.md)."""
    blob = blob_of(f"{folder}/index.json")
    while "manifests" in json.loads(task.text_of(f"{folder}/{blob}")):
        blob = blob_of(f"{folder}/{blob}")
    manifest = json.loads(task.text_of(f"{folder}/{blob}"))
    paths = (path_of(entry) for entry in (manifest["config"], *manifest["layers"]))
    config, *layers = (f"{folder}/{path}" for path in paths)
    with open(config, "rb") as file:
        return ImageLayers(file.read(), layers, f"oci:{folder}")


def processor() -> str:
    """Return the name of this node's processor in images."""
    return PROCESSORS.get(platform.machine(), platform.machine())


def blob_of(index: str) -> str:
    """Return the path of the only image that an index lists, or of the image for this processor."""
    own = processor()
    entries = json.loads(task.text_of(index))["manifests"]
    fitting = [entry for entry in entries if entry.get("platform", {}).get("architecture") == own]
    return path_of((fitting or entries)[0])


def path_of(entry: Mapping[str, Any]) -> str:
    kind, _, number = entry["digest"].partition(":")
    return f"blobs/{kind}/{number}"


def make_sif(engine: str, parts: ImageLayers, work: str, new: str) -> None:
    """Have Apptainer or Singularity write a .sif file. Its caches are below ``work``."""
    if not parts.source:
        make_folder(parts, f"{work}/root")
    name = engine.upper()
    places = {f"{name}_TMPDIR": work, f"{name}_CACHEDIR": f"{work}/cache"}
    run([engine, "build", "--disable-cache", new, parts.source or f"{work}/root"], places)


def compression_of(path: str) -> str:
    with open(path, "rb") as file:
        start = file.read(4)
    return "+gzip" if start[:2] == b"\x1f\x8b" else "+zstd" if start == b"\x28\xb5\x2f\xfd" else ""


def make_squashfs(parts: ImageLayers, work: str, new: str) -> None:
    """Write an image of Enroot, which has its variables in /etc/environment (image-format.md)."""
    root = f"{work}/root"
    make_folder(parts, root)
    os.makedirs(f"{root}/etc", exist_ok=True)
    for name in ("environment", "fstab", "rc"):
        with suppress(FileNotFoundError):
            os.unlink(f"{root}/etc/{name}")
    with open(f"{root}/etc/environment", "w") as file:
        file.writelines(f"{name}={value}\n" for name, value in parts.variables.items())
    with open(f"{root}/etc/fstab", "w"):
        pass
    # Enroot compresses its own images little.
    options = "-no-progress -noappend -all-root -quiet -Xcompression-level 1".split()
    run(["mksquashfs", root, new, *options], {})


def make_folder(parts: ImageLayers, root: str) -> None:
    """Unpack the layers of an image to a folder, as its files will be seen."""
    os.makedirs(root)
    for layer in parts.layers:
        with opened(layer) as tar:
            for member in tar:
                add_member(tar, member, root)
    os.makedirs(f"{root}/{os.path.dirname(VARIABLES)}", exist_ok=True)
    with open(f"{root}/{VARIABLES}", "w") as file:
        file.writelines(f"{name}={value}\n" for name, value in parts.variables.items())
    # Charliecloud mounts these, and has no folders of its own for them.
    for name in ("dev", "proc", "sys", "tmp", "etc", "home", "mnt"):
        if not os.path.lexists(f"{root}/{name}"):
            os.mkdir(f"{root}/{name}")


@contextmanager
def opened(layer: str) -> Iterator[tarfile.TarFile]:
    if compression_of(layer) != "+zstd":
        with tarfile.open(layer, "r|*") as tar:
            yield tar
        return
    if not shutil.which("zstd"):
        raise ImageError("the image is compressed by zstd: install the package zstd on the nodes")
    # zstd opens no links.
    with open(layer, "rb") as file:
        reader = subprocess.Popen(["zstd", "-dc"], stdin=file, stdout=subprocess.PIPE)
    with reader, tarfile.open(fileobj=reader.stdout, mode="r|") as tar:
        yield tar


def add_member(tar: tarfile.TarFile, member: tarfile.TarInfo, root: str) -> None:
    """Add a file of a layer to a folder, or remove one that the layer hides (image-spec, layer.md).

    Owners and devices are left out. ImageError: a path leads out of the folder.
    """
    path = os.path.normpath(member.name)
    name = os.path.basename(path)
    hidden_name = name[len(WHITEOUT) :] if name.startswith(WHITEOUT) else ""
    if ".." in (name, hidden_name) or name in (WHITEOUT, f"{WHITEOUT}."):
        raise ImageError(f"the path {member.name} leads out of the image")
    folder = inside(root, os.path.dirname(path))
    if path == "." or member.ischr() or member.isblk() or member.isfifo():
        return
    if name == OPAQUE:
        for hidden in os.listdir(folder) if os.path.isdir(folder) else ():
            remove_any(f"{folder}/{hidden}")
        return
    if hidden_name:
        remove_any(f"{folder}/{hidden_name}")
        return
    os.makedirs(folder, exist_ok=True)
    target = f"{folder}/{name}"
    if member.isdir():
        if os.path.islink(target) or not os.path.isdir(target):
            remove_any(target)
            os.mkdir(target)
        os.chmod(target, stat.S_IMODE(member.mode) & 0o777 | stat.S_IRWXU)
        return
    remove_any(target)
    if member.issym():
        os.symlink(member.linkname, target)
    elif member.islnk():
        above, _, last = os.path.normpath(member.linkname).rpartition("/")
        os.link(f"{inside(root, above)}/{last}", target, follow_symlinks=False)
    else:
        write(tar, member, target)
        os.chmod(target, stat.S_IMODE(member.mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR)


def inside(root: str, path: str) -> str:
    """Return a path below ``root`` with its links followed as in the container."""
    parts = pieces(path)
    current = root
    followed = 0
    while parts:
        part = parts.pop(0)
        if part == "..":
            current = root if current == root else os.path.dirname(current)
        elif os.path.islink(f"{current}/{part}"):
            followed += 1
            if followed > MOST_LINKS:
                raise ImageError(f"too many links in the image's path {path}")
            link = os.readlink(f"{current}/{part}")
            current = root if link.startswith("/") else current
            parts = pieces(link) + parts
        else:
            current = f"{current}/{part}"
    return current


def pieces(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def remove_any(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)


def write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    content = tar.extractfile(member)
    if content is None:
        raise ImageError(f"the image lacks the content of {member.name}")
    with open(path, "wb") as file:
        shutil.copyfileobj(content, file, task.CHUNK)


def run(words: Sequence[str], more: Mapping[str, str]) -> None:
    """Run a program. ImageError: it fails, with its last lines. more: variables."""
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except FileNotFoundError:
        raise ImageError(f"this node has no {words[0]}: install it") from None
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines()[-ERROR_LINES:]
        raise ImageError(f"{words[0]} can't convert the image: {' / '.join(lines)}")


class ContainerView(NamedTuple):
    """The container from the program's side. folders: paths that are the same as on the node.

    mounts: SOURCE:TARGET or SOURCE:TARGET:ro. names: variables that override the image's. has_gpus:
    whether the node's GPUs are passed in.
    """

    folders: Sequence[str]
    mounts: Sequence[str]
    names: Sequence[str]
    has_gpus: bool


def command(
    image: str, kept: str, inside_it: ContainerView, program: Sequence[str]
) -> tuple[list[str], Mapping[str, str]]:
    """Return the command that runs a program in an image, in the same current folder, and its
    environment. Raises ImageError.
    """
    kind = kind_of(image)
    engine = engine_for(image, kind)
    path = made_path(image, kind, kept, engine) if kind in RAW else image
    binds = list(map(os.path.realpath, inside_it.folders))
    if engine not in APPTAINER:
        # The home is not there, and a path of the job may be a link, such as $SCRATCH.
        links = [path for path in inside_it.folders if path != os.path.realpath(path)]
        binds += [f"{os.path.realpath(path)}:{path}" for path in links]
    binds += map(expanded, inside_it.mounts)
    if engine in APPTAINER:
        return in_apptainer(engine, path, binds, inside_it, program)
    if engine == ENROOT:
        return in_enroot(path, kept, [*binds, TEMPORARY], inside_it, program)
    return in_charliecloud(path, binds, inside_it, program)


def expanded(mount: str) -> str:
    """Return a mount with ~ and variables of the node replaced. ImageError: it has no such source."""
    source, _, rest = mount.partition(":")
    path = os.path.expanduser(os.path.expandvars(source))
    if not os.path.exists(path):
        raise ImageError(f"the source of --mount {mount} does not exist there")
    target, _, mode = rest.partition(":")
    return f"{path}:{target or path}{':ro' if mode == 'ro' else ''}"


def in_apptainer(
    engine: str, image: str, binds: Sequence[str], inside_it: ContainerView, program: Sequence[str]
) -> tuple[list[str], Mapping[str, str]]:
    flags = [word for bind in binds for word in ("--bind", bind)]
    flags += ["--nv"] if inside_it.has_gpus else []
    # Without this device a file can't be mounted by a user, and is unpacked in memory or on disk.
    if engine == "apptainer" and not os.path.exists(FUSE) and os.path.isfile(image):
        flags.append("--unsquash")
    names = {f"{engine.upper()}ENV_{name}": os.environ.get(name, "") for name in inside_it.names}
    return [engine, "--quiet", "exec", *flags, image, *program], {**os.environ, **names}


def in_charliecloud(
    root: str, binds: Sequence[str], inside_it: ContainerView, program: Sequence[str]
) -> tuple[list[str], Mapping[str, str]]:
    if inside_it.has_gpus:
        raise ImageError("Charliecloud can't give a program the node's GPUs: install Apptainer")
    if read_only := [bind for bind in binds if bind.endswith(":ro")]:
        raise ImageError(
            f"Charliecloud has no read-only mounts: use --mount {read_only[0].removesuffix(':ro')}, "
            "without :ro"
        )
    for name in ACCOUNTS:
        make_place(inside(root, name), is_folder=False)
    for bind in binds:
        source, _, target = bind.partition(":")
        make_place(inside(root, target or source), is_folder=os.path.isdir(source))
    flags = [word for bind in binds for word in ("--bind", bind)]
    host = {name: os.environ[name] for name in os.environ if name not in OF_IMAGE}
    chosen = {name: os.environ[name] for name in inside_it.names if name in os.environ}
    environment = {"PATH": PATH, **variables_of(root), **host, **chosen}
    return [CHARLIECLOUD, *flags, f"--cd={os.getcwd()}", root, "--", *program], environment


def make_place(path: str, *, is_folder: bool) -> None:
    """Make a folder or an empty file at which something can be mounted."""
    if os.path.lexists(path):
        return
    with suppress(FileExistsError):
        if is_folder:
            os.makedirs(path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "a"):
                pass


def variables_of(root: str) -> Mapping[str, str]:
    lines = task.text_of(f"{root}/{VARIABLES}").splitlines()
    return dict(line.partition("=")[::2] for line in lines if "=" in line)


def in_enroot(
    image: str, kept: str, binds: Sequence[str], inside_it: ContainerView, program: Sequence[str]
) -> tuple[list[str], Mapping[str, str]]:
    flags = []
    for bind in binds:
        source, target, *mode = bind.split(":") if ":" in bind else (bind, bind)
        kind = "x-create=dir" if os.path.isdir(source) else "x-create=file"
        flags += ["--mount", f"{source}:{target}:{kind},rbind{',ro' if mode else ''}"]
    hidden = {*OF_IMAGE, "PWD", "OLDPWD", "SHLVL", "_"} - {*inside_it.names}
    names = [name for name in os.environ if name.isidentifier() and name not in hidden]
    flags += [f"--env={name}" for name in names]
    places = {}
    if inside_it.has_gpus:
        places["NVIDIA_VISIBLE_DEVICES"] = os.environ.get("NVIDIA_VISIBLE_DEVICES", "all")
    # A login shell would set PATH anew.
    places["ENROOT_LOGIN_SHELL"] = "no"
    # Slurm makes no such folder for a user who is not logged in. A site's own settings win.
    if not os.path.isdir(os.environ.get("XDG_RUNTIME_DIR", "")):
        places["XDG_RUNTIME_DIR"] = f"{kept}/.enroot-{task.host_name()}"
    start = ["sh", "-c", 'cd -- "$0" && exec "$@"', os.getcwd()]
    return [ENROOT, "start", *flags, image, *start, *program], {**os.environ, **places}
