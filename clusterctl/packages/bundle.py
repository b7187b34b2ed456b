"""A bundle: everything that a cluster is installed from, in one plain tar of plain files; and its use.

The manifest comes first, then a list of the SHA-256 of each other file, which `sha256sum -c` reads. The same
content gives the same bytes. The tar is not compressed, because the packages in it are.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, starmap
from pathlib import Path, PurePosixPath
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterctl import __version__
from clusterctl.errors import BundleError, Failure, ProvisionError, printable
from clusterctl.packages.accelerators import has_gpus
from clusterctl.packages.os_packages import asked_packages, package_names
from clusterctl.packages.wheelhouse import (
    Lock,
    NodePlatform,
    Requirements,
    cache_of_downloads,
    content_hash,
    has_wheelhouse,
    new_wheelhouse,
    store_lock,
    wheel_path,
)
from clusterctl.spec.common import Software
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.assets import digest, file_sha256, gpu_lock, job_lock
from clusterctl.util.disk import writing
from clusterctl.util.process import temporary_folder

FORMAT: Final = 2  # of the file and of its manifest; raised when an older clusterctl would misread it
MANIFEST: Final = "manifest.json"
HASHES: Final = "SHA256SUMS"
WHEELS: Final = "wheels"
WHEELS_LOCK: Final = f"{WHEELS}/{{}}.lock"  # of what the spec's requirements come to, by release
REPOSITORY: Final = "systems/{}"  # by release
BLOCK: Final = tarfile.BLOCKSIZE
_CHUNK: Final = 1 << 20
_LONGEST: Final = 32 << 20  # of the manifest and of the list
_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9._+~%=@^-]*"  # never `..`, hidden, or an option
_SUM: Final = re.compile(rf"([0-9a-f]{{64}})  ({_PART}(?:/{_PART}){{0,5}})")
MISMATCH: Final = "bundle-mismatch"  # the code of what is whole, but made for something else
_AGAIN: Final = "copy the bundle here again, or create it again with `clusterctl bundle create`"


class _Stored(BaseModel):
    """What is written once and read by later versions: they may know more."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class System(_Stored):
    """What there is for one distribution.

    ``asked``: the packages that the roles ask for; ``packages``: how many that comes to with all they need.
    ``base``, ``gpu_base`` and ``requirements`` are hashes of the job environment's lock, of what nodes with
    GPUs have beside it, and of the spec's requirements files; ``wheels``, ``gpu`` and ``more`` the names of
    what they come to.
    """

    asked: tuple[str, ...]
    packages: int
    python: str
    base: str
    gpu_base: str | None = None
    requirements: str | None = None
    wheels: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


class _Head(_Stored):
    format: int
    clusterctl: str = "an unknown version"


class Manifest(_Head):
    """The first file of a bundle. ``systems`` is by distribution, as `debian-12`."""

    clusterctl: str
    cluster: str
    architecture: str
    systems: Mapping[str, System]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose manifest is whole; ``damages`` checks the other files.

    ``hashes``: path -> SHA-256 of each file, in the order of the tar. ``digest``: the SHA-256 of that list,
    which stands for the whole bundle.
    """

    file: Path
    manifest: Manifest
    hashes: Mapping[str, str]
    digest: str

    def stream(self, folder: str, *, as_folder: str, after: Mapping[str, bytes]) -> Iterator[bytes]:
        """Yield a tar of ``after`` and of a folder of the bundle, which gets another name."""
        with _opened(self.file) as archive:
            below = (
                (as_folder + one.name.removeprefix(folder), one.size, _chunks(_content(archive, one)))
                for one in archive
                if one.name.startswith(f"{folder}/")
            )
            yield from _tar(chain(starmap(_source, after.items()), below))

    def copy(self, paths: Iterable[str], folder: Path) -> None:
        """Copy files of the bundle into a folder, without the folders that they lie in, and check them again.

        Raises:
            BundleError: a file is damaged or missing.
        """
        with _opened(self.file) as archive:
            for path in paths:
                target = folder / PurePosixPath(path).name
                with target.open("wb") as out:
                    shutil.copyfileobj(_content(archive, archive.getmember(path)), out)
                if file_sha256(target) != self.hashes[path]:
                    target.unlink()
                    what = f"{path} in the bundle is damaged"
                    raise BundleError(what, code="bundle-damaged", where=str(self.file), fix=_AGAIN)


def open_bundle(file: Path) -> Bundle:
    """Read the manifest of a bundle.

    Raises:
        BundleError: there is no such file, it is no bundle, or not of a format that we know.
    """
    try:
        with _opened(file) as archive:
            raw, listed = (_next(archive, name) for name in (MANIFEST, HASHES))
    except OSError as exc:
        unread, why = "the bundle can't be read", exc.strerror or str(exc)
        fix = "name a file that `clusterctl bundle create` made"
        raise BundleError(unread, code="bundle-unreadable", where=str(file), why=why, fix=fix) from exc
    found = [_SUM.fullmatch(line) for line in listed.decode(errors="replace").splitlines()]
    hashes = {match[2]: match[1] for match in found if match}
    if len(hashes) != len(found):
        raise _no_bundle(
            file, f"a line of {HASHES} is not a hash and a path, or has the path of another line"
        )
    if hashlib.sha256(raw).hexdigest() != hashes.get(MANIFEST):
        what = f"{MANIFEST} in the bundle is damaged"
        raise BundleError(what, code="bundle-damaged", where=str(file), fix=_AGAIN)
    return Bundle(file.absolute(), _manifest(raw, file), hashes, hashlib.sha256(listed).hexdigest())


def _next(archive: tarfile.TarFile, name: str) -> bytes:
    """Return the content of the next file, which must have that name."""
    member = archive.next()
    if member is None or member.name != name or member.size > _LONGEST:
        raise tarfile.ReadError(f"{name} is not where it belongs")
    return _content(archive, member).read()


def _manifest(raw: bytes, file: Path) -> Manifest:
    try:
        head = _Head.model_validate_json(raw)
        if head.format != FORMAT:
            what = f"the bundle has format {head.format}, this clusterctl reads format {FORMAT}"
            why = f"it was made by clusterctl {head.clusterctl}"
            fix = "use that version here, or make the bundle anew with this one"
            raise BundleError(what, code="bundle-format", where=str(file), why=why, fix=fix)
        return Manifest.model_validate_json(raw)
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise _no_bundle(file, f"{MANIFEST}: {place + ': ' if place else ''}{first['msg']}") from exc


@contextmanager
def _opened(file: Path) -> Iterator[tarfile.TarFile]:
    """Open a bundle as the tar that it is.

    Raises:
        BundleError: it is not a tar, or lacks a file that the body takes from it.
    """
    try:
        with tarfile.open(file, "r:") as archive:
            yield archive
    except (tarfile.TarError, KeyError) as exc:
        raise _no_bundle(file, str(exc)) from exc


def _no_bundle(file: Path, why: str) -> BundleError:
    what = "this is not a bundle of clusterctl's"
    return BundleError(what, code="not-a-bundle", where=str(file), why=why, fix=_AGAIN)


def reject_defects(file: Path, wrong: Sequence[Failure]) -> None:
    """Raise if there are defects.

    Raises:
        BundleError: with all of them.
    """
    if not wrong:
        return
    why, fix = named([one.cause for one in wrong], most=10), wrong[-1].fix
    said: dict[str, Any] = {"where": str(file), "why": why, "fix": fix, "failures": tuple(wrong)}
    if all(one.code == MISMATCH for one in wrong):
        raise BundleError("the bundle does not match", code="bundle-mismatch", **said)
    raise BundleError("the bundle is damaged", code="bundle-damaged", **said)


def named(paths: Sequence[str], most: int = 5) -> str:
    """Some paths for a message."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more


def damages(bundle: Bundle) -> tuple[Failure, ...]:
    """Compare each file of the bundle with the list; the whole bundle is read."""
    left = {HASHES: bundle.digest, **bundle.hashes}
    wrong = []
    with _opened(bundle.file) as archive, suppress(tarfile.ReadError):
        for member in archive:
            # A file that is there twice, or that the list does not name, has no hash left.
            if not _is_plain(member) or _sha256(_content(archive, member)) != left.get(member.name):
                wrong.append(member.name)
            left.pop(member.name, None)
    not_said = f"it is not what {HASHES} says"
    unread = "it is not there, or the tar is damaged or cut off before it"
    return (
        *(Failure("bundle-corrupted", f"{printable(name)}: {not_said}", fix=_AGAIN) for name in wrong),
        *(Failure("bundle-missing", f"{name}: {unread}", fix=_AGAIN) for name in left),
    )


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.isreg() and not member.issparse()


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> io.BufferedReader:
    content = archive.extractfile(member) if _is_plain(member) else None
    if not isinstance(content, io.BufferedReader):
        raise tarfile.ReadError(f"{printable(member.name)} is no plain file")
    return content


def write_bundle(target: Path, manifest: Manifest, sources: Mapping[str, Path | bytes]) -> None:
    """Write a bundle, which appears under its name when it is whole and checked.

    Raises:
        MachineError: it can't be written there.
        BundleError: a source changed meanwhile.
    """
    raw = manifest.model_dump_json(indent=1).encode() + b"\n"
    files: dict[str, Path | bytes] = {MANIFEST: raw, **{path: sources[path] for path in sorted(sources)}}
    hashes = "".join(f"{_sha256(source)}  {path}\n" for path, source in files.items()).encode()
    files = {MANIFEST: raw, HASHES: hashes, **files}
    with writing(target), temporary_folder(target.parent) as folder:
        whole = folder / target.name
        with whole.open("wb") as file:
            file.writelines(_tar(starmap(_source, files.items())))
        reject_defects(target, damages(open_bundle(whole)))
        whole.replace(target)


def _tar(files: Iterable[tuple[str, int, Iterable[bytes]]]) -> Iterator[bytes]:
    """Yield a tar of plain files, each a name, a size and its content: the same bytes for the same files."""
    for name, size, chunks in files:
        info = tarfile.TarInfo(name)
        info.size = size
        yield info.tobuf()
        yield from chunks
        yield bytes(-size % BLOCK)
    yield bytes(2 * BLOCK)


def _source(name: str, source: Path | bytes) -> tuple[str, int, Iterable[bytes]]:
    if isinstance(source, bytes):
        return name, len(source), [source]
    return name, source.stat().st_size, _chunks(source.open("rb"))


def _chunks(file: io.BufferedReader) -> Iterator[bytes]:
    with file:
        yield from iter(partial(file.read, _CHUNK), b"")


def _sha256(source: Path | bytes | io.BufferedReader) -> str:
    if isinstance(source, io.BufferedReader):
        return hashlib.file_digest(source, "sha256").hexdigest()
    return hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else file_sha256(source)


def asks_for_cupy(spec: ClusterSpec) -> bool:
    """Whether its bundle must have CuPy: only the spec can tell which nodes have GPUs."""
    return spec.software.cupy and any(partition.gpus for partition in spec.partitions)


def mismatches(
    bundle: Bundle, spec: ClusterSpec | None, releases: Collection[str] = ()
) -> tuple[Failure, ...]:
    """Compare a bundle with this clusterctl, the spec, if there is one, and hosts of these releases."""
    manifest = bundle.manifest
    found = [*_of_clusterctl(manifest)]
    others = f"the bundle has no packages for it, only for {', '.join(manifest.systems)}"
    found += [(release, others) for release in releases if release not in manifest.systems]
    for release, system in manifest.systems.items():
        if not releases or release in releases:
            found += [(release, why) for why in _of_system(release, system, spec)]
    fix = "make a bundle for this with `clusterctl bundle create`, with the clusterctl that is to use it"
    return tuple(Failure("bundle-mismatch", f"mismatch: {what}: {why}", fix=fix) for what, why in found)


def _of_clusterctl(manifest: Manifest) -> Iterator[tuple[str, str]]:
    if manifest.clusterctl != __version__:
        yield "clusterctl", f"made by version {manifest.clusterctl}, and this is {__version__}"
    if manifest.architecture != ARCHITECTURE:
        yield "architecture", f"for {manifest.architecture}, and the hosts have {ARCHITECTURE}"


def _of_system(release: str, system: System, spec: ClusterSpec | None) -> Iterator[str]:
    if lacking := _wanted(release, spec) - set(system.asked):
        yield f"lacks the packages {named(sorted(lacking))}"
    if system.base != digest(job_lock().read_bytes()):
        yield "the wheels of the job environment are from another version of clusterctl"
    if system.gpu_base not in (None, digest(gpu_lock().read_bytes())):
        yield "CuPy and CUDA's libraries are from another version of clusterctl"
    elif spec is not None and asks_for_cupy(spec) and not system.gpu:
        yield "the spec has GPUs, and the bundle has no CuPy for them"
    asked = spec.software.python.requirements if spec is not None else None
    if asked is not None and system.requirements != content_hash((asked,)):
        has = "other ones" if system.requirements else "none"
        yield f"{asked} asks for Python packages, and the bundle was made for {has}"


def _wanted(release: str, spec: ClusterSpec | None) -> set[str]:
    """What must be in it for a release; without a spec, what all specs ask for."""
    try:
        distribution = distribution_of(release)
    except ProvisionError:  # no host of it can be configured, so nothing is wanted
        return set()
    if spec is not None:
        return set(asked_packages(distribution, spec.software))
    return set(package_names(distribution)) & set(package_names(distribution, Software(slurm="openhpc")))


class Remembered(BaseModel):
    """The bundle of a cluster: its path, and its state when all of it was checked."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    file: Path
    digest: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, bundle: Bundle) -> Remembered:
        stat = bundle.file.stat()
        return cls(file=bundle.file, digest=bundle.digest, size=stat.st_size, mtime_ns=stat.st_mtime_ns)


def cluster_bundle(workspace: Workspace) -> Remembered | None:
    """The bundle that the cluster's hosts are installed from, if they are."""
    try:
        return Remembered.model_validate_json(workspace.bundle.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def missing_bundle(workspace: Workspace) -> BundleError:
    """The error for hosts that are to be installed from a bundle that is not there any more."""
    known = cluster_bundle(workspace)
    return BundleError(
        "the bundle that this cluster is installed from is missing",
        code="bundle-gone",
        where=str(known.file) if known else "",
        why="some hosts have packages to install, and no repository of their own is asked",
        fix="give its new path: `clusterctl up --bundle FILE`; or `clusterctl up --no-bundle`, with the "
        "hosts' own repositories",
    )


def use_bundle(file: Path, spec: ClusterSpec, workspace: Workspace) -> Bundle:
    """Check a bundle, record it for the cluster, and put its wheels where the rest of `up` looks for them.

    What was checked already, and has not been written to since, is not read once more.

    Raises:
        BundleError: it is damaged, or is not for this spec or clusterctl.
        MachineError: the cache of downloads can't be written.
    """
    bundle = open_bundle(file)
    reject_defects(file, mismatches(bundle, spec))
    now = Remembered.of(bundle)
    if now != cluster_bundle(workspace):
        reject_defects(file, damages(bundle))
        write_atomic(workspace.bundle, now.model_dump_json() + "\n")
    _place_wheels(bundle, spec)
    return bundle


def _place_wheels(bundle: Bundle, spec: ClusterSpec) -> None:
    for release, system in bundle.manifest.systems.items():
        node = NodePlatform.of(distribution_of(release))
        for lock, names in ((job_lock(), system.wheels), (gpu_lock(), system.gpu)):
            if names and not has_wheelhouse(lock, node):
                with new_wheelhouse(lock, node) as folder:
                    bundle.copy([f"{WHEELS}/{name}" for name in names], folder)
        if (asked := spec.software.python.requirements) is None:
            continue
        # In the cache, to which the wheels are moved: temporary files may be on another file system.
        with cache_of_downloads() as home, temporary_folder(home) as folder:
            lock_file = WHEELS_LOCK.format(release)
            bundle.copy([lock_file], folder)
            text = (folder / PurePosixPath(lock_file).name).read_text()
            missing = [wheel for wheel in Lock.read(text, {}).wheels if not wheel_path(wheel).is_file()]
            bundle.copy([f"{WHEELS}/{wheel.file}" for wheel in missing], folder)
            store_lock(Requirements((asked,), job_lock(), node=node, gpus=has_gpus(spec)), text, folder)
