"""A bundle: a tar file with all packages that a cluster is installed from.

The manifest comes first, then SHA256SUMS with the hash of every other file, for `sha256sum -c`. The
same content gives the same bytes. The packages are compressed, so the tar is not.
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
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.os_packages import asked_packages, package_names
from clusterctl.packages.project_files import content_hash
from clusterctl.packages.resolution import Requirements, store_lock
from clusterctl.packages.wheelhouse import (
    Lock,
    cache_of_downloads,
    has_wheelhouse,
    new_wheelhouse,
    wheel_path,
)
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import first_few
from clusterctl.spec.software import Software
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.assets import digest, file_sha256, gpu_lock, job_lock
from clusterctl.util.disk import translating_write_errors
from clusterctl.util.process import temporary_folder

# Version of the file format. Increased when an older clusterctl would misread a bundle.
FORMAT: Final = 2
MANIFEST: Final = "manifest.json"
HASHES: Final = "SHA256SUMS"
WHEELS: Final = "wheels"
# Each release has the locked requirements of the spec, and a repository.
WHEELS_LOCK: Final = f"{WHEELS}/{{}}.lock"
REPOSITORY: Final = "systems/{}"
BLOCK: Final = tarfile.BLOCKSIZE
_CHUNK: Final = 1 << 20
# Size limit of the manifest and of SHA256SUMS.
_LONGEST: Final = 32 << 20
# A part of a path: never `..`, a hidden file, or an option.
_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9._+~%=@^-]*"
_SUM: Final = re.compile(rf"([0-9a-f]{{64}})  ({_PART}(?:/{_PART}){{0,5}})")
# The error code if a bundle is intact, but was created for another spec, release or clusterctl.
MISMATCH: Final = "bundle-mismatch"
_AGAIN: Final = (
    "copy the bundle to this machine again, or create it again with `clusterctl bundle create`"
)


class _Stored(BaseModel):
    # Fields added by later versions are ignored.
    model_config = ConfigDict(frozen=True, extra="ignore")


class System(_Stored):
    """The packages in a bundle for a Linux distribution.

    asked: OS packages that Ansible's roles install. packages: number of OS packages with
        dependencies.
    wheels, gpu, more: wheel files for all nodes, for nodes with GPUs, and for the spec's
        requirements.
    base, gpu_base, requirements: for each of these three, the hash of the file that lists the
        packages.
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
    """The first file of a bundle. The keys of ``systems`` are releases such as `debian-12`."""

    clusterctl: str
    cluster: str
    architecture: str
    systems: Mapping[str, System]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle with a checked manifest. ``damages`` checks the other files of the bundle.

    hashes: path -> SHA-256, in the order of the tar. digest: the SHA-256 of SHA256SUMS, which
    identifies the bundle's content.
    """

    file: Path
    manifest: Manifest
    hashes: Mapping[str, str]
    digest: str

    def stream(self, folder: str, *, as_folder: str, after: Mapping[str, bytes]) -> Iterator[bytes]:
        """Yield a tar of the files ``after`` (path -> content) and ``folder``, renamed to
        ``as_folder``.
        """
        with _open_tar(self.file) as archive:
            members = (
                (
                    as_folder + member.name.removeprefix(folder),
                    member.size,
                    _chunks(_content(archive, member)),
                )
                for member in archive
                if member.name.startswith(f"{folder}/")
            )
            yield from _tar(chain(starmap(_source, after.items()), members))

    def copy(self, paths: Iterable[str], folder: Path) -> None:
        """Copy files of the bundle directly into ``folder``. Raises BundleError if a file is
        damaged.
        """
        with _open_tar(self.file) as archive:
            for path in paths:
                target = folder / PurePosixPath(path).name
                with target.open("wb") as out:
                    shutil.copyfileobj(_content(archive, archive.getmember(path)), out)
                if file_sha256(target) != self.hashes[path]:
                    target.unlink()
                    message = f"{path} in the bundle is damaged"
                    raise BundleError(
                        message, code="bundle-damaged", where=str(self.file), fix=_AGAIN
                    )


def open_bundle(file: Path) -> Bundle:
    """Read a bundle's manifest. Raise a BundleError if the file is no bundle of a known format."""
    try:
        with _open_tar(file) as archive:
            raw, listed = (_read_next(archive, name) for name in (MANIFEST, HASHES))
    except OSError as exc:
        message = "the bundle can't be read"
        reason = exc.strerror or str(exc)
        fix = "pass a file that was created by `clusterctl bundle create`"
        raise BundleError(
            message, code="bundle-unreadable", where=str(file), why=reason, fix=fix
        ) from exc
    matches = [_SUM.fullmatch(line) for line in listed.decode(errors="replace").splitlines()]
    hashes = {match[2]: match[1] for match in matches if match}
    if len(hashes) != len(matches):
        raise _not_a_bundle(file, f"a line of {HASHES} is not a hash and a path, or repeats a path")
    if hashlib.sha256(raw).hexdigest() != hashes.get(MANIFEST):
        message = f"{MANIFEST} in the bundle is damaged"
        raise BundleError(message, code="bundle-damaged", where=str(file), fix=_AGAIN)
    return Bundle(file.absolute(), _manifest(raw, file), hashes, hashlib.sha256(listed).hexdigest())


def _read_next(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.next()
    if member is None or member.name != name or member.size > _LONGEST:
        raise tarfile.ReadError(f"{name} is not at its place in the archive")
    return _content(archive, member).read()


def _manifest(raw: bytes, file: Path) -> Manifest:
    try:
        head = _Head.model_validate_json(raw)
        if head.format != FORMAT:
            message = (
                f"the bundle has format {head.format}, but this clusterctl reads format {FORMAT}"
            )
            reason = f"it was created by clusterctl {head.clusterctl}"
            fix = "install that version of clusterctl, or create the bundle again with this version"
            raise BundleError(message, code="bundle-format", where=str(file), why=reason, fix=fix)
        return Manifest.model_validate_json(raw)
    except ValidationError as exc:
        first = exc.errors()[0]
        location = ".".join(map(str, first["loc"]))
        raise _not_a_bundle(
            file, f"{MANIFEST}: {location + ': ' if location else ''}{first['msg']}"
        ) from exc


@contextmanager
def _open_tar(file: Path) -> Iterator[tarfile.TarFile]:
    """Open a bundle. Raises BundleError if it is no tar, or lacks a file that the `with` block
    reads.
    """
    try:
        with tarfile.open(file, "r:") as archive:
            yield archive
    except (tarfile.TarError, KeyError) as exc:
        raise _not_a_bundle(file, str(exc)) from exc


def _not_a_bundle(file: Path, reason: str) -> BundleError:
    message = "this file is not a bundle of clusterctl"
    return BundleError(message, code="not-a-bundle", where=str(file), why=reason, fix=_AGAIN)


def reject_defects(file: Path, defects: Sequence[Failure]) -> None:
    """Raise a BundleError that lists all defects, if there are any."""
    if not defects:
        return
    causes = first_few([defect.cause for defect in defects], most=10)
    fix = defects[-1].fix
    details: dict[str, Any] = {
        "where": str(file),
        "why": causes,
        "fix": fix,
        "failures": tuple(defects),
    }
    if all(defect.code == MISMATCH for defect in defects):
        raise BundleError("the bundle does not fit this cluster", code="bundle-mismatch", **details)
    raise BundleError("the bundle is damaged", code="bundle-damaged", **details)


def damages(bundle: Bundle) -> tuple[Failure, ...]:
    """Read the whole bundle. Return a failure for each file that is missing or differs from
    SHA256SUMS.
    """
    hashes = {HASHES: bundle.digest, **bundle.hashes}
    corrupted = []
    with _open_tar(bundle.file) as archive, suppress(tarfile.ReadError):
        for member in archive:
            # Duplicate files and files that are not listed have no hash here.
            if not _is_plain(member) or _sha256(_content(archive, member)) != hashes.get(
                member.name
            ):
                corrupted.append(member.name)
            hashes.pop(member.name, None)
    corruption = f"the file does not match its hash in {HASHES}"
    absence = "the file is missing, perhaps because the bundle was truncated"
    return (
        *(
            Failure("bundle-corrupted", f"{printable(name)}: {corruption}", fix=_AGAIN)
            for name in corrupted
        ),
        *(Failure("bundle-missing", f"{name}: {absence}", fix=_AGAIN) for name in hashes),
    )


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.isreg() and not member.issparse()


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> io.BufferedReader:
    content = archive.extractfile(member) if _is_plain(member) else None
    if not isinstance(content, io.BufferedReader):
        raise tarfile.ReadError(f"{printable(member.name)} is not a plain file")
    return content


def write_bundle(target: Path, manifest: Manifest, sources: Mapping[str, Path | bytes]) -> None:
    """Write a bundle of ``sources`` (path -> file or content). It is renamed to ``target`` once
    checked.

    Raise a MachineError if the file can't be written, or a BundleError if a source file changed
    meanwhile.
    """
    raw = manifest.model_dump_json(indent=1).encode() + b"\n"
    files: dict[str, Path | bytes] = {
        MANIFEST: raw,
        **{path: sources[path] for path in sorted(sources)},
    }
    hashes = "".join(f"{_sha256(source)}  {path}\n" for path, source in files.items()).encode()
    files = {MANIFEST: raw, HASHES: hashes, **files}
    with translating_write_errors(target), temporary_folder(target.parent) as folder:
        whole = folder / target.name
        with whole.open("wb") as file:
            file.writelines(_tar(starmap(_source, files.items())))
        reject_defects(target, damages(open_bundle(whole)))
        whole.replace(target)


def _tar(files: Iterable[tuple[str, int, Iterable[bytes]]]) -> Iterator[bytes]:
    """Yield the bytes of a tar of plain files, given as (name, size, content). Same files give same
    bytes.
    """
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
    """Return whether a bundle for this spec needs CuPy: the spec has nodes with GPUs, and asks for
    CuPy.
    """
    return spec.software.cupy and any(partition.gpus for partition in spec.partitions)


def mismatches(
    bundle: Bundle, spec: ClusterSpec | None, releases: Collection[str] = ()
) -> tuple[Failure, ...]:
    """Return mismatches of a bundle with this clusterctl, the spec, or hosts of ``releases``
    (debian-12).
    """
    manifest = bundle.manifest
    differences = [*_clusterctl_mismatches(manifest)]
    reason = f"the bundle only has packages for {', '.join(manifest.systems)}"
    differences += [(release, reason) for release in releases if release not in manifest.systems]
    for release, system in manifest.systems.items():
        if not releases or release in releases:
            differences += [
                (release, reason) for reason in _system_mismatches(release, system, spec)
            ]
    fix = (
        "create a matching bundle with `clusterctl bundle create`, with the same version of "
        "clusterctl"
    )
    return tuple(
        Failure("bundle-mismatch", f"the bundle does not match {subject}: {reason}", fix=fix)
        for subject, reason in differences
    )


def _clusterctl_mismatches(manifest: Manifest) -> Iterator[tuple[str, str]]:
    if manifest.clusterctl != __version__:
        yield (
            "clusterctl",
            f"the bundle is from version {manifest.clusterctl}, but this is {__version__}",
        )
    if manifest.architecture != ARCHITECTURE:
        yield (
            "architecture",
            f"the bundle is for {manifest.architecture}, but the hosts have {ARCHITECTURE}",
        )


def _system_mismatches(release: str, system: System, spec: ClusterSpec | None) -> Iterator[str]:
    if lacking := _needed_packages(release, spec) - set(system.asked):
        yield f"the bundle lacks the packages {first_few(sorted(lacking), most=5)}"
    if system.base != digest(job_lock().read_bytes()):
        yield "the wheels of the job environment are from another version of clusterctl"
    if system.gpu_base not in (None, digest(gpu_lock().read_bytes())):
        yield "CuPy and CUDA's libraries are from another version of clusterctl"
    elif spec is not None and asks_for_cupy(spec) and not system.gpu:
        yield "the spec has GPUs, but the bundle has no CuPy"
    requirements = spec.software.python.requirements if spec is not None else None
    if requirements is not None and system.requirements != content_hash((requirements,)):
        other = "for other requirements" if system.requirements else "without requirements"
        yield f"{requirements} requires Python packages, but the bundle was created {other}"


def _needed_packages(release: str, spec: ClusterSpec | None) -> set[str]:
    """Return OS packages that a bundle needs for a release (debian-12) and a spec (None: for every
    spec).
    """
    try:
        distribution = distribution_of(release)
    except ProvisionError:
        # Unknown distributions can't be configured, so they need no packages.
        return set()
    if spec is not None:
        return set(asked_packages(distribution, spec.software))
    openhpc = Software.model_validate({"slurm": {"from": "openhpc"}})
    return set(package_names(distribution)) & set(package_names(distribution, openhpc))


class Remembered(BaseModel):
    """The record of a cluster's bundle: its path, and its size and mtime when it was last checked
    in full.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    file: Path
    digest: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, bundle: Bundle) -> Remembered:
        stat = bundle.file.stat()
        return cls(
            file=bundle.file, digest=bundle.digest, size=stat.st_size, mtime_ns=stat.st_mtime_ns
        )


def cluster_bundle(workspace: Workspace) -> Remembered | None:
    """Return the bundle that the cluster's hosts install from; None if hosts use online
    repositories.
    """
    try:
        return Remembered.model_validate_json(workspace.bundle.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def missing_bundle(workspace: Workspace) -> BundleError:
    """Return the error for a bundle file that no longer exists although hosts need its packages."""
    remembered = cluster_bundle(workspace)
    return BundleError(
        "the bundle that this cluster is installed from is missing",
        code="bundle-gone",
        where=str(remembered.file) if remembered else "",
        why="some hosts lack packages, and their own repositories are not used",
        fix="pass the new path: `clusterctl up --bundle FILE`; or use the hosts' own repositories: "
        "`clusterctl up --no-bundle`",
    )


def use_bundle(file: Path, spec: ClusterSpec, workspace: Workspace) -> Bundle:
    """Check a bundle, record it for the cluster, and copy its wheels to the cache.

    An unchanged bundle is checked in full only once. Raise a BundleError if the bundle is damaged
    or does not fit the spec or this clusterctl, or a MachineError if the cache can't be written.
    """
    bundle = open_bundle(file)
    reject_defects(file, mismatches(bundle, spec))
    checked = Remembered.of(bundle)
    if checked != cluster_bundle(workspace):
        reject_defects(file, damages(bundle))
        write_atomic(workspace.bundle, checked.model_dump_json() + "\n")
    _place_wheels(bundle, spec)
    return bundle


def _place_wheels(bundle: Bundle, spec: ClusterSpec) -> None:
    for release, system in bundle.manifest.systems.items():
        node = NodePlatform.of(distribution_of(release))
        for lock, names in ((job_lock(), system.wheels), (gpu_lock(), system.gpu)):
            if names and not has_wheelhouse(lock, node):
                with new_wheelhouse(lock, node) as folder:
                    bundle.copy([f"{WHEELS}/{name}" for name in names], folder)
        if (file := spec.software.python.requirements) is None:
            continue
        # The folder is in the cache, because moving wheels there needs the same file system.
        with cache_of_downloads() as home, temporary_folder(home) as folder:
            lock_file = WHEELS_LOCK.format(release)
            bundle.copy([lock_file], folder)
            text = (folder / PurePosixPath(lock_file).name).read_text()
            missing = [
                wheel for wheel in Lock.read(text, {}).wheels if not wheel_path(wheel).is_file()
            ]
            bundle.copy([f"{WHEELS}/{wheel.file}" for wheel in missing], folder)
            store_lock(Requirements.of_cluster(spec, file, node), text, folder)
